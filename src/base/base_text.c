/* base_text.c: UTF-8, checked byte by byte against the Unicode standard's table of well-formed sequences (3-7): no
 * overlong forms, no surrogates, nothing above U+10FFFF. One step at a time, because streams end anywhere. */
#include "base.h"

int utf8_step(const char *s, size_t n)
{
    const unsigned char *p = (const unsigned char *)s;
    unsigned char c = p[0], lo = 0x80, hi = 0xBF;
    int len;
    if (c < 0x80) return 1;
    if (c >= 0xC2 && c <= 0xDF) len = 2;
    else if (c >= 0xE0 && c <= 0xEF) len = 3;
    else if (c >= 0xF0 && c <= 0xF4) len = 4;
    else return 0;
    if (c == 0xE0) lo = 0xA0;
    if (c == 0xED) hi = 0x9F;
    if (c == 0xF0) lo = 0x90;
    if (c == 0xF4) hi = 0x8F;
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) return -i;
        if (p[i] < lo || p[i] > hi) return 0;
        lo = 0x80;
        hi = 0xBF;
    }
    return len;
}

bool utf8_valid(struct span s)
{
    for (size_t i = 0; i < s.len;) {
        int len = utf8_step(s.ptr + i, s.len - i);
        if (len <= 0) return false;
        i += (size_t)len;
    }
    return true;
}

uint32_t utf8_code(const char *s, int len)
{
    const unsigned char *p = (const unsigned char *)s;
    static const unsigned char first_bits[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    uint32_t cp = p[0] & first_bits[len];
    for (int i = 1; i < len; i++) cp = cp << 6 | (p[i] & 0x3Fu);
    return cp;
}

int utf8_put(char *out, uint32_t cp)
{
    int len = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int i = len - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)(lead[len] | cp);
    return len;
}
