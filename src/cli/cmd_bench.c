/* cmd_bench.c: hearth bench: prefill and decode at each batch size, every figure beside what the machine could do, which is
 * measured in the same run. The time a step could not go below is its bytes over the read bandwidth, or its operations
 * over the rate of the unit that does them, whichever is longer: that one is the row's ceiling, and its share of the
 * time measured is how much of the machine was used. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_BATCHES = 64, MAX_BATCH = 1024, MAX_REPEAT = 99, LEAST_CHUNK = 256 };

struct measured {
    double seconds;
    struct backend_stats work;
};

struct bench {
    struct engine *en;
    struct backend_limits limits;
    int64_t pp, tg, repeat;
    int64_t chunk;
    uint64_t seed;
    int32_t *ids; /* [largest batch][pp] */
    json_t *rows; /* NULL: a table is printed */
};

/* ------------------------------------------------------------------------------------------------ ceilings */

struct ceiling {
    const char *name;
    double gb_s, gop_s, share;
};

static struct ceiling ceiling_of(const struct measured *m, const struct backend_limits *l)
{
    double bytes = (double)(m->work.weight_bytes + m->work.kv_bytes), ops = 0, busy = 0, most = 0;
    struct ceiling c = {.name = "read"};
    double floor = bytes / l->read_gb_s / 1e9;
    const char *unit = "";
    for (int i = 0; i < l->n_units; i++) {
        double s = (double)m->work.ops[i] / l->unit[i].gop_s / 1e9;
        ops += (double)m->work.ops[i];
        busy += s;
        if (s > most) most = s, unit = l->unit[i].name;
    }
    if (busy > floor) floor = busy, c.name = unit;
    c.gb_s = bytes / m->seconds / 1e9;
    c.gop_s = ops / m->seconds / 1e9;
    c.share = floor / m->seconds;
    return c;
}

static int print_limits(const char *device, const struct backend_limits *l, struct err *e)
{
    printf("%s: reads %.1f GB/s", device, l->read_gb_s);
    for (int i = 0; i < l->n_units; i++) printf(", %s %.0f GOP/s", l->unit[i].name, l->unit[i].gop_s);
    printf(" (measured now)\n");
    return out_flush(e);
}

static json_t *limits_json(const char *device, const struct backend_limits *l, int64_t threads)
{
    json_t *peaks = json_object();
    for (int i = 0; i < l->n_units; i++) json_object_set_new(peaks, l->unit[i].name, json_real(l->unit[i].gop_s));
    return json_pack("{s:s, s:I, s:f, s:o}", "device", device, "threads", (json_int_t)threads, "read_gb_s", l->read_gb_s,
                     "peaks", peaks);
}

/* ------------------------------------------------------------------------------------------------ one row */

static int report(struct bench *b, const char *phase, int batch, int64_t tokens, const struct measured *m, struct err *e)
{
    struct ceiling c = ceiling_of(m, &b->limits);
    double tok_s = (double)tokens * batch / m->seconds;
    if (b->rows) {
        json_array_append_new(b->rows, json_pack("{s:s, s:i, s:I, s:f, s:f, s:f, s:s, s:f}", "phase", phase, "batch",
                                                 batch, "tokens", (json_int_t)tokens, "tok_s", tok_s, "gb_s", c.gb_s,
                                                 "gop_s", c.gop_s, "ceiling", c.name, "share", c.share));
        return OK;
    }
    printf("%-8s %6d %7lld %10.1f %8.1f %9.1f   %-8s %4.0f %%\n", phase, batch, (long long)tokens, tok_s, c.gb_s,
           c.gop_s, c.name, 100 * c.share);
    return out_flush(e);
}

/* Prompts that share no beginning: a prefix found in the cache would not be computed. */
static void new_prompts(struct bench *b, int batch)
{
    uint64_t vocab = (uint64_t)engine_config(b->en)->n_vocab;
    for (int64_t i = 0; i < batch * b->pp; i++) {
        b->seed = b->seed * 6364136223846793005u + 1442695040888963407u;
        b->ids[i] = (int32_t)((b->seed >> 33) % vocab);
    }
}

static int submit(struct bench *b, int batch, int max_new, uint64_t *request, struct err *e)
{
    for (int s = 0; s < batch; s++) {
        struct request r = {.ids = b->ids + s * b->pp, .n_ids = (size_t)b->pp, .max_new = max_new};
        TRY(engine_submit(b->en, &r, &request[s], e));
    }
    return OK;
}

/* A step, and its events: how many sequences got their first token goes to *begun. Gives 1 while work remains. */
static int step(struct bench *b, uint64_t first, int *produced, int *begun, struct err *e)
{
    struct event ev;
    int more = engine_step(b->en, e);
    if (more < 0) return more;
    while (engine_poll(b->en, &ev)) {
        if (ev.kind == EVENT_TOKEN && produced[ev.request - first]++ == 0) ++*begun;
        if (ev.kind == EVENT_DONE && ev.finish == FINISH_ERROR)
            return err_set(e, ERR_INPUT, "the model's logits hold no numbers: its weights are damaged");
    }
    return interrupt_taken() ? err_set(e, ERR_CANCELLED, "interrupted") : more;
}

static int prefill(struct bench *b, int batch, struct measured *m, struct progress *p, struct err *e)
{
    uint64_t request[MAX_BATCH];
    int produced[MAX_BATCH] = {0}, begun = 0, more;
    TRY(submit(b, batch, 1, request, e));
    struct engine_stats before = engine_stats(b->en);
    double start = clock_now();
    do {
        uint64_t done = engine_stats(b->en).prompt_tokens;
        TRY(more = step(b, request[0], produced, &begun, e));
        progress_add(p, (size_t)(engine_stats(b->en).prompt_tokens - done));
    } while (more);
    m->seconds = clock_now() - start;
    m->work = backend_stats_minus(engine_stats(b->en).device, &before.device);
    return OK;
}

/* Steps that the prompts of `batch` sequences take when all but their last page is in the cache. */
static int warm_steps(int batch) { return batch * KV_PAGE / LEAST_CHUNK + 2; }

static int decode(struct bench *b, int batch, struct measured *m, struct progress *p, struct err *e)
{
    uint64_t request[MAX_BATCH];
    int produced[MAX_BATCH] = {0}, begun = 0, more = 1;
    TRY(submit(b, batch, (int)b->tg + warm_steps(batch), request, e));
    while (begun < batch && more) TRY(more = step(b, request[0], produced, &begun, e));
    struct engine_stats before = engine_stats(b->en);
    double start = clock_now();
    for (int64_t i = 0; i < b->tg; i++) {
        TRY(step(b, request[0], produced, &begun, e));
        progress_add(p, (size_t)batch);
    }
    m->seconds = clock_now() - start;
    struct engine_stats after = engine_stats(b->en);
    m->work = backend_stats_minus(after.device, &before.device);
    if (after.new_tokens - before.new_tokens != (uint64_t)(b->tg * batch))
        return err_set(e, ERR_INPUT, "%llu tokens came from %lld steps of %d sequences: the run is not what was asked",
                       (unsigned long long)(after.new_tokens - before.new_tokens), (long long)b->tg, batch);
    for (int s = 0; s < batch; s++) engine_cancel(b->en, request[s]);
    do TRY(more = step(b, request[0], produced, &begun, e));
    while (more);
    return OK;
}

static int by_seconds(const void *x, const void *y)
{
    const struct measured *a = x, *b = y;
    return a->seconds < b->seconds ? -1 : a->seconds > b->seconds;
}

static int run_batch(struct bench *b, int batch, struct err *e)
{
    struct measured in[MAX_REPEAT], out[MAX_REPEAT];
    struct progress p;
    char what[32];
    int rc = OK, n = (int)b->repeat;
    snprintf(what, sizeof what, "batch %d", batch);
    progress_start(&p, what, "tokens", (size_t)(n * batch) * (size_t)(b->pp + b->tg));
    for (int i = 0; i < n && rc == OK; i++) {
        new_prompts(b, batch);
        rc = prefill(b, batch, &in[i], &p, e);
        if (rc == OK && b->tg) rc = decode(b, batch, &out[i], &p, e);
    }
    progress_end(&p);
    TRY(rc);
    qsort(in, (size_t)n, sizeof *in, by_seconds);
    TRY(report(b, "prefill", batch, b->pp, &in[n / 2], e));
    if (!b->tg) return OK;
    qsort(out, (size_t)n, sizeof *out, by_seconds);
    return report(b, "decode", batch, b->tg, &out[n / 2], e);
}

/* ------------------------------------------------------------------------------------------------ the model's bench */

struct batches {
    int of[MAX_BATCHES], n, largest;
};

static int parse_batches(struct batches *out, const char *list, int most, struct err *e)
{
    struct ids ids = {0};
    int rc = parse_ids(&ids, "--batch", list, e);
    if (rc == OK && (ids.len == 0 || ids.len > MAX_BATCHES))
        rc = err_set(e, ERR_INPUT, "--batch '%s' names %zu sizes: 1 to %d are possible", list, ids.len, MAX_BATCHES);
    for (size_t i = 0; i < ids.len && rc == OK; i++) {
        if (ids.id[i] < 1 || ids.id[i] > most)
            rc = err_set(e, ERR_INPUT, "--batch %d is out of range 1 to %d", ids.id[i], most);
        out->of[out->n++] = ids.id[i];
        if (ids.id[i] > out->largest) out->largest = ids.id[i];
    }
    ids_free(&ids);
    return rc;
}

static int bench_model(struct bench *b, const struct model *m, const struct batches *sizes, const struct engine_opts *backend,
                       struct err *e)
{
    struct engine_opts o = *backend;
    int64_t most = model_config(m)->ctx_train, need = b->pp + b->tg + warm_steps(sizes->largest);
    int rc;
    if (need > most)
        return err_set(e, ERR_INPUT, "--pp %lld and --tg %lld need %lld positions, the model was made for %lld: choose less",
                       (long long)b->pp, (long long)b->tg, (long long)need, (long long)most);
    o.chunk = (int)b->chunk;
    o.max_seqs = sizes->largest;
    o.ctx = (int)need;
    o.kv_tokens = (size_t)sizes->largest * size_round_up((size_t)o.ctx, KV_PAGE);
    TRY(engine_open(&b->en, m, &o, e));
    if ((rc = engine_limits(b->en, &b->limits, e)) < 0) return rc;
    if (!b->rows) {
        printf("%s, %.2f GB\n", model_name(m), (double)model_bytes(m) / 1e9);
        TRY(print_limits(engine_device(b->en), &b->limits, e));
        printf("phase     batch  tokens      tok/s     GB/s     GOP/s   ceiling   share\n");
    }
    TRY(mem_new(&b->ids, (size_t)(sizes->largest * b->pp) * sizeof *b->ids, e));
    for (int i = 0; i < sizes->n; i++) TRY(run_batch(b, sizes->of[i], e));
    return OK;
}

/* ------------------------------------------------------------------------------------------------ kernels */

struct kernel_list {
    json_t *rows;
    struct buf last; /* the device of the row before */
};

static void kernel_seen(void *user, const struct kernel_time *t, const struct backend_limits *l)
{
    struct kernel_list *k = user;
    struct measured m = {t->seconds, t->work};
    struct ceiling c = ceiling_of(&m, l);
    bool new_device = !k->last.len || strcmp(k->last.data, t->device) != 0;
    if (k->rows) {
        json_array_append_new(k->rows, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:f, s:s, s:f}", "device", t->device,
                                                 "kernel", t->kernel, "rows", t->rows, "context", t->context, "ms",
                                                 1e3 * t->seconds, "gb_s", c.gb_s, "gop_s", c.gop_s, "ceiling", c.name,
                                                 "share", c.share));
        return;
    }
    if (new_device) {
        k->last.len = 0;
        if (buf_appendf(&k->last, "%s", t->device) < 0) k->last.len = 0;
        print_limits(t->device, l, NULL);
        printf("kernel           rows  context        ms     GB/s     GOP/s   ceiling   share\n");
    }
    printf("%-15s %5d  %7d %9.3f %8.1f %9.1f   %-8s %4.0f %%\n", t->kernel, t->rows, t->context, 1e3 * t->seconds, c.gb_s,
           c.gop_s, c.name, 100 * c.share);
    fflush(stdout);
}

static int bench_kernels(const struct backend_opts *o, const struct batches *sizes, bool json, struct err *e)
{
    struct kernel_list k = {.rows = json ? json_array() : NULL};
    int rc = engine_time_kernels(o, sizes->of, sizes->n, kernel_seen, &k, e);
    buf_free(&k.last);
    if (!json) return rc < 0 ? rc : out_flush(e);
    if (rc < 0) json_decref(k.rows);
    return rc < 0 ? rc : out_json(json_pack("{s:o}", "kernels", k.rows), JSON_INDENT(1), e);
}

/* ------------------------------------------------------------------------------------------------ the verb */

static int open_model(struct model **out, const char *model, const char *synthetic, struct err *e)
{
    struct buf path = {0};
    if (model && synthetic)
        return err_set(e, ERR_INPUT, "MODEL %s and --synthetic %s: one of them", model, synthetic);
    if (!model && !synthetic)
        return err_set(e, ERR_INPUT, "MODEL is missing: hearth bench MODEL, or --synthetic llama-3.1-8b:q8_0, or "
                                     "--kernels; see hearth bench --help");
    if (synthetic) return model_synthetic(out, synthetic, e);
    int rc = resolve_model(&path, model, e);
    if (rc == OK) rc = model_open(out, path.data, e);
    buf_free(&path);
    return rc;
}

int cmd_bench(int argc, char **argv, struct err *e)
{
    const char *operand = NULL, *list = NULL, *synthetic = NULL, *cpu = NULL, *device = DEVICE_DEFAULT;
    int64_t threads = 0;
    bool json = false, kernels = false;
    struct bench b = {.pp = 512, .tg = 128, .repeat = 1, .seed = 1};
    struct batches sizes = {0};
    struct model *m = NULL;
    const struct flag flags[] = {
        {"batch", 'b', FLAG_TEXT, &list, 0, 0, "LIST", "sequences (kernels: rows) at once (default: 1,8,64; kernels: and 512)"},
        {"pp", 0, FLAG_INT, &b.pp, 1, MAX_CTX / 4, "N", "prompt tokens of each sequence (default: 512)"},
        {"tg", 0, FLAG_INT, &b.tg, 0, MAX_CTX / 4, "N", "tokens to generate after them (default: 128)"},
        {"repeat", 'r', FLAG_INT, &b.repeat, 1, MAX_REPEAT, "N", "runs of each row; the median is shown (default: 1)"},
        {"synthetic", 0, FLAG_TEXT, &synthetic, 0, 0, "SPEC", "SHAPE:FORMAT[:layers=N], random weights and no file"},
        {"kernels", 0, FLAG_SWITCH, &kernels, 0, 0, NULL, "each kernel alone: on the GPU, or on every CPU level here"},
        {"chunk", 0, FLAG_INT, &b.chunk, LEAST_CHUNK, 65536, "N", "tokens of a step at most (default: what suits the device)"},
        FLAG_THREADS(&threads),
        FLAG_CPU(&cpu),
        FLAG_DEVICE(&device),
        {"json", 0, FLAG_SWITCH, &json, 0, 0, NULL, "print one JSON object"},
    };
    const struct usage u = {
        "bench",
        "Measures prefill and decode at each batch size beside the ceilings of this machine.",
        "[MODEL]",
        flags,
        COUNT_OF(flags),
        "Ceilings are measured in the same run: bytes read over the read bandwidth, or operations over the rate of\n"
        "the unit that does them. The longer of the two times is what a step cannot go below; share is that time over\n"
        "the time measured.\n"
        "Shapes of --synthetic: gpt-oss-120b gpt-oss-20b llama-3.1-8b llama-3.2-1b tinyllama-1.1b\n"
        "mistral-small-3.1-24b qwen3-coder-30b-a3b; formats: those of checkpoints, such as bf16 fp8 mxfp4 q8_0 q4_k.\n",
        "  hearth bench model.gguf\n"
        "  hearth bench checkpoint/ --batch 1,4,16 --pp 1024 --tg 64 --json\n"
        "  hearth bench --synthetic gpt-oss-20b:mxfp4:layers=4 --batch 1\n"
        "  hearth bench --kernels --cpu avx2 --batch 1,64\n"};
    int rc = flags_parse(&u, argc, argv, &operand, e);
    if (rc) return rc < 0 ? rc : OK;
    struct engine_opts o = {.backend = {.device = device, .threads = (int)threads, .cpu_level = cpu}};
    if (kernels && (operand || synthetic))
        return err_set(e, ERR_INPUT, "--kernels takes no model: '%s' is too much", operand ? operand : synthetic);
    if (!list) list = kernels ? "1,8,64,512" : "1,8,64";
    TRY(parse_batches(&sizes, list, kernels ? ENGINE_MAX_KERNEL_ROWS : MAX_BATCH, e));
    if (kernels) return bench_kernels(&o.backend, &sizes, json, e);
    interrupt_catch(true);
    TRY(open_model(&m, operand, synthetic, e));
    if (json) b.rows = json_array();
    rc = bench_model(&b, m, &sizes, &o, e);
    if (rc == OK && json) {
        json_t *machine = limits_json(engine_device(b.en), &b.limits, threads ? threads : machine_cores());
        rc = out_json(json_pack("{s:s, s:o, s:O}", "model", model_name(m), "machine", machine, "rows", b.rows),
                      JSON_INDENT(1), e);
    }
    json_decref(b.rows);
    free(b.ids);
    engine_close(&b.en);
    model_close(&m);
    return rc;
}
