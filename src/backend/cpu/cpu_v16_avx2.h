/* cpu_v16_avx2: sixteen floats and 64 bytes in AVX2, FMA and F16C: 16 lanes are two registers.
 * The names are explained in cpu_linear_impl.h and cpu_vec_impl.h, which are written on top of them. */
#ifndef HEARTH_CPU_V16_AVX2_H
#define HEARTH_CPU_V16_AVX2_H

#include <immintrin.h>

#include <stdint.h>
#include <string.h>

#include "cpu_priv.h"

#define BF16_DOT 0
#define Q_FLIP 0
enum { PANELS = 1, DOT_ROWS = 4, FMA_ROWS = 4, PEAK_CHAINS = 6, ZIPPED = 0, ATTEND_ROWS = 2, SIGNED = 0 };

typedef struct {
    __m256 a, b;
} v16;
typedef struct {
    __m256i a, b;
} b64;

static inline v16 v16_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v16_store(float *p, v16 v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
static inline v16 v16_set(float f) { return (v16){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
static inline v16 v16_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline v16 v16_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline v16 v16_div(v16 x, v16 y) { return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
/* NaN in x stays NaN. */
static inline v16 v16_min(v16 y, v16 x) { return (v16){_mm256_min_ps(y.a, x.a), _mm256_min_ps(y.b, x.b)}; }
static inline v16 v16_max(v16 y, v16 x) { return (v16){_mm256_max_ps(y.a, x.a), _mm256_max_ps(y.b, x.b)}; }
static inline v16 v16_round(v16 x)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (v16){_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)};
}
static inline __m256 pow2(__m256 n)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline v16 v16_pow2(v16 n) { return (v16){pow2(n.a), pow2(n.b)}; }
static inline void v16_to_f16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
static inline __m128i load128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }
static inline v16 v16_larger(v16 x, v16 y) { return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline float v16_sum(v16 x)
{
    __m256 y = _mm256_add_ps(x.a, x.b);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
static inline float v16_top(v16 x)
{
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
/* The bits of the largest magnitude: not a finite number, if any is not. */
static inline uint32_t v16_top_bits(v16 x, v16 y)
{
    const __m256 low = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    __m256i m = _mm256_max_epu32(_mm256_max_epu32(_mm256_castps_si256(_mm256_and_ps(x.a, low)), _mm256_castps_si256(_mm256_and_ps(x.b, low))),
                                 _mm256_max_epu32(_mm256_castps_si256(_mm256_and_ps(y.a, low)), _mm256_castps_si256(_mm256_and_ps(y.b, low))));
    __m128i z = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    z = _mm_max_epu32(z, _mm_srli_si128(z, 8));
    z = _mm_max_epu32(z, _mm_srli_si128(z, 4));
    return (uint32_t)_mm_cvtsi128_si32(z);
}
static inline void v16_to_i8(int8_t *p, v16 x, uint8_t flip)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); /* quads 0 2 1 3 */
    w = _mm256_permute4x64_epi64(w, 0xD8);
    __m128i v = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)(void *)p, _mm_xor_si128(v, _mm_set1_epi8((char)flip)));
}
static inline v16 v16_f16(const uint8_t *p)
{
    return (v16){_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))};
}
static inline void bf16_halves(const uint8_t *p, __m256 *even, __m256 *odd)
{
    __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xFFFF0000)));
}
static inline void v16_bf16_pair(const uint8_t *p, v16 *even, v16 *odd)
{
    bf16_halves(p, &even->a, &odd->a);
    bf16_halves(p + 32, &even->b, &odd->b);
}
static inline v16 v16_u8(const uint8_t *p)
{
    __m128i v = load128(p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)),
                 _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
static inline v16 v16_i8(const uint8_t *p)
{
    __m128i v = load128(p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
/* Codes in the upper bytes of 16 words: the seven bits below the sign become an F16's exponent and mantissa; NaN codes
 * become F16's. */
static inline v16 e4m3_words(__m256i v)
{
    const __m256i nan_code = _mm256_set1_epi16(0x3F80);
    v = _mm256_srai_epi16(v, 1);
    __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(v, nan_code), nan_code);
    __m256i h = _mm256_or_si256(_mm256_and_si256(v, _mm256_set1_epi16((short)0xBF80)), _mm256_srli_epi16(nan, 1));
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
static inline v16 v16_e4m3(const uint8_t *p) { return e4m3_words(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(p)), 8)); }
static inline void v16_e4m3_pair(const uint8_t *p, v16 *even, v16 *odd)
{
    __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)p);
    *even = e4m3_words(_mm256_slli_epi16(v, 8));
    *odd = e4m3_words(_mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)));
}
static inline __m256 exp2_bits(__m256i c)
{
    __m256i bits = _mm256_slli_epi32(c, 23), zero = _mm256_cmpeq_epi32(c, _mm256_setzero_si256());
    __m256i nan = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(255));
    bits = _mm256_or_si256(bits, _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi32(0x7FC00000))));
}
static inline v16 v16_e8m0(const uint8_t *p)
{
    __m128i v = load128(p);
    return (v16){exp2_bits(_mm256_cvtepu8_epi32(v)), exp2_bits(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}

static inline b64 b64_load(const uint8_t *p)
{
    return (b64){_mm256_loadu_si256((const __m256i *)(const void *)p),
                 _mm256_loadu_si256((const __m256i *)(const void *)(p + 32))};
}
static inline b64 b64_and(b64 v, char m)
{
    __m256i k = _mm256_set1_epi8(m);
    return (b64){_mm256_and_si256(v.a, k), _mm256_and_si256(v.b, k)};
}
static inline b64 b64_or(b64 x, b64 y) { return (b64){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
static inline b64 b64_shl(b64 v, int n) { return (b64){_mm256_slli_epi16(v.a, n), _mm256_slli_epi16(v.b, n)}; }
static inline b64 b64_shr(b64 v, int n) { return (b64){_mm256_srli_epi16(v.a, n), _mm256_srli_epi16(v.b, n)}; }
static inline b64 b64_sub(b64 v, char n)
{
    __m256i k = _mm256_set1_epi8(n);
    return (b64){_mm256_sub_epi8(v.a, k), _mm256_sub_epi8(v.b, k)};
}
static inline b64 b64_fp4(b64 v)
{
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return (b64){_mm256_shuffle_epi8(table, v.a), _mm256_shuffle_epi8(table, v.b)};
}

/* vpmaddubsw sums two products in 16 bits: with u below 2^bits as many steps are added before widening as cannot
 * overflow. 8-bit weights are signed: |w| * (x with w's sign). */
FORCE_INLINE __m256i dot4(int bits, __m256i u, __m256i x)
{
    return bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(u), _mm256_sign_epi8(x, u)) : _mm256_maddubs_epi16(u, x);
}

/* A value the compiler may not see through: it would turn the sums below into trees, and run out of registers. */
static inline void keep(__m256i *v) { __asm__("" : "+x"(*v)); }

static inline b64 b64_mac(b64 sum, b64 u, b64 x)
{
    __asm__ volatile("" : "+x"(u.a), "+x"(u.b)); /* products of constants would leave the loop */
    return (b64){_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(u.a, x.a)),
                 _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(u.b, x.b))};
}

FORCE_INLINE void dot_start(int bits, bool sign, const b64 *u, int steps, b64 *start)
{
    (void)bits, (void)sign, (void)u, (void)steps, (void)start;
}

static inline void zip_tile(b64 *u) { (void)u; }

FORCE_INLINE void dot(int P, int R, int bits, bool zipped, const b64 *const *panels, const b64 *start0, const b64 *start1, const int8_t *q,
                      int steps, v16 *out)
{
    const b64 *u = panels[0];
    (void)P, (void)zipped, (void)start0, (void)start1;
    const __m256i ones = _mm256_set1_epi16(1);
    const int safe = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1, run = safe < steps ? safe : steps;
    __m256i sum[DOT_ROWS][2];
    UNROLL(8)
    for (int s0 = 0; s0 < steps; s0 += run) {
        __m256i part[DOT_ROWS][2];
        UNROLL(8)
        for (int s = 0; s < run; s++)
            for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, q + r * TILE + 4 * (s0 + s), 4);
                __m256i x = _mm256_set1_epi32(four), a = dot4(bits, u[s0 + s].a, x), b = dot4(bits, u[s0 + s].b, x);
                part[r][0] = s ? _mm256_add_epi16(part[r][0], a) : a;
                part[r][1] = s ? _mm256_add_epi16(part[r][1], b) : b;
                keep(&part[r][0]);
                keep(&part[r][1]);
            }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) {
                __m256i wide = _mm256_madd_epi16(part[r][h], ones);
                sum[r][h] = s0 ? _mm256_add_epi32(sum[r][h], wide) : wide;
            }
    }
    for (int r = 0; r < R; r++) out[r] = (v16){_mm256_cvtepi32_ps(sum[r][0]), _mm256_cvtepi32_ps(sum[r][1])};
}

#endif
