/* jinja_filter.c: the filters and tests that chat templates use, with jinja2's results. An unknown one is an error. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jinja_priv.h"

typedef struct value filter_fn(struct eval *ev, struct value v, const struct args *a);

struct value arg(const struct args *a, size_t i, const char *name, struct value fallback)
{
    struct value v;
    if (i < a->n) return a->pos[i];
    return name && dict_get_str(&a->kw, name, &v) ? v : fallback;
}

int64_t arg_int(struct eval *ev, const struct args *a, size_t i, const char *name, int64_t fallback)
{
    struct value v = arg(a, i, name, v_int(fallback));
    if (v.kind == V_INT) return v.i;
    if (v.kind == V_BOOL) return v.b;
    if (v.kind == V_NONE) return fallback;
    fail(ev, ERR_INPUT, "argument '%s' must be an integer, not %s", name ? name : "?", kind_name(v.kind));
    return fallback;
}

static struct str arg_str(struct eval *ev, const struct args *a, size_t i, const char *name, const char *fallback)
{
    return to_str(ev, arg(a, i, name, v_str(str_lit(fallback))));
}

static struct list *copy_items(struct eval *ev, struct value v)
{
    struct list *from = to_items(ev, v), *to = v_list(ev, V_LIST).list;
    for (size_t i = 0; i < from->len; i++) list_push(ev, to, from->item[i]);
    return to;
}

static struct value list_value(struct list *l) { return (struct value){.kind = V_LIST, .list = l}; }

static struct value lazy_value(struct list *l)
{
    l->lazy = true;
    return list_value(l);
}

/* "a.b.0" followed from v; an integer follows as an index. */
static struct value follow(struct eval *ev, struct value v, struct value path)
{
    if (path.kind == V_INT) return get_item(ev, v, path);
    struct str s = to_str(ev, path);
    for (size_t at = 0; at <= s.len && !ev->rc;) {
        const char *dot = memchr(s.p + at, '.', s.len - at);
        size_t end = dot ? (size_t)(dot - s.p) : s.len;
        struct str part = str_sub(s, at, end);
        bool digits = part.len > 0 && part.len < 10;
        for (size_t i = 0; i < part.len; i++) digits &= part.p[i] >= '0' && part.p[i] <= '9';
        v = get_item(ev, v, digits ? v_int(strtoll(part.p, NULL, 10)) : v_str(part));
        at = end + 1;
    }
    return v;
}

/* ------------------------------------------------------------------------------------------------ strings */

static struct value f_trim(struct eval *ev, struct value v, const struct args *a)
{
    struct value chars = arg(a, 0, "chars", v_none());
    struct str c = chars.kind == V_STR ? chars.s : (struct str){0};
    return v_str(str_strip(to_str(ev, v), chars.kind == V_STR ? &c : NULL, true, true));
}
static struct value f_upper(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return v_str(str_case(ev, to_str(ev, v), 'u'));
}
static struct value f_lower(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return v_str(str_case(ev, to_str(ev, v), 'l'));
}
static struct value f_title(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return v_str(str_case(ev, to_str(ev, v), 't'));
}
static struct value f_capitalize(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return v_str(str_case(ev, to_str(ev, v), 'c'));
}
static struct value f_string(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return v_str(to_str(ev, v));
}

static struct value f_replace(struct eval *ev, struct value v, const struct args *a)
{
    return v_str(str_replace(ev, to_str(ev, v), arg_str(ev, a, 0, "old", ""), arg_str(ev, a, 1, "new", ""),
                             arg_int(ev, a, 2, "count", -1)));
}

static struct value f_escape(struct eval *ev, struct value v, const struct args *a)
{
    struct str s = to_str(ev, v);
    (void)a;
    return (struct value){.kind = V_STR, .markup = true, .s = v.markup ? s : str_escape(ev, s)};
}

static struct value f_indent(struct eval *ev, struct value v, const struct args *a)
{
    struct str s = to_str(ev, v), pad;
    struct value width = arg(a, 0, "width", v_int(4));
    bool first = truthy(arg(a, 1, "first", v_bool(false))), blank = truthy(arg(a, 2, "blank", v_bool(false)));
    struct out o = {0};
    char spaces[257];
    if (width.kind == V_STR) {
        pad = width.s;
    } else {
        int64_t n = arg_int(ev, a, 0, "width", 4);
        if (n < 0 || n > 256) return fail(ev, ERR_INPUT, "indent width %lld is out of range 0 to 256", (long long)n);
        memset(spaces, ' ', sizeof spaces);
        pad = (struct str){spaces, NULL, (size_t)n};
    }
    for (size_t at = 0, line = 0; at < s.len || line == 0; line++) {
        const char *nl = at < s.len ? memchr(s.p + at, '\n', s.len - at) : NULL;
        size_t end = nl ? (size_t)(nl - s.p) : s.len;
        if (line == 0 ? first : (blank || end > at)) out_str(ev, &o, pad);
        out_str(ev, &o, str_sub(s, at, end));
        if (!nl || ev->rc) break;
        out_str(ev, &o, str_sub(s, end, end + 1));
        at = end + 1;
    }
    return v_str(out_take(&o));
}

/* Flags, width and precision at s[i..), in this order and no other, into spec: what printf takes. *n: characters of spec.
 * Returns where they end. */
static size_t take_spec(struct str s, size_t i, char spec[24], size_t *n)
{
    for (; i < s.len && s.p[i] && strchr("-+ 0#", s.p[i]) && *n < 6; i++) spec[(*n)++] = s.p[i];
    for (; i < s.len && s.p[i] >= '0' && s.p[i] <= '9' && *n < 10; i++) spec[(*n)++] = s.p[i];
    if (i >= s.len || s.p[i] != '.') return i;
    spec[(*n)++] = s.p[i++];
    for (; i < s.len && s.p[i] >= '0' && s.p[i] <= '9' && *n < 14; i++) spec[(*n)++] = s.p[i];
    return i;
}

/* printf-style formatting: %s %r(no) %d %i %f %x and %%, with flags, width and precision. */
static struct value f_format(struct eval *ev, struct value v, const struct args *a)
{
    struct str s = to_str(ev, v);
    struct out o = {0};
    size_t next = 0;
    for (size_t i = 0; i < s.len && !ev->rc; i++) {
        char spec[24] = "%", text[400];
        size_t n = 1;
        if (s.p[i] != '%') {
            out_str(ev, &o, str_sub(s, i, i + 1));
            continue;
        }
        i = take_spec(s, i + 1, spec, &n);
        char c = i < s.len ? s.p[i] : 0;
        if (c == '%') {
            out_str(ev, &o, str_lit("%"));
            continue;
        }
        if (!c || !strchr("sdifxXe", c))
            return fail(ev, ERR_UNSUPPORTED, "format '%%%c' is not supported", c ? c : '?');
        if (next >= a->n) return fail(ev, ERR_INPUT, "not enough arguments for format string");
        struct value x = a->pos[next++];
        if (c == 's') {
            if (n > 1) return fail(ev, ERR_UNSUPPORTED, "format '%s%c' is not supported", spec, c);
            out_str(ev, &o, to_str(ev, x));
            continue;
        }
        if (x.kind != V_INT && x.kind != V_FLOAT && x.kind != V_BOOL)
            return fail(ev, ERR_INPUT, "%%%c format: a number is required, not %s", c, kind_name(x.kind));
        double f = x.kind == V_FLOAT ? x.f : x.kind == V_INT ? (double)x.i : x.b;
        int64_t d = x.kind == V_FLOAT ? (int64_t)(fabs(x.f) < 9e18 ? x.f : 0) : x.kind == V_INT ? x.i : x.b;
        const char *point = strchr(spec, '.');
        long width = strtol(spec + 1 + strspn(spec + 1, "-+ 0#"), NULL, 10), digits = point ? strtol(point + 1, NULL, 10) : 0;
        if (width > 200) return fail(ev, ERR_INPUT, "format width %ld is too large", width);
        if (digits > 60) return fail(ev, ERR_INPUT, "format precision %ld is too large", digits);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        if (c == 'f' || c == 'e') {
            spec[n++] = c;
            snprintf(text, sizeof text, spec, f);
        } else {
            memcpy(spec + n, "ll", 2);
            spec[n + 2] = c;
            snprintf(text, sizeof text, spec, (long long)d);
        }
#pragma GCC diagnostic pop
        out_str(ev, &o, str_lit(text));
    }
    if (!ev->rc && next < a->n) fail(ev, ERR_INPUT, "not all arguments converted during string formatting");
    return v_str(out_take(&o));
}

static struct value f_tojson(struct eval *ev, struct value v, const struct args *a)
{
    /* transformers: tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) */
    struct value indent = arg(a, 1, "indent", v_none()), separators = arg(a, 2, "separators", v_none());
    struct json_style style = {.indent = -1, .item_sep = str_lit(", "), .key_sep = str_lit(": ")};
    struct out o = {0};
    style.ascii = truthy(arg(a, 0, "ensure_ascii", v_bool(false)));
    style.sort = truthy(arg(a, 3, "sort_keys", v_bool(false)));
    if (indent.kind != V_NONE) {
        if (indent.kind != V_INT || indent.i < 0 || indent.i > 64)
            return fail(ev, ERR_UNSUPPORTED, "tojson indent must be an integer from 0 to 64");
        style.indent = (int)indent.i;
        style.item_sep = str_lit(",");
    }
    if ((separators.kind == V_LIST || separators.kind == V_TUPLE) && separators.list->len == 2) {
        style.item_sep = to_str(ev, separators.list->item[0]);
        style.key_sep = to_str(ev, separators.list->item[1]);
    }
    write_json(ev, &o, v, &style, 0);
    return v_str(out_take(&o));
}

/* ------------------------------------------------------------------------------------------------ numbers */

static struct value f_int(struct eval *ev, struct value v, const struct args *a)
{
    struct value fallback = arg(a, 0, "default", v_int(0));
    char text[64];
    char *end;
    (void)ev;
    if (v.kind == V_INT || v.kind == V_BOOL) return v_int(v.kind == V_INT ? v.i : v.b);
    if (v.kind == V_FLOAT) return fabs(v.f) < 9e18 ? v_int((int64_t)v.f) : fallback;
    if (v.kind != V_STR) return fallback;
    struct str s = str_strip(v.s, NULL, true, true);
    if (s.len == 0 || s.len >= sizeof text) return fallback;
    memcpy(text, s.p, s.len);
    text[s.len] = 0;
    int64_t i = strtoll(text, &end, (int)arg_int(ev, a, 1, "base", 10));
    if (!*end) return v_int(i);
    double f = strtod(text, &end);
    return *end || !(fabs(f) < 9e18) ? fallback : v_int((int64_t)f);
}

static struct value f_float(struct eval *ev, struct value v, const struct args *a)
{
    char text[64];
    char *end;
    (void)ev;
    if (v.kind == V_FLOAT) return v;
    if (v.kind == V_INT || v.kind == V_BOOL) return v_float(v.kind == V_INT ? (double)v.i : v.b);
    struct str s = v.kind == V_STR ? str_strip(v.s, NULL, true, true) : (struct str){0};
    if (s.len == 0 || s.len >= sizeof text) return arg(a, 0, "default", v_float(0));
    memcpy(text, s.p, s.len);
    text[s.len] = 0;
    double f = strtod(text, &end);
    return *end ? arg(a, 0, "default", v_float(0)) : v_float(f);
}

static struct value f_abs(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    if (v.kind == V_INT) return v_int(v.i < 0 && v.i > INT64_MIN ? -v.i : v.i);
    if (v.kind == V_FLOAT) return v_float(fabs(v.f));
    return fail(ev, ERR_INPUT, "bad operand type for abs(): '%s'", kind_name(v.kind));
}

static struct value f_round(struct eval *ev, struct value v, const struct args *a)
{
    int64_t precision = arg_int(ev, a, 0, "precision", 0);
    struct str method = arg_str(ev, a, 1, "method", "common");
    if (v.kind != V_INT && v.kind != V_FLOAT && v.kind != V_BOOL)
        return fail(ev, ERR_INPUT, "round needs a number, not %s", kind_name(v.kind));
    if (precision < -300 || precision > 300)
        return fail(ev, ERR_INPUT, "round precision %lld is out of range", (long long)precision);
    double f = f_float(ev, v, a).f, scale = pow(10, (double)precision);
    if (str_eq(method, str_lit("ceil"))) return v_float(ceil(f * scale) / scale);
    if (str_eq(method, str_lit("floor"))) return v_float(floor(f * scale) / scale);
    char text[400];
    snprintf(text, sizeof text, "%.*f", precision > 0 ? (int)precision : 0, precision >= 0 ? f : f * scale);
    return v_float(precision >= 0 ? strtod(text, NULL) : strtod(text, NULL) / scale);
}

/* ------------------------------------------------------------------------------------------------ collections */

static struct value f_length(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    switch (v.kind) {
    case V_STR: return v_int((int64_t)str_chars(v.s));
    case V_LIST:
    case V_TUPLE:
        if (v.list->lazy) return fail(ev, ERR_INPUT, "object of type 'generator' has no len()");
        return v_int((int64_t)v.list->len);
    case V_DICT: return v_int((int64_t)v.dict->len);
    case V_UNDEFINED: return v_int(0);
    default: return fail(ev, ERR_INPUT, "object of type '%s' has no len()", kind_name(v.kind));
    }
}

static struct value f_first(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = to_items(ev, v);
    (void)a;
    return l->len ? l->item[0] : v_undefined(span_of("first of an empty sequence"));
}
static struct value f_last(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = to_items(ev, v);
    (void)a;
    return l->len ? l->item[l->len - 1] : v_undefined(span_of("last of an empty sequence"));
}
static struct value f_list(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return list_value(copy_items(ev, v));
}

static struct value f_reverse(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = copy_items(ev, v);
    (void)a;
    for (size_t i = 0; i < l->len / 2; i++) {
        struct value t = l->item[i];
        l->item[i] = l->item[l->len - 1 - i];
        l->item[l->len - 1 - i] = t;
    }
    if (v.kind != V_STR) return lazy_value(l);
    struct out o = {0};
    for (size_t i = 0; i < l->len; i++) out_str(ev, &o, l->item[i].s);
    return v_str(out_take(&o));
}

static struct value f_join(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = to_items(ev, v);
    struct str sep = arg_str(ev, a, 0, "d", "");
    struct value attribute = arg(a, 1, "attribute", v_none());
    struct out o = {0};
    for (size_t i = 0; i < l->len && !ev->rc; i++) {
        if (i) out_str(ev, &o, sep);
        out_str(ev, &o, to_str(ev, attribute.kind == V_NONE ? l->item[i] : follow(ev, l->item[i], attribute)));
    }
    return v_str(out_take(&o));
}

static struct value f_items(struct eval *ev, struct value v, const struct args *a)
{
    struct value out = v_list(ev, V_LIST);
    (void)a;
    if (v.kind == V_UNDEFINED) return out;
    if (v.kind != V_DICT) return fail(ev, ERR_INPUT, "Can only get item pairs from a mapping.");
    for (size_t i = 0; i < v.dict->len && !ev->rc; i++) {
        struct value pair = v_list(ev, V_TUPLE);
        list_push(ev, pair.list, v.dict->key[i]);
        list_push(ev, pair.list, v.dict->val[i]);
        list_push(ev, out.list, pair);
    }
    return out;
}

/* What a value sorts by: attribute, folded case unless case-sensitive. */
struct order {
    struct value attribute;
    bool sensitive, reverse;
};

static struct value sort_key(struct eval *ev, struct value v, const struct order *o)
{
    if (o->attribute.kind != V_NONE) v = follow(ev, v, o->attribute);
    return v.kind == V_STR && !o->sensitive ? v_str(str_case(ev, v.s, 'l')) : v;
}

/* Stable merge sort by key. */
static void sort_items(struct eval *ev, struct list *l, const struct order *o)
{
    size_t n = l->len;
    struct value *keys = ev_alloc(ev, (n + 1) * sizeof *keys), *out = ev_alloc(ev, (n + 1) * sizeof *out),
                 *out_keys = ev_alloc(ev, (n + 1) * sizeof *out_keys);
    if (ev->rc) return;
    for (size_t i = 0; i < n; i++) keys[i] = sort_key(ev, l->item[i], o);
    for (size_t width = 1; width < n && !ev->rc; width *= 2) {
        for (size_t lo = 0; lo < n; lo += 2 * width) {
            size_t mid = lo + width < n ? lo + width : n, hi = lo + 2 * width < n ? lo + 2 * width : n, i = lo,
                   j = mid;
            for (size_t k = lo; k < hi; k++) {
                int c = i < mid && j < hi ? values_compare(ev, keys[j], keys[i]) : i < mid ? 1 : -1;
                if (i < mid && j < hi && o->reverse) c = -c;
                bool right = i >= mid || (j < hi && c < 0);
                size_t from = right ? j++ : i++;
                out[k] = l->item[from];
                out_keys[k] = keys[from];
            }
        }
        memcpy(l->item, out, n * sizeof *out);
        memcpy(keys, out_keys, n * sizeof *keys);
    }
}

static struct value f_sort(struct eval *ev, struct value v, const struct args *a)
{
    struct order o = {arg(a, 2, "attribute", v_none()), truthy(arg(a, 1, "case_sensitive", v_bool(false))),
                      truthy(arg(a, 0, "reverse", v_bool(false)))};
    struct list *l = copy_items(ev, v);
    sort_items(ev, l, &o);
    return list_value(l);
}

static struct value f_dictsort(struct eval *ev, struct value v, const struct args *a)
{
    struct str by = arg_str(ev, a, 1, "by", "key");
    struct order o = {v_int(str_eq(by, str_lit("value")) ? 1 : 0), truthy(arg(a, 0, "case_sensitive", v_bool(false))),
                      truthy(arg(a, 2, "reverse", v_bool(false)))};
    struct value l = f_items(ev, v, a);
    if (!ev->rc) sort_items(ev, l.list, &o);
    return l;
}

static struct value f_unique(struct eval *ev, struct value v, const struct args *a)
{
    struct order o = {arg(a, 1, "attribute", v_none()), truthy(arg(a, 0, "case_sensitive", v_bool(false))), false};
    struct list *l = to_items(ev, v), *seen = v_list(ev, V_LIST).list, *out = v_list(ev, V_LIST).list;
    for (size_t i = 0; i < l->len && !ev->rc; i++) {
        struct value key = sort_key(ev, l->item[i], &o);
        bool known = false;
        for (size_t j = 0; j < seen->len && !known; j++) known = values_equal(seen->item[j], key);
        if (known) continue;
        list_push(ev, seen, key);
        list_push(ev, out, l->item[i]);
    }
    return lazy_value(out);
}

static struct value f_map(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = truthy(v) ? to_items(ev, v) : v_list(ev, V_LIST).list, *out = v_list(ev, V_LIST).list;
    struct value attribute = arg(a, SIZE_MAX, "attribute", v_none()),
                 fallback = arg(a, SIZE_MAX, "default", v_undefined((struct span){0}));
    if (attribute.kind == V_NONE && (a->n == 0 || a->pos[0].kind != V_STR))
        return fail(ev, ERR_INPUT, "map needs attribute= or a filter's name");
    for (size_t i = 0; i < l->len && !ev->rc; i++) {
        struct value item;
        if (attribute.kind != V_NONE) {
            item = follow(ev, l->item[i], attribute);
            if (item.kind == V_UNDEFINED) item = fallback;
        } else {
            struct args rest = {.pos = a->pos + 1, .n = a->n - 1, .kw = a->kw};
            item = apply_filter(ev, (struct span){a->pos[0].s.p, a->pos[0].s.len}, l->item[i], &rest);
        }
        list_push(ev, out, item);
    }
    return lazy_value(out);
}

/* select and reject, plain or by attribute: keeps the members for which the test (or truth) is `want`. */
static struct value choose(struct eval *ev, struct value v, const struct args *a, bool by_attribute, bool want)
{
    struct list *l = truthy(v) ? to_items(ev, v) : v_list(ev, V_LIST).list, *out = v_list(ev, V_LIST).list;
    size_t skip = by_attribute ? 1 : 0;
    if (by_attribute && a->n == 0) return fail(ev, ERR_INPUT, "an attribute's name is missing");
    for (size_t i = 0; i < l->len && !ev->rc; i++) {
        struct value item = by_attribute ? follow(ev, l->item[i], a->pos[0]) : l->item[i];
        bool yes = truthy(item);
        if (a->n > skip) {
            struct args rest = {.pos = a->pos + skip + 1, .n = a->n - skip - 1, .kw = a->kw};
            struct str test = to_str(ev, a->pos[skip]);
            yes = apply_test(ev, (struct span){test.p, test.len}, item, &rest);
        }
        if (yes == want) list_push(ev, out, l->item[i]);
    }
    return lazy_value(out);
}
static struct value f_select(struct eval *ev, struct value v, const struct args *a)
{
    return choose(ev, v, a, false, true);
}
static struct value f_reject(struct eval *ev, struct value v, const struct args *a)
{
    return choose(ev, v, a, false, false);
}
static struct value f_selectattr(struct eval *ev, struct value v, const struct args *a)
{
    return choose(ev, v, a, true, true);
}
static struct value f_rejectattr(struct eval *ev, struct value v, const struct args *a)
{
    return choose(ev, v, a, true, false);
}

static struct value f_sum(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = to_items(ev, v);
    struct value attribute = arg(a, 0, "attribute", v_none()), sum = arg(a, 1, "start", v_int(0));
    for (size_t i = 0; i < l->len && !ev->rc; i++) {
        struct value x = attribute.kind == V_NONE ? l->item[i] : follow(ev, l->item[i], attribute);
        if ((x.kind != V_INT && x.kind != V_FLOAT && x.kind != V_BOOL) || (sum.kind != V_INT && sum.kind != V_FLOAT))
            return fail(ev, ERR_INPUT, "sum needs numbers, not %s", kind_name(x.kind));
        if (sum.kind == V_INT && x.kind != V_FLOAT) sum.i += x.kind == V_INT ? x.i : x.b;
        else
            sum = v_float((sum.kind == V_INT ? (double)sum.i : sum.f) + (x.kind == V_FLOAT ? x.f
                                                                         : x.kind == V_INT ? (double)x.i
                                                                                           : x.b));
    }
    return sum;
}

static struct value extreme(struct eval *ev, struct value v, const struct args *a, int sign)
{
    struct order o = {arg(a, 1, "attribute", v_none()), truthy(arg(a, 0, "case_sensitive", v_bool(false))), false};
    struct list *l = to_items(ev, v);
    struct value best = v_undefined(span_of("an empty sequence"));
    for (size_t i = 0; i < l->len && !ev->rc; i++)
        if (i == 0 || sign * values_compare(ev, sort_key(ev, l->item[i], &o), sort_key(ev, best, &o)) > 0)
            best = l->item[i];
    return best;
}
static struct value f_max(struct eval *ev, struct value v, const struct args *a) { return extreme(ev, v, a, 1); }
static struct value f_min(struct eval *ev, struct value v, const struct args *a) { return extreme(ev, v, a, -1); }

static struct value f_batch(struct eval *ev, struct value v, const struct args *a)
{
    struct list *l = to_items(ev, v), *out = v_list(ev, V_LIST).list;
    int64_t size = arg_int(ev, a, 0, "linecount", 1);
    struct value fill = arg(a, 1, "fill_with", v_none());
    if (size < 1 || size > 1000000) return fail(ev, ERR_INPUT, "batch size %lld is out of range", (long long)size);
    for (size_t i = 0; i < l->len && !ev->rc; i += (size_t)size) {
        struct value row = v_list(ev, V_LIST);
        for (size_t j = i; j < i + (size_t)size; j++)
            if (j < l->len) list_push(ev, row.list, l->item[j]);
            else if (fill.kind != V_NONE) list_push(ev, row.list, fill);
        list_push(ev, out, row);
    }
    return lazy_value(out);
}

static struct value f_default(struct eval *ev, struct value v, const struct args *a)
{
    bool boolean = truthy(arg(a, 1, "boolean", v_bool(false)));
    (void)ev;
    return v.kind == V_UNDEFINED || (boolean && !truthy(v)) ? arg(a, 0, "default_value", v_str(str_lit(""))) : v;
}

static struct value f_attr(struct eval *ev, struct value v, const struct args *a)
{
    struct str name = arg_str(ev, a, 0, "name", "");
    return get_attr(ev, v, (struct span){name.p, name.len});
}

static struct value f_safe(struct eval *ev, struct value v, const struct args *a)
{
    (void)a;
    return (struct value){.kind = V_STR, .markup = true, .s = to_str(ev, v)};
}

static const struct {
    const char *name;
    filter_fn *run;
} filters[] = {
    {"abs", f_abs},         {"attr", f_attr},
    {"batch", f_batch},     {"capitalize", f_capitalize},
    {"count", f_length},    {"d", f_default},
    {"default", f_default}, {"dictsort", f_dictsort},
    {"e", f_escape},        {"escape", f_escape},
    {"first", f_first},     {"float", f_float},
    {"format", f_format},   {"indent", f_indent},
    {"int", f_int},         {"items", f_items},
    {"join", f_join},       {"last", f_last},
    {"length", f_length},   {"list", f_list},
    {"lower", f_lower},     {"map", f_map},
    {"max", f_max},         {"min", f_min},
    {"reject", f_reject},   {"rejectattr", f_rejectattr},
    {"replace", f_replace}, {"reverse", f_reverse},
    {"round", f_round},     {"safe", f_safe},
    {"select", f_select},   {"selectattr", f_selectattr},
    {"sort", f_sort},       {"string", f_string},
    {"sum", f_sum},         {"title", f_title},
    {"tojson", f_tojson},   {"trim", f_trim},
    {"unique", f_unique},   {"upper", f_upper},
};

struct value apply_filter(struct eval *ev, struct span name, struct value v, const struct args *a)
{
    if (ev->rc) return v;
    for (size_t i = 0; i < COUNT_OF(filters); i++)
        if (span_is(name, filters[i].name)) return filters[i].run(ev, v, a);
    return fail(ev, ERR_UNSUPPORTED, "filter '%.*s' is not supported", (int)name.len, name.ptr);
}

/* ------------------------------------------------------------------------------------------------ tests */

static bool compared(struct eval *ev, struct value v, const struct args *a, int *c)
{
    *c = a->n ? values_compare(ev, v, a->pos[0]) : 0;
    return a->n > 0;
}

bool apply_test(struct eval *ev, struct span name, struct value v, const struct args *a)
{
    struct value other = arg(a, 0, NULL, v_none());
    bool number = v.kind == V_INT || v.kind == V_FLOAT || v.kind == V_BOOL;
    int c;
    if (ev->rc) return false;
    if (span_is(name, "defined")) return v.kind != V_UNDEFINED;
    if (span_is(name, "undefined")) return v.kind == V_UNDEFINED;
    if (span_is(name, "none")) return v.kind == V_NONE;
    if (span_is(name, "string")) return v.kind == V_STR;
    if (span_is(name, "number")) return number;
    if (span_is(name, "integer")) return v.kind == V_INT;
    if (span_is(name, "float")) return v.kind == V_FLOAT;
    if (span_is(name, "boolean")) return v.kind == V_BOOL;
    if (span_is(name, "true")) return v.kind == V_BOOL && v.b;
    if (span_is(name, "false")) return v.kind == V_BOOL && !v.b;
    if (span_is(name, "mapping")) return v.kind == V_DICT;
    if (span_is(name, "sequence"))
        return v.kind == V_STR || v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_DICT || v.kind == V_UNDEFINED;
    if (span_is(name, "iterable"))
        return v.kind == V_STR || v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_DICT ||
               v.kind == V_UNDEFINED || v.kind == V_LOOP;
    if (span_is(name, "callable")) return v.kind == V_MACRO || v.kind == V_FUNC;
    if (span_is(name, "odd") || span_is(name, "even") || span_is(name, "divisibleby")) {
        if (v.kind != V_INT || (a->n && (other.kind != V_INT || other.i == 0)))
            fail(ev, ERR_INPUT, "test '%.*s' needs integers", (int)name.len, name.ptr);
        else if (span_is(name, "divisibleby")) return other.kind == V_INT && (other.i == -1 || v.i % other.i == 0);
        else return (v.i % 2 != 0) == span_is(name, "odd");
        return false;
    }
    if (span_is(name, "eq") || span_is(name, "equalto") || span_is(name, "==")) return values_equal(v, other);
    if (span_is(name, "ne") || span_is(name, "!=")) return !values_equal(v, other);
    if (span_is(name, "lt") || span_is(name, "lessthan") || span_is(name, "<"))
        return compared(ev, v, a, &c) && c < 0;
    if (span_is(name, "gt") || span_is(name, "greaterthan") || span_is(name, ">"))
        return compared(ev, v, a, &c) && c > 0;
    if (span_is(name, "le") || span_is(name, "<=")) return compared(ev, v, a, &c) && c <= 0;
    if (span_is(name, "ge") || span_is(name, ">=")) return compared(ev, v, a, &c) && c >= 0;
    if (span_is(name, "in")) {
        if (other.kind == V_STR && v.kind == V_STR)
            return v.s.len == 0 || (other.s.len >= v.s.len && memmem(other.s.p, other.s.len, v.s.p, v.s.len));
        struct list *l = to_items(ev, other);
        for (size_t i = 0; i < l->len; i++)
            if (values_equal(l->item[i], v)) return true;
        return false;
    }
    if (span_is(name, "sameas")) return v.kind == other.kind && values_equal(v, other);
    if (span_is(name, "lower")) return v.kind == V_STR && str_eq(v.s, str_case(ev, v.s, 'l'));
    if (span_is(name, "upper")) return v.kind == V_STR && str_eq(v.s, str_case(ev, v.s, 'u'));
    fail(ev, ERR_UNSUPPORTED, "test '%.*s' is not supported", (int)name.len, name.ptr);
    return false;
}
