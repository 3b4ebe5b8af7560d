/* cpu_linear_impl: products over packed tiles, written once and included by each SIMD level's file, which defines
 *   v16          16 floats, one a lane: v16_zero v16_load v16_store v16_set v16_add v16_mul, v16_fma(a, b, c) of
 *                a * b + c; from 16 elements at a pointer: v16_f16 v16_i8 v16_u8 v16_e8m0, and v16_e4m3, which
 *                gives a 256th of the value (what the bits are worth as an F16); from 16 pairs at a pointer, the first
 *                of each and the second: v16_bf16_pair, v16_e4m3_pair (a 256th)
 *   b64          64 bytes: b64_load b64_and(a, byte) b64_or b64_shl(a, n) b64_shr(a, n) (16-bit shifts: mask after
 *                them) b64_fp4 (codes to 2 * value + 12) b64_flip (xor 0x80)
 *   dot          the integer dot products of 16 lanes over some steps of a tile, for R rows of activations and P
 *                panels; and dot_start, what a tile's sums begin with
 *   PANELS, DOT_ROWS, FMA_ROWS  panels and rows of activations that are taken at once where there are enough
 *   ZIPPED       1 where dot takes many rows through a tile that zip_tile has rearranged
 *   SIGNED       1 where dot wants all weights as signed bytes; 0: codes as they are, above their value by `offset`
 *   Q_FLIP       what activations are stored xor with (level->q_flip)
 *   BF16_DOT     1 where products with BF16 and F8 weights take bf16 activations: b64_e4m3_pairs (16 pairs of codes at a
 *                pointer to pairs of bf16, a 256th of the value), v16_dot_bf16(sum, weights, x) of a pair of each lane
 *                and one pair for all, and v16_to_bf16
 *
 * Two families of tiles. Float tiles become float w[32][16] and are multiplied column by column. Integer tiles become
 * bytes u[8][16][4] with value = scale * (u - offset) or scale * u + min; activations are int8 with a scale a tile,
 * so the sum over a tile is
 *     scale * d * (dot(u, q) - offset * s)  or  d * (scale * dot(u, q) + min * s),  s = sum(q)
 * where dot, offset * s and their difference are integers below 2^24 and exact: levels may come to the difference in
 * either way. Every output lane sees the same operations in the same order for any number of rows. */
#include <math.h>
#include <string.h>

#include "cpu_priv.h"

/* The sums of up to ROW_BLOCK rows and PANEL_BLOCK panels are kept while the columns go by in runs whose activations take
 * at most ROW_BYTES: a run stays in the second cache for all panels of the block. */
enum { ROW_BLOCK = 128, PANEL_BLOCK = 16, ROW_BYTES = 256 << 10 };

/* With one row a tile is used up faster than the hardware asks for the next ones. Past the end of a weight nothing is
 * read: a prefetch of no memory does nothing. */
enum { AHEAD = 4096 };
FORCE_INLINE void fetch_ahead(const uint8_t *tile, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)((uintptr_t)tile + AHEAD + i));
}

/* An unpacked integer tile; the second scale is used where columns 16-31 have their own. */
struct itile {
    b64 u[8], start[2]; /* start: what the integer sums of a half begin with */
    v16 scale[2], min;
};

FORCE_INLINE void unpack_nibbles(struct itile *t, const uint8_t *p)
{
    for (int s = 0; s < 4; s++) {
        b64 b = b64_load(p + 64 * s);
        t->u[s] = b64_and(b, 0x0F);
        t->u[s + 4] = b64_and(b64_shr(b, 4), 0x0F);
    }
}

FORCE_INLINE void unpack_fp4(struct itile *t, const uint8_t *p)
{
    unpack_nibbles(t, p);
    for (int s = 0; s < 8; s++) t->u[s] = b64_fp4(t->u[s]); /* signed where the level wants that */
}

FORCE_INLINE void unpack_fifth(struct itile *t, const uint8_t *bits, const uint8_t *p)
{
    b64 h = b64_load(bits);
    unpack_nibbles(t, p);
    for (int s = 0; s < 4; s++) {
        t->u[s] = b64_or(t->u[s], b64_and(b64_shl(h, 4 - s), 0x10));
        t->u[s + 4] = b64_or(t->u[s + 4], b64_and(b64_shr(h, s), 0x10));
    }
}

FORCE_INLINE void unpack_sixth(struct itile *t, const uint8_t *bits, const uint8_t *p)
{
    unpack_nibbles(t, p);
    for (int half = 0; half < 2; half++) {
        b64 h = b64_load(bits + 64 * half), *u = t->u + 4 * half;
        u[0] = b64_or(u[0], b64_and(b64_shl(h, 4), 0x30));
        u[1] = b64_or(u[1], b64_and(b64_shl(h, 2), 0x30));
        u[2] = b64_or(u[2], b64_and(h, 0x30));
        u[3] = b64_or(u[3], b64_and(b64_shr(h, 2), 0x30));
    }
}

FORCE_INLINE void make_signed(struct itile *t, char offset)
{
    for (int s = 0; s < 8 && SIGNED; s++) t->u[s] = b64_sub(t->u[s], offset);
}

/* What is fixed for a type at compile time. halves: 2 where columns 0-15 and 16-31 have scales of their own. bits: u
 * is below 2^bits, for levels whose dot sums pairs in 16 bits. */
struct ikind {
    int halves, bits;
    float offset;
    bool min;
};

FORCE_INLINE struct ikind kind_of(enum dtype type)
{
    switch (type) { /* codes are stored `offset` above their value */
    case DT_Q4_0: return (struct ikind){1, 4, 8, false};
    case DT_Q5_0: return (struct ikind){1, 5, 16, false};
    case DT_Q5_1:
    case DT_Q5_K: return (struct ikind){1, 5, 0, true};
    case DT_MXFP4:
    case DT_MXFP4_GGUF: return (struct ikind){1, 5, 12, false};
    case DT_NVFP4: return (struct ikind){2, 5, 12, false};
    case DT_Q6_K: return (struct ikind){2, 6, 32, false};
    case DT_Q8_0: return (struct ikind){1, 8, 0, false};
    default: return (struct ikind){1, 4, 0, true}; /* Q4_1, Q4_K */
    }
}

FORCE_INLINE void unpack(enum dtype type, const uint8_t *head, const uint8_t *p, v16 lane_scale, struct itile *t)
{
    switch (type) {
    case DT_Q4_0:
        t->scale[0] = v16_f16(p);
        unpack_nibbles(t, p + 32);
        make_signed(t, 8);
        break;
    case DT_Q4_1:
        t->scale[0] = v16_f16(p);
        t->min = v16_f16(p + 32);
        unpack_nibbles(t, p + 64);
        break;
    case DT_Q5_0:
        t->scale[0] = v16_f16(p);
        unpack_fifth(t, p + 32, p + 96);
        make_signed(t, 16);
        break;
    case DT_Q5_1:
        t->scale[0] = v16_f16(p);
        t->min = v16_f16(p + 32);
        unpack_fifth(t, p + 64, p + 128);
        break;
    case DT_Q8_0:
        t->scale[0] = v16_f16(p);
        for (int s = 0; s < 8; s++) t->u[s] = b64_load(p + 32 + 64 * s);
        break;
    case DT_Q4_K:
    case DT_Q5_K:
        t->scale[0] = v16_mul(v16_f16(head), v16_u8(p));
        t->min = v16_mul(v16_mul(v16_f16(head + 32), v16_set(-1)), v16_u8(p + 16));
        if (type == DT_Q4_K) unpack_nibbles(t, p + 32);
        else unpack_fifth(t, p + 32, p + 96);
        break;
    case DT_Q6_K:
        for (int h = 0; h < 2; h++) t->scale[h] = v16_mul(v16_f16(head), v16_i8(p + 16 * h));
        unpack_sixth(t, p + 32, p + 160);
        make_signed(t, 32);
        break;
    case DT_MXFP4:
    case DT_MXFP4_GGUF: /* codes as 2 * value: half the scale */
        t->scale[0] = v16_mul(v16_e8m0(p), v16_set(0.5f));
        unpack_fp4(t, p + 16);
        break;
    case DT_NVFP4:
        for (int h = 0; h < 2; h++)
            t->scale[h] = v16_mul(v16_mul(v16_mul(v16_e4m3(p + 16 * h), v16_set(256)), lane_scale), v16_set(0.5f));
        unpack_fp4(t, p + 32);
        break;
    default: break;
    }
}

/* acc[R][P][16] += R rows of activations times an unpacked tile of each of P panels. */
FORCE_INLINE void rows_int(struct ikind k, int P, int R, bool zipped, const struct itile *t, const struct cpu_acts *a, int m,
                           int64_t tile, float *acc)
{
    size_t at = acts_at(a, tile, m);
    const float *d = a->d + at, *s = a->s + 2 * at;
    for (int h = 0; h < k.halves; h++) {
        v16 dots[DOT_ROWS * PANELS];
        const b64 *u[PANELS];
        for (int p = 0; p < P; p++) u[p] = t[p].u + 4 * h;
        dot(P, R, k.bits, zipped, u, t[0].start + h, t[P - 1].start + h, a->q + at * TILE + 16 * h, 8 / k.halves, dots);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) {
                float *to = acc + (r * P + p) * PANEL;
                v16 sum = v16_load(to), scale = v16_set(d[r]), v = dots[r * P + p];
                if (k.min) {
                    sum = v16_fma(v16_fma(t[p].min, v16_set(s[2 * r]), v16_mul(t[p].scale[h], v)), scale, sum);
                } else {
                    if (k.offset != 0 && !SIGNED) {
                        float of = k.halves == 2 && h == 0 ? s[2 * r] - s[2 * r + 1] : s[2 * r + h];
                        v = v16_fma(v16_set(of), v16_set(-k.offset), v);
                    }
                    sum = v16_fma(t[p].scale[h], v16_mul(v, scale), sum);
                }
                v16_store(to, sum);
            }
    }
}

/* acc[n][P][16] += rows m0 .. m0 + n - 1 times the tiles [t0, t1) of P panels; t0 is a multiple of 8. one: n is 1, and
 * nothing is kept for a second row. */
FORCE_INLINE void panel_int(enum dtype type, int P, const struct cpu_part *p, int64_t panel, int64_t t0, int64_t t1,
                            const struct cpu_acts *a, int m0, int n, bool one, float *acc)
{
    const struct ikind k = kind_of(type);
    const uint8_t *first = p->data + (size_t)panel * p->panel_bytes;
    size_t at = (size_t)(t0 / 8) * (p->group_head + 8 * p->tile_bytes);
    for (int64_t t = t0; t < t1; t++) {
        struct itile it[PANELS];
        if (t % 8 == 0) at += p->group_head;
        for (int i = 0; i < P; i++) {
            const uint8_t *base = first + (size_t)i * p->panel_bytes, *tile = base + at;
            v16 lane_scale = p->scale_runs ? v16_load(p->scale + (panel + i) * PANEL) : v16_zero();
            fetch_ahead(tile, p->tile_bytes);
            unpack(type, tile - (size_t)(t % 8) * p->tile_bytes - p->group_head, tile, lane_scale, &it[i]);
            if (ZIPPED && !one) zip_tile(it[i].u);
            for (int h = 0; h < k.halves; h++) dot_start(k.bits, !k.min, it[i].u + 4 * h, 8 / k.halves, it[i].start + h);
        }
        int m = 0;
        for (; !one && m + DOT_ROWS <= n; m += DOT_ROWS) rows_int(k, P, DOT_ROWS, ZIPPED, it, a, m0 + m, t, acc + m * P * PANEL);
        if (!one && DOT_ROWS > 4 && m + 4 <= n) {
            rows_int(k, P, 4, ZIPPED, it, a, m0 + m, t, acc + m * P * PANEL);
            m += 4;
        }
        if (!one && m + 2 <= n) {
            rows_int(k, P, 2, ZIPPED, it, a, m0 + m, t, acc + m * P * PANEL);
            m += 2;
        }
        if (one || m < n) rows_int(k, P, 1, ZIPPED && !one, it, a, m0 + m, t, acc + m * P * PANEL);
        at += p->tile_bytes;
    }
}

/* ------------------------------------------------------------------------------------------------ float tiles */

/* Columns k and k + 1 of a tile; k is even. */
FORCE_INLINE void columns(enum dtype type, const uint8_t *tile, int k, v16 *even, v16 *odd)
{
    switch (type) {
    case DT_F32:
        *even = v16_load((const float *)(const void *)(tile + 64 * k));
        *odd = v16_load((const float *)(const void *)(tile + 64 * k + 64));
        break;
    case DT_F16:
        *even = v16_f16(tile + 32 * k);
        *odd = v16_f16(tile + 32 * k + 32);
        break;
    case DT_BF16: v16_bf16_pair(tile + 32 * k, even, odd); break;
    default: v16_e4m3_pair(tile + 16 * k, even, odd); break;
    }
}

FORCE_INLINE void fma_column(int P, int R, const v16 *col, const float *x, v16 *sum)
{
    UNROLL(8)
    for (int r = 0; r < R; r++) {
        v16 v = v16_set(x[r * TILE]);
        UNROLL(2)
        for (int p = 0; p < P; p++) sum[r * P + p] = v16_fma(col[p], v, sum[r * P + p]);
    }
}

/* acc[R][P][16] += R rows of activations times the columns of a tile of each of P panels, taken from w[P][32] (converted
 * once for many rows) or, where w is NULL, converted on the way. The tile has a sum of its own: F8 scales it, and tiles
 * need not wait for each other. */
FORCE_INLINE void rows_float(enum dtype type, int P, int R, v16 (*w)[TILE], const uint8_t *tile, const v16 *scale,
                             const float *x, float *acc)
{
    v16 sum[FMA_ROWS * PANELS];
    for (int i = 0; i < R * P; i++) sum[i] = v16_zero();
    UNROLL(2)
    for (int k = 0; k < TILE; k += 2) {
        v16 even[PANELS], odd[PANELS];
        UNROLL(2)
        for (int p = 0; p < P; p++) {
            if (w) even[p] = w[p][k], odd[p] = w[p][k + 1];
            else columns(type, tile, k, &even[p], &odd[p]);
        }
        fma_column(P, R, even, x + k, sum);
        fma_column(P, R, odd, x + k + 1, sum);
    }
    for (int i = 0; i < R * P; i++) {
        v16 before = v16_load(acc + i * PANEL);
        v16_store(acc + i * PANEL,
                  type == DT_F8_E4M3 ? v16_fma(sum[i], scale[i % P], before) : v16_add(before, sum[i]));
    }
}

/* What sums of 256ths in tile t are multiplied by. */
FORCE_INLINE v16 scale_f8(const struct cpu_part *p, int64_t panel, int64_t t)
{
    const float *at = p->scale + (panel * p->scale_runs + (t + p->scale_tile0) / p->scale_tiles) * PANEL;
    return v16_mul(v16_load(at), v16_set(256));
}

FORCE_INLINE void panel_float(enum dtype type, int P, const struct cpu_part *p, int64_t panel, int64_t t0, int64_t t1,
                              const struct cpu_acts *a, int m0, int n, bool one, float *acc)
{
    const uint8_t *tile = p->data + (size_t)panel * p->panel_bytes + (size_t)t0 * p->tile_bytes;
    for (int64_t t = t0; t < t1; t++, tile += p->tile_bytes) {
        const float *x = a->x + acts_at(a, t, m0) * TILE;
        v16 w[PANELS][TILE], scale[PANELS];
        for (int i = 0; i < P; i++) {
            fetch_ahead(tile + (size_t)i * p->panel_bytes, p->tile_bytes);
            if (type == DT_F8_E4M3) scale[i] = scale_f8(p, panel + i, t);
        }
        if (one) {
            for (int i = 0; i < P; i++)
                rows_float(type, 1, 1, NULL, tile + (size_t)i * p->panel_bytes, scale + i, x, acc + i * PANEL);
            continue;
        }
        for (int i = 0; i < P; i++)
            for (int k = 0; k < TILE; k += 2)
                columns(type, tile + (size_t)i * p->panel_bytes, k, &w[i][k], &w[i][k + 1]);
        int m = 0;
        for (; m + FMA_ROWS <= n; m += FMA_ROWS)
            rows_float(type, P, FMA_ROWS, w, tile, scale, x + m * TILE, acc + m * P * PANEL);
        if (FMA_ROWS > 4 && m + 4 <= n) {
            rows_float(type, P, 4, w, tile, scale, x + m * TILE, acc + m * P * PANEL);
            m += 4;
        }
        if (m + 2 <= n) {
            rows_float(type, P, 2, w, tile, scale, x + m * TILE, acc + m * P * PANEL);
            m += 2;
        }
        if (m < n) rows_float(type, P, 1, w, tile, scale, x + m * TILE, acc + m * P * PANEL);
    }
}

/* ------------------------------------------------------------------------------------------------ bf16 tiles */

static inline bool float_type(enum dtype type)
{
    return type == DT_F32 || type == DT_F16 || type == DT_BF16 || type == DT_F8_E4M3;
}
static inline bool bf16_type(enum dtype type) { return BF16_DOT && (type == DT_BF16 || type == DT_F8_E4M3); }

#if BF16_DOT
/* acc[R][P][16] += R rows of activations times tiles of pairs w[P][16]. The tile has a sum of its own, as above. */
FORCE_INLINE void rows_bf16(enum dtype type, int P, int R, const uint8_t *const *w, const v16 *scale, const uint16_t *x,
                            float *acc)
{
    v16 sum[FMA_ROWS * PANELS];
    for (int i = 0; i < R * P; i++) sum[i] = v16_zero();
    UNROLL(4)
    for (int k = 0; k < TILE / 2; k++) {
        b64 pairs[PANELS];
        for (int p = 0; p < P; p++) pairs[p] = b64_load(w[p] + 64 * k);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sum[r * P + p] = v16_dot_bf16(sum[r * P + p], pairs[p], x + r * TILE + 2 * k);
    }
    for (int i = 0; i < R * P; i++) {
        v16 before = v16_load(acc + i * PANEL);
        v16_store(acc + i * PANEL, type == DT_F8_E4M3 ? v16_fma(sum[i], scale[i % P], before) : v16_add(before, sum[i]));
    }
}

FORCE_INLINE void panel_bf16(enum dtype type, int P, const struct cpu_part *p, int64_t panel, int64_t t0, int64_t t1,
                             const struct cpu_acts *a, int m0, int n, bool one, float *acc)
{
    const uint8_t *tile = p->data + (size_t)panel * p->panel_bytes + (size_t)t0 * p->tile_bytes;
    for (int64_t t = t0; t < t1; t++, tile += p->tile_bytes) {
        const uint16_t *x = a->b + acts_at(a, t, m0) * TILE;
        _Alignas(64) uint8_t wide[PANELS][64 * TILE / 2];
        const uint8_t *w[PANELS];
        v16 scale[PANELS];
        for (int i = 0; i < P; i++) {
            w[i] = tile + (size_t)i * p->panel_bytes;
            fetch_ahead(w[i], p->tile_bytes);
            if (type != DT_F8_E4M3) continue;
            for (int k = 0; k < TILE / 2; k++) b64_store(wide[i] + 64 * k, b64_e4m3_pairs(w[i] + 32 * k));
            w[i] = wide[i];
            scale[i] = scale_f8(p, panel + i, t);
        }
        int m = 0;
        for (; !one && m + FMA_ROWS <= n; m += FMA_ROWS)
            rows_bf16(type, P, FMA_ROWS, w, scale, x + m * TILE, acc + m * P * PANEL);
        if (!one && m + 4 <= n) rows_bf16(type, P, 4, w, scale, x + m * TILE, acc + m * P * PANEL), m += 4;
        if (!one && m + 2 <= n) rows_bf16(type, P, 2, w, scale, x + m * TILE, acc + m * P * PANEL), m += 2;
        if (one || m < n) rows_bf16(type, P, 1, w, scale, x + m * TILE, acc + m * P * PANEL);
    }
}

static void round_bf16(const struct cpu_acts *a, int m, const float *x)
{
    for (int64_t t = 0; t < a->Kp / TILE; t++)
        for (int i = 0; i < TILE; i += 16) v16_to_bf16(a->b + acts_at(a, t, m) * TILE + i, v16_load(x + t * TILE + i));
}

static float peak_bf16(int n)
{
    const uint16_t one[2] = {0x3F80, 0x3F80};
    uint8_t bytes[64];
    v16 sum[PEAK_CHAINS], all = v16_zero();
    memset(bytes, 0x3D, sizeof bytes);
    b64 w = b64_load(bytes);
    for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = v16_set((float)i);
    for (int k = 0; k < n; k++)
        for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = v16_dot_bf16(sum[i], w, one);
    for (int i = 0; i < PEAK_CHAINS; i++) all = v16_add(all, sum[i]);
    return v16_sum(all);
}
#endif

/* ------------------------------------------------------------------------------------------------ the table */

FORCE_INLINE void panels_of(enum dtype type, int P, const struct cpu_part *p, int64_t panel, int64_t t0, int64_t t1,
                            const struct cpu_acts *a, int m0, int n, float *acc)
{
#if BF16_DOT
    if (bf16_type(type)) {
        if (n == 1) panel_bf16(type, P, p, panel, t0, t1, a, m0, n, true, acc);
        else panel_bf16(type, P, p, panel, t0, t1, a, m0, n, false, acc);
        return;
    }
#endif
    if (float_type(type)) {
        if (n == 1) panel_float(type, P, p, panel, t0, t1, a, m0, n, true, acc);
        else panel_float(type, P, p, panel, t0, t1, a, m0, n, false, acc);
    } else {
        if (n == 1) panel_int(type, P, p, panel, t0, t1, a, m0, n, true, acc);
        else panel_int(type, P, p, panel, t0, t1, a, m0, n, false, acc);
    }
}

/* Rows [m0, m0 + n) times panels [p0, p1), n and p1 - p0 at most a block. One row goes panel by panel, in the order of
 * memory: it waits for nothing else. */
FORCE_INLINE void block_of(enum dtype type, const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, int m0,
                           int n, const struct cpu_out *out)
{
    _Alignas(64) float acc[ROW_BLOCK * PANEL_BLOCK * PANEL]; /* of panel p0 + i at i * n * PANEL */
    int64_t size = bf16_type(type) ? sizeof *a->b : float_type(type) ? sizeof *a->x : sizeof *a->q;
    int64_t run = ROW_BYTES / (n * TILE * size) / 8 * 8;
    if (run < 8) run = 8;
    memset(acc, 0, (size_t)(n * (p1 - p0) * PANEL) * sizeof *acc);
    for (int64_t t0 = 0; t0 < p->tiles; t0 += run) {
        int64_t t1 = t0 + run < p->tiles ? t0 + run : p->tiles, panel = p0;
        for (; n > 1 && panel + PANELS <= p1; panel += PANELS)
            panels_of(type, PANELS, p, panel, t0, t1, a, m0, n, acc + (panel - p0) * n * PANEL);
        for (; panel < p1; panel++) panels_of(type, 1, p, panel, t0, t1, a, m0, n, acc + (panel - p0) * n * PANEL);
    }
    for (int64_t panel = p0; panel < p1;) {
        int P = n > 1 && panel + PANELS <= p1 ? PANELS : 1;
        const float *sums = acc + (panel - p0) * n * PANEL;
        int64_t row = panel * PANEL, left = p->rows - row, width = left < P * PANEL ? left : P * PANEL;
        for (int m = 0; m < n; m++) cpu_store(out, (size_t)(m0 + m), (size_t)row, sums + m * P * PANEL, (size_t)width);
        panel += P;
    }
}

FORCE_INLINE void product_of(enum dtype type, const struct cpu_part *p, int64_t p0, int64_t p1,
                             const struct cpu_acts *a, int first, int last, const struct cpu_out *out)
{
    for (int64_t panel = p0; panel < p1; panel += PANEL_BLOCK) {
        int64_t to = panel + PANEL_BLOCK < p1 ? panel + PANEL_BLOCK : p1;
        for (int m0 = first; m0 < last; m0 += ROW_BLOCK)
            block_of(type, p, panel, to, a, m0, last - m0 < ROW_BLOCK ? last - m0 : ROW_BLOCK, out);
    }
}

static void product(const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, int first, int last,
                    const struct cpu_out *out)
{
    switch (p->type) {
    case DT_F32: product_of(DT_F32, p, p0, p1, a, first, last, out); break;
    case DT_F16: product_of(DT_F16, p, p0, p1, a, first, last, out); break;
    case DT_BF16: product_of(DT_BF16, p, p0, p1, a, first, last, out); break;
    case DT_F8_E4M3: product_of(DT_F8_E4M3, p, p0, p1, a, first, last, out); break;
    case DT_Q4_0: product_of(DT_Q4_0, p, p0, p1, a, first, last, out); break;
    case DT_Q4_1: product_of(DT_Q4_1, p, p0, p1, a, first, last, out); break;
    case DT_Q5_0: product_of(DT_Q5_0, p, p0, p1, a, first, last, out); break;
    case DT_Q5_1: product_of(DT_Q5_1, p, p0, p1, a, first, last, out); break;
    case DT_Q8_0: product_of(DT_Q8_0, p, p0, p1, a, first, last, out); break;
    case DT_Q4_K: product_of(DT_Q4_K, p, p0, p1, a, first, last, out); break;
    case DT_Q5_K: product_of(DT_Q5_K, p, p0, p1, a, first, last, out); break;
    case DT_Q6_K: product_of(DT_Q6_K, p, p0, p1, a, first, last, out); break;
    case DT_NVFP4: product_of(DT_NVFP4, p, p0, p1, a, first, last, out); break;
    case DT_MXFP4:
    case DT_MXFP4_GGUF: product_of(DT_MXFP4, p, p0, p1, a, first, last, out); break;
    case DT_NONE:
    case DT_COUNT: break;
    }
}

static int wants(enum dtype type)
{
    if (bf16_type(type)) return WANT_BF16;
    if (float_type(type)) return WANT_FLOAT;
    return WANT_QUANT | (!SIGNED || kind_of(type).min ? WANT_SUMS : 0);
}

static void quantise(const struct cpu_acts *a, int m, const float *x, bool sums)
{
    const v16 zero = v16_zero();
    for (int64_t t = 0; t < a->Kp / TILE; t++, x += TILE) {
        size_t at = acts_at(a, t, m);
        v16 lo = v16_load(x), hi = v16_load(x + 16);
        uint32_t bits = v16_top_bits(lo, hi);
        float amax, d, inv;
        memcpy(&amax, &bits, sizeof amax);
        d = amax / 127;
        inv = 127 / amax;
        if (bits >= 0x7F800000) d = NAN, inv = 0; /* infinity or NaN among them: let it be seen in the outputs */
        if (amax < 1e-35f) d = inv = 0;           /* 127 / amax would overflow: the tile is zero at this scale */
        v16 scale = v16_set(inv);
        lo = inv == 0 ? zero : v16_round(v16_mul(lo, scale));
        hi = inv == 0 ? zero : v16_round(v16_mul(hi, scale));
        v16_to_i8(a->q + at * TILE, lo, Q_FLIP);
        v16_to_i8(a->q + at * TILE + 16, hi, Q_FLIP);
        a->d[at] = d;
        if (!sums) continue;
        float second = v16_sum(hi); /* whole numbers: exact in any order */
        a->s[2 * at] = v16_sum(lo) + second;
        a->s[2 * at + 1] = second;
    }
}

/* ------------------------------------------------------------------------------------------------ limits */

static float peak_int8(int n)
{
    b64 sum[PEAK_CHAINS], u, x;
    uint8_t bytes[64];
    memset(bytes, 1, sizeof bytes);
    u = x = b64_load(bytes);
    for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = b64_and(u, 0);
    for (int k = 0; k < n; k++)
        for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = b64_mac(sum[i], u, x);
    for (int i = 1; i < PEAK_CHAINS; i++) sum[0] = b64_or(sum[0], sum[i]);
    memcpy(bytes, &sum[0], sizeof bytes);
    return (float)bytes[0];
}

static uint64_t read_bytes(const uint8_t *p, size_t bytes)
{
    uint8_t any[64];
    b64 sum[4];
    uint64_t word;
    for (int i = 0; i < 4; i++) sum[i] = b64_load(p);
    for (size_t at = 0; at < bytes; at += 256) {
        fetch_ahead(p + at, 256);
        for (int i = 0; i < 4; i++) sum[i] = b64_or(sum[i], b64_load(p + at + 64 * (size_t)i));
    }
    for (int i = 1; i < 4; i++) sum[0] = b64_or(sum[0], sum[i]);
    memcpy(any, &sum[0], sizeof any);
    memcpy(&word, any, sizeof word);
    return word;
}

static void linear_fill(struct cpu_level *l)
{
    l->peak_int8 = peak_int8;
    l->int8_ops = 2 * 64 * PEAK_CHAINS;
    l->read = read_bytes;
    l->wants = wants;
    l->quantise = quantise;
    l->q_flip = Q_FLIP;
    l->product = product;
#if BF16_DOT
    l->to_bf16 = round_bf16;
    l->peak_bf16 = peak_bf16;
    l->bf16_ops = 2 * 32 * PEAK_CHAINS;
#endif
}
