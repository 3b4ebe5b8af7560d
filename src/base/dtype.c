/* dtype.c: the formats, decoded a row at a time by their definitions, each in a function of its own. The products are
 * taken in the order in which the formats state them and the compiler may not fuse them, so that the same bytes give
 * the same bits on every machine. It refuses nothing: sizes and types are checked where a file is read. The loops are
 * kept without branches and divisions because a loader may convert gigabytes through them; anything faster than that
 * is a kernel's business. */
#include "dtype.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* clang-format off */
const struct dtype_info dtype_infos[DT_COUNT] = {
    [DT_NONE] = {"none", 1, 1, 0},
    [DT_F32] = {"f32", 1, 4, 0},
    [DT_F16] = {"f16", 1, 2, 0},
    [DT_BF16] = {"bf16", 1, 2, 0},
    [DT_F8_E4M3] = {"fp8", 1, 1, 0},
    [DT_MXFP4] = {"mxfp4", 32, 16, 32},
    [DT_NVFP4] = {"nvfp4", 16, 8, 16},
    [DT_Q4_0] = {"q4_0", 32, 18, 0},
    [DT_Q4_1] = {"q4_1", 32, 20, 0},
    [DT_Q5_0] = {"q5_0", 32, 22, 0},
    [DT_Q5_1] = {"q5_1", 32, 24, 0},
    [DT_Q8_0] = {"q8_0", 32, 34, 0},
    [DT_Q4_K] = {"q4_k", 256, 144, 0},
    [DT_Q5_K] = {"q5_k", 256, 176, 0},
    [DT_Q6_K] = {"q6_k", 256, 210, 0},
    [DT_MXFP4_GGUF] = {"mxfp4", 32, 17, 0},
};
/* clang-format on */

/* ------------------------------------------------------------------------------------------------ scalars */

static float float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* A small float is an integer times a power of two, for subnormals too: whole * 2^exp, exact. Unlike a choice between
 * normal and subnormal numbers this has no branch, so that the loops over rows become vector code. */
static uint32_t bits_of_product(uint32_t whole, uint32_t exp_plus_127)
{
    return bits_of_float((float)(int32_t)whole * float_of_bits(exp_plus_127 << 23));
}

float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 0x1F, man = h & 0x3FF;
    uint32_t implied = exp != 0, bits = bits_of_product(implied << 10 | man, exp + !implied + 102);
    return float_of_bits(sign | bits | (exp == 0x1F ? 0x7F800000 : 0)); /* infinity, or NaN with its payload */
}

uint16_t f32_to_f16(float f)
{
    uint32_t bits = bits_of_float(f), sign = (bits >> 16) & 0x8000, mag = bits & 0x7FFFFFFF;
    if (mag > 0x7F800000) return (uint16_t)(sign | 0x7E00 | ((mag >> 13) & 0x3FF)); /* NaN, kept quiet */
    if (mag >= 0x477FF000) return (uint16_t)(sign | 0x7C00);                        /* from 65520 up: infinity */
    if (mag < 0x38800000) { /* below 2^-14: a multiple of 2^-24, rounded to nearest even */
        float scaled = float_of_bits(mag) * 0x1p24f;
        return (uint16_t)(sign | (uint32_t)lrintf(scaled));
    }
    uint32_t rounded = mag + 0xFFF + ((mag >> 13) & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

float bf16_to_f32(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

uint16_t f32_to_bf16(float f)
{
    uint32_t bits = bits_of_float(f);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float e4m3_to_f32(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, exp = (b >> 3) & 0xF, man = b & 7;
    uint32_t implied = exp != 0, bits = bits_of_product(implied << 3 | man, exp + !implied + 117);
    return float_of_bits(sign | bits | ((b & 0x7F) == 0x7F ? 0x7FC00000 : 0));
}

float e5m2_to_f32(uint8_t b) { return f16_to_f32((uint16_t)(b << 8)); }

float e8m0_to_f32(uint8_t b)
{
    if (b == 0xFF) return float_of_bits(0x7FC00000);
    return float_of_bits(b == 0 ? 0x00400000 : (uint32_t)b << 23);
}

static const float e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float e2m1_to_f32(uint8_t nibble) { return e2m1_values[nibble & 0xF]; }

uint8_t f32_to_e4m3(float f)
{
    uint32_t bits = bits_of_float(f), sign = (bits >> 24) & 0x80, mag = bits & 0x7FFFFFFF;
    if (mag > 0x7F800000) return (uint8_t)(sign | 0x7F);
    if (mag >= 0x43E00000) return (uint8_t)(sign | 0x7E); /* 448 and beyond */
    if (mag < 0x3C800000)                                 /* below 2^-6: multiples of 2^-9 */
        return (uint8_t)(sign | (uint32_t)lrintf(float_of_bits(mag) * 0x1p9f));
    uint32_t rounded = mag + 0x7FFFF + ((mag >> 20) & 1);
    return (uint8_t)(sign | (rounded - 0x3C000000) >> 20);
}

/* ------------------------------------------------------------------------------------------------ sizes and views */

size_t dtype_row_bytes(enum dtype type, int64_t cols)
{
    const struct dtype_info *i = &dtype_infos[type];
    size_t blocks = (size_t)(cols / i->block) + (cols % i->block != 0), bytes;
    return cols >= 0 && size_mul(blocks, (size_t)i->block_bytes, &bytes) ? bytes : SIZE_MAX;
}

/* How many pieces of `per` elements the n elements from `first` on touch. */
static size_t pieces(int64_t first, int64_t n, int64_t per)
{
    return n > 0 ? (size_t)((first + n - 1) / per - first / per + 1) : 0;
}

size_t dmat_bytes(const struct dmat *m)
{
    size_t rows = (size_t)m->rows, bytes = rows * dtype_row_bytes(m->type, m->cols);
    int per = dtype_infos[m->type].bscale_block;
    if (per) bytes += rows * pieces(0, m->cols, per);
    if (m->scale)
        bytes += pieces(m->scale_row0, m->rows, m->scale_rows) * pieces(m->scale_col0, m->cols, m->scale_cols) *
                 sizeof *m->scale;
    return bytes;
}

struct dmat dmat_rows(const struct dmat *m, int64_t r0, int64_t r1)
{
    struct dmat v = *m;
    assert(r0 >= 0 && r0 <= r1 && r1 <= m->rows);
    v.rows = r1 - r0;
    v.data += (size_t)r0 * m->row_stride;
    if (v.bscale) v.bscale += (size_t)r0 * m->bscale_stride;
    v.scale_row0 += r0;
    return v;
}

struct dmat dmat_cols(const struct dmat *m, int64_t c0, int64_t c1)
{
    const struct dtype_info *i = &dtype_infos[m->type];
    struct dmat v = *m;
    assert(c0 >= 0 && c0 <= c1 && c1 <= m->cols);
    assert(c0 % i->block == 0 && (c1 % i->block == 0 || c1 == m->cols));
    v.cols = c1 - c0;
    v.data += dtype_row_bytes(m->type, c0);
    if (v.bscale) {
        assert(c0 % i->bscale_block == 0);
        v.bscale += c0 / i->bscale_block;
    }
    v.scale_col0 += c0;
    return v;
}

/* ------------------------------------------------------------------------------------------------ blocks of GGUF */

static uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static float load_f16(const uint8_t *p) { return f16_to_f32(load16(p)); }

/* In a block of 32 the low nibbles are columns 0..15, the high ones 16..31; bit c of `fifth` belongs to column c. */
static void block_q4_0(const uint8_t *b, float *out)
{
    const uint8_t *qs = b + 2;
    float d = load_f16(b);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)((qs[j] & 15) - 8);
        out[j + 16] = d * (float)((qs[j] >> 4) - 8);
    }
}

static void block_q4_1(const uint8_t *b, float *out)
{
    const uint8_t *qs = b + 4;
    float d = load_f16(b), m = load_f16(b + 2);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)(qs[j] & 15) + m;
        out[j + 16] = d * (float)(qs[j] >> 4) + m;
    }
}

static void block_q5_0(const uint8_t *b, float *out)
{
    const uint8_t *qs = b + 6;
    float d = load_f16(b);
    uint32_t fifth = load32(b + 2);
    for (int j = 0; j < 16; j++) {
        int low = (qs[j] & 15) | (int)(fifth >> j & 1) << 4, high = qs[j] >> 4 | (int)(fifth >> (j + 16) & 1) << 4;
        out[j] = d * (float)(low - 16);
        out[j + 16] = d * (float)(high - 16);
    }
}

static void block_q5_1(const uint8_t *b, float *out)
{
    const uint8_t *qs = b + 8;
    float d = load_f16(b), m = load_f16(b + 2);
    uint32_t fifth = load32(b + 4);
    for (int j = 0; j < 16; j++) {
        int low = (qs[j] & 15) | (int)(fifth >> j & 1) << 4, high = qs[j] >> 4 | (int)(fifth >> (j + 16) & 1) << 4;
        out[j] = d * (float)low + m;
        out[j + 16] = d * (float)high + m;
    }
}

static void block_q8_0(const uint8_t *b, float *out)
{
    float d = load_f16(b);
    for (int j = 0; j < 32; j++) out[j] = d * (float)(int8_t)b[2 + j];
}

/* The 6-bit scale and minimum of group g of a Q4_K or Q5_K block, from its 12 packed bytes. */
static void k_scale(const uint8_t *s, int g, int *scale, int *min)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        *min = s[g + 4] >> 4 | (s[g] >> 6) << 4;
    }
}

static void block_q4_k(const uint8_t *b, float *out)
{
    float d = load_f16(b), dmin = load_f16(b + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *qs = b + 16 + (g / 2) * 32;
        int scale, min;
        k_scale(b + 4, g, &scale, &min);
        for (int l = 0; l < 32; l++)
            out[g * 32 + l] = d * (float)scale * (float)(g & 1 ? qs[l] >> 4 : qs[l] & 15) - dmin * (float)min;
    }
}

static void block_q5_k(const uint8_t *b, float *out)
{
    float d = load_f16(b), dmin = load_f16(b + 2);
    for (int g = 0; g < 8; g++) {
        const uint8_t *qh = b + 16, *qs = b + 48 + (g / 2) * 32;
        int scale, min;
        k_scale(b + 4, g, &scale, &min);
        for (int l = 0; l < 32; l++) {
            int q = (g & 1 ? qs[l] >> 4 : qs[l] & 15) + 16 * (qh[l] >> g & 1);
            out[g * 32 + l] = d * (float)scale * (float)q - dmin * (float)min;
        }
    }
}

static void block_q6_k(const uint8_t *b, float *out)
{
    const uint8_t *scales = b + 192;
    float d = load_f16(b + 208);
    for (int i = 0; i < 256; i += 16) { /* 16 columns share a scale; half a block has four parts of 32 columns */
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        const uint8_t *ql = b + half * 64 + (part & 1) * 32 + l, *qh = b + 128 + half * 32 + l;
        float scale = d * (float)(int8_t)scales[i / 16];
        for (int j = 0; j < 16; j++) {
            int q = (ql[j] >> part / 2 * 4 & 15) | (qh[j] >> part * 2 & 3) << 4;
            out[i + j] = scale * (float)(q - 32);
        }
    }
}

static void block_mxfp4_gguf(const uint8_t *b, float *out)
{
    const uint8_t *qs = b + 1;
    float d = e8m0_to_f32(b[0]);
    for (int j = 0; j < 16; j++) {
        out[j] = e2m1_values[qs[j] & 15] * d;
        out[j + 16] = e2m1_values[qs[j] >> 4] * d;
    }
}

static void row_of_blocks(const struct dmat *m, const uint8_t *p, void (*block)(const uint8_t *, float *), float *out)
{
    const struct dtype_info *i = &dtype_infos[m->type];
    for (int64_t c = 0; c < m->cols; c += i->block, p += i->block_bytes) block(p, out + c);
}

/* ------------------------------------------------------------------------------------------------ rows */

/* The scale of element (r, c), and in *end the first column to the right of it that may have another. */
static float scale_at(const struct dmat *m, int64_t r, int64_t c, int64_t *end)
{
    *end = m->cols;
    if (!m->scale) return 1;
    int64_t at = (c + m->scale_col0) / m->scale_cols, next = (at + 1) * m->scale_cols - m->scale_col0;
    if (next < *end) *end = next;
    return m->scale[(r + m->scale_row0) / m->scale_rows * m->scale_stride + at];
}

static void row_f16(const uint8_t *p, int64_t cols, float *out)
{
    for (int64_t c = 0; c < cols; c++) out[c] = f16_to_f32(load16(p + 2 * c));
}

static void row_bf16(const uint8_t *p, int64_t cols, float *out)
{
    for (int64_t c = 0; c < cols; c++) out[c] = bf16_to_f32(load16(p + 2 * c));
}

static void row_f8_e4m3(const struct dmat *m, int64_t r, const uint8_t *p, float *out)
{
    for (int64_t c = 0, end; c < m->cols;) {
        float scale = scale_at(m, r, c, &end);
        for (; c < end; c++) out[c] = e4m3_to_f32(p[c]) * scale;
    }
}

static void row_mxfp4(const uint8_t *p, const uint8_t *bscale, int64_t cols, float *out)
{
    for (int64_t c = 0; c < cols; c += 32, p += 16, bscale++) {
        float d = e8m0_to_f32(*bscale);
        for (int j = 0; j < 16; j++) {
            out[c + 2 * j] = e2m1_values[p[j] & 15] * d;
            out[c + 2 * j + 1] = e2m1_values[p[j] >> 4] * d;
        }
    }
}

static void row_nvfp4(const struct dmat *m, int64_t r, const uint8_t *p, const uint8_t *bscale, float *out)
{
    float scale = 1;
    for (int64_t c = 0, end = 0; c < m->cols; c += 16, p += 8, bscale++) {
        if (c >= end) {
            scale = scale_at(m, r, c, &end);
            assert(end % 16 == 0); /* a scale's border is a block's border */
        }
        float d = e4m3_to_f32(*bscale) * scale;
        for (int j = 0; j < 8; j++) {
            out[c + 2 * j] = e2m1_values[p[j] & 15] * d;
            out[c + 2 * j + 1] = e2m1_values[p[j] >> 4] * d;
        }
    }
}

void dmat_row(const struct dmat *m, int64_t r, float *out)
{
    const uint8_t *p = m->data + (size_t)r * m->row_stride;
    const uint8_t *bscale = m->bscale ? m->bscale + (size_t)r * m->bscale_stride : NULL;
    assert(m->cols % dtype_infos[m->type].block == 0);
    switch (m->type) {
    case DT_F32: memcpy(out, p, (size_t)m->cols * sizeof *out); break;
    case DT_F16: row_f16(p, m->cols, out); break;
    case DT_BF16: row_bf16(p, m->cols, out); break;
    case DT_F8_E4M3: row_f8_e4m3(m, r, p, out); break;
    case DT_MXFP4: row_mxfp4(p, bscale, m->cols, out); break;
    case DT_NVFP4: row_nvfp4(m, r, p, bscale, out); break;
    case DT_Q4_0: row_of_blocks(m, p, block_q4_0, out); break;
    case DT_Q4_1: row_of_blocks(m, p, block_q4_1, out); break;
    case DT_Q5_0: row_of_blocks(m, p, block_q5_0, out); break;
    case DT_Q5_1: row_of_blocks(m, p, block_q5_1, out); break;
    case DT_Q8_0: row_of_blocks(m, p, block_q8_0, out); break;
    case DT_Q4_K: row_of_blocks(m, p, block_q4_k, out); break;
    case DT_Q5_K: row_of_blocks(m, p, block_q5_k, out); break;
    case DT_Q6_K: row_of_blocks(m, p, block_q6_k, out); break;
    case DT_MXFP4_GGUF: row_of_blocks(m, p, block_mxfp4_gguf, out); break;
    case DT_NONE:
    case DT_COUNT: assert(false && "a matrix without a type"); break;
    }
}
