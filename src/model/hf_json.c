/* hf_json: reading members of JSON objects into plain C, with range checks and messages that show both sides. null
 * counts as absent, as it does in Python's configuration classes. */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>

#include "model_priv.h"

static const char *kind_of(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    case JSON_NULL: return "null";
    default: return "a number";
    }
}

int hf_parse(struct json_t **out, struct span text, const char *where, struct err *e)
{
    json_error_t bad;
    json_t *root = json_loadb(text.len ? text.ptr : "", text.len, 0, &bad);
    if (!root) return err_set(e, ERR_INPUT, "%s: is not valid JSON at line %d: %s", where, bad.line, bad.text);
    if (!json_is_object(root)) {
        int rc = err_set(e, ERR_INPUT, "%s: holds %s, expected an object", where, kind_of(root));
        json_decref(root);
        return rc;
    }
    *out = root;
    return OK;
}

const struct json_t *hf_get(const struct json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_null(v) ? NULL : v;
}

int hf_float(const struct json_t *o, const char *key, double *out, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    if (!json_is_number(v)) return err_set(e, ERR_INPUT, "%s is %s, expected a number", key, kind_of(v));
    *out = json_number_value(v);
    return OK;
}

int hf_int(const struct json_t *o, const char *key, int64_t min, int64_t max, int64_t *out, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    double d = json_number_value(v);
    if (!json_is_number(v) || d != floor(d))
        return err_set(e, ERR_INPUT, "%s is %s, expected a whole number", key,
                       json_is_number(v) ? "a fraction" : kind_of(v));
    if (d < (double)min || d > (double)max)
        return err_set(e, ERR_INPUT, "%s is %.0f, expected %" PRId64 " to %" PRId64, key, d, min, max);
    *out = json_is_integer(v) ? json_integer_value(v) : (int64_t)d;
    return OK;
}

int hf_flag(const struct json_t *o, const char *key, bool *out, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    if (!json_is_boolean(v)) return err_set(e, ERR_INPUT, "%s is %s, expected true or false", key, kind_of(v));
    *out = json_is_true(v);
    return OK;
}

int hf_text(const struct json_t *o, const char *key, const char **out, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    if (!json_is_string(v)) return err_set(e, ERR_INPUT, "%s is %s, expected a string", key, kind_of(v));
    *out = json_string_value(v);
    return OK;
}

int hf_object(const struct json_t *o, const char *key, const struct json_t **out, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    if (!json_is_object(v)) return err_set(e, ERR_INPUT, "%s is %s, expected an object", key, kind_of(v));
    *out = v;
    return OK;
}
