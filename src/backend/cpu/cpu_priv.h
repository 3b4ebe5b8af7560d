/* cpu_priv: what the files of the CPU backend share: the thread pool, the packed weight, the quantised activations and
 * the dispatch table of a CPU level.
 *
 * Packed weights. A matrix becomes panels of 16 outputs (rows padded with zeros); inside a panel the columns go in tiles
 * of 32 (columns padded with zeros), so that SIMD lanes hold outputs and no horizontal sum is needed. One tile is one
 * step of every kernel; its bytes by type (lane l = output 16 p + l, k = column in the tile):
 *   F32, F16, BF16, F8   [k 32][lane 16] elements; F8: a float scale a lane for each run of columns with one scale
 *   nibble types         [s 4][lane 16][j 4] bytes: low nibble k = 4 s + j, high nibble k = 16 + 4 s + j
 *   byte type (Q8_0)     [s 8][lane 16][j 4] int8: k = 4 s + j
 *   scales before them   Q4_0: d f16[16]; Q4_1, Q5_1: d, m f16[16]; Q5_*: fifth bits u32[16], bit k of lane;
 *                        MXFP4: e8m0[16]; NVFP4: e4m3 [2][16] (columns 0-15, 16-31), and a float scale a lane a panel;
 *                        K-quants: per 256 columns d (dmin) f16[16], then per tile sc, mn u8[16] (Q6_K: int8 [2][16])
 * so every format keeps its stored precision and its size (within 3 %). cpu_pack.c is the one place that knows these. */
#ifndef HEARTH_CPU_PRIV_H
#define HEARTH_CPU_PRIV_H

#include "backend.h"

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
/* Takes the next item of a shared counter, for work in tiles: -1 when all n are taken. Reset by each cpu_pool_run. */
int64_t cpu_pool_take(struct cpu_pool *p, int64_t n);

/* ------------------------------------------------------------------------------------------------ packed weights (cpu_pack.c) */

struct cpu_part {
    enum dtype type;
    int64_t rows, cols;
    int64_t panels, tiles;   /* ceil(rows / PANEL), ceil(cols / TILE) */
    uint8_t *data;           /* panel p at data + p * panel_bytes, 64-byte aligned */
    size_t panel_bytes;
    float *scale;            /* F8: [panels][scale_runs][PANEL]; NVFP4: [panels][1][PANEL]; else NULL */
    int64_t scale_runs;
    int32_t scale_tiles, scale_tile0; /* run of tile t = (t + scale_tile0) / scale_tiles */
};

struct bweight {
    int n_parts;
    int64_t rows, cols; /* rows of all parts together */
    struct cpu_part part[CPU_MAX_PARTS];
    float *bias; /* [rows] or NULL */
    uint8_t *block;
    size_t block_bytes; /* one aligned allocation behind all of it */
};

size_t cpu_pack_bytes(const struct dmat *parts, int n_parts);
/* Packs with the pool's threads. Source pages are dropped from the resident set as they are used (fmap_drop). */
int cpu_pack(struct cpu_pool *pool, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
             struct err *e) MUST_CHECK;
void cpu_pack_free(struct bweight *w);
/* out[0..cols) = row r of the part, exactly (embedding lookups, tests). */
void cpu_part_row(const struct cpu_part *p, int64_t r, float *out);

/* ------------------------------------------------------------------------------------------------ activations, products (cpu_linear*.c) */

/* Rows of activations ready for products. Kp = cols padded to TILE with zeros.
 *   x [M][Kp] float
 *   q [M][Kp] int8, d [M][Kp / TILE] float: x ~ d * q, d = max|x| / 127 over the tile, q round to nearest even
 *   s [M][Kp / TILE][2] float: d * sum of q over columns 0-15 and 16-31 of the tile
 * q, d, s are filled only for parts whose level computes in int8 (level->quantised). */
struct cpu_acts {
    int M;
    int64_t cols, Kp;
    float *x;
    int8_t *q;
    float *d, *s;
};

/* One CPU level: plain C first; each better level replaces what it does better. */
struct cpu_level {
    const char *name;
    /* True if products with this type take int8 activations at this level. */
    bool (*quantised)(enum dtype type);
    /* Fills q, d, s of row m from x. */
    void (*quantise)(const struct cpu_acts *a, int m);
    /* out[m * out_stride + r] = W[r] . x[m] for m in [0, M) and the rows r of panels [p0, p1) (r < part->rows).
     * Each element is summed over its tiles in ascending order in one accumulator, whatever M is. */
    void (*product)(const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, float *out,
                    size_t out_stride);
    /* dst[0..n) = src * scale (n floats): rms_norm's pieces and others that ops need vectorised */
    float (*sum_squares)(const float *x, int64_t n);
    void (*scale_mul)(float *dst, const float *x, const float *w, float scale, int64_t n); /* dst = x * scale * w */
    void (*silu_mul)(float *dst, const float *gate, const float *up, int64_t n);           /* gate*sigmoid(gate)*up */
    /* One query head against one page of keys: scores[j] = scale * q . k_j, j < n; keys are f16 [KV_PAGE][Dh]. */
    void (*score_page)(float *scores, const float *q, const uint16_t *k, int n, int Dh, float scale);
    /* acc[Dh] = acc * keep + sum_j p[j] * v_j; values are f16 [KV_PAGE][Dh]. */
    void (*value_page)(float *acc, float keep, const float *p, const uint16_t *v, int n, int Dh);
    void (*f32_to_f16)(uint16_t *dst, const float *src, int64_t n);
};

/* Each fills the table it is given; a level that this build or machine lacks returns false and leaves it. */
void cpu_level_c(struct cpu_level *l);
bool cpu_level_avx2(struct cpu_level *l);
bool cpu_level_avx512(struct cpu_level *l);
bool cpu_level_neon(struct cpu_level *l);

#endif
