/* tokenizer_scan.c: reads the large members of a tokenizer's JSON in place. A vocabulary of 150,000 tokens with
 * its merges is 11 MB of JSON; as a tree of values it takes longer to build than everything that is done with it.
 * So these members are found and taken out first, the rest goes through jansson, and what was taken out is read
 * here, as strictly.
 *
 * Finding is lax: it only counts brackets and quotes. That is safe, because every byte of the file is then read
 * strictly, by jansson or here. */
#include <string.h>

#include "tokenizer_priv.h"

static void skip_space(struct scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\r' || *s->p == '\t')) s->p++;
}

bool scan_sign(struct scan *s, char c)
{
    skip_space(s);
    if (s->p == s->end || *s->p != c) return false;
    s->p++;
    return true;
}

/* The closing quote of the string that s stands in, or NULL. *plain: nothing in it is escaped. */
static const char *closing_quote(const struct scan *s, bool *plain)
{
    *plain = true;
    for (const char *p = s->p; p < s->end; p++) {
        if (*p == '"') return p;
        if (*p == '\\') {
            *plain = false;
            if (++p == s->end) break;
        }
    }
    return NULL;
}

static bool hex4(const char *p, const char *end, uint32_t *out)
{
    *out = 0;
    if (end - p < 4) return false;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int v = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (v < 0) return false;
        *out = *out << 4 | (uint32_t)v;
    }
    return true;
}

/* Undoes the escapes of [p, end) into out, which has room: no escape is shorter than what it stands for. */
static bool unescape(const char *p, const char *end, char *out, size_t *len)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t n = 0;
    while (p < end) {
        if (*p != '\\') {
            out[n++] = *p++;
            continue;
        }
        const char *known = p[1] ? strchr(from, p[1]) : NULL;
        if (known) {
            out[n++] = to[known - from];
            p += 2;
            continue;
        }
        uint32_t cp, low;
        if (p[1] != 'u' || !hex4(p + 2, end, &cp)) return false;
        p += 6;
        if (cp >= 0xD800 && cp <= 0xDFFF) { /* half of a pair: the other must follow */
            if (cp >= 0xDC00 || end - p < 6 || p[0] != '\\' || p[1] != 'u' || !hex4(p + 2, end, &low)) return false;
            if (low < 0xDC00 || low > 0xDFFF) return false;
            cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
            p += 6;
        }
        n += (size_t)utf8_put(out + n, cp);
    }
    *len = n;
    return true;
}

bool scan_string(struct scan *s, struct span *out)
{
    bool plain, ascii = true;
    if (!scan_sign(s, '"')) return false;
    const char *begin = s->p, *end = closing_quote(s, &plain);
    if (!end) return false;
    for (const char *p = begin; p < end; p++) {
        if ((unsigned char)*p < 0x20) return false;
        ascii = ascii && (unsigned char)*p < 0x80;
    }
    struct span text = {begin, (size_t)(end - begin)};
    if (!ascii && !utf8_valid(text)) return false;
    if (!plain) {
        char *copy = arena_alloc(s->arena, text.len);
        if (!copy) s->no_memory = true;
        if (!copy || !unescape(begin, end, copy, &text.len)) return false;
        text.ptr = copy;
    }
    s->p = end + 1;
    *out = text;
    return true;
}

bool scan_int(struct scan *s, int64_t *out)
{
    int64_t v = 0;
    skip_space(s);
    const char *begin = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9' && s->p - begin < 18) v = 10 * v + (*s->p++ - '0');
    if (s->p == begin || (*begin == '0' && s->p - begin > 1)) return false;
    *out = v;
    return true;
}

bool scan_skip(struct scan *s)
{
    size_t depth = 0;
    skip_space(s);
    while (s->p < s->end) {
        bool plain;
        char c = *s->p;
        if (depth == 0 && (c == ',' || c == '}' || c == ']')) return true; /* a number or a word ended before it */
        s->p++;
        if (c == '"') {
            const char *quote = closing_quote(s, &plain);
            if (!quote) return false;
            s->p = quote + 1;
        } else if (c == '[' || c == '{') {
            depth++;
        } else if (c == ']' || c == '}') {
            depth--;
        }
        if (depth == 0 && (c == '"' || c == ']' || c == '}')) return true;
    }
    return depth == 0;
}

void json_find(struct span object, const char *const *keys, struct span *values, size_t n)
{
    for (size_t i = 0; i < n; i++) values[i] = (struct span){0};
    if (object.len == 0) return;
    struct scan s = {.p = object.ptr, .end = object.ptr + object.len};
    if (!scan_sign(&s, '{')) return;
    do {
        bool plain;
        if (!scan_sign(&s, '"')) return;
        const char *begin = s.p, *quote = closing_quote(&s, &plain);
        if (!quote) return;
        s.p = quote + 1;
        if (!scan_sign(&s, ':')) return;
        skip_space(&s);
        struct span key = {begin, (size_t)(quote - begin)}, value = {s.p, 0};
        if (!scan_skip(&s)) return;
        value.len = (size_t)(s.p - value.ptr);
        for (size_t i = 0; i < n; i++)
            if (span_is(key, keys[i])) values[i] = value; /* of equal keys the last, as in jansson */
    } while (scan_sign(&s, ','));
}

int json_without(struct buf *out, struct span json, const struct span *parts, size_t n)
{
    if (json.len == 0) return OK;
    const char *at = json.ptr, *end = json.ptr + json.len;
    for (;;) {
        const struct span *next = NULL;
        for (size_t i = 0; i < n; i++)
            if (parts[i].len && parts[i].ptr >= at && (!next || parts[i].ptr < next->ptr)) next = &parts[i];
        if (!next) return buf_append(out, at, (size_t)(end - at));
        TRY(buf_append(out, at, (size_t)(next->ptr - at)));
        TRY(buf_append(out, "null", 4));
        at = next->ptr + next->len;
    }
}
