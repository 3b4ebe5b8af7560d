/* cuda_mma: the tensor-core product of a warp and what both product kernels do with its result. Device code. */
#ifndef HEARTH_CUDA_MMA_H
#define HEARTH_CUDA_MMA_H

#include "cuda_unpack.h"

/* c[16 rows, 8 tokens] += A[16, 16] B[16, 8], bf16 in, float sums. Lane (g = lane / 4, t = lane % 4) holds of A rows
 * g and g + 8 (a[0], a[2] and a[1], a[3]), of B token g, of c rows g and g + 8 of tokens 2 t and 2 t + 1. */
static __device__ __forceinline__ void cu_mma(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The gated activation of struct gate_args. NaN stays NaN. */
static __device__ __forceinline__ float cu_act(float g, float u, float limit)
{
    float z = g;
    if (limit > 0) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
        u += 1;
        z = 1.702f * g;
    }
    return g / (1 + __expf(-z)) * u;
}

/* acc[i][n] += rows of tile i times tokens of tile n over one unit. raw[2 i], raw[2 i + 1]: what this lane holds of
 * rows g and g + 8 of tile i. fetch(s, n, b): the pairs of token g of tile n at the columns of this lane's step s. */
template <int TYPE, int R, int NT, typename FETCH>
static __device__ __forceinline__ void cu_unit_product(float acc[R][NT][4], const struct cu_raw *raw,
                                                       const FETCH &fetch)
{
    typedef struct cu_format<TYPE> f;
    constexpr int group = f::group ? f::group : 1;
#pragma unroll
    for (int s0 = 0; s0 < f::steps; s0 += group) {
        uint32_t a[group][R][4], low[R][4];
        float d[R][2], m[R][2];
#pragma unroll
        for (int s = 0; s < group; s++)
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t v[2], l[2] = {0, 0};
                    cu_expand<TYPE>(raw[2 * i + h], s0 + s, v, l);
                    a[s][i][h] = v[0], a[s][i][2 + h] = v[1];
                    low[i][h] = l[0], low[i][2 + h] = l[1];
                }
        if constexpr (f::group != 0) {
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) cu_scale<TYPE>(raw[2 * i + h], s0 / group, &d[i][h], &m[i][h]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float c[R][4] = {}, ones[4] = {};
#pragma unroll
            for (int s = 0; s < group; s++) {
                uint32_t b[2];
                fetch(s0 + s, n, b);
#pragma unroll
                for (int i = 0; i < R; i++) {
                    if constexpr (f::group == 0) cu_mma(acc[i][n], a[s][i], b);
                    else cu_mma(c[i], a[s][i], b);
                    if constexpr (f::split) cu_mma(acc[i][n], low[i], b);
                }
                if constexpr (f::min) { /* the sum of the group's activations, in every row */
                    const uint32_t one[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
                    cu_mma(ones, one, b);
                }
            }
            if constexpr (f::group != 0) {
#pragma unroll
                for (int i = 0; i < R; i++)
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        acc[i][n][k] += d[i][k / 2] * c[i][k];
                        if constexpr (f::min) acc[i][n][k] += m[i][k / 2] * ones[k];
                    }
            }
        }
    }
}

#endif
