/* safetensors: one file's header. Eight bytes of length, JSON, then the data; every tensor must lie in the file, have
 * the size that its shape and type say, and share no byte with another. What a type is good for is decided later, so
 * a file may hold types that no weight of ours has. */
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "model_priv.h"

enum { MAX_HEADER = 100 << 20 };

static const struct {
    const char *name;
    unsigned bits;
    enum dtype type;
} types[] = {
    {"F32", 32, DT_F32},  {"F16", 16, DT_F16},  {"BF16", 16, DT_BF16},   {"F8_E4M3", 8, DT_F8_E4M3},
    {"F64", 64, DT_NONE}, {"I64", 64, DT_NONE}, {"U64", 64, DT_NONE},    {"I32", 32, DT_NONE},
    {"U32", 32, DT_NONE}, {"I16", 16, DT_NONE}, {"U16", 16, DT_NONE},    {"I8", 8, DT_NONE},
    {"U8", 8, DT_NONE},   {"BOOL", 8, DT_NONE}, {"F8_E5M2", 8, DT_NONE}, {"F8_E8M0", 8, DT_NONE},
    {"F4", 4, DT_NONE},
};

static int parse_type(struct tensor *t, const char *dtype, unsigned *bits, struct arena *a, struct err *e)
{
    *bits = 0;
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        if (strcmp(types[i].name, dtype) != 0) continue;
        t->type_name = span_of(types[i].name);
        t->type = types[i].type;
        *bits = types[i].bits;
        return OK;
    }
    if (strlen(dtype) > 32) return err_set(e, ERR_INPUT, "a dtype of %zu characters is none", strlen(dtype));
    char *copy = arena_str(a, span_of(dtype));
    if (!copy) return err_set(e, ERR_NOMEM, "out of memory");
    t->type_name = span_of(copy);
    return OK;
}

static int parse_shape(struct tensor *t, const json_t *shape, struct err *e)
{
    size_t n = json_array_size(shape);
    if (!json_is_array(shape)) return err_set(e, ERR_INPUT, "shape is missing or is no array");
    if (n > TENSOR_MAX_DIMS)
        return err_set(e, ERR_INPUT, "has %zu dimensions, at most %d are known", n, TENSOR_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        const json_t *dim = json_array_get(shape, i);
        json_int_t v = json_is_integer(dim) ? json_integer_value(dim) : -1;
        if (v < 0) return err_set(e, ERR_INPUT, "dimension %zu is not a whole number from 0 up", i);
        t->dims[i] = v;
    }
    t->n_dims = (int)n;
    return OK;
}

static int parse_offset(const json_t *pair, size_t i, size_t limit, size_t *out, struct err *e)
{
    const json_t *v = json_array_get(pair, i);
    if (json_array_size(pair) != 2 || !json_is_integer(v) || json_integer_value(v) < 0)
        return err_set(e, ERR_INPUT, "data_offsets is not a pair of whole numbers from 0 up");
    if ((uint64_t)json_integer_value(v) > limit)
        return err_set(e, ERR_INPUT,
                       "data_offsets reach byte %" JSON_INTEGER_FORMAT " of a data section of %zu bytes: "
                       "the file is truncated",
                       json_integer_value(v), limit);
    *out = (size_t)json_integer_value(v);
    return OK;
}

static int parse_tensor(struct tensor *t, const json_t *entry, const uint8_t *data, size_t len, struct arena *a,
                        struct err *e)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype) return err_set(e, ERR_INPUT, "dtype is missing or is no string");
    unsigned bits;
    TRY(parse_type(t, dtype, &bits, a, e));
    TRY(parse_shape(t, json_object_get(entry, "shape"), e));
    const json_t *pair = json_object_get(entry, "data_offsets");
    size_t begin, end, n, need;
    TRY(parse_offset(pair, 0, len, &begin, e));
    TRY(parse_offset(pair, 1, len, &end, e));
    if (end < begin) return err_set(e, ERR_INPUT, "data_offsets end at %zu before they begin at %zu", end, begin);
    if (!tensor_count(t, &n) || !size_mul(n, bits ? bits : 1, &need)) return tensor_too_large(t, e);
    if (bits && (need % 8 || need / 8 != end - begin)) {
        char shape[SHAPE_TEXT];
        shape_text(shape, t->n_dims, t->dims);
        return err_set(e, ERR_INPUT, "data_offsets span %zu bytes, but shape %s of %s takes %zu", end - begin, shape,
                       dtype, (need + 7) / 8);
    }
    t->data = data + begin;
    t->bytes = end - begin;
    return OK;
}

static int parse_entries(struct tensors *t, json_t *root, const uint8_t *data, size_t len, struct arena *a,
                         struct err *e)
{
    const char *key;
    json_t *entry;
    json_object_foreach(root, key, entry)
    {
        if (strcmp(key, "__metadata__") == 0) continue;
        size_t key_len = strlen(key);
        if (key_len == 0 || key_len >= TENSOR_MAX_NAME)
            return err_set(e, ERR_INPUT, "tensor name of %zu bytes, expected 1 to %d", key_len, TENSOR_MAX_NAME - 1);
        struct tensor item = {0};
        int rc = parse_tensor(&item, entry, data, len, a, e);
        if (rc < 0) return err_prefix(e, "tensor %s", key);
        char *name = arena_str(a, span_of(key));
        if (!name) return err_set(e, ERR_NOMEM, "out of memory for tensor names");
        item.name = (struct span){name, key_len};
        TRY(tensors_push(t, &item, e));
    }
    return OK;
}

int safetensors_parse(struct tensors *t, const uint8_t *data, size_t len, const char *where, struct arena *a,
                      struct err *e)
{
    static const char lfs[] = "version https://git-lfs";
    if (len >= sizeof lfs && memcmp(data, lfs, sizeof lfs - 1) == 0)
        return err_set(e, ERR_INPUT, "%s: is a Git LFS pointer, not the file itself: fetch it with git lfs pull",
                       where);
    if (len < 8) return err_set(e, ERR_INPUT, "%s: has %zu bytes, a safetensors file has at least 8", where, len);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | data[i];
    if (header > len - 8 || header > MAX_HEADER)
        return err_set(e, ERR_INPUT,
                       "%s: says its header takes %" PRIu64 " bytes, but %zu follow and at most %d are "
                       "allowed: truncated, or not a safetensors file",
                       where, header, len - 8, MAX_HEADER);
    if (!header || data[8] != '{')
        return err_set(e, ERR_INPUT, "%s: the header of %" PRIu64 " bytes does not begin with '{'", where, header);
    size_t begin = 8 + (size_t)header, first = t->n;
    json_error_t bad;
    json_t *root = json_loadb((const char *)data + 8, (size_t)header, JSON_REJECT_DUPLICATES, &bad);
    if (!root)
        return err_set(e, ERR_INPUT, "%s: header is not valid JSON at byte %d: %s", where, bad.position, bad.text);
    int rc = parse_entries(t, root, data + begin, len - begin, a, e);
    json_decref(root);
    if (rc == OK) rc = tensors_check_overlap(t, first, e);
    return rc < 0 ? err_prefix(e, "%s", where) : OK;
}
