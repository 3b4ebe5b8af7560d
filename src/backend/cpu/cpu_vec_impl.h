/* cpu_vec_impl: the vector pieces of a level over v16 (see cpu_linear_impl.h), and v16_add, v16_div, v16_min(y, x),
 * v16_max(y, x) (x NaN: NaN), v16_round (to nearest even), v16_pow2 (2^n of integers -126..127), v16_to_f16.
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

static inline float lanes_sum(v16 x)
{
    float f[16];
    v16_store(f, x);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) f[i] += f[i + step];
    return f[0];
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
    v16 scale = v16_set(1.0f / sqrtf(lanes_sum(sum) / (float)n + eps));
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

static inline __attribute__((always_inline)) void score_heads(int R, float (*scores)[KV_PAGE], const float *q, const uint16_t *k,
                                                              int Dh, float scale)
{
    v16 sum[4][2];
    for (int h = 0; h < R; h++) sum[h][0] = sum[h][1] = v16_zero();
    for (int d = 0; d < Dh; d++) {
        const uint8_t *row = (const uint8_t *)(k + (size_t)d * KV_PAGE);
        v16 a = v16_f16(row), b = v16_f16(row + 32);
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

static void vec_score(float (*scores)[KV_PAGE], const float *q, int n_heads, const uint16_t *k, int Dh, float scale)
{
    int h = 0;
    for (; h + 4 <= n_heads; h += 4) score_heads(4, scores + h, q + h * Dh, k, Dh, scale);
    if (n_heads - h == 3) score_heads(3, scores + h, q + h * Dh, k, Dh, scale);
    else if (n_heads - h == 2) score_heads(2, scores + h, q + h * Dh, k, Dh, scale);
    else if (n_heads - h == 1) score_heads(1, scores + h, q + h * Dh, k, Dh, scale);
}

static float vec_softmax(float *p, int from, int to, float max)
{
    v16 sum = v16_zero();
    for (int i = 0; i < KV_PAGE; i += 16) {
        v16_store(p + i, v16_exp(v16_add(v16_load(p + i), v16_set(-max))));
        for (int j = i; j < i + 16; j++)
            if (j < from || j >= to) p[j] = 0;
        sum = v16_add(sum, v16_load(p + i));
    }
    return lanes_sum(sum);
}

static inline __attribute__((always_inline)) void mix_heads(int R, float *acc, const float *keep, float (*p)[KV_PAGE],
                                                            const uint16_t *v, int from, int to, int Dh)
{
    for (int d = 0; d < Dh; d += 16) {
        int left = Dh - d;
        v16 sum[4];
        for (int h = 0; h < R; h++) sum[h] = v16_mul(load_n(acc + h * Dh + d, left), v16_set(keep[h]));
        for (int j = from; j < to; j++) {
            v16 x = v16_f16((const uint8_t *)(v + (size_t)j * (size_t)Dh + d));
            for (int h = 0; h < R; h++) sum[h] = v16_fma(x, v16_set(p[h][j]), sum[h]);
        }
        for (int h = 0; h < R; h++) store_n(acc + h * Dh + d, sum[h], left);
    }
}

static void vec_mix(float *acc, int n_heads, const float *keep, float (*p)[KV_PAGE], const uint16_t *v, int from, int to, int Dh)
{
    int h = 0;
    for (; h + 4 <= n_heads; h += 4) mix_heads(4, acc + h * Dh, keep + h, p + h, v, from, to, Dh);
    if (n_heads - h == 3) mix_heads(3, acc + h * Dh, keep + h, p + h, v, from, to, Dh);
    else if (n_heads - h == 2) mix_heads(2, acc + h * Dh, keep + h, p + h, v, from, to, Dh);
    else if (n_heads - h == 1) mix_heads(1, acc + h * Dh, keep + h, p + h, v, from, to, Dh);
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
    return lanes_sum(all);
}

static void vec_fill(struct cpu_level *l)
{
    l->rms_norm = vec_rms_norm;
    l->gate = vec_gate;
    l->add_scaled = vec_add_scaled;
    l->score = vec_score;
    l->softmax = vec_softmax;
    l->mix = vec_mix;
    l->to_f16 = vec_to_f16;
    l->peak_fp32 = vec_peak_fp32;
    l->fp32_ops = 2 * 16 * PEAK_CHAINS;
}
