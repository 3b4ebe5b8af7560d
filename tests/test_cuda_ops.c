/* test_cuda_ops: what the CUDA backend does between products (embedding, gather, RoPE, pages, attention, experts) against
 * the CPU backend in plain C. Odd sizes, windows and pages at their borders, sinks, one to sixteen heads a group, many
 * sequences a batch, replayed steps. Outputs are poisoned and guarded, pages are full of NaN before. Without a GPU it
 * says so and passes. With --time it measures attention instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend.h"

enum { GUARD = 64 };

static struct backend *gpu, *cpu;

static uint64_t seed = 1;
static uint64_t next_random(void)
{
    uint64_t z = (seed += 0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}
static float noise(void) { return (float)(int32_t)(next_random() >> 32) * 0x1p-31f; }

static void *must_alloc(size_t bytes)
{
    void *p;
    struct err e;
    if (mem_new(&p, bytes + 1, &e) < 0) fail_msg("%s", e.msg);
    return p;
}

static float *floats(size_t n, float scale)
{
    float *p = must_alloc(n * sizeof *p);
    for (size_t i = 0; i < n; i++) p[i] = scale * noise();
    return p;
}

static float *bf16_floats(size_t n)
{
    float *p = floats(n, 1);
    for (size_t i = 0; i < n; i++) p[i] = bf16_to_f32(f32_to_bf16(p[i]));
    return p;
}

static bool skipped(void)
{
    if (gpu) return false;
    print_message("skipped: no CUDA device\n");
    return true;
}

static void sync_ok(struct backend *be)
{
    struct err e;
    if (be->ops->sync(be, &e) < 0) fail_msg("%s", e.msg);
}

/* n floats in be's memory and a guard of NaN behind them; host NULL: NaN. */
static float *dev_new(struct backend *be, const float *host, size_t n)
{
    void *dev;
    struct err e;
    float *all = must_alloc((n + GUARD) * sizeof *all);
    for (size_t i = 0; i < n + GUARD; i++) all[i] = host && i < n ? host[i] : NAN;
    if (be->ops->alloc(be, &dev, (n + GUARD) * sizeof *all, &e) < 0) fail_msg("%s", e.msg);
    be->ops->upload(be, dev, all, (n + GUARD) * sizeof *all);
    sync_ok(be);
    free(all);
    return dev;
}

static void dev_get(struct backend *be, const float *dev, float *host, size_t n)
{
    struct err e;
    float *all = must_alloc((n + GUARD) * sizeof *all);
    if (be->ops->download(be, all, dev, (n + GUARD) * sizeof *all, &e) < 0) fail_msg("%s", e.msg);
    for (size_t i = n; i < n + GUARD; i++) assert_true(isnan(all[i]));
    memcpy(host, all, n * sizeof *host);
    free(all);
}

/* ------------------------------------------------------------------------------------------------ rows */

/* A matrix of any type full of random bits whose scales are small numbers; *memory is to be freed. */
static struct dmat random_matrix(enum dtype type, int64_t rows, int64_t cols, uint8_t **memory)
{
    static const int scale_at[DT_COUNT] = {[DT_Q6_K] = 208};
    const struct dtype_info *info = &dtype_infos[type];
    struct dmat m = {.type = type, .rows = rows, .cols = cols, .row_stride = dtype_row_bytes(type, cols)};
    size_t main_bytes = (size_t)rows * m.row_stride;
    size_t second = info->bscale_block ? (size_t)(cols / info->bscale_block) : 0;
    uint8_t *p = *memory = must_alloc(main_bytes + (size_t)rows * second);
    for (size_t i = 0; i < main_bytes; i++) p[i] = (uint8_t)next_random();
    for (size_t i = 0; i < (size_t)rows * second; i++)
        p[main_bytes + i] = (uint8_t)(type == DT_MXFP4 ? 120 + next_random() % 6 : next_random() % 0x7F);
    m.data = p;
    if (second) m.bscale = p + main_bytes, m.bscale_stride = second;
    for (size_t at = 0; at < main_bytes; at += (size_t)info->block_bytes) {
        uint16_t h = f32_to_f16(noise()), b = f32_to_bf16(noise());
        float f = noise();
        if (type == DT_F32) memcpy(p + at, &f, 4);
        else if (type == DT_F16) memcpy(p + at, &h, 2);
        else if (type == DT_BF16) memcpy(p + at, &b, 2);
        else if (type == DT_F8_E4M3) p[at] = (p[at] & 0x7F) == 0x7F ? 0x7E : p[at];
        else if (type == DT_MXFP4_GGUF) p[at] = (uint8_t)(120 + next_random() % 6);
        else if (!second) {
            memcpy(p + at + scale_at[type], &h, 2);
            h = f32_to_f16(noise());
            if (type == DT_Q4_1 || type == DT_Q5_1 || type == DT_Q4_K || type == DT_Q5_K) memcpy(p + at + 2, &h, 2);
        }
    }
    return m;
}

static struct bweight *weight_of(struct backend *be, const struct dmat *parts, int n, const float *bias)
{
    struct bweight *w;
    struct err e;
    if (be->ops->weight_new(be, &w, parts, n, bias, &e) < 0) fail_msg("%s", e.msg);
    return w;
}

/* A batch of T rows of one sequence from position 0. */
static void begin_rows(struct backend *be, const int32_t *ids, int T)
{
    int32_t begin[2] = {0, T}, pos0 = 0, max_pages = (T + KV_PAGE - 1) / KV_PAGE;
    int32_t *pages = must_alloc((size_t)max_pages * sizeof *pages);
    for (int i = 0; i < max_pages; i++) pages[i] = i;
    be->ops->begin(be, &(struct batch){.T = T,
                                       .n_seqs = 1,
                                       .ids = ids,
                                       .seq_begin = begin,
                                       .pos0 = &pos0,
                                       .pages = pages,
                                       .max_pages = max_pages});
    free(pages);
}

static void embedding_is_exact(void **state)
{
    enum { ROWS = 37 };
    static const int widths[] = {32, 352, 2080}, odd[] = {1, 33, 129};
    (void)state;
    if (skipped()) return;
    for (int type = DT_F32; type < DT_COUNT; type++)
        for (size_t k = 0; k < 6; k++) {
            int block = dtype_infos[type].block, cols = k < 3 ? widths[k] : odd[k - 3];
            int32_t ids[9];
            uint8_t *memory;
            if (block == 1 || k < 3) cols = (cols + block - 1) / block * block;
            else continue;
            struct dmat m = random_matrix((enum dtype)type, ROWS, cols, &memory);
            struct bweight *w = weight_of(gpu, &m, 1, NULL);
            size_t n = COUNT_OF(ids) * (size_t)cols;
            float *dev = dev_new(gpu, NULL, n), *got = must_alloc(n * sizeof *got);
            float *want = must_alloc((size_t)cols * sizeof *want);
            for (size_t i = 0; i < COUNT_OF(ids); i++)
                ids[i] = i == 0 ? ROWS - 1 : i == 1 ? 0 : (int32_t)(next_random() % ROWS);
            begin_rows(gpu, ids, COUNT_OF(ids));
            gpu->ops->embed(gpu, dev, w);
            dev_get(gpu, dev, got, n);
            for (size_t i = 0; i < n; i++) {
                size_t col = i % (size_t)cols;
                if (col == 0) dmat_row(&m, ids[i / (size_t)cols], want);
                if (!(got[i] == want[col] || (isnan(got[i]) && isnan(want[col]))))
                    fail_msg("%s of %d columns: row %d column %zu is %.9g, not %.9g", dtype_infos[type].name, cols,
                             ids[i / (size_t)cols], col, (double)got[i], (double)want[col]);
            }
            gpu->ops->weight_free(gpu, w);
            gpu->ops->free(gpu, dev);
            free(got), free(want), free(memory);
        }
}

static void gather_takes_rows(void **state)
{
    static const int widths[] = {1, 64, 301, 1025};
    static const int32_t rows[] = {8, 0, 8, 3};
    (void)state;
    if (skipped()) return;
    for (size_t k = 0; k < COUNT_OF(widths); k++) {
        size_t D = (size_t)widths[k];
        float *x = floats(9 * D, 1), *dx = dev_new(gpu, x, 9 * D), *out = dev_new(gpu, NULL, COUNT_OF(rows) * D);
        float *got = must_alloc(COUNT_OF(rows) * D * sizeof *got);
        int32_t ids[9] = {0};
        begin_rows(gpu, ids, 9);
        gpu->ops->gather(gpu, out, dx, widths[k], rows, COUNT_OF(rows));
        dev_get(gpu, out, got, COUNT_OF(rows) * D);
        for (size_t i = 0; i < COUNT_OF(rows); i++)
            assert_memory_equal(got + i * D, x + (size_t)rows[i] * D, D * sizeof *got);
        gpu->ops->free(gpu, dx), gpu->ops->free(gpu, out);
        free(x), free(got);
    }
}

/* ------------------------------------------------------------------------------------------------ attention */

struct shape {
    int H, Hk, Dh, window;
    bool sinks, norms, interleaved;
};

/* Sequences that grow step by step: rows[step][s] new rows of sequence s. */
enum { MAX_SEQS = 48 };
struct plan {
    int n_seqs, n_steps;
    int rows[8][MAX_SEQS];
};

static int row_width(struct shape s) { return (s.H + 2 * s.Hk) * s.Dh; }
static int total_rows(const struct plan *p)
{
    int n = 0;
    for (int i = 0; i < p->n_steps; i++)
        for (int s = 0; s < p->n_seqs; s++) n += p->rows[i][s];
    return n;
}

struct tables {
    float *q_norm, *k_norm, *inv_freq, *sinks; /* host */
};

static struct tables tables_new(struct shape s)
{
    struct tables t = {floats((size_t)s.Dh, 1), floats((size_t)s.Dh, 1), floats((size_t)s.Dh / 2, 1),
                       floats((size_t)s.H, 3)};
    for (int i = 0; i < s.Dh / 2; i++) t.inv_freq[i] = powf(10000, -2.0f * (float)i / (float)s.Dh);
    return t;
}
static void tables_free(struct tables *t) { free(t->q_norm), free(t->k_norm), free(t->inv_freq), free(t->sinks); }

struct runner {
    struct backend *be;
    struct shape s;
    struct bkv *kv;
    float *q_norm, *k_norm, *inv_freq, *sinks; /* dev */
};

static void rope_and_attend(struct runner *r, float *qkv, float *out)
{
    struct shape s = r->s;
    r->be->ops->rope_kv(r->be, &(struct rope_kv_args){.qkv = qkv,
                                                      .q_norm = s.norms ? r->q_norm : NULL,
                                                      .k_norm = s.norms ? r->k_norm : NULL,
                                                      .inv_freq = r->inv_freq,
                                                      .eps = 1e-6f,
                                                      .mscale = 1.25f,
                                                      .interleaved = s.interleaved,
                                                      .H = s.H,
                                                      .Hk = s.Hk,
                                                      .Dh = s.Dh,
                                                      .layer = 1,
                                                      .kv = r->kv});
    if (!out) return;
    r->be->ops->attend(r->be, &(struct attend_args){.out = out,
                                                    .qkv = qkv,
                                                    .sinks = s.sinks ? r->sinks : NULL,
                                                    .scale = 0.125f,
                                                    .H = s.H,
                                                    .Hk = s.Hk,
                                                    .Dh = s.Dh,
                                                    .layer = 1,
                                                    .window = s.window,
                                                    .kv = r->kv});
}

static struct runner runner_new(struct backend *be, struct shape s, const struct tables *t, int n_pages)
{
    struct runner r = {.be = be, .s = s};
    struct err e;
    if (be->ops->kv_new(be, &r.kv, 2, n_pages, s.Hk, s.Dh, &e) < 0) fail_msg("%s", e.msg);
    r.q_norm = dev_new(be, t->q_norm, (size_t)s.Dh);
    r.k_norm = dev_new(be, t->k_norm, (size_t)s.Dh);
    r.inv_freq = dev_new(be, t->inv_freq, (size_t)s.Dh / 2);
    r.sinks = dev_new(be, t->sinks, (size_t)s.H);
    /* Every place of every page is NaN before. */
    int n = n_pages * KV_PAGE;
    float *qkv = dev_new(be, NULL, (size_t)n * (size_t)row_width(s));
    int32_t *ids = must_alloc((size_t)n * sizeof *ids);
    begin_rows(be, ids, n);
    rope_and_attend(&r, qkv, NULL);
    sync_ok(be);
    be->ops->free(be, qkv);
    free(ids);
    return r;
}

static void runner_free(struct runner *r)
{
    float *all[] = {r->q_norm, r->k_norm, r->inv_freq, r->sinks};
    for (size_t i = 0; i < COUNT_OF(all); i++) r->be->ops->free(r->be, all[i]);
    r->be->ops->kv_free(r->be, r->kv);
}

/* Runs the plan on a backend. qkv: all rows, in the order of the steps; out[rows, H Dh]; q_out[rows, H Dh] the
 * rotated queries. only >= 0: this sequence alone is run, the rows of the others are left as they are. */
static void run_plan(struct backend *be, struct shape s, const struct plan *p, const struct tables *t,
                     const float *qkv, float *out, float *q_out, int only)
{
    int width = row_width(s), O = s.H * s.Dh, longest = 0, done[MAX_SEQS] = {0};
    for (int q = 0; q < p->n_seqs; q++) {
        int n = 0;
        for (int i = 0; i < p->n_steps; i++) n += p->rows[i][q];
        if (n > longest) longest = n;
    }
    int max_pages = (longest + KV_PAGE - 1) / KV_PAGE + 3, n_pages = max_pages * p->n_seqs;
    struct runner r = runner_new(be, s, t, n_pages);
    int32_t *pages = must_alloc((size_t)n_pages * sizeof *pages), *ids = must_alloc(65536 * sizeof *ids);
    size_t row0 = 0;
    for (int i = 0; i < p->n_steps; i++) {
        int32_t begin[MAX_SEQS + 1] = {0}, pos0[MAX_SEQS];
        int T = 0, S = 0;
        size_t skip = 0, all = 0;
        for (int q = 0; q < p->n_seqs; q++) {
            int n = p->rows[i][q];
            if (n && (only < 0 || q == only)) {
                /* Pages lie in any order, those behind the context name nothing. */
                for (int k = 0; k < max_pages; k++)
                    pages[S * max_pages + k] =
                        k * KV_PAGE < done[q] + n ? (int32_t)((k * p->n_seqs + q) * 7919 % n_pages) : 1 << 28;
                pos0[S++] = done[q];
                T += n;
                begin[S] = T;
                if (only >= 0) skip = all;
            }
            all += (size_t)n;
            done[q] += n;
        }
        size_t at = row0 + skip;
        row0 += all;
        if (!T) continue;
        be->ops->begin(be, &(struct batch){.T = T,
                                           .n_seqs = S,
                                           .ids = ids,
                                           .seq_begin = begin,
                                           .pos0 = pos0,
                                           .pages = pages,
                                           .max_pages = max_pages});
        float *dx = dev_new(be, qkv + at * (size_t)width, (size_t)T * (size_t)width);
        float *dout = dev_new(be, NULL, (size_t)T * (size_t)O);
        float *back = must_alloc((size_t)T * (size_t)width * sizeof *back);
        rope_and_attend(&r, dx, dout);
        dev_get(be, dout, out + at * (size_t)O, (size_t)T * (size_t)O);
        dev_get(be, dx, back, (size_t)T * (size_t)width);
        for (int k = 0; q_out && k < T; k++)
            memcpy(q_out + (at + (size_t)k) * (size_t)O, back + (size_t)k * (size_t)width, (size_t)O * sizeof *q_out);
        be->ops->free(be, dx), be->ops->free(be, dout);
        free(back);
    }
    runner_free(&r);
    free(pages), free(ids);
}

static const struct shape shapes[] = {
    {1, 1, 64, 0, false, false, false},   /* one head */
    {9, 3, 64, 0, false, false, true},    /* SmolLM2's heads */
    {8, 1, 64, 0, true, false, false},    /* gpt-oss's heads a group */
    {8, 1, 64, 37, true, false, false},   /* the same with a window over page borders */
    {4, 2, 80, 0, false, true, false},    /* a width between those that kernels are made for */
    {6, 2, 24, 1, false, false, false},   /* a window of the token itself */
    {4, 4, 128, 32, false, true, false},  /* a window of a page */
    {16, 2, 128, 0, false, true, false},  /* Qwen3's heads */
    {40, 2, 128, 0, true, false, false},  /* more heads a group than a tile has rows */
    {16, 1, 256, 100, true, false, true}, /* the widest head */
};

static const struct plan plans[] = {
    {1, 4, {{1}, {1}, {1}, {1}}},                              /* decode from nothing */
    {1, 4, {{31}, {1}, {1}, {1}}},                             /* decode over a page border */
    {1, 3, {{7}, {58}, {200}}},                                /* chunks */
    {3, 3, {{40, 1, 2}, {1, 1, 1}, {1, 9, 1}}},                /* both kinds in a step */
    {4, 3, {{600, 1, 130, 64}, {1, 1, 1, 1}, {33, 1, 1, 17}}}, /* long contexts: many splits */
};

/* Queries and weights are rounded to F16 on the way: 2^-11 of a score's parts, here at most 2e-3 in a score. */
static void attention_is_that_of_the_cpu(void **state)
{
    (void)state;
    if (skipped()) return;
    for (size_t i = 0; i < COUNT_OF(shapes); i++)
        for (size_t k = 0; k < COUNT_OF(plans); k++) {
            struct shape s = shapes[i];
            struct tables t = tables_new(s);
            size_t n = (size_t)total_rows(&plans[k]), O = (size_t)(s.H * s.Dh);
            float *qkv = floats(n * (size_t)row_width(s), 1.5f), *want = floats(n * O, 0), *got = floats(n * O, 0);
            float *want_q = floats(n * O, 0), *got_q = floats(n * O, 0);
            double off = 0, size = 0;
            run_plan(cpu, s, &plans[k], &t, qkv, want, want_q, -1);
            run_plan(gpu, s, &plans[k], &t, qkv, got, got_q, -1);
            for (size_t x = 0; x < n * O; x++) {
                if (!(fabsf(got_q[x] - want_q[x]) < 2e-5f))
                    fail_msg("shape %zu plan %zu: q row %zu [%zu] is %g, not %g", i, k, x / O, x % O,
                             (double)got_q[x], (double)want_q[x]);
                if (!(fabsf(got[x] - want[x]) < 5e-3f))
                    fail_msg("shape %zu plan %zu: row %zu [%zu] is %g, not %g", i, k, x / O, x % O, (double)got[x],
                             (double)want[x]);
                off += (double)((got[x] - want[x]) * (got[x] - want[x]));
                size += (double)(want[x] * want[x]);
            }
            if (!(off <= 1e-6 * size)) /* a relative error of 1e-3 */
                fail_msg("shape %zu plan %zu: error %g of %g", i, k, sqrt(off), sqrt(size));
            tables_free(&t);
            free(qkv), free(want), free(got), free(want_q), free(got_q);
        }
}

/* A sequence's numbers do not depend on the others of the step. */
static void company_leaves_the_bits(void **state)
{
    static const struct shape s = {16, 8, 64, 0, true, false, false};
    (void)state;
    if (skipped()) return;
    struct plan many = {.n_seqs = MAX_SEQS, .n_steps = 3};
    for (int q = 0; q < MAX_SEQS; q++) many.rows[0][q] = 1 + (q * 29) % 290, many.rows[1][q] = many.rows[2][q] = 1;
    struct plan mixed = {4, 3, {{300, 1, 9, 64}, {1, 1, 1, 1}, {12, 1, 1, 17}}};
    const struct plan *both[] = {&many, &mixed};
    for (size_t k = 0; k < COUNT_OF(both); k++) {
        const struct plan *p = both[k];
        struct tables t = tables_new(s);
        size_t n = (size_t)total_rows(p), O = (size_t)(s.H * s.Dh);
        float *qkv = floats(n * (size_t)row_width(s), 1.5f), *want = floats(n * O, 0), *got = floats(n * O, 0);
        run_plan(gpu, s, p, &t, qkv, want, NULL, -1);
        for (int only = 0; only<p->n_seqs; only += p->n_seqs> 8 ? 9 : 1) {
            for (size_t x = 0; x < n * O; x++) got[x] = want[x];
            run_plan(gpu, s, p, &t, qkv, got, NULL, only);
            assert_memory_equal(got, want, n * O * sizeof *got);
        }
        tables_free(&t);
        free(qkv), free(want), free(got);
    }
}

/* The same addresses step after step, as in an engine: from the second on the step is captured, then replayed. */
static void replayed_steps_are_right(void **state)
{
    enum { SEQS = 3, STEPS = 80, V = 11, PAGES = 4 };
    static const struct shape s = {4, 2, 64, 20, true, false, false};
    (void)state;
    if (skipped()) return;
    int width = row_width(s), O = s.H * s.Dh;
    struct tables t = tables_new(s);
    struct backend *both[2] = {cpu, gpu};
    float *table = floats((size_t)(V * width), 1.5f), *out[2];
    for (int b = 0; b < 2; b++) {
        struct backend *be = both[b];
        struct dmat m = {.type = DT_F32,
                         .rows = V,
                         .cols = width,
                         .data = (const uint8_t *)table,
                         .row_stride = (size_t)width * sizeof *table};
        struct bweight *w = weight_of(be, &m, 1, NULL);
        struct runner r = runner_new(be, s, &t, SEQS * PAGES);
        float *qkv = dev_new(be, NULL, (size_t)(SEQS * width)), *att = dev_new(be, NULL, (size_t)(SEQS * O));
        float *last = dev_new(be, NULL, (size_t)(SEQS * O));
        out[b] = floats((size_t)(STEPS * SEQS * O), 0);
        for (int i = 0; i < STEPS; i++) {
            /* Sequence 2 begins late; the first three steps have other numbers of sequences. */
            int n = i < 10 ? 2 : SEQS;
            int32_t ids[SEQS], begin[SEQS + 1] = {0}, pos0[SEQS], pages[SEQS * PAGES], rows[SEQS];
            for (int q = 0; q < n; q++) {
                ids[q] = (i * 7 + q * 3) % V;
                begin[q + 1] = q + 1;
                pos0[q] = q == 2 ? i - 10 : i;
                rows[q] = n - 1 - q;
                for (int k = 0; k < PAGES; k++) pages[q * PAGES + k] = k * SEQS + q;
            }
            be->ops->begin(be, &(struct batch){.T = n,
                                               .n_seqs = n,
                                               .ids = ids,
                                               .seq_begin = begin,
                                               .pos0 = pos0,
                                               .pages = pages,
                                               .max_pages = PAGES});
            be->ops->embed(be, qkv, w);
            rope_and_attend(&r, qkv, att);
            be->ops->gather(be, last, att, O, rows, n);
            float *row = must_alloc((size_t)(SEQS * O) * sizeof *row);
            dev_get(be, last, row, (size_t)(SEQS * O));
            memcpy(out[b] + i * SEQS * O, row, (size_t)(n * O) * sizeof *row);
            free(row);
        }
        runner_free(&r);
        be->ops->weight_free(be, w);
        be->ops->free(be, qkv), be->ops->free(be, att), be->ops->free(be, last);
    }
    for (int x = 0; x < STEPS * SEQS * O; x++)
        if (!(fabsf(out[0][x] - out[1][x]) < 5e-3f))
            fail_msg("step %d: [%d] is %g, not %g", x / (SEQS * O), x % (SEQS * O), (double)out[1][x],
                     (double)out[0][x]);
    tables_free(&t);
    free(table), free(out[0]), free(out[1]);
}

/* ------------------------------------------------------------------------------------------------ experts */

struct experts {
    enum dtype type;
    int D, F, E;
    float *router, *router_bias, *up_bias, *down_bias; /* [E, D] [E] [E, 2 F] [E, D] */
    struct dmat *gate, *up, *down;                     /* [E] */
    uint8_t **memory;                                  /* [3 E] */
};

static struct experts experts_new(enum dtype type, int D, int F, int E)
{
    struct experts x = {.type = type, .D = D, .F = F, .E = E};
    size_t n = (size_t)E;
    x.router = floats(n * (size_t)D, 1);
    x.router_bias = floats(n, 0.5f);
    x.up_bias = floats(n * 2 * (size_t)F, 1);
    x.down_bias = floats(n * (size_t)D, 1);
    x.gate = must_alloc(n * sizeof *x.gate);
    x.up = must_alloc(n * sizeof *x.up);
    x.down = must_alloc(n * sizeof *x.down);
    x.memory = must_alloc(3 * n * sizeof *x.memory);
    for (int i = 0; i < E; i++) {
        x.gate[i] = random_matrix(type, F, D, &x.memory[3 * i]);
        x.up[i] = random_matrix(type, F, D, &x.memory[3 * i + 1]);
        x.down[i] = random_matrix(type, D, F, &x.memory[3 * i + 2]);
    }
    return x;
}

static void experts_free(struct experts *x)
{
    for (int i = 0; i < 3 * x->E; i++) free(x->memory[i]);
    free(x->router), free(x->router_bias), free(x->up_bias), free(x->down_bias);
    free(x->gate), free(x->up), free(x->down), free(x->memory);
}

/* The CPU meets quantised weights with quantised activations; it gets them as floats here. */
static struct dmat plain(struct backend *be, const struct dmat *m, float **memory)
{
    *memory = NULL;
    if (be != cpu) return *m;
    *memory = must_alloc((size_t)(m->rows * m->cols) * sizeof **memory);
    for (int64_t r = 0; r < m->rows; r++) dmat_row(m, r, *memory + r * m->cols);
    return (struct dmat){.type = DT_F32,
                         .rows = m->rows,
                         .cols = m->cols,
                         .data = (const uint8_t *)*memory,
                         .row_stride = (size_t)m->cols * sizeof **memory};
}

/* Expert i is here if bit i % 32 of `here` is set. */
static void run_experts(struct backend *be, const struct experts *x, const float *in, const float *norm, int T, int k,
                        int kind, float limit, bool residual, uint32_t here, float *out)
{
    size_t n = (size_t)T * (size_t)x->D;
    struct dmat router = {.type = DT_F32,
                          .rows = x->E,
                          .cols = x->D,
                          .data = (const uint8_t *)x->router,
                          .row_stride = (size_t)x->D * sizeof(float)};
    struct bweight *r = weight_of(be, &router, 1, x->router_bias);
    const struct bweight **up = must_alloc((size_t)x->E * sizeof *up),
                         **down = must_alloc((size_t)x->E * sizeof *down);
    for (int i = 0; i < x->E; i++) {
        float *memory[3];
        if (!(here >> i % 32 & 1)) continue;
        struct dmat parts[3] = {plain(be, &x->gate[i], &memory[0]), plain(be, &x->up[i], &memory[1]),
                                plain(be, &x->down[i], &memory[2])};
        up[i] = weight_of(be, parts, 2, x->up_bias + (size_t)i * 2 * (size_t)x->F);
        down[i] = weight_of(be, &parts[2], 1, x->down_bias + (size_t)i * (size_t)x->D);
        for (int m = 0; m < 3; m++) free(memory[m]);
    }
    float *dx = dev_new(be, in, n), *dn = norm ? dev_new(be, norm, (size_t)x->D) : NULL, *dout = dev_new(be, NULL, n);
    int32_t *ids = must_alloc((size_t)T * sizeof *ids);
    begin_rows(be, ids, T);
    be->ops->moe(be, &(struct moe_args){.out = dout,
                                        .x = dx,
                                        .residual = residual ? dx : NULL,
                                        .norm = norm ? dn : NULL,
                                        .eps = 1e-5f,
                                        .swiglu_limit = limit,
                                        .T = T,
                                        .E = x->E,
                                        .k = k,
                                        .kind = kind,
                                        .router = r,
                                        .gate_up = up,
                                        .down = down});
    dev_get(be, dout, out, n);
    be->ops->free(be, dx), be->ops->free(be, dout), be->ops->free(be, dn);
    be->ops->weight_free(be, r);
    for (int i = 0; i < x->E; i++) {
        if (!up[i]) continue;
        be->ops->weight_free(be, (struct bweight *)(uintptr_t)up[i]);
        be->ops->weight_free(be, (struct bweight *)(uintptr_t)down[i]);
    }
    free(up), free(down), free(ids);
}

/* Activations are rounded to bf16 before each product: 2^-9 of its parts. */
static void check_experts(const struct experts *x, int T, int k, int kind, float limit, bool norm, uint32_t here,
                          double slack)
{
    size_t n = (size_t)T * (size_t)x->D;
    float *in = bf16_floats(n), *g = bf16_floats((size_t)x->D), *want = floats(n, 0), *got = floats(n, 0);
    run_experts(cpu, x, in, norm ? g : NULL, T, k, kind, limit, true, here, want);
    run_experts(gpu, x, in, norm ? g : NULL, T, k, kind, limit, true, here, got);
    for (int t = 0; t < T; t++) {
        double off = 0, size = 1e-3;
        for (int d = 0; d < x->D; d++) {
            size_t i = (size_t)t * (size_t)x->D + (size_t)d;
            double a = (double)got[i] - (double)want[i], b = (double)want[i] - (double)in[i];
            off += a * a, size += b * b;
        }
        if (!(sqrt(off) <= slack * sqrt(size)))
            fail_msg("%s, %d tokens, %d of %d experts, kind %d: token %d is off by %g of %g",
                     dtype_infos[x->type].name, T, k, x->E, kind, t, sqrt(off), sqrt(size));
    }
    free(in), free(g), free(want), free(got);
}

static void experts_are_those_of_the_cpu(void **state)
{
    static const int all_T[] = {1, 3, 16, 17, 65, 200};
    (void)state;
    if (skipped()) return;
    for (size_t i = 0; i < COUNT_OF(all_T); i++) {
        struct experts a = experts_new(DT_BF16, 40, 24, 8), b = experts_new(DT_MXFP4, 96, 160, 33);
        /* Expert 6 of 8 is never chosen, expert 7 ties with 0 and loses. */
        memcpy(a.router + 7 * a.D, a.router, (size_t)a.D * sizeof *a.router);
        a.router_bias[7] = a.router_bias[0];
        a.router_bias[6] = -1000;
        for (int kind = 0; kind < 3; kind++) check_experts(&a, all_T[i], 3, kind, 0, kind != 1, 0xFFFFFFFF, 0.02);
        check_experts(&a, all_T[i], 2, 2, 7, false, 0xFFFFFFDB, 0.02); /* 2 and 5 are elsewhere */
        check_experts(&a, all_T[i], 1, 0, 7, true, 0xFFFFFF00, 0.02);  /* all are */
        check_experts(&b, all_T[i], 4, 2, 7, true, 0xFFFFFFFF, 0.02);
        check_experts(&b, all_T[i], 8, 1, 0, true, 0x0000FFFF, 0.02);
        experts_free(&a), experts_free(&b);
    }
}

static void the_largest_is_that_of_the_cpu(void **state)
{
    static const int widths[] = {1, 33, 1024, 4097};
    enum { ROWS = 5 };
    (void)state;
    if (skipped()) return;
    for (size_t w = 0; w < COUNT_OF(widths); w++) {
        int V = widths[w];
        size_t bytes = (size_t)(ROWS * V) * sizeof(float);
        float *x = floats((size_t)(ROWS * V), 1), *dev;
        int32_t want[ROWS], got[ROWS];
        struct err e;
        x[V - 1] = 9;
        x[V + V / 3] = x[V + V / 2] = 9; /* the lower one of two */
        x[2 * V + V / 2] = NAN;
        for (int i = 0; i < V; i++) x[3 * V + i] = i % 2 ? NAN : -INFINITY;
        x[4 * V] = INFINITY;
        if (gpu->ops->alloc(gpu, &dev, bytes, &e) < 0) fail_msg("%s", e.msg);
        gpu->ops->upload(gpu, dev, x, bytes);
        if (gpu->ops->best(gpu, dev, ROWS, V, got, &e) < 0) fail_msg("%s", e.msg);
        gpu->ops->free(gpu, dev);
        if (cpu->ops->best(cpu, x, ROWS, V, want, &e) < 0) fail_msg("%s", e.msg);
        assert_memory_equal(got, want, sizeof got);
        assert_int_equal(got[3], -1);
        free(x);
    }
}

/* Company leaves the bits, as far as products do: batches of 1 and of 16. A token that is not a number stays alone. */
static void tokens_do_not_meet(void **state)
{
    enum { T = 16, D = 64 };
    (void)state;
    if (skipped()) return;
    struct experts x = experts_new(DT_BF16, D, 32, 12);
    float *in = bf16_floats(T * D), *want = floats(T * D, 0), *got = floats(T * D, 0);
    run_experts(gpu, &x, in, NULL, T, 3, 1, 0, true, 0xFFFFFFFF, want);
    for (int t = 0; t < T; t += 5) run_experts(gpu, &x, in + t * D, NULL, 1, 3, 1, 0, true, 0xFFFFFFFF, got + t * D);
    for (int t = 0; t < T; t += 5) assert_memory_equal(got + t * D, want + t * D, D * sizeof *got);
    in[3 * D + 5] = NAN;
    run_experts(gpu, &x, in, NULL, T, 3, 1, 0, true, 0xFFFFFFFF, got);
    for (int t = 0; t < T; t++) {
        if (t == 3) assert_true(isnan(got[t * D + 5]));
        else assert_memory_equal(got + t * D, want + t * D, D * sizeof *got);
    }
    experts_free(&x);
    free(in), free(want), free(got);
}

/* ------------------------------------------------------------------------------------------------ times */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* n_seqs sequences of `ctx` keys; the last `rows` rows of each are computed, `reps` times in a row. */
static void time_attention(const char *what, struct shape s, int n_seqs, int ctx, int rows, int reps)
{
    int max_pages = (ctx + KV_PAGE - 1) / KV_PAGE, T = n_seqs * rows, n_pages = max_pages * n_seqs;
    size_t width = (size_t)row_width(s), O = (size_t)(s.H * s.Dh);
    struct tables t = tables_new(s);
    struct runner r = {.be = gpu, .s = s};
    struct err e;
    if (gpu->ops->kv_new(gpu, &r.kv, 2, n_pages, s.Hk, s.Dh, &e) < 0) fail_msg("%s", e.msg);
    r.q_norm = r.k_norm = dev_new(gpu, t.q_norm, (size_t)s.Dh);
    r.inv_freq = dev_new(gpu, t.inv_freq, (size_t)s.Dh / 2);
    r.sinks = dev_new(gpu, t.sinks, (size_t)s.H);
    int32_t *ids = must_alloc((size_t)T * sizeof *ids), *begin = must_alloc((size_t)(n_seqs + 1) * sizeof *begin);
    int32_t *pos0 = must_alloc((size_t)n_seqs * sizeof *pos0), *pages = must_alloc((size_t)n_pages * sizeof *pages);
    for (int i = 0; i < n_pages; i++) pages[i] = (int32_t)((int64_t)i * 7919 % n_pages);
    for (int q = 0; q < n_seqs; q++) begin[q + 1] = (q + 1) * rows, pos0[q] = ctx - rows;
    float *x = floats((size_t)T * width, 1), *qkv = dev_new(gpu, x, (size_t)T * width);
    float *out = dev_new(gpu, NULL, (size_t)T * O);
    double rope = 0, attend = 0;
    gpu->ops->begin(gpu, &(struct batch){.T = T,
                                         .n_seqs = n_seqs,
                                         .ids = ids,
                                         .seq_begin = begin,
                                         .pos0 = pos0,
                                         .pages = pages,
                                         .max_pages = max_pages});
    for (int pass = 0; pass < 2; pass++) { /* with and without attention; the first call of each sets it up */
        rope_and_attend(&r, qkv, pass ? out : NULL);
        sync_ok(gpu);
        double from = now();
        for (int i = 0; i < reps; i++) rope_and_attend(&r, qkv, pass ? out : NULL);
        sync_ok(gpu);
        *(pass ? &attend : &rope) = (now() - from) / reps;
    }
    attend -= rope;
    double keys = 0;
    for (int i = ctx - rows; i < ctx; i++) keys += s.window && i >= s.window ? s.window : i + 1;
    double flop = 4.0 * n_seqs * keys * s.H * s.Dh, bytes = 4.0 * n_seqs * s.Hk * s.Dh * (rows > 1 ? ctx : keys);
    printf(
        "%-24s %3d sequences x %4d rows of %6d keys: attention %8.1f us, %6.1f GB/s, %6.1f TFLOP/s; rope %6.1f us\n",
        what, n_seqs, rows, ctx, attend * 1e6, bytes / attend * 1e-9, flop / attend * 1e-12, rope * 1e6);
    gpu->ops->free(gpu, r.q_norm), gpu->ops->free(gpu, r.inv_freq), gpu->ops->free(gpu, r.sinks);
    gpu->ops->free(gpu, qkv), gpu->ops->free(gpu, out);
    gpu->ops->kv_free(gpu, r.kv);
    tables_free(&t);
    free(ids), free(begin), free(pos0), free(pages), free(x);
}

static void time_all(void)
{
    static const struct shape gpt_oss = {64, 8, 64, 0, true, false, false},
                              llama = {32, 8, 128, 0, false, false, false};
    static const struct shape windowed = {64, 8, 64, 128, true, false, false},
                              qwen = {32, 4, 128, 0, false, true, false};
    static const struct {
        const char *name;
        const struct shape *s;
    } all[] = {{"gpt-oss", &gpt_oss}, {"gpt-oss, window 128", &windowed}, {"llama 8b", &llama}, {"qwen3 30b", &qwen}};
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        time_attention(all[i].name, *all[i].s, 1, 100, 1, 100);
        time_attention(all[i].name, *all[i].s, 1, 1000, 1, 100);
        time_attention(all[i].name, *all[i].s, 1, 8192, 1, 100);
        time_attention(all[i].name, *all[i].s, 1, 65536, 1, 50);
        time_attention(all[i].name, *all[i].s, 64, 2048, 1, 50);
        time_attention(all[i].name, *all[i].s, 1, 2048, 2048, 20);
        time_attention(all[i].name, *all[i].s, 1, 16384, 2048, 10);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_is_exact),           cmocka_unit_test(gather_takes_rows),
        cmocka_unit_test(attention_is_that_of_the_cpu), cmocka_unit_test(company_leaves_the_bits),
        cmocka_unit_test(replayed_steps_are_right),     cmocka_unit_test(experts_are_those_of_the_cpu),
        cmocka_unit_test(tokens_do_not_meet),           cmocka_unit_test(the_largest_is_that_of_the_cpu),
    };
    struct err e;
    if (backend_open(&gpu, &(struct backend_opts){.device = "cuda:0"}, NULL) < 0) gpu = NULL;
    if (backend_open(&cpu, &(struct backend_opts){.threads = 1, .cpu_level = "c"}, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        return 1;
    }
    int rc = 0;
    if (argc > 1 && !strcmp(argv[1], "--time")) {
        if (gpu) time_all();
    } else {
        rc = cmocka_run_group_tests(tests, NULL, NULL);
    }
    if (gpu) backend_close(&gpu);
    backend_close(&cpu);
    return rc;
}
