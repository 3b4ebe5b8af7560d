/* kernels.c: each kernel alone, through the same contract that forward.c uses, on weights larger than the caches. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

/* The shape of an 8B model: gate and up stacked, and its attention. */
enum { LAYER_ROWS = 2 * 14336, WIDTH = 4096, HEADS = 32, KV_HEADS = 8, HEAD = 128, CONTEXT = 4096, MAX_ROWS = ENGINE_MAX_KERNEL_ROWS };
enum { MAX_RUNS = 15 };
static const double ENOUGH_SECONDS = 0.4;

struct bench {
    struct backend *be;
    struct backend_limits limits;
    float *x, *out; /* dev */
    const int *rows;
    int n_rows;
    engine_kernel_fn *seen;
    void *user;
};

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct call {
    const struct linear_args *linear;
    const struct attend_args *attend;
};

static void run(struct backend *be, const struct call *k)
{
    if (k->linear) be->ops->linear(be, k->linear);
    else be->ops->attend(be, k->attend);
}

static int time_once(struct bench *b, const struct call *k, double *seconds, struct err *e)
{
    double start = clock_now();
    run(b->be, k);
    TRY(b->be->ops->sync(b->be, e));
    *seconds = clock_now() - start;
    return OK;
}

/* The median of some runs, after one that is not counted unless it is long. */
static int time_call(struct bench *b, const struct call *k, struct kernel_time *t, struct err *e)
{
    const struct backend_ops *op = b->be->ops;
    double seconds[MAX_RUNS], all = 0;
    int n = 0;
    struct backend_stats before = op->stats(b->be), after;
    TRY(time_once(b, k, &seconds[0], e));
    after = op->stats(b->be);
    if (seconds[0] > ENOUGH_SECONDS) n = 1;
    while (n < MAX_RUNS && (n == 0 || all < ENOUGH_SECONDS) && seconds[0] <= ENOUGH_SECONDS) {
        TRY(time_once(b, k, &seconds[n], e));
        all += seconds[n++];
    }
    qsort(seconds, (size_t)n, sizeof *seconds, by_size);
    t->seconds = seconds[n / 2];
    t->device = b->be->name;
    t->work = backend_stats_minus(after, &before);
    b->seen(b->user, t, &b->limits);
    return OK;
}

/* One sequence of `rows` rows, or `rows` sequences of one row, that end at position `last`. All share their pages. */
static void begin(struct backend *be, int rows, bool prompt, int last)
{
    static const int32_t ids[MAX_ROWS];
    static int32_t begin_at[MAX_ROWS + 1], pos0[MAX_ROWS], pages[MAX_ROWS * (CONTEXT / KV_PAGE)];
    const int per = CONTEXT / KV_PAGE;
    int n = prompt ? 1 : rows;
    for (int s = 0; s < n; s++) {
        begin_at[s + 1] = prompt ? rows : s + 1;
        pos0[s] = prompt ? last - rows + 1 : last;
        for (int i = 0; i < per; i++) pages[s * per + i] = i;
    }
    be->ops->begin(be, &(struct batch){.T = rows, .n_seqs = n, .ids = ids, .seq_begin = begin_at, .pos0 = pos0,
                                       .pages = pages, .max_pages = per});
}

static int time_format(struct bench *b, enum dtype type, struct err *e)
{
    char spec[64], name[48];
    struct model *m = NULL;
    struct bweight *w = NULL;
    snprintf(spec, sizeof spec, "llama-3.1-8b:%s:layers=1", dtype_infos[type].name);
    snprintf(name, sizeof name, "linear %s", dtype_infos[type].name);
    TRY(b->be->ops->limits(b->be, &b->limits, e)); /* anew: other users of the machine come and go */
    TRY(model_synthetic(&m, spec, e));
    const struct dmat parts[] = {model_mat(m, ROLE_GATE, 0, 0), model_mat(m, ROLE_UP, 0, 0)};
    int rc = b->be->ops->weight_new(b->be, &w, parts, COUNT_OF(parts), NULL, e);
    for (int i = 0; i < b->n_rows && rc == OK; i++) {
        struct kernel_time t = {.kernel = name, .rows = b->rows[i]};
        struct linear_args a = {.out = b->out, .x = b->x, .T = t.rows, .w = w};
        begin(b->be, t.rows, false, 0);
        rc = time_call(b, &(struct call){.linear = &a}, &t, e);
    }
    b->be->ops->weight_free(b->be, w);
    model_close(&m);
    return rc;
}

/* Sequences of one row each, and one prompt of as many rows, that end at the last position. */
static int time_attention(struct bench *b, struct err *e)
{
    struct bkv *kv;
    int rc = OK;
    TRY(b->be->ops->limits(b->be, &b->limits, e));
    TRY(b->be->ops->kv_new(b->be, &kv, 1, CONTEXT / KV_PAGE, KV_HEADS, HEAD, e));
    struct rope_kv_args fill = {.qkv = b->x, .inv_freq = b->x, .mscale = 1, .H = HEADS, .Hk = KV_HEADS, .Dh = HEAD, .kv = kv};
    for (int last = MAX_ROWS - 1; last < CONTEXT; last += MAX_ROWS) {
        begin(b->be, MAX_ROWS, true, last);
        b->be->ops->rope_kv(b->be, &fill);
    }
    for (int i = 0; i < 2 * b->n_rows && rc == OK; i++) {
        bool prompt = i % 2;
        struct kernel_time t = {.kernel = prompt ? "attend prompt" : "attend decode", .rows = b->rows[i / 2],
                                .context = CONTEXT};
        struct attend_args a = {.out = b->out, .qkv = b->x, .scale = 0.0883883f, .H = HEADS, .Hk = KV_HEADS, .Dh = HEAD,
                                .kv = kv};
        begin(b->be, t.rows, prompt, CONTEXT - 1);
        rc = time_call(b, &(struct call){.attend = &a}, &t, e);
    }
    b->be->ops->kv_free(b->be, kv);
    return rc;
}

static int time_backend(struct bench *b, struct err *e)
{
    const struct backend_ops *op = b->be->ops;
    size_t wide = (HEADS + 2 * KV_HEADS) * HEAD, n = MAX_ROWS * wide;
    float *host;
    TRY(op->alloc(b->be, &b->x, n * sizeof *b->x, e));
    TRY(op->alloc(b->be, &b->out, (size_t)MAX_ROWS * LAYER_ROWS * sizeof *b->out, e));
    TRY(mem_new(&host, n * sizeof *host, e));
    for (size_t i = 0; i < n; i++) host[i] = (float)((i * 2654435761u >> 8) & 1023) / 512 - 1;
    op->upload(b->be, b->x, host, n * sizeof *host);
    int rc = op->sync(b->be, e);
    free(host);
    TRY(rc);
    for (enum dtype t = DT_F32; t < DT_MXFP4_GGUF; t++) TRY(time_format(b, t, e));
    return time_attention(b, e);
}

static int time_device(const struct bench *as, const struct backend_opts *o, struct err *e)
{
    struct bench b = *as;
    TRY(backend_open(&b.be, o, e));
    int rc = time_backend(&b, e);
    b.be->ops->free(b.be, b.x);
    b.be->ops->free(b.be, b.out);
    backend_close(&b.be);
    return rc;
}

/* Whether o opens a device that this machine has, and which kind. */
static bool opens(const struct backend_opts *o, bool *cpu)
{
    struct backend *be;
    if (backend_open(&be, o, NULL) < 0) return false;
    *cpu = !strncmp(be->name, "cpu", 3);
    backend_close(&be);
    return true;
}

int engine_time_kernels(const struct backend_opts *o, const int *rows, int n_rows, engine_kernel_fn *seen, void *user,
                        struct err *e)
{
    static const char *const levels[] = {"avx2", "avx512", "avx512bf16", "neon", "neonmm"};
    const struct bench b = {.rows = rows, .n_rows = n_rows, .seen = seen, .user = user};
    bool cpu = false, any = false;
    if (o->cpu_level || !opens(o, &cpu) || !cpu) return time_device(&b, o, e);
    for (size_t i = 0; i < COUNT_OF(levels); i++) {
        struct backend_opts level = *o;
        level.cpu_level = levels[i];
        if (!opens(&level, &cpu)) continue; /* this machine lacks it */
        TRY(time_device(&b, &level, e));
        any = true;
    }
    return any ? OK : time_device(&b, o, e);
}
