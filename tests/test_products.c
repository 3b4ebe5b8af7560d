/* test_products: packing and the matrix products of every CPU level this machine has, against sums in double of what
 * dtype.c decodes. Inputs are chosen to hurt: codes and activations at their ends (pairs that could saturate 16
 * bits), scales that are zero, denormal or not a number, shapes that end inside a panel, a tile or a block of scales.
 * Every output buffer has guard bands. `test_products --time [type]` measures instead: packing, reading speed at one
 * row of activations beside what this machine's memory gives, arithmetic at 64 rows. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "cpu_priv.h"

static const char *const level_names[] = {"c", "avx2", "avx512", "avx512bf16", "neon", "neonmm"};

static uint64_t next_random(uint64_t *s)
{
    uint64_t z = (*s += 0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

/* Uniform in [-1, 1). */
static float next_float(uint64_t *s) { return (float)(int32_t)(next_random(s) >> 32) * 0x1p-31f; }

static void *must_alloc(size_t bytes)
{
    void *p;
    struct err e;
    if (mem_new_aligned(&p, bytes, &e) < 0) fail_msg("%s", e.msg);
    return p;
}

/* --------------------------------------------------------------------------------------------- matrices that hurt */

enum weights { RANDOM, ALL_HIGH, ALL_LOW, ALTERNATING, TINY_SCALES, ZERO_SCALES, NAN_ROW, WEIGHTS_COUNT };

/* Where a block keeps its codes and its f16 scales (d, and the one of the minimum). */
static const struct layout {
    int d, min, codes, n_codes;
} layouts[DT_COUNT] = {
    [DT_Q4_0] = {0, -1, 2, 16},        [DT_Q4_1] = {0, 2, 4, 16},     [DT_Q5_0] = {0, -1, 2, 20},
    [DT_Q5_1] = {0, 2, 4, 20},         [DT_Q8_0] = {0, -1, 2, 32},    [DT_Q4_K] = {0, 2, 16, 128},
    [DT_Q5_K] = {0, 2, 16, 160},       [DT_Q6_K] = {208, -1, 0, 192}, [DT_MXFP4] = {-1, -1, 0, 16},
    [DT_MXFP4_GGUF] = {-1, -1, 1, 16}, [DT_NVFP4] = {-1, -1, 0, 8},   [DT_F8_E4M3] = {-1, -1, 0, 1},
};

struct matrix {
    struct dmat m;
    uint8_t *data, *bscale;
    float *scale;
};

static void put16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }

static uint16_t half_scale(uint64_t *s, enum weights kind)
{
    if (kind == ZERO_SCALES) return 0;
    if (kind == TINY_SCALES) return (uint16_t)((next_random(s) & 0x83FF) | 1); /* a subnormal of either sign */
    return f32_to_f16(0.01f * next_float(s));
}

/* Codes at an end of their range, by byte: for nibbles and high bits all ones or all zeros are the ends. */
static uint8_t code_byte(uint64_t *s, enum dtype type, enum weights kind, int64_t c)
{
    bool high = kind == ALL_HIGH || (kind == ALTERNATING && c % 2);
    if (kind == RANDOM || kind >= TINY_SCALES) {
        uint8_t b = (uint8_t)next_random(s);
        return type == DT_F8_E4M3 && (b & 0x7F) == 0x7F ? 0x7E : b;
    }
    switch (type) {
    case DT_Q8_0: return high ? 127 : 128;
    case DT_F8_E4M3: return high ? 0x7E : 0xFE;
    case DT_MXFP4:
    case DT_MXFP4_GGUF:
    case DT_NVFP4: return high ? 0x77 : 0xFF;
    default: return high ? 0xFF : 0;
    }
}

static void fill_row(uint64_t *s, const struct matrix *x, int64_t r, enum weights kind)
{
    const struct dmat *m = &x->m;
    const struct dtype_info *info = &dtype_infos[m->type];
    const struct layout *at = &layouts[m->type];
    uint8_t *row = x->data + (size_t)r * m->row_stride;
    bool bad = kind == NAN_ROW && r == m->rows / 2;
    for (int64_t c = 0, block = 0; c < m->cols; c += info->block, block++) {
        uint8_t *b = row + (size_t)block * (size_t)info->block_bytes;
        float f = next_float(s);
        if (kind == ALL_HIGH || kind == ALL_LOW || kind == ALTERNATING)
            f = kind == ALL_LOW || (kind == ALTERNATING && c % 2) ? -60000 : 60000;
        if (kind == TINY_SCALES) f *= 0x1p-140f;
        if (kind == ZERO_SCALES) f = 0;
        if (bad && block == 0) f = NAN;
        if (m->type == DT_F32) memcpy(b, &f, 4);
        else if (m->type == DT_F16) put16(b, f32_to_f16(kind == TINY_SCALES ? f * 0x1p120f : f));
        else if (m->type == DT_BF16) put16(b, f32_to_bf16(f));
        else {
            for (int i = 0; i < info->block_bytes; i++) b[i] = (uint8_t)next_random(s);
            for (int i = 0; i < at->n_codes; i++) b[at->codes + i] = code_byte(s, m->type, kind, c + i);
            if (at->d >= 0) put16(b + at->d, half_scale(s, kind));
            if (at->min >= 0) put16(b + at->min, half_scale(s, kind));
            if (m->type == DT_MXFP4_GGUF)
                b[0] = (uint8_t)(kind == TINY_SCALES ? next_random(s) % 3 : 110 + next_random(s) % 20);
            if (bad && block == 0) {
                if (at->d >= 0) put16(b + at->d, 0x7E01);
                if (m->type == DT_MXFP4_GGUF) b[0] = 0xFF;
                if (m->type == DT_F8_E4M3) b[0] = 0x7F;
            }
        }
    }
    if (!info->bscale_block) return;
    for (int64_t i = 0; i < (int64_t)m->bscale_stride; i++) {
        uint8_t *b = &x->bscale[(size_t)r * m->bscale_stride + (size_t)i];
        uint64_t v = next_random(s);
        if (m->type == DT_MXFP4) *b = (uint8_t)(kind == TINY_SCALES ? v % 3 : 110 + v % 20);
        else *b = (uint8_t)(kind == TINY_SCALES ? v % 8 : kind == ZERO_SCALES ? 0 : v % 0x7F);
        if (bad && i == 0) *b = m->type == DT_MXFP4 ? 0xFF : 0x7F;
    }
}

/* scale_rows, scale_cols: the grid of F8 scales; 0: none. NVFP4 has one scale. */
static struct matrix matrix_new(enum dtype type, int64_t rows, int64_t cols, enum weights kind, int64_t scale_rows,
                                int64_t scale_cols)
{
    uint64_t seed = (uint64_t)type * 1000003 + (uint64_t)rows * 4099 + (uint64_t)cols * 17 + (uint64_t)kind;
    struct matrix x = {.m = {.type = type, .rows = rows, .cols = cols}};
    int per = dtype_infos[type].bscale_block;
    x.m.row_stride = dtype_row_bytes(type, cols) + 3; /* rows need not touch, and need not be aligned */
    x.data = must_alloc((size_t)rows * x.m.row_stride);
    x.m.data = x.data;
    if (per) {
        x.m.bscale_stride = (size_t)((cols + per - 1) / per);
        x.bscale = must_alloc((size_t)rows * x.m.bscale_stride);
        x.m.bscale = x.bscale;
    }
    if (type == DT_NVFP4) scale_rows = rows, scale_cols = cols;
    if (scale_rows) {
        int64_t down = (rows + scale_rows - 1) / scale_rows, across = (cols + scale_cols - 1) / scale_cols;
        x.scale = must_alloc((size_t)(down * across) * sizeof *x.scale);
        for (int64_t i = 0; i < down * across; i++) {
            x.scale[i] = 0.001f * next_float(&seed);
            if (kind == TINY_SCALES) x.scale[i] *= 0x1p-130f;
            if (kind == ZERO_SCALES) x.scale[i] = 0;
        }
        x.m.scale = x.scale;
        x.m.scale_rows = scale_rows;
        x.m.scale_cols = scale_cols;
        x.m.scale_stride = across;
    }
    for (int64_t r = 0; r < rows; r++) fill_row(&seed, &x, r, kind);
    return x;
}

static void matrix_free(struct matrix *x)
{
    mem_free_aligned(x->data);
    mem_free_aligned(x->bscale);
    mem_free_aligned(x->scale);
}

/* low[0..cols): what a column of row r has with its code at zero: the minimum where the format has one, else 0. */
static void row_minimum(const struct matrix *x, int64_t r, float *low)
{
    const struct layout *at = &layouts[x->m.type];
    size_t bytes = dtype_row_bytes(x->m.type, x->m.cols), block = (size_t)dtype_infos[x->m.type].block_bytes;
    memset(low, 0, (size_t)x->m.cols * sizeof *low);
    if (x->m.type == DT_NONE || at->min < 0 || !at->n_codes) return;
    uint8_t *copy = must_alloc(bytes);
    memcpy(copy, x->data + (size_t)r * x->m.row_stride, bytes);
    for (size_t b = 0; b < bytes; b += block) memset(copy + b + at->codes, 0, (size_t)at->n_codes);
    struct dmat one = {.type = x->m.type, .rows = 1, .cols = x->m.cols, .data = copy, .row_stride = bytes};
    dmat_row(&one, 0, low);
    mem_free_aligned(copy);
}

/* ------------------------------------------------------------------------------------------ activations that hurt */

enum inputs { NORMAL, EXTREME, EXTREME_PAIRS, SPARSE, INPUTS_COUNT };

static bool wants_quant(const struct cpu_level *l) { return l->wants(DT_Q8_0) & WANT_QUANT; }

static void quantise_row(const struct cpu_level *l, const struct cpu_acts *a, int m)
{
    float *row = must_alloc((size_t)a->Kp * sizeof *row);
    for (int64_t t = 0; t < a->Kp / TILE; t++) memcpy(row + t * TILE, a->x + acts_at(a, t, m) * TILE, TILE * sizeof *row);
    if (l->quantise) l->quantise(a, m, row, true);
    if (l->to_bf16) l->to_bf16(a, m, row);
    mem_free_aligned(row);
}

/* A quantised value as it was meant. */
static int quant_at(const struct cpu_level *l, const struct cpu_acts *a, size_t at) { return (int8_t)(a->q[at] ^ l->q_flip); }

static struct cpu_acts acts_new(const struct cpu_level *l, int M, int64_t cols, enum inputs kind)
{
    struct cpu_acts a = {.M = M, .cols = cols, .Kp = (cols + TILE - 1) / TILE * TILE};
    size_t n = (size_t)M * (size_t)a.Kp;
    uint64_t s = (uint64_t)kind + 99;
    a.x = must_alloc(n * sizeof *a.x);
    a.q = must_alloc(n);
    a.b = must_alloc(n * sizeof *a.b);
    a.d = must_alloc(n / TILE * sizeof *a.d);
    a.s = must_alloc(2 * n / TILE * sizeof *a.s);
    memset(a.x, 0, n * sizeof *a.x);
    for (int m = 0; m < M; m++)
        for (int64_t k = 0; k < cols; k++) {
            float v = next_float(&s);
            if (kind == EXTREME) v = m % 2 ? -3.0f : 3.0f;
            if (kind == EXTREME_PAIRS) v = (k + m) % 2 ? -3.0f : 3.0f;
            if (kind == SPARSE) v = (k / TILE + m) % 3 ? 0 : k % 7 ? 1e-3f * v : 100;
            a.x[acts_at(&a, k / TILE, m) * TILE + (size_t)(k % TILE)] = v;
        }
    for (int m = 0; m < M; m++) quantise_row(l, &a, m);
    return a;
}

static void acts_free(struct cpu_acts *a)
{
    mem_free_aligned(a->x);
    mem_free_aligned(a->q);
    mem_free_aligned(a->b);
    mem_free_aligned(a->d);
    mem_free_aligned(a->s);
}

/* What the product at this level is a product with: [M][cols]. */
static double *act_values(const struct cpu_level *l, const struct cpu_acts *a, int wants)
{
    double *v = must_alloc((size_t)a->M * (size_t)a->cols * sizeof *v);
    for (int m = 0; m < a->M; m++)
        for (int64_t k = 0; k < a->cols; k++) {
            size_t at = acts_at(a, k / TILE, m) * TILE + (size_t)(k % TILE);
            v[m * a->cols + k] = wants & WANT_QUANT  ? (double)a->d[at / TILE] * quant_at(l, a, at)
                                 : wants & WANT_BF16 ? (double)bf16_to_f32(a->b[at])
                                                     : (double)a->x[at];
        }
    return v;
}

/* ------------------------------------------------------------------------------------------------ the checks */

enum { GUARD = 64 };
static const float guard_value = -12345.5f;

static float *guarded(size_t n)
{
    float *p = must_alloc((n + 2 * GUARD) * sizeof *p);
    for (size_t i = 0; i < n + 2 * GUARD; i++) p[i] = guard_value;
    return p + GUARD;
}

static void guards_hold(const float *p, size_t n)
{
    for (size_t i = 0; i < GUARD; i++) {
        assert_memory_equal(p - 1 - i, &guard_value, sizeof *p);
        assert_memory_equal(p + n + i, &guard_value, sizeof *p);
    }
}

static void guarded_free(float *p) { mem_free_aligned(p - GUARD); }

struct what {
    const char *level, *type;
    int64_t rows, cols;
    int weights, inputs;
};

/* |y - truth| within 1e-6 of the sum of |terms|: for formats with a minimum its part and the code's part are terms of
 * their own. A row with a NaN weight is NaN. */
static void check_values(const struct cpu_level *l, const struct what *w, const struct matrix *x, const struct cpu_acts *a,
                         int wants, const float *y)
{
    size_t cols = (size_t)x->m.cols;
    float *row = must_alloc(cols * sizeof *row), *low = must_alloc(cols * sizeof *low);
    double *values = act_values(l, a, wants);
    for (int64_t r = 0; r < x->m.rows; r++) {
        dmat_row(&x->m, r, row);
        row_minimum(x, r, low);
        for (int m = 0; m < a->M; m++) {
            double sum = 0, terms = 0, all = 0;
            for (size_t k = 0; k < cols; k++) {
                double v = values[(size_t)m * cols + k];
                sum += row[k] * v;
                terms += fabs((row[k] - (double)low[k]) * v) + fabs(low[k] * v);
                all += fabs(v);
            }
            float got = y[(size_t)m * (size_t)x->m.rows + (size_t)r];
            /* Below the normal numbers of float nothing is relative: a scale there is off by half a unit of 2^-149,
             * which a code (up to 12) and an activation multiply, and every sum by half a unit more. */
            double least = wants & WANT_BF16 ? 0x1p-126 : 0x1p-149;
            double allowed = 1e-6 * terms + least * (6 * all + (double)cols);
            if (isnan(sum) ? !isnan(got) : !(fabs(got - sum) <= allowed))
                fail_msg(
                    "%s %s %lldx%lld weights %d inputs %d: element %d,%lld is %.9g, not %.9g (terms %.3g, off %.2g)",
                    w->level, w->type, (long long)w->rows, (long long)w->cols, w->weights, w->inputs, m, (long long)r,
                    got, sum, terms, fabs(got - sum) / terms);
        }
    }
    mem_free_aligned(row);
    mem_free_aligned(low);
    mem_free_aligned(values);
}

/* The same bits with any number of rows at once and with the panels cut anywhere. */
static void check_bits(const struct cpu_level *l, const struct cpu_part *p, const struct cpu_acts *a,
                       const float *whole)
{
    static const int row_counts[] = {1, 2, 3, 7, 16};
    size_t rows = (size_t)p->rows, n = rows * (size_t)a->M;
    for (size_t c = 0; c < COUNT_OF(row_counts); c++) {
        float *y = guarded(n);
        struct cpu_out out = {.out = y, .stride = rows};
        for (int m = 0; m < a->M; m += row_counts[c]) {
            int last = m + row_counts[c] < a->M ? m + row_counts[c] : a->M;
            int64_t cut = (m + 1) % (p->panels + 1);
            l->product(p, cut, p->panels, a, m, last, &out);
            l->product(p, 0, cut, a, m, last, &out);
        }
        guards_hold(y, n);
        assert_memory_equal(y, whole, n * sizeof *y);
        guarded_free(y);
    }
}

static void check_product(const struct cpu_level *l, struct what w, const struct matrix *x, const struct cpu_part *p)
{
    int wants = l->wants(p->type);
    for (int inputs = 0; inputs < INPUTS_COUNT; inputs++) {
        struct cpu_acts a = acts_new(l, 33, x->m.cols, (enum inputs)inputs);
        size_t n = (size_t)p->rows * (size_t)a.M;
        float *y = guarded(n);
        w.inputs = inputs;
        l->product(p, 0, p->panels, &a, 0, a.M, &(struct cpu_out){.out = y, .stride = (size_t)p->rows});
        guards_hold(y, n);
        check_values(l, &w, x, &a, wants, y);
        check_bits(l, p, &a, y);
        guarded_free(y);
        acts_free(&a);
    }
}

static bool level_here(struct cpu_level *l, const char *name)
{
    struct err e;
    memset(l, 0, sizeof *l);
    return cpu_level_choose(l, name, &e) == OK;
}

/* Where the weights of all tests are packed; emptied after each. */
static struct cpu_heap heap;

static size_t packed_bytes(const struct bweight *w)
{
    const struct cpu_part *p = &w->part[0];
    return (size_t)p->panels * p->panel_bytes +
           size_round_up((size_t)(p->panels * p->scale_runs) * PANEL * sizeof(float), 64);
}

static void one_shape(struct cpu_pool *pool, enum dtype type, int64_t rows, int64_t cols, int64_t scale_rows,
                      int64_t scale_cols)
{
    struct err e;
    for (int kind = 0; kind < WEIGHTS_COUNT; kind++) {
        struct matrix x = matrix_new(type, rows, cols, (enum weights)kind, scale_rows, scale_cols);
        struct bweight *w;
        if (cpu_pack(pool, &heap, &w, &x.m, 1, NULL, &e) < 0) fail_msg("%s", e.msg);
        assert_int_equal(packed_bytes(w), cpu_pack_bytes(&x.m, 1));
        float *row = guarded((size_t)cols), *truth = must_alloc((size_t)cols * sizeof *truth);
        for (int64_t r = 0; r < rows; r++) {
            cpu_part_row(&w->part[0], r, row);
            dmat_row(&x.m, r, truth);
            assert_memory_equal(row, truth, (size_t)cols * sizeof *row);
            guards_hold(row, (size_t)cols);
        }
        guarded_free(row);
        mem_free_aligned(truth);
        for (size_t i = 0; i < COUNT_OF(level_names); i++) {
            struct cpu_level l;
            struct what what = {level_names[i], dtype_infos[type].name, rows, cols, kind, 0};
            if (level_here(&l, level_names[i])) check_product(&l, what, &x, &w->part[0]);
        }
        cpu_pack_free(w);
        cpu_heap_free(&heap);
        matrix_free(&x);
    }
}

static struct cpu_pool *pool_new(int threads)
{
    struct cpu_pool *pool;
    struct err e;
    if (cpu_pool_open(&pool, threads, &e) < 0) fail_msg("%s", e.msg);
    return pool;
}

static void all_shapes(enum dtype type)
{
    static const int64_t blocks32[][2] = {{1, 576}, {5, 32}, {17, 96}, {100, 96}},
                         blocks256[][2] = {{1, 768}, {5, 256}, {100, 256}};
    struct cpu_pool *pool = pool_new(2);
    bool k_quant = dtype_infos[type].block == 256;
    for (size_t i = 0; i < (k_quant ? COUNT_OF(blocks256) : COUNT_OF(blocks32)); i++)
        one_shape(pool, type, k_quant ? blocks256[i][0] : blocks32[i][0], k_quant ? blocks256[i][1] : blocks32[i][1],
                  0, 0);
    if (dtype_infos[type].block == 1) one_shape(pool, type, 17, 172, 0, 0);
    if (type == DT_NVFP4) one_shape(pool, type, 17, 80, 0, 0);
    if (type == DT_F8_E4M3) {
        one_shape(pool, type, 33, 172, 33, 172);
        one_shape(pool, type, 33, 96, 1, 96);
        one_shape(pool, type, 17, 300, 128, 128);
        one_shape(pool, type, 140, 200, 128, 128);
    }
    cpu_pool_close(&pool);
}

#define TYPE_TEST(type)                                                                                              \
    static void type_##type(void **state)                                                                            \
    {                                                                                                                \
        (void)state;                                                                                                 \
        all_shapes(DT_##type);                                                                                       \
    }
TYPE_TEST(F32)
TYPE_TEST(F16)
TYPE_TEST(BF16)
TYPE_TEST(F8_E4M3)
TYPE_TEST(MXFP4)
TYPE_TEST(NVFP4)
TYPE_TEST(Q4_0)
TYPE_TEST(Q4_1)
TYPE_TEST(Q5_0)
TYPE_TEST(Q5_1)
TYPE_TEST(Q8_0)
TYPE_TEST(Q4_K)
TYPE_TEST(Q5_K)
TYPE_TEST(Q6_K)
TYPE_TEST(MXFP4_GGUF)

/* ------------------------------------------------------------------------------------------------ packing */

/* A slice of rows and columns packs to the slice's values; it may begin inside a block of F8 scales. */
static void slices_keep_their_scales(void **state)
{
    struct cpu_pool *pool = pool_new(1);
    struct matrix f8 = matrix_new(DT_F8_E4M3, 300, 600, RANDOM, 128, 128),
                  fp4 = matrix_new(DT_NVFP4, 300, 600 / 16 * 16, RANDOM, 0, 0);
    const struct matrix *both[] = {&f8, &fp4};
    struct err e;
    (void)state;
    for (size_t i = 0; i < COUNT_OF(both); i++) {
        struct dmat tall = dmat_rows(&both[i]->m, 70, 290), m = dmat_cols(&tall, 192, both[i]->m.cols);
        struct bweight *w;
        float row[600], truth[600];
        if (cpu_pack(pool, &heap, &w, &m, 1, NULL, &e) < 0) fail_msg("%s", e.msg);
        for (int64_t r = 0; r < m.rows; r++) {
            cpu_part_row(&w->part[0], r, row);
            dmat_row(&m, r, truth);
            assert_memory_equal(row, truth, (size_t)m.cols * sizeof *row);
        }
        cpu_pack_free(w);
        cpu_heap_free(&heap);
    }
    matrix_free(&f8);
    matrix_free(&fp4);
    cpu_pool_close(&pool);
}

/* Three matrices of different types in one weight, with a bias: everything in its place, and outputs go where
 * struct cpu_out says. */
static void parts_and_bias(void **state)
{
    struct cpu_pool *pool = pool_new(2);
    struct matrix x[] = {matrix_new(DT_Q4_1, 20, 96, RANDOM, 0, 0), matrix_new(DT_F8_E4M3, 5, 96, RANDOM, 128, 128),
                         matrix_new(DT_Q8_0, 33, 96, RANDOM, 0, 0)};
    struct dmat parts[] = {x[0].m, x[1].m, x[2].m};
    float bias[58], row[96], truth[96];
    struct bweight *w;
    struct cpu_level l;
    struct err e;
    (void)state;
    for (int i = 0; i < 58; i++) bias[i] = (float)i;
    if (cpu_pack(pool, &heap, &w, parts, 3, bias, &e) < 0) fail_msg("%s", e.msg);
    assert_int_equal(w->rows, 58);
    assert_int_equal(w->cols, 96);
    assert_int_equal(w->n_parts, 3);
    assert_memory_equal(w->bias, bias, sizeof bias);
    for (int i = 0; i < 3; i++) {
        assert_int_equal((uintptr_t)w->part[i].data % 64, 0);
        for (int64_t r = 0; r < parts[i].rows; r++) {
            cpu_part_row(&w->part[i], r, row);
            dmat_row(&parts[i], r, truth);
            assert_memory_equal(row, truth, sizeof row);
        }
    }
    /* Rows 1 and 2 of three, panel 1 of the last part, residual and bias added, into a buffer of one panel. */
    assert_true(level_here(&l, "c"));
    struct cpu_acts a = acts_new(&l, 3, 96, NORMAL);
    float *y = guarded(2 * PANEL), plain[3 * 33], residual[2 * PANEL];
    for (int i = 0; i < 2 * PANEL; i++) residual[i] = 0.25f * (float)i;
    l.product(&w->part[2], 0, 3, &a, 0, 3, &(struct cpu_out){.out = plain, .stride = 33});
    l.product(&w->part[2], 1, 2, &a, 1, 3,
              &(struct cpu_out){
                  .out = y, .stride = PANEL, .bias = w->bias + 25, .residual = residual, .row0 = PANEL, .m0 = 1});
    guards_hold(y, 2 * PANEL);
    for (int m = 1; m < 3; m++)
        for (int r = 0; r < PANEL; r++) {
            int at = (m - 1) * PANEL + r;
            assert_true(y[at] == plain[m * 33 + PANEL + r] + (float)(25 + PANEL + r) + residual[at]);
        }
    guarded_free(y);
    acts_free(&a);
    cpu_pack_free(w);
    cpu_heap_free(&heap);
    for (int i = 0; i < 3; i++) matrix_free(&x[i]);
    cpu_pool_close(&pool);
}

static void unpackable_scales_are_refused(void **state)
{
    static const struct {
        int64_t scale_cols;
        enum dtype type;
        const char *message;
    } cases[] = {
        {50, DT_F8_E4M3, "scale blocks of 50 columns at column 0: multiples of 32 are supported"},
        {16, DT_F8_E4M3, "scale blocks of 16 columns at column 0: multiples of 32 are supported"},
        {64, DT_NVFP4, "nvfp4 with float scales of 64 columns: one scale a row is supported"},
    };
    struct cpu_pool *pool = pool_new(1);
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct matrix x = matrix_new(cases[i].type, 4, 112, RANDOM, 4, cases[i].scale_cols);
        struct bweight *w = NULL;
        struct err e;
        x.m.scale_cols = cases[i].scale_cols;
        assert_true(cpu_pack_bytes(&x.m, 1) > 0);
        assert_int_equal(cpu_pack(pool, &heap, &w, &x.m, 1, NULL, &e), ERR_UNSUPPORTED);
        assert_null(w);
        assert_string_equal(e.msg, cases[i].message);
        matrix_free(&x);
    }
    cpu_pool_close(&pool);
}

/* ------------------------------------------------------------------------------------------ quantised activations */

static void quantised_as_promised(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(level_names); i++) {
        struct cpu_level l;
        if (!level_here(&l, level_names[i]) || !wants_quant(&l)) continue;
        for (int inputs = 0; inputs < INPUTS_COUNT; inputs++) {
            struct cpu_acts a = acts_new(&l, 3, 172, (enum inputs)inputs);
            for (int64_t t = 0; t < a.M * a.Kp / TILE; t++) {
                float max = 0;
                int all = 0, second = 0;
                for (int k = 0; k < TILE; k++) max = fmaxf(max, fabsf(a.x[t * TILE + k]));
                assert_true(a.d[t] == max / 127);
                for (int k = 0; k < TILE; k++) {
                    int q = quant_at(&l, &a, (size_t)(t * TILE + k));
                    all += q;
                    second += k < 16 ? 0 : q;
                    assert_in_range(q + 127, 0, 254);
                    assert_true(fabs((double)a.x[t * TILE + k] - (double)a.d[t] * q) <= 0.50001 * (double)a.d[t]);
                }
                assert_true(a.s[2 * t] == (float)all && a.s[2 * t + 1] == (float)second);
            }
            acts_free(&a);
        }
    }
}

/* An activation that is no number is seen in its row's outputs, and nowhere else. */
static void bad_activations_show(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const enum dtype types[] = {DT_Q4_0, DT_Q4_1, DT_Q8_0, DT_Q6_K, DT_MXFP4, DT_NVFP4, DT_BF16, DT_F8_E4M3};
    struct cpu_pool *pool = pool_new(1);
    struct err e;
    (void)state;
    for (size_t i = 0; i < COUNT_OF(level_names) * COUNT_OF(types) * COUNT_OF(bad); i++) {
        struct cpu_level l;
        enum dtype type = types[i / COUNT_OF(bad) % COUNT_OF(types)];
        if (!level_here(&l, level_names[i / COUNT_OF(bad) / COUNT_OF(types)])) continue;
        struct matrix x = matrix_new(type, 20, 256, ALL_HIGH, 0, 0);
        struct cpu_acts a = acts_new(&l, 5, 256, NORMAL);
        struct bweight *w;
        float y[5 * 20];
        size_t at = acts_at(&a, 1, 2);
        a.x[at * TILE + 8] = bad[i % COUNT_OF(bad)];
        quantise_row(&l, &a, 2);
        if (wants_quant(&l)) {
            assert_true(isnan(a.d[at])); /* and nothing was made whole that cannot be */
            for (int k = 0; k < TILE; k++) assert_int_equal(quant_at(&l, &a, at * TILE + (size_t)k), 0);
        }
        if (cpu_pack(pool, &heap, &w, &x.m, 1, NULL, &e) < 0) fail_msg("%s", e.msg);
        l.product(&w->part[0], 0, 2, &a, 0, 5, &(struct cpu_out){.out = y, .stride = 20});
        for (int m = 0; m < 5; m++)
            for (int r = 0; r < 20; r++) assert_true(isfinite(y[m * 20 + r]) == (m != 2));
        cpu_pack_free(w);
        cpu_heap_free(&heap);
        acts_free(&a);
        matrix_free(&x);
    }
    cpu_pool_close(&pool);
}

/* Rows too small for their scale to be inverted are zero, not infinite. */
static void tiny_activations_are_zero(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT_OF(level_names); i++) {
        struct cpu_level l;
        if (!level_here(&l, level_names[i]) || !wants_quant(&l)) continue;
        struct cpu_acts a = acts_new(&l, 1, 64, NORMAL);
        for (int k = 0; k < 64; k++) a.x[k] = k % 2 ? 1e-39f : -1e-45f;
        quantise_row(&l, &a, 0);
        for (size_t k = 0; k < 64; k++) assert_int_equal(quant_at(&l, &a, k), 0);
        for (int t = 0; t < 2; t++) assert_true(a.d[t] == 0 && a.s[2 * t] == 0 && a.s[2 * t + 1] == 0);
        acts_free(&a);
    }
}

/* ------------------------------------------------------------------------------------------------ --time */

struct timed {
    struct cpu_pool *pool;
    const struct cpu_level *l;
    const struct cpu_part *p;
    const struct cpu_acts *a;
    float *y;
    const uint64_t *buffer;
    size_t words;
    uint64_t sum;
};

static void read_some(void *arg, int thread, int n_threads)
{
    struct timed *t = arg;
    int64_t i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(t->pool, 64)) >= 0) {
        const uint64_t *p = t->buffer + (size_t)i * (t->words / 64);
        uint64_t s[8] = {0}, all = 0;
        for (size_t w = 0; w + 8 <= t->words / 64; w += 8)
            for (int k = 0; k < 8; k++) s[k] += p[w + (size_t)k];
        for (int k = 0; k < 8; k++) all += s[k];
        __atomic_fetch_add(&t->sum, all, __ATOMIC_RELAXED);
    }
}

static void multiply_some(void *arg, int thread, int n_threads)
{
    struct timed *t = arg;
    int64_t i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(t->pool, (t->p->panels + 15) / 16)) >= 0) {
        int64_t to = 16 * i + 16 < t->p->panels ? 16 * i + 16 : t->p->panels;
        t->l->product(t->p, 16 * i, to, t->a, 0, t->a->M,
                      &(struct cpu_out){.out = t->y, .stride = (size_t)t->p->rows});
    }
}

/* Seconds of the best of n runs. */
static double best_of(int n, struct timed *t, cpu_job *job)
{
    double best = INFINITY;
    for (int i = 0; i < n; i++) {
        double start = clock_now();
        cpu_pool_run(t->pool, job, t);
        best = fmin(best, clock_now() - start);
    }
    return best;
}

static int time_all(const char *only)
{
    enum { READ_BYTES = 256 << 20, COLS = 4096, TIMED_BYTES = 128 << 20 };
    for (int threads = 1; threads <= machine_cores() && threads <= 2; threads++) {
        struct timed t = {.pool = pool_new(threads)};
        uint64_t *buffer = must_alloc(READ_BYTES);
        memset(buffer, 1, READ_BYTES);
        t.buffer = buffer;
        t.words = READ_BYTES / sizeof *buffer;
        double bandwidth = READ_BYTES / best_of(8, &t, read_some);
        printf("%d thread%s: memory is read at %.1f GB/s (%llx)\n", threads, threads > 1 ? "s" : "", bandwidth / 1e9,
               (unsigned long long)t.sum);
        mem_free_aligned(buffer);
        for (enum dtype type = DT_F32; type < DT_COUNT; type++) {
            if (only && strcmp(only, dtype_infos[type].name)) continue;
            int64_t rows = (int64_t)(TIMED_BYTES / dtype_row_bytes(type, COLS)) / PANEL * PANEL;
            struct matrix x = matrix_new(type, rows, COLS, RANDOM, 0, 0);
            struct bweight *w;
            struct err e;
            double packed = INFINITY;
            for (int i = 0; i < 4; i++) {
                double start = clock_now();
                if (cpu_pack(t.pool, &heap, &w, &x.m, 1, NULL, &e) < 0) return fprintf(stderr, "%s\n", e.msg), 1;
                packed = fmin(packed, clock_now() - start);
                if (i < 3) {
                    cpu_pack_free(w);
                    cpu_heap_free(&heap);
                }
            }
            printf("%-6s packed at %5.2f GB/s;", dtype_infos[type].name, (double)dmat_bytes(&x.m) / packed / 1e9);
            t.p = &w->part[0];
            t.y = must_alloc((size_t)rows * 64 * sizeof *t.y);
            for (size_t i = 1; i < COUNT_OF(level_names); i++) {
                struct cpu_level l;
                if (!level_here(&l, level_names[i])) continue;
                struct cpu_acts one = acts_new(&l, 1, COLS, NORMAL), many = acts_new(&l, 64, COLS, NORMAL);
                t.l = &l;
                t.a = &one;
                double bytes = (double)packed_bytes(w) / best_of(8, &t, multiply_some);
                t.a = &many;
                double ops = 2.0 * 64 * (double)rows * COLS / best_of(2, &t, multiply_some);
                printf(" %s: 1 row %5.1f GB/s (%3.0f %%), 64 rows %6.1f GOP/s", level_names[i], bytes / 1e9,
                       100 * bytes / bandwidth, ops / 1e9);
                acts_free(&one);
                acts_free(&many);
            }
            printf("\n");
            mem_free_aligned(t.y);
            cpu_pack_free(w);
            cpu_heap_free(&heap);
            matrix_free(&x);
        }
        cpu_pool_close(&t.pool);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(type_F32),
        cmocka_unit_test(type_F16),
        cmocka_unit_test(type_BF16),
        cmocka_unit_test(type_F8_E4M3),
        cmocka_unit_test(type_MXFP4),
        cmocka_unit_test(type_NVFP4),
        cmocka_unit_test(type_Q4_0),
        cmocka_unit_test(type_Q4_1),
        cmocka_unit_test(type_Q5_0),
        cmocka_unit_test(type_Q5_1),
        cmocka_unit_test(type_Q8_0),
        cmocka_unit_test(type_Q4_K),
        cmocka_unit_test(type_Q5_K),
        cmocka_unit_test(type_Q6_K),
        cmocka_unit_test(type_MXFP4_GGUF),
        cmocka_unit_test(slices_keep_their_scales),
        cmocka_unit_test(parts_and_bias),
        cmocka_unit_test(unpackable_scales_are_refused),
        cmocka_unit_test(quantised_as_promised),
        cmocka_unit_test(bad_activations_show),
        cmocka_unit_test(tiny_activations_are_zero),
    };
    if (argc > 1 && !strcmp(argv[1], "--time")) return time_all(argc > 2 ? argv[2] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
