/* cpu_pack.c: from a matrix as stored to panels of 16 outputs and tiles of 32 columns, and back again for single rows.
 * The one place that knows the bytes of a tile (drawn in cpu_priv.h); what packs and what unpacks stand side by side. */
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
    case DT_F16: case DT_BF16: *tile = 1024; break;
    case DT_F8_E4M3: *tile = 512; break;
    case DT_MXFP4: case DT_MXFP4_GGUF: *tile = 16 + 256; break;
    case DT_NVFP4: *tile = 32 + 256; break;
    case DT_Q4_0: *tile = 32 + 256; break;
    case DT_Q4_1: *tile = 64 + 256; break;
    case DT_Q5_0: *tile = 32 + 64 + 256; break;
    case DT_Q5_1: *tile = 64 + 64 + 256; break;
    case DT_Q8_0: *tile = 32 + 512; break;
    case DT_Q4_K: *group_head = 64, *tile = 32 + 256; break;
    case DT_Q5_K: *group_head = 64, *tile = 32 + 64 + 256; break;
    case DT_Q6_K: *group_head = 32, *tile = 32 + 128 + 256; break;
    case DT_NONE: case DT_COUNT: assert(!"a matrix without a type"); *tile = 0; break;
    }
}

/* Tile t of a panel; *head: the bytes before its group. */
static uint8_t *tile_at(const struct cpu_part *p, int64_t panel, int64_t t, uint8_t **head)
{
    uint8_t *group = p->data + (size_t)panel * p->panel_bytes + (size_t)(t / 8) * (p->group_head + 8 * p->tile_bytes);
    *head = group;
    return group + p->group_head + (size_t)(t % 8) * p->tile_bytes;
}

/* ------------------------------------------------------------------------------------------------ layout of a matrix */

struct shape {
    struct cpu_part part[CPU_MAX_PARTS];
    size_t scale_at[CPU_MAX_PARTS], data_at[CPU_MAX_PARTS], bias_at, bytes;
    int64_t rows;
};

static bool has_scales(enum dtype type) { return type == DT_F8_E4M3 || type == DT_NVFP4; }

/* Where everything lies in the one block. All dimensions come from checked shapes, so the sums stay in range. */
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
        p->panel_bytes = size_round_up((size_t)((p->tiles + 7) / 8) * p->group_head + (size_t)p->tiles * p->tile_bytes, 64);
        p->scale_runs = 0;
        p->scale_tiles = INT32_MAX;
        s.rows += m->rows;
        s.data_at[i] = s.bytes;
        s.bytes += (size_t)p->panels * p->panel_bytes;
        if (!has_scales(m->type)) continue;
        p->scale_runs = 1;
        if (m->scale && m->scale_cols < m->scale_col0 + m->cols) {
            p->scale_tiles = (int32_t)(m->scale_cols / TILE);
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
        return err_set(e, ERR_UNSUPPORTED, "scale blocks of %lld columns at column %lld: multiples of %d are supported",
                       (long long)m->scale_cols, (long long)m->scale_col0, TILE);
    return OK;
}

/* ------------------------------------------------------------------------------------------------ into tiles */

static uint32_t load32(const uint8_t *p)
{
    uint32_t v;
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

/* Fifth bits: byte (lane, j) holds in bit s the bit of column 4 s + j. */
static void put_fifth(uint8_t *dst, int lane, uint32_t bits)
{
    for (int j = 0; j < 4; j++) {
        unsigned byte = 0;
        for (int s = 0; s < 8; s++) byte |= (bits >> (4 * s + j) & 1) << s;
        dst[4 * lane + j] = (uint8_t)byte;
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
        for (int s = 0; s < 8; s++)
            for (int j = 0; j < 4; j++) {
                uint8_t *high = tile + 32 + 64 * (s / 4) + 4 * lane + j;
                *high = (uint8_t)((s % 4 ? *high : 0) | (v[4 * s + j] >> 4) << 2 * (s % 4));
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
        uint32_t bits = 0;
        for (int c = 0; c < 32; c++) bits |= (uint32_t)(block[16 + c] >> g & 1) << c;
        put_fifth(tile + 32, lane, bits);
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
    case DT_F16: case DT_BF16:
        for (int k = 0; k < n; k++) memcpy(tile + 32 * k + 2 * lane, row + 2 * (t * TILE + k), 2);
        break;
    case DT_F8_E4M3:
        for (int k = 0; k < n; k++) tile[16 * k + lane] = row[t * TILE + k];
        break;
    case DT_MXFP4: case DT_NVFP4: {
        uint8_t v[32] = {0};
        for (int k = 0; k < n; k++) v[k] = (uint8_t)(row[(t * TILE + k) / 2] >> 4 * (k & 1) & 15);
        if (m->type == DT_MXFP4) {
            tile[lane] = bs[t];
            put_values(tile + 16, lane, v);
        } else {
            tile[lane] = bs[2 * t];
            tile[16 + lane] = n > 16 ? bs[2 * t + 1] : 0;
            put_values(tile + 32, lane, v);
        }
        break;
    }
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
    case DT_NONE: case DT_COUNT: break;
    }
}

static void pack_panel(const struct dmat *m, const struct cpu_part *p, int64_t panel)
{
    int64_t r0 = panel * PANEL, left = m->rows - r0;
    int lanes = left < PANEL ? (int)left : PANEL;
    if (lanes < PANEL || m->cols % TILE) memset(p->data + (size_t)panel * p->panel_bytes, 0, p->panel_bytes);
    for (int64_t t = 0; t < p->tiles; t++) {
        uint8_t *head, *tile = tile_at(p, panel, t, &head);
        for (int l = 0; l < lanes; l++) pack_lane(m, r0 + l, t, l, head, tile);
    }
    for (int64_t run = 0; run < p->scale_runs; run++)
        for (int l = 0; l < PANEL; l++) {
            int64_t r = r0 + (l < lanes ? l : 0);
            float *at = &p->scale[(panel * p->scale_runs + run) * PANEL + l];
            *at = !m->scale ? 1 : m->scale[(r + m->scale_row0) / m->scale_rows * m->scale_stride +
                                           m->scale_col0 / m->scale_cols + run];
        }
}

struct pack_job {
    struct cpu_pool *pool;
    const struct dmat *m;
    const struct cpu_part *p;
};

enum { DROP_ROWS_BYTES = 1 << 20 };

static void pack_some(void *arg, int thread, int n_threads)
{
    struct pack_job *j = arg;
    const struct dmat *m = j->m;
    /* A run of panels at a time: reads stay sequential, and pages are given back in large pieces. */
    int64_t per = (int64_t)(DROP_ROWS_BYTES / (m->row_stride * PANEL + 1)) + 1, n = (j->p->panels + per - 1) / per, i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(j->pool, n)) >= 0) {
        int64_t p0 = i * per, p1 = p0 + per < j->p->panels ? p0 + per : j->p->panels;
        for (int64_t p = p0; p < p1; p++) pack_panel(m, j->p, p);
        int64_t r1 = p1 * PANEL < m->rows ? p1 * PANEL : m->rows;
        if (m->map) fmap_drop(m->map, m->data + (size_t)(p0 * PANEL) * m->row_stride, (size_t)(r1 - p0 * PANEL) * m->row_stride);
    }
}

int cpu_pack(struct cpu_pool *pool, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
             struct err *e)
{
    struct shape s = shape_of(parts, n_parts, bias != NULL);
    struct bweight *w;
    for (int i = 0; i < n_parts; i++) TRY(check_part(&parts[i], e));
    TRY(mem_new(&w, sizeof *w, e));
    int rc = mem_new_aligned(&w->block, s.bytes, e);
    if (rc < 0) {
        free(w);
        return rc;
    }
    w->block_bytes = s.bytes;
    w->n_parts = n_parts;
    w->rows = s.rows;
    w->cols = parts[0].cols;
    for (int i = 0; i < n_parts; i++) {
        w->part[i] = s.part[i];
        w->part[i].data = w->block + s.data_at[i];
        if (s.part[i].scale_runs) w->part[i].scale = (float *)(void *)(w->block + s.scale_at[i]);
        cpu_pool_run(pool, pack_some, &(struct pack_job){pool, &parts[i], &w->part[i]});
    }
    if (bias) {
        w->bias = (float *)(void *)(w->block + s.bias_at);
        memcpy(w->bias, bias, (size_t)s.rows * sizeof *bias);
    }
    *out = w;
    return OK;
}

void cpu_pack_free(struct bweight *w)
{
    if (!w) return;
    mem_free_aligned(w->block);
    free(w);
}

/* ------------------------------------------------------------------------------------------------ and back */

static float half_at(const uint8_t *p, int lane)
{
    uint16_t h;
    memcpy(&h, p + 2 * lane, 2);
    return f16_to_f32(h);
}

/* Value of column k of a lane from nibbles, and its fifth bit. */
static int value_at(const uint8_t *nibbles, int lane, int k)
{
    int byte = nibbles[64 * (k % 16 / 4) + 4 * lane + k % 4];
    return k < 16 ? byte & 15 : byte >> 4;
}

static int fifth_at(const uint8_t *bits, int lane, int k) { return (bits[4 * lane + k % 4] >> k / 4 & 1) << 4; }

void cpu_tile_lane(const struct cpu_part *p, int64_t panel, int64_t t, int lane, float out[TILE])
{
    uint8_t *head, *b = tile_at(p, panel, t, &head);
    float scale = 1, d, m;
    if (p->scale_runs)
        scale = p->scale[(panel * p->scale_runs + (t + p->scale_tile0) / p->scale_tiles) * PANEL + lane];
    uint16_t h;
    switch (p->type) {
    case DT_F32:
        for (int k = 0; k < TILE; k++) memcpy(&out[k], b + 64 * k + 4 * lane, 4);
        break;
    case DT_F16:
        for (int k = 0; k < TILE; k++) out[k] = half_at(b + 32 * k, lane);
        break;
    case DT_BF16:
        for (int k = 0; k < TILE; k++) memcpy(&h, b + 32 * k + 2 * lane, 2), out[k] = bf16_to_f32(h);
        break;
    case DT_F8_E4M3:
        for (int k = 0; k < TILE; k++) out[k] = e4m3_to_f32(b[16 * k + lane]) * scale;
        break;
    case DT_MXFP4: case DT_MXFP4_GGUF:
        d = e8m0_to_f32(b[lane]);
        for (int k = 0; k < TILE; k++) out[k] = e2m1_to_f32((uint8_t)value_at(b + 16, lane, k)) * d;
        break;
    case DT_NVFP4:
        for (int k = 0; k < TILE; k++)
            out[k] = e2m1_to_f32((uint8_t)value_at(b + 32, lane, k)) * (e4m3_to_f32(b[k / 16 * 16 + lane]) * scale);
        break;
    case DT_Q4_0:
        d = half_at(b, lane);
        for (int k = 0; k < TILE; k++) out[k] = d * (float)(value_at(b + 32, lane, k) - 8);
        break;
    case DT_Q4_1:
        d = half_at(b, lane), m = half_at(b + 32, lane);
        for (int k = 0; k < TILE; k++) out[k] = d * (float)value_at(b + 64, lane, k) + m;
        break;
    case DT_Q5_0:
        d = half_at(b, lane);
        for (int k = 0; k < TILE; k++) out[k] = d * (float)((value_at(b + 96, lane, k) | fifth_at(b + 32, lane, k)) - 16);
        break;
    case DT_Q5_1:
        d = half_at(b, lane), m = half_at(b + 32, lane);
        for (int k = 0; k < TILE; k++) out[k] = d * (float)(value_at(b + 128, lane, k) | fifth_at(b + 64, lane, k)) + m;
        break;
    case DT_Q8_0:
        d = half_at(b, lane);
        for (int k = 0; k < TILE; k++) out[k] = d * (float)(int8_t)b[32 + 64 * (k / 4) + 4 * lane + k % 4];
        break;
    case DT_Q4_K:
        d = half_at(head, lane) * (float)b[lane], m = half_at(head + 32, lane) * (float)b[16 + lane];
        for (int k = 0; k < TILE; k++) out[k] = d * (float)value_at(b + 32, lane, k) - m;
        break;
    case DT_Q5_K:
        d = half_at(head, lane) * (float)b[lane], m = half_at(head + 32, lane) * (float)b[16 + lane];
        for (int k = 0; k < TILE; k++) out[k] = d * (float)(value_at(b + 96, lane, k) | fifth_at(b + 32, lane, k)) - m;
        break;
    case DT_Q6_K:
        for (int k = 0; k < TILE; k++) {
            int high = b[32 + 64 * (k / 16) + 4 * lane + k % 4] >> 2 * (k / 4 % 4) & 3;
            d = half_at(head, lane) * (float)(int8_t)b[k / 16 * 16 + lane];
            out[k] = d * (float)((value_at(b + 160, lane, k) | high << 4) - 32);
        }
        break;
    case DT_NONE: case DT_COUNT: break;
    }
}

void cpu_part_row(const struct cpu_part *p, int64_t r, float *out)
{
    float last[TILE];
    for (int64_t t = 0; t < p->tiles; t++) {
        int64_t left = p->cols - t * TILE;
        cpu_tile_lane(p, r / PANEL, t, (int)(r % PANEL), left < TILE ? last : out + t * TILE);
        if (left < TILE) memcpy(out + t * TILE, last, (size_t)left * sizeof *out);
    }
}
