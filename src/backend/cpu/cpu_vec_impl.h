/* cpu_vec_impl: the vector pieces of a level over v16 (see cpu_linear_impl.h), and v16_add, v16_div, v16_min(y, x),
 * v16_max(y, x) (x NaN: NaN), v16_larger(x, y) (x NaN: y), v16_round (to nearest even), v16_pow2 (2^n of integers -126..127), v16_to_f16, and over the
 * lanes v16_sum (halves added to halves) and v16_top (the largest).
 * Sums over lanes go in one fixed order, so a row's numbers do not depend on where it is computed. */
#include <math.h>
#include <string.h>

#include "cpu_priv.h"

/* exp(x) to about 1e-7, for x <= 88: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r (Cephes expf). Below -87 it
 * gives exp(-87), next to nothing; NaN stays NaN. */
static inline v16 v16_exp(v16 x)
{
    x = v16_max(v16_set(-87.0f), v16_min(v16_set(88.0f), x));
    v16 n = v16_round(v16_mul(x, v16_set(1.44269504f)));
    v16 r = v16_fma(n, v16_set(-0.693359375f), x);
    r = v16_fma(n, v16_set(2.12194440e-4f), r);
    v16 p = v16_set(1.9875691500e-4f);
    p = v16_fma(p, r, v16_set(1.3981999507e-3f));
    p = v16_fma(p, r, v16_set(8.3334519073e-3f));
    p = v16_fma(p, r, v16_set(4.1665795894e-2f));
    p = v16_fma(p, r, v16_set(1.6666665459e-1f));
    p = v16_fma(p, r, v16_set(5.0000001201e-1f));
    p = v16_fma(v16_mul(r, r), p, v16_add(r, v16_set(1)));
    return v16_mul(p, v16_pow2(n));
}

/* Runs `body` over whole vectors of [0, n), then once over a padded copy of the rest. */
static inline v16 load_part(const float *p, int64_t n)
{
    float f[16] = {0};
    memcpy(f, p, (size_t)n * sizeof *f);
    return v16_load(f);
}
static inline void store_part(float *p, v16 x, int64_t n)
{
    float f[16];
    v16_store(f, x);
    memcpy(p, f, (size_t)n * sizeof *f);
}
static inline v16 load_n(const float *p, int64_t left) { return left >= 16 ? v16_load(p) : load_part(p, left); }
static inline void store_n(float *p, v16 x, int64_t left)
{
    if (left >= 16) v16_store(p, x);
    else store_part(p, x, left);
}

static void vec_rms_norm(float *dst, const float *x, const float *w, float eps, int64_t n)
{
    v16 sum = v16_zero();
    if (!w) {
        memmove(dst, x, (size_t)n * sizeof *dst);
        return;
    }
    for (int64_t i = 0; i < n; i += 16) {
        v16 v = load_n(x + i, n - i);
        sum = v16_fma(v, v, sum);
    }
    v16 scale = v16_set(1.0f / sqrtf(v16_sum(sum) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16)
        store_n(dst + i, v16_mul(v16_mul(load_n(x + i, n - i), scale), load_n(w + i, n - i)), n - i);
}

static void vec_gate(float *dst, const float *gate, const float *up, float limit, int64_t n)
{
    const v16 one = v16_set(1), minus_one = v16_set(-1);
    for (int64_t i = 0; i < n; i += 16) {
        v16 g = load_n(gate + i, n - i), u = load_n(up + i, n - i), z = g;
        if (limit > 0) {
            g = v16_min(v16_set(limit), g);
            u = v16_add(v16_max(v16_set(-limit), v16_min(v16_set(limit), u)), one);
            z = v16_mul(g, v16_set(1.702f));
        }
        /* sigmoid(z) = 1 / (1 + exp(-z)) */
        v16 sigmoid = v16_div(one, v16_add(one, v16_exp(v16_mul(z, minus_one))));
        store_n(dst + i, v16_mul(v16_mul(g, sigmoid), u), n - i);
    }
}

static void vec_add_scaled(float *acc, const float *y, float w, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) store_n(acc + i, v16_fma(load_n(y + i, n - i), v16_set(w), load_n(acc + i, n - i)), n - i);
}

/* The pages of attention hold f16, or what vec_from_f16 made of them: the same numbers. */
FORCE_INLINE v16 page_load(const void *page, bool wide, size_t at)
{
    return wide ? v16_load((const float *)page + at) : v16_f16((const uint8_t *)((const uint16_t *)page + at));
}

FORCE_INLINE void score_some(int R, float (*scores)[KV_PAGE], const float *q, const void *k, bool wide, int Dh, float scale)
{
    v16 sum[ATTEND_ROWS][2];
    for (int h = 0; h < R; h++) sum[h][0] = sum[h][1] = v16_zero();
    for (int d = 0; d < Dh; d++) {
        v16 a = page_load(k, wide, (size_t)d * KV_PAGE), b = page_load(k, wide, (size_t)d * KV_PAGE + 16);
        for (int h = 0; h < R; h++) {
            v16 x = v16_set(q[h * Dh + d]);
            sum[h][0] = v16_fma(a, x, sum[h][0]);
            sum[h][1] = v16_fma(b, x, sum[h][1]);
        }
    }
    for (int h = 0; h < R; h++) {
        v16_store(scores[h], v16_mul(sum[h][0], v16_set(scale)));
        v16_store(scores[h] + 16, v16_mul(sum[h][1], v16_set(scale)));
    }
}

FORCE_INLINE void score_all(float (*scores)[KV_PAGE], const float *q, int n, const void *k, bool wide, int Dh, float scale)
{
    int h = 0;
    for (; h + ATTEND_ROWS <= n; h += ATTEND_ROWS) score_some(ATTEND_ROWS, scores + h, q + h * Dh, k, wide, Dh, scale);
    if (ATTEND_ROWS > 4 && h + 4 <= n) score_some(4, scores + h, q + h * Dh, k, wide, Dh, scale), h += 4;
    if (h + 2 <= n) score_some(2, scores + h, q + h * Dh, k, wide, Dh, scale), h += 2;
    if (h < n) score_some(1, scores + h, q + h * Dh, k, wide, Dh, scale);
}

static void vec_score(float (*scores)[KV_PAGE], const float *q, int n, const void *k, bool wide, int Dh, float scale)
{
    if (wide) score_all(scores, q, n, k, true, Dh, scale);
    else score_all(scores, q, n, k, false, Dh, scale);
}

/* A NaN among the scores may be missed as the largest; as a score it makes its sum, and the row, NaN. */
static void vec_softmax(float (*p)[KV_PAGE], int n, int from, int to, float *max, float *sum, float *keep)
{
    for (int h = 0; h < n; h++) {
        for (int j = 0; j < from; j++) p[h][j] = -INFINITY;
        for (int j = to; j < KV_PAGE; j++) p[h][j] = -INFINITY;
        float best = v16_top(v16_max(v16_load(p[h]), v16_load(p[h] + 16)));
        keep[h] = max[h];
        max[h] = best > max[h] ? best : max[h];
    }
    for (int h = 0; h < n; h += 16) {
        v16 before = load_n(keep + h, n - h), factor = v16_exp(v16_add(before, v16_mul(load_n(max + h, n - h), v16_set(-1))));
        store_n(keep + h, factor, n - h);
    }
    for (int h = 0; h < n; h++) {
        v16 less = v16_set(-max[h]);
        v16 a = v16_exp(v16_add(v16_load(p[h]), less)), b = v16_exp(v16_add(v16_load(p[h] + 16), less));
        v16_store(p[h], a);
        v16_store(p[h] + 16, b);
        if (from > 0 || to < KV_PAGE) { /* exp is never quite zero */
            for (int j = 0; j < from; j++) p[h][j] = 0;
            for (int j = to; j < KV_PAGE; j++) p[h][j] = 0;
            a = v16_load(p[h]), b = v16_load(p[h] + 16);
        }
        sum[h] = sum[h] * keep[h] + v16_sum(v16_add(a, b));
    }
}

/* D: 16 or 32 columns at once. */
FORCE_INLINE void mix_some(int R, int D, float *acc, const float *keep, float (*p)[KV_PAGE], const void *v, bool wide, int from,
                           int to, int Dh, int64_t left)
{
    v16 sum[ATTEND_ROWS][2];
    for (int h = 0; h < R; h++)
        for (int i = 0; i < D / 16; i++)
            sum[h][i] = v16_mul(load_n(acc + h * Dh + 16 * i, left - 16 * i), v16_set(keep[h]));
    for (int j = from; j < to; j++) {
        v16 x[2];
        for (int i = 0; i < D / 16; i++) x[i] = page_load(v, wide, (size_t)j * (size_t)Dh + 16 * (size_t)i);
        for (int h = 0; h < R; h++) {
            v16 w = v16_set(p[h][j]);
            for (int i = 0; i < D / 16; i++) sum[h][i] = v16_fma(x[i], w, sum[h][i]);
        }
    }
    for (int h = 0; h < R; h++)
        for (int i = 0; i < D / 16; i++) store_n(acc + h * Dh + 16 * i, sum[h][i], left - 16 * i);
}

FORCE_INLINE void mix_rows(int R, float *acc, const float *keep, float (*p)[KV_PAGE], const void *v, bool wide, int from, int to,
                           int Dh)
{
    const size_t size = wide ? sizeof(float) : sizeof(uint16_t);
    int d = 0;
    for (; d + 32 <= Dh; d += 32)
        mix_some(R, 32, acc + d, keep, p, (const uint8_t *)v + (size_t)d * size, wide, from, to, Dh, 32);
    for (; d < Dh; d += 16)
        mix_some(R, 16, acc + d, keep, p, (const uint8_t *)v + (size_t)d * size, wide, from, to, Dh, Dh - d);
}

FORCE_INLINE void mix_all(float *acc, int n, const float *keep, float (*p)[KV_PAGE], const void *v, bool wide, int from, int to,
                          int Dh)
{
    int h = 0;
    for (; h + ATTEND_ROWS <= n; h += ATTEND_ROWS)
        mix_rows(ATTEND_ROWS, acc + h * Dh, keep + h, p + h, v, wide, from, to, Dh);
    if (ATTEND_ROWS > 4 && h + 4 <= n) mix_rows(4, acc + h * Dh, keep + h, p + h, v, wide, from, to, Dh), h += 4;
    if (h + 2 <= n) mix_rows(2, acc + h * Dh, keep + h, p + h, v, wide, from, to, Dh), h += 2;
    if (h < n) mix_rows(1, acc + h * Dh, keep + h, p + h, v, wide, from, to, Dh);
}

static void vec_mix(float *acc, int n, const float *keep, float (*p)[KV_PAGE], const void *v, bool wide, int from, int to, int Dh)
{
    if (wide) mix_all(acc, n, keep, p, v, true, from, to, Dh);
    else mix_all(acc, n, keep, p, v, false, from, to, Dh);
}

static void vec_from_f16(float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_store(dst + i, v16_f16((const uint8_t *)(src + i)));
    for (; i < n; i++) dst[i] = f16_to_f32(src[i]);
}

/* The largest of each run first: only the run that holds it is looked through. */
static int32_t vec_best(const float *x, int n)
{
    enum { RUN = 1024 };
    float best = -INFINITY;
    int at = -1;
    for (int from = 0; from < n; from += RUN) {
        int to = n - from < RUN ? n : from + RUN, i = from;
        v16 most = v16_set(-INFINITY);
        for (; i + 16 <= to; i += 16) most = v16_larger(v16_load(x + i), most);
        float top = v16_top(most);
        for (; i < to; i++) top = x[i] > top ? x[i] : top;
        if (top > best) best = top, at = from;
    }
    if (at < 0) return -1;
    while (x[at] != best) at++;
    return at;
}

static void vec_to_f16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) v16_to_f16(dst + i, v16_load(src + i));
    for (; i < n; i++) dst[i] = f32_to_f16(src[i]);
}

/* What cpu_limits.c measures. The chains are long enough to hide the latency of a multiply-add, and few enough for the
 * registers. */
static float vec_peak_fp32(int n)
{
    v16 sum[PEAK_CHAINS], x = v16_set(0.5f), all = v16_zero();
    for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = v16_set((float)i);
    for (int k = 0; k < n; k++)
        for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = v16_fma(sum[i], x, x);
    for (int i = 0; i < PEAK_CHAINS; i++) all = v16_add(all, sum[i]);
    return v16_sum(all);
}

static void vec_fill(struct cpu_level *l)
{
    l->rms_norm = vec_rms_norm;
    l->gate = vec_gate;
    l->add_scaled = vec_add_scaled;
    l->score = vec_score;
    l->softmax = vec_softmax;
    l->mix = vec_mix;
    l->best = vec_best;
    l->to_f16 = vec_to_f16;
    l->from_f16 = vec_from_f16;
    l->peak_fp32 = vec_peak_fp32;
    l->fp32_ops = 2 * 16 * PEAK_CHAINS;
}
