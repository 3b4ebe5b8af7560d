/* cuda_unpack: the one place that knows how a weight's bits lie in device memory; what packs and what unpacks stand
 * side by side. Device code.
 *
 * Products run on mma.m16n8k16. The four lanes t of a quad hold one row; a row goes in units of 64 bytes of q, 16 a
 * lane, which are `steps` products of 16 columns each. The order of columns inside a product does not matter as long
 * as both sides agree, so a lane's bytes are contiguous. Column of lane t, step s, element i (0..3) within the unit:
 *   F32 (16 columns a unit), F16, BF16 (32), F8 (64): 4 steps t + 4 s + i, which is the order as stored
 *   block types (64 columns a unit for Q8_0, else 128): 16 s + 4 t + i, so that steps 2 j and 2 j + 1 are block j
 * and one
 *   scale serves all lanes of a step
 * q of a lane: Q8_0 byte 4 s + i. Nibble types: word j is block j; pair p = 2 (s % 2) + i / 2 of it has its even
 * column in the low half and its odd column in the high half, an integer at bits 4 p of the half, an E2M1 value
 * (bits s e e m) at
 *   p = 0: 15 8 7 6   p = 1: 12 5 4 3   p = 2: 9 2 1 0   p = 3: 14 13 11 10
 * h, fifth bits, one word a lane and unit: bit 4 j + p of the half; Q6_K, two words: word j / 2, bits 8 (j % 2) + 2
 * p. s, in the order of the columns: MXFP4 E8M0 a block; NVFP4 E4M3 for 16 columns; Q4_0, Q5_0, Q8_0 d; Q4_1, Q5_1
 * d, m; Q4_K, Q5_K d, dmin and the 12 packed bytes; Q6_K 16 int8 for each 256 columns, behind them all d. */
#ifndef HEARTH_CUDA_UNPACK_H
#define HEARTH_CUDA_UNPACK_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda_priv.h"

/* unit: columns; group: steps that share a scale, 0: no scale; natural: order as stored; min: w = d q + m with m !=
 * 0; split: elements need two bf16, high and low. */
template <int TYPE> struct cu_format {
    static constexpr bool f32 = TYPE == DT_F32, f16 = TYPE == DT_F16, bf16 = TYPE == DT_BF16, f8 = TYPE == DT_F8_E4M3;
    static constexpr bool natural = f32 || f16 || bf16 || f8;
    static constexpr int unit = f32 ? 16 : f16 || bf16 ? 32 : f8 || TYPE == DT_Q8_0 ? 64 : 128;
    static constexpr int steps = unit / 16;
    static constexpr int group = f32 || f16 || bf16 ? 0 : f8 ? 4 : TYPE == DT_NVFP4 || TYPE == DT_Q6_K ? 1 : 2;
    static constexpr bool min = TYPE == DT_Q4_1 || TYPE == DT_Q5_1 || TYPE == DT_Q4_K || TYPE == DT_Q5_K;
    static constexpr bool split = f32 || f16;
};

/* What one lane needs of one row and unit. */
struct cu_raw {
    uint4 q;
    uint32_t h[2];
    uint32_t s[4]; /* block scales as stored; F8: the float; NVFP4: s[2] is the row's float */
};

static __device__ __forceinline__ uint4 cu_stream16(const uint8_t *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
static __device__ __forceinline__ uint2 cu_read8(const uint8_t *p) { return __ldg((const uint2 *)(const void *)p); }
static __device__ __forceinline__ uint32_t cu_read4(const uint8_t *p)
{
    return __ldg((const uint32_t *)(const void *)p);
}

/* One row of a matrix: where its bits begin. d: Q6_K's d of the row. */
struct cu_row {
    const uint8_t *q, *h, *s, *d;
    const float *scale; /* of the row's first column; NULL: 1 */
    int scale_cols, scale_col0;
};

static __device__ __forceinline__ struct cu_row cu_row_of(const struct cu_mat &m, int row)
{
    struct cu_row r;
    r.q = m.q + (size_t)row * m.q_stride;
    r.h = m.h + (size_t)row * m.h_stride;
    r.s = m.s + (size_t)row * m.s_stride;
    r.d = r.s + m.cols / 256 * 16;
    r.scale = m.scale ? m.scale + (row + m.scale_row0) / m.scale_rows * m.scale_stride : NULL;
    r.scale_cols = m.scale_cols;
    r.scale_col0 = m.scale_col0;
    return r;
}

static __device__ __forceinline__ uint32_t cu_grid_scale(const struct cu_row &r, int col)
{
    return __float_as_uint(r.scale ? __ldg(r.scale + (col + r.scale_col0) / r.scale_cols) : 1.0f);
}

/* What lane t needs of unit u of a row. */
template <int TYPE>
static __device__ __forceinline__ void cu_load(struct cu_raw &r, const struct cu_row &w, int u, int t)
{
    r.q = cu_stream16(w.q + (u * 64 + t * 16));
    if constexpr (TYPE == DT_Q5_0 || TYPE == DT_Q5_1 || TYPE == DT_Q5_K) r.h[0] = cu_read4(w.h + (u * 16 + t * 4));
    if constexpr (TYPE == DT_Q6_K) {
        uint2 v = cu_read8(w.h + (u * 32 + t * 8));
        r.h[0] = v.x, r.h[1] = v.y;
    }
    if constexpr (TYPE == DT_F8_E4M3) r.s[0] = cu_grid_scale(w, u * 64);
    if constexpr (TYPE == DT_MXFP4 || TYPE == DT_Q8_0) r.s[0] = cu_read4(w.s + u * 4);
    if constexpr (TYPE == DT_NVFP4 || TYPE == DT_Q4_0 || TYPE == DT_Q5_0 || TYPE == DT_Q6_K) {
        uint2 v = cu_read8(w.s + u * 8);
        r.s[0] = v.x, r.s[1] = v.y;
    }
    if constexpr (TYPE == DT_NVFP4) r.s[2] = cu_grid_scale(w, 0);
    if constexpr (TYPE == DT_Q6_K) r.s[2] = __ldg((const uint16_t *)(const void *)(w.d + u / 2 * 2));
    if constexpr (TYPE == DT_Q4_1 || TYPE == DT_Q5_1) {
        uint4 v = __ldg((const uint4 *)(const void *)(w.s + u * 16));
        r.s[0] = v.x, r.s[1] = v.y, r.s[2] = v.z, r.s[3] = v.w;
    }
    if constexpr (TYPE == DT_Q4_K || TYPE == DT_Q5_K) {
        uint4 v = __ldg((const uint4 *)(const void *)(w.s + u / 2 * 16));
        const uint32_t low6 = 0x3F3F3F3F, low4 = 0x0F0F0F0F, top2 = 0x30303030;
        r.s[0] = v.x;
        r.s[1] = u & 1 ? (v.w & low4) | (v.y >> 2 & top2) : v.y & low6;
        r.s[2] = u & 1 ? (v.w >> 4 & low4) | (v.z >> 2 & top2) : v.z & low6;
    }
}

/* ------------------------------------------------------------------------------------------------ values */

static __device__ __forceinline__ uint32_t cu_bf16_sub(uint32_t a, uint32_t b)
{
    uint32_t d; /* a * 1 - b: exact for the small integers here */
    asm("{.reg .b32 one, neg; mov.b32 one, 0x3F803F80; xor.b32 neg, %2, 0x80008000; fma.rn.bf16x2 %0, %1, one, neg;}"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}
static __device__ __forceinline__ uint32_t cu_bf16_mul(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("{.reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
/* lo in the low half */
static __device__ __forceinline__ uint32_t cu_bf16_pack(float lo, float hi)
{
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
static __device__ __forceinline__ float cu_bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
static __device__ __forceinline__ float cu_bf16_hi(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
static __device__ __forceinline__ float cu_half(uint32_t bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}
static __device__ __forceinline__ float2 cu_e4m3x2(uint32_t two)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
    return __half22float2(*(__half2 *)&h);
}
static __device__ __forceinline__ float cu_e8m0(uint32_t b)
{
    return __uint_as_float(b == 0xFF ? 0x7FC00000u : b == 0 ? 0x00400000u : b << 23);
}
static __device__ __forceinline__ uint32_t cu_word(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
/* v moved by n bits to the left, to the right where n is negative; n is a constant */
static __device__ __forceinline__ uint32_t cu_move(uint32_t v, int n) { return n >= 0 ? v << n : v >> -n; }

/* Pair p of a word of E2M1 values, times 2^-126 */
static __device__ __forceinline__ uint32_t cu_e2m1_bits(uint32_t w, int p)
{
    if (p < 3) return cu_move(w, 3 * p) & 0x81C081C0u;
    return (w << 1 & 0x80008000u) | (w >> 4 & 0x00C000C0u) | (w >> 5 & 0x01000100u);
}

/* The two pairs of a step (elements 0, 1 and 2, 3) as bf16x2, before scales; exact, or the high part for split types,
 * whose low part goes to `low`. */
template <int TYPE>
static __device__ __forceinline__ void cu_expand(const struct cu_raw &r, int step, uint32_t out[2], uint32_t low[2])
{
    if constexpr (TYPE == DT_BF16) {
        out[0] = cu_word(r.q, 2 * step), out[1] = cu_word(r.q, 2 * step + 1);
    } else if constexpr (TYPE == DT_F32 || TYPE == DT_F16) {
        for (int i = 0; i < 2; i++) {
            float x, y;
            if constexpr (TYPE == DT_F32) {
                x = __uint_as_float(cu_word(r.q, 2 * i)), y = __uint_as_float(cu_word(r.q, 2 * i + 1));
            } else {
                uint32_t two = cu_word(r.q, 2 * step + i);
                x = cu_half(two & 0xFFFF), y = cu_half(two >> 16);
            }
            out[i] = cu_bf16_pack(x, y);
            /* An infinite or NaN element has no low part. */
            float dx = x - cu_bf16_lo(out[i]), dy = y - cu_bf16_hi(out[i]);
            low[i] = cu_bf16_pack(dx == dx ? dx : 0, dy == dy ? dy : 0);
        }
    } else if constexpr (TYPE == DT_F8_E4M3) {
        uint32_t w = cu_word(r.q, step);
        float2 a = cu_e4m3x2(w & 0xFFFF), b = cu_e4m3x2(w >> 16);
        out[0] = cu_bf16_pack(a.x, a.y), out[1] = cu_bf16_pack(b.x, b.y);
    } else if constexpr (TYPE == DT_Q8_0) {
        /* 128 + the low seven bits, minus 128 or 256: both are one or with 128.0 */
        uint32_t w = cu_word(r.q, step);
        for (int i = 0; i < 2; i++) {
            uint32_t v = __byte_perm(w, 0, i == 0 ? 0x4140 : 0x4342);
            out[i] = cu_bf16_sub((v & 0x007F007Fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u);
        }
    } else if constexpr (TYPE == DT_MXFP4 || TYPE == DT_NVFP4) {
        uint32_t w = cu_word(r.q, step / 2);
        for (int i = 0; i < 2; i++)
            out[i] = cu_bf16_mul(cu_e2m1_bits(w, 2 * (step % 2) + i), 0x7E807E80u); /* 2^126 */
    } else {
        /* 128 + q in the mantissa, minus 128 and what the type takes off */
        constexpr bool fifth = TYPE == DT_Q5_0 || TYPE == DT_Q5_1 || TYPE == DT_Q5_K;
        constexpr uint32_t off = TYPE == DT_Q4_0   ? 0x43084308u
                                 : TYPE == DT_Q5_0 ? 0x43104310u
                                 : TYPE == DT_Q6_K ? 0x43204320u
                                                   : 0x43004300u;
        int j = step / 2;
        uint32_t w = cu_word(r.q, j);
        for (int i = 0; i < 2; i++) {
            int p = 2 * (step % 2) + i;
            uint32_t v = (w >> 4 * p & 0x000F000Fu) | 0x43004300u;
            if constexpr (fifth) v |= cu_move(r.h[0], 4 - (4 * j + p)) & 0x00100010u;
            if constexpr (TYPE == DT_Q6_K) v |= cu_move(r.h[j / 2], 4 - (8 * (j % 2) + 2 * p)) & 0x00300030u;
            out[i] = cu_bf16_sub(v, off);
        }
    }
}

/* Group g of a unit (steps g * group ..): w = d * value + m. */
template <int TYPE> static __device__ __forceinline__ void cu_scale(const struct cu_raw &r, int g, float *d, float *m)
{
    *m = 0;
    if constexpr (TYPE == DT_F8_E4M3) *d = __uint_as_float(r.s[0]);
    else if constexpr (TYPE == DT_MXFP4) *d = cu_e8m0(r.s[0] >> 8 * g & 0xFF);
    else if constexpr (TYPE == DT_NVFP4) {
        float2 two = cu_e4m3x2(r.s[g / 4] >> 16 * (g / 2 % 2) & 0xFFFF);
        *d = __fmul_rn(g % 2 ? two.y : two.x, __uint_as_float(r.s[2]));
    } else if constexpr (TYPE == DT_Q4_0 || TYPE == DT_Q5_0 || TYPE == DT_Q8_0)
        *d = cu_half(r.s[g / 2] >> 16 * (g % 2) & 0xFFFF);
    else if constexpr (TYPE == DT_Q4_1 || TYPE == DT_Q5_1) *d = cu_half(r.s[g] & 0xFFFF), *m = cu_half(r.s[g] >> 16);
    else if constexpr (TYPE == DT_Q4_K || TYPE == DT_Q5_K) {
        *d = __fmul_rn(cu_half(r.s[0] & 0xFFFF), (float)(r.s[1] >> 8 * g & 0xFF));
        *m = -__fmul_rn(cu_half(r.s[0] >> 16), (float)(r.s[2] >> 8 * g & 0xFF));
    } else if constexpr (TYPE == DT_Q6_K) *d = __fmul_rn(cu_half(r.s[2]), (float)(int8_t)(r.s[g / 4] >> 8 * (g % 4)));
    else *d = 1;
}

/* Column within its unit of lane t, step s, element 0. */
template <int TYPE> static __device__ __forceinline__ int cu_column(int t, int s)
{
    return cu_format<TYPE>::natural ? 4 * cu_format<TYPE>::steps * t + 4 * s : 16 * s + 4 * t;
}

/* What lane t holds of a row's unit, as floats and exactly: out[4 s + i] is column u * unit + cu_column(t, s) + i. */
template <int TYPE>
static __device__ __forceinline__ void cu_lane_floats(const struct cu_mat &m, int row, int u, int t,
                                                      float out[4 * cu_format<TYPE>::steps])
{
    struct cu_raw r;
    cu_load<TYPE>(r, cu_row_of(m, row), u, t);
#pragma unroll
    for (int s = 0; s < cu_format<TYPE>::steps; s++) {
        if constexpr (TYPE == DT_F32) {
            for (int i = 0; i < 4; i++) out[4 * s + i] = __uint_as_float(cu_word(r.q, i));
        } else if constexpr (TYPE == DT_F16) {
            for (int i = 0; i < 4; i++)
                out[4 * s + i] = cu_half(cu_word(r.q, 2 * s + i / 2) >> 16 * (i % 2) & 0xFFFF);
        } else {
            constexpr int group = cu_format<TYPE>::group ? cu_format<TYPE>::group : cu_format<TYPE>::steps;
            uint32_t v[2], none[2];
            float d, min;
            cu_expand<TYPE>(r, s, v, none);
            cu_scale<TYPE>(r, s / group, &d, &min);
            for (int i = 0; i < 4; i++) {
                float x = __fmul_rn(d, i % 2 ? cu_bf16_hi(v[i / 2]) : cu_bf16_lo(v[i / 2]));
                out[4 * s + i] = cu_format<TYPE>::min ? __fadd_rn(x, min) : x;
            }
        }
    }
}

/* Calls f<TYPE>(args) for the type of a matrix: DISPATCH(type, launch, (args)). MXFP4 of GGUF lies as MXFP4 does. */
#define CU_DISPATCH(type, f, args)                                                                                   \
    switch (type) {                                                                                                  \
    case DT_F32: f<DT_F32> args; break;                                                                              \
    case DT_F16: f<DT_F16> args; break;                                                                              \
    case DT_BF16: f<DT_BF16> args; break;                                                                            \
    case DT_F8_E4M3: f<DT_F8_E4M3> args; break;                                                                      \
    case DT_MXFP4: f<DT_MXFP4> args; break;                                                                          \
    case DT_NVFP4: f<DT_NVFP4> args; break;                                                                          \
    case DT_Q4_0: f<DT_Q4_0> args; break;                                                                            \
    case DT_Q4_1: f<DT_Q4_1> args; break;                                                                            \
    case DT_Q5_0: f<DT_Q5_0> args; break;                                                                            \
    case DT_Q5_1: f<DT_Q5_1> args; break;                                                                            \
    case DT_Q8_0: f<DT_Q8_0> args; break;                                                                            \
    case DT_Q4_K: f<DT_Q4_K> args; break;                                                                            \
    case DT_Q5_K: f<DT_Q5_K> args; break;                                                                            \
    case DT_Q6_K: f<DT_Q6_K> args; break;                                                                            \
    default: break;                                                                                                  \
    }

#endif
