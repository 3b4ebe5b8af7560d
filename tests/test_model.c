/* test_model: the parsers of the model room, which are functions over bytes: against published vectors, against every
 * cut and many corruptions of small files, and each refusal by the words that a user would need. */
#include <jansson.h>
#include <math.h>

#include "model_files.h"

static json_t *load_json(const char *name)
{
    char path[600];
    json_error_t bad;
    snprintf(path, sizeof path, "%s/%s", TEST_DATA, name);
    json_t *root = json_load_file(path, 0, &bad);
    if (!root) fail_msg("%s: %s", path, bad.text);
    return root;
}

static struct buf from_hex(const json_t *hex)
{
    const char *s = json_string_value(hex);
    struct buf out = {0};
    for (size_t i = 0; s[i]; i += 2) {
        unsigned v = 0;
        assert_int_equal(sscanf(s + i, "%2x", &v), 1);
        append(&out, &(uint8_t){(uint8_t)v}, 1);
    }
    return out;
}

/* ------------------------------------------------------------------------------------------------ vectors */

static void test_gguf_vector(void **state)
{
    (void)state;
    json_t *root = load_json("model_containers.json"), *v = json_object_get(root, "gguf");
    struct buf b = from_hex(json_object_get(v, "file_hex"));
    struct arena a = {0};
    struct tensors t = {0};
    struct gguf g;
    GOOD(gguf_parse(&g, &t, (const uint8_t *)b.data, b.len, "vector", &a, &err));
    assert_int_equal(g.version, json_integer_value(json_object_get(v, "version")));
    assert_int_equal(g.alignment, json_integer_value(json_object_get(v, "alignment")));
    assert_int_equal(g.data_start, json_integer_value(json_object_get(v, "data_start")));

    int64_t i = 0, blocks = 0;
    double base = 0;
    int add_bos = -1;
    struct span arch = {0};
    const struct span *tokens = NULL;
    const float *scores = NULL;
    size_t n_tokens = 0, n_scores = 0;
    GOOD(gguf_int(&g, "x.i64", -10, 10, &i, &err));
    GOOD(gguf_int(&g, "llama.block_count", 0, 10, &blocks, &err));
    GOOD(gguf_float(&g, "llama.rope.freq_base", &base, &err));
    GOOD(gguf_bool(&g, "tokenizer.ggml.add_bos_token", &add_bos, &err));
    GOOD(gguf_string(&g, "general.architecture", &arch, &err));
    GOOD(gguf_strings(&g, "tokenizer.ggml.tokens", &tokens, &n_tokens, &a, &err));
    GOOD(gguf_floats(&g, "tokenizer.ggml.scores", &scores, &n_scores, &a, &err));
    assert_int_equal(i, -5);
    assert_int_equal(blocks, 1);
    assert_true(base == 10000);
    assert_int_equal(add_bos, 1);
    assert_true(span_is(arch, "llama"));
    assert_int_equal(n_tokens, 3);
    assert_true(span_is(tokens[1], "bc") && span_is(tokens[2], "\xe2\x96\x81"));
    assert_int_equal(n_scores, 3);
    assert_true(scores[1] == -1.5f && scores[2] == 2.25f);

    assert_int_equal(t.n, 2);
    assert_int_equal(t.items[0].dims[0], 2);
    assert_int_equal(t.items[0].dims[1], 3);
    struct dmat f = {.type = DT_F32, .rows = 2, .cols = 3, .data = t.items[0].data, .row_stride = 12};
    assert_true(value_of(&f, 0, 0) == 1 && value_of(&f, 1, 2) == 6);
    assert_int_equal(t.items[1].type, DT_Q8_0);
    struct dmat q = {.type = DT_Q8_0, .rows = 2, .cols = 32, .data = t.items[1].data, .row_stride = 34};
    assert_true(value_of(&q, 1, 0) == -16 && value_of(&q, 1, 3) == -13);
    tensors_free(&t);
    arena_free(&a);
    buf_free(&b);
    json_decref(root);
}

static void test_safetensors_vector(void **state)
{
    (void)state;
    json_t *root = load_json("model_containers.json"), *v = json_object_get(root, "safetensors"), *one;
    struct buf b = from_hex(json_object_get(v, "file_hex"));
    struct arena a = {0};
    struct tensors t = {0};
    const char *name;
    GOOD(safetensors_parse(&t, (const uint8_t *)b.data, b.len, "vector", &a, &err));
    GOOD(tensors_index(&t, &err));
    assert_int_equal(t.n, 3);
    json_object_foreach(json_object_get(v, "tensors"), name, one)
    {
        const struct tensor *found = tensors_find(&t, name);
        assert_non_null(found);
        assert_true(span_is(found->type_name, json_string_value(json_object_get(one, "dtype"))));
        const json_t *values = json_object_get(one, "values");
        struct dmat m = {.type = found->type,
                         .rows = 1,
                         .cols = (int64_t)json_array_size(values),
                         .data = found->data};
        for (size_t i = 0; i < json_array_size(values); i++)
            assert_true((double)value_of(&m, 0, (int64_t)i) == json_number_value(json_array_get(values, i)));
    }
    assert_null(tensors_find(&t, "nobody"));
    tensors_free(&t);
    arena_free(&a);
    buf_free(&b);
    json_decref(root);
}

static void compare_freqs(const struct model_config *c, const json_t *want)
{
    assert_int_equal(json_array_size(want), c->d_head / 2);
    for (int i = 0; i < c->d_head / 2; i++) {
        double w = json_number_value(json_array_get(want, (size_t)i)), got = (double)c->rope_inv_freq[i];
        if (fabs(got - w) > 1e-6 * w) fail_msg("inv_freq[%d] is %.9g, expected %.9g", i, got, w);
    }
}

static void test_rope_llama3(void **state)
{
    (void)state;
    json_t *root = load_json("model_rope_llama3.json");
    struct model_config c = {.d_head = 128};
    struct rope_spec s = rope_spec_new();
    s.theta = 500000;
    GOOD(rope_fill(&c, &s, NULL, &err));
    compare_freqs(&c, json_object_get(root, "inv_freq_plain"));
    s.kind = ROPE_LLAMA3;
    s.factor = 8;
    s.original = 8192;
    GOOD(rope_fill(&c, &s, NULL, &err));
    compare_freqs(&c, json_object_get(root, "inv_freq"));
    assert_true(c.rope_mscale == 1);
    /* The same by way of GGUF's divisors. */
    float divisors[64];
    const json_t *d = json_object_get(root, "gguf_rope_freqs");
    for (size_t i = 0; i < 64; i++) divisors[i] = (float)json_number_value(json_array_get(d, i));
    s.kind = ROPE_DEFAULT;
    GOOD(rope_fill(&c, &s, divisors, &err));
    compare_freqs(&c, json_object_get(root, "inv_freq"));
    divisors[3] = 0;
    REFUSED(rope_fill(&c, &s, divisors, &err), "element 3 is 0");
    json_decref(root);
}

static void test_rope_yarn(void **state)
{
    (void)state;
    json_t *root = load_json("model_rope_gptoss_yarn.json");
    struct model_config c = {.d_head = 64};
    struct rope_spec s = rope_spec_new();
    s.kind = ROPE_YARN;
    s.theta = 150000;
    s.factor = 32;
    s.original = 4096;
    GOOD(rope_fill(&c, &s, NULL, &err));
    compare_freqs(&c, json_object_get(root, "inv_freq_truncated"));
    s.truncate = false;
    GOOD(rope_fill(&c, &s, NULL, &err));
    compare_freqs(&c, json_object_get(root, "inv_freq"));
    double want = json_number_value(json_object_get(root, "attention_factor"));
    assert_true(fabs((double)c.rope_mscale - want) < 1e-6);
    s.attention = 1.25;
    GOOD(rope_fill(&c, &s, NULL, &err));
    assert_true(c.rope_mscale == 1.25f);
    s.attention = 0;
    s.mscale = s.mscale_all = 1; /* DeepSeek's spelling: the two cancel */
    GOOD(rope_fill(&c, &s, NULL, &err));
    assert_true(c.rope_mscale == 1);
    s.original = 0;
    REFUSED(rope_fill(&c, &s, NULL, &err), "original context 0");
    s.original = 4096;
    s.theta = NAN;
    REFUSED(rope_fill(&c, &s, NULL, &err), "theta nan");
    json_decref(root);
}

/* ------------------------------------------------------------------------------------------------ hostile bytes */

typedef int parse_fn(const uint8_t *data, size_t len);

static int parse_gguf(const uint8_t *data, size_t len)
{
    struct arena a = {0};
    struct tensors t = {0};
    struct gguf g;
    struct model_vocab v = {0};
    int rc = gguf_parse(&g, &t, data, len, "hostile", &a, &err);
    if (rc == OK) rc = gguf_vocab(&v, &g, &a, &err);
    if (rc == OK) rc = tensors_index(&t, &err);
    for (size_t i = 0; i < t.n && rc == OK; i++)
        if (t.items[i].bytes)
            assert_true(t.items[i].data >= data && t.items[i].data + t.items[i].bytes <= data + len);
    tensors_free(&t);
    arena_free(&a);
    return rc;
}

static int parse_safetensors(const uint8_t *data, size_t len)
{
    struct arena a = {0};
    struct tensors t = {0};
    int rc = safetensors_parse(&t, data, len, "hostile", &a, &err);
    for (size_t i = 0; i < t.n && rc == OK; i++)
        assert_true(t.items[i].data >= data && t.items[i].data + t.items[i].bytes <= data + len);
    tensors_free(&t);
    arena_free(&a);
    return rc;
}

static int parse_config(const uint8_t *data, size_t len)
{
    struct arena a = {0};
    struct hf_config c;
    int rc = hf_config_parse(&c, (struct span){(const char *)data, len}, "hostile", &a, &err);
    arena_free(&a);
    return rc;
}

/* Every prefix, and every byte replaced by some others: an error in one line or a good result, nothing else. The copy
 * has exactly the bytes, so that a sanitizer sees a read past the end. Returns how many prefixes were accepted. */
static size_t torment(parse_fn *parse, const void *bytes, size_t len)
{
    static const uint8_t others[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '9', '"'};
    size_t accepted = 0;
    for (size_t n = 0; n < len; n++) {
        uint8_t *copy = malloc(n ? n : 1);
        memcpy(copy, bytes, n);
        err.msg[0] = 0;
        int rc = parse(copy, n);
        accepted += rc == OK;
        if (rc < 0) assert_true(err.msg[0] && !strchr(err.msg, '\n'));
        free(copy);
    }
    for (size_t i = 0; i < len; i++) {
        for (size_t k = 0; k < COUNT_OF(others); k++) {
            uint8_t *copy = malloc(len);
            memcpy(copy, bytes, len);
            copy[i] = others[k];
            err.msg[0] = 0;
            if (parse(copy, len) < 0) assert_true(err.msg[0] && !strchr(err.msg, '\n'));
            free(copy);
        }
    }
    return accepted;
}

static void test_every_byte(void **state)
{
    (void)state;
    json_t *root = load_json("model_containers.json");
    struct buf g = from_hex(json_object_get(json_object_get(root, "gguf"), "file_hex"));
    struct buf s = from_hex(json_object_get(json_object_get(root, "safetensors"), "file_hex"));
    size_t end = g.len;
    while (end > 0 && g.data[end - 1] == 0) end--; /* zeros that end the file are padding: a file without is whole */
    assert_int_equal(torment(parse_gguf, g.data, end), 0);
    assert_int_equal(torment(parse_safetensors, s.data, s.len), 0);
    assert_int_equal(torment(parse_config, llama_config, strlen(llama_config)), 0);
    assert_int_equal(torment(parse_config, gpt_oss_config, strlen(gpt_oss_config)), 0);
    buf_free(&g);
    buf_free(&s);
    json_decref(root);
}

static int parse_hex(const struct buf *b) { return parse_gguf((const uint8_t *)b->data, b->len); }

/* A header of our own making, cut off where the test wants it. */
static struct buf gguf_start(uint32_t version, uint64_t tensors, uint64_t kv)
{
    struct buf b = {0};
    append(&b, "GGUF", 4);
    append_u32(&b, version);
    append_u64(&b, tensors);
    append_u64(&b, kv);
    return b;
}

static void refuse_gguf(struct buf b, const char *text)
{
    REFUSED(parse_hex(&b), text);
    buf_free(&b);
}

static struct buf gguf_tensor(uint64_t rows, uint64_t cols, uint32_t type, uint64_t offset)
{
    struct buf b = gguf_start(3, 1, 0);
    append_str(&b, "w");
    append_u32(&b, 2);
    append_u64(&b, cols);
    append_u64(&b, rows);
    append_u32(&b, type);
    append_u64(&b, offset);
    while (b.len < 256) append(&b, "", 1);
    return b;
}

static void test_hostile_gguf(void **state)
{
    (void)state;
    refuse_gguf(gguf_start(1, 0, 0), "version 1");
    refuse_gguf(gguf_start(4, 0, 0), "version 4");
    refuse_gguf(gguf_start(0x03000000, 0, 0), "big-endian");
    refuse_gguf(gguf_start(3, (uint64_t)1 << 60, 0), "1152921504606846976 tensors");
    refuse_gguf(gguf_start(3, 0, (uint64_t)1 << 60), "1152921504606846976 metadata keys");
    refuse_gguf(gguf_tensor((uint64_t)1 << 40, (uint64_t)1 << 40, 0, 0), "too large for any file");
    refuse_gguf(gguf_tensor((uint64_t)1 << 62, 1, 0, 0), "too large for any file");
    refuse_gguf(gguf_tensor((uint64_t)1 << 63, 1, 0, 0), "9223372036854775808 is too large");
    refuse_gguf(gguf_tensor(1, 33, 2, 0), "rows of 33 values are not whole blocks of 32");
    refuse_gguf(gguf_tensor(1, 8, 0, 4), "offset 4 is not a multiple of the alignment 32");
    refuse_gguf(gguf_tensor(1, 64, 0, 0), "truncated");
    refuse_gguf(gguf_tensor(1, 8, 0, UINT64_MAX - 31), "truncated");
    struct buf fine = gguf_tensor(1, 8, 0, 32);
    GOOD(parse_hex(&fine));
    buf_free(&fine);

    struct buf b = gguf_start(3, 0, 1);
    append_str(&b, "k");
    append_u32(&b, 9);
    append_u32(&b, 8);
    append_u64(&b, (uint64_t)1 << 60);
    refuse_gguf(b, "1152921504606846976 array elements");
    b = gguf_start(3, 0, 1);
    append_str(&b, "k");
    append_u32(&b, 9);
    append_u32(&b, 9);
    append_u64(&b, 0);
    refuse_gguf(b, "key k: array of value type 9");
    b = gguf_start(3, 0, 1);
    append_kv(&b, "general.alignment u32 48");
    refuse_gguf(b, "general.alignment is 48");
    b = gguf_start(3, 0, 2);
    append_kv(&b, "same u32 1");
    append_kv(&b, "same u32 2");
    refuse_gguf(b, "key same occurs twice");
    b = gguf_start(3, 0, 2);
    append_kv(&b, "tokenizer.ggml.tokens strs a b");
    append_kv(&b, "tokenizer.ggml.scores f32s 1 2 3");
    refuse_gguf(b, "scores has 3 elements for 2 tokens");
    b = gguf_start(3, 0, 1);
    append_kv(&b, "tokenizer.ggml.tokens u32 7");
    refuse_gguf(b, "tokenizer.ggml.tokens is u32, expected an array of string");

    b = gguf_start(3, 2, 0);
    for (int i = 0; i < 2; i++) {
        append_str(&b, i ? "second" : "first");
        append_u32(&b, 1);
        append_u64(&b, 16);
        append_u32(&b, 0);
        append_u64(&b, (uint64_t)i * 32);
    }
    while (b.len < 512) append(&b, "", 1);
    refuse_gguf(b, "tensor first of 64 bytes overlaps tensor second, which begins 32 bytes later");

    b = gguf_start(3, 2, 0);
    for (int i = 0; i < 2; i++) {
        append_str(&b, "same");
        append_u32(&b, 1);
        append_u64(&b, 8);
        append_u32(&b, 0);
        append_u64(&b, (uint64_t)i * 32);
    }
    while (b.len < 512) append(&b, "", 1);
    refuse_gguf(b, "tensor same occurs twice");
}

static void refuse_header(const char *json, size_t data, const char *text)
{
    struct buf b = {0};
    append_u64(&b, strlen(json));
    append(&b, json, strlen(json));
    for (size_t i = 0; i < data; i++) append(&b, "", 1);
    REFUSED(parse_safetensors((const uint8_t *)b.data, b.len), text);
    buf_free(&b);
}

static void test_hostile_safetensors(void **state)
{
    (void)state;
    static const uint8_t huge[16] = {0, 0, 0, 0, 0, 0, 0, 0x10};
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n";
    REFUSED(parse_safetensors(huge, sizeof huge), "1152921504606846976 bytes");
    REFUSED(parse_safetensors((const uint8_t *)pointer, sizeof pointer), "Git LFS pointer");
    static const uint8_t one_more[] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    REFUSED(parse_safetensors(one_more, sizeof one_more), "header takes 3 bytes, but 2 follow");
    refuse_header("[]", 0, "does not begin with '{'");
    refuse_header("{\"a\":1", 0, "not valid JSON");
    refuse_header("{\"a\":{},\"a\":{}}", 0, "not valid JSON");
    refuse_header("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a: dtype is missing");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "dimension 0");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4,
                  "end at 0 before they begin at 4");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 4,
                  "reach byte 8 of a data section of 4");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
                  "span 8 bytes, but shape [3] of F32 takes 12");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}", 8,
                  "too large");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "not a pair");
    refuse_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
                  "9 dimensions");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[6],\"data_offsets\":[0,6]},"
                  "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
                  8, "tensor a of 6 bytes overlaps tensor b");
}

/* ------------------------------------------------------------------------------------------------ configuration */

/* A family's configuration with some members replaced: what it is parsed to, or the refusal. */
static int parse_patched(struct hf_config *out, struct arena *a, const char *config, const char *patch)
{
    json_t *root = json_loads(config, 0, NULL), *over = json_loads(patch, 0, NULL);
    if (!root || !over) fail_msg("bad test: %s", patch);
    json_object_update(root, over);
    char *text = json_dumps(root, 0);
    int rc = hf_config_parse(out, span_of(text), "config.json", a, &err);
    free(text);
    json_decref(root);
    json_decref(over);
    return rc;
}

static void test_config_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *config, *patch, *text;
    } cases[] = {
        {llama_config, "{\"model_type\":\"mamba\"}",
         "model_type is mamba, known are llama, mistral, mistral3, qwen2"},
        {llama_config, "{\"architectures\":[\"LlamaForSequenceClassification\"]}",
         "LlamaForSequenceClassification, known are"},
        {llama_config, "{\"model_type\":null,\"architectures\":null}",
         "both model_type and architectures are missing"},
        {llama_config, "{\"hidden_size\":null}", "hidden_size is missing"},
        {llama_config, "{\"hidden_size\":\"64\"}", "hidden_size is a string, expected a whole number"},
        {llama_config, "{\"hidden_size\":64.5}", "hidden_size is a fraction"},
        {llama_config, "{\"hidden_size\":-64}", "hidden_size is -64, expected 1 to"},
        {llama_config, "{\"num_hidden_layers\":1e18}",
         "num_hidden_layers is 1000000000000000000, expected 1 to 4096"},
        {llama_config, "{\"num_key_value_heads\":3}", "4 query heads do not divide among 3 key heads"},
        {llama_config, "{\"head_dim\":15}", "head width 15"},
        {llama_config, "{\"head_dim\":512}", "head width 512, known are even widths up to 256"},
        {llama_config, "{\"rms_norm_eps\":null}", "RMS norm epsilon 0"},
        {llama_config, "{\"eos_token_id\":[2,50]}", "eos_token_id: end token 50 is outside the vocabulary of 50"},
        {llama_config, "{\"eos_token_id\":\"</s>\"}", "eos_token_id is no number"},
        {llama_config, "{\"bos_token_id\":99}", "bos_token_id is 99, expected 0 to 49"},
        {llama_config, "{\"hidden_act\":\"gelu\"}", "hidden_act is gelu, known is silu"},
        {llama_config, "{\"mlp_bias\":true}", "mlp_bias is true, which changes the maths"},
        {llama_config, "{\"attn_logit_softcapping\":50.0}", "attn_logit_softcapping is 50"},
        {llama_config, "{\"no_rope_layers\":[1,0]}", "no_rope_layers is [1,0]"},
        {llama_config, "{\"residual_multiplier\":0.22}", "residual_multiplier is 0.22"},
        {llama_config, "{\"partial_rotary_factor\":0.5}", "partial_rotary_factor is 0.5"},
        {llama_config, "{\"use_qk_norm\":true}", "use_qk_norm is true"},
        {llama_config, "{\"qkv_bias\":true}", "qkv_bias is true"},
        {llama_config, "{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}",
         "rope type is dynamic, known are default, linear"},
        {llama_config, "{\"rope_scaling\":{\"rope_type\":\"longrope\"}}", "rope type is longrope"},
        {llama_config, "{\"rope_scaling\":{\"type\":\"linear\"}}", "rope factor is missing"},
        {llama_config, "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":-2}}", "rope factor -2"},
        {llama_config, "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}",
         "low_freq_factor or high_freq_factor is missing"},
        {llama_config,
         "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2},\"rope_parameters\":{\"rope_type\":\"default\"}}",
         "rope_scaling has type yarn, but rope_parameters default"},
        {llama_config, "{\"rope_parameters\":{\"full_attention\":{\"rope_theta\":1}}}",
         "by layer type (full_attention)"},
        {llama_config, "{\"rope_theta\":0}", "rope theta 0"},
        {llama_config, "{\"layer_types\":[\"sliding_attention\",\"full_attention\"]}", "no sliding_window applies"},
        {llama_config, "{\"layer_types\":[\"full_attention\"]}", "layer_types has 1 elements for 2 layers"},
        {llama_config, "{\"layer_types\":[\"linear_attention\",\"full_attention\"]}", "layer 0 is linear_attention"},
        {moe_config, "{\"num_experts\":null}", "num_local_experts is missing"},
        {moe_config, "{\"num_experts_per_tok\":4}", "4 experts a token, but there are 3"},
        {moe_config, "{\"mlp_only_layers\":[0]}", "mlp_only_layers is [0]"},
        {moe_config, "{\"decoder_sparse_step\":2}", "decoder_sparse_step is 2"},
        {moe_config, "{\"shared_expert_intermediate_size\":32}", "shared_expert_intermediate_size is 32"},
        {moe_config, "{\"use_qk_norm\":false}", "use_qk_norm is false"},
        {gpt_oss_config, "{\"rope_scaling\":null}", "rope_scaling is missing"},
        {gpt_oss_config, "{\"swiglu_alpha\":1.5}", "swiglu_alpha is 1.5"},
        {gpt_oss_config, "{\"swiglu_limit\":0}", "swiglu_limit is 0"},
        {llama_config, "{\"quantization_config\":{\"quant_method\":\"awq\"}}",
         "quant_method is awq, known are fp8, mxfp4"},
        {llama_config, "{\"quantization_config\":{\"bits\":4}}", "quant_method is missing"},
        {llama_config, "{\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}}", "fmt e5m2"},
        {llama_config, "{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[0,128]}}",
         "weight_block_size"},
        {llama_config, "{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8_PB_WO\"}}",
         "quant_algo is FP8_PB_WO"},
        {llama_config,
         "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\"}}",
         "format is pack-quantized"},
        {llama_config, "{\"compression_config\":{\"format\":\"int-quantized\",\"config_groups\":{}}}",
         "format is int-quantized"},
        {llama_config,
         "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\","
         "\"config_groups\":{\"group_0\":{\"weights\":{\"num_bits\":8,\"type\":\"int\"}}}}}",
         "int of 8 bits"},
        {llama_config,
         "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\","
         "\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}}}",
         "sparse-24-bitmask"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct arena a = {0};
        struct hf_config out;
        REFUSED(parse_patched(&out, &a, cases[i].config, cases[i].patch), cases[i].text);
        assert_true(strncmp(err.msg, "config.json: ", 13) == 0);
        arena_free(&a);
    }
    struct hf_scheme s = {.source = ""};
    REFUSED(hf_quant_parse(&s, span_of("{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\"}}"), "side", &err),
            "side: ModelOpt quant_algo is MIXED_PRECISION, known are FP8, NVFP4");
}

static void test_config_windows(void **state)
{
    (void)state;
    static const struct {
        const char *patch;
        int32_t window[2];
    } cases[] = {
        {"{\"model_type\":\"mistral\",\"architectures\":null,\"sliding_window\":32}", {32, 32}},
        {"{\"model_type\":\"mistral\",\"architectures\":null,\"sliding_window\":null}", {0, 0}},
        {"{\"model_type\":\"mistral\",\"architectures\":null}", {4096, 4096}},
        {"{\"model_type\":\"llama\",\"sliding_window\":32}", {0, 0}},
        {"{\"model_type\":\"qwen2\",\"architectures\":null,\"sliding_window\":32}", {0, 0}},
        {"{\"model_type\":\"qwen2\",\"architectures\":null,\"sliding_window\":32,\"use_sliding_window\":true,"
         "\"max_window_layers\":1}",
         {0, 32}},
        {"{\"model_type\":\"qwen3\",\"architectures\":null,\"sliding_window\":32,\"use_sliding_window\":true,"
         "\"layer_types\":[\"sliding_attention\",\"full_attention\"]}",
         {32, 0}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct arena a = {0};
        struct hf_config out;
        GOOD(parse_patched(&out, &a, llama_config, cases[i].patch));
        if (out.c.window[0] != cases[i].window[0] || out.c.window[1] != cases[i].window[1])
            fail_msg("%s: windows %d, %d", cases[i].patch, out.c.window[0], out.c.window[1]);
        arena_free(&a);
    }
}

static void test_config_spellings(void **state)
{
    (void)state;
    struct arena a = {0};
    struct hf_config old, new;
    GOOD(parse_patched(&old, &a, gpt_oss_config, "{}"));
    GOOD(parse_patched(
        &new, &a, gpt_oss_config,
        "{\"rope_scaling\":null,\"rope_theta\":null,\"experts_per_token\":null,\"num_experts_per_tok\":2,"
        "\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":150000.0,\"factor\":32.0,\"beta_fast\":32.0,"
        "\"beta_slow\":1.0,\"original_max_position_embeddings\":4096,\"truncate\":false}}"));
    for (int i = 0; i < old.c.d_head / 2; i++) assert_true(old.c.rope_inv_freq[i] == new.c.rope_inv_freq[i]);
    assert_true(old.c.rope_mscale == new.c.rope_mscale &&old.c.rope_inv_freq[7] < 0.01f);
    assert_true(old.qkv_bias && old.o_bias);
    GOOD(parse_patched(&new, &a, moe_config,
                       "{\"num_experts\":null,\"num_local_experts\":3,\"norm_topk_prob\":false}"));
    assert_int_equal(new.c.n_experts, 3);
    assert_int_equal(new.c.router, ROUTER_SOFTMAX_TOPK);
    GOOD(parse_patched(&new, &a, llama_config,
                       "{\"num_key_value_heads\":null,\"attention_bias\":true,\"eos_token_id\":null}"));
    assert_true(new.c.n_kv_heads == 4 && new.qkv_bias &&new.o_bias &&new.c.n_stop == 0);
    GOOD(
        parse_patched(&new, &a, llama_config, "{\"model_type\":\"qwen2\",\"architectures\":[\"Qwen2ForCausalLM\"]}"));
    assert_true(new.qkv_bias && !new.o_bias);
    GOOD(parse_patched(
        &new, &a, llama_config,
        "{\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
        "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}}"));
    assert_true(fabs((double)new.c.rope_inv_freq[7] * 8 - pow(500000, -14.0 / 16)) < 1e-9);
    arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_vector),         cmocka_unit_test(test_safetensors_vector),
        cmocka_unit_test(test_rope_llama3),         cmocka_unit_test(test_rope_yarn),
        cmocka_unit_test(test_every_byte),          cmocka_unit_test(test_hostile_gguf),
        cmocka_unit_test(test_hostile_safetensors), cmocka_unit_test(test_config_refusals),
        cmocka_unit_test(test_config_windows),      cmocka_unit_test(test_config_spellings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
