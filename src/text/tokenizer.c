/* tokenizer.c: encode, decode, and what may be asked of a tokenizer. A text is cut at added tokens (never inside
 * what a user wrote), each piece is normalised, split by the family's patterns, and merged. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "tokenizer_priv.h"

void tokenizer_close(struct tokenizer **handle)
{
    struct tokenizer *t = *handle;
    if (!t) return;
    for (int i = 0; i < t->n_split; i++) pcre2_code_free(t->split[i]);
    arena_free(&t->arena);
    free(t);
    *handle = NULL;
}

int ids_push(struct ids *v, int32_t id)
{
    if (v->len == v->cap) {
        size_t cap = v->cap ? 2 * v->cap : 256;
        int32_t *p = realloc(v->id, cap * sizeof *p);
        if (!p) return ERR_NOMEM;
        v->id = p;
        v->cap = cap;
    }
    v->id[v->len++] = id;
    return OK;
}

void ids_free(struct ids *v)
{
    free(v->id);
    *v = (struct ids){0};
}

/* ------------------------------------------------------------------------------------------------ encode */

struct encoder {
    const struct tokenizer *t;
    const char *text; /* where the whole text begins */
    struct bpe bpe;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    struct ids *out;
    struct err *e;
};

static int no_memory(struct encoder *en) { return err_set(en->e, ERR_NOMEM, "out of memory while tokenising"); }

static int merge_piece(struct encoder *en, struct span s)
{
    int rc = bpe_encode(en->t, &en->bpe, s, en->out);
    if (rc == ERR_INPUT)
        return err_set(en->e, rc,
                       "the vocabulary has no token for a character of the text that begins with the byte 0x%02X",
                       en->bpe.lost);
    return rc < 0 ? no_memory(en) : OK;
}

/* Cuts a piece by split pattern k and the following ones: matches and what lies between them are pieces alike. */
static int split(struct encoder *en, struct span s, int k)
{
    const struct tokenizer *t = en->t;
    if (s.len == 0) return OK;
    if (k >= t->n_split || k >= MAX_SPLITS) return merge_piece(en, s);
    size_t at = 0;
    while (at < s.len) {
        PCRE2_SPTR text = (PCRE2_SPTR)s.ptr;
        int rc = pcre2_match(t->split[k], text, s.len, at, PCRE2_NO_UTF_CHECK, en->match, en->limits);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its state on the heap */
            rc = pcre2_match(t->split[k], text, s.len, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, en->match, en->limits);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc == PCRE2_ERROR_NOMEMORY) return no_memory(en);
        if (rc < 0)
            return err_set(en->e, ERR_INPUT,
                           "split pattern %d of the tokenizer gave up at byte %zu of a text of %zu (PCRE2 error %d)",
                           k, at, s.len, rc);
        const PCRE2_SIZE *o = pcre2_get_ovector_pointer(en->match);
        size_t begin = o[0], end = o[1]; /* copies: the next pattern overwrites the match data */
        if (end <= begin) break;         /* an empty match: nothing more to cut */
        TRY(split(en, (struct span){s.ptr + at, begin - at}, k + 1));
        TRY(split(en, (struct span){s.ptr + begin, end - begin}, k + 1));
        at = end;
    }
    return split(en, (struct span){s.ptr + at, s.len - at}, k + 1);
}

static int encode_spaces(struct encoder *en, struct span s)
{
    const struct tokenizer *t = en->t;
    static const char mark[] = "\xE2\x96\x81"; /* U+2581, SentencePiece's space */
    struct buf b = {0};
    bool prefix = t->space_prefix == PREFIX_ALWAYS || (t->space_prefix == PREFIX_FIRST && s.ptr == en->text);
    if (t->prefix_once && (s.ptr[0] == ' ' || span_starts(s, mark))) prefix = false;
    int rc = prefix ? buf_append(&b, mark, 3) : OK;
    for (size_t i = 0, n; i < s.len && rc == OK; i += n) {
        const char *space = memchr(s.ptr + i, ' ', s.len - i);
        n = space ? (size_t)(space - (s.ptr + i)) : s.len - i;
        if (n) {
            rc = buf_append(&b, s.ptr + i, n);
        } else {
            rc = buf_append(&b, mark, 3);
            n = 1;
        }
    }
    rc = rc < 0 ? no_memory(en) : split(en, buf_span(&b), 0);
    buf_free(&b);
    return rc;
}

static int encode_nfc(struct encoder *en, struct span s)
{
    utf8proc_uint8_t *n = NULL;
    utf8proc_ssize_t len = utf8proc_map((const utf8proc_uint8_t *)s.ptr, (utf8proc_ssize_t)s.len, &n,
                                        UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (len < 0) return err_set(en->e, ERR_INPUT, "text cannot be normalised: %s", utf8proc_errmsg(len));
    int rc = split(en, (struct span){(const char *)n, (size_t)len}, 0);
    free(n);
    return rc;
}

/* Text between added tokens. */
static int encode_plain(struct encoder *en, struct span s)
{
    if (s.len == 0) return OK;
    return en->t->spaces ? encode_spaces(en, s) : en->t->nfc ? encode_nfc(en, s) : split(en, s, 0);
}

/* The length of the Unicode white space that s begins with (or ends with), one character; 0: there is none. */
static size_t white_space(struct span s, bool at_end)
{
    static const char *const spaces[] = {
        "\t",           "\n",           "\v",           "\f",           "\r",           " ",
        "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x81", "\xE2\x80\x82",
        "\xE2\x80\x83", "\xE2\x80\x84", "\xE2\x80\x85", "\xE2\x80\x86", "\xE2\x80\x87", "\xE2\x80\x88",
        "\xE2\x80\x89", "\xE2\x80\x8A", "\xE2\x80\xA8", "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F",
        "\xE3\x80\x80",
    };
    for (size_t i = 0; i < COUNT_OF(spaces); i++)
        if (at_end ? span_ends(s, spaces[i]) : span_starts(s, spaces[i])) return strlen(spaces[i]);
    return 0;
}

static int encode_text(struct encoder *en, struct span s, const struct mark *marks, size_t n_marks)
{
    size_t from = 0, at = 0, m = 0;
    while (at < s.len) {
        while (m < n_marks && (marks[m].end <= at || marks[m].end <= marks[m].begin)) m++;
        size_t limit = m < n_marks && marks[m].begin < s.len ? marks[m].begin : s.len;
        if (limit <= at) { /* inside a mark nothing is matched */
            at = marks[m].end;
            continue;
        }
        const struct added_token *a = tokenizer_added_at(en->t, s.ptr + at, limit - at);
        if (!a) {
            at++;
            continue;
        }
        struct span before = {s.ptr + from, at - from};
        at += a->name.len;
        for (size_t n; a->lstrip && (n = white_space(before, true)) > 0;) before.len -= n;
        for (size_t n; a->rstrip && (n = white_space((struct span){s.ptr + at, s.len - at}, false)) > 0;) at += n;
        TRY(encode_plain(en, before));
        if (ids_push(en->out, a->id) < 0) return no_memory(en);
        from = at;
    }
    return encode_plain(en, (struct span){s.ptr + from, s.len - from});
}

/* A pattern may try so many steps for one match, in so much memory: no text and no pattern makes it run on for
 * ever, and a family's pattern needs a few steps a byte at most. */
static pcre2_match_context *match_limits(size_t len)
{
    enum { STEPS = 1000000, STEPS_A_BYTE = 64, HEAP_KIB = 512 * 1024 };
    pcre2_match_context *c = pcre2_match_context_create(NULL);
    size_t steps = len > (UINT32_MAX - STEPS) / STEPS_A_BYTE ? UINT32_MAX : STEPS + len * STEPS_A_BYTE;
    if (!c) return NULL;
    pcre2_set_match_limit(c, (uint32_t)steps);
    pcre2_set_heap_limit(c, HEAP_KIB);
    return c;
}

int tokenizer_encode(const struct tokenizer *t, struct span text, const struct mark *marks, size_t n_marks,
                     bool add_bos, struct ids *out, struct err *e)
{
    for (size_t i = 0; i < text.len;) {
        int len = utf8_step(text.ptr + i, text.len - i);
        if (len <= 0) return err_set(e, ERR_INPUT, "text is not valid UTF-8 at byte %zu of %zu", i, text.len);
        i += (size_t)len;
    }
    struct encoder en = {.t = t, .text = text.ptr, .out = out, .e = e};
    en.match = pcre2_match_data_create(1, NULL);
    en.limits = match_limits(text.len);
    int rc = en.match && en.limits ? OK : no_memory(&en);
    if (rc == OK && add_bos && tokenizer_adds_bos(t) && ids_push(out, t->bos) < 0) rc = no_memory(&en);
    if (rc == OK && text.len > 0) rc = encode_text(&en, text, marks, n_marks);
    pcre2_match_context_free(en.limits);
    pcre2_match_data_free(en.match);
    bpe_free(&en.bpe);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ what is asked */

int32_t tokenizer_size(const struct tokenizer *t) { return t->n; }
int32_t tokenizer_bos(const struct tokenizer *t) { return t->bos; }
int32_t tokenizer_eos(const struct tokenizer *t) { return t->eos; }
bool tokenizer_adds_bos(const struct tokenizer *t) { return t->add_bos && t->bos >= 0; }
const char *tokenizer_kind(const struct tokenizer *t) { return t->kind; }

enum token_kind tokenizer_token_kind(const struct tokenizer *t, int32_t id)
{
    return id < 0 || id >= t->n ? TOKEN_UNUSED : (enum token_kind)t->kinds[id];
}

struct span tokenizer_bytes(const struct tokenizer *t, int32_t id)
{
    if (tokenizer_token_kind(t, id) == TOKEN_UNUSED) return (struct span){0};
    return t->shown ? t->shown[id] : t->bytes[id];
}

int32_t tokenizer_find_special(const struct tokenizer *t, struct span name)
{
    const struct added_token *a = tokenizer_added_at(t, name.ptr, name.len);
    return a && a->name.len == name.len ? a->id : -1;
}

/* ------------------------------------------------------------------------------------------------ decode */

static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */

/* Emits what is complete of held + s; what may still become a character is held. Each maximal invalid part becomes
 * one U+FFFD, as Unicode recommends and Python does. */
static int feed(struct detok *d, struct span s, struct buf *out)
{
    char joined[4 + 4];
    size_t i = 0;
    /* First finish what is held, byte by byte: it grows by at most three. */
    while (d->n_held > 0 && i < s.len) {
        memcpy(joined, d->held, (size_t)d->n_held);
        joined[d->n_held] = s.ptr[i];
        int len = utf8_step(joined, (size_t)d->n_held + 1);
        if (len == 0) { /* the new byte does not continue it: the held part is invalid, the byte begins anew */
            TRY(buf_append(out, replacement, 3));
            d->n_held = 0;
            break;
        }
        d->held[d->n_held++] = s.ptr[i++];
        if (len > 0) {
            TRY(buf_append(out, d->held, (size_t)len));
            d->n_held = 0;
        }
    }
    while (i < s.len) {
        int len = utf8_step(s.ptr + i, s.len - i);
        if (len > 0) {
            TRY(buf_append(out, s.ptr + i, (size_t)len));
            i += (size_t)len;
        } else if (len < 0) {
            memcpy(d->held, s.ptr + i, s.len - i);
            d->n_held = (int)(s.len - i);
            break;
        } else {
            /* How many bytes were a good beginning: they count as one error together. */
            size_t bad = 1;
            while (i + bad < s.len && utf8_step(s.ptr + i, bad + 1) < 0) bad++;
            TRY(buf_append(out, replacement, 3));
            i += bad;
        }
    }
    return OK;
}

int detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool control, struct buf *out)
{
    struct span s = tokenizer_bytes(t, id);
    enum token_kind kind = tokenizer_token_kind(t, id);
    if (s.len == 0 || (kind == TOKEN_CONTROL && !control) || kind == TOKEN_UNKNOWN) return OK;
    bool first = !d->begun;
    d->begun = true;
    if (first && t->space_prefix != PREFIX_NEVER && s.ptr[0] == ' ' && kind == TOKEN_NORMAL) {
        s.ptr++;
        s.len--;
    }
    return feed(d, s, out);
}

int detok_end(struct detok *d, struct buf *out)
{
    if (d->n_held == 0) return OK;
    d->n_held = 0;
    return buf_append(out, replacement, 3);
}
