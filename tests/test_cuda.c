/* test_cuda: the products of the CUDA backend, every format, against sums in double of what dtype.c decodes: 1 to 129
 * rows, odd sizes, parts of different types, biases, residuals, scales of every kind. Activations are numbers that
 * bf16 holds, so that what remains is the order of float sums. Outputs are poisoned and guarded. Without a GPU it
 * says so and passes. `test_cuda --time [type]` measures instead: GB/s of weights read at few rows, TFLOP/s at many.
 * */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "backend.h"

static struct backend *be;

static uint64_t seed = 1;
static uint64_t next_random(void)
{
    uint64_t z = (seed += 0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}
static float next_float(void) { return (float)(int32_t)(next_random() >> 32) * 0x1p-31f; }

static void *must_alloc(size_t bytes)
{
    void *p;
    struct err e;
    if (mem_new(&p, bytes + 1, &e) < 0) fail_msg("%s", e.msg);
    return p;
}

static void *device_new(size_t bytes)
{
    void *p;
    struct err e;
    if (be->ops->alloc(be, &p, bytes, &e) < 0) fail_msg("%s", e.msg);
    return p;
}

static void sync_ok(void)
{
    struct err e;
    if (be->ops->sync(be, &e) < 0) fail_msg("%s", e.msg);
}

static float *device_copy(const float *host, size_t n)
{
    float *p = device_new(n * sizeof *p);
    be->ops->upload(be, p, host, n * sizeof *p);
    sync_ok();
    return p;
}

/* ------------------------------------------------------------------------------------------------ matrices */

struct matrix {
    struct dmat m;
    uint8_t *data, *bscale;
    float *scale;
};

static const int d_at[DT_COUNT] = {[DT_Q4_1] = 0, [DT_Q4_0] = 0, [DT_Q6_K] = 208};
static const int min_at[DT_COUNT] = {[DT_Q4_1] = 2, [DT_Q5_1] = 2, [DT_Q4_K] = 2, [DT_Q5_K] = 2};

static void put_half(uint8_t *p, float f)
{
    uint16_t h = f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* scale_rows 0: no scale grid */
static struct matrix matrix_new(enum dtype type, int64_t rows, int64_t cols, int64_t scale_rows, int64_t scale_cols)
{
    const struct dtype_info *info = &dtype_infos[type];
    struct matrix x = {.m = {.type = type, .rows = rows, .cols = cols}};
    x.m.row_stride = dtype_row_bytes(type, cols) + 3;
    x.m.data = x.data = must_alloc((size_t)rows * x.m.row_stride);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < cols / info->block; i++) {
            uint8_t *b = x.data + (size_t)r * x.m.row_stride + (size_t)(i * info->block_bytes);
            float f = next_float();
            for (int k = 0; k < info->block_bytes; k++) b[k] = (uint8_t)next_random();
            switch (type) {
            case DT_F32: memcpy(b, &f, 4); break;
            case DT_F16: put_half(b, f); break;
            case DT_BF16: {
                uint16_t h = f32_to_bf16(f);
                memcpy(b, &h, 2);
                break;
            }
            case DT_F8_E4M3:
                if ((b[0] & 0x7F) == 0x7F) b[0] = 0x7E;
                break;
            case DT_MXFP4_GGUF: b[0] = (uint8_t)(120 + next_random() % 12); break;
            case DT_MXFP4:
            case DT_NVFP4: break;
            default:
                put_half(b + d_at[type], 0.05f * next_float());
                if (min_at[type]) put_half(b + min_at[type], 0.05f * next_float());
            }
        }
    if (info->bscale_block) {
        x.m.bscale_stride = (size_t)(cols / info->bscale_block) + 1;
        x.m.bscale = x.bscale = must_alloc((size_t)rows * x.m.bscale_stride);
        for (size_t i = 0; i < (size_t)rows * x.m.bscale_stride; i++)
            x.bscale[i] = (uint8_t)(type == DT_MXFP4 ? 120 + next_random() % 12 : next_random() % 0x7F);
    }
    if (scale_rows) {
        x.m.scale_rows = scale_rows;
        x.m.scale_cols = scale_cols;
        x.m.scale_stride = (cols + scale_cols - 1) / scale_cols + 1;
        size_t n = (size_t)((rows + scale_rows - 1) / scale_rows * x.m.scale_stride);
        x.scale = must_alloc(n * sizeof *x.scale);
        for (size_t i = 0; i < n; i++) x.scale[i] = 0.1f * next_float();
        x.m.scale = x.scale;
    }
    return x;
}

static void matrix_free(struct matrix *x)
{
    free(x->data);
    free(x->bscale);
    free(x->scale);
}

static struct matrix matrix_for(enum dtype type, int64_t rows, int64_t cols)
{
    int64_t block = dtype_infos[type].block;
    cols = (cols + block - 1) / block * block;
    if (type == DT_F8_E4M3) return matrix_new(type, rows, cols, 128, 128);
    if (type == DT_NVFP4) return matrix_new(type, rows, cols, rows, cols);
    return matrix_new(type, rows, cols, 0, 0);
}

static struct bweight *weight_of(const struct dmat *parts, int n, const float *bias)
{
    struct bweight *w;
    struct err e;
    if (be->ops->weight_new(be, &w, parts, n, bias, &e) < 0) fail_msg("%s", e.msg);
    return w;
}

/* want[T][rows] = W x, and size[T][rows] = the sum of the products' magnitudes: what errors are measured by */
static void reference(const struct dmat *m, const float *x, int T, double *want, double *size, int stride, int at)
{
    float *row = must_alloc((size_t)m->cols * sizeof *row);
    for (int64_t r = 0; r < m->rows; r++) {
        dmat_row(m, r, row);
        for (int t = 0; t < T; t++) {
            double sum = 0, all = 0;
            for (int64_t k = 0; k < m->cols; k++) {
                double v = (double)row[k] * (double)x[(int64_t)t * m->cols + k];
                sum += v;
                all += fabs(v);
            }
            want[(size_t)t * (size_t)stride + (size_t)(at + r)] = sum;
            size[(size_t)t * (size_t)stride + (size_t)(at + r)] = all;
        }
    }
    free(row);
}

enum { GUARD = 64 };

static float *poisoned(size_t n)
{
    float *host = must_alloc((n + GUARD) * sizeof *host);
    for (size_t i = 0; i < n + GUARD; i++) host[i] = NAN;
    float *dev = device_copy(host, n + GUARD);
    free(host);
    return dev;
}

static float *fetch(const float *dev, size_t n)
{
    struct err e;
    float *host = must_alloc((n + GUARD) * sizeof *host);
    if (be->ops->download(be, host, dev, (n + GUARD) * sizeof *host, &e) < 0) fail_msg("%s", e.msg);
    for (size_t i = n; i < n + GUARD; i++) assert_true(isnan(host[i]));
    return host;
}

static float *bf16_floats(size_t n)
{
    float *x = must_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = bf16_to_f32(f32_to_bf16(next_float()));
    return x;
}

static const int all_T[] = {1, 2, 4, 5, 8, 9, 16, 17, 64, 129};

static void check_linear(const char *what, const struct dmat *parts, int n_parts, bool bias, bool residual, int T)
{
    int rows = 0, cols = (int)parts[0].cols;
    for (int i = 0; i < n_parts; i++) rows += (int)parts[i].rows;
    size_t n = (size_t)T * (size_t)rows;
    float *x = bf16_floats((size_t)T * (size_t)cols), *b = bf16_floats((size_t)rows), *res = bf16_floats(n);
    double *want = must_alloc(n * sizeof *want), *size = must_alloc(n * sizeof *size);
    for (int i = 0, at = 0; i < n_parts; at += (int)parts[i++].rows) reference(&parts[i], x, T, want, size, rows, at);
    struct bweight *w = weight_of(parts, n_parts, bias ? b : NULL);
    float *dx = device_copy(x, (size_t)T * (size_t)cols), *dres = device_copy(res, n), *out = poisoned(n);
    be->ops->linear(be, &(struct linear_args){.out = out, .x = dx, .residual = residual ? dres : NULL, .T = T, .w = w});
    float *got = fetch(out, n);
    for (size_t i = 0; i < n; i++) {
        double v = want[i] + (bias ? (double)b[i % (size_t)rows] : 0) + (residual ? (double)res[i] : 0);
        if (!(fabs((double)got[i] - v) <= 2e-5 * size[i] + 1e-5))
            fail_msg("%s %d x %d, %d rows of activations: row %zu output %zu: %g, should be %g (magnitude %g)", what,
                     rows, cols, T, i / (size_t)rows, i % (size_t)rows, (double)got[i], v, size[i]);
    }
    be->ops->weight_free(be, w);
    be->ops->free(be, dx);
    be->ops->free(be, dres);
    be->ops->free(be, out);
    free(x), free(b), free(res), free(want), free(size), free(got);
}

static bool skipped(void)
{
    if (be) return false;
    print_message("skipped: no CUDA device\n");
    return true;
}

static void every_format(void **state)
{
    static const int shapes[][2] = {{1, 32}, {16, 128}, {33, 352}, {130, 2080}, {257, 640}};
    (void)state;
    if (skipped()) return;
    for (int type = DT_F32; type < DT_COUNT; type++)
        for (size_t s = 0; s < COUNT_OF(shapes); s++) {
            struct matrix x = matrix_for((enum dtype)type, shapes[s][0], shapes[s][1]);
            for (size_t i = 0; i < COUNT_OF(all_T); i++)
                check_linear(dtype_infos[type].name, &x.m, 1, i % 2, i % 3 == 0, all_T[i]);
            matrix_free(&x);
        }
}

static void odd_columns(void **state)
{
    static const enum dtype types[] = {DT_F32, DT_F16, DT_BF16, DT_F8_E4M3};
    static const int cols[] = {1, 7, 33, 129, 1001};
    (void)state;
    if (skipped()) return;
    for (size_t i = 0; i < COUNT_OF(types); i++)
        for (size_t c = 0; c < COUNT_OF(cols); c++)
            for (size_t t = 0; t < COUNT_OF(all_T); t += 2) {
                struct matrix x = matrix_new(types[i], 19, cols[c], types[i] == DT_F8_E4M3 ? 1 : 0, cols[c]);
                check_linear(dtype_infos[types[i]].name, &x.m, 1, true, true, all_T[t]);
                matrix_free(&x);
            }
}

static void spoil_row(struct matrix *x, int64_t r)
{
    uint8_t *b = x->data + (size_t)r * x->m.row_stride;
    const float nan = NAN;
    uint16_t half = 0x7E00, brain = 0x7FC0;
    switch (x->m.type) {
    case DT_F32: memcpy(b, &nan, 4); break;
    case DT_F16: memcpy(b, &half, 2); break;
    case DT_BF16: memcpy(b, &brain, 2); break;
    case DT_F8_E4M3: b[0] = 0x7F; break;
    case DT_MXFP4: x->bscale[(size_t)r * x->m.bscale_stride] = 0xFF; break;
    case DT_NVFP4: x->bscale[(size_t)r * x->m.bscale_stride] = 0x7F; break;
    case DT_MXFP4_GGUF: b[0] = 0xFF; break;
    default: memcpy(b + d_at[x->m.type], &half, 2);
    }
}

/* What is not a number shows where it belongs and nowhere else: a row of the matrix, a row of activations. */
static void not_a_number(void **state)
{
    enum { ROWS = 70, COLS = 512, BAD = 37 };
    static const int sizes[] = {1, 7, 16, 40};
    (void)state;
    if (skipped()) return;
    for (int type = DT_F32; type < DT_COUNT; type++)
        for (size_t i = 0; i < COUNT_OF(sizes); i++) {
            struct matrix m = matrix_for((enum dtype)type, ROWS, COLS);
            int T = sizes[i], bad_token = T > 1 ? T - 2 : -1;
            float *x = bf16_floats((size_t)T * COLS);
            spoil_row(&m, BAD);
            if (bad_token >= 0) x[bad_token * COLS + 3] = NAN;
            struct bweight *w = weight_of(&m.m, 1, NULL);
            float *dx = device_copy(x, (size_t)T * COLS), *out = poisoned((size_t)T * ROWS);
            be->ops->linear(be, &(struct linear_args){.out = out, .x = dx, .T = T, .w = w});
            float *got = fetch(out, (size_t)T * ROWS);
            for (int k = 0; k < T * ROWS; k++)
                if (!isnan(got[k]) != !(k % ROWS == BAD || k / ROWS == bad_token))
                    fail_msg("%s, %d rows: row %d output %d: %g", dtype_infos[type].name, T, k / ROWS, k % ROWS,
                             (double)got[k]);
            be->ops->weight_free(be, w);
            be->ops->free(be, dx), be->ops->free(be, out);
            matrix_free(&m);
            free(x), free(got);
        }
}

/* Three parts as q, k and v are, of different types and with rows that end inside a tile; a slice of a scale's grid.
 * */
static void stacked_parts(void **state)
{
    (void)state;
    if (skipped()) return;
    struct matrix a = matrix_for(DT_Q4_K, 70, 512), b = matrix_for(DT_Q6_K, 33, 512), c = matrix_for(DT_Q4_K, 5, 512);
    struct matrix f = matrix_for(DT_F8_E4M3, 300, 512);
    for (size_t i = 0; i < COUNT_OF(all_T); i++) {
        check_linear("stacked", (struct dmat[]){a.m, b.m, c.m}, 3, true, i % 2, all_T[i]);
        struct dmat rows = dmat_rows(&f.m, 100, 290), slice = dmat_cols(&rows, 64, 320);
        check_linear("sliced", (struct dmat[]){slice}, 1, false, false, all_T[i]);
        check_linear("three slices", (struct dmat[]){slice, slice, slice}, 3, true, false, all_T[i]);
    }
    matrix_free(&a), matrix_free(&b), matrix_free(&c), matrix_free(&f);
}

static double act(double g, double u, double limit)
{
    if (limit <= 0) return g / (1 + exp(-g)) * u;
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-1.702 * g)) * (u + 1);
}

static void check_gate(enum dtype gate, enum dtype up, int F, int cols, int T, bool bias, float limit)
{
    struct matrix a = matrix_for(gate, F, cols), b = matrix_for(up, F, cols);
    size_t n = (size_t)T * (size_t)F;
    cols = (int)a.m.cols;
    float *x = bf16_floats((size_t)T * (size_t)cols), *bb = bf16_floats((size_t)(2 * F));
    double *g = must_alloc(n * sizeof *g), *u = must_alloc(n * sizeof *u), *size = must_alloc(n * sizeof *size);
    reference(&a.m, x, T, g, size, F, 0);
    reference(&b.m, x, T, u, size, F, 0);
    struct bweight *w = weight_of((struct dmat[]){a.m, b.m}, 2, bias ? bb : NULL);
    float *dx = device_copy(x, (size_t)T * (size_t)cols), *out = poisoned(n);
    be->ops->gate(be, &(struct gate_args){.out = out, .x = dx, .T = T, .w = w, .swiglu_limit = limit});
    float *got = fetch(out, n);
    for (size_t i = 0; i < n; i++) {
        size_t r = i % (size_t)F;
        double gv = g[i] + (bias ? (double)bb[r] : 0), uv = u[i] + (bias ? (double)bb[(size_t)F + r] : 0);
        double v = act(gv, uv, (double)limit), slack = 1e-4 * (1 + fabs(gv)) * (1 + fabs(uv));
        if (!(fabs((double)got[i] - v) <= slack))
            fail_msg("gate %s %d x %d, %d rows: %zu: %g, should be %g", dtype_infos[gate].name, F, cols, T, i,
                     (double)got[i], v);
    }
    be->ops->weight_free(be, w);
    be->ops->free(be, dx);
    be->ops->free(be, out);
    matrix_free(&a), matrix_free(&b);
    free(x), free(bb), free(g), free(u), free(size), free(got);
}

static void gates(void **state)
{
    (void)state;
    if (skipped()) return;
    for (size_t i = 0; i < COUNT_OF(all_T); i++) {
        check_gate(DT_BF16, DT_BF16, 40, 64, all_T[i], i % 2, 0);
        check_gate(DT_MXFP4, DT_MXFP4, 17, 320, all_T[i], true, 7);
        check_gate(DT_Q4_K, DT_Q6_K, 33, 256, all_T[i], true, 0);
        check_gate(DT_F8_E4M3, DT_F8_E4M3, 129, 384, all_T[i], false, 0);
    }
}

/* With the norm in front: activations are rounded to bf16 once. */
static void norm_in_front(void **state)
{
    enum { ROWS = 48, COLS = 1000 };
    (void)state;
    if (skipped()) return;
    struct matrix m = matrix_for(DT_BF16, ROWS, COLS);
    for (size_t i = 0; i < COUNT_OF(all_T); i++) {
        int T = all_T[i];
        size_t n = (size_t)T * ROWS, nx = (size_t)T * COLS;
        float *x = bf16_floats(nx), *norm = bf16_floats(COLS), *y = must_alloc(nx * sizeof *y);
        double *want = must_alloc(n * sizeof *want), *size = must_alloc(n * sizeof *size);
        for (int t = 0; t < T; t++) {
            double sum = 0;
            for (int k = 0; k < COLS; k++) sum += (double)x[t * COLS + k] * (double)x[t * COLS + k];
            for (int k = 0; k < COLS; k++)
                y[t * COLS + k] = (float)((double)x[t * COLS + k] / sqrt(sum / COLS + 1e-5) * (double)norm[k]);
        }
        reference(&m.m, y, T, want, size, ROWS, 0);
        struct bweight *w = weight_of(&m.m, 1, NULL);
        float *dx = device_copy(x, nx), *dn = device_copy(norm, COLS), *out = poisoned(n);
        be->ops->linear(be, &(struct linear_args){.out = out, .x = dx, .norm = dn, .eps = 1e-5f, .T = T, .w = w});
        float *got = fetch(out, n);
        for (size_t k = 0; k < n; k++)
            if (!(fabs((double)got[k] - want[k]) <= 1e-3 * size[k]))
                fail_msg("norm, %d rows: %zu: %g, should be %g", T, k, (double)got[k], want[k]);
        be->ops->weight_free(be, w);
        be->ops->free(be, dx), be->ops->free(be, dn), be->ops->free(be, out);
        free(x), free(norm), free(y), free(want), free(size), free(got);
    }
    matrix_free(&m);
}

/* Company changes no bit, within a class of kernels. */
static void same_bits_in_company(void **state)
{
    static const enum dtype types[] = {DT_BF16, DT_F8_E4M3, DT_NVFP4, DT_Q4_K};
    enum { ROWS = 200, COLS = 4096, MOST = 100 };
    (void)state;
    if (skipped()) return;
    for (size_t k = 0; k < COUNT_OF(types); k++) {
        struct matrix m = matrix_for(types[k], ROWS, COLS);
        float *x = bf16_floats((size_t)MOST * COLS), *dx = device_copy(x, (size_t)MOST * COLS);
        struct bweight *w = weight_of(&m.m, 1, NULL);
        for (int wide = 0; wide < 2; wide++) {
            static const int sizes[2][3] = {{1, 7, 16}, {17, 40, MOST}};
            float *first = NULL;
            for (int i = 0; i < 3; i++) {
                int T = sizes[wide][i];
                float *out = poisoned((size_t)T * ROWS);
                be->ops->linear(be, &(struct linear_args){.out = out, .x = dx, .T = T, .w = w});
                float *got = fetch(out, (size_t)T * ROWS);
                be->ops->free(be, out);
                if (!first) {
                    first = got;
                    continue;
                }
                assert_memory_equal(got, first, (size_t)sizes[wide][0] * ROWS * sizeof *got);
                free(got);
            }
            free(first);
        }
        be->ops->weight_free(be, w);
        be->ops->free(be, dx);
        matrix_free(&m);
        free(x);
    }
}

/* Steps of a decode that are captured and replayed: other inputs, other rows, a step that takes another course, a
 * weight that goes. Each step's numbers are those of the same operations outside a step. */
static void replayed_steps(void **state)
{
    enum { T = 3, K = 256, N = 64, STEPS = 12 };
    static const int32_t ids[T] = {0}, seq_begin[T + 1] = {0, 1, 2, 3}, pos0[T] = {0}, pages[T] = {0, 1, 2};
    static const struct batch batch = {T, T, ids, seq_begin, pos0, pages, 1};
    (void)state;
    if (skipped()) return;
    struct matrix m = matrix_for(DT_Q4_K, K, K), head = matrix_for(DT_BF16, N, K);
    struct bweight *w = weight_of(&m.m, 1, NULL), *h = weight_of(&head.m, 1, NULL);
    float *x = device_new(T * K * sizeof *x), *y = device_new(T * K * sizeof *y);
    float *last = device_new(T * K * sizeof *last);
    float *outs[2] = {poisoned(T * N), poisoned(T * N)}, nan[T * N];
    for (int i = 0; i < T * N; i++) nan[i] = NAN;
    for (int step = 0; step < STEPS; step++) {
        int32_t rows[T] = {step % T, 0, (step + 1) % T};
        float *in = bf16_floats(T * K), *got[2];
        bool other = step == 7 || step == 9;
        if (step == 10) {
            be->ops->weight_free(be, w);
            w = weight_of(&m.m, 1, NULL);
        }
        for (int plain = 0; plain < 2; plain++) {
            float *out = outs[plain];
            be->ops->upload(be, out, nan, sizeof nan);
            be->ops->upload(be, x, in, T * K * sizeof *x);
            sync_ok();
            if (!plain) be->ops->begin(be, &batch);
            be->ops->linear(be, &(struct linear_args){.out = y, .x = x, .T = T, .w = w});
            be->ops->linear(be, &(struct linear_args){.out = y, .x = x, .residual = y, .T = T, .w = w});
            if (other) be->ops->linear(be, &(struct linear_args){.out = y, .x = x, .residual = x, .T = T, .w = w});
            be->ops->gather(be, last, y, K, rows, step == 9 ? T - 1 : T);
            be->ops->linear(be, &(struct linear_args){.out = out, .x = last, .T = T, .w = h});
            got[plain] = fetch(out, T * N);
        }
        assert_memory_equal(got[0], got[1], (size_t)(step == 9 ? T - 1 : T) * N * sizeof(float));
        assert_true(!isnan(got[0][0]));
        free(in), free(got[0]), free(got[1]);
    }
    be->ops->weight_free(be, w), be->ops->weight_free(be, h);
    be->ops->free(be, x), be->ops->free(be, y), be->ops->free(be, last);
    be->ops->free(be, outs[0]), be->ops->free(be, outs[1]);
    matrix_free(&m), matrix_free(&head);
}

static void size_as_stored(void **state)
{
    (void)state;
    if (skipped()) return;
    for (int type = DT_F32; type < DT_COUNT; type++) {
        struct dmat m = {.type = (enum dtype)type, .rows = 4096, .cols = 4096};
        double stored = (double)dmat_bytes(&m), takes = (double)be->ops->weight_bytes(be, &m, 1);
        if (!(takes >= stored && takes <= 1.03 * stored))
            fail_msg("%s: %.0f bytes, stored in %.0f", dtype_infos[type].name, takes, stored);
    }
}

static void refusals(void **state)
{
    struct backend *none;
    struct err e;
    (void)state;
    assert_int_equal(backend_open(&none, &(struct backend_opts){.device = "gpu"}, &e), ERR_INPUT);
    assert_int_equal(backend_open(&none, &(struct backend_opts){.device = "cuda:x"}, &e), ERR_INPUT);
    assert_true(backend_open(&none, &(struct backend_opts){.device = "cuda:99"}, &e) < 0);
    assert_non_null(strstr(e.msg, "cuda:99"));
    if (skipped()) return;
    void *p;
    assert_int_equal(be->ops->alloc(be, &p, (size_t)1 << 50, &e), ERR_NOMEM);
    sync_ok(); /* the device is as good as before */
    assert_true(be->ops->free_bytes(be) > 0);
}

/* ------------------------------------------------------------------------------------------------ measuring */

static void measure(enum dtype type, int rows, int cols, int T)
{
    enum { COPIES = 8, ROUNDS = 20 };
    struct matrix m = matrix_for(type, rows, cols);
    struct bweight *w[COPIES];
    for (int i = 0; i < COPIES; i++) w[i] = weight_of(&m.m, 1, NULL);
    float *x = bf16_floats((size_t)T * (size_t)m.m.cols), *dx = device_copy(x, (size_t)T * (size_t)m.m.cols);
    float *out = device_new((size_t)T * (size_t)rows * sizeof *out);
    double best = 1e9;
    for (int round = 0; round < 4; round++) {
        sync_ok();
        double start = clock_now();
        for (int r = 0; r < ROUNDS; r++)
            for (int i = 0; i < COPIES; i++)
                be->ops->linear(be, &(struct linear_args){.out = out, .x = dx, .T = T, .w = w[i]});
        sync_ok();
        double s = (clock_now() - start) / (ROUNDS * COPIES);
        if (s < best) best = s;
    }
    printf("%-6s %6d x %5d, %4d rows: %8.1f us  %7.1f GB/s  %6.1f TFLOP/s\n", dtype_infos[type].name, rows, cols, T,
           best * 1e6, (double)be->ops->weight_bytes(be, &m.m, 1) / best * 1e-9, 2.0 * rows * cols * T / best * 1e-12);
    for (int i = 0; i < COPIES; i++) be->ops->weight_free(be, w[i]);
    be->ops->free(be, dx);
    be->ops->free(be, out);
    matrix_free(&m);
    free(x);
}

static int time_all(const char *only)
{
    static const enum dtype types[] = {DT_BF16, DT_F8_E4M3, DT_NVFP4, DT_MXFP4, DT_Q8_0, DT_Q4_0, DT_Q4_K, DT_Q6_K};
    static const int rows[] = {1, 8, 16, 64, 128, 2048};
    if (!be) return printf("no CUDA device\n"), 1;
    for (size_t i = 0; i < COUNT_OF(types); i++)
        for (size_t k = 0; k < COUNT_OF(rows); k++) {
            if (only && strcmp(only, dtype_infos[types[i]].name)) continue;
            measure(types[i], 4096, 4096, rows[k]);
            measure(types[i], 28672, 4096, rows[k]);
            if (k < 2) measure(types[i], 4096, 14336, rows[k]);
        }
    return 0;
}

int main(int argc, char **argv)
{
    struct err e;
    if (backend_open(&be, &(struct backend_opts){.device = "cuda:0"}, &e) < 0) printf("%s\n", e.msg), be = NULL;
    if (argc > 1 && !strcmp(argv[1], "--time")) return time_all(argc > 2 ? argv[2] : NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format),  cmocka_unit_test(odd_columns),          cmocka_unit_test(stacked_parts),
        cmocka_unit_test(gates),         cmocka_unit_test(norm_in_front),        cmocka_unit_test(same_bits_in_company),
        cmocka_unit_test(not_a_number), cmocka_unit_test(replayed_steps), cmocka_unit_test(size_as_stored), cmocka_unit_test(refusals),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    backend_close(&be);
    return failed;
}
