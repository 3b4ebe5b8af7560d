/* cpu_priv: what the files of the CPU backend share: the thread pool, the packed weight, the quantised activations and
 * the dispatch table of a CPU level.
 *
 * Packed weights. A matrix becomes panels of 16 outputs (rows padded with zeros); inside a panel the columns go in tiles
 * of 32 (columns padded with zeros), so that SIMD lanes hold outputs and no horizontal sum is needed. One tile is one
 * step of every kernel; its bytes by type (lane l = output 16 p + l, k = column in the tile):
 *   F32, F16             [k 32][lane 16] elements
 *   BF16, F8             [k / 2][lane 16][2] elements; F8: a float scale a lane for each run of columns with one scale
 *   nibble types         [s 4][lane 16][j 4] bytes: low nibble k = 4 s + j, high nibble k = 16 + 4 s + j
 *   byte type (Q8_0)     [s 8][lane 16][j 4] int8: k = 4 s + j
 *   scales before them   Q4_0, Q5_0, Q8_0: d f16[16]; Q4_1, Q5_1: d, m f16[16]; MXFP4: e8m0[16]; NVFP4: e4m3 [2][16]
 *                        (columns 0-15, 16-31), and a float scale a lane a panel; K-quants: per 8 tiles d (dmin) f16[16],
 *                        then per tile sc, mn u8[16] (Q6_K: int8 [2][16])
 *   then high bits       Q5_*: [lane 16][j 4] bytes, bit s for k = 4 s + j; Q6_K: two such, 2 bits at 2 (s % 4) for s / 4
 * so every format keeps its stored precision and its size (within 3 %). cpu_pack.c is the one place that knows these. */
#ifndef HEARTH_CPU_PRIV_H
#define HEARTH_CPU_PRIV_H

#include "backend.h"

/* Kernels are written once with sizes as arguments: inlined, sizes are constants, and with their loops unrolled small
 * arrays of vectors become registers. */
#define FORCE_INLINE static inline __attribute__((always_inline))
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)

enum { PANEL = 16, TILE = 32, CPU_MAX_PARTS = 3 };

/* ------------------------------------------------------------------------------------------------ threads (cpu_pool.c) */

struct cpu_pool;
typedef void cpu_job(void *arg, int thread, int n_threads);
int cpu_pool_open(struct cpu_pool **out, int threads, struct err *e) MUST_CHECK;
void cpu_pool_close(struct cpu_pool **p);
int cpu_pool_threads(const struct cpu_pool *p);
/* Runs job on every thread (the caller is thread 0) and returns when all are done. Workers spin briefly after a job, then
 * sleep: an idle engine uses no time. */
void cpu_pool_run(struct cpu_pool *p, cpu_job *job, void *arg);
/* The same on the calling thread alone, for jobs smaller than a wake-up. */
void cpu_pool_run_alone(struct cpu_pool *p, cpu_job *job, void *arg);
/* Takes the next item of a shared counter, for work in tiles: -1 when all n are taken. Reset by each run. */
int64_t cpu_pool_take(struct cpu_pool *p, int64_t n);

/* ------------------------------------------------------------------------------------------------ weight memory (cpu_heap.c) */

/* Memory of packed weights, handed out in order from large slabs: many small matrices share huge pages, which are few to
 * fault in and few to look up while a pass streams over them. Given back all at once. All-zero is a valid empty heap. */
struct cpu_heap {
    struct cpu_slab *slab;
};
int cpu_heap_take(struct cpu_heap *h, uint8_t **out, size_t bytes, struct err *e) MUST_CHECK; /* aligned to 64 */
void cpu_heap_free(struct cpu_heap *h);

/* ------------------------------------------------------------------------------------------------ packed weights (cpu_pack.c) */

struct cpu_part {
    enum dtype type;
    int64_t rows, cols;
    int64_t panels, tiles;   /* ceil(rows / PANEL), ceil(cols / TILE) */
    uint8_t *data;           /* panel p at data + p * panel_bytes, 64-byte aligned */
    size_t panel_bytes, group_head, tile_bytes; /* K-quants: group_head bytes stand before every 8 tiles */
    float *scale;            /* F8: [panels][scale_runs][PANEL]; NVFP4: [panels][1][PANEL]; else NULL */
    int64_t scale_runs;
    int32_t scale_tiles, scale_tile0; /* run of tile t = (t + scale_tile0) / scale_tiles */
};

struct bweight {
    int n_parts;
    int64_t rows, cols; /* rows of all parts together */
    struct cpu_part part[CPU_MAX_PARTS];
    float *bias; /* [rows] or NULL */
};

size_t cpu_pack_bytes(const struct dmat *parts, int n_parts);
/* Packs with the pool's threads. Source pages are dropped from the resident set as they are used (fmap_drop). */
int cpu_pack(struct cpu_pool *pool, struct cpu_heap *heap, struct bweight **out, const struct dmat *parts, int n_parts,
             const float *bias, struct err *e) MUST_CHECK;
void cpu_pack_free(struct bweight *w); /* its bytes stay in the heap */
/* A tile, decoded exactly as dmat_row does; zeros where the matrix has ended. */
void cpu_tile(const struct cpu_part *p, int64_t panel, int64_t tile, float w[TILE][PANEL]);
/* out[0..cols) = row r of the part, exactly (embedding lookups, tests). */
void cpu_part_row(const struct cpu_part *p, int64_t r, float *out);

/* ------------------------------------------------------------------------------------------------ activations, products (cpu_linear*.c) */

/* Rows of activations ready for products, tile by tile: the rows of a tile lie side by side, so that a kernel that takes
 * many rows through one tile of weights reads on and on. Kp = cols padded to TILE with zeros.
 *   x [Kp / TILE][M][TILE] float
 *   q [Kp / TILE][M][TILE] int8, d [Kp / TILE][M] float: x ~ d * q, d = max|x| / 127 over the tile, q round to nearest
 *     even; as the level's kernels want it, q is stored xor level->q_flip
 *   s [Kp / TILE][M][2] float: the sum of q over the tile, and over its columns 16-31
 *   b [Kp / TILE][M][TILE] bf16: x rounded to nearest even
 * Filled is what the level wants for the types of the weights at hand (level->wants). */
enum { WANT_FLOAT = 1, WANT_QUANT = 2, WANT_SUMS = 4, WANT_BF16 = 8 };
enum { ACT_BUFFERS = 5 };
struct cpu_acts {
    int M;
    int64_t cols, Kp;
    float *x;
    int8_t *q;
    float *d, *s;
    uint16_t *b;
};
static inline size_t acts_at(const struct cpu_acts *a, int64_t tile, int m) { return (size_t)tile * (size_t)a->M + (size_t)m; }

/* Where a product goes: out[(m - m0) * stride + r - row0] = sum + bias[r] + residual[like out]; bias and residual may be
 * NULL, residual may be out. */
struct cpu_out {
    float *out;
    size_t stride;
    const float *bias, *residual;
    size_t row0, m0;
};

static inline void cpu_store(const struct cpu_out *o, size_t m, size_t r0, const float *sum, size_t n)
{
    for (size_t r = 0; r < n; r++) {
        size_t at = (m - o->m0) * o->stride + r0 + r - o->row0;
        float v = sum[r];
        if (o->bias) v += o->bias[r0 + r];
        if (o->residual) v += o->residual[at];
        o->out[at] = v;
    }
}


/* One CPU level: plain C first; each better level replaces what it does better. */
struct cpu_level {
    const char *name;
    /* What products with this type take at this level: WANT_FLOAT, WANT_BF16 or WANT_QUANT, with WANT_SUMS or without. */
    int (*wants)(enum dtype type);
    /* Fills q and d, and with `sums` s, of row m from x[Kp]. */
    void (*quantise)(const struct cpu_acts *a, int m, const float *x, bool sums);
    /* Fills b of row m from x[Kp]; NULL where no type wants it. */
    void (*to_bf16)(const struct cpu_acts *a, int m, const float *x);
    uint8_t q_flip; /* 0x80 where the kernels take activations as unsigned bytes, 128 above their value; else 0 */
    /* W[r] . x[m] for m in [first, last) and the rows r of panels [p0, p1), stored by `out` (indices as in the part).
     * Each element is summed over its tiles in ascending order in one accumulator, whatever the number of rows. */
    void (*product)(const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, int first, int last,
                    const struct cpu_out *out);
    /* dst[0..n) = x / sqrt(mean(x^2) + eps) * w; w == NULL: x as it is */
    void (*rms_norm)(float *dst, const float *x, const float *w, float eps, int64_t n);
    /* dst[0..n) = gate * sigmoid(gate) * up, or with limit > 0 min(gate, limit) * sigmoid(1.702 of it) *
     * (clamp(up, -limit, limit) + 1). dst may be gate. */
    void (*gate)(float *dst, const float *gate, const float *up, float limit, int64_t n);
    /* acc[0..n) += w * y[0..n) */
    void (*add_scaled)(float *acc, const float *y, float w, int64_t n);
    /* A page is f16, or with `wide` float: keys [Dh][KV_PAGE], so that lanes hold keys, values [KV_PAGE][Dh].
     * scores[i][j] = scale * q[i] . k_j for n queries [n][Dh] and all keys of the page */
    void (*score)(float (*scores)[KV_PAGE], const float *q, int n, const void *k, bool wide, int Dh, float scale);
    /* The online softmax over the keys [from, to) of a page, 0 <= from < to <= KV_PAGE: max[i] becomes the largest
     * score so far, keep[i] = exp(old max - max), p[i][j] = exp(p[i][j] - max), 0 outside, sum[i] = sum[i] * keep[i] + sum of p[i]. */
    void (*softmax)(float (*p)[KV_PAGE], int n, int from, int to, float *max, float *sum, float *keep);
    /* acc[i][Dh] = acc[i] * keep[i] + sum over j in [from, to), ascending, of p[i][j] * v_j */
    void (*mix)(float *acc, int n, const float *keep, float (*p)[KV_PAGE], const void *v, bool wide, int from, int to, int Dh);
    void (*from_f16)(float *dst, const uint16_t *src, int64_t n);
    /* The index of the largest number of x[0..n), the lowest on ties; -1 if none is larger than -inf. */
    int32_t (*best)(const float *x, int n);
    void (*to_f16)(uint16_t *dst, const float *src, int64_t n);
    /* Sums `bytes` bytes (a multiple of 4096, aligned to 64) as words, as fast as they come. */
    uint64_t (*read)(const uint8_t *p, size_t bytes);
    /* `n` rounds of multiply-adds on registers: in float, in int8 and in bf16 as dot products take them. The result only
     * keeps them from being dropped. */
    float (*peak_fp32)(int n);
    float (*peak_int8)(int n);
    float (*peak_bf16)(int n);
    int fp32_ops, int8_ops, bf16_ops; /* operations of a round, 2 a multiply-add; 0: no such unit */
};

/* The levels; those of other architectures are not built. */
void cpu_level_c(struct cpu_level *l);
void cpu_level_avx2(struct cpu_level *l);
void cpu_level_avx512(struct cpu_level *l);
void cpu_level_avx512bf16(struct cpu_level *l);
void cpu_level_neon(struct cpu_level *l);
void cpu_level_neonmm(struct cpu_level *l);
/* The best level this machine has, at most `limit` (NULL: no limit). */
int cpu_level_choose(struct cpu_level *l, const char *limit, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ the device (cpu.c) */

struct cpu {
    struct backend base;
    struct cpu_pool *pool;
    struct cpu_heap heap;
    struct cpu_level level;
    struct err err; /* the first failure; err.code == 0: none */
    struct backend_stats stats;

    /* The step's batch, copied: of each row its id, its sequence and its position. */
    int T, n_seqs, max_pages;
    int32_t *ids, *row_seq, *row_pos, *pages;
    size_t ids_cap, seq_cap, pos_cap, pages_cap;
    float *rope; /* [T][Dh / 2][2] cos and sin of the step's positions, made by the step's first rope_kv */
    size_t rope_cap;
    bool rope_ready;

    /* Scratch, grown when a larger step comes, never inside a step of known size. */
    struct cpu_acts acts, acts2;
    size_t acts_cap[ACT_BUFFERS], acts2_cap[ACT_BUFFERS];
    float *tmp, *row; /* [threads][...], [threads][Kp] */
    int32_t *blocks;  /* [T] first rows of attention's blocks */
    size_t tmp_cap, row_cap, blocks_cap;
    struct cpu_moe_scratch *moe;
};

/* *buf (of *cap bytes) has at least `bytes` bytes afterwards; content is lost when it grows. False, with cpu->err set,
 * if memory is out. */
bool cpu_grow(struct cpu *c, void *buf_ptr, size_t *cap, size_t bytes);
/* acts = rms_norm(x[M, K]; norm) padded, in the forms that are wanted. */
bool cpu_prepare(struct cpu *c, struct cpu_acts *acts, size_t cap[ACT_BUFFERS], const float *x, int M, int64_t K, const float *norm, float eps,
                 int wants);
/* Room for M rows of K columns in those forms. */
bool cpu_acts_grow(struct cpu *c, struct cpu_acts *acts, size_t cap[ACT_BUFFERS], int M, int64_t K, int wants);
int cpu_wants(const struct cpu *c, const struct bweight *w);

/* Rows [first, last) of acts belong to one weight: an expert's tokens, or all rows. */
struct cpu_group {
    const struct bweight *w;
    int first, last;
};
/* out[m, N] = w x + bias + residual for every group; all weights have one shape. */
void cpu_grouped_linear(struct cpu *c, const struct cpu_group *groups, int n, const struct cpu_acts *a, float *out,
                        const float *residual);
/* out[m, F] = act(gate, up) for every group. */
void cpu_grouped_gate(struct cpu *c, const struct cpu_group *groups, int n, const struct cpu_acts *a, float *out, float limit);

enum { UNIT_FP32, UNIT_INT8, UNIT_BF16 }; /* of backend_stats */
/* cpu_limits.c */
int cpu_limits(struct backend *be, struct backend_limits *out, struct err *e);

/* cpu_attend.c, cpu_moe.c */
struct bkv {
    int n_layers, n_pages, Hk, Dh;
    uint16_t *k, *v; /* [layer][page][Hk] of [Dh][KV_PAGE] and of [KV_PAGE][Dh] */
};
int cpu_kv_new(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e);
void cpu_kv_free(struct backend *be, struct bkv *kv);
size_t cpu_kv_page_bytes(const struct backend *be, int n_layers, int Hk, int Dh);
void cpu_rope_kv(struct backend *be, const struct rope_kv_args *a);
void cpu_attend(struct backend *be, const struct attend_args *a);
void cpu_moe(struct backend *be, const struct moe_args *a);
void cpu_moe_free(struct cpu *c);

#endif
