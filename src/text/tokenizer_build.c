/* tokenizer_build.c: the tables of a tokenizer: tokens by bytes, merges by pairs, split patterns, added tokens. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_priv.h"

/* ------------------------------------------------------------------------------------------------ split patterns */

#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define BEFORE "[^\\r\\n\\p{L}\\p{N}]?"
#define LINES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

const char pattern_gpt2[] = CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
const char pattern_llama3[] =
    "(?i:" CONTRACTIONS ")|" BEFORE "\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" LINES;
const char pattern_qwen2[] = "(?i:" CONTRACTIONS ")|" BEFORE "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" LINES;
const char pattern_o200k[] = BEFORE UPPER "*" LOWER "+(?i:" CONTRACTIONS ")?"
                                          "|" BEFORE UPPER "+" LOWER "*(?i:" CONTRACTIONS ")?"
                                          "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" LINES;
const char pattern_tekken[] = BEFORE UPPER "*" LOWER "+|" BEFORE UPPER "+" LOWER "*"
                                           "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" LINES;
const char pattern_digits[] = "\\p{N}";
const char pattern_words[] = "\\x{2581}[^\\x{2581}]*";

/* Unicode White_Space, as the members of a character class. */
static const char white_space[] =
    "\\x09-\\x0D\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}";

/* What regex engines read differently: line anchors, nested classes, some letters. No family's pattern has them. */
static bool is_ambiguous(const char *p, const char *end, bool in_class)
{
    if (*p == '\\') return p + 1 < end && strchr("hHQECGKRXNwWbB", p[1]) && p[1];
    if (in_class) return *p == '[' || (*p == '&' && p + 1 < end && p[1] == '&');
    return *p == '^' || *p == '$';
}

static int spell_out_spaces(struct span pattern, struct buf *out, const char *what, struct err *e)
{
    bool in_class = false;
    int rc = OK;
    for (const char *p = pattern.ptr, *end = p + pattern.len; p < end && rc == OK; p++) {
        if (is_ambiguous(p, end, in_class) || (in_class && *p == '\\' && p + 1 < end && p[1] == 'S'))
            return err_set(e, ERR_UNSUPPORTED, "%s: split pattern has %.2s at byte %zu, which is not supported", what,
                           p, (size_t)(p - pattern.ptr));
        if (*p == '\\' && p + 1 < end) {
            p++;
            if (*p == 's') rc = buf_appendf(out, in_class ? "%s" : "[%s]", white_space);
            else if (*p == 'S') rc = buf_appendf(out, "[^%s]", white_space);
            else rc = buf_append(out, p - 1, 2);
            continue;
        }
        rc = buf_append(out, p, 1);
        if (*p == '[') {
            in_class = true;
            /* A caret may stand first, and a bracket after it is a member. */
            for (const char *sign = "^]"; *sign && rc == OK; sign++)
                if (p + 1 < end && p[1] == *sign) rc = buf_append(out, ++p, 1);
        } else if (*p == ']') {
            in_class = false;
        }
    }
    return rc < 0 ? err_set(e, ERR_NOMEM, "%s: out of memory for a split pattern", what) : OK;
}

int tokenizer_split_set(struct tokenizer *t, int k, struct span pattern, const char *what, struct err *e)
{
    struct buf b = {0};
    int code;
    size_t at;
    if (k >= MAX_SPLITS) return err_set(e, ERR_UNSUPPORTED, "%s: more than %d split patterns", what, MAX_SPLITS);
    int rc = spell_out_spaces(pattern, &b, what, e);
    if (rc == OK) rc = tokenizer_keep(t, pattern, &t->split_text[k], e);
    if (rc < 0) {
        buf_free(&b);
        return rc;
    }
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)(b.data ? b.data : ""), b.len, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    buf_free(&b);
    if (!re) {
        PCRE2_UCHAR message[128];
        pcre2_get_error_message(code, message, sizeof message);
        return err_set(e, ERR_INPUT, "%s: split pattern does not compile: %s at %zu", what, (const char *)message,
                       at);
    }
    (void)pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* without JIT the interpreter runs: slower, the same */
    if (k == t->n_split) t->n_split++;
    else pcre2_code_free(t->split[k]);
    t->split[k] = re;
    return OK;
}

/* -------------------------------------------------------------------------------- the stand-in alphabet */

/* The byte that a stand-in character means: printable Latin-1 stands for itself, the others follow from U+0100 on.
 * -1: the character is no stand-in. */
static int stand_in(uint32_t cp)
{
    if ((cp >= 33 && cp <= 126) || (cp >= 161 && cp <= 172) || (cp >= 174 && cp <= 255)) return (int)cp;
    if (cp < 0x100 || cp > 0x143) return -1;
    int k = (int)cp - 0x100;
    return k <= 32 ? k : k <= 66 ? 127 + k - 33 : 173;
}

/* Raw bytes of a token written in the alphabet, at most s.len of them; false where s is not UTF-8. */
static bool from_stand_ins(struct span s, char *out, size_t *len)
{
    size_t n = 0;
    for (size_t i = 0; i < s.len;) {
        int step = utf8_step(s.ptr + i, s.len - i);
        if (step <= 0) return false;
        int byte = stand_in(utf8_code(s.ptr + i, step));
        if (byte >= 0) {
            out[n++] = (char)byte;
        } else {
            memcpy(out + n, s.ptr + i, (size_t)step);
            n += (size_t)step;
        }
        i += (size_t)step;
    }
    *len = n;
    return true;
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

int32_t token_map_find(const struct tokenizer *t, const char *p, size_t n)
{
    size_t mask = t->map.size - 1;
    for (size_t i = hash_bytes(p, n) & mask;; i = (i + 1) & mask) {
        int32_t id = t->map.slot[i];
        if (id < 0 || (t->bytes[id].len == n && !memcmp(t->bytes[id].ptr, p, n))) return id;
    }
}

/* Merges given by a table may make user-defined tokens too (runs of spaces are such); those made by looking up
 * bytes may not: there any text that spells the token would become it. */
static bool is_mergeable(const struct tokenizer *t, int32_t id)
{
    if (t->bytes[id].len == 0) return false;
    return t->kinds[id] == TOKEN_NORMAL || (t->kinds[id] == TOKEN_USER_DEFINED && t->rule == MERGE_TABLE);
}

int tokenizer_index(struct tokenizer *t, struct err *e)
{
    struct token_map *m = &t->map;
    m->size = 16;
    while (m->size < 2 * (size_t)t->n) m->size *= 2;
    m->slot = arena_alloc(&t->arena, m->size * sizeof *m->slot);
    if (!m->slot) return err_set(e, ERR_NOMEM, "out of memory for a vocabulary of %d tokens", t->n);
    memset(m->slot, 0xFF, m->size * sizeof *m->slot);
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    for (int32_t id = 0; id < t->n; id++) {
        struct span s = t->bytes[id];
        bool mergeable = is_mergeable(t, id);
        if (s.len == 1 && (t->chars ? t->kinds[id] == TOKEN_BYTE : mergeable)) {
            int32_t *byte = &t->byte_id[(unsigned char)s.ptr[0]];
            if (*byte < 0) *byte = id;
        }
        if (!mergeable) continue;
        size_t i = hash_bytes(s.ptr, s.len) & (m->size - 1);
        while (m->slot[i] >= 0 && !span_eq(t->bytes[m->slot[i]], s)) i = (i + 1) & (m->size - 1);
        if (m->slot[i] < 0) m->slot[i] = id; /* the first of equal tokens */
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
    char both[1024];
    if (left.len == 0 || right.len == 0 || left.len > sizeof both / 2 || right.len > sizeof both / 2) return false;
    size_t n = left.len, m = right.len;
    if (t->chars) {
        memcpy(both, left.ptr, n);
        memcpy(both + n, right.ptr, m);
    } else if (!from_stand_ins(left, both, &n) || !from_stand_ins(right, both + n, &m)) {
        return false;
    }
    int32_t l = token_map_find(t, both, n), r = token_map_find(t, both + n, m), id = token_map_find(t, both, n + m);
    if (l < 0 || r < 0 || id < 0) return false;
    uint64_t pair = (uint64_t)(uint32_t)l << 32 | (uint32_t)r;
    struct merge *at = &t->merges[merge_slot(t, pair)];
    if (at->pair == UINT64_MAX)
        *at = (struct merge){pair, rank, id}; /* the first of equal merges has the better rank */
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

int tokenizer_keep_byte_level(struct tokenizer *t, struct span s, struct span *out, struct err *e)
{
    char *p = arena_alloc(&t->arena, s.len + 1);
    size_t n;
    if (!p) return err_set(e, ERR_NOMEM, "out of memory for a token");
    if (!from_stand_ins(s, p, &n)) return err_set(e, ERR_INPUT, "a token of the vocabulary is not valid UTF-8");
    *out = (struct span){p, n};
    return OK;
}

static int hex(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; }

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
            bool space =
                t->kinds[id] == TOKEN_NORMAL && from.len - i >= 3 && !memcmp(from.ptr + i, "\xE2\x96\x81", 3);
            p[n] = space ? ' ' : from.ptr[i];
            i += space ? 3 : 1;
        }
        t->shown[id] = (struct span){p, n};
    }
    return OK;
}

/* ------------------------------------------------------------------------------------------------ added tokens */

static int by_name(const void *a, const void *b)
{
    struct span x = ((const struct added_token *)a)->name, y = ((const struct added_token *)b)->name;
    size_t n = x.len < y.len ? x.len : y.len;
    int order = n ? memcmp(x.ptr, y.ptr, n) : 0;
    return order ? order : (x.len > y.len) - (x.len < y.len);
}

void tokenizer_added_index(struct tokenizer *t)
{
    if (t->n_added) qsort(t->added, t->n_added, sizeof *t->added, by_name);
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].name.len) t->added_first[(unsigned char)t->added[i].name.ptr[0]] = true;
}

/* The first of added[lo, hi), which agree before byte d and are longer, whose byte d is at least c. */
static size_t first_from(const struct tokenizer *t, size_t lo, size_t hi, size_t d, int c)
{
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)t->added[mid].name.ptr[d] < c) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

const struct added_token *tokenizer_added_at(const struct tokenizer *t, const char *p, size_t n)
{
    const struct added_token *best = NULL;
    size_t lo = 0, hi = n && t->added_first[(unsigned char)p[0]] ? t->n_added : 0;
    for (size_t d = 0; lo < hi; d++) {
        for (; lo < hi && t->added[lo].name.len == d; lo++)
            if (d > 0) best = &t->added[lo];
        if (d == n) break;
        int c = (unsigned char)p[d];
        lo = first_from(t, lo, hi, d, c);
        hi = first_from(t, lo, hi, d, c + 1);
    }
    return best;
}
