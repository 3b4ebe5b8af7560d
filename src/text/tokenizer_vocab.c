/* tokenizer_vocab.c: a tokenizer from the vocabulary inside a GGUF file. The name under tokenizer.ggml.pre stands
 * for the split patterns and defaults of a family; the names are those that llama.cpp's converter writes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tokenizer_priv.h"

static const struct family {
    const char *pre; /* several names, comma separated */
    const char *split[MAX_SPLITS];
    bool whole_first, bos, nfc;
} families[] = {
    {"gpt-2,phi-2,jina-es,jina-de,jina-v2-es,jina-v2-de,gigachat,a.x-4.0,mellum,exaone4",
     {pattern_gpt2},
     false,
     false,
     false},
    {"llama-bpe,llama3,llama-v3,falcon3,falcon-h1,pixtral,midm-2.0,lfm2", {pattern_llama3}, true, true, false},
    {"qwen2,deepseek-r1-qwen,megrez,kormo", {pattern_qwen2}, false, false, true},
    {"gpt-4o,llama4,kanana2", {pattern_o200k}, true, false, false},
    {"tekken", {pattern_tekken}, true, true, false},
    {"smollm,starcoder,refact,command-r,codeshell,exaone,minerva-7b",
     {pattern_digits, pattern_gpt2},
     false,
     false,
     false},
    /* What llama.cpp falls back to for files older than the key. */
    {"default", {"[\\p{P}$+<=>^~|]+", pattern_gpt2, "\\p{N}+", "[0-9][0-9][0-9]"}, false, false, false},
};

static bool in_list(const char *list, struct span name)
{
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, ",");
        if (n == name.len && !memcmp(p, name.ptr, n)) return true;
        p += n + (p[n] == ',');
    }
    return false;
}

static int choose_family(const struct tokenizer_vocab *v, const char *what, const struct family **out, struct err *e)
{
    char known[256] = "";
    struct span pre = v->pre.len ? v->pre : span_of("default");
    if (span_is(pre, "default"))
        log_line(LOG_WARN, "%s: has no tokenizer.ggml.pre: text is split as llama.cpp does then, which may be wrong",
                 what);
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        if (in_list(families[i].pre, pre)) {
            *out = &families[i];
            return OK;
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%.*s", i ? ", " : "",
                 (int)strcspn(families[i].pre, ","), families[i].pre);
    }
    return err_set(e, ERR_UNSUPPORTED, "%s: pre-tokenizer %.*s (tokenizer.ggml.pre) is not known; known are %s", what,
                   (int)(pre.len < 64 ? pre.len : 64), pre.ptr, known);
}

/* GGUF's token types 1..6 as ours. */
static enum token_kind kind_at(const struct tokenizer_vocab *v, size_t i)
{
    static const enum token_kind kinds[] = {TOKEN_NORMAL,       TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL,
                                            TOKEN_USER_DEFINED, TOKEN_UNUSED, TOKEN_BYTE};
    int32_t type = v->types ? v->types[i] : 1;
    return type < 0 || type >= (int32_t)COUNT_OF(kinds) ? TOKEN_UNUSED : kinds[type];
}

static int fill_tokens(struct tokenizer *t, const struct tokenizer_vocab *v, bool byte_level, const char *what,
                       struct err *e)
{
    t->added = arena_alloc(&t->arena, v->n_tokens * sizeof *t->added);
    if (!t->added) return err_set(e, ERR_NOMEM, "out of memory for %zu tokens", v->n_tokens);
    for (size_t i = 0; i < v->n_tokens; i++) {
        enum token_kind kind = kind_at(v, i);
        int byte = byte_level ? -1 : tokenizer_hex_byte(v->tokens[i]);
        t->kinds[i] = (uint8_t)kind;
        if (kind == TOKEN_UNUSED || v->tokens[i].len == 0) {
            t->kinds[i] = TOKEN_UNUSED;
        } else if (kind == TOKEN_BYTE) {
            char c = (char)byte;
            if (byte_level)
                return err_set(e, ERR_INPUT, "%s: token %zu is of type byte, which a gpt2 vocabulary has not", what,
                               i);
            if (byte < 0)
                return err_set(e, ERR_INPUT, "%s: token %zu is of type byte but reads %.*s, not <0xHH>", what, i,
                               (int)(v->tokens[i].len < 64 ? v->tokens[i].len : 64), v->tokens[i].ptr);
            TRY(tokenizer_keep(t, (struct span){&c, 1}, &t->bytes[i], e));
        } else if (kind == TOKEN_NORMAL && byte_level) {
            TRY(tokenizer_keep_byte_level(t, v->tokens[i], &t->bytes[i], e));
        } else {
            TRY(tokenizer_keep(t, v->tokens[i], &t->bytes[i], e));
            if (kind != TOKEN_NORMAL && kind != TOKEN_UNKNOWN)
                t->added[t->n_added++] =
                    (struct added_token){t->bytes[i], (int32_t)i, kind == TOKEN_CONTROL, false, false};
        }
    }
    return OK;
}

/* "a b": the halves are parted by the first space after position 0. */
static int fill_merges(struct tokenizer *t, const struct tokenizer_vocab *v, const char *what, struct err *e)
{
    size_t lost = 0;
    TRY(tokenizer_merges_reserve(t, v->n_merges, e));
    for (size_t i = 0; i < v->n_merges; i++) {
        struct span m = v->merges[i], left, right;
        const char *space = m.len > 2 ? memchr(m.ptr + 1, ' ', m.len - 1) : NULL;
        if (!space)
            return err_set(e, ERR_INPUT, "%s: merge %zu has no two parts: %.*s", what, i,
                           (int)(m.len < 64 ? m.len : 64), m.ptr);
        left = (struct span){m.ptr, (size_t)(space - m.ptr)};
        right = (struct span){space + 1, m.len - left.len - 1};
        lost += !tokenizer_merge_add(t, left, right, (int32_t)i);
    }
    if (lost)
        log_line(LOG_WARN, "%s: %zu of %zu merges name no tokens of the vocabulary and are left out", what, lost,
                 v->n_merges);
    return OK;
}

static int fill(struct tokenizer *t, const struct tokenizer_vocab *v, const char *what, struct err *e)
{
    const struct family *f = NULL;
    bool byte_level = span_is(v->model, "gpt2");
    if (!byte_level && !span_is(v->model, "llama"))
        return err_set(
            e, ERR_UNSUPPORTED,
            "%s: tokenizer model %.*s is not known; known are gpt2 (byte-level BPE) and llama (SentencePiece)", what,
            (int)(v->model.len < 64 ? v->model.len : 64), v->model.ptr);
    if (byte_level) {
        TRY(choose_family(v, what, &f, e));
        for (int k = 0; k < MAX_SPLITS && f->split[k]; k++)
            TRY(tokenizer_split_set(t, k, span_of(f->split[k]), what, e));
        t->whole_first = f->whole_first;
        t->nfc = f->nfc;
        t->rule = MERGE_TABLE;
        snprintf(t->kind, sizeof t->kind, "byte-level BPE (%.*s)", (int)strcspn(f->pre, ","), f->pre);
    } else {
        if (!v->scores) return err_set(e, ERR_INPUT, "%s: a llama vocabulary needs tokenizer.ggml.scores", what);
        t->rule = MERGE_SCORE;
        t->chars = t->spaces = true;
        t->space_prefix = v->add_space_prefix != 0 ? PREFIX_ALWAYS : PREFIX_NEVER;
        t->scores = arena_alloc(&t->arena, v->n_tokens * sizeof *t->scores);
        if (!t->scores) return err_set(e, ERR_NOMEM, "out of memory for %zu scores", v->n_tokens);
        for (size_t i = 0; i < v->n_tokens; i++) {
            if (isnan(v->scores[i]))
                return err_set(e, ERR_INPUT, "%s: the score of token %zu is not a number", what, i);
            t->scores[i] = v->scores[i];
        }
        snprintf(t->kind, sizeof t->kind, "SentencePiece");
    }
    TRY(fill_tokens(t, v, byte_level, what, e));
    TRY(tokenizer_index(t, e));
    if (byte_level) TRY(fill_merges(t, v, what, e));
    else TRY(tokenizer_show_spaces(t, e));
    tokenizer_added_index(t);
    const struct {
        const char *name;
        int64_t id;
        int32_t *to;
    } ends[] = {{"bos", v->bos, &t->bos}, {"eos", v->eos, &t->eos}, {"unknown", v->unk, &t->unk}};
    for (size_t i = 0; i < COUNT_OF(ends); i++) {
        if (ends[i].id >= (int64_t)v->n_tokens || ends[i].id < -1)
            return err_set(e, ERR_INPUT, "%s: %s token id %lld is outside the vocabulary of %zu", what, ends[i].name,
                           (long long)ends[i].id, v->n_tokens);
        *ends[i].to = (int32_t)ends[i].id;
    }
    /* SentencePiece's own numbering, where the file does not give the ids. */
    if (!byte_level && t->bos < 0 && t->n > 2 && t->kinds[1] == TOKEN_CONTROL) t->bos = 1;
    if (!byte_level && t->eos < 0 && t->n > 2 && t->kinds[2] == TOKEN_CONTROL) t->eos = 2;
    if (!byte_level && t->unk < 0 && t->kinds[0] == TOKEN_UNKNOWN) t->unk = 0;
    t->add_bos = v->add_bos >= 0 ? v->add_bos : f ? f->bos : true;
    return OK;
}

int tokenizer_from_vocab(struct tokenizer **out, const struct tokenizer_vocab *v, const char *what, struct err *e)
{
    struct tokenizer *t;
    if (v->n_tokens == 0 || v->n_tokens > INT32_MAX / 4)
        return err_set(e, ERR_INPUT, "%s: holds a vocabulary of %zu tokens", what, v->n_tokens);
    TRY(tokenizer_new(&t, (int32_t)v->n_tokens, e));
    int rc = fill(t, v, what, e);
    if (rc < 0) {
        tokenizer_close(&t);
        return rc;
    }
    *out = t;
    return OK;
}
