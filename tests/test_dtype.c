/* test_dtype: every format against published vectors, bit for bit; the small floats over all of their codes and at
 * every border of rounding; views against the rows that they are cut from. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dtype.h"

static json_t *load_json(const char *name)
{
    char path[600];
    json_error_t bad;
    snprintf(path, sizeof path, "%s/dtype_%s.json", TEST_DATA, name);
    json_t *root = json_load_file(path, 0, &bad);
    if (!root) fail_msg("%s: %s", path, bad.text);
    return root;
}

/* The list of that name, which must have n items (0: any number but none). */
static json_t *list_of(const json_t *o, const char *key, size_t n)
{
    json_t *list = json_object_get(o, key);
    if (json_array_size(list) == 0 || (n && json_array_size(list) != n))
        fail_msg("list %s has %zu items, expected %zu", key, json_array_size(list), n);
    return list;
}

static double number_at(const json_t *list, size_t i)
{
    const json_t *v = json_array_get(list, i);
    if (!json_is_number(v)) fail_msg("item %zu is no number", i);
    return json_number_value(v);
}

static uint32_t hex_at(const json_t *list, size_t i)
{
    unsigned v = 0;
    const char *s = json_string_value(json_array_get(list, i));
    if (!s || sscanf(s, "%x", &v) != 1) fail_msg("item %zu is no hexadecimal number", i);
    return v;
}

static size_t bytes_of(const json_t *o, const char *key, uint8_t *out, size_t max)
{
    const char *s = json_string_value(json_object_get(o, key));
    size_t n = s ? strlen(s) / 2 : 0;
    if (n == 0 || n > max) fail_msg("%s has %zu bytes, expected 1 to %zu", key, n, max);
    for (size_t i = 0; i < n; i++) {
        unsigned v = 0;
        assert_int_equal(sscanf(s + 2 * i, "%2x", &v), 1);
        out[i] = (uint8_t)v;
    }
    return n;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The same bits, or both not a number: payloads carry no meaning. */
static void check_bits(const char *what, size_t i, float got, uint32_t want)
{
    if (isnan(got) && isnan(float_of(want))) return;
    if (bits_of(got) != want)
        fail_msg("%s %zu is %.9g (%08x), expected %.9g (%08x)", what, i, (double)got, bits_of(got),
                 (double)float_of(want), want);
}

/* Vectors list doubles that are exact in float32; anything else would hide an error in the comparison. */
static void check_row(const char *what, const struct dmat *m, const json_t *want)
{
    static float out[1024];
    assert_int_equal(m->cols, json_array_size(want));
    dmat_row(m, 0, out);
    for (size_t i = 0; i < json_array_size(want); i++) {
        double w = number_at(want, i);
        if ((double)(float)w != w) fail_msg("%s: expected value %zu, %.17g, is no float32", what, i, w);
        check_bits(what, i, out[i], bits_of((float)w));
    }
}

/* ------------------------------------------------------------------------------------------------ scalars */

/* Sign, exponent, fraction by the textbook. special: the greatest exponent holds infinity and NaN as in IEEE 754. */
static double textbook(uint32_t code, int exp_bits, int man_bits, int bias, bool special)
{
    uint32_t man = code & ((1u << man_bits) - 1), exp = code >> man_bits & ((1u << exp_bits) - 1);
    double sign = code >> (exp_bits + man_bits) & 1 ? -1 : 1;
    if (special && exp == (1u << exp_bits) - 1) return man ? (double)NAN : sign * (double)INFINITY;
    return sign * ldexp((double)(exp ? man | 1u << man_bits : man), (int)(exp ? exp : 1) - bias - man_bits);
}

static void test_codes_of_one_byte(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        float (*decode)(uint8_t);
    } formats[] = {{"fp8_e4m3fn", e4m3_to_f32}, {"fp8_e5m2", e5m2_to_f32}, {"e8m0", e8m0_to_f32}};
    for (size_t f = 0; f < COUNT_OF(formats); f++) {
        json_t *root = load_json(formats[f].file), *want = list_of(root, "f32_bits_hex", 256);
        for (size_t i = 0; i < 256; i++)
            check_bits(formats[f].file, i, formats[f].decode((uint8_t)i), hex_at(want, i));
        json_decref(root);
    }
    json_t *root = load_json("fp4_e2m1"), *want = list_of(root, "values", 16);
    for (size_t i = 0; i < 16; i++)
        check_bits("e2m1", i, e2m1_to_f32((uint8_t)i), bits_of((float)number_at(want, i)));
    json_decref(root);

    for (uint32_t i = 0; i < 256; i++) {
        bool nan = (i & 0x7F) == 0x7F;
        check_bits("e4m3", i, e4m3_to_f32((uint8_t)i), bits_of(nan ? NAN : (float)textbook(i, 4, 3, 7, false)));
        check_bits("e5m2", i, e5m2_to_f32((uint8_t)i), bits_of((float)textbook(i, 5, 2, 15, true)));
    }
    assert_int_equal(bits_of(e8m0_to_f32(0)), 0x00400000);
    assert_true(isnan(e8m0_to_f32(255)));
}

static void test_listed_halves(void **state)
{
    (void)state;
    json_t *root = load_json("f16_bf16");
    for (int brain = 0; brain < 2; brain++) {
        const char *name = brain ? "bf16" : "f16";
        json_t *o = json_object_get(root, name), *codes = list_of(o, "bits_hex", 14);
        json_t *values = list_of(o, "values", 14);
        for (size_t i = 0; i < 14; i++) {
            uint16_t code = (uint16_t)hex_at(codes, i);
            const char *word = json_string_value(json_array_get(values, i));
            double want = word ? strtod(word, NULL) : number_at(values, i);
            check_bits(name, i, brain ? bf16_to_f32(code) : f16_to_f32(code), bits_of((float)want));
            if (!word) assert_int_equal(brain ? f32_to_bf16((float)want) : f32_to_f16((float)want), code);
        }
    }
    json_t *o = json_object_get(root, "f32_to_bf16_round_nearest_even");
    json_t *from = list_of(o, "f32_bits_hex", 9), *to = list_of(o, "bf16_bits_hex", 9);
    for (size_t i = 0; i < 9; i++) assert_int_equal(f32_to_bf16(float_of(hex_at(from, i))), hex_at(to, i));
    json_decref(root);
}

static void test_all_halves(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t code = (uint16_t)i;
        float f = f16_to_f32(code), b = bf16_to_f32(code);
        check_bits("f16", i, f, bits_of((float)textbook(i, 5, 10, 15, true)));
        check_bits("bf16", i, b, i << 16);
        if (isnan(f)) {
            uint16_t back = f32_to_f16(f);
            if ((back & 0x7C00) != 0x7C00 || (back & 0x3FF) == 0 || (back ^ code) >> 15)
                fail_msg("f16 NaN %04x came back as %04x", i, back);
        } else if (f32_to_f16(f) != code) fail_msg("f16 %04x came back as %04x", i, f32_to_f16(f));
        if (isnan(b)) {
            uint16_t back = f32_to_bf16(b);
            if ((back & 0x7F80) != 0x7F80 || (back & 0x7F) == 0 || (back ^ code) >> 15)
                fail_msg("bf16 NaN %04x came back as %04x", i, back);
        } else if (f32_to_bf16(b) != code) fail_msg("bf16 %04x came back as %04x", i, f32_to_bf16(b));
    }
    /* A NaN whose payload lies only in the bits that are cut off must not become an infinity. */
    assert_int_equal(f32_to_f16(float_of(0x7F800001)) & 0x7E00, 0x7E00);
    assert_int_equal(f32_to_bf16(float_of(0xFF800001)), 0xFFC0);
    assert_int_equal(f32_to_bf16(float_of(0x7FFFFFFF)) & 0x7FC0, 0x7FC0);
}

/* Between each code and the next the middle goes to the even one, a hair less down, a hair more up; of both signs. */
static void check_rounding(const char *what, uint32_t last, uint32_t sign_bit, double (*value)(uint32_t),
                           uint32_t (*round)(float))
{
    for (uint32_t code = 0; code < last; code++) {
        double middle = (value(code) + value(code + 1)) / 2;
        assert_true((double)(float)middle == middle);
        const struct {
            float x;
            uint32_t want;
        } cases[] = {{nextafterf((float)middle, 0), code},
                     {(float)middle, code + (code & 1)},
                     {nextafterf((float)middle, INFINITY), code + 1},
                     {(float)value(code), code}};
        for (size_t i = 0; i < COUNT_OF(cases); i++) {
            uint32_t up = round(cases[i].x), down = round(-cases[i].x);
            if (up != cases[i].want || down != (cases[i].want | sign_bit))
                fail_msg("%s of +-%.9g is %x and %x, expected %x", what, (double)cases[i].x, up, down, cases[i].want);
        }
    }
}

static double value_f16(uint32_t c) { return textbook(c, 5, 10, 15, false); }
static double value_bf16(uint32_t c) { return textbook(c, 8, 7, 127, false); }
static double value_e4m3(uint32_t c) { return textbook(c, 4, 3, 7, false); }
static uint32_t round_f16(float f) { return f32_to_f16(f); }
static uint32_t round_bf16(float f) { return f32_to_bf16(f); }
static uint32_t round_e4m3(float f) { return f32_to_e4m3(f); }

static void test_rounding(void **state)
{
    (void)state;
    /* f16's last step is 65504 to 65536, where infinity begins to be nearer; bf16's is cut where float32 ends. */
    check_rounding("f16", 0x7C00, 0x8000, value_f16, round_f16);
    check_rounding("bf16", 0x7F7F, 0x8000, value_bf16, round_bf16);
    check_rounding("e4m3", 0x7E, 0x80, value_e4m3, round_e4m3);

    assert_int_equal(f32_to_f16(INFINITY), 0x7C00);
    assert_int_equal(f32_to_f16(-1e38f), 0xFC00);
    assert_int_equal(f32_to_bf16(float_of(0x7F7FFFFF)), 0x7F80);
    assert_int_equal(f32_to_bf16(-INFINITY), 0xFF80);
    assert_int_equal(f32_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(f32_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(f32_to_e4m3(NAN) & 0x7F, 0x7F);
    assert_int_equal(f32_to_e4m3(float_of(0xFF800001)) & 0x7F, 0x7F);
    assert_int_equal(f32_to_e4m3(float_of(1)), 0);
    for (uint32_t i = 0; i < 256; i++)
        if ((i & 0x7F) != 0x7F) assert_int_equal(f32_to_e4m3(e4m3_to_f32((uint8_t)i)), i);
}

static void test_listed_rounding(void **state)
{
    (void)state;
    json_t *root = load_json("quantize"), *o = json_object_get(root, "e4m3fn");
    json_t *x = list_of(o, "x", 24), *code = list_of(o, "code", 24);
    for (size_t i = 0; i < 24; i++) assert_int_equal(f32_to_e4m3((float)number_at(x, i)), number_at(code, i));
    o = json_object_get(root, "static_fp8_activation");
    x = list_of(o, "x", 4), code = list_of(o, "codes", 4);
    float scale = (float)json_number_value(json_object_get(o, "input_scale"));
    for (size_t i = 0; i < 4; i++) assert_int_equal(f32_to_e4m3((float)number_at(x, i) / scale), number_at(code, i));
    json_decref(root);
}

/* ------------------------------------------------------------------------------------------------ formats */

/* The list for Q6_K writes every zero as 0.0. By the definition, and in what ggml computes from this very block, the
 * zeros of a negative scale, and those of a zero scale times a negative number, are -0.0. They, and they alone, get
 * the sign of their product before bits are compared. */
static void give_zeros_their_sign(const uint8_t *block, json_t *expected)
{
    float d = f16_to_f32((uint16_t)(block[208] | block[209] << 8));
    int changed = 0;
    for (size_t i = 0; i < 256; i++) {
        size_t half = i / 128, part = i % 128 / 32, l = i % 32;
        int low = block[half * 64 + l + part % 2 * 32], high = block[128 + half * 32 + l] >> 2 * part & 3;
        int q = ((part < 2 ? low & 15 : low >> 4) | high << 4) - 32;
        if (number_at(expected, i) != 0 || !signbit(d * (float)(int8_t)block[192 + i / 16] * (float)q)) continue;
        json_array_set_new(expected, i, json_real(-0.0));
        changed++;
    }
    assert_int_equal(changed, 17);
}

static void test_blocks_of_gguf(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        enum dtype type;
    } formats[] = {{"gguf_q4_0", DT_Q4_0}, {"gguf_q4_1", DT_Q4_1}, {"gguf_q5_0", DT_Q5_0}, {"gguf_q5_1", DT_Q5_1},
                   {"gguf_q8_0", DT_Q8_0}, {"gguf_q4_k", DT_Q4_K}, {"gguf_q5_k", DT_Q5_K}, {"gguf_q6_k", DT_Q6_K}};
    for (size_t f = 0; f < COUNT_OF(formats); f++) {
        const struct dtype_info *info = &dtype_infos[formats[f].type];
        json_t *root = load_json(formats[f].file);
        uint8_t block[256];
        size_t n = bytes_of(root, "block_hex", block, sizeof block);
        assert_int_equal(n, info->block_bytes);
        assert_int_equal(json_integer_value(json_object_get(root, "values_per_block")), info->block);
        assert_string_equal(formats[f].file + strlen("gguf_"), info->name);
        struct dmat m = {.type = formats[f].type, .rows = 1, .cols = info->block, .data = block, .row_stride = n};
        json_t *expected = list_of(root, "expected", (size_t)info->block);
        if (formats[f].type == DT_Q6_K) give_zeros_their_sign(block, expected);
        check_row(formats[f].file, &m, expected);
        json_decref(root);
    }
}

static void test_mxfp4(void **state)
{
    (void)state;
    json_t *root = load_json("mxfp4"), *c;
    size_t i;
    json_array_foreach(list_of(root, "cases", 7), i, c)
    {
        uint8_t nibbles[16], scale = (uint8_t)json_integer_value(json_object_get(c, "scale_byte")), block[17];
        assert_int_equal(bytes_of(c, "blocks_hex", nibbles, sizeof nibbles), 16);
        assert_int_equal(bytes_of(c, "gguf_block_hex", block, sizeof block), 17);
        struct dmat plain = {.type = DT_MXFP4, .rows = 1, .cols = 32, .data = nibbles, .bscale = &scale};
        struct dmat gguf = {.type = DT_MXFP4_GGUF, .rows = 1, .cols = 32, .data = block};
        check_row("mxfp4", &plain, json_object_get(c, "hf_order"));
        check_row("mxfp4 of gguf", &gguf, json_object_get(c, "gguf_order_same_bytes"));
    }
    /* The same values in the other order of nibbles. */
    json_t *both = json_object_get(root, "repack_hf_to_gguf");
    uint8_t plain[16], gguf[17] = {127}, scale = 127;
    float a[32], b[32];
    bytes_of(both, "hf_blocks_hex", plain, 16);
    bytes_of(both, "gguf_qs_hex", gguf + 1, 16);
    dmat_row(&(struct dmat){.type = DT_MXFP4, .rows = 1, .cols = 32, .data = plain, .bscale = &scale}, 0, a);
    dmat_row(&(struct dmat){.type = DT_MXFP4_GGUF, .rows = 1, .cols = 32, .data = gguf}, 0, b);
    assert_memory_equal(a, b, sizeof a);
    json_decref(root);
}

static void test_nvfp4(void **state)
{
    (void)state;
    json_t *root = load_json("nvfp4"), *o = json_object_get(root, "row_K32");
    uint8_t nibbles[16], bscale[2];
    float scale = (float)json_number_value(json_object_get(o, "weight_scale_2"));
    assert_int_equal(bytes_of(o, "weight_hex", nibbles, sizeof nibbles), 16);
    assert_int_equal(bytes_of(o, "weight_scale_hex", bscale, sizeof bscale), 2);
    struct dmat m = {.type = DT_NVFP4,
                     .rows = 1,
                     .cols = 32,
                     .data = nibbles,
                     .bscale = bscale,
                     .scale = &scale,
                     .scale_rows = 1,
                     .scale_cols = 32,
                     .scale_stride = 1};
    check_row("nvfp4", &m, json_object_get(o, "expected_f32"));
    json_decref(root);
}

enum { BLOCK_ROWS = 200, BLOCK_COLS = 300 };

static void test_fp8_of_blocks(void **state)
{
    (void)state;
    static uint8_t bytes[BLOCK_ROWS * BLOCK_COLS];
    static float out[BLOCK_COLS], view_out[BLOCK_COLS];
    float scale[6];
    json_t *root = load_json("fp8_block128"), *grid = list_of(root, "weight_scale_inv", 2), *point;
    for (size_t i = 0; i < 6; i++) scale[i] = (float)number_at(json_array_get(grid, i / 3), i % 3);
    assert_int_equal(json_integer_value(json_object_get(root, "N")), BLOCK_ROWS);
    assert_int_equal(json_integer_value(json_object_get(root, "K")), BLOCK_COLS);
    for (int n = 0; n < BLOCK_ROWS; n++)
        for (int k = 0; k < BLOCK_COLS; k++) {
            int b = (n * 31 + k * 17) % 256;
            bytes[n * BLOCK_COLS + k] = (uint8_t)(b % 128 == 127 ? 0 : b);
        }
    struct dmat m = {.type = DT_F8_E4M3,
                     .rows = BLOCK_ROWS,
                     .cols = BLOCK_COLS,
                     .data = bytes,
                     .row_stride = BLOCK_COLS,
                     .scale = scale,
                     .scale_rows = 128,
                     .scale_cols = 128,
                     .scale_stride = 3};
    size_t i;
    json_array_foreach(list_of(root, "points", 10), i, point)
    {
        int64_t n = json_integer_value(json_object_get(point, "n")),
                k = json_integer_value(json_object_get(point, "k"));
        assert_int_equal(bytes[n * BLOCK_COLS + k], json_integer_value(json_object_get(point, "byte")));
        dmat_row(&m, n, out);
        check_bits("point", i, out[k], bits_of((float)json_number_value(json_object_get(point, "value"))));
    }
    for (int64_t n = 0; n < BLOCK_ROWS; n++) {
        dmat_row(&m, n, out);
        for (int64_t k = 0; k < BLOCK_COLS; k++)
            check_bits("element", (size_t)(n * BLOCK_COLS + k), out[k],
                       bits_of((float)textbook(bytes[n * BLOCK_COLS + k], 4, 3, 7, false) *
                               scale[n / 128 * 3 + k / 128]));
    }
    /* Any rectangle, cut in either order, is the same as in the whole. */
    static const int64_t cuts[] = {0, 1, 63, 64, 127, 128, 129, 199};
    for (size_t a = 0; a < COUNT_OF(cuts); a++)
        for (size_t b = 0; b < COUNT_OF(cuts); b++) {
            struct dmat rows = dmat_rows(&m, cuts[a], BLOCK_ROWS),
                        v = dmat_cols(&rows, cuts[b], BLOCK_COLS - (int64_t)b);
            struct dmat cols = dmat_cols(&m, cuts[b], BLOCK_COLS - (int64_t)b),
                        w = dmat_rows(&cols, cuts[a], BLOCK_ROWS);
            for (int64_t n = 0; n < v.rows; n++) {
                dmat_row(&m, n + cuts[a], out);
                dmat_row(&v, n, view_out);
                assert_memory_equal(out + cuts[b], view_out, (size_t)v.cols * sizeof *out);
                dmat_row(&w, n, view_out);
                assert_memory_equal(out + cuts[b], view_out, (size_t)v.cols * sizeof *out);
            }
        }
    json_decref(root);
}

static void test_scales_by_tensor_and_by_row(void **state)
{
    (void)state;
    static const uint8_t bytes[8] = {0x38, 0x40, 0xB8, 0x7F, 0x38, 0x40, 0xB8, 0x01}; /* 1 2 -1 NaN, 1 2 -1 2^-9 */
    static const float scale[2] = {3, 5};
    struct dmat m = {.type = DT_F8_E4M3, .rows = 2, .cols = 4, .data = bytes, .row_stride = 4};
    float out[4];
    dmat_row(&m, 0, out);
    assert_true(out[0] == 1 && out[1] == 2 && out[2] == -1 && isnan(out[3]));
    m.scale = scale, m.scale_rows = 2, m.scale_cols = 4, m.scale_stride = 1;
    dmat_row(&m, 1, out);
    assert_true(out[0] == 3 && out[1] == 6 && out[2] == -3 && out[3] == 3 * 0x1p-9f);
    m.scale_rows = 1;
    dmat_row(&m, 1, out);
    assert_true(out[0] == 5 && out[1] == 10 && out[2] == -5 && out[3] == 5 * 0x1p-9f);
    struct dmat last = dmat_rows(&m, 1, 2);
    dmat_row(&last, 0, out);
    assert_true(out[0] == 5 && out[3] == 5 * 0x1p-9f);
}

/* ------------------------------------------------------------------------------------------------ views, sizes */

enum { VIEW_ROWS = 6, VIEW_BLOCKS = 6, VIEW_COLS = VIEW_BLOCKS * 256 };

static uint8_t view_data[VIEW_ROWS * VIEW_COLS * 4], view_bscale[VIEW_ROWS * VIEW_COLS / 16];
static float view_scale[VIEW_ROWS * VIEW_COLS];

/* Six blocks a row (of 32 columns where the format has none) and six rows, of bytes that repeat nowhere. */
static struct dmat view_matrix(enum dtype type)
{
    const struct dtype_info *i = &dtype_infos[type];
    uint32_t x = 12345;
    for (size_t k = 0; k < sizeof view_data; k++) view_data[k] = (uint8_t)((x = x * 1664525 + 1013904223) >> 24);
    for (size_t k = 0; k < sizeof view_bscale; k++) view_bscale[k] = (uint8_t)(20 + k % 97);
    for (size_t k = 0; k < COUNT_OF(view_scale); k++) view_scale[k] = 1 + (float)k / 64;
    int64_t cols = (i->block > 1 ? i->block : 32) * VIEW_BLOCKS;
    struct dmat m = {.type = type, .rows = VIEW_ROWS, .cols = cols, .data = view_data};
    m.row_stride = dtype_row_bytes(type, cols);
    if (i->bscale_block) {
        m.bscale = view_bscale;
        m.bscale_stride = (size_t)(cols / i->bscale_block);
    }
    if (type == DT_F8_E4M3 || type == DT_NVFP4) {
        m.scale = view_scale;
        m.scale_rows = 4;
        m.scale_cols = 48;
        m.scale_stride = cols / 48;
    }
    return m;
}

static void test_views_are_the_rows_they_are_cut_from(void **state)
{
    (void)state;
    static float whole[VIEW_COLS], part[VIEW_COLS + 2];
    for (enum dtype type = DT_F32; type < DT_COUNT; type++) {
        struct dmat m = view_matrix(type);
        int64_t step = dtype_infos[type].block > 1 ? dtype_infos[type].block : 16;
        for (int64_t r0 = 0; r0 < VIEW_ROWS; r0++)
            for (int64_t c0 = 0; c0 <= m.cols; c0 += step)
                for (int64_t c1 = c0; c1 <= m.cols; c1 += step) {
                    struct dmat rows = dmat_rows(&m, r0, VIEW_ROWS), v = dmat_cols(&rows, c0, c1);
                    assert_true(v.rows == VIEW_ROWS - r0 && v.cols == c1 - c0 && v.row_stride == m.row_stride);
                    dmat_row(&m, VIEW_ROWS - 1, whole);
                    part[0] = part[1 + v.cols] = 77; /* nothing is written beside the row */
                    dmat_row(&v, v.rows - 1, part + 1);
                    if (memcmp(whole + c0, part + 1, (size_t)v.cols * sizeof *part))
                        fail_msg("%s: columns %d to %d differ from the whole row", dtype_infos[type].name, (int)c0,
                                 (int)c1);
                    assert_true(part[0] == 77 && part[1 + v.cols] == 77);
                }
        /* A view of a view, and rows that interleave: every other one, from the second. */
        struct dmat outer = dmat_cols(&m, step, m.cols), inner = dmat_cols(&outer, step, outer.cols - step);
        dmat_row(&m, 3, whole);
        dmat_row(&inner, 3, part);
        assert_memory_equal(whole + 2 * step, part, (size_t)inner.cols * sizeof *part);
        struct dmat odd = m;
        odd.rows = VIEW_ROWS / 2, odd.data += m.row_stride, odd.row_stride *= 2;
        odd.bscale = m.bscale ? m.bscale + m.bscale_stride : NULL, odd.bscale_stride *= 2;
        odd.scale = NULL, m.scale = NULL;
        dmat_row(&m, 5, whole);
        dmat_row(&odd, 2, part);
        assert_memory_equal(whole, part, (size_t)m.cols * sizeof *part);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        enum dtype type;
        size_t bytes; /* of 512 columns */
    } rows[] = {{DT_F32, 2048},  {DT_F16, 1024}, {DT_BF16, 1024}, {DT_F8_E4M3, 512}, {DT_MXFP4, 256},
                {DT_NVFP4, 256}, {DT_Q4_0, 288}, {DT_Q4_1, 320},  {DT_Q5_0, 352},    {DT_Q5_1, 384},
                {DT_Q8_0, 544},  {DT_Q4_K, 288}, {DT_Q5_K, 352},  {DT_Q6_K, 420},    {DT_MXFP4_GGUF, 272}};
    assert_int_equal(COUNT_OF(rows), DT_COUNT - 1);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        assert_int_equal(dtype_row_bytes(rows[i].type, 512), rows[i].bytes);
        assert_int_equal(dtype_row_bytes(rows[i].type, 0), 0);
        assert_non_null(dtype_infos[rows[i].type].name);
    }
    assert_int_equal(dtype_row_bytes(DT_Q4_0, 33), 36); /* a begun block is a whole one */
    assert_int_equal(dtype_row_bytes(DT_F32, INT64_MAX), SIZE_MAX);
    assert_int_equal(dtype_row_bytes(DT_F32, -1), SIZE_MAX);
    assert_int_equal(dtype_row_bytes(DT_Q8_0, -1), SIZE_MAX);
    assert_true(dtype_row_bytes(DT_Q8_0, INT64_MAX) == ((size_t)INT64_MAX / 32 + 1) * 34);

    struct dmat m = view_matrix(DT_MXFP4);
    assert_int_equal(dmat_bytes(&m), VIEW_ROWS * (192 / 2 + 192 / 32));
    m = view_matrix(DT_NVFP4); /* 6 rows of 96 columns, scales for 4 rows and 48 columns */
    assert_int_equal(dmat_bytes(&m), VIEW_ROWS * (96 / 2 + 96 / 16) + 2 * 2 * 4);
    struct dmat v = dmat_rows(&m, 3, 5); /* both sides of the border of row 4 */
    assert_int_equal(dmat_bytes(&v), 2 * (96 / 2 + 96 / 16) + 2 * 2 * 4);
    v = dmat_cols(&m, 48, 96);
    assert_int_equal(dmat_bytes(&v), VIEW_ROWS * (48 / 2 + 48 / 16) + 2 * 1 * 4);
    v = dmat_rows(&m, 2, 2);
    assert_int_equal(dmat_bytes(&v), 0);
}

static void cut_off_border(int64_t c0, int64_t c1)
{
    struct dmat m = view_matrix(DT_Q4_0), v = dmat_cols(&m, c0, c1);
    (void)v;
}

/* Whether the process that does it ends by assertion. */
static bool ends_by_assertion(int64_t c0, int64_t c1)
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL); /* not cmocka's */
        setrlimit(RLIMIT_CORE, &(struct rlimit){0});
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        cut_off_border(c0, c1);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_blocks_are_never_cut(void **state)
{
    (void)state;
    assert_false(ends_by_assertion(32, 64));
    assert_true(ends_by_assertion(16, 64));
    assert_true(ends_by_assertion(32, 48));
    assert_true(ends_by_assertion(32, 1024));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes_of_one_byte),
        cmocka_unit_test(test_listed_halves),
        cmocka_unit_test(test_all_halves),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_listed_rounding),
        cmocka_unit_test(test_blocks_of_gguf),
        cmocka_unit_test(test_mxfp4),
        cmocka_unit_test(test_nvfp4),
        cmocka_unit_test(test_fp8_of_blocks),
        cmocka_unit_test(test_scales_by_tensor_and_by_row),
        cmocka_unit_test(test_views_are_the_rows_they_are_cut_from),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_blocks_are_never_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
