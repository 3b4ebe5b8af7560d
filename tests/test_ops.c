/* test_ops: the CPU backend's operations at every level of this machine against plain double arithmetic: RoPE, pages and
 * attention (windows, sinks, page borders, many heads a group), gated FFN, experts. Outputs are poisoned and guarded.
 * With --time it prints how long attention takes instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"

static const char *const all_levels[] = {"c", "avx2", "avx512", "avx512bf16", "neon", "neonmm"};
static const char *levels[COUNT_OF(all_levels)];
static int n_levels;

static uint64_t seed = 1;
static float noise(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(seed >> 40) / (double)(1 << 23) - 1.0);
}

static float *floats(size_t n, float scale)
{
    float *p = malloc((n + 16) * sizeof *p);
    assert_non_null(p);
    for (size_t i = 0; i < n + 16; i++) p[i] = scale * noise();
    return p;
}

static struct backend *open_level(const char *level, int threads)
{
    struct backend *be;
    struct err e;
    if (backend_open(&be, &(struct backend_opts){.threads = threads, .cpu_level = level}, &e) < 0)
        fail_msg("%s", e.msg);
    return be;
}

static void sync_ok(struct backend *be)
{
    struct err e;
    if (be->ops->sync(be, &e) < 0) fail_msg("%s", e.msg);
}

/* ------------------------------------------------------------------------------------------------ attention */

struct shape {
    int H, Hk, Dh, window, T, pos0;
    bool sinks, norms, interleaved;
};

/* One sequence of pos0 + T rows. All rows pass rope_kv; the outputs of the last T are compared. */
struct attention {
    struct shape s;
    int n;             /* pos0 + T */
    float *qkv, *want; /* [n, (H + 2 Hk) Dh] before RoPE; [T, H Dh] */
    float *sinks, *q_norm, *k_norm, *inv_freq;
};

static void reference_head(const struct attention *a, double *x, const float *norm, int pos)
{
    int Dh = a->s.Dh, half = Dh / 2;
    if (a->s.norms) {
        double sum = 0;
        for (int i = 0; i < Dh; i++) sum += x[i] * x[i];
        for (int i = 0; i < Dh; i++) x[i] = x[i] / sqrt(sum / Dh + 1e-6) * (double)norm[i];
    }
    for (int i = 0; i < half; i++) {
        int p = a->s.interleaved ? 2 * i : i, q = a->s.interleaved ? 2 * i + 1 : i + half;
        float angle = (float)pos * a->inv_freq[i]; /* as the references have it */
        double c = cos((double)angle) * 1.25, s = sin((double)angle) * 1.25, u = x[p], v = x[q];
        x[p] = u * c - v * s;
        x[q] = v * c + u * s;
    }
}

static void make_attention(struct attention *a, struct shape s)
{
    int Dh = s.Dh, width = (s.H + 2 * s.Hk) * Dh;
    *a = (struct attention){.s = s, .n = s.pos0 + s.T};
    a->qkv = floats((size_t)(a->n * width), 1.5f);
    a->want = floats((size_t)(s.T * s.H * Dh), 0);
    a->sinks = floats((size_t)s.H, 3);
    a->q_norm = floats((size_t)Dh, 1);
    a->k_norm = floats((size_t)Dh, 1);
    a->inv_freq = floats((size_t)Dh / 2, 0);
    for (int i = 0; i < Dh / 2; i++) a->inv_freq[i] = powf(10000, -2.0f * (float)i / (float)Dh);
    double *k = malloc((size_t)(a->n * s.Hk * Dh) * sizeof *k), *q = malloc((size_t)Dh * sizeof *q);
    double *p = malloc((size_t)a->n * sizeof *p);
    assert_true(k && q && p);
    for (int t = 0; t < a->n; t++)
        for (int h = 0; h < s.Hk; h++) {
            double *kh = k + (t * s.Hk + h) * Dh;
            for (int i = 0; i < Dh; i++) kh[i] = (double)a->qkv[t * width + (s.H + h) * Dh + i];
            reference_head(a, kh, a->k_norm, t);
            for (int i = 0; i < Dh; i++) kh[i] = (double)f16_to_f32(f32_to_f16((float)kh[i])); /* pages hold F16 */
        }
    for (int t = s.pos0; t < a->n; t++)
        for (int h = 0; h < s.H; h++) {
            int kv = h / (s.H / s.Hk), first = s.window && t >= s.window ? t - s.window + 1 : 0;
            double max = s.sinks ? (double)a->sinks[h] : -INFINITY, sum;
            for (int i = 0; i < Dh; i++) q[i] = (double)a->qkv[t * width + h * Dh + i];
            reference_head(a, q, a->q_norm, t);
            for (int j = first; j <= t; j++) {
                p[j] = 0;
                for (int i = 0; i < Dh; i++) p[j] += q[i] * k[(j * s.Hk + kv) * Dh + i];
                p[j] *= 0.125;
                if (p[j] > max) max = p[j];
            }
            sum = s.sinks ? exp((double)a->sinks[h] - max) : 0;
            for (int j = first; j <= t; j++) sum += p[j] = exp(p[j] - max);
            for (int i = 0; i < Dh; i++) {
                double v = 0;
                for (int j = first; j <= t; j++)
                    v += p[j] / sum * (double)f16_to_f32(f32_to_f16(a->qkv[j * width + (s.H + s.Hk + kv) * Dh + i]));
                a->want[((t - s.pos0) * s.H + h) * Dh + i] = (float)v;
            }
        }
    free(k);
    free(q);
    free(p);
}

static void free_attention(struct attention *a)
{
    float *all[] = {a->qkv, a->want, a->sinks, a->q_norm, a->k_norm, a->inv_freq};
    for (size_t i = 0; i < COUNT_OF(all); i++) free(all[i]);
}

/* Runs all rows in chunks through a backend; out[T, H Dh] and a guard behind it. */
static void run_attention(struct backend *be, const struct attention *a, int chunk, float *out)
{
    struct shape s = a->s;
    int width = (s.H + 2 * s.Hk) * s.Dh, n_pages = (a->n + KV_PAGE - 1) / KV_PAGE;
    size_t out_n = (size_t)(chunk * s.H * s.Dh);
    int32_t *pages = calloc((size_t)n_pages, sizeof *pages), *ids = calloc((size_t)a->n, sizeof *ids);
    float *qkv = malloc((size_t)(a->n * width) * sizeof *qkv), *part = malloc((out_n + 16) * sizeof *part);
    struct bkv *kv;
    struct err e;
    assert_true(pages && ids && qkv && part);
    for (int i = 0; i < n_pages; i++) pages[i] = n_pages - 1 - i; /* pages lie in any order */
    memcpy(qkv, a->qkv, (size_t)(a->n * width) * sizeof *qkv);
    if (be->ops->kv_new(be, &kv, 2, n_pages, s.Hk, s.Dh, &e) < 0) fail_msg("%s", e.msg);
    for (int t = 0; t < a->n; t += chunk) {
        int rows = a->n - t < chunk ? a->n - t : chunk;
        int32_t begin[2] = {0, rows}, pos0 = t;
        be->ops->begin(be, &(struct batch){.T = rows,
                                           .n_seqs = 1,
                                           .ids = ids,
                                           .seq_begin = begin,
                                           .pos0 = &pos0,
                                           .pages = pages,
                                           .max_pages = n_pages});
        be->ops->rope_kv(be, &(struct rope_kv_args){.qkv = qkv + t * width,
                                                    .q_norm = s.norms ? a->q_norm : NULL,
                                                    .k_norm = s.norms ? a->k_norm : NULL,
                                                    .inv_freq = a->inv_freq,
                                                    .eps = 1e-6f,
                                                    .mscale = 1.25f,
                                                    .interleaved = s.interleaved,
                                                    .H = s.H,
                                                    .Hk = s.Hk,
                                                    .Dh = s.Dh,
                                                    .layer = 1,
                                                    .kv = kv});
        for (size_t i = 0; i < out_n + 16; i++) part[i] = NAN;
        be->ops->attend(be, &(struct attend_args){.out = part,
                                                  .qkv = qkv + t * width,
                                                  .sinks = s.sinks ? a->sinks : NULL,
                                                  .scale = 0.125f,
                                                  .H = s.H,
                                                  .Hk = s.Hk,
                                                  .Dh = s.Dh,
                                                  .layer = 1,
                                                  .window = s.window,
                                                  .kv = kv});
        sync_ok(be);
        for (size_t i = (size_t)(rows * s.H * s.Dh); i < out_n + 16; i++)
            assert_true(isnan(part[i])); /* nothing beyond the rows */
        for (int r = 0; r < rows; r++)
            if (t + r >= s.pos0)
                memcpy(out + (t + r - s.pos0) * s.H * s.Dh, part + r * s.H * s.Dh,
                       (size_t)(s.H * s.Dh) * sizeof *out);
    }
    be->ops->kv_free(be, kv);
    free(pages);
    free(ids);
    free(qkv);
    free(part);
}

static const struct shape shapes[] = {
    {1, 1, 16, 0, 1, 0, false, false, false},    /* one key */
    {9, 3, 64, 0, 5, 30, false, false, true},    /* SmolLM2's heads over a page border */
    {4, 2, 80, 0, 3, 62, false, true, false},    /* a width that is no multiple of 32, norms of heads */
    {16, 1, 128, 0, 2, 95, false, false, false}, /* more heads a group than go together */
    {8, 8, 64, 16, 70, 0, true, false, false},   /* a window inside a page, sinks */
    {8, 2, 64, 33, 40, 60, true, false, false},  /* a window over a page border */
    {4, 4, 256, 128, 3, 200, true, true, true},  /* the widest head */
    {6, 2, 24, 1, 34, 0, false, false, false},   /* a window of the token itself */
};

/* Float and double RoPE may fall on two sides of an F16 rounding: that key's score moves by at most scale * |q| * 2^-10 |k|,
 * 6e-4 here, and with it the outputs. It is rare; all else is float arithmetic. */
static void attention_is_right_at_every_level(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        struct attention a;
        make_attention(&a, shapes[i]);
        size_t n = (size_t)(a.s.T * a.s.H * a.s.Dh);
        float *got = floats(n, 0);
        for (int l = 0; l < n_levels; l++) {
            struct backend *be = open_level(levels[l], 1);
            run_attention(be, &a, a.n, got);
            size_t off = 0;
            for (size_t k = 0; k < n; k++) {
                off += !(fabsf(got[k] - a.want[k]) < 2e-5f);
                if (!(fabsf(got[k] - a.want[k]) < 6e-4f))
                    fail_msg("shape %zu level %s: [%zu] is %g, not %g", i, levels[l], k, (double)got[k],
                             (double)a.want[k]);
            }
            assert_true(off <= n / 100);
            backend_close(&be);
        }
        free(got);
        free_attention(&a);
    }
}

static void chunks_and_threads_leave_the_bits(void **state)
{
    static const int chunks[] = {1, 7, 64}, threads[] = {1, 2, 5};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        struct attention a;
        make_attention(&a, shapes[i]);
        size_t n = (size_t)(a.s.T * a.s.H * a.s.Dh);
        float *want = floats(n, 0), *got = floats(n, 0);
        struct backend *be = open_level(NULL, 1);
        run_attention(be, &a, a.n, want);
        backend_close(&be);
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            be = open_level(NULL, threads[t]);
            run_attention(be, &a, chunks[(i + t) % COUNT_OF(chunks)], got);
            assert_memory_equal(got, want, n * sizeof *got);
            backend_close(&be);
        }
        free(want);
        free(got);
        free_attention(&a);
    }
}

/* ------------------------------------------------------------------------------------------------ gate and experts */

static struct bweight *weight(struct backend *be, const float *a, int64_t rows_a, const float *b, int64_t rows_b,
                              int64_t cols, const float *bias)
{
    struct dmat parts[2] = {
        {.type = DT_F32, .rows = rows_a, .cols = cols, .data = (const uint8_t *)a, .row_stride = (size_t)cols * 4},
        {.type = DT_F32, .rows = rows_b, .cols = cols, .data = (const uint8_t *)b, .row_stride = (size_t)cols * 4}};
    struct bweight *w;
    struct err e;
    if (be->ops->weight_new(be, &w, parts, b ? 2 : 1, bias, &e) < 0) fail_msg("%s", e.msg);
    return w;
}

static double dot(const float *w, const double *x, int n)
{
    double s = 0;
    for (int i = 0; i < n; i++) s += (double)w[i] * x[i];
    return s;
}

static double act(double g, double u, double limit)
{
    if (limit <= 0) return g / (1 + exp(-g)) * u;
    if (g > limit) g = limit;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-1.702 * g)) * (u + 1);
}

/* y[D] = down(act(gate x, up x)) + bias of one expert with weights we = gate [F, D], up [F, D], down [D, F], biases. */
struct expert {
    float *gate, *up, *down, *up_bias, *down_bias;
};

static void expert_new(struct expert *x, int D, int F)
{
    x->gate = floats((size_t)(F * D), 0.5f);
    x->up = floats((size_t)(F * D), 0.5f);
    x->down = floats((size_t)(D * F), 0.3f);
    x->up_bias = floats((size_t)(2 * F), 1);
    x->down_bias = floats((size_t)D, 1);
}

static void expert_free(struct expert *x)
{
    float *all[] = {x->gate, x->up, x->down, x->up_bias, x->down_bias};
    for (size_t i = 0; i < COUNT_OF(all); i++) free(all[i]);
}

static void normed(const float *x, const float *norm, int D, double *out)
{
    double sum = 0;
    for (int i = 0; i < D; i++) sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < D; i++) out[i] = (double)x[i] / sqrt(sum / D + 1e-5) * (double)norm[i];
}

enum { D = 40, F = 24, E = 8, K = 3, ROWS = 37 };

static void check(const char *what, const char *level, const float *got, const double *want, int n)
{
    for (int i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) < 3e-5 * (1 + fabs(want[i]))))
            fail_msg("%s level %s: [%d] is %g, not %g", what, level, i, (double)got[i], want[i]);
    assert_true(isnan(got[n])); /* the guard */
}

static void the_gate_is_right_at_every_level(void **state)
{
    struct expert x;
    float *in = floats(ROWS * D, 2), *norm = floats(D, 1), *out = floats(ROWS * F + 1, 0);
    double want[ROWS * F], row[D];
    (void)state;
    expert_new(&x, D, F);
    for (int limit = 0; limit <= 1; limit++)
        for (int l = 0; l < n_levels; l++) {
            for (int t = 0; t < ROWS; t++) {
                normed(in + t * D, norm, D, row);
                for (int f = 0; f < F; f++)
                    want[t * F + f] = act(dot(x.gate + f * D, row, D) + (double)x.up_bias[f],
                                          dot(x.up + f * D, row, D) + (double)x.up_bias[F + f], limit);
            }
            struct backend *be = open_level(levels[l], 2);
            struct bweight *w = weight(be, x.gate, F, x.up, F, D, x.up_bias);
            for (int i = 0; i <= ROWS * F; i++) out[i] = NAN;
            be->ops->gate(be, &(struct gate_args){.out = out,
                                                  .x = in,
                                                  .norm = norm,
                                                  .eps = 1e-5f,
                                                  .swiglu_limit = (float)limit,
                                                  .T = ROWS,
                                                  .w = w});
            sync_ok(be);
            check("gate", levels[l], out, want, ROWS * F);
            be->ops->weight_free(be, w);
            backend_close(&be);
        }
    expert_free(&x);
    free(in);
    free(norm);
    free(out);
}

/* kind as model.h numbers routers: 0 softmax then top k, 1 the same renormalised, 2 top k then softmax. */
static void experts_are_right_at_every_level(void **state)
{
    struct expert x[E];
    float *in = floats(ROWS * D, 2), *norm = floats(D, 1), *router = floats(E * D, 1), *bias = floats(E, 1),
          *out = floats(ROWS * D + 1, 0);
    static double want[ROWS * D];
    (void)state;
    for (int i = 0; i < E; i++) expert_new(&x[i], D, F);
    /* Expert 6 is never chosen, expert 7 ties with 0 and loses; expert 2 is held elsewhere. */
    memcpy(router + 7 * D, router, D * sizeof *router);
    bias[7] = bias[0];
    bias[6] = -1000;
    for (int kind = 0; kind < 3; kind++)
        for (int l = 0; l < n_levels; l++) {
            struct backend *be = open_level(levels[l], 2);
            struct bweight *r = weight(be, router, E, NULL, 0, D, bias), *up[E], *down[E];
            for (int i = 0; i < E; i++) {
                up[i] = i == 2 ? NULL : weight(be, x[i].gate, F, x[i].up, F, D, x[i].up_bias);
                down[i] = i == 2 ? NULL : weight(be, x[i].down, D, NULL, 0, F, x[i].down_bias);
            }
            for (int t = 0; t < ROWS; t++) {
                double row[D], z[E], h[F], all = 0, kept = 0;
                int chosen[K];
                normed(in + t * D, norm, D, row);
                for (int i = 0; i < E; i++) all += exp(z[i] = dot(router + i * D, row, D) + (double)bias[i]);
                for (int k = 0; k < K; k++) {
                    chosen[k] = -1;
                    for (int i = 0; i < E; i++) {
                        bool taken = false;
                        for (int j = 0; j < k; j++) taken |= chosen[j] == i;
                        if (!taken && (chosen[k] < 0 || z[i] > z[chosen[k]])) chosen[k] = i;
                    }
                    kept += exp(z[chosen[k]]);
                }
                for (int d = 0; d < D; d++) want[t * D + d] = (double)in[t * D + d];
                for (int k = 0; k < K; k++) {
                    const struct expert *c = &x[chosen[k]];
                    if (chosen[k] == 2) continue;
                    for (int f = 0; f < F; f++)
                        h[f] = act(dot(c->gate + f * D, row, D) + (double)c->up_bias[f],
                                   dot(c->up + f * D, row, D) + (double)c->up_bias[F + f], 7);
                    double p = exp(z[chosen[k]]) / (kind == 0 ? all : kept);
                    for (int d = 0; d < D; d++)
                        want[t * D + d] += p * (dot(c->down + d * F, h, F) + (double)c->down_bias[d]);
                }
            }
            int32_t begin[2] = {0, ROWS}, pos0 = 0, page[2] = {0, 1}, ids[ROWS] = {0};
            be->ops->begin(be, &(struct batch){.T = ROWS,
                                               .n_seqs = 1,
                                               .ids = ids,
                                               .seq_begin = begin,
                                               .pos0 = &pos0,
                                               .pages = page,
                                               .max_pages = 2});
            for (int i = 0; i <= ROWS * D; i++) out[i] = NAN;
            be->ops->moe(be, &(struct moe_args){.out = out,
                                                .x = in,
                                                .residual = in,
                                                .norm = norm,
                                                .eps = 1e-5f,
                                                .swiglu_limit = 7,
                                                .T = ROWS,
                                                .E = E,
                                                .k = K,
                                                .kind = kind,
                                                .router = r,
                                                .gate_up = (const struct bweight *const *)up,
                                                .down = (const struct bweight *const *)down});
            sync_ok(be);
            check("moe", levels[l], out, want, ROWS * D);
            be->ops->weight_free(be, r);
            for (int i = 0; i < E; i++) {
                be->ops->weight_free(be, up[i]);
                be->ops->weight_free(be, down[i]);
            }
            backend_close(&be);
        }
    for (int i = 0; i < E; i++) expert_free(&x[i]);
    free(in);
    free(norm);
    free(router);
    free(bias);
    free(out);
}

/* Rows that hurt: the best first, last, at the end of a run, twice; among NaN and infinities; nowhere. */
static void the_largest_is_found(void **state)
{
    static const int widths[] = {1, 15, 16, 17, 1024, 1025, 3001};
    enum { N_ROWS = 9 };
    (void)state;
    for (int l = 0; l < n_levels; l++)
        for (size_t w = 0; w < COUNT_OF(widths); w++) {
            struct backend *be = open_level(levels[l], 2);
            int V = widths[w];
            size_t n = (size_t)(N_ROWS * V);
            float *x = floats(n, 1), *dev;
            int32_t ids[N_ROWS + 1], want[N_ROWS] = {0};
            struct err e;
            const float special[N_ROWS] = {7, 7, 7, INFINITY, NAN, -INFINITY, 0, 0, -3e38f};
            const int at[N_ROWS] = {0, V - 1, V / 2, V / 3, V / 4, V / 5, 0, 0, V - 1};
            for (int r = 0; r < N_ROWS; r++) x[r * V + at[r]] = special[r];
            x[2 * V + V - 1] = 7; /* twice */
            for (int i = 0; i < V; i++) {
                x[6 * V + i] = i % 2 ? NAN : -INFINITY;
                x[7 * V + i] = -1;
                if (i < V - 1) x[8 * V + i] = i % 3 ? NAN : -INFINITY;
            }
            for (int r = 0; r < N_ROWS; r++) {
                float best = -INFINITY;
                want[r] = -1;
                for (int i = 0; i < V; i++)
                    if (x[r * V + i] > best) best = x[r * V + i], want[r] = i;
            }
            ids[N_ROWS] = 12345;
            if (be->ops->alloc(be, &dev, n * sizeof *x, &e) < 0) fail_msg("%s", e.msg);
            be->ops->upload(be, dev, x, n * sizeof *x);
            for (int rows = 1; rows <= N_ROWS; rows += 4) { /* 1, 5, 9 */
                memset(ids, 0x77, (size_t)rows * sizeof *ids);
                if (be->ops->best(be, dev, rows, V, ids, &e) < 0) fail_msg("%s", e.msg);
                for (int r = 0; r < rows; r++)
                    if (ids[r] != want[r])
                        fail_msg("%s: row %d of %d: %d, not %d", levels[l], r, V, ids[r], want[r]);
                assert_int_equal(ids[N_ROWS], 12345);
            }
            be->ops->free(be, dev);
            backend_close(&be);
            free(x);
        }
}

static void levels_are_named(void **state)
{
    struct backend *be = NULL;
    struct err e;
    (void)state;
    assert_int_equal(backend_open(&be, &(struct backend_opts){.cpu_level = "mmx"}, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "mmx"));
    assert_non_null(strstr(e.msg, levels[n_levels - 1]));
    assert_int_equal(backend_open(&be, &(struct backend_opts){.threads = -1}, &e), ERR_INPUT);
    assert_null(be);
}

/* ------------------------------------------------------------------------------------------------ timing */

static void time_attention(void)
{
    struct shape s = {32, 8, 64, 0, 1, 2047, false, false, false};
    struct attention a;
    make_attention(&a, s);
    float *out = floats((size_t)(s.H * s.Dh), 0);
    for (int l = 0; l < n_levels; l++) {
        struct backend *be = open_level(levels[l], 1);
        double t = clock_now();
        run_attention(be, &a, a.n, out);
        double pass = clock_now() - t;
        double work = 4.0 * s.H * s.Dh * a.n * (a.n + 1.0) / 2; /* FLOP of scores and mix */
        printf("%-7s prefill %d, %d heads over %d of %d: %.1f ms, %.1f GFLOP/s on one thread\n", levels[l], a.n, s.H,
               s.Hk, s.Dh, pass * 1e3, work / pass / 1e9);
        backend_close(&be);
    }
    free(out);
    free_attention(&a);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_right_at_every_level),
        cmocka_unit_test(chunks_and_threads_leave_the_bits),
        cmocka_unit_test(the_gate_is_right_at_every_level),
        cmocka_unit_test(experts_are_right_at_every_level),
        cmocka_unit_test(the_largest_is_found),
        cmocka_unit_test(levels_are_named),
    };
    for (size_t i = 0; i < COUNT_OF(all_levels); i++) {
        struct backend *be;
        if (backend_open(&be, &(struct backend_opts){.threads = 1, .cpu_level = all_levels[i]}, NULL) < 0) continue;
        levels[n_levels++] = all_levels[i];
        backend_close(&be);
    }
    if (argc > 1 && !strcmp(argv[1], "--time")) return time_attention(), 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
