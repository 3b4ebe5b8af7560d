/* cpu_attend.c: RoPE, the KV pages and attention over them. One task is some rows of a sequence and one KV head: it walks
 * their context page by page with an online softmax, for all query heads that share the KV head, and each page is read
 * once for all of them. What is computed for a row depends on the row alone, page by page and key by key in ascending
 * order, so neither the batch nor the chunking of a prompt changes a bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend_priv.h"
#include "cpu_priv.h"

enum { MAX_DH = 256 };

/* ------------------------------------------------------------------------------------------------ pages */

size_t cpu_kv_page_bytes(const struct backend *be, int n_layers, int Hk, int Dh)
{
    (void)be;
    return (size_t)n_layers * 2 * (size_t)Hk * KV_PAGE * (size_t)Dh * sizeof(uint16_t);
}

int cpu_kv_new(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e)
{
    size_t half = cpu_kv_page_bytes(be, n_layers, Hk, Dh) / 2, bytes;
    struct bkv *kv;
    if (!size_mul(half, (size_t)n_pages, &bytes))
        return err_set(e, ERR_NOMEM, "%d KV pages of %zu bytes are too many", n_pages, 2 * half);
    if (Dh > MAX_DH || Dh % 2)
        return err_set(e, ERR_UNSUPPORTED, "head width %d: even widths up to %d are supported", Dh, MAX_DH);
    TRY(mem_new(&kv, sizeof *kv, e));
    *kv = (struct bkv){.n_layers = n_layers, .n_pages = n_pages, .Hk = Hk, .Dh = Dh};
    int rc = mem_new_aligned(&kv->k, bytes + 32, e); /* the last value may be read 16 at a time */
    if (rc == OK) rc = mem_new_aligned(&kv->v, bytes + 32, e);
    if (rc < 0) {
        cpu_kv_free(be, kv);
        return rc;
    }
    *out = kv;
    return OK;
}

void cpu_kv_free(struct backend *be, struct bkv *kv)
{
    (void)be;
    if (!kv) return;
    mem_free_aligned(kv->k);
    mem_free_aligned(kv->v);
    free(kv);
}

/* Offset of the block of one layer, page and head in k and in v. */
static size_t block_at(const struct bkv *kv, int layer, int32_t page, int head)
{
    size_t index = ((size_t)layer * (size_t)kv->n_pages + (size_t)page) * (size_t)kv->Hk + (size_t)head;
    return index * KV_PAGE * (size_t)kv->Dh;
}

static int32_t page_of(const struct cpu *c, int row, int32_t pos)
{
    return c->pages[(size_t)c->row_seq[row] * (size_t)c->max_pages + (size_t)(pos / KV_PAGE)];
}

/* ------------------------------------------------------------------------------------------------ rope */

static void rotate(float *x, const float *cos_sin, int Dh, bool interleaved)
{
    int half = Dh / 2, step = interleaved ? 1 : half;
    for (int i = 0; i < half; i++) {
        float *a = interleaved ? x + 2 * i : x + i, *b = a + step;
        float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], p = *a, q = *b;
        *a = p * c - q * s;
        *b = q * c + p * s;
    }
}

struct rope_job {
    struct cpu *c;
    const struct rope_kv_args *a;
};

static void rope_row(struct cpu *c, const struct rope_kv_args *a, int t)
{
    int Dh = a->Dh, half = Dh / 2;
    int32_t pos = c->row_pos[t], page = page_of(c, t, pos);
    float *row = a->qkv + (size_t)t * (size_t)(a->H + 2 * a->Hk) * (size_t)Dh;
    float *cos_sin = c->rope + (size_t)t * (size_t)Dh;
    if (!c->rope_ready)
        for (int i = 0; i < half; i++) {
            float angle = (float)pos * a->inv_freq[i];
            cos_sin[2 * i] = cosf(angle) * a->mscale;
            cos_sin[2 * i + 1] = sinf(angle) * a->mscale;
        }
    for (int h = 0; h < a->H + a->Hk; h++) {
        float *x = row + h * Dh;
        const float *norm = h < a->H ? a->q_norm : a->k_norm;
        if (norm) c->level.rms_norm(x, x, norm, a->eps, Dh);
        rotate(x, cos_sin, Dh, a->interleaved);
    }
    for (int h = 0; h < a->Hk; h++) {
        size_t at = block_at(a->kv, a->layer, page, h);
        uint16_t half_k[MAX_DH];
        c->level.to_f16(half_k, row + (a->H + h) * Dh, Dh);
        for (int d = 0; d < Dh; d++) a->kv->k[at + (size_t)d * KV_PAGE + (size_t)(pos % KV_PAGE)] = half_k[d];
        c->level.to_f16(a->kv->v + at + (size_t)(pos % KV_PAGE) * (size_t)Dh, row + (a->H + a->Hk + h) * Dh, Dh);
    }
}

static void rope_rows(void *arg, int thread, int n_threads)
{
    struct rope_job *j = arg;
    int64_t t;
    (void)thread, (void)n_threads;
    while ((t = cpu_pool_take(j->c->pool, j->c->T)) >= 0) rope_row(j->c, j->a, (int)t);
}

void cpu_rope_kv(struct backend *be, const struct rope_kv_args *a)
{
    struct cpu *c = (struct cpu *)be;
    if (c->err.code) return;
    if (!cpu_grow(c, &c->rope, &c->rope_cap, (size_t)c->T * (size_t)a->Dh * sizeof(float))) return;
    struct rope_job job = {c, a};
    if (c->T < 4) cpu_pool_run_alone(c->pool, rope_rows, &job);
    else cpu_pool_run(c->pool, rope_rows, &job);
    c->rope_ready = true;
}

/* ------------------------------------------------------------------------------------------------ attention */

/* Queries of a task at most; heads of a row at most; queries from which on a page is widened to float once for all. */
enum { QUERIES = 64, HEADS = 16, WIDE_FROM = 16 };

struct attend_job {
    struct cpu *c;
    const struct attend_args *a;
    int heads, rows;  /* of a task at most */
    int n_blocks, head_chunks;
    float *scratch; /* [threads][task_floats] */
    size_t task_floats;
};

/* One task: query heads [h0, h0 + heads) of the rows [t0, t0 + rows); query i is head i % heads of row i / heads. */
struct task {
    struct cpu *c;
    const struct attend_args *a;
    int t0, rows, h0, heads;
    float *q, *acc;        /* [rows * heads][Dh] */
    float *wide_k, *wide_v; /* a page as float */
    float (*p)[KV_PAGE];   /* [rows * heads] */
    float max[QUERIES], sum[QUERIES], keep[QUERIES];
};

static void range_of(const struct task *k, int row, int32_t *first, int32_t *last)
{
    int32_t window = k->a->window;
    *last = k->c->row_pos[k->t0 + row];
    *first = window > 0 && *last >= window ? *last - window + 1 : 0;
}

/* Queries [i, i + n) over keys [from, to) of a page. */
static void attend_page(struct task *k, int i, int n, const void *keys, const void *values, bool wide, int from, int to)
{
    const struct cpu_level *l = &k->c->level;
    int Dh = k->a->Dh;
    l->score(k->p + i, k->q + i * Dh, n, keys, wide, Dh, k->a->scale);
    l->softmax(k->p + i, n, from, to, k->max + i, k->sum + i, k->keep + i);
    l->mix(k->acc + i * Dh, n, k->keep + i, k->p + i, values, wide, from, to, Dh);
}

static void attend_task(struct task *k)
{
    const struct attend_args *a = k->a;
    int Dh = a->Dh, n = k->rows * k->heads, kv_head = k->h0 / (a->H / a->Hk);
    int32_t first, last, begin, end;
    range_of(k, 0, &begin, &last);
    range_of(k, k->rows - 1, &first, &end);
    for (int i = 0; i < n; i++) {
        int t = k->t0 + i / k->heads, h = k->h0 + i % k->heads;
        memcpy(k->q + i * Dh, a->qkv + ((size_t)t * (size_t)(a->H + 2 * a->Hk) + (size_t)h) * (size_t)Dh,
               (size_t)Dh * sizeof *k->q);
        k->max[i] = a->sinks ? a->sinks[h] : -INFINITY;
        k->sum[i] = a->sinks ? 1 : 0;
    }
    memset(k->acc, 0, (size_t)(n * Dh) * sizeof *k->acc);
    for (int32_t page0 = begin / KV_PAGE * KV_PAGE; page0 <= end; page0 += KV_PAGE) {
        size_t at = block_at(a->kv, a->layer, page_of(k->c, k->t0, page0), kv_head);
        const void *keys = a->kv->k + at, *values = a->kv->v + at;
        bool wide = n >= WIDE_FROM;
        if (wide) {
            k->c->level.from_f16(k->wide_k, keys, KV_PAGE * Dh);
            k->c->level.from_f16(k->wide_v, values, KV_PAGE * Dh);
            keys = k->wide_k, values = k->wide_v;
        }
        /* Whole for all rows: the last row's window has not left it, and the first row has reached its end. */
        if (first <= page0 && last >= page0 + KV_PAGE - 1) {
            attend_page(k, 0, n, keys, values, wide, 0, KV_PAGE);
            continue;
        }
        for (int row = 0; row < k->rows; row++) {
            int32_t from, to;
            range_of(k, row, &from, &to);
            from = from > page0 ? from - page0 : 0;
            to = to - page0 < KV_PAGE ? to - page0 + 1 : KV_PAGE;
            if (from < to) attend_page(k, row * k->heads, k->heads, keys, values, wide, from, to);
        }
    }
    for (int i = 0; i < n; i++) {
        int t = k->t0 + i / k->heads, h = k->h0 + i % k->heads;
        float *out = a->out + ((size_t)t * (size_t)a->H + (size_t)h) * (size_t)Dh;
        for (int d = 0; d < Dh; d++) out[d] = k->acc[i * Dh + d] / k->sum[i];
    }
}

static void attend_some(void *arg, int thread, int n_threads)
{
    struct attend_job *j = arg;
    const struct attend_args *a = j->a;
    struct cpu *c = j->c;
    int group = a->H / a->Hk, per_block = a->Hk * j->head_chunks;
    float *scratch = j->scratch + (size_t)thread * j->task_floats;
    int64_t i;
    (void)n_threads;
    /* Longest contexts last would leave threads idle: rows are taken from the end. */
    while ((i = cpu_pool_take(c->pool, (int64_t)j->n_blocks * per_block)) >= 0) {
        int b = j->n_blocks - 1 - (int)(i / per_block), chunk = (int)(i % j->head_chunks);
        int kv_head = (int)(i / j->head_chunks % a->Hk), h = chunk * j->heads;
        struct task k = {.c = c, .a = a, .t0 = c->blocks[b], .h0 = kv_head * group + h};
        k.rows = (b + 1 < j->n_blocks ? c->blocks[b + 1] : c->T) - k.t0;
        k.heads = group - h < j->heads ? group - h : j->heads;
        k.q = scratch;
        k.acc = k.q + QUERIES * a->Dh;
        k.wide_k = k.acc + QUERIES * a->Dh;
        k.wide_v = k.wide_k + KV_PAGE * a->Dh;
        k.p = (float (*)[KV_PAGE])(void *)(k.wide_v + KV_PAGE * a->Dh);
        attend_task(&k);
    }
}

/* Cuts the batch's rows into blocks of one sequence each. */
static void cut_blocks(struct attend_job *j)
{
    struct cpu *c = j->c;
    j->n_blocks = 0;
    for (int t = 0, begin = 0; t < c->T; t++) {
        bool starts = t == 0 || c->row_seq[t] != c->row_seq[t - 1] || t - begin == j->rows;
        if (!starts) continue;
        begin = t;
        c->blocks[j->n_blocks++] = t;
    }
}

void cpu_attend(struct backend *be, const struct attend_args *a)
{
    struct cpu *c = (struct cpu *)be;
    if (c->err.code) return;
    int group = a->H / a->Hk;
    size_t threads = (size_t)cpu_pool_threads(c->pool);
    struct attend_job job = {.c = c, .a = a, .heads = group < HEADS ? group : HEADS};
    job.rows = QUERIES / job.heads;
    job.head_chunks = (group + job.heads - 1) / job.heads;
    job.task_floats = size_round_up((size_t)(2 * (QUERIES + KV_PAGE) * a->Dh + QUERIES * KV_PAGE), 16);
    if (!cpu_grow(c, &c->blocks, &c->blocks_cap, (size_t)c->T * sizeof *c->blocks) ||
        !cpu_grow(c, &c->tmp, &c->tmp_cap, threads * job.task_floats * sizeof *c->tmp))
        return;
    job.scratch = c->tmp;
    cut_blocks(&job);
    backend_count_attention(&c->stats, UNIT_FP32, c->T, c->row_seq, c->row_pos, a->window, a->H, a->Hk, a->Dh);
    /* One short context is done before another thread would have woken. */
    if (c->T == 1 && c->row_pos[0] < 64) cpu_pool_run_alone(c->pool, attend_some, &job);
    else cpu_pool_run(c->pool, attend_some, &job);
}
