/* cuda_norm.cu: what is done to rows of activations one by one: norms, the activation between gate and up where no
 * product has done it, embedding, gather. Sums of a row run in an order that its width alone decides. */
#include "cuda_launch.h"
#include "cuda_mma.h"

enum { ROW_THREADS = 512, COLUMN_THREADS = 256 };

static __device__ __forceinline__ uint16_t bf16_of(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }

/* Four at a time need rows that begin on 16 bytes. */
static bool fours(int K, const void *a, const void *b, const void *c)
{
    return K % 4 == 0 && ((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 16 == 0;
}

/* ------------------------------------------------------------------------------------------------ norms */

/* The sum over a block of ROW_THREADS, in every thread. */
static __device__ float block_sum(float v)
{
    __shared__ float part[ROW_THREADS / 32];
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < ROW_THREADS / 32; i++) v += part[i];
    return v;
}

static __device__ __forceinline__ float4 read4(const float *p) { return *(const float4 *)(const void *)p; }
static __device__ __forceinline__ void write4(float *p, float4 v) { *(float4 *)(void *)p = v; }

/* One row a block. */
template <bool FOURS>
static __global__ void __launch_bounds__(ROW_THREADS)
    norm_kernel(const float *x, int K, const float *norm, float eps, float *f, uint16_t *b)
{
    size_t t = blockIdx.x;
    int Kp = (K + CU_PAD - 1) / CU_PAD * CU_PAD;
    const float *row = x + t * (size_t)K;
    float scale = 1;
    cu_wait();
    cu_go();
    if (norm) {
        float sum = 0;
        if constexpr (FOURS) {
            for (int i = 4 * (int)threadIdx.x; i < K; i += 4 * ROW_THREADS) {
                float4 v = read4(row + i);
                sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
            }
        } else {
            for (int i = (int)threadIdx.x; i < K; i += ROW_THREADS) sum += row[i] * row[i];
        }
        scale = 1.0f / sqrtf(block_sum(sum) / (float)K + eps);
    }
    if constexpr (FOURS) {
        for (int i = 4 * (int)threadIdx.x; i < Kp; i += 4 * ROW_THREADS) {
            float4 v = make_float4(0, 0, 0, 0);
            if (i < K) {
                v = read4(row + i);
                if (norm) {
                    float4 n = read4(norm + i);
                    v.x = v.x * scale * n.x, v.y = v.y * scale * n.y;
                    v.z = v.z * scale * n.z, v.w = v.w * scale * n.w;
                }
                if (f) write4(f + t * (size_t)K + (size_t)i, v);
            }
            if (b)
                *(uint2 *)(void *)(b + t * (size_t)Kp + (size_t)i) =
                    make_uint2(cu_bf16_pack(v.x, v.y), cu_bf16_pack(v.z, v.w));
        }
    } else {
        for (int i = (int)threadIdx.x; i < Kp; i += ROW_THREADS) {
            float v = i >= K ? 0 : norm ? row[i] * scale * norm[i] : row[i];
            if (b) b[t * (size_t)Kp + (size_t)i] = bf16_of(v);
            if (f && i < K) f[t * (size_t)K + (size_t)i] = v;
        }
    }
}

void cu_norm(struct cuda *c, const float *x, int T, int K, const float *norm, float eps, float *dst_f,
             uint16_t *dst_b)
{
    if (c->err.code || T == 0) return;
    if (fours(K, x, norm, dst_f))
        cu_launch(c, "norm", norm_kernel<true>, dim3((unsigned)T), ROW_THREADS, 0, x, K, norm, eps, dst_f, dst_b);
    else cu_launch(c, "norm", norm_kernel<false>, dim3((unsigned)T), ROW_THREADS, 0, x, K, norm, eps, dst_f, dst_b);
}

/* ------------------------------------------------------------------------------------------------ activation */

/* Row blockIdx.x, columns from blockIdx.y * 4 COLUMN_THREADS on. */
template <bool FOURS>
static __global__ void __launch_bounds__(COLUMN_THREADS)
    act_kernel(const float *gu, int F, float limit, float *f, uint16_t *b)
{
    size_t t = blockIdx.x;
    int Fp = (F + CU_PAD - 1) / CU_PAD * CU_PAD, i = 4 * (int)(blockIdx.y * COLUMN_THREADS + threadIdx.x);
    const float *row = gu + t * (size_t)(2 * F);
    float v[4] = {0, 0, 0, 0};
    cu_wait();
    cu_go();
    if (i >= Fp) return;
    if constexpr (FOURS) {
        if (i < F) {
            float4 g = read4(row + i), u = read4(row + F + i);
            v[0] = cu_act(g.x, u.x, limit), v[1] = cu_act(g.y, u.y, limit);
            v[2] = cu_act(g.z, u.z, limit), v[3] = cu_act(g.w, u.w, limit);
            if (f) write4(f + t * (size_t)F + (size_t)i, make_float4(v[0], v[1], v[2], v[3]));
        }
    } else {
        for (int k = 0; k < 4 && i + k < F; k++) {
            v[k] = cu_act(row[i + k], row[F + i + k], limit);
            if (f) f[t * (size_t)F + (size_t)(i + k)] = v[k];
        }
    }
    if (b)
        *(uint2 *)(void *)(b + t * (size_t)Fp + (size_t)i) =
            make_uint2(cu_bf16_pack(v[0], v[1]), cu_bf16_pack(v[2], v[3]));
}

void cu_gate_act(struct cuda *c, const float *gu, int T, int F, float limit, float *dst, uint16_t *dst_b)
{
    if (c->err.code || T == 0) return;
    dim3 grid((unsigned)T, (unsigned)cu_div_up(cu_pad(F), 4 * COLUMN_THREADS));
    if (fours(F, gu, dst, NULL))
        cu_launch(c, "activation", act_kernel<true>, grid, COLUMN_THREADS, 0, gu, F, limit, dst, dst_b);
    else cu_launch(c, "activation", act_kernel<false>, grid, COLUMN_THREADS, 0, gu, F, limit, dst, dst_b);
}

/* ------------------------------------------------------------------------------------------------ rows */

/* Row blockIdx.x; a thread decodes what one lane of a product would hold. */
template <int TYPE>
static __global__ void __launch_bounds__(COLUMN_THREADS) embed_kernel(struct cu_mat m, const int32_t *ids, float *out)
{
    typedef struct cu_format<TYPE> f;
    size_t t = blockIdx.x;
    int i = (int)(blockIdx.y * COLUMN_THREADS + threadIdx.x), u = i / 4;
    float v[4 * f::steps];
    cu_wait();
    cu_go();
    if (u * f::unit >= m.cols) return;
    cu_lane_floats<TYPE>(m, ids[t], u, i % 4, v);
#pragma unroll
    for (int s = 0; s < f::steps; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int col = u * f::unit + cu_column<TYPE>(i % 4, s) + k;
            if (col < m.cols) out[t * (size_t)m.cols + (size_t)col] = v[4 * s + k];
        }
}

template <int TYPE> static void launch_embed(struct cuda *c, const struct cu_mat *m, float *out)
{
    dim3 grid((unsigned)c->T, (unsigned)cu_div_up(4 * cu_div_up(m->cols, cu_format<TYPE>::unit), COLUMN_THREADS));
    cu_launch(c, "embedding", embed_kernel<TYPE>, grid, COLUMN_THREADS, 0, *m, c->ids, out);
}

void cu_embed(struct cuda *c, float *out, const struct bweight *w)
{
    if (c->err.code || c->T == 0) return;
    CU_DISPATCH(w->part[0].type, launch_embed, (c, &w->part[0], out));
}

static __global__ void __launch_bounds__(COLUMN_THREADS)
    gather_kernel(float *out, const float *x, int D, const int32_t *rows)
{
    cu_wait();
    cu_go();
    size_t i = blockIdx.x, from = (size_t)rows[i];
    for (int d = (int)threadIdx.x; d < D; d += COLUMN_THREADS)
        out[i * (size_t)D + (size_t)d] = x[from * (size_t)D + (size_t)d];
}

void cu_gather(struct cuda *c, float *out, const float *x, int D, int n)
{
    if (c->err.code || n == 0) return;
    cu_launch(c, "gather", gather_kernel, dim3((unsigned)n), COLUMN_THREADS, 0, out, x, D, c->gather_rows);
}

/* ------------------------------------------------------------------------------------------------ largest */

enum { BEST_THREADS = 1024 };

static __device__ __forceinline__ void take_better(float *v, int *at, float other, int from)
{
    if (from >= 0 && (*at < 0 || other > *v || (other == *v && from < *at))) *v = other, *at = from;
}

static __global__ void __launch_bounds__(BEST_THREADS) best_kernel(const float *logits, int V, int32_t *ids)
{
    __shared__ float value[32];
    __shared__ int index[32];
    const float *x = logits + (size_t)blockIdx.x * (size_t)V;
    float v = -INFINITY;
    int at = -1, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int i = (int)threadIdx.x; i < V; i += BEST_THREADS)
        if (x[i] > v) v = x[i], at = i;
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, v, step);
        int from = __shfl_xor_sync(0xFFFFFFFFu, at, step);
        take_better(&v, &at, other, from);
    }
    if (lane == 0) value[warp] = v, index[warp] = at;
    __syncthreads();
    if (warp > 0) return;
    v = value[lane], at = index[lane];
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, v, step);
        int from = __shfl_xor_sync(0xFFFFFFFFu, at, step);
        take_better(&v, &at, other, from);
    }
    if (lane == 0) ids[blockIdx.x] = at;
}

void cu_best(struct cuda *c, const float *logits, int n, int V, int32_t *ids)
{
    best_kernel<<<(unsigned)n, BEST_THREADS, 0, c->stream>>>(logits, V, ids);
    cu_launched(c, "largest logit");
}
