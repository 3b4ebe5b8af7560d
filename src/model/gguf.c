/* gguf: one file's header: metadata and tensor table, read in one pass with every length checked against the bytes
 * that are left, and nothing allocated that these bytes do not pay for. Values stay where they are in the file and
 * are read with memcpy, since nothing in a GGUF file is aligned but the tensors. Big-endian files and version 1 are
 * refused. */
#include <inttypes.h>
#include <string.h>

#include "model_priv.h"

enum { MAX_KV = 4096, MAX_TENSORS = 1 << 20, MAX_KEY = 1024, MAX_GGUF_DIMS = 4 };

/* Bytes of a value of fixed size; 0 for strings and arrays. */
static const size_t value_bytes[GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
static const char *const value_names[GGUF_TYPE_COUNT] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "bool", "string", "array", "u64", "i64", "f64"};

/* By ggml's number. Types with DT_NONE may stand in a file, but no weight that is used may have them. */
static const struct {
    const char *name;
    enum dtype type;
} ggml_types[] = {
    {"F32", DT_F32},         {"F16", DT_F16},         {"Q4_0", DT_Q4_0},       {"Q4_1", DT_Q4_1},
    {"Q4_2", DT_NONE},       {"Q4_3", DT_NONE},       {"Q5_0", DT_Q5_0},       {"Q5_1", DT_Q5_1},
    {"Q8_0", DT_Q8_0},       {"Q8_1", DT_NONE},       {"Q2_K", DT_NONE},       {"Q3_K", DT_NONE},
    {"Q4_K", DT_Q4_K},       {"Q5_K", DT_Q5_K},       {"Q6_K", DT_Q6_K},       {"Q8_K", DT_NONE},
    {"IQ2_XXS", DT_NONE},    {"IQ2_XS", DT_NONE},     {"IQ3_XXS", DT_NONE},    {"IQ1_S", DT_NONE},
    {"IQ4_NL", DT_NONE},     {"IQ3_S", DT_NONE},      {"IQ2_S", DT_NONE},      {"IQ4_XS", DT_NONE},
    {"I8", DT_NONE},         {"I16", DT_NONE},        {"I32", DT_NONE},        {"I64", DT_NONE},
    {"F64", DT_NONE},        {"IQ1_M", DT_NONE},      {"BF16", DT_BF16},       {"Q4_0_4_4", DT_NONE},
    {"Q4_0_4_8", DT_NONE},   {"Q4_0_8_8", DT_NONE},   {"TQ1_0", DT_NONE},      {"TQ2_0", DT_NONE},
    {"IQ4_NL_4_4", DT_NONE}, {"IQ4_NL_4_8", DT_NONE}, {"IQ4_NL_8_8", DT_NONE}, {"MXFP4", DT_MXFP4_GGUF},
    {"NVFP4", DT_NONE},      {"Q1_0", DT_NONE},       {"Q2_0", DT_NONE},
};

/* ------------------------------------------------------------------------------------------------ the cursor */

struct cursor {
    const uint8_t *data;
    size_t len, pos;
    struct err *e;
};

static int take(struct cursor *c, size_t n, const char *what, const uint8_t **out)
{
    if (n > c->len - c->pos)
        return err_set(c->e, ERR_INPUT, "%s at byte %zu takes %zu bytes, but %zu are left: the file is truncated",
                       what, c->pos, n, c->len - c->pos);
    *out = c->data + c->pos;
    c->pos += n;
    return OK;
}

static uint64_t load(const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = n; i > 0; i--) v = v << 8 | p[i - 1];
    return v;
}

static int take_uint(struct cursor *c, size_t n, const char *what, uint64_t *out)
{
    const uint8_t *p = NULL;
    TRY(take(c, n, what, &p));
    *out = load(p, n);
    return OK;
}

static int take_string(struct cursor *c, size_t max, const char *what, struct span *out)
{
    uint64_t n = 0;
    const uint8_t *p = NULL;
    TRY(take_uint(c, 8, what, &n));
    if (n > max)
        return err_set(c->e, ERR_INPUT, "%s at byte %zu has %" PRIu64 " bytes, at most %zu are allowed", what, c->pos,
                       n, max);
    TRY(take(c, (size_t)n, what, &p));
    *out = (struct span){(const char *)p, (size_t)n};
    return OK;
}

/* A count of things that take at least `each` bytes: more than fit in the rest of the file is nonsense. */
static int take_count(struct cursor *c, size_t each, uint64_t max, const char *what, uint64_t *out)
{
    uint64_t n = 0;
    TRY(take_uint(c, 8, what, &n));
    uint64_t fit = (c->len - c->pos) / each;
    if (n > fit || n > max)
        return err_set(c->e, ERR_INPUT, "says it holds %" PRIu64 " %s, but the %zu bytes left hold at most %" PRIu64,
                       n, what, c->len - c->pos, fit < max ? fit : max);
    *out = n;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ the parser */

static int parse_array(struct cursor *c, struct gguf_kv *kv)
{
    uint64_t type = 0;
    TRY(take_uint(c, 4, "array type", &type));
    if (type >= GGUF_TYPE_COUNT || type == GGUF_ARRAY)
        return err_set(c->e, ERR_UNSUPPORTED, "array of value type %" PRIu64 ", known are 0 to 12 but for 9", type);
    kv->type = (enum gguf_type)type;
    kv->array = true;
    size_t each = value_bytes[type] ? value_bytes[type] : 8;
    TRY(take_count(c, each, UINT64_MAX, "array elements", &kv->count));
    kv->at = c->data + c->pos;
    if (kv->type != GGUF_STRING) return take(c, each * (size_t)kv->count, "array", &kv->at);
    struct span ignored;
    for (uint64_t i = 0; i < kv->count; i++) TRY(take_string(c, SIZE_MAX, "array string", &ignored));
    return OK;
}

static int parse_value(struct cursor *c, struct gguf_kv *kv)
{
    uint64_t type = 0;
    TRY(take_uint(c, 4, "value type", &type));
    if (type >= GGUF_TYPE_COUNT)
        return err_set(c->e, ERR_UNSUPPORTED, "value type %" PRIu64 ", known are 0 to 12", type);
    if (type == GGUF_ARRAY) return parse_array(c, kv);
    kv->type = (enum gguf_type)type;
    kv->count = 1;
    if (type != GGUF_STRING) return take(c, value_bytes[type], "value", &kv->at);
    struct span text = {0};
    TRY(take_string(c, SIZE_MAX, "string value", &text));
    kv->at = (const uint8_t *)text.ptr;
    kv->count = text.len;
    return OK;
}

static int parse_metadata(struct cursor *c, struct gguf *g)
{
    for (size_t i = 0; i < g->n_kv; i++) {
        struct gguf_kv kv = {0};
        TRY(take_string(c, MAX_KEY, "metadata key", &kv.key));
        if (parse_value(c, &kv) < 0) return err_prefix(c->e, "key %.*s", (int)kv.key.len, kv.key.ptr);
        for (size_t k = 0; k < i; k++)
            if (span_eq(g->kv[k].key, kv.key))
                return err_set(c->e, ERR_INPUT, "key %.*s occurs twice", (int)kv.key.len, kv.key.ptr);
        g->kv[i] = kv;
    }
    return OK;
}

static int parse_dims(struct cursor *c, struct tensor *t)
{
    uint64_t n = 0, ne = 0;
    TRY(take_uint(c, 4, "dimension count", &n));
    if (n > MAX_GGUF_DIMS)
        return err_set(c->e, ERR_INPUT, "has %" PRIu64 " dimensions, at most %d are known", n, MAX_GGUF_DIMS);
    t->n_dims = (int)n;
    for (int i = t->n_dims - 1; i >= 0; i--) {
        TRY(take_uint(c, 8, "dimension", &ne));
        if (ne > INT64_MAX) return err_set(c->e, ERR_INPUT, "dimension %" PRIu64 " is too large", ne);
        t->dims[i] = (int64_t)ne;
    }
    return OK;
}

static int parse_type(struct cursor *c, struct tensor *t, struct arena *a)
{
    uint64_t type = 0;
    TRY(take_uint(c, 4, "tensor type", &type));
    if (type < COUNT_OF(ggml_types)) {
        t->type_name = span_of(ggml_types[type].name);
        t->type = ggml_types[type].type;
        return OK;
    }
    char text[32];
    snprintf(text, sizeof text, "number %" PRIu64, type);
    char *copy = arena_str(a, span_of(text));
    if (!copy) return err_set(c->e, ERR_NOMEM, "out of memory");
    t->type_name = span_of(copy);
    return OK;
}

static int tensor_bytes(struct tensor *t, struct err *e)
{
    size_t n;
    if (!tensor_count(t, &n)) return tensor_too_large(t, e);
    if (t->type == DT_NONE) return OK;
    const struct dtype_info *info = &dtype_infos[t->type];
    size_t row = t->n_dims ? (size_t)t->dims[t->n_dims - 1] : 1, block = (size_t)info->block;
    if (row % block)
        return err_set(e, ERR_INPUT, "rows of %zu values are not whole blocks of %zu (%.*s)", row, block,
                       (int)t->type_name.len, t->type_name.ptr);
    return size_mul(n / block, (size_t)info->block_bytes, &t->bytes) ? OK : tensor_too_large(t, e);
}

static int parse_tensor(struct cursor *c, struct tensor *t, uint64_t *offset, struct arena *a)
{
    TRY(take_string(c, TENSOR_MAX_NAME - 1, "tensor name", &t->name));
    int rc = parse_dims(c, t);
    if (rc == OK) rc = parse_type(c, t, a);
    if (rc == OK) rc = take_uint(c, 8, "tensor offset", offset);
    if (rc == OK) rc = tensor_bytes(t, c->e);
    return rc < 0 ? err_prefix(c->e, "tensor %.*s", (int)t->name.len, t->name.ptr) : OK;
}

/* Offsets were kept in `bytes from the data section`; now that the section's place is known they become pointers. */
static int place(const struct gguf *g, struct tensor *t, uint64_t offset, const uint8_t *data, size_t len,
                 struct err *e)
{
    size_t room = len > g->data_start ? len - g->data_start : 0;
    if (offset % g->alignment)
        return err_set(e, ERR_INPUT, "tensor %.*s: offset %" PRIu64 " is not a multiple of the alignment %zu",
                       (int)t->name.len, t->name.ptr, offset, g->alignment);
    if (offset > room || t->bytes > room - offset)
        return err_set(e, ERR_INPUT,
                       "tensor %.*s: %zu bytes at offset %" PRIu64 " of a data section of %zu bytes: the file "
                       "is truncated",
                       (int)t->name.len, t->name.ptr, t->bytes, offset, room);
    t->data = room ? data + g->data_start + offset : data;
    return OK;
}

static int parse_tensors(struct cursor *c, struct gguf *g, struct tensors *t, size_t n, struct arena *a)
{
    size_t first = t->n;
    uint64_t *offsets = arena_alloc(a, n * sizeof *offsets);
    if (n && !offsets) return err_set(c->e, ERR_NOMEM, "out of memory for %zu tensors", n);
    for (size_t i = 0; i < n; i++) {
        struct tensor item = {0};
        TRY(parse_tensor(c, &item, &offsets[i], a));
        TRY(tensors_push(t, &item, c->e));
    }
    g->data_start = size_round_up(c->pos, g->alignment);
    for (size_t i = 0; i < n; i++) TRY(place(g, &t->items[first + i], offsets[i], c->data, c->len, c->e));
    return OK;
}

static int parse_start(struct cursor *c, struct gguf *g, size_t *n_tensors, struct arena *a)
{
    uint64_t version = 0, tensors = 0, kv = 0;
    const uint8_t *magic = NULL;
    TRY(take(c, 4, "magic", &magic));
    if (memcmp(magic, "GGUF", 4) != 0)
        return err_set(c->e, ERR_INPUT, "begins with bytes %02x %02x %02x %02x, a GGUF file with 47 47 55 46",
                       magic[0], magic[1], magic[2], magic[3]);
    TRY(take_uint(c, 4, "version", &version));
    if ((version & 0xffff) == 0)
        return err_set(c->e, ERR_UNSUPPORTED,
                       "is a big-endian GGUF file (version field %08" PRIx64 "), only little-endian "
                       "ones are known",
                       version);
    if (version != 2 && version != 3)
        return err_set(c->e, ERR_UNSUPPORTED, "is of GGUF version %" PRIu64 ", known are 2 and 3", version);
    g->version = (uint32_t)version;
    TRY(take_count(c, 24, MAX_TENSORS, "tensors", &tensors));
    TRY(take_count(c, 13, MAX_KV, "metadata keys", &kv));
    *n_tensors = (size_t)tensors;
    g->n_kv = (size_t)kv;
    g->kv = arena_alloc(a, g->n_kv * sizeof *g->kv);
    if (g->n_kv && !g->kv) return err_set(c->e, ERR_NOMEM, "out of memory for %zu metadata keys", g->n_kv);
    return OK;
}

static int parse_all(struct cursor *c, struct gguf *g, struct tensors *t, struct arena *a)
{
    size_t n_tensors = 0, first = t->n;
    TRY(parse_start(c, g, &n_tensors, a));
    TRY(parse_metadata(c, g));
    int64_t alignment = 32;
    TRY(gguf_int(g, "general.alignment", 1, 1 << 20, &alignment, c->e));
    if (alignment & (alignment - 1))
        return err_set(c->e, ERR_INPUT, "general.alignment is %" PRId64 ", expected a power of two", alignment);
    g->alignment = (size_t)alignment;
    TRY(parse_tensors(c, g, t, n_tensors, a));
    return tensors_check_overlap(t, first, c->e);
}

int gguf_parse(struct gguf *g, struct tensors *t, const uint8_t *data, size_t len, const char *where, struct arena *a,
               struct err *e)
{
    struct cursor c = {.data = data, .len = len, .e = e};
    *g = (struct gguf){0};
    return parse_all(&c, g, t, a) < 0 ? err_prefix(e, "%s", where) : OK;
}

/* ------------------------------------------------------------------------------------------------ values by key */

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key)
{
    for (size_t i = 0; i < g->n_kv; i++)
        if (span_is(g->kv[i].key, key)) return &g->kv[i];
    return NULL;
}

static int wrong_type(const struct gguf_kv *kv, const char *want, struct err *e)
{
    return err_set(e, ERR_INPUT, "key %.*s is %s%s, expected %s", (int)kv->key.len, kv->key.ptr,
                   kv->array ? "an array of " : "", value_names[kv->type], want);
}

/* Element i as an integer; false if the type is none, or it does not fit. */
static bool int_at(const struct gguf_kv *kv, size_t i, int64_t *out)
{
    size_t n = value_bytes[kv->type];
    uint64_t v = n ? load(kv->at + i * n, n) : 0;
    switch (kv->type) {
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_BOOL: *out = (int64_t)v; return true;
    case GGUF_I8: *out = (int8_t)v; return true;
    case GGUF_I16: *out = (int16_t)v; return true;
    case GGUF_I32: *out = (int32_t)v; return true;
    case GGUF_I64: *out = (int64_t)v; return true;
    case GGUF_U64: *out = v > INT64_MAX ? INT64_MAX : (int64_t)v; return true;
    default: return false;
    }
}

static bool float_at(const struct gguf_kv *kv, size_t i, double *out)
{
    int64_t whole;
    float f;
    if (kv->type == GGUF_F32) {
        memcpy(&f, kv->at + i * sizeof f, sizeof f);
        *out = (double)f;
    } else if (kv->type == GGUF_F64) {
        memcpy(out, kv->at + i * sizeof *out, sizeof *out);
    } else if (kv->type != GGUF_BOOL && int_at(kv, i, &whole)) {
        *out = (double)whole;
    } else {
        return false;
    }
    return true;
}

int gguf_int(const struct gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    int64_t v = 0, other;
    if (kv->type == GGUF_BOOL || kv->count == 0 || !int_at(kv, 0, &v)) return wrong_type(kv, "an integer", e);
    for (uint64_t i = 1; kv->array && i < kv->count; i++)
        if (int_at(kv, (size_t)i, &other) && other != v)
            return err_set(e, ERR_UNSUPPORTED,
                           "%s differs by layer (%" PRId64 ", then %" PRId64 "), which is not known", key, v, other);
    if (v < min || v > max)
        return err_set(e, ERR_INPUT, "%s is %" PRId64 ", expected %" PRId64 " to %" PRId64, key, v, min, max);
    *out = v;
    return OK;
}

int gguf_float(const struct gguf *g, const char *key, double *out, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->array || !float_at(kv, 0, out)) return wrong_type(kv, "a number", e);
    return OK;
}

int gguf_bool(const struct gguf *g, const char *key, int *out, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->array || kv->type != GGUF_BOOL) return wrong_type(kv, "a bool", e);
    *out = kv->at[0] != 0;
    return OK;
}

int gguf_string(const struct gguf *g, const char *key, struct span *out, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    if (kv->array || kv->type != GGUF_STRING) return wrong_type(kv, "a string", e);
    *out = (struct span){(const char *)kv->at, (size_t)kv->count};
    return OK;
}

/* The arrays: parse_array has walked them, so counts are paid for and lengths are inside the file. */
static int array_new(const struct gguf_kv *kv, size_t each, const char *want, void *out, struct arena *a,
                     struct err *e)
{
    if (!kv->array) return wrong_type(kv, want, e);
    size_t bytes;
    void *p = size_mul((size_t)kv->count + 1, each, &bytes) ? arena_alloc(a, bytes) : NULL;
    if (!p)
        return err_set(e, ERR_NOMEM, "out of memory for %" PRIu64 " elements of key %.*s", kv->count,
                       (int)kv->key.len, kv->key.ptr);
    memcpy(out, &p, sizeof p);
    return OK;
}

int gguf_strings(const struct gguf *g, const char *key, const struct span **out, size_t *n, struct arena *a,
                 struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    struct span *items = NULL;
    if (kv->type != GGUF_STRING) return wrong_type(kv, "an array of string", e);
    TRY(array_new(kv, sizeof *items, "an array of string", &items, a, e));
    const uint8_t *p = kv->at;
    for (uint64_t i = 0; i < kv->count; i++) {
        size_t len = (size_t)load(p, 8);
        items[i] = (struct span){(const char *)p + 8, len};
        p += 8 + len;
    }
    *out = items;
    *n = (size_t)kv->count;
    return OK;
}

int gguf_ints(const struct gguf *g, const char *key, const int32_t **out, size_t *n, struct arena *a, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    int32_t *items = NULL;
    TRY(array_new(kv, sizeof *items, "an array of integers", &items, a, e));
    for (uint64_t i = 0; i < kv->count; i++) {
        int64_t v;
        if (!int_at(kv, (size_t)i, &v) || v < INT32_MIN || v > INT32_MAX)
            return wrong_type(kv, "an array of integers of 32 bits", e);
        items[i] = (int32_t)v;
    }
    *out = items;
    *n = (size_t)kv->count;
    return OK;
}

int gguf_floats(const struct gguf *g, const char *key, const float **out, size_t *n, struct arena *a, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv) return OK;
    float *items = NULL;
    TRY(array_new(kv, sizeof *items, "an array of numbers", &items, a, e));
    for (uint64_t i = 0; i < kv->count; i++) {
        double v;
        if (!float_at(kv, (size_t)i, &v)) return wrong_type(kv, "an array of numbers", e);
        items[i] = (float)v;
    }
    *out = items;
    *n = (size_t)kv->count;
    return OK;
}
