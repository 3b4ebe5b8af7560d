/* cuda_gemm.cu: products of more than 16 rows. A block makes 128 outputs (or 64 gates and their 64 ups) for 64 rows
 * of activations: a warp reads the bits of its 32 outputs straight into registers, some units ahead, and expands
 * them there; the activations come through shared memory in tiles of 128 columns, three in flight.
 *
 * Up to 128 rows there are few such blocks for large matrices, so that blocks share out the columns too (splits, by
 * the matrix alone) and a second kernel adds their sums in order. With more rows a block walks all columns, and BF16
 * goes to cuBLASLt where that is present. */
#include <string.h>

#include "cuda_mma.h"

enum { GEMM_WARPS = 4, GEMM_ROWS = 128, GEMM_TOKENS = 64, GEMM_TILES = 8, K_TILE = 128, STAGES = 3, MAX_SPLITS = 16 };

struct gemm_args {
    struct cu_mat part[2]; /* the same twice without gate */
    const struct bweight *experts;
    int index[2]; /* of the expert's parts */
    struct cu_slots s;
    const uint16_t *acts;
    const float *bias, *residual;
    float *out;      /* [T][N] at column `at`; with splits [split][T][N] without bias and residual */
    uint16_t *out_b; /* with gate: bf16 [T][cu_pad(N)] */
    float limit;
    bool gate;
    int T, N, K, at, splits;
};

struct gemm_place {
    const struct cu_mat *m[2];
    const float *bias;
    int row0, first, last; /* first row of the block; rows of acts or slots */
};

/* Token tile blockIdx.y of all experts' tiles: which expert, which of its slots. All threads of the block take part.
 * */
static __device__ bool find_group(const struct gemm_args &a, struct gemm_place *p)
{
    __shared__ int found[3];
    if (threadIdx.x == 0) found[0] = -1;
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0, want = (int)blockIdx.y, lane = (int)threadIdx.x;
        for (int e0 = 0; e0 < a.s.E && before <= want; e0 += 32) {
            int e = e0 + lane, from = 0, to = 0;
            if (e < a.s.E) from = a.s.off[e], to = a.s.off[e + 1];
            int n = (to - from + GEMM_TOKENS - 1) / GEMM_TOKENS, sum = n;
            for (int step = 1; step < 32; step *= 2) {
                int v = __shfl_up_sync(0xFFFFFFFFu, sum, step);
                if (lane >= step) sum += v;
            }
            if (want >= before + sum - n && want < before + sum) {
                found[0] = e;
                found[1] = from + (want - (before + sum - n)) * GEMM_TOKENS;
                found[2] = to;
            }
            before += __shfl_sync(0xFFFFFFFFu, sum, 31);
        }
    }
    __syncthreads();
    if (found[0] < 0) return false;
    const struct bweight *w = a.experts + found[0];
    p->m[0] = w->part + a.index[0];
    p->m[1] = w->part + a.index[1];
    p->bias = w->bias;
    p->first = found[1];
    p->last = found[2] < found[1] + GEMM_TOKENS ? found[2] : found[1] + GEMM_TOKENS;
    return true;
}

static __device__ __forceinline__ void copy_async(void *shared, const void *global, bool there)
{
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    int bytes = there ? 16 : 0; /* what is not read is zero */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes));
}

/* Bytes from one token of a tile to the next, so that the lanes of a fetch meet few banks twice. */
template <int TYPE> struct token_stride {
    static constexpr int bytes = TYPE == DT_F16 || TYPE == DT_BF16 ? 320 : TYPE == DT_F8_E4M3 ? 272 : 288;
};

static __device__ void store_one(const struct gemm_args &a, const struct gemm_place &p, int tok, int row, float v)
{
    size_t at = (size_t)tok * (size_t)a.N + (size_t)(a.at + row);
    if (a.splits > 1) {
        a.out[(size_t)blockIdx.z * (size_t)a.T * (size_t)a.N + at] = v;
        return;
    }
    if (p.bias) v += p.bias[a.at + row];
    if (a.residual) v += a.residual[at];
    a.out[at] = v;
}

static __device__ void store_gate(const struct gemm_args &a, const struct gemm_place &p, int tok, int row, float g,
                                  float u)
{
    if (p.bias) g += p.bias[row], u += p.bias[a.N + row];
    g = cu_act(g, u, a.limit);
    if (a.out) a.out[(size_t)tok * (size_t)a.N + (size_t)row] = g;
    if (a.out_b) {
        size_t Np = (size_t)(a.N + CU_PAD - 1) / CU_PAD * CU_PAD;
        a.out_b[(size_t)tok * Np + (size_t)row] = __bfloat16_as_ushort(__float2bfloat16_rn(g));
        if (row == a.N - 1)
            for (size_t i = (size_t)a.N; i < Np; i++) a.out_b[(size_t)tok * Np + i] = 0;
    }
}

template <int TYPE>
static __global__ void __launch_bounds__(GEMM_WARPS * 32, 2) gemm_kernel(const __grid_constant__ struct gemm_args a)
{
    typedef struct cu_format<TYPE> f;
    constexpr int PER_TILE = K_TILE / f::unit, DEEP = f::unit <= 64 ? 4 : 2, STRIDE = token_stride<TYPE>::bytes;
    extern __shared__ __align__(16) uint8_t tiles[]; /* [STAGES][GEMM_TOKENS][STRIDE] */
    __shared__ int token_row[GEMM_TOKENS];           /* row of acts, -1: none */
    struct gemm_place p;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int Kp = (a.K + CU_PAD - 1) / CU_PAD * CU_PAD;
    if (a.experts) {
        if (!find_group(a, &p)) return;
    } else {
        p.m[0] = a.part, p.m[1] = a.part + 1;
        p.bias = a.bias;
        p.first = (int)blockIdx.y * GEMM_TOKENS;
        p.last = a.T < p.first + GEMM_TOKENS ? a.T : p.first + GEMM_TOKENS;
    }
    p.row0 = (int)blockIdx.x * (a.gate ? GEMM_ROWS / 2 : GEMM_ROWS);
    for (int i = (int)threadIdx.x; i < GEMM_TOKENS; i += GEMM_WARPS * 32) {
        int slot = p.first + i;
        token_row[i] = slot >= p.last ? -1 : a.s.row ? a.s.row[slot] : slot;
    }
    __syncthreads();

    struct cu_row row[4]; /* of tile 0: g, g + 8; of tile 1 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = p.row0 + (a.gate ? warp * 16 : warp * 32 + i / 2 * 16) + g + 8 * (i % 2), last = p.m[i / 2]->rows - 1;
        row[i] = cu_row_of(*p.m[i / 2], r < last ? r : last); /* one past the last is read, not stored */
    }
    int rows = p.m[0]->rows;

    int k_tiles = Kp / K_TILE, per = (k_tiles + a.splits - 1) / a.splits;
    int tile0 = (int)blockIdx.z * per, tile1 = tile0 + per < k_tiles ? tile0 + per : k_tiles;
    int units = (a.K + f::unit - 1) / f::unit, u0 = tile0 * PER_TILE,
        u1 = tile1 * PER_TILE < units ? tile1 * PER_TILE : units;
    auto load_tile = [&](int tile) {
        if (tile < tile1) {
            uint8_t *to = tiles + tile % STAGES * (GEMM_TOKENS * STRIDE);
            for (int i = (int)threadIdx.x; i < GEMM_TOKENS * 16; i += GEMM_WARPS * 32) {
                int tok = i / 16, r = token_row[tok];
                const uint16_t *from =
                    a.acts + (size_t)(r < 0 ? 0 : r) * (size_t)Kp + (size_t)(tile * K_TILE + i % 16 * 8);
                copy_async(to + tok * STRIDE + i % 16 * 16, from, r >= 0);
            }
        }
        asm volatile("cp.async.commit_group;");
    };

    float acc[2][GEMM_TILES][4] = {};
    struct cu_raw raw[DEEP][4];
    for (int i = 0; i < STAGES - 1; i++) load_tile(tile0 + i);
#pragma unroll
    for (int k = 0; k < DEEP; k++)
        if (u0 + k < u1)
#pragma unroll
            for (int i = 0; i < 4; i++) cu_load<TYPE>(raw[k][i], row[i], u0 + k, t);
    for (int u = u0; u < u1; u += DEEP) {
#pragma unroll
        for (int k = 0; k < DEEP; k++) {
            if (u + k >= u1) break;
            if ((u + k) % PER_TILE == 0) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
                __syncthreads(); /* the tile is there, and all are done with the one that is overwritten next */
                load_tile((u + k) / PER_TILE + STAGES - 1);
            }
            const uint8_t *tile = tiles + (u + k) / PER_TILE % STAGES * (GEMM_TOKENS * STRIDE);
            auto fetch = [&](int s, int n, uint32_t b[2]) {
                int col = (u + k) % PER_TILE * f::unit + cu_column<TYPE>(t, s);
                uint2 v = *(const uint2 *)(const void *)(tile + (8 * n + g) * STRIDE + col * 2);
                b[0] = v.x, b[1] = v.y;
            };
            cu_unit_product<TYPE, 2, GEMM_TILES>(acc, raw[k], fetch);
            if (u + k + DEEP < u1)
#pragma unroll
                for (int i = 0; i < 4; i++) cu_load<TYPE>(raw[k][i], row[i], u + k + DEEP, t);
        }
    }

#pragma unroll
    for (int n = 0; n < GEMM_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int tok = p.first + 8 * n + 2 * t + k % 2, r = p.row0 + warp * (a.gate ? 16 : 32) + g + 8 * (k / 2);
            if (tok >= p.last) continue;
            if (a.gate) {
                if (r < rows) store_gate(a, p, tok, r, acc[0][n][k], acc[1][n][k]);
            } else {
                if (r < rows) store_one(a, p, tok, r, acc[0][n][k]);
                if (r + 16 < rows) store_one(a, p, tok, r + 16, acc[1][n][k]);
            }
        }
}

/* out = the splits' sums, in order, + bias + residual */
static __global__ void reduce_kernel(const float *parts, int splits, size_t n, int N, const float *bias,
                                     const float *residual, float *out)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = parts[i];
    for (int s = 1; s < splits; s++) v += parts[(size_t)s * n + i];
    if (bias) v += bias[i % (size_t)N];
    if (residual) v += residual[i];
    out[i] = v;
}

template <int TYPE> static void launch_gemm(struct cuda *c, const struct gemm_args *a, int n_x, int n_y)
{
    constexpr int bytes = STAGES * GEMM_TOKENS * token_stride<TYPE>::bytes;
    if (!cu_ok(c, "product",
               cudaFuncSetAttribute(gemm_kernel<TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
        return;
    dim3 grid((unsigned)n_x, (unsigned)n_y, (unsigned)a->splits);
    gemm_kernel<TYPE><<<grid, GEMM_WARPS * 32, bytes, c->stream>>>(*a);
    cu_launched(c, "product of many rows");
}

/* By the matrix alone, so that a row's sum does not depend on the other rows: about four blocks a multiprocessor. */
static int splits_of(const struct cuda *c, const struct bweight *w, int T)
{
    int blocks = cu_div_up(w->rows, GEMM_ROWS), k_tiles = cu_pad(w->cols) / K_TILE;
    if (T > CU_MEDIUM_ROWS) return 1;
    int n = 4 * c->n_sm / blocks, most = k_tiles / 4;
    if (n > most) n = most;
    if (n > MAX_SPLITS) n = MAX_SPLITS;
    if (n < 2) return 1;
    return cu_div_up(k_tiles, cu_div_up(k_tiles, n)); /* none is empty */
}

void cu_gemm(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual, float *out)
{
    struct gemm_args a = {};
    size_t n = (size_t)T * (size_t)w->rows;
    a.splits = splits_of(c, w, T);
    a.acts = acts;
    a.T = T, a.N = w->rows, a.K = w->cols;
    a.out = out;
    a.bias = w->bias;
    a.residual = residual;
    if (a.splits > 1) {
        if (!cu_grow(c, &c->splits, &c->splits_cap, (size_t)a.splits * n * sizeof *c->splits)) return;
        a.out = c->splits;
    }
    for (int i = 0; i < w->n_parts && !c->err.code; a.at += w->part[i++].rows) {
        a.part[0] = a.part[1] = w->part[i];
        CU_DISPATCH(w->part[i].type, launch_gemm,
                    (c, &a, cu_div_up(w->part[i].rows, GEMM_ROWS), cu_div_up(T, GEMM_TOKENS)));
    }
    if (a.splits == 1 || c->err.code) return;
    reduce_kernel<<<(unsigned)cu_div_up((int64_t)n, 256), 256, 0, c->stream>>>(c->splits, a.splits, n, w->rows,
                                                                               w->bias, residual, out);
    cu_launched(c, "product");
}

bool cu_gemm_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                  uint16_t *out_bf16)
{
    struct gemm_args a = {};
    if (w->n_parts != 2 || w->part[0].type != w->part[1].type || splits_of(c, w, T) > 1) return false;
    a.splits = 1;
    a.acts = acts;
    a.T = T, a.N = w->rows / 2, a.K = w->cols;
    a.out = out;
    a.out_b = out_bf16;
    a.bias = w->bias;
    a.gate = true;
    a.limit = limit;
    a.part[0] = w->part[0], a.part[1] = w->part[1];
    CU_DISPATCH(a.part[0].type, launch_gemm, (c, &a, cu_div_up(a.N, GEMM_ROWS / 2), cu_div_up(T, GEMM_TOKENS)));
    return true;
}

static struct gemm_args grouped_args(const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                                     int *n_y)
{
    struct gemm_args a = {};
    a.experts = w->dev;
    a.s = *s;
    a.acts = acts;
    a.K = w->any->cols;
    a.splits = 1;
    *n_y = s->max_slots / GEMM_TOKENS + (s->E < s->max_slots ? s->E : s->max_slots);
    return a;
}

void cu_gemm_grouped(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                     float *out)
{
    int n_y;
    struct gemm_args a = grouped_args(w, s, acts, &n_y);
    a.N = w->any->rows;
    a.out = out;
    for (int i = 0; i < w->any->n_parts && !c->err.code; a.at += w->any->part[i++].rows) {
        a.index[0] = a.index[1] = i;
        CU_DISPATCH(w->any->part[i].type, launch_gemm, (c, &a, cu_div_up(w->any->part[i].rows, GEMM_ROWS), n_y));
    }
}

void cu_gemm_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                          float limit, uint16_t *out_bf16)
{
    int n_y;
    struct gemm_args a = grouped_args(w, s, acts, &n_y);
    a.N = w->any->rows / 2;
    a.gate = true;
    a.limit = limit;
    a.out_b = out_bf16;
    a.index[1] = 1;
    CU_DISPATCH(w->any->part[0].type, launch_gemm, (c, &a, cu_div_up(a.N, GEMM_ROWS / 2), n_y));
}
