/* cpu_pack.c: from a matrix as stored to panels of 16 outputs and tiles of 32 columns, and back again for single rows
 * and tiles. The one scalar place that knows the bytes of a tile (drawn in cpu_priv.h); what packs and what unpacks
 * stand side by side. Bytes move as words where that is faster: little-endian machines only, like the formats. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_priv.h"

/* Bytes before a group of 8 tiles (K-quants) and of one tile. */
static void tile_sizes(enum dtype type, size_t *group_head, size_t *tile)
{
    *group_head = 0;
    switch (type) {
    case DT_F32: *tile = 2048; break;
    case DT_F16:
    case DT_BF16: *tile = 1024; break;
    case DT_F8_E4M3: *tile = 512; break;
    case DT_MXFP4:
    case DT_MXFP4_GGUF: *tile = 16 + 256; break;
    case DT_NVFP4: *tile = 32 + 256; break;
    case DT_Q4_0: *tile = 32 + 256; break;
    case DT_Q4_1: *tile = 64 + 256; break;
    case DT_Q5_0: *tile = 32 + 64 + 256; break;
    case DT_Q5_1: *tile = 64 + 64 + 256; break;
    case DT_Q8_0: *tile = 32 + 512; break;
    case DT_Q4_K: *group_head = 64, *tile = 32 + 256; break;
    case DT_Q5_K: *group_head = 64, *tile = 32 + 64 + 256; break;
    case DT_Q6_K: *group_head = 32, *tile = 32 + 128 + 256; break;
    case DT_NONE:
    case DT_COUNT:
        assert(!"a matrix without a type");
        *tile = 0;
        break;
    }
}

/* Tile t of a panel; *head: the bytes before its group. */
static uint8_t *tile_at(const struct cpu_part *p, int64_t panel, int64_t t, uint8_t **head)
{
    uint8_t *group = p->data + (size_t)panel * p->panel_bytes + (size_t)(t / 8) * (p->group_head + 8 * p->tile_bytes);
    *head = group;
    return group + p->group_head + (size_t)(t % 8) * p->tile_bytes;
}

/* --------------------------------------------------------------------------------------------- layout of a matrix */

struct shape {
    struct cpu_part part[CPU_MAX_PARTS];
    size_t scale_at[CPU_MAX_PARTS], data_at[CPU_MAX_PARTS], bias_at, bytes;
    int64_t rows;
};

static bool has_scales(enum dtype type) { return type == DT_F8_E4M3 || type == DT_NVFP4; }

/* Where everything lies in the one block. All dimensions come from checked shapes, so the sums stay in range. Scale
 * blocks that check_part refuses give some size. */
static struct shape shape_of(const struct dmat *parts, int n_parts, bool bias)
{
    struct shape s = {0};
    for (int i = 0; i < n_parts; i++) {
        const struct dmat *m = &parts[i];
        struct cpu_part *p = &s.part[i];
        p->type = m->type;
        p->rows = m->rows;
        p->cols = m->cols;
        p->panels = (m->rows + PANEL - 1) / PANEL;
        p->tiles = (m->cols + TILE - 1) / TILE;
        tile_sizes(m->type, &p->group_head, &p->tile_bytes);
        p->panel_bytes =
            size_round_up((size_t)((p->tiles + 7) / 8) * p->group_head + (size_t)p->tiles * p->tile_bytes, 64);
        p->scale_runs = 0;
        p->scale_tiles = INT32_MAX;
        s.rows += m->rows;
        s.data_at[i] = s.bytes;
        s.bytes += (size_t)p->panels * p->panel_bytes;
        if (!has_scales(m->type)) continue;
        p->scale_runs = 1;
        if (m->scale && m->scale_cols < m->scale_col0 + m->cols) {
            p->scale_tiles = m->scale_cols < TILE ? 1 : (int32_t)(m->scale_cols / TILE);
            p->scale_tile0 = (int32_t)(m->scale_col0 % m->scale_cols / TILE);
            p->scale_runs = (p->tiles - 1 + p->scale_tile0) / p->scale_tiles + 1;
        }
        s.scale_at[i] = s.bytes;
        s.bytes += size_round_up((size_t)(p->panels * p->scale_runs) * PANEL * sizeof(float), 64);
    }
    s.bias_at = s.bytes;
    if (bias) s.bytes += size_round_up((size_t)s.rows * sizeof(float), 64);
    return s;
}

size_t cpu_pack_bytes(const struct dmat *parts, int n_parts) { return shape_of(parts, n_parts, false).bytes; }

static int check_part(const struct dmat *m, struct err *e)
{
    if (m->type == DT_F8_E4M3 && m->scale && m->scale_cols < m->scale_col0 + m->cols &&
        (m->scale_cols % TILE || m->scale_col0 % TILE))
        return err_set(e, ERR_UNSUPPORTED,
                       "scale blocks of %lld columns at column %lld: multiples of %d are supported",
                       (long long)m->scale_cols, (long long)m->scale_col0, TILE);
    if (m->type == DT_NVFP4 && m->scale && m->scale_cols < m->scale_col0 + m->cols)
        return err_set(e, ERR_UNSUPPORTED, "nvfp4 with float scales of %lld columns: one scale a row is supported",
                       (long long)m->scale_cols);
    return OK;
}

/* ------------------------------------------------------------------------------------------------ into tiles */

static uint32_t load32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t load64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* 16 bytes whose byte b holds columns b (low) and 16 + b (high), as four words of one lane. */
static void put_nibbles(uint8_t *dst, int lane, const uint8_t *qs)
{
    for (int s = 0; s < 4; s++) memcpy(dst + 64 * s + 4 * lane, qs + 4 * s, 4);
}

/* Values v[32] of up to 6 bits: low four into the nibbles. */
static void put_values(uint8_t *dst, int lane, const uint8_t *v)
{
    uint8_t qs[16];
    for (int b = 0; b < 16; b++) qs[b] = (uint8_t)((v[b] & 15) | (v[16 + b] & 15) << 4);
    put_nibbles(dst, lane, qs);
}

/* Byte j of the low half moves to byte 2 j. */
static uint64_t spread(uint64_t v)
{
    v = (v & 0xFFFFFFFF) | (v & 0xFFFFFFFF) << 16;
    v &= 0x0000FFFF0000FFFF;
    return (v | v << 8) & 0x00FF00FF00FF00FF;
}

/* Two times 8 bytes that hold columns 2 i (low nibble) and 2 i + 1 (high) of either half. */
static void put_pairs(uint8_t *dst, int lane, uint64_t first, uint64_t second)
{
    const uint64_t low = 0x0F0F0F0F0F0F0F0F;
    uint64_t even = (first & low) | (second & low) << 4, odd = (first >> 4 & low) | (second & ~low);
    uint64_t qs[2] = {spread(even) | spread(odd) << 8, spread(even >> 32) | spread(odd >> 32) << 8};
    put_nibbles(dst, lane, (const uint8_t *)qs);
}

/* Fifth bits, bit c for column c: byte (lane, j) holds in bit s the bit of column 4 s + j. */
static void put_fifth(uint8_t *dst, int lane, uint32_t bits)
{
    for (int j = 0; j < 4; j++) {
        uint32_t v = bits >> j & 0x11111111;
        v = (v | v >> 3) & 0x03030303;
        v = (v | v >> 6) & 0x000F000F;
        dst[4 * lane + j] = (uint8_t)(v | v >> 12);
    }
}

static void k_scale(const uint8_t *s, int g, uint8_t *scale, uint8_t *min)
{
    *scale = (uint8_t)(g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
    *min = (uint8_t)(g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4);
}

static void pack_k(const struct dmat *m, const uint8_t *block, int g, int lane, uint8_t *head, uint8_t *tile)
{
    uint8_t v[32];
    if (m->type == DT_Q6_K) {
        const uint8_t *ql = block + (g / 4) * 64 + (g & 1 ? 32 : 0), *qh = block + 128 + (g / 4) * 32;
        int part = g % 4;
        memcpy(head + 2 * lane, block + 208, 2);
        tile[lane] = block[192 + 2 * g];
        tile[16 + lane] = block[192 + 2 * g + 1];
        for (int c = 0; c < 32; c++)
            v[c] = (uint8_t)((part < 2 ? ql[c] & 15 : ql[c] >> 4) | (qh[c] >> 2 * part & 3) << 4);
        for (int half = 0; half < 2; half++) {
            uint32_t word = 0;
            for (int i = 0; i < 4; i++) word |= (load32(v + 16 * half + 4 * i) >> 4 & 0x03030303) << 2 * i;
            memcpy(tile + 32 + 64 * half + 4 * lane, &word, 4);
        }
        put_values(tile + 32 + 128, lane, v);
        return;
    }
    const uint8_t *qs = block + (m->type == DT_Q5_K ? 48 : 16) + (g / 2) * 32;
    memcpy(head + 2 * lane, block, 2);
    memcpy(head + 32 + 2 * lane, block + 2, 2);
    k_scale(block + 4, g, &tile[lane], &tile[16 + lane]);
    for (int c = 0; c < 32; c++) v[c] = (uint8_t)(g & 1 ? qs[c] >> 4 : qs[c] & 15);
    if (m->type == DT_Q5_K) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= (load32(block + 16 + 4 * i) >> g & 0x01010101) << i;
        memcpy(tile + 32 + 4 * lane, &word, 4);
    }
    put_values(tile + (m->type == DT_Q5_K ? 96 : 32), lane, v);
}

/* Columns 32 t .. of row r into one lane of a tile. The tile is zeroed where the matrix ends before it does. */
static void pack_lane(const struct dmat *m, int64_t r, int64_t t, int lane, uint8_t *head, uint8_t *tile)
{
    const uint8_t *row = m->data + (size_t)r * m->row_stride;
    const uint8_t *bs = m->bscale ? m->bscale + (size_t)r * m->bscale_stride : NULL;
    int64_t left = m->cols - t * TILE;
    int n = left < TILE ? (int)left : TILE;
    switch (m->type) {
    case DT_F32:
        for (int k = 0; k < n; k++) memcpy(tile + 64 * k + 4 * lane, row + 4 * (t * TILE + k), 4);
        break;
    case DT_F16:
        for (int k = 0; k < n; k++) memcpy(tile + 32 * k + 2 * lane, row + 2 * (t * TILE + k), 2);
        break;
    case DT_BF16:
        for (int k = 0; k < n; k++) memcpy(tile + 64 * (k / 2) + 4 * lane + 2 * (k % 2), row + 2 * (t * TILE + k), 2);
        break;
    case DT_F8_E4M3:
        for (int k = 0; k < n; k++) tile[32 * (k / 2) + 2 * lane + k % 2] = row[t * TILE + k];
        break;
    case DT_MXFP4:
        tile[lane] = bs[t];
        put_pairs(tile + 16, lane, load64(row + 16 * t), load64(row + 16 * t + 8));
        break;
    case DT_NVFP4:
        tile[lane] = bs[2 * t];
        tile[16 + lane] = n > 16 ? bs[2 * t + 1] : 0;
        put_pairs(tile + 32, lane, load64(row + 16 * t), n > 16 ? load64(row + 16 * t + 8) : 0);
        break;
    case DT_MXFP4_GGUF:
        tile[lane] = row[17 * t];
        put_nibbles(tile + 16, lane, row + 17 * t + 1);
        break;
    case DT_Q4_0:
        memcpy(tile + 2 * lane, row + 18 * t, 2);
        put_nibbles(tile + 32, lane, row + 18 * t + 2);
        break;
    case DT_Q4_1:
        memcpy(tile + 2 * lane, row + 20 * t, 2);
        memcpy(tile + 32 + 2 * lane, row + 20 * t + 2, 2);
        put_nibbles(tile + 64, lane, row + 20 * t + 4);
        break;
    case DT_Q5_0:
        memcpy(tile + 2 * lane, row + 22 * t, 2);
        put_fifth(tile + 32, lane, load32(row + 22 * t + 2));
        put_nibbles(tile + 96, lane, row + 22 * t + 6);
        break;
    case DT_Q5_1:
        memcpy(tile + 2 * lane, row + 24 * t, 2);
        memcpy(tile + 32 + 2 * lane, row + 24 * t + 2, 2);
        put_fifth(tile + 64, lane, load32(row + 24 * t + 4));
        put_nibbles(tile + 128, lane, row + 24 * t + 8);
        break;
    case DT_Q8_0:
        memcpy(tile + 2 * lane, row + 34 * t, 2);
        for (int s = 0; s < 8; s++) memcpy(tile + 32 + 64 * s + 4 * lane, row + 34 * t + 2 + 4 * s, 4);
        break;
    case DT_Q4_K: pack_k(m, row + 144 * (t / 8), (int)(t % 8), lane, head, tile); break;
    case DT_Q5_K: pack_k(m, row + 176 * (t / 8), (int)(t % 8), lane, head, tile); break;
    case DT_Q6_K: pack_k(m, row + 210 * (t / 8), (int)(t % 8), lane, head, tile); break;
    case DT_NONE:
    case DT_COUNT: break;
    }
}

/* Exchanges the bits `mask` of b with those `shift` higher in a. */
static void exchange(uint64_t *a, uint64_t *b, int shift, uint64_t mask)
{
    uint64_t t = (*a >> shift ^ *b) & mask;
    *b ^= t;
    *a ^= t << shift;
}

/* A whole tile of 2-byte elements, in squares of 4 by 4. */
static void pack_tile_16(const struct dmat *m, int64_t r0, int64_t t, uint8_t *tile)
{
    for (int l = 0; l < PANEL; l += 4) {
        const uint8_t *row = m->data + (size_t)(r0 + l) * m->row_stride + 2 * TILE * t;
        for (int k = 0; k < TILE; k += 4) {
            uint64_t v[4];
            for (int i = 0; i < 4; i++) v[i] = load64(row + (size_t)i * m->row_stride + 2 * k);
            for (int i = 0; i < 4; i += 2) exchange(&v[i], &v[i + 1], 16, 0x0000FFFF0000FFFF);
            for (int i = 0; i < 2; i++) exchange(&v[i], &v[i + 2], 32, 0x00000000FFFFFFFF);
            for (int i = 0; i < 4; i++) memcpy(tile + 32 * (k + i) + 2 * l, &v[i], 8);
        }
    }
}

/* A whole tile of which pairs of columns go together, in words of `width` bytes a lane. */
FORCE_INLINE void pack_tile_pairs(const struct dmat *m, int64_t r0, int64_t t, size_t width, uint8_t *tile)
{
    for (size_t l = 0; l < PANEL; l++) {
        const uint8_t *row = m->data + (size_t)(r0 + (int64_t)l) * m->row_stride + (size_t)t * (TILE / 2) * width;
        for (size_t k = 0; k < TILE / 2; k++) memcpy(tile + (PANEL * k + l) * width, row + k * width, width);
    }
}

static void pack_panel(const struct dmat *m, const struct cpu_part *p, int64_t panel)
{
    int64_t r0 = panel * PANEL, left = m->rows - r0;
    int lanes = left < PANEL ? (int)left : PANEL;
    if (lanes < PANEL || m->cols % TILE) memset(p->data + (size_t)panel * p->panel_bytes, 0, p->panel_bytes);
    for (int64_t t = 0; t < p->tiles; t++) {
        uint8_t *head, *tile = tile_at(p, panel, t, &head);
        bool whole = lanes == PANEL && (t + 1) * TILE <= m->cols;
        if (whole && m->type == DT_F16) pack_tile_16(m, r0, t, tile);
        else if (whole && m->type == DT_BF16) pack_tile_pairs(m, r0, t, 4, tile);
        else if (whole && m->type == DT_F8_E4M3) pack_tile_pairs(m, r0, t, 2, tile);
        else
            for (int l = 0; l < lanes; l++) pack_lane(m, r0 + l, t, l, head, tile);
    }
    for (int64_t run = 0; run < p->scale_runs; run++)
        for (int l = 0; l < PANEL; l++) {
            int64_t r = r0 + (l < lanes ? l : 0);
            float *at = &p->scale[(panel * p->scale_runs + run) * PANEL + l];
            *at = !m->scale ? 1
                            : m->scale[(r + m->scale_row0) / m->scale_rows * m->scale_stride +
                                       m->scale_col0 / m->scale_cols + run];
        }
}

struct pack_job {
    struct cpu_pool *pool;
    const struct dmat *m;
    const struct cpu_part *p;
    int64_t per; /* panels a piece */
    bool drop;   /* whether a piece is large enough to give its pages back by itself */
};

enum { PIECE_BYTES = 1 << 20, PIECES_A_THREAD = 4 };

static void drop_rows(const struct dmat *m, int64_t r0, int64_t r1)
{
    if (m->map) fmap_drop(m->map, m->data + (size_t)r0 * m->row_stride, (size_t)(r1 - r0) * m->row_stride);
}

static void pack_some(void *arg, int thread, int n_threads)
{
    const struct pack_job *j = arg;
    int64_t n = (j->p->panels + j->per - 1) / j->per, i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(j->pool, n)) >= 0) {
        int64_t p0 = i * j->per, p1 = p0 + j->per < j->p->panels ? p0 + j->per : j->p->panels;
        for (int64_t p = p0; p < p1; p++) pack_panel(j->m, j->p, p);
        if (j->drop) drop_rows(j->m, p0 * PANEL, p1 * PANEL < j->m->rows ? p1 * PANEL : j->m->rows);
    }
}

/* In pieces of about 1 MB: reads stay sequential, and pages go back in large runs, since each is a system call. A
 * small matrix goes in smaller pieces, for all threads to have some, and gives its pages back at the end. */
static void pack_part(struct cpu_pool *pool, const struct dmat *m, const struct cpu_part *p)
{
    int64_t per = (int64_t)(PIECE_BYTES / (m->row_stride * PANEL + 1)) + 1;
    int64_t share = p->panels / (PIECES_A_THREAD * cpu_pool_threads(pool)) + 1;
    struct pack_job job = {pool, m, p, share < per ? share : per, share >= per};
    cpu_pool_run(pool, pack_some, &job);
    if (!job.drop) drop_rows(m, 0, m->rows);
}

int cpu_pack(struct cpu_pool *pool, struct cpu_heap *heap, struct bweight **out, const struct dmat *parts,
             int n_parts, const float *bias, struct err *e)
{
    struct shape s = shape_of(parts, n_parts, bias != NULL);
    struct bweight *w;
    uint8_t *block;
    for (int i = 0; i < n_parts; i++) TRY(check_part(&parts[i], e));
    TRY(mem_new(&w, sizeof *w, e));
    int rc = cpu_heap_take(heap, &block, s.bytes, e);
    if (rc < 0) {
        free(w);
        return rc;
    }
    w->n_parts = n_parts;
    w->rows = s.rows;
    w->cols = parts[0].cols;
    for (int i = 0; i < n_parts; i++) {
        w->part[i] = s.part[i];
        w->part[i].data = block + s.data_at[i];
        if (s.part[i].scale_runs) w->part[i].scale = (float *)(void *)(block + s.scale_at[i]);
        pack_part(pool, &parts[i], &w->part[i]);
    }
    if (bias) {
        w->bias = (float *)(void *)(block + s.bias_at);
        memcpy(w->bias, bias, (size_t)s.rows * sizeof *bias);
    }
    *out = w;
    return OK;
}

void cpu_pack_free(struct bweight *w) { free(w); }

/* ------------------------------------------------------------------------------------------------ and back */

static inline void half_scales(const uint8_t *p, int l0, int n, float *d)
{
    for (int l = 0; l < n; l++) {
        uint16_t h;
        memcpy(&h, p + 2 * (l0 + l), 2);
        d[l] = f16_to_f32(h);
    }
}

/* Value of column k of a lane from nibbles, its fifth bit, and its fifth and sixth. */
static inline int value_at(const uint8_t *nibbles, int lane, int k)
{
    int byte = nibbles[64 * (k % 16 / 4) + 4 * lane + k % 4];
    return k < 16 ? byte & 15 : byte >> 4;
}
static inline int fifth_at(const uint8_t *bits, int lane, int k)
{
    return (bits[4 * lane + k % 4] >> k / 4 & 1) << 4;
}
static inline int sixth_at(const uint8_t *bits, int lane, int k)
{
    return (bits[64 * (k / 16) + 4 * lane + k % 4] >> 2 * (k / 4 % 4) & 3) << 4;
}

static inline uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Every element of lanes [l0, l0 + n): out[k * n + l] with value(k, l), l counted from l0. */
#define EACH(value)                                                                                                  \
    for (int k = 0; k < TILE; k++)                                                                                   \
        for (int l = 0; l < n; l++) out[k * n + l] = (value)

/* Lanes [l0, l0 + n) of a tile, decoded exactly as dmat_row does. */
FORCE_INLINE void decode(const struct cpu_part *p, int64_t panel, int64_t t, int l0, int n, float *out)
{
    uint8_t *head, *b = tile_at(p, panel, t, &head);
    float d[PANEL], m[PANEL];
    const float *scale = NULL;
    if (p->scale_runs)
        scale = p->scale + (panel * p->scale_runs + (t + p->scale_tile0) / p->scale_tiles) * PANEL + l0;
    switch (p->type) {
    case DT_F32:
        for (int k = 0; k < TILE; k++) memcpy(out + k * n, b + 64 * k + 4 * l0, (size_t)n * sizeof *out);
        break;
    case DT_F16:
        for (int k = 0; k < TILE; k++) half_scales(b + 32 * k, l0, n, out + k * n);
        break;
    case DT_BF16: EACH(bf16_to_f32(half_at(b + 64 * (k / 2) + 4 * (l0 + l) + 2 * (k % 2)))); break;
    case DT_F8_E4M3: EACH(e4m3_to_f32(b[32 * (k / 2) + 2 * (l0 + l) + k % 2]) * scale[l]); break;
    case DT_MXFP4:
    case DT_MXFP4_GGUF:
        for (int l = 0; l < n; l++) d[l] = e8m0_to_f32(b[l0 + l]);
        EACH(e2m1_to_f32((uint8_t)value_at(b + 16, l0 + l, k)) * d[l]);
        break;
    case DT_NVFP4:
        for (int l = 0; l < n; l++)
            d[l] = e4m3_to_f32(b[l0 + l]) * scale[l], m[l] = e4m3_to_f32(b[16 + l0 + l]) * scale[l];
        EACH(e2m1_to_f32((uint8_t)value_at(b + 32, l0 + l, k)) * (k < 16 ? d[l] : m[l]));
        break;
    case DT_Q4_0:
        half_scales(b, l0, n, d);
        EACH(d[l] * (float)(value_at(b + 32, l0 + l, k) - 8));
        break;
    case DT_Q4_1:
        half_scales(b, l0, n, d), half_scales(b + 32, l0, n, m);
        EACH(d[l] * (float)value_at(b + 64, l0 + l, k) + m[l]);
        break;
    case DT_Q5_0:
        half_scales(b, l0, n, d);
        EACH(d[l] * (float)((value_at(b + 96, l0 + l, k) | fifth_at(b + 32, l0 + l, k)) - 16));
        break;
    case DT_Q5_1:
        half_scales(b, l0, n, d), half_scales(b + 32, l0, n, m);
        EACH(d[l] * (float)(value_at(b + 128, l0 + l, k) | fifth_at(b + 64, l0 + l, k)) + m[l]);
        break;
    case DT_Q8_0:
        half_scales(b, l0, n, d);
        EACH(d[l] * (float)(int8_t)b[32 + 64 * (k / 4) + 4 * (l0 + l) + k % 4]);
        break;
    case DT_Q4_K:
    case DT_Q5_K:
        half_scales(head, l0, n, d), half_scales(head + 32, l0, n, m);
        for (int l = 0; l < n; l++) d[l] *= (float)b[l0 + l], m[l] *= (float)b[16 + l0 + l];
        if (p->type == DT_Q4_K) EACH(d[l] * (float)value_at(b + 32, l0 + l, k) - m[l]);
        else EACH(d[l] * (float)(value_at(b + 96, l0 + l, k) | fifth_at(b + 32, l0 + l, k)) - m[l]);
        break;
    case DT_Q6_K:
        half_scales(head, l0, n, d);
        for (int l = 0; l < n; l++) m[l] = d[l] * (float)(int8_t)b[16 + l0 + l], d[l] *= (float)(int8_t)b[l0 + l];
        EACH((k < 16 ? d[l] : m[l]) * (float)((value_at(b + 160, l0 + l, k) | sixth_at(b + 32, l0 + l, k)) - 32));
        break;
    case DT_NONE:
    case DT_COUNT: break;
    }
}
#undef EACH

void cpu_tile(const struct cpu_part *p, int64_t panel, int64_t t, float w[TILE][PANEL])
{
    decode(p, panel, t, 0, PANEL, w[0]);
}

void cpu_part_row(const struct cpu_part *p, int64_t r, float *out)
{
    float last[TILE];
    for (int64_t t = 0; t < p->tiles; t++) {
        int64_t left = p->cols - t * TILE;
        decode(p, r / PANEL, t, (int)(r % PANEL), 1, left < TILE ? last : out + t * TILE);
        if (left < TILE) memcpy(out + t * TILE, last, (size_t)left * sizeof *out);
    }
}
