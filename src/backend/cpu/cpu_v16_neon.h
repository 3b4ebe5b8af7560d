/* cpu_v16_neon: sixteen floats and 64 bytes in Armv8.2 with dot products and F16: 16 lanes are four registers.
 * The names are explained in cpu_linear_impl.h and cpu_vec_impl.h, which are written on top of them. */
#ifndef HEARTH_CPU_V16_NEON_H
#define HEARTH_CPU_V16_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "cpu_priv.h"

#ifndef ARM_MATMUL /* the products of 2 by 8 with 8 by 2 bytes, and bf16 dots, of Armv8.6 */
#define ARM_MATMUL 0
#endif
#define BF16_DOT ARM_MATMUL
#define Q_FLIP 0
enum { PANELS = 1, DOT_ROWS = 4, ZIPPED = ARM_MATMUL, FMA_ROWS = 4, PEAK_CHAINS = 4, ATTEND_ROWS = 2, SIGNED = 1 };

typedef struct {
    float32x4_t v[4];
} v16;
typedef uint8x16x4_t b64;

static inline v16 v16_set(float f)
{
    float32x4_t v = vdupq_n_f32(f);
    return (v16){{v, v, v, v}};
}
static inline v16 v16_zero(void) { return v16_set(0); }
static inline v16 v16_load(const float *p)
{
    return (v16){{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
static inline void v16_store(float *p, v16 x)
{
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
static inline v16 v16_mul(v16 x, v16 y)
{
    for (int i = 0; i < 4; i++) x.v[i] = vmulq_f32(x.v[i], y.v[i]);
    return x;
}
static inline v16 v16_fma(v16 x, v16 y, v16 z)
{
    for (int i = 0; i < 4; i++) z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
    return z;
}
static inline v16 v16_add(v16 x, v16 y)
{
    for (int i = 0; i < 4; i++) x.v[i] = vaddq_f32(x.v[i], y.v[i]);
    return x;
}
static inline v16 v16_div(v16 x, v16 y)
{
    for (int i = 0; i < 4; i++) x.v[i] = vdivq_f32(x.v[i], y.v[i]);
    return x;
}
static inline v16 v16_min(v16 y, v16 x)
{
    for (int i = 0; i < 4; i++) x.v[i] = vminq_f32(y.v[i], x.v[i]);
    return x;
}
static inline v16 v16_max(v16 y, v16 x)
{
    for (int i = 0; i < 4; i++) x.v[i] = vmaxq_f32(y.v[i], x.v[i]);
    return x;
}
static inline v16 v16_round(v16 x)
{
    for (int i = 0; i < 4; i++) x.v[i] = vrndnq_f32(x.v[i]);
    return x;
}
static inline v16 v16_pow2(v16 n)
{
    for (int i = 0; i < 4; i++)
        n.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
    return n;
}
static inline void v16_to_f16(uint16_t *p, v16 x)
{
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
static inline v16 from_halves(uint16x8_t lo, uint16x8_t hi)
{
    float16x8_t a = vreinterpretq_f16_u16(lo), b = vreinterpretq_f16_u16(hi);
    return (v16){
        {vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}
static inline uint16x8_t load_u16(const uint8_t *p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }
static inline v16 v16_larger(v16 x, v16 y)
{
    for (int i = 0; i < 4; i++) x.v[i] = vmaxnmq_f32(x.v[i], y.v[i]);
    return x;
}
static inline float v16_sum(v16 x)
{
    float32x4_t y = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));
    return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
}
static inline float v16_top(v16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3]))); }
/* The bits of the largest magnitude: not a finite number, if any is not. */
static inline uint32_t v16_top_bits(v16 x, v16 y)
{
    const uint32x4_t low = vdupq_n_u32(0x7FFFFFFF);
    uint32x4_t top = vdupq_n_u32(0);
    for (int i = 0; i < 4; i++) {
        top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(x.v[i]), low));
        top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(y.v[i]), low));
    }
    return vmaxvq_u32(top);
}
static inline void v16_to_i8(int8_t *p, v16 x, uint8_t flip)
{
    int16x8_t lo = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[0])), vqmovn_s32(vcvtnq_s32_f32(x.v[1])));
    int16x8_t hi = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[2])), vqmovn_s32(vcvtnq_s32_f32(x.v[3])));
    vst1q_s8(p, veorq_s8(vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi)), vdupq_n_s8((int8_t)flip)));
}
static inline v16 v16_f16(const uint8_t *p) { return from_halves(load_u16(p), load_u16(p + 16)); }
static inline void v16_bf16_pair(const uint8_t *p, v16 *even, v16 *odd)
{
    for (int i = 0; i < 4; i++) {
        uint32x4_t v = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
        even->v[i] = vreinterpretq_f32_u32(vshlq_n_u32(v, 16));
        odd->v[i] = vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xFFFF0000)));
    }
}
static inline v16 from_words(uint16x8_t lo, uint16x8_t hi)
{
    return (v16){{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
                  vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))}};
}
static inline v16 v16_u8(const uint8_t *p)
{
    uint8x16_t b = vld1q_u8(p);
    return from_words(vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b));
}
static inline v16 v16_i8(const uint8_t *p)
{
    int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_high_s8(b);
    return (v16){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
                  vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))}};
}
/* Codes in the upper bytes of 8 words: the seven bits below the sign become an F16's exponent and mantissa; NaN codes
 * become F16's. */
static inline uint16x8_t e4m3_half(uint16x8_t words)
{
    uint16x8_t v = vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(words), 1)), nan_code = vdupq_n_u16(0x3F80);
    uint16x8_t nan = vceqq_u16(vandq_u16(v, nan_code), nan_code);
    return vorrq_u16(vandq_u16(v, vdupq_n_u16(0xBF80)), vshrq_n_u16(nan, 1));
}
static inline v16 v16_e4m3(const uint8_t *p)
{
    uint8x16_t b = vld1q_u8(p);
    return from_halves(e4m3_half(vshll_n_u8(vget_low_u8(b), 8)), e4m3_half(vshll_high_n_u8(b, 8)));
}
static inline void v16_e4m3_pair(const uint8_t *p, v16 *even, v16 *odd)
{
    const uint16x8_t upper = vdupq_n_u16(0xFF00);
    uint16x8_t a = load_u16(p), b = load_u16(p + 16);
    *even = from_halves(e4m3_half(vshlq_n_u16(a, 8)), e4m3_half(vshlq_n_u16(b, 8)));
    *odd = from_halves(e4m3_half(vandq_u16(a, upper)), e4m3_half(vandq_u16(b, upper)));
}
static inline float32x4_t exp2_bits(uint32x4_t c)
{
    uint32x4_t bits = vshlq_n_u32(c, 23);
    bits = vbslq_u32(vceqq_u32(c, vdupq_n_u32(0)), vdupq_n_u32(0x00400000), bits);
    bits = vbslq_u32(vceqq_u32(c, vdupq_n_u32(255)), vdupq_n_u32(0x7FC00000), bits);
    return vreinterpretq_f32_u32(bits);
}
static inline v16 v16_e8m0(const uint8_t *p)
{
    uint8x16_t b = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_high_u8(b);
    return (v16){{exp2_bits(vmovl_u16(vget_low_u16(lo))), exp2_bits(vmovl_high_u16(lo)),
                  exp2_bits(vmovl_u16(vget_low_u16(hi))), exp2_bits(vmovl_high_u16(hi))}};
}

static inline b64 b64_load(const uint8_t *p) { return vld1q_u8_x4(p); }
static inline b64 b64_and(b64 x, uint8_t m)
{
    for (int i = 0; i < 4; i++) x.val[i] = vandq_u8(x.val[i], vdupq_n_u8(m));
    return x;
}
static inline b64 b64_or(b64 x, b64 y)
{
    for (int i = 0; i < 4; i++) x.val[i] = vorrq_u8(x.val[i], y.val[i]);
    return x;
}
static inline b64 b64_shl(b64 x, int n)
{
    for (int i = 0; i < 4; i++) x.val[i] = vshlq_u8(x.val[i], vdupq_n_s8((int8_t)n));
    return x;
}
static inline b64 b64_shr(b64 x, int n) { return b64_shl(x, -n); }
static inline b64 b64_sub(b64 x, uint8_t n)
{
    for (int i = 0; i < 4; i++) x.val[i] = vsubq_u8(x.val[i], vdupq_n_u8(n));
    return x;
}
static inline b64 b64_fp4(b64 x)
{
    static const int8_t codes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(codes));
    for (int i = 0; i < 4; i++) x.val[i] = vqtbl1q_u8(table, x.val[i]);
    return x;
}

static inline b64 b64_mac(b64 sum, b64 u, b64 x)
{
    for (int i = 0; i < 4; i++)
        sum.val[i] = vreinterpretq_u8_s32(vdotq_s32(vreinterpretq_s32_u8(sum.val[i]), vreinterpretq_s8_u8(u.val[i]),
                                                    vreinterpretq_s8_u8(x.val[i])));
    return sum;
}

FORCE_INLINE void dot_start(int bits, bool sign, const b64 *u, int steps, b64 *start)
{
    (void)bits, (void)sign, (void)u, (void)steps, (void)start;
}

/* Lane s of the 16 bytes x is step s. */
#define DOT_STEP(s)                                                                                                  \
    for (int i = 0; i < 4; i++) sum[r][i] = vdotq_laneq_s32(sum[r][i], vreinterpretq_s8_u8(u[s0 + s].val[i]), x, s)

FORCE_INLINE void dot_steps(int R, const b64 *u, const int8_t *q, int steps, v16 *out)
{
    int32x4_t sum[DOT_ROWS][4];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) sum[r][i] = vdupq_n_s32(0);
    UNROLL(2)
    for (int s0 = 0; s0 < steps; s0 += 4)
        for (int r = 0; r < R; r++) {
            int8x16_t x = vld1q_s8(q + r * TILE + 4 * s0);
            DOT_STEP(0);
            DOT_STEP(1);
            DOT_STEP(2);
            DOT_STEP(3);
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) out[r].v[i] = vcvtq_f32_s32(sum[r][i]);
}
#undef DOT_STEP

#if ARM_MATMUL
/* Two steps of four lanes become twice two lanes of eight columns. */
static inline void zip_tile(b64 *u)
{
    for (int s = 0; s < 8; s += 2)
        for (int i = 0; i < 4; i++) {
            uint32x4_t a = vreinterpretq_u32_u8(u[s].val[i]), b = vreinterpretq_u32_u8(u[s + 1].val[i]);
            u[s].val[i] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
            u[s + 1].val[i] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
        }
}

static inline int8x16_t two_rows(const int8_t *a, const int8_t *b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); }

/* sum[j] of rows 2 j and 2 j + 1: [quad of lanes][half] of {row 0: lanes 0 1, row 1: lanes 0 1}. One row goes twice. */
FORCE_INLINE void dot_zipped(int R, const b64 *u, const int8_t *q, int steps, v16 *out)
{
    int32x4_t sum[DOT_ROWS / 2][4][2];
    const int second = R > 1 ? TILE : 0, pairs = (R + 1) / 2;
    for (int j = 0; j < pairs; j++)
        for (int i = 0; i < 4; i++) sum[j][i][0] = sum[j][i][1] = vdupq_n_s32(0);
    UNROLL(4)
    for (int s = 0; s < steps; s += 2)
        for (int j = 0; j < pairs; j++) {
            const int8_t *x = q + 2 * j * TILE + 4 * s;
            int8x16_t rows = two_rows(x, x + second);
            for (int i = 0; i < 4; i++) {
                sum[j][i][0] = vmmlaq_s32(sum[j][i][0], rows, vreinterpretq_s8_u8(u[s].val[i]));
                sum[j][i][1] = vmmlaq_s32(sum[j][i][1], rows, vreinterpretq_s8_u8(u[s + 1].val[i]));
            }
        }
    for (int j = 0; j < pairs; j++)
        for (int i = 0; i < 4; i++) {
            int64x2_t a = vreinterpretq_s64_s32(sum[j][i][0]), b = vreinterpretq_s64_s32(sum[j][i][1]);
            out[2 * j].v[i] = vcvtq_f32_s32(vreinterpretq_s32_s64(vzip1q_s64(a, b)));
            if (R > 1) out[2 * j + 1].v[i] = vcvtq_f32_s32(vreinterpretq_s32_s64(vzip2q_s64(a, b)));
        }
}

static inline b64 b64_e4m3_pairs(const uint8_t *p)
{
    v16 even, odd;
    b64 r;
    v16_e4m3_pair(p, &even, &odd); /* exact in bf16: the lower halves are zero */
    for (int i = 0; i < 4; i++)
        r.val[i] = vreinterpretq_u8_u32(
            vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(even.v[i]), 16), vreinterpretq_u32_f32(odd.v[i])));
    return r;
}
static inline void b64_store(uint8_t *p, b64 v) { vst1q_u8_x4(p, v); }
static inline v16 v16_dot_bf16(v16 sum, b64 w, const uint16_t *x)
{
    uint32_t two;
    memcpy(&two, x, sizeof two);
    bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(two));
    for (int i = 0; i < 4; i++) sum.v[i] = vbfdotq_f32(sum.v[i], vreinterpretq_bf16_u8(w.val[i]), both);
    return sum;
}
static inline void v16_to_bf16(uint16_t *p, v16 x)
{
    for (int i = 0; i < 4; i += 2) {
        bfloat16x8_t v = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.v[i]), x.v[i + 1]);
        vst1q_u16(p + 4 * i, vreinterpretq_u16_bf16(v));
    }
}
#else
static inline void zip_tile(b64 *u) { (void)u; }
FORCE_INLINE void dot_zipped(int R, const b64 *u, const int8_t *q, int steps, v16 *out) { dot_steps(R, u, q, steps, out); }
#endif

FORCE_INLINE void dot(int P, int R, int bits, bool zipped, const b64 *const *panels, const b64 *start0, const b64 *start1,
                      const int8_t *q, int steps, v16 *out)
{
    (void)P, (void)bits, (void)start0, (void)start1;
    if (zipped) dot_zipped(R, panels[0], q, steps, out);
    else dot_steps(R, panels[0], q, steps, out);
}

#endif
