/* tokenizer_json.c: tokenizer.json (Hugging Face) and tekken.json (Mistral), read into the one object. What the supported
 * families use is understood; any other normalizer, pre-tokenizer, post-processor or decoder is refused by name. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer_priv.h"

enum { MAX_TOKENS = 1 << 24, MAX_JSON = 256 << 20 };

/* What is being read, for messages. */
struct reader {
    struct tokenizer *t;
    const char *what;
    struct err *e;
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

static const char *type_of(const json_t *j)
{
    const char *s = json_string_value(json_object_get(j, "type"));
    return s ? s : "(none)";
}

static bool is_type(const json_t *j, const char *type) { return !strcmp(type_of(j), type); }

static struct span text_of(const json_t *j) { return (struct span){json_string_value(j), json_string_length(j)}; }

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
        if (!span_is(text_of(json_object_get(j, "prepend")), "\xE2\x96\x81")) return refuse(r, "normalizer", j);
        r->t->space_prefix = true;
    } else if (is_type(j, "Replace")) {
        if (!span_is(text_of(json_object_get(json_object_get(j, "pattern"), "String")), " ") ||
            !span_is(text_of(json_object_get(j, "content")), "\xE2\x96\x81"))
            return refuse(r, "normalizer", j);
        r->t->spaces = true;
    } else {
        return refuse(r, "normalizer", j);
    }
    return OK;
}

static int pre_tokenizer(struct reader *r, const json_t *j)
{
    if (is_type(j, "Split")) {
        const json_t *pattern = json_object_get(j, "pattern"), *regex = json_object_get(pattern, "Regex");
        const char *behavior = json_string_value(json_object_get(j, "behavior"));
        if (!json_is_string(regex) || json_is_true(json_object_get(j, "invert")) || !behavior || strcmp(behavior, "Isolated"))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: pre_tokenizer Split with behavior %s is not supported: a Regex with Isolated is",
                           r->what, behavior ? behavior : "(none)");
        return tokenizer_split_add(r->t, text_of(regex), r->what, r->e);
    }
    if (is_type(j, "Digits")) {
        if (!json_is_true(json_object_get(j, "individual_digits"))) return refuse(r, "pre_tokenizer", j);
        return tokenizer_split_add(r->t, span_of(pattern_digits), r->what, r->e);
    }
    if (is_type(j, "ByteLevel")) {
        if (json_is_true(json_object_get(j, "add_prefix_space")))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: pre_tokenizer ByteLevel with add_prefix_space is not supported", r->what);
        if (json_is_false(json_object_get(j, "use_regex"))) return OK;
        return tokenizer_split_add(r->t, span_of(pattern_gpt2), r->what, r->e);
    }
    if (is_type(j, "Metaspace")) {
        const char *scheme = json_string_value(json_object_get(j, "prepend_scheme"));
        bool prefix = scheme ? strcmp(scheme, "never") != 0 : !json_is_false(json_object_get(j, "add_prefix_space"));
        if (json_is_true(json_object_get(j, "split")))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: pre_tokenizer Metaspace with split is not supported", r->what);
        if (scheme && !strcmp(scheme, "first"))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: pre_tokenizer Metaspace with prepend_scheme first is not supported", r->what);
        r->t->spaces = true;
        r->t->space_prefix = prefix;
        return OK;
    }
    return refuse(r, "pre_tokenizer", j);
}

/* Only what stands before the text matters: a special token there is the BOS. */
static int post_processor(struct reader *r, const json_t *j)
{
    if (is_type(j, "ByteLevel")) return OK;
    if (!is_type(j, "TemplateProcessing")) return refuse(r, "post_processor", j);
    const json_t *first = json_array_get(json_object_get(j, "single"), 0), *special = json_object_get(first, "SpecialToken");
    if (!special) return OK;
    int32_t id = tokenizer_find_special(r->t, text_of(json_object_get(special, "id")));
    if (id < 0) return err_set(r->e, ERR_INPUT, "%s: post_processor names a token that is not among added_tokens", r->what);
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

/* The number of ids: one more than the largest in vocab and added_tokens. */
static int count_ids(struct reader *r, json_t *vocab, const json_t *added, int32_t *out)
{
    const char *key;
    json_t *value;
    json_int_t most = -1;
    size_t i;
    json_object_foreach(vocab, key, value) {
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= MAX_TOKENS)
            return err_set(r->e, ERR_INPUT, "%s: token %s has no id between 0 and %d", r->what, key, MAX_TOKENS - 1);
        if (id > most) most = id;
    }
    json_array_foreach(added, i, value) {
        const json_t *id = json_object_get(value, "id");
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= MAX_TOKENS ||
            !json_is_string(json_object_get(value, "content")))
            return err_set(r->e, ERR_INPUT, "%s: added token %zu lacks an id between 0 and %d or a content", r->what, i, MAX_TOKENS - 1);
        if (json_integer_value(id) > most) most = json_integer_value(id);
    }
    if (most < 0) return err_set(r->e, ERR_INPUT, "%s: has an empty vocabulary", r->what);
    *out = (int32_t)most + 1;
    return OK;
}

static int fill_vocab(struct reader *r, json_t *vocab)
{
    struct tokenizer *t = r->t;
    void *at;
    for (at = json_object_iter(vocab); at; at = json_object_iter_next(vocab, at)) {
        struct span key = {json_object_iter_key(at), json_object_iter_key_len(at)};
        json_int_t id = json_integer_value(json_object_iter_value(at));
        int byte = t->chars ? tokenizer_hex_byte(key) : -1;
        char c = (char)byte;
        if (key.len == 0) continue;
        t->kinds[id] = byte >= 0 ? TOKEN_BYTE : TOKEN_NORMAL;
        if (byte >= 0) TRY(tokenizer_keep(t, (struct span){&c, 1}, &t->bytes[id], r->e));
        else if (t->chars) TRY(tokenizer_keep(t, key, &t->bytes[id], r->e));
        else TRY(tokenizer_keep_byte_level(t, key, &t->bytes[id], r->e));
    }
    return OK;
}

static int fill_added(struct reader *r, const json_t *added)
{
    struct tokenizer *t = r->t;
    size_t i;
    json_t *a;
    t->added = arena_alloc(&t->arena, (json_array_size(added) + 1) * sizeof *t->added);
    if (!t->added) return err_set(r->e, ERR_NOMEM, "out of memory for added tokens");
    json_array_foreach(added, i, a) {
        int32_t id = (int32_t)json_integer_value(json_object_get(a, "id"));
        bool special = json_is_true(json_object_get(a, "special"));
        if (json_is_true(json_object_get(a, "single_word")))
            return err_set(r->e, ERR_UNSUPPORTED, "%s: added token %zu is single_word, which is not supported", r->what, i);
        TRY(tokenizer_keep(t, text_of(json_object_get(a, "content")), &t->bytes[id], r->e));
        t->kinds[id] = special ? TOKEN_CONTROL : TOKEN_USER_DEFINED;
        t->added[t->n_added++] = (struct added_token){.name = t->bytes[id], .id = id, .special = special,
                                                      .lstrip = json_is_true(json_object_get(a, "lstrip")),
                                                      .rstrip = json_is_true(json_object_get(a, "rstrip"))};
    }
    return tokenizer_added_index(t, r->e);
}

/* One half of a merge as raw bytes. */
static int half(struct reader *r, struct span s, struct span *out)
{
    if (!r->t->chars) return tokenizer_keep_byte_level(r->t, s, out, r->e);
    *out = s;
    return OK;
}

static int fill_merges(struct reader *r, const json_t *merges)
{
    size_t i, lost = 0;
    json_t *m;
    TRY(tokenizer_merges_reserve(r->t, json_array_size(merges), r->e));
    json_array_foreach(merges, i, m) {
        struct span left, right;
        if (json_is_string(m)) {
            struct span s = text_of(m);
            const char *space = s.len > 2 ? memchr(s.ptr + 1, ' ', s.len - 1) : NULL;
            if (!space) return err_set(r->e, ERR_INPUT, "%s: merge %zu has no two parts", r->what, i);
            left = (struct span){s.ptr, (size_t)(space - s.ptr)};
            right = (struct span){space + 1, s.len - left.len - 1};
        } else if (json_array_size(m) == 2 && json_is_string(json_array_get(m, 0)) && json_is_string(json_array_get(m, 1))) {
            left = text_of(json_array_get(m, 0));
            right = text_of(json_array_get(m, 1));
        } else {
            return err_set(r->e, ERR_INPUT, "%s: merge %zu is neither \"a b\" nor [\"a\", \"b\"]", r->what, i);
        }
        TRY(half(r, left, &left));
        TRY(half(r, right, &right));
        lost += !tokenizer_merge_add(r->t, left, right, (int32_t)i);
    }
    if (lost) log_line(LOG_WARN, "%s: %zu of %zu merges name no tokens of the vocabulary and are left out", r->what, lost, i);
    return OK;
}

static bool empty_or_absent(const json_t *j) { return !j || json_is_null(j) || (json_is_string(j) && json_string_length(j) == 0); }

static int read_tokenizer(struct reader *r, json_t *root)
{
    json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    json_t *added = json_object_get(root, "added_tokens"), *type = json_object_get(model, "type");
    const json_t *merges = json_object_get(model, "merges");
    int32_t n = 0;
    if (type && !is_type(model, "BPE")) return refuse(r, "model", model);
    if (!json_is_object(vocab) || !json_is_array(merges))
        return err_set(r->e, ERR_INPUT, "%s: model lacks the object vocab or the array merges", r->what);
    if (!empty_or_absent(json_object_get(model, "continuing_subword_prefix")) ||
        !empty_or_absent(json_object_get(model, "end_of_word_suffix")))
        return err_set(r->e, ERR_UNSUPPORTED, "%s: continuing_subword_prefix and end_of_word_suffix are not supported", r->what);
    TRY(count_ids(r, vocab, added, &n));
    TRY(tokenizer_new(&r->t, n, r->e));
    struct tokenizer *t = r->t;
    t->rule = MERGE_TABLE;
    t->chars = json_is_true(json_object_get(model, "byte_fallback"));
    t->whole_first = json_is_true(json_object_get(model, "ignore_merges"));
    TRY(each(r, json_object_get(root, "normalizer"), "normalizers", normalizer));
    TRY(each(r, json_object_get(root, "pre_tokenizer"), "pretokenizers", pre_tokenizer));
    TRY(each(r, json_object_get(root, "decoder"), "decoders", decoder));
    TRY(fill_vocab(r, vocab));
    TRY(tokenizer_index(t, r->e)); /* before added tokens overwrite the kinds of those that are in both */
    TRY(fill_merges(r, merges));
    TRY(fill_added(r, added));
    if (t->spaces) TRY(tokenizer_show_spaces(t, r->e));
    struct span unk = text_of(json_object_get(model, "unk_token"));
    if (unk.ptr) t->unk = tokenizer_find_special(t, unk);
    if (unk.ptr && t->unk < 0) t->unk = token_map_find(t, unk.ptr, unk.len);
    TRY(each(r, json_object_get(root, "post_processor"), "processors", post_processor));
    snprintf(t->kind, sizeof t->kind, t->chars ? "BPE with byte fallback" : "byte-level BPE");
    return OK;
}

static int finish(struct reader *r, json_t *root, int rc, struct tokenizer **out)
{
    json_decref(root);
    if (rc < 0) {
        tokenizer_close(&r->t);
        return rc;
    }
    *out = r->t;
    return OK;
}

int tokenizer_from_json(struct tokenizer **out, struct span json, const char *what, struct err *e)
{
    struct reader r = {.what = what, .e = e};
    json_t *root;
    TRY(parse(&root, json, what, e));
    return finish(&r, root, read_tokenizer(&r, root), out);
}

/* ------------------------------------------------------------------------------------------------ tekken.json */

static int base64_decode(struct span s, char *out, size_t *len)
{
    size_t n = 0;
    uint32_t bits = 0;
    int have = 0;
    for (size_t i = 0; i < s.len && s.ptr[i] != '='; i++) {
        char c = s.ptr[i];
        int v = c >= 'A' && c <= 'Z' ? c - 'A' : c >= 'a' && c <= 'z' ? c - 'a' + 26 : c >= '0' && c <= '9' ? c - '0' + 52
                : c == '+' ? 62 : c == '/' ? 63 : -1;
        if (v < 0) return ERR_INPUT;
        bits = bits << 6 | (uint32_t)v;
        have += 6;
        if (have >= 8) {
            have -= 8;
            out[n++] = (char)(bits >> have & 0xFF);
        }
    }
    *len = n;
    return OK;
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
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
};

static int read_tekken(struct reader *r, json_t *root)
{
    const json_t *config = json_object_get(root, "config"), *vocab = json_object_get(root, "vocab");
    const json_t *specials = json_object_get(root, "special_tokens"), *pattern = json_object_get(config, "pattern");
    json_int_t size = json_integer_value(json_object_get(config, "default_vocab_size"));
    json_int_t n_special = json_integer_value(json_object_get(config, "default_num_special_tokens"));
    size_t i;
    json_t *item;
    if (!json_is_array(vocab) || !json_is_string(pattern) || n_special < 1 || size <= n_special || size >= MAX_TOKENS)
        return err_set(r->e, ERR_INPUT, "%s: is no tekken file: vocab, config.pattern or the two default sizes are missing or odd (%lld, %lld)",
                       r->what, (long long)size, (long long)n_special);
    TRY(tokenizer_new(&r->t, (int32_t)size, r->e));
    struct tokenizer *t = r->t;
    t->rule = MERGE_RANK;
    t->whole_first = true;
    t->add_bos = true;
    TRY(tokenizer_split_add(t, text_of(pattern), r->what, r->e));
    json_array_foreach(vocab, i, item) {
        const json_t *rank = json_object_get(item, "rank"), *bytes = json_object_get(item, "token_bytes");
        char buf[1024];
        size_t len;
        if ((json_int_t)i >= size - n_special) break; /* files may hold more than the model uses */
        if (json_integer_value(rank) != (json_int_t)i || !json_is_string(bytes) || json_string_length(bytes) > sizeof buf ||
            base64_decode(text_of(bytes), buf, &len) < 0 || len == 0)
            return err_set(r->e, ERR_INPUT, "%s: vocab entry %zu has no rank %zu with base64 token_bytes", r->what, i, i);
        int32_t id = (int32_t)(i + (size_t)n_special);
        TRY(tokenizer_keep(t, (struct span){buf, len}, &t->bytes[id], r->e));
        t->kinds[id] = TOKEN_NORMAL;
    }
    t->added = arena_alloc(&t->arena, (size_t)n_special * sizeof *t->added);
    uint8_t *named = arena_alloc(&t->arena, (size_t)n_special);
    if (!t->added || !named) return err_set(r->e, ERR_NOMEM, "out of memory for %lld special tokens", (long long)n_special);
    json_array_foreach(specials, i, item) {
        const json_t *rank = json_object_get(item, "rank"), *name = json_object_get(item, "token_str");
        json_int_t id = json_integer_value(rank);
        if (!json_is_integer(rank) || id < 0 || id >= n_special || !json_is_string(name) || named[id])
            return err_set(r->e, ERR_INPUT, "%s: special token %zu has no rank of its own below %lld or no token_str", r->what, i, (long long)n_special);
        named[id] = 1;
        TRY(add_special(r, (int32_t)id, text_of(name)));
    }
    for (int32_t id = 0; id < (int32_t)n_special; id++) {
        char name[32];
        if (named[id]) continue;
        snprintf(name, sizeof name, "<SPECIAL_%d>", id);
        TRY(add_special(r, id, span_of(id < (int32_t)COUNT_OF(tekken_specials) && !json_array_size(specials) ? tekken_specials[id] : name)));
    }
    TRY(tokenizer_index(t, r->e));
    TRY(tokenizer_added_index(t, r->e));
    snprintf(t->kind, sizeof t->kind, "byte-level BPE (tekken)");
    return OK;
}

int tokenizer_from_tekken(struct tokenizer **out, struct span json, const char *what, struct err *e)
{
    struct reader r = {.what = what, .e = e};
    json_t *root;
    TRY(parse(&root, json, what, e));
    return finish(&r, root, read_tekken(&r, root), out);
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

/* Mistral Small 3.1's tokenizer.json carries a split pattern that is not the one it was trained with. */
static int mend_mistral(struct tokenizer *t, const char *path, struct err *e)
{
    if (t->n_split == 0 || t->n < 131072) return OK;
    struct tokenizer right = {0};
    TRY(tokenizer_split_add(&right, span_of(pattern_tekken), path, e));
    log_line(LOG_WARN, "%s: the split pattern of this vocabulary is replaced by Mistral's own (tekken)", path);
    pcre2_code_free(t->split[0]);
    t->split[0] = right.split[0];
    return OK;
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
