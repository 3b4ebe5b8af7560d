/* tokenizer_json.c: tokenizer.json (Hugging Face) and tekken.json (Mistral), read into the one object. What the
 * supported families use is understood; any other normalizer, pre-tokenizer, post-processor or decoder is refused
 * by name. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer_priv.h"

enum {
    MAX_TOKENS = 1 << 24,
    MAX_SPECIAL = 1 << 16, /* of a tekken file, which names them all in a row */
    MAX_JSON = 256 << 20
};

/* What is being read. The large members were taken out of the tree, which has null in their place. */
struct reader {
    struct tokenizer *t;
    const char *what; /* for messages */
    struct err *e;
    struct span json, vocab, merges;
    struct arena scratch; /* strings while reading */
    bool byte_level;      /* a pre-tokenizer says that tokens are written in the stand-in alphabet */
};

static int parse(json_t **out, struct span text, const char *what, struct err *e)
{
    json_error_t je;
    json_t *j = json_loadb(text.ptr ? text.ptr : "", text.len, JSON_ALLOW_NUL, &je);
    if (!j) return err_set(e, ERR_INPUT, "%s: is no valid JSON: %s (line %d)", what, je.text, je.line);
    if (!json_is_object(j)) {
        json_decref(j);
        return err_set(e, ERR_INPUT, "%s: holds no JSON object", what);
    }
    *out = j;
    return OK;
}

/* Parses r->json but for the members that r->vocab and r->merges point to. */
static int parse_rest(struct reader *r, json_t **out)
{
    struct buf rest = {0};
    const struct span parts[] = {r->vocab, r->merges};
    int rc = json_without(&rest, r->json, parts, COUNT_OF(parts));
    rc = rc < 0 ? err_set(r->e, rc, "%s: out of memory", r->what) : parse(out, buf_span(&rest), r->what, r->e);
    buf_free(&rest);
    return rc;
}

static struct scan scan_of(struct reader *r, struct span part)
{
    return (struct scan){.p = part.ptr, .end = part.ptr + part.len, .arena = &r->scratch};
}

/* What stands at s is not what was looked for. */
static int bad_place(struct reader *r, const struct scan *s, const char *member, const char *form)
{
    if (s->no_memory) return err_set(r->e, ERR_NOMEM, "%s: out of memory for %s", r->what, member);
    return err_set(r->e, ERR_INPUT, "%s: %s is not %s at byte %zu of the file", r->what, member, form,
                   (size_t)(s->p - r->json.ptr));
}

static const char *type_of(const json_t *j)
{
    const char *s = json_string_value(json_object_get(j, "type"));
    return s ? s : "(none)";
}

static bool is_type(const json_t *j, const char *type) { return !strcmp(type_of(j), type); }

static struct span text_of(const json_t *j) { return (struct span){json_string_value(j), json_string_length(j)}; }

static bool is_mark(const json_t *j)
{
    return span_is(text_of(j), "\xE2\x96\x81");
} /* U+2581, SentencePiece's space */

static int refuse(struct reader *r, const char *part, const json_t *j)
{
    return err_set(r->e, ERR_UNSUPPORTED, "%s: %s %s is not supported", r->what, part, type_of(j));
}

/* Calls one on every member of a Sequence (under `list`), or on j itself. null and absent: nothing. */
static int each(struct reader *r, const json_t *j, const char *list, int (*one)(struct reader *, const json_t *))
{
    size_t i;
    json_t *item;
    if (!j || json_is_null(j)) return OK;
    if (!is_type(j, "Sequence")) return one(r, j);
    json_array_foreach(json_object_get(j, list), i, item) TRY(one(r, item));
    return OK;
}

/* ------------------------------------------------------------------------------------------------ parts */

static int normalizer(struct reader *r, const json_t *j)
{
    if (is_type(j, "NFC")) {
        r->t->nfc = true;
    } else if (is_type(j, "Prepend")) {
        if (!is_mark(json_object_get(j, "prepend"))) return refuse(r, "normalizer", j);
        r->t->space_prefix = PREFIX_ALWAYS;
    } else if (is_type(j, "Replace")) {
        if (!span_is(text_of(json_object_get(json_object_get(j, "pattern"), "String")), " ") ||
            !is_mark(json_object_get(j, "content")))
            return refuse(r, "normalizer", j);
        r->t->spaces = true;
    } else {
        return refuse(r, "normalizer", j);
    }
    return OK;
}

static int add_split(struct reader *r, struct span pattern)
{
    return tokenizer_split_set(r->t, r->t->n_split, pattern, r->what, r->e);
}

static int metaspace(struct reader *r, const json_t *j)
{
    static const char *const schemes[] = {
        [PREFIX_NEVER] = "never", [PREFIX_FIRST] = "first", [PREFIX_ALWAYS] = "always"};
    const json_t *scheme = json_object_get(j, "prepend_scheme"), *old = json_object_get(j, "add_prefix_space");
    size_t prefix = json_is_false(old) ? PREFIX_NEVER : PREFIX_ALWAYS;
    if (!is_mark(json_object_get(j, "replacement"))) return refuse(r, "pre_tokenizer", j);
    for (size_t i = 0; json_is_string(scheme) && i <= COUNT_OF(schemes); i++) {
        if (i == COUNT_OF(schemes))
            return err_set(r->e, ERR_UNSUPPORTED,
                           "%s: pre_tokenizer Metaspace with prepend_scheme %s is not supported", r->what,
                           json_string_value(scheme));
        if (span_is(text_of(scheme), schemes[i])) {
            prefix = i;
            break;
        }
    }
    r->t->spaces = r->t->prefix_once = true;
    r->t->space_prefix = (enum space_prefix)prefix;
    if (json_is_false(json_object_get(j, "split"))) return OK;
    return add_split(r, span_of(pattern_words));
}

static int pre_tokenizer(struct reader *r, const json_t *j)
{
    if (is_type(j, "Split")) {
        const json_t *pattern = json_object_get(j, "pattern"), *regex = json_object_get(pattern, "Regex");
        const char *behavior = json_string_value(json_object_get(j, "behavior"));
        if (!json_is_string(regex) || json_is_true(json_object_get(j, "invert")) || !behavior ||
            strcmp(behavior, "Isolated"))
            return err_set(r->e, ERR_UNSUPPORTED,
                           "%s: pre_tokenizer Split with behavior %s is not supported: a Regex with Isolated is",
                           r->what, behavior ? behavior : "(none)");
        return add_split(r, text_of(regex));
    }
    if (is_type(j, "Digits")) {
        if (!json_is_true(json_object_get(j, "individual_digits"))) return refuse(r, "pre_tokenizer", j);
        return add_split(r, span_of(pattern_digits));
    }
    if (is_type(j, "ByteLevel")) {
        if (json_is_true(json_object_get(j, "add_prefix_space")))
            return err_set(r->e, ERR_UNSUPPORTED,
                           "%s: pre_tokenizer ByteLevel with add_prefix_space is not supported", r->what);
        r->byte_level = true;
        if (json_is_false(json_object_get(j, "use_regex"))) return OK;
        return add_split(r, span_of(pattern_gpt2));
    }
    if (is_type(j, "Metaspace")) return metaspace(r, j);
    return refuse(r, "pre_tokenizer", j);
}

/* Only what stands before the text matters: a special token there is the BOS. */
static int post_processor(struct reader *r, const json_t *j)
{
    if (is_type(j, "ByteLevel")) return OK;
    if (!is_type(j, "TemplateProcessing")) return refuse(r, "post_processor", j);
    const json_t *first = json_array_get(json_object_get(j, "single"), 0),
                 *special = json_object_get(first, "SpecialToken");
    if (!special) return OK;
    int32_t id = tokenizer_find_special(r->t, text_of(json_object_get(special, "id")));
    if (id < 0)
        return err_set(r->e, ERR_INPUT, "%s: post_processor names a token that is not among added_tokens", r->what);
    r->t->bos = id;
    r->t->add_bos = true;
    return OK;
}

static int decoder(struct reader *r, const json_t *j)
{
    static const char *const known[] = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        if (is_type(j, known[i])) return OK;
    return refuse(r, "decoder", j);
}

/* ------------------------------------------------------------------------------------------------ vocabulary */

/* One member of model.vocab. */
struct entry {
    struct span token;
    int32_t id;
};

static int read_vocab(struct reader *r, struct buf *entries)
{
    struct scan s = scan_of(r, r->vocab);
    bool good = scan_sign(&s, '{');
    if (good && scan_sign(&s, '}')) return OK;
    while (good) {
        struct entry entry;
        int64_t id;
        if (!scan_string(&s, &entry.token) || !scan_sign(&s, ':') || !scan_int(&s, &id) || id >= MAX_TOKENS) break;
        entry.id = (int32_t)id;
        if (buf_append(entries, &entry, sizeof entry) < 0)
            return err_set(r->e, ERR_NOMEM, "%s: out of memory for model.vocab", r->what);
        if (scan_sign(&s, ',')) continue;
        if (!scan_sign(&s, '}')) break;
        return OK;
    }
    return bad_place(r, &s, "model.vocab", "an object of tokens with ids below 16777216");
}

/* The number of ids: one more than the largest in vocab and added_tokens. Files have few ids without a token. */
static int count_ids(struct reader *r, const struct entry *vocab, size_t n_vocab, const json_t *added, int32_t *out)
{
    int64_t most = -1;
    size_t i, n = n_vocab + json_array_size(added);
    const json_t *token;
    for (i = 0; i < n_vocab; i++)
        if (vocab[i].id > most) most = vocab[i].id;
    json_array_foreach(added, i, token)
    {
        const json_t *id = json_object_get(token, "id"), *content = json_object_get(token, "content");
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= MAX_TOKENS ||
            !json_string_length(content))
            return err_set(r->e, ERR_INPUT, "%s: added token %zu lacks an id between 0 and %d or a content", r->what,
                           i, MAX_TOKENS - 1);
        if (json_integer_value(id) > most) most = json_integer_value(id);
    }
    if (most < 0) return err_set(r->e, ERR_INPUT, "%s: has an empty vocabulary", r->what);
    if (most >= 2 * (int64_t)n + 65536)
        return err_set(r->e, ERR_INPUT, "%s: has ids up to %lld but only %zu tokens", r->what, (long long)most, n);
    *out = (int32_t)most + 1;
    return OK;
}

static int fill_vocab(struct reader *r, const struct entry *vocab, size_t n)
{
    struct tokenizer *t = r->t;
    for (size_t i = 0; i < n; i++) {
        struct span token = vocab[i].token, *bytes = &t->bytes[vocab[i].id];
        int byte = t->chars ? tokenizer_hex_byte(token) : -1;
        char c = (char)byte;
        if (bytes->ptr)
            return err_set(r->e, ERR_INPUT, "%s: two tokens of model.vocab have the id %d", r->what, vocab[i].id);
        if (byte >= 0) TRY(tokenizer_keep(t, (struct span){&c, 1}, bytes, r->e));
        else if (t->chars) TRY(tokenizer_keep(t, token, bytes, r->e));
        else TRY(tokenizer_keep_byte_level(t, token, bytes, r->e));
        if (bytes->len) t->kinds[vocab[i].id] = byte >= 0 ? TOKEN_BYTE : TOKEN_NORMAL;
    }
    return OK;
}

static int fill_added(struct reader *r, const json_t *added)
{
    struct tokenizer *t = r->t;
    size_t i, normalized = 0;
    json_t *a;
    t->added = arena_alloc(&t->arena, (json_array_size(added) + 1) * sizeof *t->added);
    if (!t->added) return err_set(r->e, ERR_NOMEM, "out of memory for added tokens");
    json_array_foreach(added, i, a)
    {
        int32_t id = (int32_t)json_integer_value(json_object_get(a, "id"));
        bool special = json_is_true(json_object_get(a, "special"));
        if (json_is_true(json_object_get(a, "single_word")))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: added token %s is single_word, which is not supported",
                           r->what, json_string_value(json_object_get(a, "content")));
        normalized += !special && t->spaces && json_is_true(json_object_get(a, "normalized"));
        TRY(tokenizer_keep(t, text_of(json_object_get(a, "content")), &t->bytes[id], r->e));
        t->kinds[id] = special ? TOKEN_CONTROL : TOKEN_USER_DEFINED;
        t->added[t->n_added++] = (struct added_token){.name = t->bytes[id],
                                                      .id = id,
                                                      .special = special,
                                                      .lstrip = json_is_true(json_object_get(a, "lstrip")),
                                                      .rstrip = json_is_true(json_object_get(a, "rstrip"))};
    }
    if (normalized)
        log_line(LOG_WARN, "%s: %zu added tokens are marked normalized; they are matched as they are written",
                 r->what, normalized);
    tokenizer_added_index(t);
    return OK;
}

/* "a b" or ["a", "b"] */
static bool read_merge(struct scan *s, struct span *left, struct span *right)
{
    if (scan_sign(s, '['))
        return scan_string(s, left) && scan_sign(s, ',') && scan_string(s, right) && scan_sign(s, ']');
    struct span both;
    if (!scan_string(s, &both) || both.len < 3) return false;
    const char *space = memchr(both.ptr + 1, ' ', both.len - 1);
    if (!space) return false;
    *left = (struct span){both.ptr, (size_t)(space - both.ptr)};
    *right = (struct span){space + 1, both.len - left->len - 1};
    return true;
}

static size_t count_items(struct scan s)
{
    size_t n = 0;
    if (!scan_sign(&s, '[')) return 0;
    do n++;
    while (scan_skip(&s) && scan_sign(&s, ','));
    return n;
}

static int fill_merges(struct reader *r)
{
    static const char form[] = "an array of \"a b\" or [\"a\", \"b\"]";
    struct scan s = scan_of(r, r->merges);
    size_t lost = 0, n = 0;
    int32_t rank = 0;
    TRY(tokenizer_merges_reserve(r->t, count_items(s), r->e));
    if (!scan_sign(&s, '[')) return bad_place(r, &s, "model.merges", form);
    if (!scan_sign(&s, ']')) {
        do {
            struct span left, right;
            if (!read_merge(&s, &left, &right)) return bad_place(r, &s, "model.merges", form);
            lost += !tokenizer_merge_add(r->t, left, right, rank++);
            n++;
        } while (scan_sign(&s, ','));
        if (!scan_sign(&s, ']')) return bad_place(r, &s, "model.merges", form);
    }
    if (lost)
        log_line(LOG_WARN, "%s: %zu of %zu merges name no tokens of the vocabulary and are left out", r->what, lost,
                 n);
    return OK;
}

static bool empty_or_absent(const json_t *j)
{
    return !j || json_is_null(j) || (json_is_string(j) && json_string_length(j) == 0);
}

static int check_model(struct reader *r, const json_t *root)
{
    const json_t *model = json_object_get(root, "model");
    if (json_object_get(model, "type") && !is_type(model, "BPE")) return refuse(r, "model", model);
    if (!r->vocab.len || !r->merges.len || *r->vocab.ptr != '{' || *r->merges.ptr != '[')
        return err_set(r->e, ERR_INPUT, "%s: model lacks the object vocab or the array merges", r->what);
    if (!empty_or_absent(json_object_get(model, "continuing_subword_prefix")) ||
        !empty_or_absent(json_object_get(model, "end_of_word_suffix")))
        return err_set(r->e, ERR_UNSUPPORTED,
                       "%s: continuing_subword_prefix and end_of_word_suffix are not supported", r->what);
    return OK;
}

/* Fills r->t. The order matters: kinds before the index, the index before merges. */
static int build(struct reader *r, const json_t *root, const struct entry *vocab, size_t n_vocab)
{
    const json_t *model = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens");
    struct tokenizer *t = r->t;
    t->rule = MERGE_TABLE;
    t->chars = json_is_true(json_object_get(model, "byte_fallback"));
    t->whole_first = json_is_true(json_object_get(model, "ignore_merges"));
    TRY(each(r, json_object_get(root, "normalizer"), "normalizers", normalizer));
    TRY(each(r, json_object_get(root, "pre_tokenizer"), "pretokenizers", pre_tokenizer));
    TRY(each(r, json_object_get(root, "decoder"), "decoders", decoder));
    if (r->byte_level == t->chars)
        return err_set(r->e, ERR_UNSUPPORTED,
                       "%s: pre_tokenizer ByteLevel and model.byte_fallback are %s: one of them is needed", r->what,
                       t->chars ? "both there" : "both absent");
    TRY(fill_vocab(r, vocab, n_vocab));
    TRY(fill_added(r, added));
    TRY(tokenizer_index(t, r->e));
    TRY(fill_merges(r));
    if (t->spaces) TRY(tokenizer_show_spaces(t, r->e));
    struct span unk = text_of(json_object_get(model, "unk_token"));
    if (unk.len) t->unk = tokenizer_find_special(t, unk);
    if (unk.len && t->unk < 0) t->unk = token_map_find(t, unk.ptr, unk.len);
    snprintf(t->kind, sizeof t->kind, t->chars ? "BPE with byte fallback" : "byte-level BPE");
    return each(r, json_object_get(root, "post_processor"), "processors", post_processor);
}

static int read_tokenizer(struct reader *r, const json_t *root)
{
    struct buf entries = {0};
    int32_t n = 0;
    int rc = check_model(r, root);
    if (rc == OK) rc = read_vocab(r, &entries);
    const struct entry *vocab = (const struct entry *)(const void *)entries.data;
    size_t n_vocab = entries.len / sizeof *vocab;
    if (rc == OK) rc = count_ids(r, vocab, n_vocab, json_object_get(root, "added_tokens"), &n);
    if (rc == OK) rc = tokenizer_new(&r->t, n, r->e);
    if (rc == OK) rc = build(r, root, vocab, n_vocab);
    buf_free(&entries);
    return rc;
}

/* Parses what is left of the file, lets fill make the tokenizer, and cleans up. */
static int read_file(struct reader *r, int (*fill)(struct reader *, const json_t *), struct tokenizer **out)
{
    json_t *root = NULL;
    int rc = parse_rest(r, &root);
    if (rc == OK) rc = fill(r, root);
    json_decref(root);
    arena_free(&r->scratch);
    if (rc < 0) {
        tokenizer_close(&r->t);
        return rc;
    }
    *out = r->t;
    return OK;
}

int tokenizer_from_json(struct tokenizer **out, struct span json, const char *what, struct err *e)
{
    static const char *const top[] = {"model"}, *const inside[] = {"vocab", "merges"};
    struct reader r = {.json = json, .what = what, .e = e};
    struct span model, parts[2];
    json_find(json, top, &model, 1);
    json_find(model, inside, parts, 2);
    r.vocab = parts[0];
    r.merges = parts[1];
    return read_file(&r, read_tokenizer, out);
}

/* ------------------------------------------------------------------------------------------------ tekken.json */

static bool base64_decode(struct span s, char *out, size_t *len)
{
    size_t n = 0;
    uint32_t bits = 0;
    int have = 0;
    while (s.len > 0 && s.ptr[s.len - 1] == '=') s.len--;
    for (size_t i = 0; i < s.len; i++) {
        char c = s.ptr[i];
        int v = c >= 'A' && c <= 'Z'   ? c - 'A'
                : c >= 'a' && c <= 'z' ? c - 'a' + 26
                : c >= '0' && c <= '9' ? c - '0' + 52
                : c == '+'             ? 62
                : c == '/'             ? 63
                                       : -1;
        if (v < 0) return false;
        bits = bits << 6 | (uint32_t)v;
        have += 6;
        if (have >= 8) {
            have -= 8;
            out[n++] = (char)(bits >> have & 0xFF);
        }
    }
    *len = n;
    return n > 0;
}

static int add_special(struct reader *r, int32_t id, struct span name)
{
    struct tokenizer *t = r->t;
    TRY(tokenizer_keep(t, name, &t->bytes[id], r->e));
    t->kinds[id] = TOKEN_CONTROL;
    t->added[t->n_added++] = (struct added_token){.name = t->bytes[id], .id = id, .special = true};
    if (span_is(name, "<s>")) t->bos = id;
    if (span_is(name, "</s>")) t->eos = id;
    if (span_is(name, "<unk>")) t->unk = id;
    return OK;
}

/* The names that files without a special_tokens list mean (versions up to v7). */
static const char *const tekken_specials[] = {
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
};

/* {"rank": 0, "token_bytes": "AA==", ...} */
static bool read_tekken_entry(struct scan *s, int64_t *rank, struct span *base64)
{
    *rank = -1;
    if (!scan_sign(s, '{')) return false;
    do {
        struct span key;
        if (!scan_string(s, &key) || !scan_sign(s, ':')) return false;
        bool good = span_is(key, "rank")          ? scan_int(s, rank)
                    : span_is(key, "token_bytes") ? scan_string(s, base64)
                                                  : scan_skip(s);
        if (!good) return false;
    } while (scan_sign(s, ','));
    return scan_sign(s, '}');
}

/* Entry i has rank i and the id n_special + i; files may hold more entries than the model uses. */
static int fill_tekken_vocab(struct reader *r, int32_t n_special)
{
    struct tokenizer *t = r->t;
    struct scan s = scan_of(r, r->vocab);
    const int32_t wanted = t->n - n_special;
    int32_t n = 0;
    if (!scan_sign(&s, '[')) return bad_place(r, &s, "vocab", "an array of objects");
    do {
        struct span base64 = {0};
        int64_t rank;
        if (!read_tekken_entry(&s, &rank, &base64)) return bad_place(r, &s, "vocab", "an array of objects");
        if (n >= wanted) continue;
        char *p = arena_alloc(&t->arena, base64.len + 1);
        struct span *bytes = &t->bytes[n_special + n];
        if (!p) return err_set(r->e, ERR_NOMEM, "%s: out of memory for a token", r->what);
        if (rank != n || !base64_decode(base64, p, &bytes->len))
            return err_set(r->e, ERR_INPUT, "%s: vocab entry %d has no rank %d with base64 token_bytes", r->what, n,
                           n);
        bytes->ptr = p;
        t->kinds[n_special + n++] = TOKEN_NORMAL;
    } while (scan_sign(&s, ','));
    if (!scan_sign(&s, ']')) return bad_place(r, &s, "vocab", "an array of objects");
    if (n < wanted)
        return err_set(r->e, ERR_INPUT, "%s: vocab has %d entries, the sizes in config ask for %d", r->what, n,
                       wanted);
    return OK;
}

/* Names those that the file names, and the others as Mistral's library does. */
static int fill_tekken_specials(struct reader *r, const json_t *specials, int32_t n)
{
    struct tokenizer *t = r->t;
    size_t i;
    json_t *item;
    t->added = arena_alloc(&t->arena, (size_t)n * sizeof *t->added);
    if (!t->added) return err_set(r->e, ERR_NOMEM, "%s: out of memory for %d special tokens", r->what, n);
    json_array_foreach(specials, i, item)
    {
        const json_t *rank = json_object_get(item, "rank"), *name = json_object_get(item, "token_str");
        json_int_t id = json_integer_value(rank);
        if (!json_is_integer(rank) || id < 0 || id >= n || !json_string_length(name) || t->bytes[id].len)
            return err_set(r->e, ERR_INPUT, "%s: special token %zu has no rank of its own below %d or no token_str",
                           r->what, i, n);
        TRY(add_special(r, (int32_t)id, text_of(name)));
    }
    for (int32_t id = 0; id < n; id++) {
        char name[32];
        if (t->bytes[id].len) continue;
        snprintf(name, sizeof name, "<SPECIAL_%d>", id);
        bool old = !json_is_array(specials) && id < (int32_t)COUNT_OF(tekken_specials);
        TRY(add_special(r, id, span_of(old ? tekken_specials[id] : name)));
    }
    tokenizer_added_index(t);
    return OK;
}

static int read_tekken(struct reader *r, const json_t *root)
{
    const json_t *config = json_object_get(root, "config"), *pattern = json_object_get(config, "pattern");
    json_int_t size = json_integer_value(json_object_get(config, "default_vocab_size"));
    json_int_t n_special = json_integer_value(json_object_get(config, "default_num_special_tokens"));
    if (!r->vocab.len || *r->vocab.ptr != '[' || !json_is_string(pattern))
        return err_set(r->e, ERR_INPUT,
                       "%s: is no tekken file: it lacks the array vocab or the string config.pattern", r->what);
    /* An entry takes more than 16 bytes of the file. */
    if (n_special < 1 || n_special > MAX_SPECIAL || size <= n_special ||
        (size_t)(size - n_special) > r->vocab.len / 16)
        return err_set(
            r->e, ERR_INPUT,
            "%s: config.default_vocab_size %lld and default_num_special_tokens %lld do not fit a vocab of %zu bytes",
            r->what, (long long)size, (long long)n_special, r->vocab.len);
    TRY(tokenizer_new(&r->t, (int32_t)size, r->e));
    struct tokenizer *t = r->t;
    t->rule = MERGE_RANK;
    t->whole_first = true;
    t->add_bos = true;
    TRY(add_split(r, text_of(pattern)));
    TRY(fill_tekken_vocab(r, (int32_t)n_special));
    TRY(fill_tekken_specials(r, json_object_get(root, "special_tokens"), (int32_t)n_special));
    TRY(tokenizer_index(t, r->e));
    snprintf(t->kind, sizeof t->kind, "byte-level BPE (tekken)");
    return OK;
}

int tokenizer_from_tekken(struct tokenizer **out, struct span json, const char *what, struct err *e)
{
    static const char *const top[] = {"vocab"};
    struct reader r = {.json = json, .what = what, .e = e};
    json_find(json, top, &r.vocab, 1);
    return read_file(&r, read_tekken, out);
}

/* ------------------------------------------------------------------------------------------------ a directory */

/* What tokenizer_config.json overrides: whether and with what a text begins. */
static int read_config(struct tokenizer *t, const char *path, struct err *e)
{
    struct buf b;
    json_t *root;
    if (!file_exists(path)) return OK;
    TRY(file_read(&b, path, MAX_JSON, e));
    int rc = parse(&root, buf_span(&b), path, e);
    buf_free(&b);
    TRY(rc);
    const json_t *add = json_object_get(root, "add_bos_token"), *bos = json_object_get(root, "bos_token");
    const json_t *eos = json_object_get(root, "eos_token");
    if (json_is_object(bos)) bos = json_object_get(bos, "content");
    if (json_is_object(eos)) eos = json_object_get(eos, "content");
    if (json_is_string(bos)) {
        int32_t id = tokenizer_find_special(t, text_of(bos));
        if (id >= 0) t->bos = id;
    }
    if (json_is_string(eos)) t->eos = tokenizer_find_special(t, text_of(eos));
    if (json_is_boolean(add)) t->add_bos = json_is_true(add);
    json_decref(root);
    return OK;
}

/* Mistral Small 3.1's tokenizer.json, and those made like it, carry Llama 3's split pattern with tekken's
 * vocabulary. */
static int mend_mistral(struct tokenizer *t, const char *path, struct err *e)
{
    enum { TEKKEN_SIZE = 131072 };
    if (t->n_split == 0 || t->n < TEKKEN_SIZE || !span_is(t->split_text[0], pattern_llama3)) return OK;
    log_line(LOG_WARN, "%s: its split pattern is not the one of this vocabulary and is replaced by that (tekken)",
             path);
    return tokenizer_split_set(t, 0, span_of(pattern_tekken), path, e);
}

int tokenizer_from_dir(struct tokenizer **out, const char *dir, const char *model_type, struct err *e)
{
    char path[4096], tekken[4096], config[4096];
    bool mistral = model_type && (!strcmp(model_type, "mistral") || !strcmp(model_type, "mistral3"));
    struct tokenizer *t;
    struct buf b;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    snprintf(tekken, sizeof tekken, "%s/tekken.json", dir);
    snprintf(config, sizeof config, "%s/tokenizer_config.json", dir);
    bool use_tekken = file_exists(tekken) && (mistral || !file_exists(path));
    if (!use_tekken && !file_exists(path))
        return err_set(e, ERR_INPUT, "%s: holds neither tokenizer.json nor tekken.json", dir);
    const char *from = use_tekken ? tekken : path;
    TRY(file_read(&b, from, MAX_JSON, e));
    int rc = (use_tekken ? tokenizer_from_tekken : tokenizer_from_json)(&t, buf_span(&b), from, e);
    buf_free(&b);
    TRY(rc);
    if (mistral && !use_tekken) rc = mend_mistral(t, path, e);
    if (rc == OK) rc = read_config(t, config, e);
    if (rc < 0) {
        tokenizer_close(&t);
        return rc;
    }
    *out = t;
    return OK;
}
