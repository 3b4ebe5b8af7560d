/* cuda_weight.cu: from a matrix as stored to the layout of cuda_unpack.h: rows go through pinned memory in pieces,
 * and a kernel moves their bits into place. Weights stay in the size they are stored in, within 3 %. Memory of small
 * weights comes from slabs, which go back all at once when the device closes. */
#include <stdlib.h>
#include <string.h>

#include "cuda_priv.h"

/* ------------------------------------------------------------------------------------------------ memory of weights
 * */

enum { SLAB_BYTES = 64 << 20, OWN_BYTES = 8 << 20, STAGE_BYTES = 32 << 20 };

struct cu_slab {
    struct cu_slab *next;
    uint8_t *dev;
    size_t used, cap;
};

struct cu_heap {
    struct cu_slab *all, *open;
    uint8_t *stage_host[2], *stage_dev[2]; /* pieces on their way, until cu_heap_settle */
    cudaEvent_t free_again[2];
    int turn;
};

static int heap_of(struct cuda *c, struct err *e) { return c->heap ? OK : mem_new(&c->heap, sizeof *c->heap, e); }

static int slab_new(struct cuda *c, struct cu_slab **out, size_t bytes, struct err *e)
{
    struct cu_slab *s;
    TRY(mem_new(&s, sizeof *s, e));
    int rc = cu_alloc(c, &s->dev, bytes, e);
    if (rc < 0) {
        free(s);
        return rc;
    }
    s->cap = bytes;
    s->next = c->heap->all;
    c->heap->all = s;
    *out = s;
    return OK;
}

static int heap_take(struct cuda *c, uint8_t **out, size_t bytes, struct err *e)
{
    struct cu_heap *h = c->heap;
    struct cu_slab *s = h->open;
    bytes = size_round_up(bytes, 256);
    if (bytes > OWN_BYTES) TRY(slab_new(c, &s, bytes, e));
    else if (!s || s->cap - s->used < bytes) {
        TRY(slab_new(c, &s, SLAB_BYTES, e));
        h->open = s;
    }
    *out = s->dev + s->used;
    s->used += bytes;
    return OK;
}

static void stage_free(struct cuda *c)
{
    struct cu_heap *h = c->heap;
    for (int i = 0; i < 2; i++) {
        if (h->stage_host[i]) (void)cudaFreeHost(h->stage_host[i]);
        cu_free(c, h->stage_dev[i]);
        if (h->free_again[i]) (void)cudaEventDestroy(h->free_again[i]);
        h->stage_host[i] = h->stage_dev[i] = NULL;
        h->free_again[i] = NULL;
    }
}

void cu_heap_settle(struct cuda *c)
{
    if (c->heap && c->heap->stage_host[0]) stage_free(c);
}

void cu_heap_free(struct cuda *c)
{
    if (!c->heap) return;
    stage_free(c);
    for (struct cu_slab *s = c->heap->all, *next; s; s = next) {
        next = s->next;
        cu_free(c, s->dev);
        free(s);
    }
    free(c->heap);
    c->heap = NULL;
}

/* ------------------------------------------------------------------------------------------------ layout */

struct layout {
    struct cu_mat part[CU_MAX_PARTS]; /* without pointers */
    size_t q_at[CU_MAX_PARTS], h_at[CU_MAX_PARTS], s_at[CU_MAX_PARTS], scale_at[CU_MAX_PARTS], scale_n[CU_MAX_PARTS];
    size_t bias_at, bytes;
    int rows;
};

/* Columns and bytes of q, h, s of a unit: what cuda_unpack.h draws. */
static void unit_sizes(int type, int *cols, int *h, int *s)
{
    *cols = 128, *h = *s = 0;
    switch (type) {
    case DT_F32: *cols = 16; break;
    case DT_F16:
    case DT_BF16: *cols = 32; break;
    case DT_F8_E4M3: *cols = 64; break;
    case DT_Q8_0: *cols = 64, *s = 4; break;
    case DT_MXFP4: *s = 4; break;
    case DT_NVFP4:
    case DT_Q4_0: *s = 8; break;
    case DT_Q4_1: *s = 16; break;
    case DT_Q5_0: *h = 16, *s = 8; break;
    case DT_Q5_1: *h = 16, *s = 16; break;
    case DT_Q4_K: *s = 8; break;
    case DT_Q5_K: *h = 16, *s = 8; break;
    case DT_Q6_K: *h = 32, *s = 9; break;
    default: break;
    }
}

static size_t take(size_t *bytes, size_t n)
{
    size_t at = *bytes;
    *bytes += size_round_up(n, 256);
    return at;
}

static struct layout layout_of(const struct dmat *parts, int n_parts, bool bias)
{
    struct layout l = {};
    for (int i = 0; i < n_parts; i++) {
        const struct dmat *d = &parts[i];
        struct cu_mat *m = &l.part[i];
        int unit, h, s;
        m->type = d->type == DT_MXFP4_GGUF ? DT_MXFP4 : d->type;
        m->rows = (int)d->rows;
        m->cols = (int)d->cols;
        unit_sizes(m->type, &unit, &h, &s);
        int units = cu_div_up(d->cols, unit);
        m->q_stride = (uint32_t)(units * 64);
        m->h_stride = (uint32_t)size_round_up((size_t)(units * h), 16);
        m->s_stride = (uint32_t)size_round_up((size_t)(units * s), 16);
        size_t rows = (size_t)d->rows;
        l.q_at[i] = take(&l.bytes, rows * m->q_stride);
        l.h_at[i] = take(&l.bytes, rows * m->h_stride);
        l.s_at[i] = take(&l.bytes, rows * m->s_stride);
        if (d->scale) {
            int64_t r0 = d->scale_row0 / d->scale_rows, r1 = (d->scale_row0 + d->rows - 1) / d->scale_rows;
            int64_t c0 = d->scale_col0 / d->scale_cols, c1 = (d->scale_col0 + d->cols - 1) / d->scale_cols;
            m->scale_rows = (int)(d->scale_rows < INT32_MAX / 2 ? d->scale_rows : INT32_MAX / 2);
            m->scale_cols = (int)(d->scale_cols < INT32_MAX / 2 ? d->scale_cols : INT32_MAX / 2);
            m->scale_stride = (int)(c1 - c0 + 1);
            m->scale_row0 = (int)(d->scale_row0 % d->scale_rows);
            m->scale_col0 = (int)(d->scale_col0 % d->scale_cols);
            l.scale_n[i] = (size_t)((r1 - r0 + 1) * (c1 - c0 + 1));
            l.scale_at[i] = take(&l.bytes, l.scale_n[i] * sizeof(float));
        }
        l.rows += m->rows;
    }
    if (bias) l.bias_at = take(&l.bytes, (size_t)l.rows * sizeof(float));
    return l;
}

size_t cu_weight_bytes(const struct backend *be, const struct dmat *parts, int n_parts)
{
    return layout_of(parts, n_parts, false).bytes;
}

static int check_part(const struct dmat *m, struct err *e)
{
    bool one = !m->scale || m->scale_cols >= m->scale_col0 % m->scale_cols + m->cols;
    if (m->rows > INT32_MAX / 2 || m->cols > INT32_MAX / 8)
        return err_set(e, ERR_UNSUPPORTED, "a matrix of %lld rows and %lld columns is too large for the GPU backend",
                       (long long)m->rows, (long long)m->cols);
    if (m->type == DT_F8_E4M3 && !one && (m->scale_cols % 64 || m->scale_col0 % 64))
        return err_set(e, ERR_UNSUPPORTED,
                       "scale blocks of %lld columns at column %lld: multiples of 64 are supported on a GPU",
                       (long long)m->scale_cols, (long long)m->scale_col0);
    if (m->type == DT_NVFP4 && !one)
        return err_set(e, ERR_UNSUPPORTED, "nvfp4 with float scales of %lld columns: one scale a row is supported",
                       (long long)m->scale_cols);
    return OK;
}

/* ------------------------------------------------------------------------------------------------ into place */

/* rows [row0, row0 + n) of m come from raw: n rows of raw_stride bytes as stored, then n rows of bs_stride scale
 * bytes. */
struct relay {
    struct cu_mat m;
    int source; /* enum dtype as stored */
    int row0, n, units, unit, s_unit;
    size_t raw_stride, bs_stride;
    const uint8_t *raw;
};

static __device__ uint32_t nibble_at(const struct relay &r, const uint8_t *row, int c, uint32_t *high)
{
    int k = c % 32, g = c % 256 / 32;
    const uint8_t *b;
    *high = 0;
    if (c >= r.m.cols) return 0;
    switch (r.source) {
    case DT_MXFP4:
    case DT_NVFP4: return row[c / 2] >> 4 * (c % 2) & 15;
    case DT_MXFP4_GGUF: b = row + (size_t)(c / 32) * 17 + 1; break;
    case DT_Q4_0: b = row + (size_t)(c / 32) * 18 + 2; break;
    case DT_Q4_1: b = row + (size_t)(c / 32) * 20 + 4; break;
    case DT_Q5_0: b = row + (size_t)(c / 32) * 22 + 2, *high = b[k / 8] >> k % 8 & 1, b += 4; break;
    case DT_Q5_1: b = row + (size_t)(c / 32) * 24 + 4, *high = b[k / 8] >> k % 8 & 1, b += 4; break;
    case DT_Q4_K: b = row + (size_t)(c / 256) * 144 + 16; return b[g / 2 * 32 + k] >> 4 * (g % 2) & 15;
    case DT_Q5_K:
        b = row + (size_t)(c / 256) * 176 + 16;
        *high = b[k] >> g & 1;
        return b[32 + g / 2 * 32 + k] >> 4 * (g % 2) & 15;
    case DT_Q6_K:
        b = row + (size_t)(c / 256) * 210;
        *high = b[128 + g / 4 * 32 + k] >> g % 4 * 2 & 3;
        return b[g / 4 * 64 + g % 2 * 32 + k] >> g % 4 / 2 * 4 & 15;
    default: return 0;
    }
    return b[k % 16] >> 4 * (k / 16) & 15;
}

/* Where pair p of a word keeps the four bits of an E2M1 value, lowest first (cuda_unpack.h). */
static __device__ uint32_t place_e2m1(uint32_t v, int p)
{
    const int at[4][4] = {{6, 7, 8, 15}, {3, 4, 5, 12}, {0, 1, 2, 9}, {10, 11, 13, 14}};
    uint32_t w = 0;
    for (int i = 0; i < 4; i++) w |= (v >> i & 1) << at[p][i];
    return w;
}

static __device__ void place_nibbles(const struct relay &r, const uint8_t *row, int u, int t, uint8_t *q, uint8_t *h)
{
    bool e2m1 = r.m.type == DT_MXFP4 || r.m.type == DT_NVFP4, two = r.m.type == DT_Q6_K;
    uint32_t words[4] = {0, 0, 0, 0}, high[2] = {0, 0};
    for (int j = 0; j < 4; j++)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < 2; i++) {
                uint32_t hi, v = nibble_at(r, row, u * 128 + 32 * j + 16 * (p / 2) + 4 * t + 2 * (p % 2) + i, &hi);
                words[j] |= (e2m1 ? place_e2m1(v, p) : v << 4 * p) << 16 * i;
                if (two) high[j / 2] |= hi << (8 * (j % 2) + 2 * p + 16 * i);
                else high[0] |= hi << (4 * j + p + 16 * i);
            }
    *(uint4 *)(void *)(q + u * 64 + t * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    if (!h) return;
    if (two) *(uint2 *)(void *)(h + u * 32 + t * 8) = make_uint2(high[0], high[1]);
    else *(uint32_t *)(void *)(h + u * 16 + t * 4) = high[0];
}

static __device__ void copy_or_zero(uint8_t *to, const uint8_t *from, int n, bool there)
{
    for (int i = 0; i < n; i++) to[i] = there ? from[i] : 0;
}

/* The scales of unit u, by one lane. */
static __device__ void place_scales(const struct relay &r, const uint8_t *row, const uint8_t *bs, int u, uint8_t *s)
{
    int block = r.source == DT_Q4_0   ? 18
                : r.source == DT_Q4_1 ? 20
                : r.source == DT_Q5_0 ? 22
                : r.source == DT_Q5_1 ? 24
                : r.source == DT_Q8_0 ? 34
                                      : 17;
    switch (r.source) {
    case DT_MXFP4:
    case DT_NVFP4: {
        int n = r.source == DT_MXFP4 ? 4 : 8, per = 128 / n;
        for (int i = 0; i < n; i++) copy_or_zero(s + u * n + i, bs + u * n + i, 1, u * 128 + i * per < r.m.cols);
        break;
    }
    case DT_MXFP4_GGUF:
    case DT_Q4_0:
    case DT_Q4_1:
    case DT_Q5_0:
    case DT_Q5_1:
    case DT_Q8_0: {
        int n = r.unit / 32, size = r.s_unit / n;
        for (int i = 0; i < n; i++)
            copy_or_zero(s + (u * n + i) * size, row + (size_t)(u * n + i) * (size_t)block, size,
                         u * r.unit + i * 32 < r.m.cols);
        break;
    }
    case DT_Q4_K:
    case DT_Q5_K:
        if (u % 2 == 0)
            copy_or_zero(s + u / 2 * 16, row + (size_t)(u / 2) * (r.source == DT_Q4_K ? 144 : 176), 16, true);
        break;
    case DT_Q6_K:
        copy_or_zero(s + u * 8, row + (size_t)(u / 2) * 210 + 192 + u % 2 * 8, 8, true);
        if (u % 2 == 0) copy_or_zero(s + r.units / 2 * 16 + u, row + (size_t)(u / 2) * 210 + 208, 2, true);
        break;
    default: break;
    }
}

static __global__ void relay_kernel(struct relay r)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int t = (int)(i % 4), u = (int)(i / 4 % r.units), n = (int)(i / 4 / r.units);
    if (n >= r.n) return;
    const uint8_t *row = r.raw + (size_t)n * r.raw_stride;
    const uint8_t *bs = r.raw + (size_t)r.n * r.raw_stride + (size_t)n * r.bs_stride;
    size_t at = (size_t)(r.row0 + n);
    uint8_t *q = (uint8_t *)r.m.q + at * r.m.q_stride, *h = r.m.h ? (uint8_t *)r.m.h + at * r.m.h_stride : NULL;
    if (r.unit == 128) {
        place_nibbles(r, row, u, t, q, h);
    } else if (r.source == DT_Q8_0) {
        for (int b = 0; b < 16; b++) {
            int c = u * 64 + 16 * (b / 4) + 4 * t + b % 4;
            q[u * 64 + t * 16 + b] = c < r.m.cols ? row[(size_t)(c / 32) * 34 + 2 + c % 32] : 0;
        }
    } else {
        for (size_t b = (size_t)(u * 64 + t * 16), end = b + 16; b < end; b++) q[b] = b < r.raw_stride ? row[b] : 0;
    }
    if (r.m.s && t == 0) place_scales(r, row, bs, u, (uint8_t *)r.m.s + at * r.m.s_stride);
}

/* A piece of pinned memory and its place on the device, when the copy before has left them. */
static bool stage_take(struct cuda *c, int *turn)
{
    struct cu_heap *h = c->heap;
    int i = h->turn = 1 - h->turn;
    if (!h->stage_host[i]) {
        if (!cu_ok(c, "allocating memory to load through", cudaMallocHost((void **)&h->stage_host[i], STAGE_BYTES)) ||
            !cu_ok(c, "making an event", cudaEventCreateWithFlags(&h->free_again[i], cudaEventDisableTiming)))
            return false;
        if (cu_alloc(c, &h->stage_dev[i], STAGE_BYTES, &c->err) < 0) return false;
    } else if (!cu_ok(c, "loading", cudaEventSynchronize(h->free_again[i]))) return false;
    *turn = i;
    return true;
}

static bool load_part(struct cuda *c, const struct dmat *d, const struct cu_mat *m)
{
    struct cu_heap *heap = c->heap;
    struct relay r = {};
    int h, turn;
    int per = dtype_infos[d->type].bscale_block;
    r.m = *m;
    r.source = d->type;
    unit_sizes(m->type, &r.unit, &h, &r.s_unit);
    r.units = cu_div_up(d->cols, r.unit);
    r.raw_stride = dtype_row_bytes(d->type, d->cols);
    r.bs_stride = per ? (size_t)cu_div_up(d->cols, per) : 0;
    size_t row_bytes = r.raw_stride + r.bs_stride;
    int64_t rows = (int64_t)(STAGE_BYTES / row_bytes);
    if (rows == 0) return cu_ok(c, "loading a matrix whose row is too long", cudaErrorInvalidValue);
    for (int64_t r0 = 0; r0 < d->rows; r0 += rows) {
        if (!stage_take(c, &turn)) return false;
        int64_t n = d->rows - r0 < rows ? d->rows - r0 : rows;
        uint8_t *to = heap->stage_host[turn];
        const uint8_t *from = d->data + (size_t)r0 * d->row_stride;
        if (d->row_stride == r.raw_stride) memcpy(to, from, (size_t)n * r.raw_stride);
        else
            for (int64_t i = 0; i < n; i++)
                memcpy(to + (size_t)i * r.raw_stride, from + (size_t)i * d->row_stride, r.raw_stride);
        for (int64_t i = 0; i < n && per; i++)
            memcpy(to + (size_t)n * r.raw_stride + (size_t)i * r.bs_stride,
                   d->bscale + (size_t)(r0 + i) * d->bscale_stride, r.bs_stride);
        if (d->map) fmap_drop(d->map, from, (size_t)n * d->row_stride);
        r.row0 = (int)r0;
        r.n = (int)n;
        r.raw = heap->stage_dev[turn];
        if (!cu_ok(c, "loading",
                   cudaMemcpyAsync(heap->stage_dev[turn], to, (size_t)n * row_bytes, cudaMemcpyHostToDevice,
                                   c->stream)))
            return false;
        relay_kernel<<<(unsigned)cu_div_up(n * r.units * 4, 256), 256, 0, c->stream>>>(r);
        if (!cu_launched(c, "loading") || !cu_ok(c, "loading", cudaEventRecord(heap->free_again[turn], c->stream)))
            return false;
    }
    return true;
}

static bool load_scales(struct cuda *c, const struct dmat *d, const struct cu_mat *m, size_t n)
{
    float *grid;
    if (mem_new(&grid, n * sizeof *grid, &c->err) < 0) return false;
    int64_t r0 = d->scale_row0 / d->scale_rows, c0 = d->scale_col0 / d->scale_cols;
    for (size_t i = 0; i < n; i++)
        grid[i] = d->scale[(r0 + (int64_t)i / m->scale_stride) * d->scale_stride + c0 + (int64_t)i % m->scale_stride];
    bool ok = cu_ok(c, "loading",
                    cudaMemcpyAsync((void *)m->scale, grid, n * sizeof *grid, cudaMemcpyHostToDevice, c->stream)) &&
              cu_ok(c, "loading", cudaStreamSynchronize(c->stream));
    free(grid);
    return ok;
}

int cu_weight_new(struct backend *be, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
                  struct err *e)
{
    struct cuda *c = (struct cuda *)be;
    struct bweight *w;
    uint8_t *block;
    if (c->err.code) {
        *e = c->err;
        return e->code;
    }
    for (int i = 0; i < n_parts; i++) TRY(check_part(&parts[i], e));
    struct layout l = layout_of(parts, n_parts, bias != NULL);
    TRY(heap_of(c, e));
    TRY(mem_new(&w, sizeof *w, e));
    int rc = heap_take(c, &block, l.bytes, e);
    if (rc < 0) {
        free(w);
        return rc;
    }
    w->n_parts = n_parts;
    w->rows = l.rows;
    w->cols = (int)parts[0].cols;
    bool ok = true;
    for (int i = 0; i < n_parts && ok; i++) {
        struct cu_mat *m = &w->part[i];
        *m = l.part[i];
        m->q = block + l.q_at[i];
        if (m->h_stride) m->h = block + l.h_at[i];
        if (m->s_stride) m->s = block + l.s_at[i];
        if (l.scale_n[i]) m->scale = (const float *)(const void *)(block + l.scale_at[i]);
        ok = (!l.scale_n[i] || load_scales(c, &parts[i], m, l.scale_n[i])) && load_part(c, &parts[i], m);
    }
    if (ok && bias) {
        w->bias = (float *)(void *)(block + l.bias_at);
        ok =
            cu_ok(c, "loading",
                  cudaMemcpyAsync(w->bias, bias, (size_t)l.rows * sizeof *bias, cudaMemcpyHostToDevice, c->stream)) &&
            cu_ok(c, "loading", cudaStreamSynchronize(c->stream)); /* the caller's array may go now */
    }
    if (!ok) {
        free(w);
        *e = c->err;
        return e->code;
    }
    *out = w;
    return OK;
}

void cu_weight_free(struct backend *be, struct bweight *w)
{
    struct cuda *c = (struct cuda *)be;
    if (!w) return;
    cu_graph_flush(c);
    cu_graphs_drop(c); /* graphs and tables may name it */
    cu_tables_free(c);
    free(w);
}

/* ------------------------------------------------------------------------------------------------ tables of experts
 * */

struct cu_tables {
    struct cu_tables *next;
    const struct bweight **names; /* [E] what the table was made of */
    struct cu_experts t;
};

void cu_tables_free(struct cuda *c)
{
    for (struct cu_tables *t = c->tables, *next; t; t = next) {
        next = t->next;
        cu_free(c, (void *)t->t.dev);
        free(t->names);
        free(t);
    }
    c->tables = NULL;
}

static bool table_new(struct cuda *c, struct cu_tables **out, const struct bweight *const *w, int E)
{
    struct cu_tables *t;
    struct bweight *host, *dev;
    size_t bytes = (size_t)E * sizeof *host;
    if (mem_new(&t, sizeof *t, &c->err) < 0) return false;
    if (mem_new(&t->names, (size_t)E * sizeof *t->names, &c->err) < 0) {
        free(t);
        return false;
    }
    bool ok = mem_new(&host, bytes, &c->err) >= 0;
    if (ok) {
        for (int x = 0; x < E; x++) {
            t->names[x] = w[x];
            if (!w[x]) continue;
            host[x] = *w[x];
            if (!t->t.any) t->t.any = w[x];
        }
        ok = cu_alloc(c, &dev, bytes, &c->err) >= 0;
        if (ok) {
            t->t.dev = dev;
            ok = cu_ok(c, "experts", cudaMemcpyAsync(dev, host, bytes, cudaMemcpyHostToDevice, c->stream)) &&
                 cu_ok(c, "experts", cudaStreamSynchronize(c->stream));
        }
        free(host);
    }
    t->t.E = E;
    t->next = c->tables; /* also a failed one, for the end to free */
    c->tables = t;
    *out = t;
    return ok;
}

const struct cu_experts *cu_experts_of(struct cuda *c, const struct bweight *const *w, int E)
{
    struct cu_tables *t = c->tables;
    if (c->err.code) return NULL;
    while (t && (t->t.E != E || memcmp(t->names, w, (size_t)E * sizeof *w))) t = t->next;
    if (!t && !table_new(c, &t, w, E)) return NULL;
    return &t->t;
}
