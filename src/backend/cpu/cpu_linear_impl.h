/* cpu_linear_impl: products over packed tiles, written once and included by each SIMD level's file, which defines before
 *   v16                16 floats, one a lane: v16_zero v16_load v16_store v16_set v16_fma(a, b, c) = a * b + c v16_mul
 *                      v16_f16 v16_bf16 v16_e4m3 v16_i8 v16_u8 (16 elements at a pointer, as float) v16_e8m0
 *   b64                64 bytes: b64_load b64_store b64_and(a, byte) b64_or b64_shl(a, n)
 *                      b64_shr(a, n) (16-bit shifts: mask afterwards) b64_fp4 (codes to 2 * value + 12) b64_flip (xor 0x80)
 *   dot                v16 of the integer dot products of 16 lanes over steps [s0, s1) of a tile, see below
 *   BYTE_OFFSET        what the level's dot wants of signed bytes: 128 (stored unsigned) or 0 (as they are)
 *
 * Two families of tiles. Float tiles become float w[32][16] and are multiplied column by column. Integer tiles become
 * bytes u[8][16][4] with value = scale * (u - offset) (+ min); activations are int8 with a scale a tile, so
 *     sum over the tile = scale * d * dot(u, q) + (min - scale * offset) * s,     s = d * sum(q).
 * Every output lane sees the same operations in the same order for any number of rows. */
#include <math.h>
#include <string.h>

#include "cpu_priv.h"

enum { ROW_BLOCK = 64 }; /* rows whose sums are kept in the first-level cache while a panel streams by */

/* An unpacked integer tile. halves: 1, or 2 where columns 0-15 and 16-31 have scales of their own. */
struct itile {
    _Alignas(64) uint8_t u[8][64];
    v16 scale[2], min[2];
};

static inline void unpack_nibbles(struct itile *t, const uint8_t *p)
{
    for (int s = 0; s < 4; s++) {
        b64 b = b64_load(p + 64 * s);
        b64_store(t->u[s], b64_and(b, 0x0F));
        b64_store(t->u[s + 4], b64_and(b64_shr(b, 4), 0x0F));
    }
}

static inline void unpack_fp4(struct itile *t, const uint8_t *p)
{
    for (int s = 0; s < 4; s++) {
        b64 b = b64_load(p + 64 * s);
        b64_store(t->u[s], b64_fp4(b64_and(b, 0x0F)));
        b64_store(t->u[s + 4], b64_fp4(b64_and(b64_shr(b, 4), 0x0F)));
    }
}

static inline void unpack_fifth(struct itile *t, const uint8_t *bits, const uint8_t *p)
{
    b64 h = b64_load(bits);
    for (int s = 0; s < 4; s++) {
        b64 b = b64_load(p + 64 * s);
        b64_store(t->u[s], b64_or(b64_and(b, 0x0F), b64_and(b64_shl(h, 4 - s), 0x10)));
        b64_store(t->u[s + 4], b64_or(b64_and(b64_shr(b, 4), 0x0F), b64_and(b64_shr(h, s), 0x10)));
    }
}

static inline void unpack_sixth(struct itile *t, const uint8_t *bits, const uint8_t *p)
{
    b64 h0 = b64_load(bits), h1 = b64_load(bits + 64);
    b64 b0 = b64_load(p), b1 = b64_load(p + 64), b2 = b64_load(p + 128), b3 = b64_load(p + 192);
    b64_store(t->u[0], b64_or(b64_and(b0, 0x0F), b64_and(b64_shl(h0, 4), 0x30)));
    b64_store(t->u[1], b64_or(b64_and(b1, 0x0F), b64_and(b64_shl(h0, 2), 0x30)));
    b64_store(t->u[2], b64_or(b64_and(b2, 0x0F), b64_and(h0, 0x30)));
    b64_store(t->u[3], b64_or(b64_and(b3, 0x0F), b64_and(b64_shr(h0, 2), 0x30)));
    b64_store(t->u[4], b64_or(b64_and(b64_shr(b0, 4), 0x0F), b64_and(b64_shl(h1, 4), 0x30)));
    b64_store(t->u[5], b64_or(b64_and(b64_shr(b1, 4), 0x0F), b64_and(b64_shl(h1, 2), 0x30)));
    b64_store(t->u[6], b64_or(b64_and(b64_shr(b2, 4), 0x0F), b64_and(h1, 0x30)));
    b64_store(t->u[7], b64_or(b64_and(b64_shr(b3, 4), 0x0F), b64_and(b64_shr(h1, 2), 0x30)));
}

/* What is fixed for a type at compile time. bits: an upper bound of u, for levels whose dot sums pairs in 16 bits. */
struct ikind {
    int halves, bits;
    bool min; /* (min - scale * offset) is not zero */
};

static inline struct ikind kind_of(enum dtype type)
{
    switch (type) {
    case DT_Q5_0: case DT_Q5_1: case DT_Q5_K: return (struct ikind){1, 5, true};
    case DT_MXFP4: case DT_MXFP4_GGUF: return (struct ikind){1, 5, true};
    case DT_NVFP4: return (struct ikind){2, 5, true};
    case DT_Q6_K: return (struct ikind){2, 6, true};
    case DT_Q8_0: return (struct ikind){1, 8, BYTE_OFFSET != 0};
    default: return (struct ikind){1, 4, true};
    }
}

static inline v16 minus(v16 scale, float offset) { return v16_mul(scale, v16_set(-offset)); }

static inline __attribute__((always_inline)) void unpack(enum dtype type, const uint8_t *head, const uint8_t *p, v16 lane_scale,
                                                         struct itile *t)
{
    switch (type) {
    case DT_Q4_0:
        t->scale[0] = v16_f16(p);
        t->min[0] = minus(t->scale[0], 8);
        unpack_nibbles(t, p + 32);
        break;
    case DT_Q4_1:
        t->scale[0] = v16_f16(p);
        t->min[0] = v16_f16(p + 32);
        unpack_nibbles(t, p + 64);
        break;
    case DT_Q5_0:
        t->scale[0] = v16_f16(p);
        t->min[0] = minus(t->scale[0], 16);
        unpack_fifth(t, p + 32, p + 96);
        break;
    case DT_Q5_1:
        t->scale[0] = v16_f16(p);
        t->min[0] = v16_f16(p + 32);
        unpack_fifth(t, p + 64, p + 128);
        break;
    case DT_Q8_0:
        t->scale[0] = v16_f16(p);
        if (BYTE_OFFSET) t->min[0] = minus(t->scale[0], BYTE_OFFSET);
        for (int s = 0; s < 8; s++) {
            b64 b = b64_load(p + 32 + 64 * s);
            b64_store(t->u[s], BYTE_OFFSET ? b64_flip(b) : b);
        }
        break;
    case DT_Q4_K: case DT_Q5_K:
        t->scale[0] = v16_mul(v16_f16(head), v16_u8(p));
        t->min[0] = v16_mul(minus(v16_f16(head + 32), 1), v16_u8(p + 16));
        if (type == DT_Q4_K) unpack_nibbles(t, p + 32);
        else unpack_fifth(t, p + 32, p + 96);
        break;
    case DT_Q6_K:
        for (int h = 0; h < 2; h++) {
            t->scale[h] = v16_mul(v16_f16(head), v16_i8(p + 16 * h));
            t->min[h] = minus(t->scale[h], 32);
        }
        unpack_sixth(t, p + 32, p + 160);
        break;
    case DT_MXFP4: case DT_MXFP4_GGUF: /* codes as 2 * value: half the scale */
        t->scale[0] = v16_mul(v16_e8m0(p), v16_set(0.5f));
        t->min[0] = minus(t->scale[0], 12);
        unpack_fp4(t, p + 16);
        break;
    case DT_NVFP4:
        for (int h = 0; h < 2; h++) {
            t->scale[h] = v16_mul(v16_mul(v16_e4m3(p + 16 * h), lane_scale), v16_set(0.5f));
            t->min[h] = minus(t->scale[h], 12);
        }
        unpack_fp4(t, p + 32);
        break;
    default: break;
    }
}

/* R rows at once against one unpacked tile: sums acc[R][16]. */
static inline __attribute__((always_inline)) void rows_int(struct ikind k, int R, const struct itile *t, const struct cpu_acts *a,
                                                           int m, int64_t tile, float (*acc)[PANEL])
{
    size_t tiles = (size_t)(a->Kp / TILE);
    const int8_t *q = a->q + (size_t)m * (size_t)a->Kp + tile * TILE;
    const float *d = a->d + (size_t)m * tiles + tile, *s = a->s + 2 * ((size_t)m * tiles + (size_t)tile);
    for (int h = 0; h < k.halves; h++) {
        v16 dots[4];
        dot(R, k.bits, t->u[0], q, (size_t)a->Kp, h * 8 / k.halves, (h + 1) * 8 / k.halves, dots);
        for (int r = 0; r < R; r++) {
            const float *sr = s + 2 * (size_t)r * tiles;
            v16 sum = v16_load(acc[r]);
            sum = v16_fma(t->scale[h], v16_mul(dots[r], v16_set(d[(size_t)r * tiles])), sum);
            if (k.min) sum = v16_fma(t->min[h], v16_set(k.halves == 2 ? sr[h] : sr[0] + sr[1]), sum);
            v16_store(acc[r], sum);
        }
    }
}

static inline __attribute__((always_inline)) void product_int(enum dtype type, const struct cpu_part *p, int64_t p0, int64_t p1,
                                                              const struct cpu_acts *a, int first, int last, const struct cpu_out *out)
{
    const struct ikind k = kind_of(type);
    for (int64_t panel = p0; panel < p1; panel++) {
        int64_t left = p->rows - panel * PANEL;
        size_t lanes = left < PANEL ? (size_t)left : PANEL;
        v16 lane_scale = p->scale_runs ? v16_load(p->scale + panel * PANEL) : v16_zero();
        for (int m0 = first; m0 < last; m0 += ROW_BLOCK) {
            _Alignas(64) float acc[ROW_BLOCK][PANEL];
            int n = last - m0 < ROW_BLOCK ? last - m0 : ROW_BLOCK;
            memset(acc, 0, (size_t)n * sizeof acc[0]);
            const uint8_t *group = p->data + (size_t)panel * p->panel_bytes, *tile = group + p->group_head;
            for (int64_t t = 0; t < p->tiles; t++) {
                struct itile it;
                unpack(type, group, tile, lane_scale, &it);
                int m = 0;
                for (; m + 4 <= n; m += 4) rows_int(k, 4, &it, a, m0 + m, t, acc + m);
                for (; m < n; m++) rows_int(k, 1, &it, a, m0 + m, t, acc + m);
                tile += p->tile_bytes;
                if (t % 8 == 7) {
                    group = tile;
                    tile += p->group_head;
                }
            }
            for (int m = 0; m < n; m++) cpu_store(out, (size_t)(m0 + m), (size_t)panel * PANEL, acc[m], lanes);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ float tiles */

static inline __attribute__((always_inline)) v16 column(enum dtype type, const uint8_t *tile, int k, v16 scale)
{
    switch (type) {
    case DT_F32: return v16_load((const float *)(const void *)(tile + 64 * k));
    case DT_F16: return v16_f16(tile + 32 * k);
    case DT_BF16: return v16_bf16(tile + 32 * k);
    default: return v16_mul(v16_e4m3(tile + 16 * k), scale);
    }
}

/* R rows against one tile in registers (few rows: converted on the way) or in w[32] (many rows: converted once). */
static inline __attribute__((always_inline)) void rows_float(int R, const v16 *w, const struct cpu_acts *a, int m, int64_t tile,
                                                             float (*acc)[PANEL])
{
    const float *x = a->x + (size_t)m * (size_t)a->Kp + tile * TILE;
    v16 sum[4];
    for (int r = 0; r < R; r++) sum[r] = v16_load(acc[r]);
    for (int k = 0; k < TILE; k++)
        for (int r = 0; r < R; r++) sum[r] = v16_fma(w[k], v16_set(x[(size_t)r * (size_t)a->Kp + (size_t)k]), sum[r]);
    for (int r = 0; r < R; r++) v16_store(acc[r], sum[r]);
}

static inline __attribute__((always_inline)) void product_float(enum dtype type, const struct cpu_part *p, int64_t p0, int64_t p1,
                                                                const struct cpu_acts *a, int first, int last, const struct cpu_out *out)
{
    for (int64_t panel = p0; panel < p1; panel++) {
        int64_t left = p->rows - panel * PANEL;
        size_t lanes = left < PANEL ? (size_t)left : PANEL;
        for (int m0 = first; m0 < last; m0 += ROW_BLOCK) {
            _Alignas(64) float acc[ROW_BLOCK][PANEL];
            int n = last - m0 < ROW_BLOCK ? last - m0 : ROW_BLOCK;
            memset(acc, 0, (size_t)n * sizeof acc[0]);
            const uint8_t *tile = p->data + (size_t)panel * p->panel_bytes;
            for (int64_t t = 0; t < p->tiles; t++, tile += p->tile_bytes) {
                v16 w[TILE], scale = v16_zero();
                if (p->scale_runs)
                    scale = v16_load(p->scale + (panel * p->scale_runs + (t + p->scale_tile0) / p->scale_tiles) * PANEL);
                for (int k = 0; k < TILE; k++) w[k] = column(type, tile, k, scale);
                int m = 0;
                for (; m + 4 <= n; m += 4) rows_float(4, w, a, m0 + m, t, acc + m);
                for (; m < n; m++) rows_float(1, w, a, m0 + m, t, acc + m);
            }
            for (int m = 0; m < n; m++) cpu_store(out, (size_t)(m0 + m), (size_t)panel * PANEL, acc[m], lanes);
        }
    }
}

/* ------------------------------------------------------------------------------------------------ the table */

static void product(const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, int first, int last, const struct cpu_out *out)
{
    switch (p->type) {
#define FLOAT_TYPE(type) case type: product_float(type, p, p0, p1, a, first, last, out); break;
#define INT_TYPE(type) case type: product_int(type, p, p0, p1, a, first, last, out); break;
    FLOAT_TYPE(DT_F32) FLOAT_TYPE(DT_F16) FLOAT_TYPE(DT_BF16) FLOAT_TYPE(DT_F8_E4M3)
    INT_TYPE(DT_Q4_0) INT_TYPE(DT_Q4_1) INT_TYPE(DT_Q5_0) INT_TYPE(DT_Q5_1) INT_TYPE(DT_Q8_0)
    INT_TYPE(DT_Q4_K) INT_TYPE(DT_Q5_K) INT_TYPE(DT_Q6_K) INT_TYPE(DT_NVFP4)
    case DT_MXFP4: INT_TYPE(DT_MXFP4_GGUF)
#undef FLOAT_TYPE
#undef INT_TYPE
    case DT_NONE: case DT_COUNT: break;
    }
}

static bool quantised(enum dtype type)
{
    return type != DT_F32 && type != DT_F16 && type != DT_BF16 && type != DT_F8_E4M3;
}

static void quantise(const struct cpu_acts *a, int m)
{
    size_t tiles = (size_t)(a->Kp / TILE);
    const float *x = a->x + (size_t)m * (size_t)a->Kp;
    int8_t *q = a->q + (size_t)m * (size_t)a->Kp;
    for (size_t t = 0; t < tiles; t++, x += TILE, q += TILE) {
        uint32_t max = 0;
        for (int k = 0; k < TILE; k++) {
            uint32_t bits;
            memcpy(&bits, x + k, 4);
            bits &= 0x7FFFFFFF;
            max = bits > max ? bits : max;
        }
        float amax, d, inv;
        memcpy(&amax, &max, 4);
        d = amax / 127;
        inv = 127 / amax;
        if (max >= 0x7F800000) d = NAN, inv = 0; /* infinity or NaN among them: let it be seen in the outputs */
        if (amax < 1e-35f) d = inv = 0;          /* 127 / amax would overflow: the tile is zero at this scale */
        int sum0 = 0, sum1 = 0;
        for (int k = 0; k < TILE; k++) {
            int v = inv == 0 ? 0 : (int)__builtin_rintf(x[k] * inv);
            q[k] = (int8_t)v;
        }
        for (int k = 0; k < 16; k++) sum0 += q[k], sum1 += q[16 + k];
        a->d[(size_t)m * tiles + t] = d;
        a->s[2 * ((size_t)m * tiles + t)] = d * (float)sum0;
        a->s[2 * ((size_t)m * tiles + t) + 1] = d * (float)sum1;
    }
}

static void linear_fill(struct cpu_level *l)
{
    l->quantised = quantised;
    l->quantise = quantise;
    l->product = product;
}
