/* cuda_linear.cu: products of 1 to 16 rows, which are as fast as the weights can be read, and the float product of
 * routers.
 *
 * A block makes 16 or 32 outputs (or 8 or 16 gates and their ups) for all rows. Its eight warps share out the
 * columns: warp w takes units w, w + 8, w + 16 .. and adds them up on the tensor cores; the eight sums are added in
 * the order of the warps. That order depends on the matrix alone, never on the rows. */
#include <string.h>

#include "cuda_mma.h"

enum { WARPS = 8 };

/* parts[n_parts] are all of one type; rows of part i go to columns at[i] .. of out. With gate, parts 0 and 1 are
 * gate and up. experts != NULL: the parts come from the expert's entry instead, slots from s. */
struct small_args {
    struct cu_mat part[CU_MAX_PARTS];
    int at[CU_MAX_PARTS], index[CU_MAX_PARTS], n_parts;
    const struct bweight *experts;
    struct cu_slots s;
    const uint16_t *acts;
    const float *bias, *residual;
    float *out;
    uint16_t *out_b;
    float limit;
    bool gate;
    int T, N, K; /* N: rows of the whole weight; of the gate alone with gate */
};

/* Where a block works: 16 R rows of one matrix, or with gate 8 R rows of two. */
struct small_place {
    struct cu_mat m[2]; /* the same twice without gate */
    int row0, n_rows;   /* first row in the matrix, and how many there are from it on */
    int at;             /* column of out of the first row */
    int first, last;    /* rows of acts, or slots */
    const float *bias;
};

template <int R> static __device__ __forceinline__ bool find_place(const struct small_args &a, struct small_place *p)
{
    int tile = (int)blockIdx.x, i = 0;
    const struct bweight *w = NULL;
    p->first = 0, p->last = a.T;
    p->bias = a.bias;
    if (a.experts) {
        if ((int)blockIdx.y >= a.s.n_active[0]) return false;
        int x = a.s.active[blockIdx.y];
        w = a.experts + x;
        p->first = a.s.off[x], p->last = a.s.off[x + 1];
        p->bias = w->bias;
    }
    if (a.gate) {
        p->m[0] = w ? w->part[0] : a.part[0];
        p->m[1] = w ? w->part[1] : a.part[1];
        p->row0 = p->at = tile * 8 * R;
    } else {
        for (; i < a.n_parts - 1; i++) {
            int tiles = (a.part[i].rows + 16 * R - 1) / (16 * R);
            if (tile < tiles) break;
            tile -= tiles;
        }
        p->m[0] = p->m[1] = w ? w->part[a.index[i]] : a.part[i];
        p->row0 = tile * 16 * R;
        p->at = a.at[i] + p->row0;
    }
    p->n_rows = p->m[0].rows - p->row0;
    return true;
}

/* sums[warp][token][row]: with gate, row r is the gate of output r for r < 8 R, and r + 8 R the up of it. */
template <int NT, int R> struct small_sums {
    float v[WARPS][8 * NT][16 * R + 4];
};

template <int NT, int R>
static __device__ __forceinline__ void store(const struct small_args &a, const struct small_place &p, int t0,
                                             int n_tokens, const struct small_sums<NT, R> &sums)
{
    int n_out = a.gate ? 8 * R : 16 * R;
    for (int i = (int)threadIdx.x; i < n_tokens * n_out; i += WARPS * 32) {
        int tok = i / n_out, r = i % n_out;
        float v = 0, u = 0;
        if (r >= p.n_rows) continue;
        for (int w = 0; w < WARPS; w++) v += sums.v[w][tok][r];
        size_t t = (size_t)(t0 + tok), at = t * (size_t)a.N + (size_t)(p.at + r);
        if (!a.gate) {
            if (p.bias) v += p.bias[p.at + r];
            if (a.residual) v += a.residual[at];
            a.out[at] = v;
            continue;
        }
        for (int w = 0; w < WARPS; w++) u += sums.v[w][tok][r + 8 * R];
        if (p.bias) v += p.bias[p.at + r], u += p.bias[a.N + p.at + r];
        v = cu_act(v, u, a.limit);
        if (a.out) a.out[at] = v;
        if (a.out_b) {
            size_t Np = (size_t)(a.N + CU_PAD - 1) / CU_PAD * CU_PAD;
            a.out_b[t * Np + (size_t)(p.at + r)] = __bfloat16_as_ushort(__float2bfloat16_rn(v));
        }
    }
    if (a.gate && a.out_b && p.n_rows <= 8 * R) { /* the last rows: zeros behind them */
        int Np = (a.N + CU_PAD - 1) / CU_PAD * CU_PAD, n = Np - a.N;
        for (int i = (int)threadIdx.x; i < n_tokens * n; i += WARPS * 32)
            a.out_b[(size_t)(t0 + i / n) * (size_t)Np + (size_t)(a.N + i % n)] = 0;
    }
}

/* NT tiles of 8 rows of activations, R tiles of 16 rows of the matrix, DEEP units in flight: none of them changes the
 * order of a sum. */
template <int TYPE, int NT, int R, int DEEP>
static __global__ void __launch_bounds__(WARPS * 32, 2) small_kernel(const __grid_constant__ struct small_args a)
{
    typedef struct cu_format<TYPE> f;
    __shared__ struct small_sums<NT, R> sums;
    struct small_place p;
    if (!find_place<R>(a, &p)) return;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int units = (a.K + f::unit - 1) / f::unit, Kp = (a.K + CU_PAD - 1) / CU_PAD * CU_PAD;
    struct cu_row row[2 * R];
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        /* Row g + 8 i of the tiles. With gate the first half of them comes from one matrix, the second from the
         * other. */
        int second = a.gate && i >= R, r = g + 8 * (second ? i - R : i);
        if (r >= p.n_rows) r = p.n_rows - 1; /* read, not stored */
        row[i] = cu_row_of(second ? p.m[1] : p.m[0], p.row0 + r);
    }
    for (int t0 = p.first; t0 < p.last; t0 += 8 * NT) {
        const uint16_t *x[NT];
        bool there[NT];
        float acc[R][NT][4] = {};
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int i = t0 + 8 * n + g;
            there[n] = i < p.last;
            i = there[n] ? i : p.first;
            x[n] = a.acts + (size_t)(a.s.row ? a.s.row[i] : i) * (size_t)Kp;
        }
        for (int u = warp; u < units; u += WARPS * DEEP) {
            struct cu_raw raw[DEEP][2 * R];
#pragma unroll
            for (int k = 0; k < DEEP; k++)
                if (u + WARPS * k < units)
#pragma unroll
                    for (int i = 0; i < 2 * R; i++) cu_load<TYPE>(raw[k][i], row[i], u + WARPS * k, t);
#pragma unroll
            for (int k = 0; k < DEEP; k++)
                if (u + WARPS * k < units) {
                    auto fetch = [&](int s, int n, uint32_t b[2]) {
                        int col = (u + WARPS * k) * f::unit + cu_column<TYPE>(t, s);
                        uint2 v = make_uint2(0, 0);
                        if (there[n]) v = __ldg((const uint2 *)(const void *)(x[n] + col));
                        b[0] = v.x, b[1] = v.y;
                    };
                    cu_unit_product<TYPE, R, NT>(acc, raw[k], fetch);
                }
        }
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    sums.v[warp][8 * n + 2 * t + k % 2][16 * i + g + 8 * (k / 2)] = acc[i][n][k];
        __syncthreads();
        int n_tokens = p.last - t0 < 8 * NT ? p.last - t0 : 8 * NT;
        store<NT, R>(a, p, t0, n_tokens, sums);
        __syncthreads();
    }
}

/* Rows of the matrix a block takes: few where there are few rows of activations to read again and again. */
static int block_tiles(int most) { return most <= 4 ? 1 : 2; }

template <int TYPE>
static void launch_small(struct cuda *c, const struct small_args *a, int n_tiles, int n_y, int most)
{
    /* As many units in flight as registers hold. */
    constexpr int deep = cu_format<TYPE>::group == 0                                                    ? 4
                         : TYPE == DT_F8_E4M3 || TYPE == DT_MXFP4 || TYPE == DT_Q4_0 || TYPE == DT_Q8_0 ? 2
                                                                                                        : 1;
    dim3 grid((unsigned)n_tiles, (unsigned)n_y);
    if (most <= 4) small_kernel<TYPE, 1, 1, 4><<<grid, WARPS * 32, 0, c->stream>>>(*a);
    else if (most <= 8) small_kernel<TYPE, 1, 2, deep><<<grid, WARPS * 32, 0, c->stream>>>(*a);
    else small_kernel<TYPE, 2, 2, deep == 4 ? 2 : 1><<<grid, WARPS * 32, 0, c->stream>>>(*a);
    cu_launched(c, "product");
}

/* One launch for each type among the parts of w (or of an expert shaped like w). */
static void launch_types(struct cuda *c, struct small_args *a, const struct bweight *w, int n_y, int most)
{
    bool done[CU_MAX_PARTS] = {};
    int tiles = block_tiles(most);
    for (int first = 0; first < w->n_parts && !c->err.code; first++) {
        int n_tiles = 0, row0 = 0;
        if (done[first]) continue;
        a->n_parts = 0;
        for (int i = 0; i < w->n_parts; row0 += w->part[i++].rows) {
            if (w->part[i].type != w->part[first].type) continue;
            done[i] = true;
            a->part[a->n_parts] = w->part[i];
            a->index[a->n_parts] = i;
            a->at[a->n_parts++] = row0;
            n_tiles += cu_div_up(w->part[i].rows, 16 * tiles);
        }
        if (a->gate) n_tiles = cu_div_up(a->N, 8 * tiles);
        CU_DISPATCH(w->part[first].type, launch_small, (c, a, n_tiles, n_y, most));
    }
}

static bool one_type(const struct bweight *w) { return w->n_parts == 2 && w->part[0].type == w->part[1].type; }

void cu_small_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                      float *out)
{
    size_t Kp = (size_t)cu_pad(w->cols), N = (size_t)w->rows;
    for (int t = 0; t < T && !c->err.code; t += CU_SMALL_ROWS) {
        struct small_args a = {};
        a.acts = acts + (size_t)t * Kp;
        a.bias = w->bias;
        a.residual = residual ? residual + (size_t)t * N : NULL;
        a.out = out + (size_t)t * N;
        a.T = T - t < CU_SMALL_ROWS ? T - t : CU_SMALL_ROWS;
        a.N = w->rows;
        a.K = w->cols;
        launch_types(c, &a, w, 1, a.T);
    }
}

bool cu_small_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                   uint16_t *out_bf16)
{
    int F = w->rows / 2;
    size_t Kp = (size_t)cu_pad(w->cols), Fp = (size_t)cu_pad(F);
    if (!one_type(w)) return false;
    for (int t = 0; t < T && !c->err.code; t += CU_SMALL_ROWS) {
        struct small_args a = {};
        a.acts = acts + (size_t)t * Kp;
        a.bias = w->bias;
        a.out = out ? out + (size_t)t * (size_t)F : NULL;
        a.out_b = out_bf16 ? out_bf16 + (size_t)t * Fp : NULL;
        a.limit = limit;
        a.gate = true;
        a.T = T - t < CU_SMALL_ROWS ? T - t : CU_SMALL_ROWS;
        a.N = F;
        a.K = w->cols;
        launch_types(c, &a, w, 1, a.T);
    }
    return true;
}

static struct small_args grouped_args(const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts)
{
    struct small_args a = {};
    a.experts = w->dev;
    a.s = *s;
    a.acts = acts;
    a.K = w->any->cols;
    return a;
}

static int grouped_y(const struct cu_slots *s) { return s->E < s->max_slots ? s->E : s->max_slots; }

void cu_small_grouped(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                      float *out)
{
    struct small_args a = grouped_args(w, s, acts);
    a.N = w->any->rows;
    a.out = out;
    launch_types(c, &a, w->any, grouped_y(s), s->max_rows);
}

void cu_small_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                           float limit, uint16_t *out_bf16)
{
    struct small_args a = grouped_args(w, s, acts);
    a.N = w->any->rows / 2;
    a.gate = true;
    a.limit = limit;
    a.out_b = out_bf16;
    launch_types(c, &a, w->any, grouped_y(s), s->max_rows);
}

/* ------------------------------------------------------------------------------------------------ float products */

enum { FLOAT_TOKENS = 4 };

/* A block makes one output for four rows: routers are small, and what counts is that all of one is read at once. */
template <int TYPE>
static __global__ void __launch_bounds__(WARPS * 32)
    float_kernel(struct cu_mat m, const float *bias, const float *x, int T, int N, float *out)
{
    typedef struct cu_format<TYPE> f;
    __shared__ float sums[WARPS][FLOAT_TOKENS];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, row = (int)blockIdx.x;
    int t0 = (int)blockIdx.y * FLOAT_TOKENS, n = T - t0 < FLOAT_TOKENS ? T - t0 : FLOAT_TOKENS;
    float sum[FLOAT_TOKENS] = {};
    for (int u = warp * 8 + lane / 4; u * f::unit < m.cols; u += WARPS * 8) {
        float v[4 * f::steps];
        cu_lane_floats<TYPE>(m, row, u, lane % 4, v);
#pragma unroll
        for (int s = 0; s < f::steps; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int col = u * f::unit + cu_column<TYPE>(lane % 4, s) + i;
                if (col >= m.cols) continue;
#pragma unroll
                for (int k = 0; k < FLOAT_TOKENS; k++)
                    if (k < n)
                        sum[k] = fmaf(v[4 * s + i], x[(size_t)(t0 + k) * (size_t)m.cols + (size_t)col], sum[k]);
            }
    }
#pragma unroll
    for (int k = 0; k < FLOAT_TOKENS; k++) {
        for (int step = 16; step > 0; step /= 2) sum[k] += __shfl_xor_sync(0xFFFFFFFFu, sum[k], step);
        if (lane == 0) sums[warp][k] = sum[k];
    }
    __syncthreads();
    if ((int)threadIdx.x >= n) return;
    float v = bias ? bias[row] : 0;
    for (int w = 0; w < WARPS; w++) v += sums[w][threadIdx.x];
    out[(size_t)(t0 + (int)threadIdx.x) * (size_t)N + (size_t)row] = v;
}

template <int TYPE>
static void launch_float(struct cuda *c, const struct cu_mat *m, const float *bias, const float *x, int T, int N,
                         float *out)
{
    dim3 grid((unsigned)m->rows, (unsigned)cu_div_up(T, FLOAT_TOKENS));
    float_kernel<TYPE><<<grid, WARPS * 32, 0, c->stream>>>(*m, bias, x, T, N, out);
    cu_launched(c, "float product");
}

void cu_product_float(struct cuda *c, const struct bweight *w, const float *x, int T, float *out)
{
    int at = 0;
    for (int i = 0; i < w->n_parts && !c->err.code; at += w->part[i++].rows)
        CU_DISPATCH(w->part[i].type, launch_float,
                    (c, &w->part[i], w->bias ? w->bias + at : NULL, x, T, w->rows, out + at));
}

/* ------------------------------------------------------------------------------------------------ the choice */

void cu_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                float *out)
{
    if (T <= CU_SMALL_ROWS) cu_small_product(c, w, acts, T, residual, out);
    else if (T <= CU_MEDIUM_ROWS || !cu_lt_product(c, w, acts, T, residual, out))
        cu_gemm(c, w, acts, T, residual, out);
}

void cu_product_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                     uint16_t *out_bf16)
{
    bool done;
    if (T <= CU_SMALL_ROWS) done = cu_small_gate(c, w, acts, T, limit, out, out_bf16);
    else done = !(T > CU_MEDIUM_ROWS && cu_lt_takes(c, w)) && cu_gemm_gate(c, w, acts, T, limit, out, out_bf16);
    if (done || !cu_grow(c, &c->tmp, &c->tmp_cap, (size_t)T * (size_t)w->rows * sizeof *c->tmp)) return;
    cu_product(c, w, acts, T, NULL, c->tmp);
    cu_gate_act(c, c->tmp, T, w->rows / 2, limit, out, out_bf16);
}

/* Few slots an expert: read its weights as fast as that goes, in pieces of 16. */
static bool few(const struct cu_slots *s) { return s->max_rows <= CU_SMALL_ROWS || s->max_slots <= 12 * s->E; }

void cu_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                     float limit, uint16_t *out_bf16)
{
    if (c->err.code) return;
    if (!one_type(w->any))
        err_set(&c->err, ERR_UNSUPPORTED,
                "experts whose gate and up have different types are not supported on a GPU");
    else if (few(s)) cu_small_grouped_gate(c, w, s, acts, limit, out_bf16);
    else cu_gemm_grouped_gate(c, w, s, acts, limit, out_bf16);
}

void cu_grouped_linear(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                       float *out)
{
    if (few(s)) cu_small_grouped(c, w, s, acts, out);
    else cu_gemm_grouped(c, w, s, acts, out);
}
