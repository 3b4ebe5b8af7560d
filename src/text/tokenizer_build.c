/* tokenizer_build.c: the tables of a tokenizer: tokens by bytes, merges by pairs, split patterns, added tokens. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_priv.h"

/* ------------------------------------------------------------------------------------------------ split patterns */

const char pattern_gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char pattern_llama3[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char pattern_qwen2[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char pattern_o200k[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char pattern_tekken[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const char pattern_digits[] = "\\p{N}";

/* Unicode White_Space, as the members of a character class. */
static const char white_space[] = "\\x09-\\x0D\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}";

static int spell_out_spaces(struct span p, struct buf *out, const char *what, struct err *e)
{
    bool in_class = false;
    int rc = OK;
    for (size_t i = 0; i < p.len && rc == OK; i++) {
        if (p.ptr[i] == '\\' && i + 1 < p.len) {
            char c = p.ptr[++i];
            if (c == 'S' && in_class) return err_set(e, ERR_UNSUPPORTED, "%s: split pattern uses \\S inside a class", what);
            if (c == 's') rc = buf_appendf(out, in_class ? "%s" : "[%s]", white_space);
            else if (c == 'S') rc = buf_appendf(out, "[^%s]", white_space);
            else rc = buf_append(out, p.ptr + i - 1, 2);
            continue;
        }
        if (p.ptr[i] == '[' && !in_class) {
            in_class = true;
            size_t first = i + 1 < p.len && p.ptr[i + 1] == '^' ? i + 2 : i + 1;
            if (first < p.len && p.ptr[first] == ']') { /* a bracket that stands first is a member */
                rc = buf_append(out, p.ptr + i, first - i + 1);
                i = first;
                continue;
            }
        } else if (p.ptr[i] == ']') {
            in_class = false;
        }
        rc = buf_append(out, p.ptr + i, 1);
    }
    return rc < 0 ? err_set(e, ERR_NOMEM, "%s: out of memory for a split pattern", what) : OK;
}

int tokenizer_split_add(struct tokenizer *t, struct span pattern, const char *what, struct err *e)
{
    struct buf b = {0};
    int code;
    size_t at;
    if (t->n_split == MAX_SPLITS) return err_set(e, ERR_UNSUPPORTED, "%s: more than %d split patterns", what, MAX_SPLITS);
    int rc = spell_out_spaces(pattern, &b, what, e);
    if (rc < 0) {
        buf_free(&b);
        return rc;
    }
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)(b.data ? b.data : ""), b.len, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    buf_free(&b);
    if (!re) {
        PCRE2_UCHAR message[128];
        pcre2_get_error_message(code, message, sizeof message);
        return err_set(e, ERR_INPUT, "%s: split pattern does not compile: %s at %zu", what, (const char *)message, at);
    }
    (void)pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* without JIT the interpreter runs: slower, the same */
    t->split[t->n_split++] = re;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ maps */

static uint64_t hash_bytes(const char *p, size_t n)
{
    uint64_t h = 0x9E3779B97F4A7C15u ^ n;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    uint64_t w = 0;
    memcpy(&w, p, n);
    h = (h ^ w) * 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 29;
}

static int map_new(struct tokenizer *t, struct token_map *m, size_t n, struct err *e)
{
    m->size = 16;
    while (m->size < 2 * n) m->size *= 2;
    m->slot = arena_alloc(&t->arena, m->size * sizeof *m->slot);
    if (!m->slot) return err_set(e, ERR_NOMEM, "out of memory for a vocabulary of %zu tokens", n);
    memset(m->slot, 0xFF, m->size * sizeof *m->slot);
    return OK;
}

int32_t token_map_find(const struct tokenizer *t, const char *p, size_t n)
{
    size_t mask = t->map.size - 1;
    for (size_t i = hash_bytes(p, n) & mask;; i = (i + 1) & mask) {
        int32_t id = t->map.slot[i];
        if (id < 0 || (t->bytes[id].len == n && !memcmp(t->bytes[id].ptr, p, n))) return id;
    }
}

int tokenizer_index(struct tokenizer *t, struct err *e)
{
    TRY(map_new(t, &t->map, (size_t)t->n, e));
    size_t mask = t->map.size - 1;
    for (int32_t id = 0; id < t->n; id++) {
        struct span s = t->bytes[id];
        if (s.len == 0 || t->kinds[id] != TOKEN_NORMAL) continue;
        size_t i = hash_bytes(s.ptr, s.len) & mask;
        while (t->map.slot[i] >= 0 && !span_eq(t->bytes[t->map.slot[i]], s)) i = (i + 1) & mask;
        if (t->map.slot[i] < 0) t->map.slot[i] = id; /* the first of equal tokens */
    }
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    for (int32_t id = 0; id < t->n; id++)
        if (t->bytes[id].len == 1 && (t->kinds[id] == TOKEN_BYTE || (!t->chars && t->kinds[id] == TOKEN_NORMAL))) {
            int32_t *at = &t->byte_id[(unsigned char)t->bytes[id].ptr[0]];
            if (*at < 0) *at = id;
        }
    return OK;
}

int tokenizer_merges_reserve(struct tokenizer *t, size_t n, struct err *e)
{
    t->merges_size = 16;
    while (t->merges_size < 2 * n) t->merges_size *= 2;
    t->merges = arena_alloc(&t->arena, t->merges_size * sizeof *t->merges);
    if (!t->merges) return err_set(e, ERR_NOMEM, "out of memory for %zu merges", n);
    for (size_t i = 0; i < t->merges_size; i++) t->merges[i].pair = UINT64_MAX;
    return OK;
}

static size_t merge_slot(const struct tokenizer *t, uint64_t pair)
{
    uint64_t h = pair * 0x9E3779B97F4A7C15u;
    size_t mask = t->merges_size - 1, i = (h ^ h >> 32) & mask;
    while (t->merges[i].pair != pair && t->merges[i].pair != UINT64_MAX) i = (i + 1) & mask;
    return i;
}

const struct merge *tokenizer_merge_find(const struct tokenizer *t, int32_t left, int32_t right)
{
    const struct merge *m = &t->merges[merge_slot(t, (uint64_t)(uint32_t)left << 32 | (uint32_t)right)];
    return m->pair == UINT64_MAX ? NULL : m;
}

bool tokenizer_merge_add(struct tokenizer *t, struct span left, struct span right, int32_t rank)
{
    char both[512];
    if (left.len == 0 || right.len == 0 || left.len + right.len > sizeof both) return false;
    memcpy(both, left.ptr, left.len);
    memcpy(both + left.len, right.ptr, right.len);
    int32_t l = token_map_find(t, left.ptr, left.len), r = token_map_find(t, right.ptr, right.len);
    int32_t id = token_map_find(t, both, left.len + right.len);
    if (l < 0 || r < 0 || id < 0) return false;
    uint64_t pair = (uint64_t)(uint32_t)l << 32 | (uint32_t)r;
    struct merge *m = &t->merges[merge_slot(t, pair)];
    if (m->pair == UINT64_MAX) *m = (struct merge){pair, rank, id}; /* the first of equal merges has the better rank */
    return true;
}

/* ------------------------------------------------------------------------------------------------ tokens */

int tokenizer_new(struct tokenizer **out, int32_t n, struct err *e)
{
    struct tokenizer *t;
    TRY(mem_new(&t, sizeof *t, e));
    t->n = n;
    t->bos = t->eos = t->unk = -1;
    t->bytes = arena_alloc(&t->arena, (size_t)n * sizeof *t->bytes);
    t->kinds = arena_alloc(&t->arena, (size_t)n);
    if (!t->bytes || !t->kinds) {
        tokenizer_close(&t);
        return err_set(e, ERR_NOMEM, "out of memory for a vocabulary of %d tokens", n);
    }
    memset(t->kinds, TOKEN_UNUSED, (size_t)n);
    *out = t;
    return OK;
}

int tokenizer_keep(struct tokenizer *t, struct span s, struct span *out, struct err *e)
{
    char *p = arena_str(&t->arena, s);
    if (!p) return err_set(e, ERR_NOMEM, "out of memory for a token");
    *out = (struct span){p, s.len};
    return OK;
}

/* The byte that a stand-in character means: printable Latin-1 stands for itself, the others follow from U+0100 on. -1: the
 * character is no stand-in. */
static int stand_in(uint32_t cp)
{
    if ((cp >= 33 && cp <= 126) || (cp >= 161 && cp <= 172) || (cp >= 174 && cp <= 255)) return (int)cp;
    if (cp < 0x100 || cp > 0x143) return -1;
    int k = (int)cp - 0x100;
    return k <= 32 ? k : k <= 66 ? 127 + k - 33 : 173;
}

int tokenizer_keep_byte_level(struct tokenizer *t, struct span s, struct span *out, struct err *e)
{
    char *p = arena_alloc(&t->arena, s.len + 1);
    size_t n = 0;
    if (!p) return err_set(e, ERR_NOMEM, "out of memory for a token");
    for (size_t i = 0; i < s.len;) {
        int len = utf8_step(s.ptr + i, s.len - i);
        if (len <= 0) return err_set(e, ERR_INPUT, "a token of the vocabulary is not valid UTF-8");
        int byte = stand_in(utf8_code(s.ptr + i, len));
        if (byte >= 0) {
            p[n++] = (char)byte;
        } else {
            memcpy(p + n, s.ptr + i, (size_t)len);
            n += (size_t)len;
        }
        i += (size_t)len;
    }
    *out = (struct span){p, n};
    return OK;
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int tokenizer_hex_byte(struct span s)
{
    if (s.len != 6 || memcmp(s.ptr, "<0x", 3) || s.ptr[5] != '>' || hex(s.ptr[3]) < 0 || hex(s.ptr[4]) < 0) return -1;
    return hex(s.ptr[3]) * 16 + hex(s.ptr[4]);
}

int tokenizer_show_spaces(struct tokenizer *t, struct err *e)
{
    t->shown = arena_alloc(&t->arena, (size_t)t->n * sizeof *t->shown);
    if (!t->shown) return err_set(e, ERR_NOMEM, "out of memory for %d tokens", t->n);
    for (int32_t id = 0; id < t->n; id++) {
        struct span from = t->bytes[id];
        char *p = arena_alloc(&t->arena, from.len + 1);
        size_t n = 0;
        if (!p) return err_set(e, ERR_NOMEM, "out of memory for %d tokens", t->n);
        for (size_t i = 0; i < from.len; n++) {
            bool space = t->kinds[id] == TOKEN_NORMAL && from.len - i >= 3 && !memcmp(from.ptr + i, "\xE2\x96\x81", 3);
            p[n] = space ? ' ' : from.ptr[i];
            i += space ? 3 : 1;
        }
        t->shown[id] = (struct span){p, n};
    }
    return OK;
}

static int by_length(const void *a, const void *b) { return *(const int32_t *)b - *(const int32_t *)a; }

int tokenizer_added_index(struct tokenizer *t, struct err *e)
{
    TRY(map_new(t, &t->added_map, t->n_added, e));
    t->added_first = arena_alloc(&t->arena, 256);
    t->added_lengths = arena_alloc(&t->arena, (t->n_added + 1) * sizeof *t->added_lengths);
    if (!t->added_first || !t->added_lengths) return err_set(e, ERR_NOMEM, "out of memory for %zu added tokens", t->n_added);
    size_t mask = t->added_map.size - 1;
    for (size_t k = 0; k < t->n_added; k++) {
        struct span s = t->added[k].name;
        if (s.len == 0) continue;
        size_t i = hash_bytes(s.ptr, s.len) & mask;
        while (t->added_map.slot[i] >= 0 && !span_eq(t->added[t->added_map.slot[i]].name, s)) i = (i + 1) & mask;
        t->added_map.slot[i] = (int32_t)k;
        t->added_first[(unsigned char)s.ptr[0]] = 1;
        t->added_lengths[t->n_added_lengths++] = (int32_t)s.len;
    }
    qsort(t->added_lengths, (size_t)t->n_added_lengths, sizeof *t->added_lengths, by_length);
    int distinct = 0;
    for (int i = 0; i < t->n_added_lengths; i++)
        if (i == 0 || t->added_lengths[i] != t->added_lengths[distinct - 1]) t->added_lengths[distinct++] = t->added_lengths[i];
    t->n_added_lengths = distinct;
    return OK;
}

const struct added_token *tokenizer_added_find(const struct tokenizer *t, const char *p, size_t n)
{
    if (t->n_added == 0) return NULL;
    size_t mask = t->added_map.size - 1;
    for (size_t i = hash_bytes(p, n) & mask;; i = (i + 1) & mask) {
        int32_t k = t->added_map.slot[i];
        if (k < 0) return NULL;
        if (t->added[k].name.len == n && !memcmp(t->added[k].name.ptr, p, n)) return &t->added[k];
    }
}
