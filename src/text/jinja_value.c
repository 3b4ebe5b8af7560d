/* jinja_value.c: values with Python's meaning of truth, equality, order and printing, strings that carry their marks, and
 * JSON in and out. Everything lives in the render's arena, whose size is bounded. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jinja_priv.h"

struct value fail(struct eval *ev, int code, const char *fmt, ...)
{
    char why[512];
    va_list ap;
    if (ev->rc) return v_undefined((struct span){0});
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    ev->rc = err_set(ev->e, code, "%s: line %d: %s", ev->t->what, ev->line, why);
    return v_undefined((struct span){0});
}

void *ev_alloc(struct eval *ev, size_t n)
{
    void *p = n < jinja_max_bytes && ev->arena.bytes < jinja_max_bytes - n ? arena_alloc(&ev->arena, n) : NULL;
    if (p) return p;
    fail(ev, ERR_NOMEM, "rendering needs more than %zu MB", jinja_max_bytes >> 20);
    return n <= sizeof ev->scratch ? ev->scratch : NULL; /* the render has failed: written, never read for a result */
}

struct value v_undefined(struct span name)
{
    return (struct value){.kind = V_UNDEFINED, .s = {name.ptr, NULL, name.len}};
}
struct value v_none(void) { return (struct value){.kind = V_NONE}; }
struct value v_bool(bool b) { return (struct value){.kind = V_BOOL, .b = b}; }
struct value v_int(int64_t i) { return (struct value){.kind = V_INT, .i = i}; }
struct value v_float(double f) { return (struct value){.kind = V_FLOAT, .f = f}; }
struct value v_str(struct str s) { return (struct value){.kind = V_STR, .s = s}; }

struct value v_text(struct eval *ev, const char *p, size_t n)
{
    char *copy = ev_alloc(ev, n + 1);
    if (!copy) return v_str((struct str){"", NULL, 0});
    if (n) memcpy(copy, p, n);
    return v_str((struct str){copy, NULL, n});
}

struct value v_list(struct eval *ev, enum value_kind kind)
{
    struct list *l = ev_alloc(ev, sizeof *l);
    *l = (struct list){0};
    return (struct value){.kind = kind, .list = l};
}

struct value v_dict(struct eval *ev)
{
    struct dict *d = ev_alloc(ev, sizeof *d);
    *d = (struct dict){0};
    return (struct value){.kind = V_DICT, .dict = d};
}

/* Room for one more element of `size` bytes in *array. False once the render has failed. */
static bool grow(struct eval *ev, void *array_ptr, size_t len, size_t *cap, size_t size)
{
    void *old, *fresh;
    if (len < *cap) return true;
    size_t more = *cap ? 2 * *cap : 8;
    fresh = ev_alloc(ev, more * size);
    if (ev->rc || !fresh) return false;
    memcpy(&old, array_ptr, sizeof old);
    if (len) memcpy(fresh, old, len * size);
    memcpy(array_ptr, &fresh, sizeof fresh);
    *cap = more;
    return true;
}

void list_push(struct eval *ev, struct list *l, struct value v)
{
    if (!grow(ev, &l->item, l->len, &l->cap, sizeof v)) return;
    l->item[l->len++] = v;
}

void dict_set(struct eval *ev, struct dict *d, struct value key, struct value val)
{
    for (size_t i = 0; i < d->len; i++)
        if (values_equal(d->key[i], key)) {
            d->val[i] = val;
            return;
        }
    size_t cap = d->cap;
    if (!grow(ev, &d->key, d->len, &cap, sizeof key) || !grow(ev, &d->val, d->len, &d->cap, sizeof val)) return;
    d->key[d->len] = key;
    d->val[d->len++] = val;
}

bool dict_get(const struct dict *d, struct value key, struct value *out)
{
    for (size_t i = 0; i < d->len; i++)
        if (values_equal(d->key[i], key)) {
            *out = d->val[i];
            return true;
        }
    return false;
}

bool dict_get_str(const struct dict *d, const char *key, struct value *out)
{
    return dict_get(d, v_str(str_lit(key)), out);
}

/* ------------------------------------------------------------------------------------------------ strings */

struct str str_lit(const char *s) { return (struct str){s, NULL, strlen(s)}; }

struct str str_sub(struct str s, size_t from, size_t to)
{
    return (struct str){s.p + from, s.marks ? s.marks + from : NULL, to - from};
}

struct str str_concat(struct eval *ev, struct str a, struct str b)
{
    if (a.len == 0) return b;
    if (b.len == 0) return a;
    char *p = ev_alloc(ev, a.len + b.len + 1);
    uint8_t *marks = a.marks || b.marks ? ev_alloc(ev, a.len + b.len) : NULL;
    if (ev->rc) return (struct str){"", NULL, 0};
    memcpy(p, a.p, a.len);
    memcpy(p + a.len, b.p, b.len);
    if (marks && a.marks) memcpy(marks, a.marks, a.len);
    if (marks && b.marks) memcpy(marks + a.len, b.marks, b.len);
    return (struct str){p, marks, a.len + b.len};
}

struct str str_escape(struct eval *ev, struct str s)
{
    static const struct {
        char c;
        const char *to;
    } map[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'\'', "&#39;"}, {'"', "&#34;"}};
    struct out o = {0};
    for (size_t i = 0; i < s.len && !ev->rc; i++) {
        struct str piece = str_sub(s, i, i + 1);
        uint8_t marks[8];
        memset(marks, s.marks ? s.marks[i] : 0, sizeof marks);
        for (size_t k = 0; k < COUNT_OF(map); k++)
            if (s.p[i] == map[k].c) piece = (struct str){map[k].to, marks, strlen(map[k].to)};
        out_str(ev, &o, piece);
    }
    return out_take(&o);
}

struct value value_concat(struct eval *ev, struct value a, struct value b)
{
    struct str x = to_str(ev, a), y = to_str(ev, b);
    bool markup = a.markup || b.markup;
    if (markup && !a.markup) x = str_escape(ev, x);
    if (markup && !b.markup) y = str_escape(ev, y);
    return (struct value){.kind = V_STR, .markup = markup, .s = str_concat(ev, x, y)};
}

bool str_eq(struct str a, struct str b) { return a.len == b.len && (a.len == 0 || !memcmp(a.p, b.p, a.len)); }

size_t str_chars(struct str s)
{
    size_t n = 0;
    for (size_t i = 0; i < s.len; i++) n += ((unsigned char)s.p[i] & 0xC0) != 0x80;
    return n;
}

size_t str_at(struct str s, size_t index)
{
    size_t i = 0;
    for (; i < s.len; i++)
        if (((unsigned char)s.p[i] & 0xC0) != 0x80 && index-- == 0) break;
    return i;
}

/* ------------------------------------------------------------------------------------------------ meaning */

const char *kind_name(enum value_kind k)
{
    static const char *const names[] = {"Undefined", "NoneType", "bool",       "int",  "float",
                                        "str",       "list",     "tuple",      "dict", "Namespace",
                                        "Macro",     "function", "LoopContext"};
    return names[k];
}

bool truthy(struct value v)
{
    switch (v.kind) {
    case V_UNDEFINED:
    case V_NONE: return false;
    case V_BOOL: return v.b;
    case V_INT: return v.i != 0;
    case V_FLOAT: return v.f != 0;
    case V_STR: return v.s.len > 0;
    case V_LIST:
    case V_TUPLE: return v.list->len > 0;
    case V_DICT: return v.dict->len > 0;
    case V_NAMESPACE:
    case V_MACRO:
    case V_FUNC:
    case V_LOOP: break;
    }
    return true;
}

static bool is_number(struct value v) { return v.kind == V_BOOL || v.kind == V_INT || v.kind == V_FLOAT; }
static double number_of(struct value v) { return v.kind == V_FLOAT ? v.f : v.kind == V_INT ? (double)v.i : v.b; }
static int64_t int_of(struct value v) { return v.kind == V_INT ? v.i : v.b; }

bool values_equal(struct value a, struct value b)
{
    if (is_number(a) && is_number(b))
        return a.kind == V_FLOAT || b.kind == V_FLOAT ? number_of(a) == number_of(b) : int_of(a) == int_of(b);
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case V_UNDEFINED:
    case V_NONE: return true;
    case V_STR: return str_eq(a.s, b.s);
    case V_LIST:
    case V_TUPLE:
        if (a.list->len != b.list->len) return false;
        for (size_t i = 0; i < a.list->len; i++)
            if (!values_equal(a.list->item[i], b.list->item[i])) return false;
        return true;
    case V_DICT:
        if (a.dict->len != b.dict->len) return false;
        for (size_t i = 0; i < a.dict->len; i++) {
            struct value other;
            if (!dict_get(b.dict, a.dict->key[i], &other) || !values_equal(a.dict->val[i], other)) return false;
        }
        return true;
    default: return a.dict == b.dict; /* the same object */
    }
}

int values_compare(struct eval *ev, struct value a, struct value b)
{
    if (is_number(a) && is_number(b)) {
        double x = number_of(a), y = number_of(b);
        if (a.kind != V_FLOAT && b.kind != V_FLOAT) return int_of(a) < int_of(b) ? -1 : int_of(a) > int_of(b);
        return x < y ? -1 : x > y;
    }
    if (a.kind == V_STR && b.kind == V_STR) { /* UTF-8 sorts as code points do */
        size_t n = a.s.len < b.s.len ? a.s.len : b.s.len;
        int c = n ? memcmp(a.s.p, b.s.p, n) : 0;
        return c ? (c < 0 ? -1 : 1) : a.s.len < b.s.len ? -1 : a.s.len > b.s.len;
    }
    if ((a.kind == V_LIST || a.kind == V_TUPLE) && a.kind == b.kind) {
        for (size_t i = 0; i < a.list->len && i < b.list->len; i++)
            if (!values_equal(a.list->item[i], b.list->item[i]))
                return values_compare(ev, a.list->item[i], b.list->item[i]);
        return a.list->len < b.list->len ? -1 : a.list->len > b.list->len;
    }
    fail(ev, ERR_INPUT, "'%s' and '%s' have no order", kind_name(a.kind), kind_name(b.kind));
    return 0;
}

struct list *to_items(struct eval *ev, struct value v)
{
    struct value l;
    switch (v.kind) {
    case V_LIST:
    case V_TUPLE: return v.list;
    case V_UNDEFINED: return v_list(ev, V_LIST).list;
    case V_STR:
        l = v_list(ev, V_LIST);
        for (size_t i = 0; i < v.s.len && !ev->rc;) {
            int n = utf8_step(v.s.p + i, v.s.len - i);
            size_t step = n > 0 ? (size_t)n : 1;
            list_push(ev, l.list, v_str(str_sub(v.s, i, i + step)));
            i += step;
        }
        return l.list;
    case V_DICT:
        l = v_list(ev, V_LIST);
        for (size_t i = 0; i < v.dict->len; i++) list_push(ev, l.list, v.dict->key[i]);
        return l.list;
    default: fail(ev, ERR_INPUT, "'%s' object is not iterable", kind_name(v.kind)); return v_list(ev, V_LIST).list;
    }
}

/* ------------------------------------------------------------------------------------------------ output */

void out_str(struct eval *ev, struct out *o, struct str s)
{
    if (ev->rc || s.len == 0) return;
    if (o->len + s.len > jinja_max_output) {
        fail(ev, ERR_INPUT, "the rendered text is longer than %zu MB", jinja_max_output >> 20);
        return;
    }
    if (o->len + s.len > o->cap) {
        size_t cap = 2 * o->cap > o->len + s.len ? 2 * o->cap : o->len + s.len + 32;
        char *text = ev_alloc(ev, cap);
        uint8_t *marks = ev_alloc(ev, cap);
        if (ev->rc || !text || !marks) return;
        if (o->len) {
            memcpy(text, o->text, o->len);
            memcpy(marks, o->marks, o->len);
        }
        *o = (struct out){text, marks, o->len, cap};
    }
    memcpy(o->text + o->len, s.p, s.len);
    if (s.marks) memcpy(o->marks + o->len, s.marks, s.len);
    else memset(o->marks + o->len, 0, s.len);
    o->len += s.len;
}

static void out_text(struct eval *ev, struct out *o, const char *s) { out_str(ev, o, str_lit(s)); }

struct str out_take(const struct out *o)
{
    bool any = o->len && memchr(o->marks, 1, o->len);
    return (struct str){o->len ? o->text : "", any ? o->marks : NULL, o->len};
}

/* The shortest digits that read back as f, in Python's layout. */
static void float_text(double f, char out[40])
{
    char digits[40];
    int precision = 1;
    if (isnan(f)) {
        strcpy(out, "nan");
        return;
    }
    if (isinf(f)) {
        strcpy(out, f < 0 ? "-inf" : "inf");
        return;
    }
    do snprintf(digits, sizeof digits, "%.*e", precision - 1, f);
    while (strtod(digits, NULL) != f && ++precision <= 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        int decimals = precision - 1 - exponent;
        snprintf(out, 40, "%.*f", decimals > 1 ? decimals : 1, f);
    } else {
        snprintf(out, 40, "%.*e", precision - 1, f);
    }
}

/* Python's repr of a string: single quotes unless there are only single ones inside. */
static void repr_str(struct eval *ev, struct out *o, struct str s)
{
    bool single = s.len && memchr(s.p, '\'', s.len), twice = s.len && memchr(s.p, '"', s.len);
    char quote = single && !twice ? '"' : '\'', text[16];
    out_str(ev, o, (struct str){&quote, NULL, 1});
    for (size_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.p[i];
        const char *simple = c == '\n' ? "\\n" : c == '\r' ? "\\r" : c == '\t' ? "\\t" : c == '\\' ? "\\\\" : NULL;
        if (c == (unsigned char)quote) snprintf(text, sizeof text, "\\%c", c);
        else if (simple) snprintf(text, sizeof text, "%s", simple);
        else if (c < 0x20 || c == 0x7F) snprintf(text, sizeof text, "\\x%02x", c);
        else {
            out_str(ev, o, str_sub(s, i, i + 1));
            continue;
        }
        uint8_t marks[16];
        memset(marks, s.marks ? s.marks[i] : 0, sizeof marks);
        out_str(ev, o, (struct str){text, marks, strlen(text)});
    }
    out_str(ev, o, (struct str){&quote, NULL, 1});
}

static void print_value(struct eval *ev, struct out *o, struct value v, bool repr, int depth)
{
    char text[64];
    if (depth > MAX_DEPTH) {
        fail(ev, ERR_INPUT, "a value is nested too deeply to print");
        return;
    }
    switch (v.kind) {
    case V_UNDEFINED:
        if (repr) out_text(ev, o, "Undefined");
        return;
    case V_NONE: out_text(ev, o, "None"); return;
    case V_BOOL: out_text(ev, o, v.b ? "True" : "False"); return;
    case V_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        out_text(ev, o, text);
        return;
    case V_FLOAT:
        float_text(v.f, text);
        out_text(ev, o, text);
        return;
    case V_STR:
        if (repr) repr_str(ev, o, v.s);
        else out_str(ev, o, v.s);
        return;
    case V_LIST:
    case V_TUPLE:
        if (v.list->lazy) {
            fail(ev, ERR_UNSUPPORTED, "printing a generator is not supported: put it through the filter list");
            return;
        }
        out_text(ev, o, v.kind == V_LIST ? "[" : "(");
        for (size_t i = 0; i < v.list->len && !ev->rc; i++) {
            if (i) out_text(ev, o, ", ");
            print_value(ev, o, v.list->item[i], true, depth + 1);
        }
        out_text(ev, o, v.kind == V_LIST ? "]" : v.list->len == 1 ? ",)" : ")");
        return;
    case V_DICT:
        out_text(ev, o, "{");
        for (size_t i = 0; i < v.dict->len && !ev->rc; i++) {
            if (i) out_text(ev, o, ", ");
            print_value(ev, o, v.dict->key[i], true, depth + 1);
            out_text(ev, o, ": ");
            print_value(ev, o, v.dict->val[i], true, depth + 1);
        }
        out_text(ev, o, "}");
        return;
    case V_NAMESPACE:
    case V_MACRO:
    case V_FUNC:
    case V_LOOP: fail(ev, ERR_UNSUPPORTED, "printing a %s is not supported", kind_name(v.kind));
    }
}

struct str to_str(struct eval *ev, struct value v)
{
    struct out o = {0};
    if (v.kind == V_STR) return v.s;
    print_value(ev, &o, v, false, 0);
    return out_take(&o);
}

/* ------------------------------------------------------------------------------------------------ JSON */

static struct value marked_text(struct eval *ev, const char *p, size_t n, bool marked)
{
    struct value v = v_text(ev, p, n);
    uint8_t *marks = marked && n ? ev_alloc(ev, n) : NULL;
    if (marks && !ev->rc) v.s.marks = memset(marks, 1, n);
    return v;
}

struct value from_json(struct eval *ev, const json_t *j, bool marked, int depth)
{
    struct value v, item;
    size_t i;
    json_t *child;
    if (depth > MAX_DEPTH) return fail(ev, ERR_INPUT, "the conversation is nested too deeply");
    switch (json_typeof(j)) {
    case JSON_NULL: return v_none();
    case JSON_TRUE: return v_bool(true);
    case JSON_FALSE: return v_bool(false);
    case JSON_INTEGER: return v_int(json_integer_value(j));
    case JSON_REAL: return v_float(json_real_value(j));
    case JSON_STRING: return marked_text(ev, json_string_value(j), json_string_length(j), marked);
    case JSON_ARRAY:
        v = v_list(ev, V_LIST);
        json_array_foreach(j, i, child) list_push(ev, v.list, from_json(ev, child, marked, depth + 1));
        return v;
    case JSON_OBJECT:
        v = v_dict(ev);
        for (void *at = json_object_iter((json_t *)(uintptr_t)j); at && !ev->rc;
             at = json_object_iter_next((json_t *)(uintptr_t)j, at)) {
            item = marked_text(ev, json_object_iter_key(at), json_object_iter_key_len(at), marked);
            dict_set(ev, v.dict, item, from_json(ev, json_object_iter_value(at), marked, depth + 1));
        }
        return v;
    }
    return v_none();
}

static void json_str(struct eval *ev, struct out *o, struct str s, const struct json_style *style)
{
    char text[32];
    uint8_t marks[32];
    out_text(ev, o, "\"");
    for (size_t i = 0; i < s.len && !ev->rc;) {
        unsigned char c = (unsigned char)s.p[i];
        int len = utf8_step(s.p + i, s.len - i);
        size_t step = len > 0 ? (size_t)len : 1;
        const char *simple = c == '"'    ? "\\\""
                             : c == '\\' ? "\\\\"
                             : c == '\n' ? "\\n"
                             : c == '\r' ? "\\r"
                             : c == '\t' ? "\\t"
                             : c == '\b' ? "\\b"
                             : c == '\f' ? "\\f"
                                         : NULL;
        if (simple) {
            snprintf(text, sizeof text, "%s", simple);
        } else if (c < 0x20) {
            snprintf(text, sizeof text, "\\u%04x", c);
        } else if (style->ascii && (step > 1 || c == 0x7F) && c != 0x7F) {
            uint32_t cp = utf8_code(s.p + i, (int)step);
            if (cp < 0x10000) snprintf(text, sizeof text, "\\u%04x", cp);
            else
                snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xD800 + ((cp - 0x10000) >> 10),
                         0xDC00 + ((cp - 0x10000) & 0x3FF));
        } else {
            out_str(ev, o, str_sub(s, i, i + step));
            i += step;
            continue;
        }
        memset(marks, s.marks ? s.marks[i] : 0, sizeof marks);
        out_str(ev, o, (struct str){text, marks, strlen(text)});
        i += step;
    }
    out_text(ev, o, "\"");
}

static void new_line(struct eval *ev, struct out *o, const struct json_style *style, int depth)
{
    if (style->indent < 0) return;
    out_text(ev, o, "\n");
    for (int i = 0; i < style->indent * depth && !ev->rc; i++) out_text(ev, o, " ");
}

static struct str json_key(struct eval *ev, struct value k)
{
    switch (k.kind) {
    case V_STR: return k.s;
    case V_NONE: return str_lit("null");
    case V_BOOL: return str_lit(k.b ? "true" : "false");
    case V_INT:
    case V_FLOAT: return to_str(ev, k);
    default:
        fail(ev, ERR_INPUT, "keys must be str, int, float, bool or None, not %s", kind_name(k.kind));
        return str_lit("");
    }
}

/* Order of keys for sort: indices, by insertion sort over what are few keys. */
static size_t *key_order(struct eval *ev, const struct dict *d, bool sort)
{
    size_t *order = ev_alloc(ev, (d->len + 1) * sizeof *order);
    if (ev->rc) return NULL;
    for (size_t i = 0; i < d->len; i++) {
        size_t j = i;
        for (; sort && j > 0 && values_compare(ev, d->key[order[j - 1]], d->key[i]) > 0; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    return order;
}

void write_json(struct eval *ev, struct out *o, struct value v, const struct json_style *style, int depth)
{
    char text[64];
    if (depth > MAX_DEPTH) {
        fail(ev, ERR_INPUT, "a value is nested too deeply for JSON");
        return;
    }
    switch (v.kind) {
    case V_NONE: out_text(ev, o, "null"); return;
    case V_BOOL: out_text(ev, o, v.b ? "true" : "false"); return;
    case V_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        out_text(ev, o, text);
        return;
    case V_FLOAT:
        float_text(v.f, text);
        out_text(ev, o, isnan(v.f) ? "NaN" : isinf(v.f) ? (v.f < 0 ? "-Infinity" : "Infinity") : text);
        return;
    case V_STR: json_str(ev, o, v.s, style); return;
    case V_LIST:
    case V_TUPLE:
        if (v.list->lazy) {
            fail(ev, ERR_INPUT, "Object of type generator is not JSON serializable");
            return;
        }
        out_text(ev, o, "[");
        for (size_t i = 0; i < v.list->len && !ev->rc; i++) {
            if (i) out_str(ev, o, style->item_sep);
            new_line(ev, o, style, depth + 1);
            write_json(ev, o, v.list->item[i], style, depth + 1);
        }
        if (v.list->len) new_line(ev, o, style, depth);
        out_text(ev, o, "]");
        return;
    case V_DICT: {
        size_t *order = key_order(ev, v.dict, style->sort);
        out_text(ev, o, "{");
        for (size_t i = 0; i < v.dict->len && !ev->rc; i++) {
            if (i) out_str(ev, o, style->item_sep);
            new_line(ev, o, style, depth + 1);
            json_str(ev, o, json_key(ev, v.dict->key[order[i]]), style);
            out_str(ev, o, style->key_sep);
            write_json(ev, o, v.dict->val[order[i]], style, depth + 1);
        }
        if (v.dict->len) new_line(ev, o, style, depth);
        out_text(ev, o, "}");
        return;
    }
    case V_UNDEFINED:
    case V_NAMESPACE:
    case V_MACRO:
    case V_FUNC:
    case V_LOOP: fail(ev, ERR_INPUT, "Object of type %s is not JSON serializable", kind_name(v.kind));
    }
}
