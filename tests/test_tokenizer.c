/* test_tokenizer: small vocabularies made by hand, whose ids can be worked out on paper: merging, added tokens,
 * marks, streams, SentencePiece, tekken, and each refusal by the words a user would need. Real vocabularies are
 * compared with the reference libraries by test_tokenizers_real.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tokenizer.h"

static struct err err;

#define GOOD(call)                                                                                                   \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ != OK) fail_msg("%s: %s", #call, err.msg);                                                           \
    } while (0)
#define REFUSED(call, text)                                                                                          \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ >= 0) fail_msg("%s: was accepted, expected: %s", #call, text);                                       \
        if (!strstr(err.msg, text) || strchr(err.msg, '\n')) fail_msg("message '%s', expected '%s'", err.msg, text); \
    } while (0)

static void add(struct buf *b, const char *text)
{
    if (buf_append(b, text, strlen(text)) < 0) abort();
}

/* -------------------------------------------------------------------------------- a byte-level vocabulary */

/* A tokenizer.json, in parts that a test may replace. Ids 0..255 are the bytes, 256.. the tokens, then `more`. */
struct recipe {
    const char *more[300]; /* tokens by their raw bytes, from id 268 on */
    const char *merges, *added, *normalizer, *pre, *post, *decoder, *model;
};

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"
#define PLAIN_BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SPLIT(re) "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" re "\"},\"behavior\":\"Isolated\",\"invert\":false}"
#define SEQ(what, list) "{\"type\":\"Sequence\",\"" what "\":[" list "]}"
#define ADDED(id, name, special, rest) "{\"id\":" #id ",\"content\":\"" name "\",\"special\":" #special rest "}"

static const char *const tokens[] = {"he", "ll",   "hell",   "hello", " w",   "or",
                                     "ld", " wor", " world", "aa",    "aaaa", "\xC3\xA9"};
static const char default_merges[] =
    "[\"h e\",\"l l\",\"he ll\",\"hell o\",[\"\xC4\xA0\",\"w\"],\"o r\",\"l d\",\"\\u0120w or\",\"\xC4\xA0wor ld\","
    "\"a a\",\"aa aa\",[\"\xC3\x83\",\"\xC2\xA9\"]]";
static const char default_added[] =
    "[" ADDED(600, "<|im_start|>", true, "") "," ADDED(601, "<|im_end|>", true, "") "," ADDED(
        602, "<think>", false, "") "," ADDED(603, "<|im", true,
                                             "") "," ADDED(604, "<l>", true,
                                                           ",\"lstrip\":true") "," ADDED(605, "<r>", true,
                                                                                         ",\"rstrip\":true") "]";

/* Writes raw bytes in the stand-in alphabet, as a JSON string. */
static void add_written(struct buf *b, const char *bytes, size_t n)
{
    add(b, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned c = (unsigned char)bytes[i];
        bool plain = (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || c >= 174;
        char utf8[5] = {0};
        utf8_put(utf8, plain ? c : c <= 32 ? 256 + c : c <= 160 ? 256 + 33 + (c - 127) : 323);
        if (c == '"' || c == '\\') add(b, "\\");
        add(b, utf8);
    }
    add(b, "\"");
}

static void add_vocab(struct buf *b, const struct recipe *r)
{
    int id = 0;
    add(b, "{");
    for (; id < 256; id++) {
        char c = (char)id;
        add_written(b, &c, 1);
        if (buf_appendf(b, ":%d,", id) < 0) abort();
    }
    for (size_t i = 0; i < COUNT_OF(tokens); i++, id++) {
        add_written(b, tokens[i], strlen(tokens[i]));
        if (buf_appendf(b, ": %d,\n", id) < 0) abort();
    }
    for (size_t i = 0; r->more[i]; i++, id++) {
        add_written(b, r->more[i], strlen(r->more[i]));
        if (buf_appendf(b, ":%d,", id) < 0) abort();
    }
    b->data[b->len - 1] = ' ';
    if (b->data[b->len - 2] == ',') b->data[b->len - 2] = ' ';
    add(b, "}");
}

static struct buf json_of(const struct recipe *r)
{
    struct buf b = {0};
    if (buf_appendf(&b,
                    "{\"version\":\"1.0\",\"added_tokens\":%s,\"normalizer\":%s,\"pre_tokenizer\":%s,"
                    "\"post_processor\":%s,\"decoder\":%s,",
                    r->added ? r->added : default_added, r->normalizer ? r->normalizer : "null",
                    r->pre ? r->pre : BYTE_LEVEL, r->post ? r->post : "null",
                    r->decoder ? r->decoder : BYTE_LEVEL) < 0)
        abort();
    add(&b, "\"model\": {\"type\":\"BPE\",\"vocab\" : ");
    add_vocab(&b, r);
    if (buf_appendf(&b, ",\"merges\":%s%s}}", r->merges ? r->merges : default_merges, r->model ? r->model : "") < 0)
        abort();
    return b;
}

static struct tokenizer *made(const struct recipe *r)
{
    struct tokenizer *t = NULL;
    struct buf b = json_of(r);
    GOOD(tokenizer_from_json(&t, buf_span(&b), "test", &err));
    buf_free(&b);
    return t;
}

/* ------------------------------------------------------------------------------------------------ expectations */

static void expect_marked(const struct tokenizer *t, const char *text, const struct mark *marks, size_t n_marks,
                          const char *expected)
{
    struct ids ids = {0};
    struct buf got = {0};
    GOOD(tokenizer_encode(t, span_of(text), marks, n_marks, true, &ids, &err));
    for (size_t i = 0; i < ids.len; i++)
        if (buf_appendf(&got, "%s%d", i ? " " : "", ids.id[i]) < 0) abort();
    if (strcmp(got.data ? got.data : "", expected))
        fail_msg("'%s': ids %s, expected %s", text, got.data ? got.data : "", expected);
    ids_free(&ids);
    buf_free(&got);
}

static void expect(const struct tokenizer *t, const char *text, const char *expected)
{
    expect_marked(t, text, NULL, 0, expected);
}

static void expect_user(const struct tokenizer *t, const char *text, const char *expected)
{
    struct mark all = {0, strlen(text)};
    expect_marked(t, text, &all, 1, expected);
}

static void expect_decoded(const struct tokenizer *t, const int32_t *ids, size_t n, bool control,
                           const char *expected)
{
    struct detok d = {0};
    struct buf out = {0};
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(detok_push(&d, t, ids[i], control, &out), OK);
        assert_true(utf8_valid(buf_span(&out)));
    }
    assert_int_equal(detok_end(&d, &out), OK);
    assert_string_equal(out.data ? out.data : "", expected);
    buf_free(&out);
}

/* -------------------------------------------------------------------------------- merging, added tokens */

static void test_merges(void **state)
{
    (void)state;
    struct tokenizer *t = made(&(struct recipe){0});
    expect(t, "", "");
    expect(t, "hello world", "259 264");
    expect(t, "hell", "258");
    expect(t, "hel", "256 108");
    expect(t, "lll", "257 108"); /* equal ranks: leftmost first */
    expect(t, "aaa", "265 97");
    expect(t, "aaaaaaa", "266 265 97");
    expect(t, "hello hello", "259 32 259");
    expect(t, "\xC3\xA9", "267");
    expect(t, "e\xCC\x81", "101 204 129");                          /* no normalizer */
    expect(t, "\x7F\xC2\xA0\xC2\xAD\x01", "127 194 160 194 173 1"); /* the ends of the stand-in alphabet */
    assert_int_equal(tokenizer_size(t), 606);
    assert_int_equal(tokenizer_bos(t), -1);
    assert_false(tokenizer_adds_bos(t));
    tokenizer_close(&t);
    assert_null(t);
    t = made(&(struct recipe){.more = {"xy", "yz"}, .merges = "[\"x y\", \"y z\", [\"x\", \"y\"]]"});
    expect(t, "xyz", "268 122"); /* of equal merges the first counts */
    tokenizer_close(&t);
}

/* The pieces of GPT-2's pattern: a space goes with what follows it, and nothing merges over a border. */
static void test_long_pieces(void **state)
{
    (void)state;
    enum { N = 400000 };
    struct tokenizer *t = made(&(struct recipe){0});
    char *text = malloc(N);
    struct ids ids = {0};
    memset(text, 'a', N);
    GOOD(tokenizer_encode(t, (struct span){text, N}, NULL, 0, false, &ids, &err));
    assert_int_equal(ids.len, N / 4);
    for (size_t i = 0; i < ids.len; i++) assert_int_equal(ids.id[i], 266);
    memset(text, ' ', N);
    ids.len = 0;
    GOOD(tokenizer_encode(t, (struct span){text, N}, NULL, 0, false, &ids, &err));
    assert_int_equal(ids.len, N);
    ids_free(&ids);
    free(text);
    tokenizer_close(&t);
}

static void test_added_tokens(void **state)
{
    (void)state;
    struct tokenizer *t = made(&(struct recipe){0});
    expect(t, "<|im_start|>hello<|im_end|>", "600 259 601");
    expect(t, "<|im_st", "603 95 115 116"); /* the longest that is there */
    expect(t, "<|i", "60 124 105");
    expect(t, "<think>hello", "602 259");
    expect(t, "x \xE3\x80\x80<l> hello", "120 604 32 259"); /* white space of Unicode, not of ASCII only */
    expect(t, "x<r>\xC2\x85 hello", "120 605 259");
    expect(t, "<r> <l>", "605 604");
    assert_int_equal(tokenizer_find_special(t, span_of("<|im_end|>")), 601);
    assert_int_equal(tokenizer_find_special(t, span_of("<|im_end|>x")), -1);
    assert_int_equal(tokenizer_find_special(t, span_of("hello")), -1);
    assert_int_equal(tokenizer_find_special(t, span_of("")), -1);
    assert_int_equal(tokenizer_token_kind(t, 600), TOKEN_CONTROL);
    assert_int_equal(tokenizer_token_kind(t, 602), TOKEN_USER_DEFINED);
    assert_int_equal(tokenizer_token_kind(t, 259), TOKEN_NORMAL);
    assert_int_equal(tokenizer_token_kind(t, 400), TOKEN_UNUSED);
    assert_int_equal(tokenizer_token_kind(t, 606), TOKEN_UNUSED);
    assert_int_equal(tokenizer_token_kind(t, -1), TOKEN_UNUSED);
    tokenizer_close(&t);
}

static void test_marks(void **state)
{
    (void)state;
    static const char im_start[] = "60 124 105 109 95 115 116 97 114 116 124 62 259 601";
    struct tokenizer *t = made(&(struct recipe){0});
    const char *text = "<|im_start|>hello<|im_end|>";
    expect_marked(t, text, &(struct mark){0, 12}, 1, im_start);
    expect_marked(t, text, &(struct mark){0, 1}, 1, im_start);
    /* A match may not touch a marked byte; a shorter one before it may stand. */
    expect_marked(t, text, &(struct mark){11, 12}, 1, "603 95 115 116 97 114 116 124 62 259 601");
    expect_marked(t, text, &(struct mark){3, 4}, 1, im_start);
    expect_marked(t, text, &(struct mark){3, 3}, 1, "600 259 601"); /* nothing marked */
    expect_marked(t, text, (struct mark[]){{12, 17}, {18, 19}}, 2, "600 259 60 124 105 109 95 101 110 100 124 62");
    expect_marked(t, text, (struct mark[]){{0, 1}, {1, 2}, {26, 27}}, 3,
                  "60 124 105 109 95 115 116 97 114 116 124 62 259 603 95 101 110 100 124 62");
    /* Text runs on over the borders of marks. */
    expect_marked(t, "hello world", (struct mark[]){{0, 2}, {5, 8}}, 2, "259 264");
    expect_user(t, "<think>", "60 116 104 105 110 107 62");
    expect_user(t, "<|im_start|>hello<|im_end|>",
                "60 124 105 109 95 115 116 97 114 116 124 62 259 60 124 105 109 95 101 110 100 124 62");
    tokenizer_close(&t);
}

/* Text that spells a control token never becomes it, even where the file lists it among the ordinary tokens. */
static void test_control_tokens_only_by_name(void **state)
{
    (void)state;
    struct recipe r = {.more = {"EOT", "word", "TOOL"},
                       .added = "[" ADDED(268, "EOT", true, "") "," ADDED(270, "TOOL", false, "") "]",
                       .model = ",\"ignore_merges\":true"};
    struct tokenizer *t = made(&r);
    expect(t, "EOTword", "268 269");
    expect_user(t, "EOT", "69 79 84");
    expect_user(t, "TOOL", "84 79 79 76");
    expect_user(t, "word", "269");
    tokenizer_close(&t);
    r.merges = "[\"E O\",\"O T\",\"E OT\"]";
    r.more[3] = "OT";
    t = made(&r);
    expect_user(t, "EOT", "69 271");
    tokenizer_close(&t);
}

static void test_bos(void **state)
{
    (void)state;
    struct recipe r = {
        .post = SEQ("processors", PLAIN_BYTES
                    ",{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|im_start|>\","
                    "\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}]}")};
    struct tokenizer *t = made(&r);
    expect(t, "hello", "600 259");
    expect(t, "", "600");
    assert_true(tokenizer_adds_bos(t));
    struct ids ids = {0};
    GOOD(tokenizer_encode(t, span_of("hello"), NULL, 0, false, &ids, &err));
    assert_int_equal(ids.len, 1);
    ids_free(&ids);
    tokenizer_close(&t);
}

static void test_normalizer_nfc(void **state)
{
    (void)state;
    struct tokenizer *t = made(&(struct recipe){.normalizer = SEQ("normalizers", "{\"type\":\"NFC\"}")});
    expect(t, "e\xCC\x81", "267");
    expect(t, "hello<think>e\xCC\x81", "259 602 267");
    tokenizer_close(&t);
}

/* \s is Unicode's White_Space: no more (U+180E and U+001C are none), no less (U+0085 is one). */
static void test_white_space_of_patterns(void **state)
{
    (void)state;
    static const struct {
        uint32_t from, to;
        bool space;
    } ranges[] = {{0x01, 0x08, false},    {0x09, 0x0D, true},      {0x0E, 0x1F, false},    {0x20, 0x20, true},
                  {0x7F, 0x84, false},    {0x85, 0x85, true},      {0x86, 0x9F, false},    {0xA0, 0xA0, true},
                  {0x1680, 0x1680, true}, {0x180E, 0x180E, false}, {0x2000, 0x200A, true}, {0x200B, 0x200F, false},
                  {0x2028, 0x2029, true}, {0x202F, 0x202F, true},  {0x205F, 0x205F, true}, {0x2060, 0x2060, false},
                  {0x3000, 0x3000, true}, {0xFEFF, 0xFEFF, false}};
    for (size_t i = 0; i < COUNT_OF(ranges); i++) {
        for (uint32_t cp = ranges[i].from; cp <= ranges[i].to; cp++) {
            char text[8] = "a";
            int n = utf8_put(text + 1, cp);
            text[1 + n] = 'b';
            /* If it is no space, the text is one piece and a token. */
            const struct recipe forms[] = {{.more = {text},
                                            .model = ",\"ignore_merges\":true",
                                            .pre = SEQ("pretokenizers", SPLIT("[^\\\\s]+") "," PLAIN_BYTES)},
                                           {.more = {text},
                                            .model = ",\"ignore_merges\":true",
                                            .pre = SEQ("pretokenizers", SPLIT("\\\\S+") "," PLAIN_BYTES)},
                                           {.more = {text},
                                            .model = ",\"ignore_merges\":true",
                                            .pre = SEQ("pretokenizers", SPLIT("\\\\s|[^\\\\s]+") "," PLAIN_BYTES)}};
            for (size_t k = 0; k < COUNT_OF(forms); k++) {
                struct tokenizer *t = made(&forms[k]);
                struct ids ids = {0};
                GOOD(tokenizer_encode(t, span_of(text), NULL, 0, false, &ids, &err));
                if ((ids.len > 1) != ranges[i].space)
                    fail_msg("U+%04X is %sa space to form %zu", cp, ids.len > 1 ? "" : "not ", k);
                ids_free(&ids);
                tokenizer_close(&t);
            }
        }
    }
}

static void test_splits(void **state)
{
    (void)state;
    struct recipe r = {.more = {"12", "a12"},
                       .model = ",\"ignore_merges\":true",
                       .pre = SEQ("pretokenizers", "{\"type\":\"Digits\",\"individual_digits\":true}," BYTE_LEVEL)};
    struct tokenizer *t = made(&r);
    expect(t, "hello12", "259 49 50");
    tokenizer_close(&t);
    r.pre = SEQ("pretokenizers", SPLIT("\\\\p{N}{1,2}") "," PLAIN_BYTES);
    t = made(&r);
    expect(t, "a12", "97 268");
    tokenizer_close(&t);
    r.pre = PLAIN_BYTES; /* no split at all */
    t = made(&r);
    expect(t, "a12", "269");
    expect(t, "hello world", "259 264");
    tokenizer_close(&t);
    /* Contractions without regard to case fold as Unicode does: U+017F is an s. */
    r = (struct recipe){.more = {"'\xC5\xBF", "'S"},
                        .model = ",\"ignore_merges\":true",
                        .pre = SEQ("pretokenizers", SPLIT("(?i:'s)|\\\\p{L}|'") "," PLAIN_BYTES)};
    t = made(&r);
    expect(t, "'\xC5\xBF'S", "268 269");
    tokenizer_close(&t);
}

static void test_pattern_that_runs_away(void **state)
{
    (void)state;
    struct tokenizer *t =
        made(&(struct recipe){.pre = SEQ("pretokenizers", SPLIT("(?:a|aa|aaa)+[bc]") "," PLAIN_BYTES)});
    struct ids ids = {0};
    char text[101] = {0};
    memset(text, 'a', 100);
    REFUSED(tokenizer_encode(t, span_of(text), NULL, 0, false, &ids, &err),
            "split pattern 0 of the tokenizer gave up at byte 0 of a text of 100");
    ids_free(&ids);
    tokenizer_close(&t);
}

static void test_text_that_is_not_utf8(void **state)
{
    (void)state;
    struct tokenizer *t = made(&(struct recipe){0});
    struct ids ids = {0};
    REFUSED(tokenizer_encode(t, span_of("hello\xFFworld"), NULL, 0, false, &ids, &err),
            "not valid UTF-8 at byte 5 of 11");
    REFUSED(tokenizer_encode(t, span_of("ab\xE2\x82"), NULL, 0, false, &ids, &err), "not valid UTF-8 at byte 2 of 4");
    REFUSED(tokenizer_encode(t, span_of("\xED\xA0\x80"), NULL, 0, false, &ids, &err),
            "not valid UTF-8 at byte 0 of 3");
    assert_int_equal(ids.len, 0);
    GOOD(tokenizer_encode(t, (struct span){"a\0b", 3}, NULL, 0, false, &ids, &err));
    assert_int_equal(ids.len, 3);
    assert_int_equal(ids.id[1], 0);
    GOOD(tokenizer_encode(t, (struct span){0}, NULL, 0, false, &ids, &err));
    assert_int_equal(ids.len, 3);
    ids_free(&ids);
    tokenizer_close(&t);
}

/* ------------------------------------------------------------------------------------------------ streams */

static void test_stream_of_tokens(void **state)
{
    (void)state;
    struct tokenizer *t = made(&(struct recipe){.more = {"\xF0\x9F", "\x98\x80!"}});
    expect_decoded(t, (int32_t[]){268, 269}, 2, false, "\xF0\x9F\x98\x80!");
    expect_decoded(t, (int32_t[]){259, 264}, 2, false, "hello world");
    expect_decoded(t, (int32_t[]){600, 259, 602, 601}, 4, false,
                   "hello<think>"); /* control tokens are silent, others not */
    expect_decoded(t, (int32_t[]){600, 259, 601}, 3, true, "<|im_start|>hello<|im_end|>");
    expect_decoded(t, (int32_t[]){-1, 400, 259, 999999}, 4, true, "hello");
    expect_decoded(t, (int32_t[]){268}, 1, false, "\xEF\xBF\xBD");
    expect_decoded(t, (int32_t[]){268, 259}, 2, false, "\xEF\xBF\xBDhello");
    expect_decoded(t, (int32_t[]){268, 601, 269}, 3, false,
                   "\xF0\x9F\x98\x80!"); /* what is silent does not interrupt */
    tokenizer_close(&t);
}

static size_t from_hex(const char *hex, size_t n, char *out)
{
    for (size_t i = 0; i < n / 2; i++) {
        unsigned v = 0;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &v), 1);
        out[i] = (char)v;
    }
    out[n / 2] = 0;
    return n / 2;
}

/* Against Python's decoder: the bytes one by one, and all in one token; then two lines after each other, both
 * ways. */
static void test_invalid_bytes_in_a_stream(void **state)
{
    (void)state;
    static char bytes[300][64], text[300][256];
    static struct recipe r;
    char line[512];
    size_t n = 0;
    FILE *f = fopen(TEST_DATA "/tokenize_utf8.txt", "r");
    assert_non_null(f);
    while (n < 290 && fgets(line, sizeof line, f)) {
        if (line[0] == '#') continue;
        size_t a = strcspn(line, " "), b = strcspn(line + a + 1, "\n");
        from_hex(line, a, bytes[n]);
        from_hex(line + a + 1, b, text[n]);
        r.more[n] = bytes[n];
        n++;
    }
    fclose(f);
    assert_true(n >= 240);
    struct tokenizer *t = made(&r);
    for (size_t i = 0; i < n; i++) {
        int32_t single[128];
        const int32_t whole[2] = {268 + (int32_t)i, 268 + (int32_t)((i + 1) % n)};
        size_t k = 0;
        for (const char *p = bytes[i]; *p; p++) single[k++] = (unsigned char)*p;
        expect_decoded(t, single, k, false, text[i]);
        expect_decoded(t, whole, 1, false, text[i]);
        struct detok d = {0}, e = {0};
        struct buf one = {0}, two = {0};
        for (const char *p = bytes[(i + 1) % n]; *p; p++) single[k++] = (unsigned char)*p;
        for (size_t j = 0; j < k; j++) assert_int_equal(detok_push(&d, t, single[j], false, &one), OK);
        for (size_t j = 0; j < 2; j++) assert_int_equal(detok_push(&e, t, whole[j], false, &two), OK);
        assert_true(span_eq(buf_span(&one), buf_span(&two)));
        assert_int_equal(d.n_held, e.n_held);
        buf_free(&one);
        buf_free(&two);
    }
    tokenizer_close(&t);
}

/* ------------------------------------------------------------------------------------------------ SentencePiece */

#define MARK "\xE2\x96\x81" /* U+2581 */

enum { SP_BYTES = 3, SP_FIRST = 3 + 256 };

struct sp {
    char names[SP_FIRST][8];
    struct span tokens[SP_FIRST + 20];
    int32_t types[SP_FIRST + 20];
    float scores[SP_FIRST + 20];
    struct tokenizer_vocab v;
};

static void sp_make(struct sp *s)
{
    static const struct {
        const char *token;
        float score;
        int32_t type;
    } pieces[] = {{MARK, -10, 1},  {"h", -11, 1},      {"e", -12, 1},      {"l", -13, 1},
                  {"o", -14, 1},   {"he", -1, 1},      {"ll", -2, 1},      {"lo", -1.5f, 1},
                  {"hell", -3, 1}, {MARK "he", -4, 1}, {MARK MARK, -5, 1}, {"<x>", 0, 4},
                  {"<", -20, 1},   {"x", -20, 1},      {"<x", -20, 1},     {">", -20, 1}};
    static const char *const first[] = {"<unk>", "<s>", "</s>"};
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SP_FIRST; i++) {
        if (i < SP_BYTES) snprintf(s->names[i], sizeof s->names[i], "%s", first[i]);
        else snprintf(s->names[i], sizeof s->names[i], "<0x%02X>", i - SP_BYTES);
        s->tokens[i] = span_of(s->names[i]);
        s->types[i] = i == 0 ? 2 : i < SP_BYTES ? 3 : 6;
    }
    for (size_t i = 0; i < COUNT_OF(pieces); i++) {
        s->tokens[SP_FIRST + i] = span_of(pieces[i].token);
        s->types[SP_FIRST + i] = pieces[i].type;
        s->scores[SP_FIRST + i] = pieces[i].score;
    }
    s->v = (struct tokenizer_vocab){.model = span_of("llama"),
                                    .tokens = s->tokens,
                                    .types = s->types,
                                    .scores = s->scores,
                                    .n_tokens = SP_FIRST + COUNT_OF(pieces),
                                    .bos = -1,
                                    .eos = -1,
                                    .unk = -1,
                                    .add_bos = -1,
                                    .add_space_prefix = -1};
}

/* 259 _, 260 h, 261 e, 262 l, 263 o, 264 he, 265 ll, 266 lo, 267 hell, 268 _he, 269 __, 270 <x>, 271 <, 272 x, 273
 * <x, 274 > */
static void test_sentencepiece(void **state)
{
    (void)state;
    struct sp s;
    struct tokenizer *t;
    sp_make(&s);
    GOOD(tokenizer_from_vocab(&t, &s.v, "test", &err));
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    expect(t, "", "1");
    expect(t, "hello", "1 268 262 266"); /* he first, then lo, then _he: the best score, not the longest token */
    expect(t, "lll", "1 259 265 262");
    expect(t, " hello", "1 259 268 262 266"); /* "__" at -5 comes after "_he" at -4 */
    expect(t, "  ", "1 269 259");
    expect(t, "\xC3\xA9", "1 259 198 172");
    expect(t, "</s>h", "1 2 259 260"); /* a space goes before each text */
    expect(t, "<x>h", "1 270 259 260");
    expect_user(t, "<x>", "1 259 273 274"); /* not even by merging: <x> has the best score of all */
    expect_user(t, "<s>", "1 259 271 118 274");
    expect_decoded(t, (int32_t[]){1, 268, 262, 266}, 4, false, "hello");
    expect_decoded(t, (int32_t[]){259, 268}, 2, false, " he");
    expect_decoded(t, (int32_t[]){269}, 1, false, " ");
    expect_decoded(t, (int32_t[]){259, 198, 172, 0, 260}, 5, false, "\xC3\xA9h");
    tokenizer_close(&t);

    s.v.add_space_prefix = 0;
    s.v.add_bos = 0;
    GOOD(tokenizer_from_vocab(&t, &s.v, "test", &err));
    expect(t, "hello", "264 262 266");
    expect_decoded(t, (int32_t[]){259, 260}, 2, false, " h");
    tokenizer_close(&t);

    for (int i = SP_BYTES; i < SP_FIRST; i++) s.types[i] = 5;
    GOOD(tokenizer_from_vocab(&t, &s.v, "test", &err));
    expect(t, "h\xC3\xA9", "260 0"); /* one unknown token a character */
    tokenizer_close(&t);
}

static void test_sentencepiece_refusals(void **state)
{
    (void)state;
    struct sp s;
    struct tokenizer *t = NULL;
    sp_make(&s);
    s.v.scores = NULL;
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "x.gguf: a llama vocabulary needs tokenizer.ggml.scores");
    sp_make(&s);
    s.scores[263] = NAN;
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "the score of token 263 is not a number");
    sp_make(&s);
    s.tokens[7] = span_of("<0xGG>");
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "token 7 is of type byte but reads <0xGG>");
    sp_make(&s);
    s.v.bos = 100000;
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "bos token id 100000 is outside the vocabulary of 275");
    sp_make(&s);
    s.v.model = span_of("t5");
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "tokenizer model t5 is not known; known are gpt2");
    sp_make(&s);
    s.v.model = span_of("gpt2");
    s.v.pre = span_of("bloom");
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err),
            "pre-tokenizer bloom (tokenizer.ggml.pre) is not known; known are gpt-2, llama-bpe, qwen2, "
            "gpt-4o, tekken, smollm");
    s.v.pre = span_of("qwen2");
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err),
            "token 3 is of type byte, which a gpt2 vocabulary has not");
    s.v.types = NULL;
    s.v.merges = (struct span[]){span_of("ab")};
    s.v.n_merges = 1;
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "merge 0 has no two parts: ab");
    s.v.n_tokens = 0;
    REFUSED(tokenizer_from_vocab(&t, &s.v, "x.gguf", &err), "holds a vocabulary of 0 tokens");
    assert_null(t);
}

/* A GGUF vocabulary of the byte-level kind: tokens in stand-ins, added tokens plain, each family's defaults. */
static void test_byte_level_in_gguf(void **state)
{
    (void)state;
    static char names[256][4];
    struct span toks[256 + 8], merges[2] = {span_of("1 2"), span_of("\xC4\xA0 a")};
    int32_t types[256 + 8];
    static const struct {
        const char *pre, *twelve, *zq; /* the ids of "12", which merges, and of "zq", which is only a token */
        bool bos, nfc;
    } families[] = {{"llama-bpe", "256", "263", true, false},   {"llama-v3", "256", "263", true, false},
                    {"qwen2", "49 50", "122 113", false, true}, {"gpt-4o", "256", "263", false, false},
                    {"tekken", "49 50", "263", true, false},    {"smollm", "49 50", "122 113", false, false},
                    {"gpt-2", "256", "122 113", false, false},  {"", "256", "122 113", false, false}};
    for (int i = 0; i < 256; i++) {
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        utf8_put(names[i], (uint32_t)(plain ? i : i <= 32 ? 256 + i : i <= 160 ? 256 + 33 + (i - 127) : 323));
        toks[i] = span_of(names[i]);
        types[i] = 1;
    }
    const char *const more[] = {"12",     "\xC4\xA0\x61", "<|end|>", "<tool>",
                                "[PAD1]", "<s>",          "12",      "zq"}; /* 12 twice: the first counts */
    const int32_t more_types[] = {1, 1, 3, 4, 5, 3, 1, 1};
    for (int i = 0; i < 8; i++) {
        toks[256 + i] = span_of(more[i]);
        types[256 + i] = more_types[i];
    }
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        struct tokenizer_vocab v = {.model = span_of("gpt2"),
                                    .pre = span_of(families[i].pre),
                                    .tokens = toks,
                                    .types = types,
                                    .n_tokens = 264,
                                    .merges = merges,
                                    .n_merges = 2,
                                    .bos = 261,
                                    .eos = 258,
                                    .unk = -1,
                                    .add_bos = -1,
                                    .add_space_prefix = -1};
        struct tokenizer *t;
        struct buf expected = {0};
        GOOD(tokenizer_from_vocab(&t, &v, "test", &err));
        assert_true(buf_appendf(&expected, "%s%s", families[i].bos ? "261 " : "", families[i].twelve) == OK);
        expect(t, "12", expected.data);
        expected.len = 0;
        assert_true(buf_appendf(&expected, "%s%s", families[i].bos ? "261 " : "", families[i].zq) == OK);
        expect(t, "zq", expected.data);
        expected.len = 0;
        assert_true(buf_appendf(&expected, "%s258 259 257 91 80 65 68 49 93", families[i].bos ? "261 " : "") == OK);
        expect(t, "<|end|><tool> a[PAD1]", expected.data);
        expected.len = 0;
        assert_true(buf_appendf(&expected, "%s%s", families[i].bos ? "261 " : "",
                                families[i].nfc ? "195 169" : "101 204 129") == OK);
        expect(t, "e\xCC\x81", expected.data);
        expect_decoded(t, (int32_t[]){258, 259, 257, 260}, 4, false, "<tool> a");
        buf_free(&expected);
        tokenizer_close(&t);
        v.add_bos = !families[i].bos; /* the file's word goes before the family's custom */
        GOOD(tokenizer_from_vocab(&t, &v, "test", &err));
        assert_int_equal(tokenizer_adds_bos(t), !families[i].bos);
        tokenizer_close(&t);
    }
}

/* Llama 2's tokenizer.json: the vocabulary of SentencePiece with merges. All four ways to say where spaces come
 * from. */
static void test_sentencepiece_as_json(void **state)
{
    (void)state;
    static const struct {
        const char *normalizer, *pre;
        const char *h, *space_h, *user_h, *h_user_h; /* "h", " h", "<y>h", "h<y>h" */
    } forms[] = {
        {SEQ("normalizers", "{\"type\":\"Prepend\",\"prepend\":\"" MARK
                            "\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"" MARK "\"}"),
         "null", "257", "256 257", "261 257", "257 261 257"},
        {"null",
         "{\"type\":\"Metaspace\",\"replacement\":\"" MARK "\",\"prepend_scheme\":\"always\",\"split\":false}", "257",
         "257", "261 257", "257 261 257"},
        {"null", "{\"type\":\"Metaspace\",\"replacement\":\"" MARK "\",\"prepend_scheme\":\"first\",\"split\":false}",
         "257", "257", "261 258", "257 261 258"},
        {"null", "{\"type\":\"Metaspace\",\"replacement\":\"" MARK "\",\"prepend_scheme\":\"never\",\"split\":false}",
         "258", "257", "261 258", "258 261 258"},
    };
    for (size_t i = 0; i < COUNT_OF(forms); i++) {
        struct buf b = {0};
        struct tokenizer *t;
        if (buf_appendf(
                &b,
                "{\"normalizer\":%s,\"pre_tokenizer\":%s,\"added_tokens\":[" ADDED(260, "<unk>", true, "") "," ADDED(
                    261, "<y>", false,
                    "") "],\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,"
                        "\"unk_token\":\"<unk>\",\"vocab\":{",
                forms[i].normalizer, forms[i].pre) < 0)
            abort();
        for (int byte = 0; byte < 256; byte++)
            if (buf_appendf(&b, "\"<0x%02X>\":%d,", byte, byte) < 0) abort();
        add(&b, "\"" MARK "\":256,\"" MARK "h\":257,\"h\":258,\"" MARK MARK "\":259},\"merges\":[\"" MARK
                " h\",\"" MARK " " MARK "\"]}}");
        GOOD(tokenizer_from_json(&t, buf_span(&b), "test", &err));
        buf_free(&b);
        expect(t, "h", forms[i].h);
        expect(t, " h", forms[i].space_h);
        expect(t, "<y>h", forms[i].user_h);
        expect(t, "h<y>h", forms[i].h_user_h);
        expect_user(t, "h\xC3\xA9", i == 3 ? "258 195 169" : "257 195 169");
        tokenizer_close(&t);
    }
}

/* ------------------------------------------------------------------------------------------------ tekken */

static void add_base64(struct buf *b, const char *s, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = 0;
        char four[5] = "====";
        for (size_t j = 0; j < 3; j++) v = v << 8 | (i + j < n ? (unsigned char)s[i + j] : 0);
        for (size_t j = 0; j < 4 && i + j <= n; j++) four[j] = digits[v >> (18 - 6 * j) & 63];
        add(b, four);
    }
}

static struct buf tekken_file(int size, const char *specials, int wrong_rank)
{
    static const char *const pieces[] = {"he", "ll", "hell", "\xC4\xA0", "hello!"};
    struct buf b = {0};
    if (buf_appendf(&b,
                    "{\"config\":{\"pattern\":\"\\\\p{L}+|[^\\\\p{L}]+\",\"default_vocab_size\":%d,"
                    "\"default_num_special_tokens\":20},%s\"vocab\":[",
                    size, specials) < 0)
        abort();
    for (int i = 0; i < 256 + (int)COUNT_OF(pieces); i++) {
        char byte = (char)i;
        if (buf_appendf(&b, "%s{\"rank\":%d,\"token_str\":null,\"token_bytes\":\"", i ? "," : "",
                        i == wrong_rank ? 7 : i) < 0)
            abort();
        if (i < 256) add_base64(&b, &byte, 1);
        else add_base64(&b, pieces[i - 256], strlen(pieces[i - 256]));
        add(&b, "\"}");
    }
    add(&b, "]}");
    return b;
}

static void test_tekken(void **state)
{
    (void)state;
    struct tokenizer *t = NULL;
    struct buf b = tekken_file(20 + 260, "", -1);
    GOOD(tokenizer_from_tekken(&t, buf_span(&b), "test", &err));
    assert_int_equal(tokenizer_size(t), 280);
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    expect(t, "hello", "1 278 131"); /* he, ll, then hell: the lowest rank first */
    expect(t, "[INST]he[/INST]", "1 3 276 4");
    expect_user(t, "[INST]",
                "1 111 93 98 103 104 113"); /* 20 + each byte: "[", "INST", "]" hold nothing that merges */
    expect_decoded(t, (int32_t[]){3, 278, 131, 4}, 4, false, "hello");
    tokenizer_close(&t);
    buf_free(&b);

    b = tekken_file(20 + 260, "", 260); /* entries beyond the model's size are not used */
    GOOD(tokenizer_from_tekken(&t, buf_span(&b), "test", &err));
    assert_int_equal(tokenizer_size(t), 280);
    tokenizer_close(&t);
    buf_free(&b);

    b = tekken_file(20 + 261,
                    "\"special_tokens\":[{\"rank\":0,\"token_str\":\"<s>\",\"is_control\":true},"
                    "{\"rank\":5,\"token_str\":\"[X]\"}],",
                    -1);
    GOOD(tokenizer_from_tekken(&t, buf_span(&b), "test", &err));
    assert_int_equal(tokenizer_bos(t), 0);
    expect(t, "[X]hello", "0 5 278 131");
    assert_int_equal(tokenizer_find_special(t, span_of("<SPECIAL_3>")), 3);
    tokenizer_close(&t);
    buf_free(&b);

    const struct {
        int size;
        const char *specials;
        int wrong_rank;
        const char *words;
    } bad[] = {{20 + 262, "", -1, "vocab has 261 entries, the sizes in config ask for 262"},
               {20, "", -1, "config.default_vocab_size 20 and default_num_special_tokens 20 do not fit"},
               {1000000000, "", -1, "config.default_vocab_size 1000000000"},
               {20 + 260, "", 100, "vocab entry 100 has no rank 100 with base64 token_bytes"},
               {20 + 260, "\"special_tokens\":[{\"rank\":20,\"token_str\":\"x\"}],", -1,
                "special token 0 has no rank of its own below 20"},
               {20 + 260, "\"special_tokens\":[{\"rank\":1,\"token_str\":\"x\"},{\"rank\":1,\"token_str\":\"y\"}],",
                -1, "special token 1 has no rank of its own"}};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        b = tekken_file(bad[i].size, bad[i].specials, bad[i].wrong_rank);
        REFUSED(tokenizer_from_tekken(&t, buf_span(&b), "tekken.json", &err), bad[i].words);
        buf_free(&b);
    }
    REFUSED(tokenizer_from_tekken(&t, span_of("{}"), "tekken.json", &err), "tekken.json: is no tekken file");
    assert_null(t);
}

/* -------------------------------------------------------------------------------- refusals, hostile files */

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        struct recipe r;
        const char *words;
    } cases[] = {
        {{.normalizer = "{\"type\":\"NFKC\"}"}, "x.json: normalizer NFKC is not supported"},
        {{.normalizer = SEQ("normalizers", "{\"type\":\"NFC\"},{\"type\":\"Lowercase\"}")},
         "normalizer Lowercase is not supported"},
        {{.normalizer = "{\"type\":\"Prepend\",\"prepend\":\"_\"}"}, "normalizer Prepend is not supported"},
        {{.pre = "{\"type\":\"Whitespace\"}"}, "pre_tokenizer Whitespace is not supported"},
        {{.pre = "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}"},
         "ByteLevel with add_prefix_space is not supported"},
        {{.pre = "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\",\"invert\":true}"},
         "Split with behavior Removed"},
        {{.pre = "{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Isolated\"}"},
         "pre_tokenizer Split"},
        {{.pre = "{\"type\":\"Metaspace\",\"replacement\":\"_\"}"}, "pre_tokenizer Metaspace is not supported"},
        {{.pre = "{\"type\":\"Metaspace\",\"replacement\":\"" MARK "\",\"prepend_scheme\":\"last\"}"},
         "prepend_scheme last is not supported"},
        {{.pre = "{\"type\":\"Digits\",\"individual_digits\":false}"}, "pre_tokenizer Digits is not supported"},
        {{.pre = "null"}, "ByteLevel and model.byte_fallback are both absent"},
        {{.model = ",\"byte_fallback\":true"}, "ByteLevel and model.byte_fallback are both there"},
        {{.pre = SEQ("pretokenizers", SPLIT("(a") "," PLAIN_BYTES)},
         "split pattern does not compile: missing closing parenthesis"},
        {{.pre = SEQ("pretokenizers", SPLIT("a$") "," PLAIN_BYTES)}, "split pattern has $ at byte 1"},
        {{.pre = SEQ("pretokenizers", SPLIT("[a[b]]") "," PLAIN_BYTES)}, "split pattern has [b at byte 2"},
        {{.pre = SEQ("pretokenizers", SPLIT("[a&&b]") "," PLAIN_BYTES)}, "split pattern has && at byte 2"},
        {{.pre = SEQ("pretokenizers", SPLIT("\\\\h+") "," PLAIN_BYTES)}, "split pattern has \\h at byte 0"},
        {{.pre = SEQ("pretokenizers", SPLIT("[a\\\\S]") "," PLAIN_BYTES)}, "split pattern has \\S at byte 2"},
        {{.pre = SEQ("pretokenizers",
                     SPLIT("a") "," SPLIT("b") "," SPLIT("c") "," SPLIT("d") "," SPLIT("e") "," PLAIN_BYTES)},
         "more than 4 split patterns"},
        {{.post = "{\"type\":\"BertProcessing\"}"}, "post_processor BertProcessing is not supported"},
        {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<none>\"}}]}"},
         "not among added_tokens"},
        {{.decoder = "{\"type\":\"WordPiece\"}"}, "decoder WordPiece is not supported"},
        {{.added = "[" ADDED(600, "<a>", true, ",\"single_word\":true") "]"}, "added token <a> is single_word"},
        {{.added = "[" ADDED(-1, "<a>", true, "") "]"}, "added token 0 lacks an id"},
        {{.added = "[{\"id\":3}]"}, "added token 0 lacks an id between 0 and 16777215 or a content"},
        {{.added = "[" ADDED(1000000, "<a>", true, "") "]"}, "has ids up to 1000000 but only 269 tokens"},
        {{.merges = "[\"ab\"]"}, "model.merges is not an array of"},
        {{.merges = "[[\"a\",\"b\",\"c\"]]"}, "model.merges is not an array of"},
        {{.merges = "[[\"a\",\"b\"],]"}, "model.merges is not an array of"},
        {{.merges = "[\"a \\ud800b\"]"}, "model.merges is not an array of"},
        {{.merges = "[\"a \\udc00b\"]"}, "model.merges is not an array of"},
        {{.merges = "[\"a \\ud800\\u0041\"]"}, "model.merges is not an array of"},
        {{.merges = "[\"a \\x41\"]"}, "model.merges is not an array of"},
        {{.merges = "[\"a b\nc\"]"}, "model.merges is not an array of"},
        {{.merges = "[\"a \xFF\"]"}, "model.merges is not an array of"},
        {{.merges = "{}"}, "model lacks the object vocab or the array merges"},
        {{.model = ",\"end_of_word_suffix\":\"</w>\""}, "end_of_word_suffix are not supported"},
        {{.model = ",\"type\":\"Unigram\""}, "model Unigram is not supported"},
    };
    struct tokenizer *t = NULL;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct buf b = json_of(&cases[i].r);
        REFUSED(tokenizer_from_json(&t, buf_span(&b), "x.json", &err), cases[i].words);
        buf_free(&b);
    }
    static const struct {
        const char *json, *words;
    } files[] = {
        {"", "x.json: is no valid JSON"},
        {NULL, "x.json: is no valid JSON"},
        {"[]", "holds no JSON object"},
        {"{}", "model lacks the object vocab"},
        {"{\"pre_tokenizer\":" PLAIN_BYTES ",\"model\":{\"vocab\":{},\"merges\":[]}}", "has an empty vocabulary"},
        {"{\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}",
         "model.vocab is not an object of tokens with ids below 16777216 at byte 24"},
        {"{\"model\":{\"vocab\":{\"a\":01},\"merges\":[]}}", "model.vocab is not an object"},
        {"{\"model\":{\"vocab\":{\"a\":99999999},\"merges\":[]}}", "model.vocab is not an object"},
        {"{\"model\":{\"vocab\":{\"a\":1 \"b\":2},\"merges\":[]}}", "model.vocab is not an object"},
        {"{\"model\":{\"vocab\":{\"a\":1],\"merges\":[]}}", "x.json: "},
        {"{\"pre_tokenizer\":" PLAIN_BYTES ",\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}",
         "two tokens of model.vocab have the id 0"},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        struct span file = files[i].json ? span_of(files[i].json) : (struct span){0};
        REFUSED(tokenizer_from_json(&t, file, "x.json", &err), files[i].words);
    }
    assert_null(t);
}

static void test_characters_without_a_token(void **state)
{
    (void)state;
    static const char json[] =
        "{\"pre_tokenizer\":" PLAIN_BYTES ",\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}}";
    static const char fallback[] =
        "{\"added_tokens\":[" ADDED(3, "<unk>", true,
                                    "") "],\"model\":{\"byte_fallback\":true,\"unk_token\":\"<unk>\","
                                        "\"vocab\":{\"a\":0,\"<0xC3>\":1,\"\\ud83d\\ude00\":2},\"merges\":[]}}";
    struct tokenizer *t;
    struct ids ids = {0};
    GOOD(tokenizer_from_json(&t, span_of(json), "test", &err));
    expect(t, "abba", "2 1 0");
    REFUSED(tokenizer_encode(t, span_of("abc"), NULL, 0, false, &ids, &err),
            "no token for a character of the text that begins with the byte 0x63");
    ids_free(&ids);
    tokenizer_close(&t);
    GOOD(tokenizer_from_json(&t, span_of(fallback), "test", &err));
    expect(t, "a\xC3\xA9\xF0\x9F\x98\x80", "0 3 2"); /* not both bytes of the second are tokens: unknown, once */
    tokenizer_close(&t);
}

/* Every beginning of a file is refused, and no damage to one does worse than be refused. */
static void test_damaged_files(void **state)
{
    (void)state;
    struct buf files[2] = {json_of(&(struct recipe){.post = SEQ("processors", PLAIN_BYTES)}),
                           tekken_file(280, "", -1)};
    int (*const open[2])(struct tokenizer **, struct span, const char *, struct err *) = {tokenizer_from_json,
                                                                                          tokenizer_from_tekken};
    uint32_t seed = 12345;
    int accepted = 0;
    for (int k = 0; k < 2; k++) {
        for (size_t n = 0; n < files[k].len; n++) {
            struct tokenizer *t = NULL;
            if (open[k](&t, (struct span){files[k].data, n}, "cut", &err) == OK)
                fail_msg("the first %zu bytes were accepted", n);
            assert_true(strlen(err.msg) > 5 && !strchr(err.msg, '\n'));
        }
        for (int round = 0; round < 2000; round++) {
            struct tokenizer *t = NULL;
            struct buf bad = {0};
            assert_int_equal(buf_append(&bad, files[k].data, files[k].len), OK);
            for (int flips = 0; flips < 1 + round % 2; flips++) {
                seed = seed * 1664525 + 1013904223;
                bad.data[(seed >> 8) % bad.len] = (char)(seed >> 16 & (round % 3 ? 0x7F : 0xFF));
            }
            if (open[k](&t, buf_span(&bad), "bad", &err) == OK) {
                struct ids ids = {0};
                struct detok d = {0};
                struct buf out = {0};
                accepted++;
                if (tokenizer_encode(t, span_of("hello w\xC3\xB6rld <think> 12 <|im_end|>"), NULL, 0, true, &ids,
                                     &err) == OK)
                    for (size_t i = 0; i < ids.len; i++)
                        assert_int_equal(detok_push(&d, t, ids.id[i], true, &out), OK);
                assert_true(utf8_valid(buf_span(&out)));
                ids_free(&ids);
                buf_free(&out);
                tokenizer_close(&t);
            }
            buf_free(&bad);
        }
        buf_free(&files[k]);
    }
    assert_true(accepted > 100); /* some damage only renames a token: those files were used */
}

/* ------------------------------------------------------------------------------------------------ directories */

static void write_file(const char *dir, const char *name, struct span text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text.ptr, 1, text.len, f), text.len);
    fclose(f);
}

static void drop_file(const char *dir, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    unlink(path);
}

static void test_directories(void **state)
{
    (void)state;
    char dir[] = "/tmp/test_tokenizer_XXXXXX";
    struct tokenizer *t = NULL;
    struct buf json = json_of(&(struct recipe){0}), tekken = tekken_file(280, "", -1);
    assert_non_null(mkdtemp(dir));
    REFUSED(tokenizer_from_dir(&t, dir, NULL, &err), "holds neither tokenizer.json nor tekken.json");
    write_file(dir, "tekken.json", buf_span(&tekken));
    GOOD(tokenizer_from_dir(&t, dir, "llama", &err));
    assert_int_equal(tokenizer_size(t), 280);
    tokenizer_close(&t);
    write_file(dir, "tokenizer.json", buf_span(&json));
    GOOD(tokenizer_from_dir(&t, dir, "llama", &err));
    assert_int_equal(tokenizer_size(t), 606);
    tokenizer_close(&t);
    GOOD(tokenizer_from_dir(&t, dir, "mistral3", &err)); /* Mistral's own file is the right one */
    assert_int_equal(tokenizer_size(t), 280);
    tokenizer_close(&t);
    drop_file(dir, "tekken.json");
    GOOD(tokenizer_from_dir(&t, dir, "mistral", &err));
    assert_int_equal(tokenizer_size(t), 606);
    assert_false(tokenizer_adds_bos(t));
    tokenizer_close(&t);
    write_file(
        dir, "tokenizer_config.json",
        span_of(
            "{\"add_bos_token\":true,\"bos_token\":{\"content\":\"<|im_start|>\"},\"eos_token\":\"<|im_end|>\"}"));
    GOOD(tokenizer_from_dir(&t, dir, NULL, &err));
    assert_int_equal(tokenizer_bos(t), 600);
    assert_int_equal(tokenizer_eos(t), 601);
    expect(t, "hello", "600 259");
    tokenizer_close(&t);
    write_file(dir, "tokenizer_config.json", span_of("{\"add_bos_token\":tru"));
    REFUSED(tokenizer_from_dir(&t, dir, NULL, &err), "tokenizer_config.json: is no valid JSON");
    drop_file(dir, "tokenizer_config.json");
    drop_file(dir, "tokenizer.json");
    assert_int_equal(rmdir(dir), 0);
    buf_free(&json);
    buf_free(&tekken);
}

/* A vocabulary of tekken's size with Llama 3's pattern is Mistral Small 3.1's mistake: mended for Mistral's models
 * only. */
static void test_mistral_pattern_is_mended(void **state)
{
    (void)state;
    static const char llama3[] =
        SPLIT("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}"
              "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+");
    char dir[] = "/tmp/test_tokenizer_XXXXXX";
    struct buf b = {0};
    struct tokenizer *t = NULL;
    assert_non_null(mkdtemp(dir));
    if (buf_appendf(&b, "{\"pre_tokenizer\":" SEQ("pretokenizers", "%s," PLAIN_BYTES) ",", llama3) < 0) abort();
    add(&b, "\"model\":{\"ignore_merges\":true,\"merges\":[],\"vocab\":{\"123\":0,\"1\":1,\"2\":2,\"3\":3");
    for (int i = 4; i < 131072; i++)
        if (buf_appendf(&b, ",\"t%d\":%d", i, i) < 0) abort();
    add(&b, "}}}");
    write_file(dir, "tokenizer.json", buf_span(&b));
    GOOD(tokenizer_from_dir(&t, dir, "llama", &err));
    expect(t, "123", "0");
    tokenizer_close(&t);
    GOOD(tokenizer_from_dir(&t, dir, "mistral3", &err));
    expect(t, "123", "1 2 3");
    tokenizer_close(&t);
    drop_file(dir, "tokenizer.json");
    assert_int_equal(rmdir(dir), 0);
    buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_marks),
        cmocka_unit_test(test_control_tokens_only_by_name),
        cmocka_unit_test(test_bos),
        cmocka_unit_test(test_normalizer_nfc),
        cmocka_unit_test(test_white_space_of_patterns),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_pattern_that_runs_away),
        cmocka_unit_test(test_text_that_is_not_utf8),
        cmocka_unit_test(test_stream_of_tokens),
        cmocka_unit_test(test_invalid_bytes_in_a_stream),
        cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_sentencepiece_refusals),
        cmocka_unit_test(test_byte_level_in_gguf),
        cmocka_unit_test(test_sentencepiece_as_json),
        cmocka_unit_test(test_tekken),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_characters_without_a_token),
        cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_directories),
        cmocka_unit_test(test_mistral_pattern_is_mended),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
