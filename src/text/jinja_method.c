/* jinja_method.c: the methods of Python's str, dict and list that templates call, and the global functions. Methods that
 * would change a list or dict are refused, as the sandbox of transformers refuses them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

#include "jinja_priv.h"

static const char *const str_methods[] = {"strip",        "lstrip",     "rstrip",    "split",     "rsplit",
                                          "splitlines",   "startswith", "endswith",  "replace",   "find",
                                          "rfind",        "index",      "count",     "upper",     "lower",
                                          "title",        "capitalize", "join",      "format",    "isdigit",
                                          "isalpha",      "isspace",    "isupper",   "islower",   "removeprefix",
                                          "removesuffix", "zfill",      "partition", "rpartition"};
static const char *const dict_methods[] = {"get",    "items", "keys",       "values", "copy",
                                           "update", "pop",   "setdefault", "clear",  "popitem"};
static const char *const list_methods[] = {"index", "count",  "copy",    "append", "extend", "insert",
                                           "pop",   "remove", "reverse", "sort",   "clear"};
static const char *const changing[] = {"update", "pop",    "setdefault", "clear",   "popitem", "append",
                                       "extend", "insert", "remove",     "reverse", "sort"};
static const char *const globals[] = {"range", "dict", "namespace", "raise_exception", "strftime_now"};

static bool among(struct span name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (span_is(name, list[i])) return true;
    return false;
}

bool is_global(struct span name) { return among(name, globals, COUNT_OF(globals)); }

bool is_method(struct value self, struct span name)
{
    if (self.kind == V_STR) return among(name, str_methods, COUNT_OF(str_methods));
    if (self.kind == V_DICT) return among(name, dict_methods, COUNT_OF(dict_methods));
    if (self.kind == V_LIST || self.kind == V_TUPLE) return among(name, list_methods, COUNT_OF(list_methods));
    return false;
}

/* ------------------------------------------------------------------------------------------------ strings */

/* White space as Python's str.strip() and str.split() see it: Unicode's, and U+001C-001F. */
static bool is_white(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F ||
           cp == 0x3000;
}

static uint32_t code_at(struct str s, size_t i, size_t *len)
{
    int n = utf8_step(s.p + i, s.len - i);
    *len = n > 0 ? (size_t)n : 1;
    return n > 0 ? utf8_code(s.p + i, n) : 0xFFFD;
}

/* Start of the character that ends before byte `end`. */
static size_t char_before(struct str s, size_t end)
{
    do end--;
    while (end > 0 && ((unsigned char)s.p[end] & 0xC0) == 0x80);
    return end;
}

static bool strippable(struct str s, size_t i, const struct str *chars)
{
    size_t len, n;
    uint32_t cp = code_at(s, i, &len);
    if (!chars) return is_white(cp);
    for (size_t k = 0; k < chars->len; k += n)
        if (code_at(*chars, k, &n) == cp) return true;
    return false;
}

struct str str_strip(struct str s, const struct str *chars, bool left, bool right)
{
    size_t from = 0, to = s.len, len;
    while (left && from < to && strippable(s, from, chars)) {
        code_at(s, from, &len);
        from += len;
    }
    while (right && to > from && strippable(s, char_before(s, to), chars)) to = char_before(s, to);
    return str_sub(s, from, to);
}

struct str str_case(struct eval *ev, struct str s, char how)
{
    struct out o = {0};
    bool in_word = false;
    size_t len;
    for (size_t i = 0; i < s.len && !ev->rc; i += len) {
        uint32_t cp = code_at(s, i, &len);
        utf8proc_int32_t c = (utf8proc_int32_t)cp, up = utf8proc_toupper(c), low = utf8proc_tolower(c);
        bool raise = how == 'u' || (how == 't' && !in_word) || (how == 'c' && i == 0);
        utf8proc_int32_t to = raise ? (how == 'u' ? up : utf8proc_totitle(c)) : low;
        char text[4];
        uint8_t marks[4];
        in_word = up != c || low != c;
        memset(marks, s.marks ? s.marks[i] : 0, sizeof marks);
        out_str(ev, &o, (struct str){text, marks, (size_t)utf8_put(text, (uint32_t)to)});
    }
    return out_take(&o);
}

/* First place of `what` in s from byte `at` on; SIZE_MAX if there is none. */
static size_t find_from(struct str s, struct str what, size_t at)
{
    if (what.len > s.len || at > s.len - what.len) return SIZE_MAX;
    if (what.len == 0) return at;
    const char *p = memmem(s.p + at, s.len - at, what.p, what.len);
    return p ? (size_t)(p - s.p) : SIZE_MAX;
}

static size_t find_last(struct str s, struct str what, size_t end)
{
    for (size_t i = end >= what.len ? end - what.len + 1 : 0; i-- > 0;)
        if (!memcmp(s.p + i, what.p, what.len)) return i;
    return SIZE_MAX;
}

struct str str_replace(struct eval *ev, struct str s, struct str from, struct str to, int64_t count)
{
    struct out o = {0};
    size_t at = 0, hit, len;
    if (from.len == 0) { /* between all characters */
        for (; count != 0 && !ev->rc; count--) {
            out_str(ev, &o, to);
            if (at >= s.len) break;
            code_at(s, at, &len);
            out_str(ev, &o, str_sub(s, at, at + len));
            at += len;
        }
        out_str(ev, &o, str_sub(s, at, s.len));
        return out_take(&o);
    }
    for (; count != 0 && !ev->rc && (hit = find_from(s, from, at)) != SIZE_MAX; count--) {
        out_str(ev, &o, str_sub(s, at, hit));
        out_str(ev, &o, to);
        at = hit + from.len;
    }
    out_str(ev, &o, str_sub(s, at, s.len));
    return out_take(&o);
}

static struct value split_white(struct eval *ev, struct str s, int64_t most)
{
    struct value out = v_list(ev, V_LIST);
    size_t i = 0, len;
    while (!ev->rc) {
        while (i < s.len && is_white(code_at(s, i, &len))) i += len;
        if (i >= s.len) break;
        if (most >= 0 && (int64_t)out.list->len == most) {
            list_push(ev, out.list, v_str(str_strip(str_sub(s, i, s.len), NULL, false, true)));
            break;
        }
        size_t from = i;
        while (i < s.len && !is_white(code_at(s, i, &len))) i += len;
        list_push(ev, out.list, v_str(str_sub(s, from, i)));
    }
    return out;
}

static struct value split(struct eval *ev, struct str s, const struct args *a, bool right)
{
    struct value sep = arg(a, 0, "sep", v_none()), out = v_list(ev, V_LIST);
    int64_t most = arg_int(ev, a, 1, "maxsplit", -1);
    if (sep.kind == V_NONE && right && most >= 0)
        return fail(ev, ERR_UNSUPPORTED, "rsplit by white space with maxsplit is not supported");
    if (sep.kind == V_NONE) return split_white(ev, s, most);
    if (sep.kind != V_STR || sep.s.len == 0)
        return fail(ev, ERR_INPUT, "split needs a separator that is a string and not empty");
    if (right && most >= 0) {
        size_t end = s.len, hit;
        struct value back = v_list(ev, V_LIST);
        for (; most > 0 && (hit = find_last(s, sep.s, end)) != SIZE_MAX; most--) {
            list_push(ev, back.list, v_str(str_sub(s, hit + sep.s.len, end)));
            end = hit;
        }
        list_push(ev, out.list, v_str(str_sub(s, 0, end)));
        for (size_t i = back.list->len; i-- > 0;) list_push(ev, out.list, back.list->item[i]);
        return out;
    }
    size_t at = 0, hit;
    for (; most != 0 && !ev->rc && (hit = find_from(s, sep.s, at)) != SIZE_MAX; most--) {
        list_push(ev, out.list, v_str(str_sub(s, at, hit)));
        at = hit + sep.s.len;
    }
    list_push(ev, out.list, v_str(str_sub(s, at, s.len)));
    return out;
}

static struct value splitlines(struct eval *ev, struct str s, const struct args *a)
{
    bool keep = truthy(arg(a, 0, "keepends", v_bool(false)));
    struct value out = v_list(ev, V_LIST);
    size_t from = 0, len;
    for (size_t i = 0; i < s.len && !ev->rc; i += len) {
        uint32_t cp = code_at(s, i, &len);
        if (!((cp >= 10 && cp <= 13) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 || cp == 0x2029))
            continue;
        size_t end = i;
        if (cp == '\r' && i + 1 < s.len && s.p[i + 1] == '\n') len = 2;
        list_push(ev, out.list, v_str(str_sub(s, from, keep ? i + len : end)));
        from = i + len;
    }
    if (from < s.len) list_push(ev, out.list, v_str(str_sub(s, from, s.len)));
    return out;
}

/* startswith, endswith: one string or a tuple of them. */
static struct value has_end(struct eval *ev, struct str s, const struct args *a, bool start)
{
    struct value what = arg(a, 0, NULL, v_none());
    struct list one = {.item = &what, .len = 1}, *all = what.kind == V_TUPLE ? what.list : &one;
    for (size_t i = 0; i < all->len; i++) {
        if (all->item[i].kind != V_STR)
            return fail(ev, ERR_INPUT, "%s needs a string or a tuple of strings", start ? "startswith" : "endswith");
        struct str w = all->item[i].s;
        if (w.len <= s.len && (w.len == 0 || !memcmp(start ? s.p : s.p + s.len - w.len, w.p, w.len)))
            return v_bool(true);
    }
    return v_bool(false);
}

/* "{} {0} {name} {{" without format specifications. */
static struct value format(struct eval *ev, struct str s, const struct args *a)
{
    struct out o = {0};
    size_t next = 0;
    for (size_t i = 0; i < s.len && !ev->rc; i++) {
        char c = s.p[i];
        if ((c == '{' || c == '}') && i + 1 < s.len && s.p[i + 1] == c) {
            out_str(ev, &o, str_sub(s, i, i + 1));
            i++;
            continue;
        }
        if (c == '}') return fail(ev, ERR_INPUT, "Single '}' encountered in format string");
        if (c != '{') {
            out_str(ev, &o, str_sub(s, i, i + 1));
            continue;
        }
        const char *end = memchr(s.p + i, '}', s.len - i);
        if (!end) return fail(ev, ERR_INPUT, "expected '}' before end of string");
        struct str field = str_sub(s, i + 1, (size_t)(end - s.p));
        struct value v;
        bool digits = field.len > 0 && field.len < 6;
        for (size_t k = 0; k < field.len; k++) {
            digits &= field.p[k] >= '0' && field.p[k] <= '9';
            if (strchr(":!.[", field.p[k]))
                return fail(ev, ERR_UNSUPPORTED, "format field '%.*s' is not supported", (int)field.len, field.p);
        }
        size_t index = field.len == 0 ? next++ : digits ? (size_t)strtol(field.p, NULL, 10) : SIZE_MAX;
        if (index < a->n) v = a->pos[index];
        else if (index != SIZE_MAX || !dict_get(&a->kw, v_str(field), &v))
            return fail(ev, ERR_INPUT, "format field '%.*s' has no argument", (int)field.len, field.p);
        out_str(ev, &o, to_str(ev, v));
        i = (size_t)(end - s.p);
    }
    return v_str(out_take(&o));
}

/* True if s is not empty and every character is of the kind. */
static bool all_chars(struct str s, const char *kind)
{
    bool cased = false;
    size_t len;
    for (size_t i = 0; i < s.len; i += len) {
        utf8proc_int32_t c = (utf8proc_int32_t)code_at(s, i, &len);
        utf8proc_category_t cat = utf8proc_category(c);
        bool letter = cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO;
        cased |= cat == UTF8PROC_CATEGORY_LU || cat == UTF8PROC_CATEGORY_LL;
        if (!strcmp(kind, "isdigit") && cat != UTF8PROC_CATEGORY_ND) return false;
        if (!strcmp(kind, "isalpha") && !letter) return false;
        if (!strcmp(kind, "isspace") && !is_white((uint32_t)c)) return false;
        if (!strcmp(kind, "isupper") && cat == UTF8PROC_CATEGORY_LL) return false;
        if (!strcmp(kind, "islower") && cat == UTF8PROC_CATEGORY_LU) return false;
    }
    return s.len > 0 && (cased || (strcmp(kind, "isupper") && strcmp(kind, "islower")));
}

static struct value partition(struct eval *ev, struct str s, struct str sep, bool right)
{
    struct value out = v_list(ev, V_TUPLE);
    if (sep.len == 0) return fail(ev, ERR_INPUT, "empty separator");
    size_t hit = right ? find_last(s, sep, s.len) : find_from(s, sep, 0);
    bool found = hit != SIZE_MAX;
    list_push(ev, out.list, v_str(found ? str_sub(s, 0, hit) : right ? str_lit("") : s));
    list_push(ev, out.list, v_str(found ? sep : str_lit("")));
    list_push(ev, out.list, v_str(found ? str_sub(s, hit + sep.len, s.len) : right ? s : str_lit("")));
    return out;
}

static struct value str_method(struct eval *ev, struct str s, const char *name, const struct args *a)
{
    struct value first = arg(a, 0, NULL, v_none());
    struct span n = span_of(name);
    struct str w = first.kind == V_STR ? first.s : (struct str){"", NULL, 0};
    if (span_is(n, "strip") || span_is(n, "lstrip") || span_is(n, "rstrip"))
        return v_str(str_strip(s, first.kind == V_STR ? &w : NULL, name[0] != 'r', name[0] != 'l'));
    if (span_is(n, "split") || span_is(n, "rsplit")) return split(ev, s, a, name[0] == 'r');
    if (span_is(n, "splitlines")) return splitlines(ev, s, a);
    if (span_is(n, "startswith") || span_is(n, "endswith")) return has_end(ev, s, a, name[0] == 's');
    if (span_is(n, "upper") || span_is(n, "lower") || span_is(n, "title") || span_is(n, "capitalize"))
        return v_str(str_case(ev, s, name[0]));
    if (span_is(n, "format")) return format(ev, s, a);
    if (span_is(n, "join")) {
        struct args sep = {.pos = &(struct value){.kind = V_STR, .s = s}, .n = 1};
        struct list *l = to_items(ev, first);
        for (size_t i = 0; i < l->len; i++)
            if (l->item[i].kind != V_STR)
                return fail(ev, ERR_INPUT, "sequence item %zu: expected str instance, %s found", i,
                            kind_name(l->item[i].kind));
        return apply_filter(ev, span_of("join"), first, &sep);
    }
    if (name[0] == 'i' && name[1] == 's') return v_bool(all_chars(s, name));
    if (span_is(n, "zfill")) {
        int64_t width = arg_int(ev, a, 0, "width", 0), have = (int64_t)str_chars(s);
        struct out o = {0};
        size_t sign = s.len && (s.p[0] == '-' || s.p[0] == '+');
        if (width > 10000) return fail(ev, ERR_INPUT, "zfill width %lld is too large", (long long)width);
        out_str(ev, &o, str_sub(s, 0, sign));
        for (; have < width; have++) out_str(ev, &o, str_lit("0"));
        out_str(ev, &o, str_sub(s, sign, s.len));
        return v_str(out_take(&o));
    }
    if (first.kind != V_STR) return fail(ev, ERR_INPUT, "%s needs a string, not %s", name, kind_name(first.kind));
    if (span_is(n, "replace")) {
        struct value to = arg(a, 1, NULL, v_none());
        if (to.kind != V_STR) return fail(ev, ERR_INPUT, "replace needs two strings");
        return v_str(str_replace(ev, s, w, to.s, arg_int(ev, a, 2, "count", -1)));
    }
    if (span_is(n, "partition") || span_is(n, "rpartition")) return partition(ev, s, w, name[0] == 'r');
    if (span_is(n, "removeprefix")) return v_str(truthy(has_end(ev, s, a, true)) ? str_sub(s, w.len, s.len) : s);
    if (span_is(n, "removesuffix")) return v_str(truthy(has_end(ev, s, a, false)) ? str_sub(s, 0, s.len - w.len) : s);
    if (span_is(n, "count")) {
        int64_t hits = 0;
        if (w.len == 0) return v_int((int64_t)str_chars(s) + 1);
        for (size_t at = 0; (at = find_from(s, w, at)) != SIZE_MAX; at += w.len) hits++;
        return v_int(hits);
    }
    if (a->n > 1) return fail(ev, ERR_UNSUPPORTED, "%s with a range is not supported", name);
    size_t hit = span_is(n, "rfind") ? find_last(s, w, s.len) : find_from(s, w, 0);
    if (hit == SIZE_MAX && span_is(n, "index")) return fail(ev, ERR_INPUT, "substring not found");
    return v_int(hit == SIZE_MAX ? -1 : (int64_t)str_chars(str_sub(s, 0, hit)));
}

/* ------------------------------------------------------------------------------------------------ dicts, lists, loops */

static struct value dict_method(struct eval *ev, struct value self, const char *name, const struct args *a)
{
    struct dict *d = self.dict;
    struct value out;
    if (!strcmp(name, "get")) {
        if (a->n == 0) return fail(ev, ERR_INPUT, "get expected at least 1 argument, got 0");
        return dict_get(d, a->pos[0], &out) ? out : arg(a, 1, NULL, v_none());
    }
    if (!strcmp(name, "items")) return apply_filter(ev, span_of("items"), self, &(struct args){0});
    out = v_list(ev, V_LIST);
    if (!strcmp(name, "copy")) out = v_dict(ev);
    for (size_t i = 0; i < d->len && !ev->rc; i++) {
        if (out.kind == V_DICT) dict_set(ev, out.dict, d->key[i], d->val[i]);
        else list_push(ev, out.list, name[0] == 'k' ? d->key[i] : d->val[i]);
    }
    return out;
}

static struct value list_method(struct eval *ev, struct value self, const char *name, const struct args *a)
{
    int64_t hits = 0;
    if (!strcmp(name, "copy")) return apply_filter(ev, span_of("list"), self, &(struct args){0});
    if (a->n != 1) return fail(ev, ERR_UNSUPPORTED, "%s takes one argument here", name);
    for (size_t i = 0; i < self.list->len; i++) {
        if (!values_equal(self.list->item[i], a->pos[0])) continue;
        if (!strcmp(name, "index")) return v_int((int64_t)i);
        hits++;
    }
    return !strcmp(name, "count") ? v_int(hits) : fail(ev, ERR_INPUT, "the value is not in the list");
}

static struct value loop_method(struct eval *ev, struct loop *l, const char *name, const struct args *a)
{
    if (!strcmp(name, "cycle"))
        return a->n ? a->pos[l->index % a->n] : fail(ev, ERR_INPUT, "no items for cycling given");
    struct value now = v_list(ev, V_TUPLE);
    for (size_t i = 0; i < a->n; i++) list_push(ev, now.list, a->pos[i]);
    bool changed = !l->has_changed || !values_equal(l->changed, now);
    l->changed = now;
    l->has_changed = true;
    return v_bool(changed);
}

/* ------------------------------------------------------------------------------------------------ global functions */

static struct value g_range(struct eval *ev, const struct args *a)
{
    int64_t from = a->n > 1 ? arg_int(ev, a, 0, "start", 0) : 0, to = arg_int(ev, a, a->n > 1 ? 1 : 0, "stop", 0),
            step = a->n > 2 ? arg_int(ev, a, 2, "step", 1) : 1;
    struct value out = v_list(ev, V_LIST);
    if (a->n == 0 || step == 0)
        return fail(ev, ERR_INPUT, "range needs one to three integers, and a step that is not 0");
    for (int64_t i = from; step > 0 ? i < to : i > to; i += step) {
        if (out.list->len >= 100000)
            return fail(ev, ERR_INPUT, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
        if (ev->rc) break;
        list_push(ev, out.list, v_int(i));
        if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) break;
    }
    return out;
}

static struct value g_dict(struct eval *ev, const struct args *a, enum value_kind kind)
{
    struct value d = v_dict(ev);
    d.kind = kind;
    if (a->n > 1 || (a->n == 1 && a->pos[0].kind != V_DICT))
        return fail(ev, ERR_UNSUPPORTED, "dict and namespace take keywords or one dict");
    for (size_t i = 0; a->n && i < a->pos[0].dict->len; i++)
        dict_set(ev, d.dict, a->pos[0].dict->key[i], a->pos[0].dict->val[i]);
    for (size_t i = 0; i < a->kw.len; i++) dict_set(ev, d.dict, a->kw.key[i], a->kw.val[i]);
    return d;
}

static struct value g_strftime_now(struct eval *ev, const struct args *a)
{
    char pattern[128], text[512];
    time_t now = (time_t)ev->now;
    struct tm tm;
    struct str s = to_str(ev, arg(a, 0, "format", v_str(str_lit(""))));
    if (s.len >= sizeof pattern) return fail(ev, ERR_INPUT, "a date format of %zu bytes is too long", s.len);
    memcpy(pattern, s.p, s.len);
    pattern[s.len] = 0;
    localtime_r(&now, &tm);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, sizeof text, pattern, &tm);
#pragma GCC diagnostic pop
    return v_text(ev, text, n);
}

static struct value call_global(struct eval *ev, const char *name, const struct args *a)
{
    if (!strcmp(name, "range")) return g_range(ev, a);
    if (!strcmp(name, "dict")) return g_dict(ev, a, V_DICT);
    if (!strcmp(name, "namespace")) return g_dict(ev, a, V_NAMESPACE);
    if (!strcmp(name, "strftime_now")) return g_strftime_now(ev, a);
    struct str why = to_str(ev, arg(a, 0, "message", v_str(str_lit(""))));
    return fail(ev, ERR_INPUT, "the template refuses the conversation: %.*s", (int)(why.len < 400 ? why.len : 400),
                why.p);
}

struct value call_func(struct eval *ev, const struct func *f, const struct args *a)
{
    if (!f->method) return call_global(ev, f->name, a);
    if (f->self.kind == V_STR) return str_method(ev, f->self.s, f->name, a);
    if (f->self.kind == V_LOOP) return loop_method(ev, f->self.loop, f->name, a);
    if (among(span_of(f->name), changing, COUNT_OF(changing)))
        return fail(ev, ERR_INPUT, "access to attribute '%s' of '%s' object is unsafe", f->name,
                    kind_name(f->self.kind));
    if (f->self.kind == V_DICT) return dict_method(ev, f->self, f->name, a);
    return list_method(ev, f->self, f->name, a);
}
