/* cpu_v16_avx512: sixteen floats and 64 bytes in AVX-512 with VNNI: 16 lanes are one register, and one
 * vpdpbusd takes four columns of 16 outputs.
 * The names are explained in cpu_linear_impl.h and cpu_vec_impl.h, which are written on top of them. */
#ifndef HEARTH_CPU_V16_AVX512_H
#define HEARTH_CPU_V16_AVX512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "cpu_priv.h"

#ifndef BF16_DOT
#define BF16_DOT 0
#endif
#define Q_FLIP 0x80 /* vpdpbusd: unsigned activations, signed weights */
enum { PANELS = 2, DOT_ROWS = 8, FMA_ROWS = 8, PEAK_CHAINS = 16, ZIPPED = 0, ATTEND_ROWS = 8, SIGNED = 1 };

typedef __m512 v16;
typedef __m512i b64;

static inline v16 v16_zero(void) { return _mm512_setzero_ps(); }
static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 v) { _mm512_storeu_ps(p, v); }
static inline v16 v16_set(float f) { return _mm512_set1_ps(f); }
static inline v16 v16_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
static inline v16 v16_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
static inline v16 v16_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
static inline v16 v16_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
/* NaN in x stays NaN. */
static inline v16 v16_min(v16 y, v16 x) { return _mm512_min_ps(y, x); }
static inline v16 v16_max(v16 y, v16 x) { return _mm512_max_ps(y, x); }
static inline v16 v16_round(v16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline v16 v16_pow2(v16 n)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline void v16_to_f16(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline __m128i load128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }
static inline __m256i load256(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)(const void *)p); }
static inline v16 v16_larger(v16 x, v16 y) { return _mm512_max_ps(x, y); }
static inline float v16_sum(v16 x) { return _mm512_reduce_add_ps(x); }
static inline float v16_top(v16 x) { return _mm512_reduce_max_ps(x); }
static inline void v16_to_i8(int8_t *p, v16 x, uint8_t flip)
{
    __m128i v = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_storeu_si128((__m128i *)(void *)p, _mm_xor_si128(v, _mm_set1_epi8((char)flip)));
}
static inline v16 v16_f16(const uint8_t *p) { return _mm512_cvtph_ps(load256(p)); }
static inline void split_pairs(__m512i v, v16 *even, v16 *odd)
{
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xFFFF0000)));
}
static inline void v16_bf16_pair(const uint8_t *p, v16 *even, v16 *odd) { split_pairs(_mm512_loadu_si512(p), even, odd); }
/* Exponent and mantissa move by four bits, the exponent's bias from 7 to 127 - 8; what has no exponent is looked up. */
static inline __m512i b64_e4m3_pairs(const uint8_t *p)
{
    static const uint16_t small[32] = {0x0000, 0x3700, 0x3780, 0x37C0, 0x3800, 0x3820, 0x3840, 0x3860}; /* k * 2^-17 */
    __m512i v = _mm512_cvtepi8_epi16(load256(p)), seven = _mm512_set1_epi16(0x7F);
    __m512i r = _mm512_and_si512(_mm512_slli_epi16(v, 4), _mm512_set1_epi16(0x07F0));
    r = _mm512_add_epi16(r, _mm512_set1_epi16((127 - 7 - 8) << 7));
    r = _mm512_mask_permutexvar_epi16(r, _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x78)), v, _mm512_loadu_si512(small));
    r = _mm512_mask_mov_epi16(r, _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, seven), seven), _mm512_set1_epi16(0x7FC0));
    return _mm512_ternarylogic_epi32(r, v, _mm512_set1_epi16((short)0x8000), 0xF8); /* r | (v & sign) */
}
static inline void v16_e4m3_pair(const uint8_t *p, v16 *even, v16 *odd) { split_pairs(b64_e4m3_pairs(p), even, odd); }
static inline v16 v16_u8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load128(p))); }
static inline v16 v16_i8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(p))); }
/* The seven bits below the sign become an F16's exponent and mantissa; NaN codes become F16's. */
static inline v16 v16_e4m3(const uint8_t *p)
{
    __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7), nan_code = _mm256_set1_epi16(0x3F80);
    __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(v, nan_code), nan_code);
    return _mm512_cvtph_ps(
        _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi16((short)0xBF80)), _mm256_srli_epi16(nan, 1)));
}
static inline v16 v16_e8m0(const uint8_t *p)
{
    __m512i c = _mm512_cvtepu8_epi32(load128(p)), bits = _mm512_slli_epi32(c, 23);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(c, _mm512_setzero_si512()),
                                 _mm512_set1_epi32(0x00400000));
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(255)),
                                 _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(bits);
}

/* The bits of the largest magnitude: not a finite number, if any is not. */
static inline uint32_t v16_top_bits(v16 x, v16 y)
{
    const __m512i low = _mm512_set1_epi32(0x7FFFFFFF);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x), low),
                                                    _mm512_and_si512(_mm512_castps_si512(y), low)));
}

static inline b64 b64_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline b64 b64_and(b64 v, char m) { return _mm512_and_si512(v, _mm512_set1_epi8(m)); }
static inline b64 b64_or(b64 x, b64 y) { return _mm512_or_si512(x, y); }
static inline b64 b64_shl(b64 v, int n) { return _mm512_sllv_epi16(v, _mm512_set1_epi16((short)n)); }
static inline b64 b64_shr(b64 v, int n) { return _mm512_srlv_epi16(v, _mm512_set1_epi16((short)n)); }
static inline b64 b64_sub(b64 v, char n) { return _mm512_sub_epi8(v, _mm512_set1_epi8(n)); }
static inline b64 b64_fp4(b64 v)
{
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v);
}

static inline b64 b64_mac(b64 sum, b64 u, b64 x) { return _mm512_dpbusd_epi32(sum, u, x); }

#if BF16_DOT
static inline void b64_store(uint8_t *p, b64 v) { _mm512_storeu_si512(p, v); }
static inline v16 v16_dot_bf16(v16 sum, b64 w, const uint16_t *x)
{
    int32_t two;
    memcpy(&two, x, sizeof two);
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(two));
}
static inline void v16_to_bf16(uint16_t *p, v16 x)
{
    __m256bh v = _mm512_cvtneps_pbh(x);
    memcpy(p, &v, sizeof v);
}
#endif

/* Activations stand 128 above their value: the sums begin with -128 times the sum of the weights. Weights of up to 6 bits
 * are added as bytes first: 8 of 5 bits and 4 of 6 bits stay in range, signed or (without a sign) not. */
FORCE_INLINE void dot_start(int bits, bool sign, const b64 *u, int steps, b64 *start)
{
    const b64 above = _mm512_set1_epi8((char)128), one = _mm512_set1_epi8(1);
    b64 sum = _mm512_setzero_si512(), bytes = u[0];
    for (int s = 1; s < steps && bits < 8; s++) bytes = _mm512_add_epi8(bytes, u[s]);
    if (bits < 8 && sign) sum = _mm512_dpbusd_epi32(sum, above, bytes);
    if (bits < 8 && !sign) sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, bytes, one), 7);
    for (int s = 0; s < steps && bits == 8; s++) sum = _mm512_dpbusd_epi32(sum, above, u[s]);
    *start = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
}

static inline void zip_tile(b64 *u) { (void)u; }

FORCE_INLINE void dot(int P, int R, int bits, bool zipped, const b64 *const *u, const b64 *start0, const b64 *start1, const int8_t *q,
                      int steps, v16 *out)
{
    b64 sum[DOT_ROWS * PANELS];
    const b64 *w[PANELS];
    (void)bits, (void)zipped;
    /* The weights are read again for each block of rows. A compiler that sees where they come from keeps all sixteen
     * vectors in registers, and the sums find no room there. */
    for (int p = 0; p < P; p++) {
        w[p] = u[p];
        __asm__("" : "+r"(w[p]));
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) sum[r * P + p] = p ? *start1 : *start0;
    UNROLL(8)
    for (int s = 0; s < steps; s++)
        for (int r = 0; r < R; r++) {
            int32_t four;
            memcpy(&four, q + r * TILE + 4 * s, 4);
            b64 x = _mm512_set1_epi32(four);
            for (int p = 0; p < P; p++) sum[r * P + p] = _mm512_dpbusd_epi32(sum[r * P + p], x, w[p][s]);
        }
    for (int i = 0; i < R * P; i++) out[i] = _mm512_cvtepi32_ps(sum[i]);
}

#endif
