/* tokenizer.c: encode, decode, and what may be asked of a tokenizer. A text is cut at added tokens (never inside what a
 * user wrote), each piece is normalised, split by the family's patterns, and merged. */
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
    struct bpe bpe;
    pcre2_match_data *match;
    struct ids *out;
    struct err *e;
};

static int no_memory(struct encoder *en) { return err_set(en->e, ERR_NOMEM, "out of memory while tokenising"); }

/* Cuts a piece by split pattern k and the following ones: matches and what lies between them are pieces alike. */
static int split(struct encoder *en, struct span s, int k)
{
    const struct tokenizer *t = en->t;
    if (s.len == 0) return OK;
    if (k >= t->n_split || k >= MAX_SPLITS) return bpe_encode(t, &en->bpe, s, en->out) < 0 ? no_memory(en) : OK;
    size_t at = 0;
    while (at < s.len) {
        int rc = pcre2_match(t->split[k], (PCRE2_SPTR)s.ptr, s.len, at, PCRE2_NO_UTF_CHECK, en->match, NULL);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
            rc = pcre2_match(t->split[k], (PCRE2_SPTR)s.ptr, s.len, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, en->match, NULL);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) return err_set(en->e, ERR_INPUT, "the split pattern gave up at byte %zu of a text of %zu (PCRE2 %d)", at, s.len, rc);
        const PCRE2_SIZE *o = pcre2_get_ovector_pointer(en->match);
        size_t begin = o[0], end = o[1];
        if (end <= begin) break; /* an empty match: nothing more to cut */
        TRY(split(en, (struct span){s.ptr + at, begin - at}, k + 1));
        /* The next pattern overwrites the match data: begin and end are copies. */
        TRY(split(en, (struct span){s.ptr + begin, end - begin}, k + 1));
        at = end;
    }
    return split(en, (struct span){s.ptr + at, s.len - at}, k + 1);
}

/* Text between added tokens. */
static int encode_plain(struct encoder *en, struct span s)
{
    const struct tokenizer *t = en->t;
    static const char mark[] = "\xE2\x96\x81"; /* U+2581, SentencePiece's space */
    if (s.len == 0) return OK;
    if (t->spaces) {
        struct buf b = {0};
        int rc = t->space_prefix ? buf_append(&b, mark, 3) : OK;
        for (size_t i = 0; i < s.len && rc == OK; i++)
            rc = s.ptr[i] == ' ' ? buf_append(&b, mark, 3) : buf_append(&b, s.ptr + i, 1);
        rc = rc < 0 ? no_memory(en) : split(en, buf_span(&b), 0);
        buf_free(&b);
        return rc;
    }
    if (t->nfc) {
        utf8proc_uint8_t *n = NULL;
        utf8proc_ssize_t len = utf8proc_map((const utf8proc_uint8_t *)s.ptr, (utf8proc_ssize_t)s.len, &n,
                                            UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        if (len < 0) return err_set(en->e, ERR_INPUT, "text cannot be normalised: %s", utf8proc_errmsg(len));
        int rc = split(en, (struct span){(const char *)n, (size_t)len}, 0);
        free(n);
        return rc;
    }
    return split(en, s, 0);
}

/* True if [begin, end) touches a mark; *m moves along, as begin never goes back. */
static bool is_marked(const struct mark *marks, size_t n, size_t *m, size_t begin, size_t end)
{
    while (*m < n && marks[*m].end <= begin) (*m)++;
    for (size_t i = *m; i < n && marks[i].begin < end; i++)
        if (marks[i].end > begin) return true;
    return false;
}

static const struct added_token *added_at(const struct tokenizer *t, struct span s, size_t at, const struct mark *marks,
                                          size_t n_marks, size_t *m)
{
    if (!t->n_added || !t->added_first[(unsigned char)s.ptr[at]]) return NULL;
    for (int i = 0; i < t->n_added_lengths; i++) {
        size_t len = (size_t)t->added_lengths[i];
        if (len > s.len - at) continue;
        const struct added_token *a = tokenizer_added_find(t, s.ptr + at, len);
        if (a && !is_marked(marks, n_marks, m, at, at + len)) return a;
    }
    return NULL;
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static int encode_text(struct encoder *en, struct span s, const struct mark *marks, size_t n_marks)
{
    const struct tokenizer *t = en->t;
    size_t from = 0, at = 0, m = 0;
    while (at < s.len) {
        const struct added_token *a = added_at(t, s, at, marks, n_marks, &m);
        if (!a) {
            at++;
            continue;
        }
        size_t end = at, after = at + a->name.len;
        while (a->lstrip && end > from && is_space(s.ptr[end - 1])) end--;
        TRY(encode_plain(en, (struct span){s.ptr + from, end - from}));
        if (ids_push(en->out, a->id) < 0) return no_memory(en);
        while (a->rstrip && after < s.len && is_space(s.ptr[after])) after++;
        from = at = after;
    }
    return encode_plain(en, (struct span){s.ptr + from, s.len - from});
}

int tokenizer_encode(const struct tokenizer *t, struct span text, const struct mark *marks, size_t n_marks, bool add_bos,
                     struct ids *out, struct err *e)
{
    for (size_t i = 0; i < text.len;) {
        int len = utf8_step(text.ptr + i, text.len - i);
        if (len <= 0) return err_set(e, ERR_INPUT, "text is not valid UTF-8 at byte %zu of %zu", i, text.len);
        i += (size_t)len;
    }
    struct encoder en = {.t = t, .match = pcre2_match_data_create(1, NULL), .out = out, .e = e};
    int rc = OK;
    if (!en.match) return no_memory(&en);
    if (add_bos && t->add_bos && t->bos >= 0 && ids_push(out, t->bos) < 0) rc = no_memory(&en);
    if (rc == OK && text.len > 0) rc = encode_text(&en, text, marks, n_marks);
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
    const struct added_token *a = name.len ? tokenizer_added_find(t, name.ptr, name.len) : NULL;
    return a ? a->id : -1;
}

/* ------------------------------------------------------------------------------------------------ decode */

static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */

/* Emits what is complete of held + s; what may still become a character is held. Each maximal invalid part becomes one
 * U+FFFD, as Unicode recommends and Python does. */
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
    if (first && t->space_prefix && s.ptr[0] == ' ' && kind == TOKEN_NORMAL) {
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
