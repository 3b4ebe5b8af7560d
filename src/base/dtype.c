/* dtype.c: the formats, decoded one row at a time by the definitions, element by element. */
#include "dtype.h"

#include <assert.h>
#include <math.h>
#include <string.h>

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

float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 0x1F, man = h & 0x3FF;
    if (exp == 0x1F) return float_of_bits(sign | 0x7F800000 | man << 13);
    if (exp == 0) return float_of_bits(sign | bits_of_float((float)man * 0x1p-24f)); /* zero and subnormals, exact */
    return float_of_bits(sign | (exp + 112) << 23 | man << 13);
}

uint16_t f32_to_f16(float f)
{
    uint32_t bits = bits_of_float(f), sign = (bits >> 16) & 0x8000, mag = bits & 0x7FFFFFFF;
    if (mag > 0x7F800000) return (uint16_t)(sign | 0x7E00 | ((mag >> 13) & 0x3FF)); /* NaN, kept quiet */
    if (mag >= 0x477FF000) return (uint16_t)(sign | 0x7C00);                         /* from 65520 up: infinity */
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
    if ((b & 0x7F) == 0x7F) return float_of_bits(sign | 0x7FC00000);
    if (exp == 0) return float_of_bits(sign | bits_of_float((float)man * 0x1p-9f));
    return float_of_bits(sign | (exp + 120) << 23 | man << 20);
}

float e5m2_to_f32(uint8_t b) { return f16_to_f32((uint16_t)(b << 8)); }

float e8m0_to_f32(uint8_t b)
{
    if (b == 0xFF) return float_of_bits(0x7FC00000);
    return float_of_bits(b == 0 ? 0x00400000 : (uint32_t)b << 23);
}

static const float e2m1_values[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
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
    uint32_t code = (rounded - 0x3C000000) >> 20;
    return (uint8_t)(sign | (code > 0x7E ? 0x7E : code));
}

/* ------------------------------------------------------------------------------------------------ sizes and views */

size_t dtype_row_bytes(enum dtype type, int64_t cols)
{
    const struct dtype_info *i = &dtype_infos[type];
    return (size_t)((cols + i->block - 1) / i->block) * (size_t)i->block_bytes;
}

size_t dmat_bytes(const struct dmat *m)
{
    size_t rows = (size_t)m->rows, bytes = rows * dtype_row_bytes(m->type, m->cols);
    int per = dtype_infos[m->type].bscale_block;
    if (per) bytes += rows * (size_t)((m->cols + per - 1) / per);
    if (m->scale) {
        int64_t grid_rows = (m->rows + m->scale_rows - 1) / m->scale_rows;
        int64_t grid_cols = (m->cols + m->scale_cols - 1) / m->scale_cols;
        bytes += (size_t)grid_rows * (size_t)grid_cols * sizeof(float);
    }
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

/* ------------------------------------------------------------------------------------------------ rows */

static uint16_t load16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static float load_f16(const uint8_t *p) { return f16_to_f32(load16(p)); }

/* A 32-block of nibbles with columns 0..15 low and 16..31 high: low + offset in [0, 15], fifth bit from bits. */
static int nibble(const uint8_t *qs, int j) { return j < 16 ? qs[j] & 0xF : qs[j - 16] >> 4; }

static void row_q4_0(const uint8_t *b, float *out)
{
    float d = load_f16(b);
    for (int j = 0; j < 32; j++) out[j] = d * (float)(nibble(b + 2, j) - 8);
}

static void row_q4_1(const uint8_t *b, float *out)
{
    float d = load_f16(b), m = load_f16(b + 2);
    for (int j = 0; j < 32; j++) out[j] = d * (float)nibble(b + 4, j) + m;
}

static void row_q5_0(const uint8_t *b, float *out)
{
    float d = load_f16(b);
    uint32_t high = load32(b + 2);
    for (int j = 0; j < 32; j++) out[j] = d * (float)((nibble(b + 6, j) | (int)((high >> j) & 1) << 4) - 16);
}

static void row_q5_1(const uint8_t *b, float *out)
{
    float d = load_f16(b), m = load_f16(b + 2);
    uint32_t high = load32(b + 4);
    for (int j = 0; j < 32; j++) out[j] = d * (float)(nibble(b + 8, j) | (int)((high >> j) & 1) << 4) + m;
}

static void row_q8_0(const uint8_t *b, float *out)
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

static void row_q4_k(const uint8_t *b, float *out)
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

static void row_q5_k(const uint8_t *b, float *out)
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

static void row_q6_k(const uint8_t *b, float *out)
{
    const uint8_t *ql = b, *qh = b + 128, *scales = b + 192;
    float d = load_f16(b + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, part = i % 128 / 32, l = i % 32;
        int low = ql[half * 64 + l + (part & 1 ? 32 : 0)];
        int q = (part < 2 ? low & 15 : low >> 4) | (qh[half * 32 + l] >> 2 * part & 3) << 4;
        out[i] = d * (float)(int8_t)scales[i / 16] * (float)(q - 32);
    }
}

static void row_mxfp4_gguf(const uint8_t *b, float *out)
{
    float d = e8m0_to_f32(b[0]);
    for (int j = 0; j < 32; j++) out[j] = d * e2m1_values[nibble(b + 1, j)];
}

static void blocks(const uint8_t *p, int64_t cols, enum dtype type, void (*one)(const uint8_t *, float *), float *out)
{
    const struct dtype_info *i = &dtype_infos[type];
    for (int64_t c = 0; c < cols; c += i->block, p += i->block_bytes) one(p, out + c);
}

static float scale_at(const struct dmat *m, int64_t r, int64_t c)
{
    if (!m->scale) return 1;
    return m->scale[(r + m->scale_row0) / m->scale_rows * m->scale_stride + (c + m->scale_col0) / m->scale_cols];
}

void dmat_row(const struct dmat *m, int64_t r, float *out)
{
    const uint8_t *p = m->data + (size_t)r * m->row_stride;
    const uint8_t *bs = m->bscale ? m->bscale + (size_t)r * m->bscale_stride : NULL;
    int64_t n = m->cols;
    switch (m->type) {
    case DT_F32:
        memcpy(out, p, (size_t)n * sizeof *out);
        break;
    case DT_F16:
        for (int64_t c = 0; c < n; c++) out[c] = f16_to_f32(load16(p + 2 * c));
        break;
    case DT_BF16:
        for (int64_t c = 0; c < n; c++) out[c] = bf16_to_f32(load16(p + 2 * c));
        break;
    case DT_F8_E4M3:
        for (int64_t c = 0; c < n; c++) out[c] = e4m3_to_f32(p[c]) * scale_at(m, r, c);
        break;
    case DT_MXFP4:
        for (int64_t c = 0; c < n; c++) out[c] = e2m1_values[p[c / 2] >> 4 * (c & 1) & 15] * e8m0_to_f32(bs[c / 32]);
        break;
    case DT_NVFP4:
        for (int64_t c = 0; c < n; c++)
            out[c] = e2m1_values[p[c / 2] >> 4 * (c & 1) & 15] * (e4m3_to_f32(bs[c / 16]) * scale_at(m, r, c));
        break;
    case DT_Q4_0: blocks(p, n, m->type, row_q4_0, out); break;
    case DT_Q4_1: blocks(p, n, m->type, row_q4_1, out); break;
    case DT_Q5_0: blocks(p, n, m->type, row_q5_0, out); break;
    case DT_Q5_1: blocks(p, n, m->type, row_q5_1, out); break;
    case DT_Q8_0: blocks(p, n, m->type, row_q8_0, out); break;
    case DT_Q4_K: blocks(p, n, m->type, row_q4_k, out); break;
    case DT_Q5_K: blocks(p, n, m->type, row_q5_k, out); break;
    case DT_Q6_K: blocks(p, n, m->type, row_q6_k, out); break;
    case DT_MXFP4_GGUF: blocks(p, n, m->type, row_mxfp4_gguf, out); break;
    case DT_NONE:
    case DT_COUNT: assert(!"a matrix without a type"); break;
    }
}
