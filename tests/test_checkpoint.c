/* test_checkpoint: whole tiny models, as GGUF files and as checkpoint directories, opened and looked at byte by byte;
 * each tensor in turn missing or bent; shards and parts; the ways in which matrices are quantised. */
#include <dirent.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <unistd.h>

#include "model_files.h"

/* ------------------------------------------------------------------------------------------------ the families */

static const char *const llama_lines[] = {
    "model.embed_tokens.weight BF16 50,64",
    "model.norm.weight BF16 64",
    "lm_head.weight F16 50,64",
    "model.layers.%L.input_layernorm.weight BF16 64",
    "model.layers.%L.self_attn.q_proj.weight BF16 64,64",
    "model.layers.%L.self_attn.k_proj.weight BF16 32,64",
    "model.layers.%L.self_attn.v_proj.weight BF16 32,64",
    "model.layers.%L.self_attn.o_proj.weight BF16 64,64",
    "model.layers.%L.post_attention_layernorm.weight F32 64",
    "model.layers.%L.mlp.gate_proj.weight BF16 96,64",
    "model.layers.%L.mlp.up_proj.weight BF16 96,64",
    "model.layers.%L.mlp.down_proj.weight BF16 64,96",
};

static const char *const gpt_oss_lines[] = {
    "model.embed_tokens.weight BF16 50,64",
    "model.norm.weight BF16 64",
    "lm_head.weight BF16 50,64",
    "model.layers.%L.input_layernorm.weight BF16 64",
    "model.layers.%L.post_attention_layernorm.weight BF16 64",
    "model.layers.%L.self_attn.q_proj.weight BF16 64,64",
    "model.layers.%L.self_attn.q_proj.bias BF16 64",
    "model.layers.%L.self_attn.k_proj.weight BF16 32,64",
    "model.layers.%L.self_attn.k_proj.bias BF16 32",
    "model.layers.%L.self_attn.v_proj.weight BF16 32,64",
    "model.layers.%L.self_attn.v_proj.bias BF16 32",
    "model.layers.%L.self_attn.o_proj.weight BF16 64,64",
    "model.layers.%L.self_attn.o_proj.bias BF16 64",
    "model.layers.%L.self_attn.sinks BF16 4",
    "model.layers.%L.mlp.router.weight BF16 3,64",
    "model.layers.%L.mlp.router.bias BF16 3",
    "model.layers.%L.mlp.experts.gate_up_proj_blocks U8 3,64,2,16",
    "model.layers.%L.mlp.experts.gate_up_proj_scales U8 3,64,2",
    "model.layers.%L.mlp.experts.gate_up_proj_bias BF16 3,64",
    "model.layers.%L.mlp.experts.down_proj_blocks U8 3,64,1,16",
    "model.layers.%L.mlp.experts.down_proj_scales U8 3,64,1",
    "model.layers.%L.mlp.experts.down_proj_bias BF16 3,64",
};

static const char *const moe_lines[] = {
    "model.embed_tokens.weight BF16 50,64",
    "model.norm.weight BF16 64",
    "model.layers.%L.input_layernorm.weight BF16 64",
    "model.layers.%L.post_attention_layernorm.weight BF16 64",
    "model.layers.%L.self_attn.q_proj.weight BF16 128,64",
    "model.layers.%L.self_attn.k_proj.weight BF16 64,64",
    "model.layers.%L.self_attn.v_proj.weight BF16 64,64",
    "model.layers.%L.self_attn.o_proj.weight BF16 64,128",
    "model.layers.%L.self_attn.q_norm.weight BF16 32",
    "model.layers.%L.self_attn.k_norm.weight BF16 32",
    "model.layers.%L.mlp.gate.weight BF16 3,64",
    "model.layers.%L.mlp.experts.%E.gate_proj.weight BF16 32,64",
    "model.layers.%L.mlp.experts.%E.up_proj.weight BF16 32,64",
    "model.layers.%L.mlp.experts.%E.down_proj.weight BF16 64,32",
};

static const char *const llama_kv[] = {
    "general.architecture str llama",
    "general.name str Tiny",
    "llama.block_count u32 2",
    "llama.embedding_length u64 64",
    "llama.context_length u32 256",
    "llama.feed_forward_length u32 96",
    "llama.attention.head_count u32 4",
    "llama.attention.head_count_kv i32s 2 2",
    "llama.attention.layer_norm_rms_epsilon f32 1e-5",
    "llama.rope.freq_base f32 10000",
    "llama.rope.dimension_count u32 16",
    "tokenizer.ggml.model str gpt2",
    "tokenizer.ggml.tokens strs a <|im_end|> c </s> e",
    "tokenizer.ggml.token_type i32s 1 3 1 1 1",
    "tokenizer.ggml.scores f32s 0 -1 0.5 0 0",
    "tokenizer.ggml.bos_token_id u32 0",
    "tokenizer.ggml.eos_token_id u32 4",
    "tokenizer.ggml.add_bos_token bool true",
};
static const char *const llama_gguf_lines[] = {
    "token_embd.weight Q8_0 50,64",    "output_norm.weight F32 64",
    "output.weight F16 50,64",         "blk.%L.attn_norm.weight F32 64",
    "blk.%L.attn_q.weight Q4_0 64,64", "blk.%L.attn_k.weight Q8_0 32,64",
    "blk.%L.attn_v.weight Q8_0 32,64", "blk.%L.attn_output.weight Q4_0 64,64",
    "blk.%L.ffn_norm.weight F32 64",   "blk.%L.ffn_gate.weight Q4_0 96,64",
    "blk.%L.ffn_up.weight Q4_0 96,64", "blk.%L.ffn_down.weight Q4_0 64,96",
};

static const char *const oss_kv[] = {
    "general.architecture str gpt-oss",
    "gpt-oss.block_count u32 2",
    "gpt-oss.embedding_length u32 64",
    "gpt-oss.context_length u32 131072",
    "gpt-oss.feed_forward_length u32 32",
    "gpt-oss.attention.head_count u32 4",
    "gpt-oss.attention.head_count_kv u32 2",
    "gpt-oss.attention.layer_norm_rms_epsilon f32 1e-5",
    "gpt-oss.attention.key_length u32 16",
    "gpt-oss.attention.value_length u32 16",
    "gpt-oss.expert_count u32 3",
    "gpt-oss.expert_used_count u32 2",
    "gpt-oss.expert_feed_forward_length u32 32",
    "gpt-oss.attention.sliding_window u32 128",
    "gpt-oss.rope.freq_base f32 150000",
    "gpt-oss.rope.scaling.type str yarn",
    "gpt-oss.rope.scaling.factor f32 32",
    "gpt-oss.rope.scaling.original_context_length u32 4096",
    "tokenizer.ggml.model str gpt2",
    "tokenizer.ggml.tokens strs a <|return|> <|end|> <|call|> <|endoftext|>",
    "tokenizer.ggml.eos_token_id u32 1",
    "tokenizer.ggml.token_type i32s 1 3 3 3 3",
};
static const char *const oss_gguf_lines[] = {
    "token_embd.weight BF16 50,64",
    "output_norm.weight F32 64",
    "output.weight BF16 50,64",
    "blk.%L.attn_norm.weight F32 64",
    "blk.%L.post_attention_norm.weight F32 64",
    "blk.%L.attn_sinks.weight F32 4",
    "blk.%L.attn_q.weight BF16 64,64",
    "blk.%L.attn_q.bias F32 64",
    "blk.%L.attn_k.weight BF16 32,64",
    "blk.%L.attn_k.bias F32 32",
    "blk.%L.attn_v.weight BF16 32,64",
    "blk.%L.attn_v.bias F32 32",
    "blk.%L.attn_output.weight BF16 64,64",
    "blk.%L.attn_output.bias F32 64",
    "blk.%L.ffn_gate_inp.weight F32 3,64",
    "blk.%L.ffn_gate_inp.bias F32 3",
    "blk.%L.ffn_gate_exps.weight MXFP4 3,32,64",
    "blk.%L.ffn_gate_exps.bias F32 3,32",
    "blk.%L.ffn_up_exps.weight MXFP4 3,32,64",
    "blk.%L.ffn_up_exps.bias F32 3,32",
    "blk.%L.ffn_down_exps.weight MXFP4 3,64,32",
    "blk.%L.ffn_down_exps.bias F32 3,64",
};

/* ------------------------------------------------------------------------------------------------ directories */

static void test_llama_directory(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct items *t = ITEMS(llama_lines, 2, 0);
    struct model *m;
    write_checkpoint(dir, llama_config, t);
    write_text(dir, "generation_config.json",
               "{\"eos_token_id\":5,\"temperature\":0.5,\"top_k\":40,\"do_sample\":true}");
    GOOD(open_path(&m, dir, ""));
    const struct model_config *c = model_config(m);
    assert_int_equal(c->family, FAMILY_LLAMA);
    assert_int_equal(c->d_head, 16);
    assert_int_equal(c->ctx_train, 256);
    assert_false(c->tied || c->rope_interleaved);
    assert_int_equal(c->bos, 1);
    assert_int_equal(c->n_stop, 3);
    assert_true(c->stop[0] == 2 && c->stop[1] == 3 && c->stop[2] == 5);
    assert_true(c->sampling.temperature == 0.5f && c->sampling.top_k == 40 && c->sampling.top_p == -1);
    assert_true(c->window[0] == 0 && c->window[1] == 0);
    assert_string_equal(model_container(m), "safetensors");
    assert_string_equal(model_arch(m), "LlamaForCausalLM");
    assert_string_equal(model_quantization(m), "none");
    assert_string_equal(model_name(m), strrchr(dir, '/') + 1);
    assert_false(model_has(m, ROLE_Q_BIAS, 0, 0) || model_has(m, ROLE_Q, 2, 0) || model_has(m, ROLE_ROUTER, 0, 0));
    struct dmat head = model_mat(m, ROLE_HEAD, 0, 0), down = model_mat(m, ROLE_DOWN, 1, 0);
    assert_int_equal(head.type, DT_F16);
    assert_true(down.rows == 64 && down.cols == 96 && down.map);
    size_t bytes = 0;
    for (size_t i = 0; i < t->n; i++) bytes += item_count(&t->at[i]) * (strcmp(t->at[i].type, "F32") == 0 ? 4 : 2);
    assert_int_equal(model_bytes(m), bytes);
    /* Element 10 of layer 1's norm, from the pattern that append_values writes. */
    float v[2];
    model_vec(m, ROLE_FFN_NORM, 1, 0, 10, 12, v);
    const char *name = "model.layers.1.post_attention_layernorm.weight";
    uint64_t seed = hash_bytes(HASH_START, name, strlen(name));
    assert_true(v[0] == 0.5f + (float)((310 + seed) % 113) / 64 && v[1] == 0.5f + (float)((341 + seed) % 113) / 64);
    model_close(&m);
    assert_null(m);
    remove_dir(dir);
}

/* Each tensor in turn is left out, then given another shape: the refusal names it. */
static void bend_each(const char *const *lines, size_t n, int experts, const char *config, const char *optional)
{
    const char *dir = temp_dir();
    struct model *m;
    struct items t = *items_of(lines, n, 2, experts);
    for (size_t i = 0; i < t.n; i++) {
        struct items bent = t;
        char name[128];
        snprintf(name, sizeof name, "%s", t.at[i].name);
        drop_item(&bent, name);
        write_checkpoint(dir, config, &bent);
        if (strcmp(name, optional) == 0) {
            GOOD(open_path(&m, dir, ""));
            assert_true(model_config(m)->tied);
            model_close(&m);
        } else {
            REFUSED(open_path(&m, dir, ""), name);
            REFUSED(open_path(&m, dir, ""), "missing");
        }
        bent = t;
        bent.at[i].dims[bent.at[i].n_dims - 1] += 1;
        write_checkpoint(dir, config, &bent);
        REFUSED(open_path(&m, dir, ""), name);
        REFUSED(open_path(&m, dir, ""), "has shape [");
        bent = t;
        snprintf(bent.at[i].type, sizeof bent.at[i].type, "I8");
        write_checkpoint(dir, config, &bent);
        REFUSED(open_path(&m, dir, ""), "has type I8");
    }
    remove_dir(dir);
}

static void test_each_tensor_matters(void **state)
{
    (void)state;
    bend_each(llama_lines, COUNT_OF(llama_lines), 0, llama_config, "lm_head.weight");
    bend_each(gpt_oss_lines, COUNT_OF(gpt_oss_lines), 0, gpt_oss_config, "lm_head.weight");
    bend_each(moe_lines, COUNT_OF(moe_lines), 3, moe_config, "none");
}

static void test_left_over(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        bool fine;
    } cases[] = {
        {"model.layers.0.self_attn.k_proj.k_scale F32 1", true},
        {"vision_tower.layers.0.weight BF16 4,4", true},
        {"model.layers.1.self_attn.rotary_emb.inv_freq F32 8", true},
        {"model.layers.0.self_attn.q_proj.bias BF16 64", false},
        {"model.layers.0.self_attn.q_norm.weight BF16 16", false},
        {"model.layers.2.input_layernorm.weight BF16 64", false},
        {"model.layers.0.post_feedforward_layernorm.weight BF16 64", false},
    };
    const char *dir = temp_dir();
    struct model *m;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct items *t = ITEMS(llama_lines, 2, 0);
        add_line(t, cases[i].line);
        write_checkpoint(dir, llama_config, t);
        if (cases[i].fine) {
            GOOD(open_path(&m, dir, ""));
            model_close(&m);
        } else {
            REFUSED(open_path(&m, dir, ""), t->at[t->n - 1].name);
        }
    }
    remove_dir(dir);
}

static void test_gpt_oss_directory(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    struct items *t = ITEMS(gpt_oss_lines, 2, 0);
    write_checkpoint(dir, gpt_oss_config, t);
    GOOD(open_path(&m, dir, ""));
    const struct model_config *c = model_config(m);
    assert_true(c->window[0] == 128 && c->window[1] == 0);
    assert_int_equal(c->router, ROUTER_TOPK_SOFTMAX);
    assert_int_equal(c->activation, ACT_SWIGLU_OAI);
    assert_true(c->swiglu_limit == 7 && fabs((double)c->rope_mscale - 1.3465736) < 1e-6);
    assert_int_equal(c->n_experts_used, 2);
    assert_string_equal(model_quantization(m), "mxfp4");
    size_t bytes = 0; /* gate_up counts once, though two roles are in it */
    for (size_t i = 0; i < t->n; i++) bytes += item_count(&t->at[i]) * (strcmp(t->at[i].type, "U8") == 0 ? 1 : 2);
    assert_int_equal(model_bytes(m), bytes);
    assert_string_equal(model_arch(m), "gpt_oss");

    struct tensor *blocks = tensors_find(&m->tensors, "model.layers.1.mlp.experts.gate_up_proj_blocks");
    struct tensor *scales = tensors_find(&m->tensors, "model.layers.1.mlp.experts.gate_up_proj_scales");
    struct tensor *down = tensors_find(&m->tensors, "model.layers.1.mlp.experts.down_proj_blocks");
    struct dmat up = model_mat(m, ROLE_UP, 1, 2), gate = model_mat(m, ROLE_GATE, 1, 2);
    struct dmat out = model_mat(m, ROLE_DOWN, 1, 2);
    assert_true(up.rows == 32 && up.cols == 64 && up.type == DT_MXFP4);
    /* Expert 2 begins at row 2 * 64 of 32 bytes of nibbles and 2 of scales; row r of up is row 2r + 1 there. */
    assert_ptr_equal(gate.data, blocks->data + 128 * 32);
    assert_ptr_equal(up.data, blocks->data + 129 * 32);
    assert_ptr_equal(up.bscale, scales->data + 129 * 2);
    assert_int_equal(up.row_stride, 64);
    assert_int_equal(up.bscale_stride, 4);
    assert_ptr_equal(out.data, down->data + 2 * 64 * 16);
    assert_int_equal(out.row_stride, 16);
    /* Row 5 of up, column 33: block 1 of row 2 * 5 + 1, its first byte's high nibble. */
    const uint8_t *block = blocks->data + (128 + 11) * 32 + 16;
    float want = e2m1_to_f32(block[0] >> 4) * e8m0_to_f32(scales->data[(128 + 11) * 2 + 1]);
    assert_true(value_of(&up, 5, 33) == want);
    struct tensor *bias = tensors_find(&m->tensors, "model.layers.1.mlp.experts.gate_up_proj_bias");
    float v[32];
    model_vec(m, ROLE_UP_BIAS, 1, 2, 0, 32, v);
    for (int i = 0; i < 32; i++) {
        uint16_t h;
        memcpy(&h, bias->data + (128 + 2 * i + 1) * 2, 2);
        assert_true(v[i] == bf16_to_f32(h));
    }
    model_close(&m);

    drop_item(t, "model.layers.0.mlp.experts.gate_up_proj_blocks");
    add_line(t, "model.layers.0.mlp.experts.gate_up_proj BF16 3,64,64");
    write_checkpoint(dir, gpt_oss_config, t);
    REFUSED(open_path(&m, dir, ""), "gate_up_proj is the de-quantised form");
    remove_dir(dir);
}

static void test_moe_directory(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    write_checkpoint(dir, moe_config, ITEMS(moe_lines, 2, 3));
    GOOD(open_path(&m, dir, ""));
    const struct model_config *c = model_config(m);
    assert_int_equal(c->family, FAMILY_QWEN3_MOE);
    assert_true(c->d_ff == 32 && c->d_head == 32 && c->n_experts == 3 && c->tied);
    assert_int_equal(c->router, ROUTER_SOFTMAX_TOPK_NORM);
    const struct tensor *up = tensors_find(&m->tensors, "model.layers.1.mlp.experts.2.up_proj.weight");
    assert_ptr_equal(model_mat(m, ROLE_UP, 1, 2).data, up->data);
    assert_ptr_equal(model_mat(m, ROLE_HEAD, 0, 0).data, model_mat(m, ROLE_EMBED, 0, 0).data);
    assert_true(model_has(m, ROLE_Q_NORM, 1, 0));
    assert_false(model_has(m, ROLE_UP, 1, 3));
    model_close(&m);
    remove_dir(dir);
}

/* A multimodal checkpoint: the same tensors behind either prefix. */
static void test_mistral3_prefixes(void **state)
{
    (void)state;
    static const char config[] =
        "{\"model_type\":\"mistral3\",\"architectures\":[\"Mistral3ForConditionalGeneration\"],\"vision_config\":{},"
        "\"text_config\":{\"model_type\":\"mistral\",\"head_dim\":32,\"sliding_window\":null,"
        "\"rope_parameters\":{\"rope_theta\":1e9,\"rope_type\":\"default\"}," LLAMA_SIZES "}}";
    const char *dir = temp_dir();
    struct model *m;
    for (int form = 0; form < 2; form++) {
        struct items t = *ITEMS(llama_lines, 2, 0);
        for (size_t i = 0; i < t.n; i++) {
            struct item *it = &t.at[i];
            char old[128];
            snprintf(old, sizeof old, "%s", it->name);
            bool head = strcmp(old, "lm_head.weight") == 0;
            if (form == 0) snprintf(it->name, sizeof it->name, "language_model.%.100s", old);
            else if (!head)
                snprintf(it->name, sizeof it->name, "model.language_model.%.100s", old + strlen("model."));
            if (strstr(old, "q_proj") || strstr(old, "k_proj") || strstr(old, "v_proj")) it->dims[0] *= 2;
            if (strstr(old, "o_proj")) it->dims[1] *= 2;
        }
        add_line(&t, "vision_tower.transformer.layers.0.attention.q_proj.weight BF16 8,8");
        write_checkpoint(dir, config, &t);
        GOOD(open_path(&m, dir, ""));
        assert_int_equal(model_config(m)->family, FAMILY_MISTRAL);
        assert_int_equal(model_config(m)->d_head, 32);
        assert_false(model_config(m)->tied);
        assert_true(fabs((double)model_config(m)->rope_inv_freq[1] - pow(1e9, -2.0 / 32)) < 1e-6);
        model_close(&m);
    }
    remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------------ shards */

static void write_shards(const char *dir, const struct items *all, const char *index)
{
    struct items half[2] = {0};
    for (size_t i = 0; i < all->n; i++) {
        struct items *h = &half[i % 2];
        h->at[h->n++] = all->at[i];
    }
    half[1].at[half[1].n++] = half[0].at[0]; /* a duplicate, which the index places in the first file */
    for (int i = 0; i < 2; i++) {
        char name[64];
        struct buf b = safetensors_bytes(&half[i]);
        snprintf(name, sizeof name, "model-%d.safetensors", i);
        write_file(dir, name, b.data, b.len);
        buf_free(&b);
    }
    struct buf text = {0};
    assert_int_equal(buf_appendf(&text, "{\"metadata\":{},\"weight_map\":{"), OK);
    for (size_t i = 0; i < all->n; i++)
        assert_int_equal(buf_appendf(&text, "%s\"%s\":\"model-%zu.safetensors\"", i ? "," : "", all->at[i].name,
                                     i % 2),
                         OK);
    assert_int_equal(buf_appendf(&text, "%s}}", index), OK);
    write_text(dir, "model.safetensors.index.json", text.data);
    write_text(dir, "config.json", llama_config);
    buf_free(&text);
}

static void test_shards(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m, *one;
    struct items t = *ITEMS(llama_lines, 2, 0);
    write_shards(dir, &t, "");
    write_text(dir, "consolidated.safetensors", "not looked at");
    GOOD(open_path(&m, dir, ""));
    uint64_t sharded = model_fingerprint(m);
    model_close(&m);
    write_shards(dir, &t, ",\"model.extra\":\"model-1.safetensors\"");
    REFUSED(open_path(&m, dir, ""), "places tensor model.extra in model-1.safetensors, which does not hold it");
    write_shards(dir, &t, ",\"model.extra\":\"../secret\"");
    REFUSED(open_path(&m, dir, ""), "../secret, expected a file name in the same directory");
    write_shards(dir, &t, ",\"model.extra\":\"model-2.safetensors\"");
    REFUSED(open_path(&m, dir, ""), "model-2.safetensors");
    write_text(dir, "model.safetensors.index.json", "{\"weight_map\":[]}");
    REFUSED(open_path(&m, dir, ""), "weight_map is an array");
    remove_dir(dir);

    dir = temp_dir();
    write_checkpoint(dir, llama_config, &t);
    GOOD(open_path(&one, dir, ""));
    assert_true(model_fingerprint(one) == sharded); /* the same model, otherwise cut */
    model_close(&one);
    snprintf(find_item(&t, "lm_head.weight")->type, 16, "BF16");
    write_checkpoint(dir, llama_config, &t);
    GOOD(open_path(&one, dir, ""));
    assert_true(model_fingerprint(one) != sharded);
    model_close(&one);
    remove_dir(dir);
}

static void test_no_model(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    REFUSED(open_path(&m, dir, "absent"), "no such file or directory");
    REFUSED(open_path(&m, dir, ""), "holds no config.json");
    write_text(dir, "config.json", "{");
    REFUSED(open_path(&m, dir, ""), "config.json: is not valid JSON at line 1");
    write_text(dir, "config.json", llama_config);
    REFUSED(open_path(&m, dir, ""), "holds neither model.safetensors nor model.safetensors.index.json");
    write_text(dir, "x.gguf", "PK\3\4 a zip file");
    REFUSED(open_path(&m, dir, "x.gguf"), "begins with bytes 50 4b 03 04");
    write_text(dir, "empty.gguf", "");
    REFUSED(open_path(&m, dir, "empty.gguf"), "empty.gguf");
    remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------ quantised matrices */

static const char fp8_json[] = "{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[16,48]}}";
static const char ct_json[] =
    "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\","
    "\"config_groups\":{"
    "\"group_0\":{\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\",\"symmetric\":true}}}}}";

/* One llama checkpoint in which layer 0's v_proj [32, 64] is stored as `lines` say. */
static int open_quantised(struct model **m, const char *dir, const char *const *lines, size_t n, const char *patch)
{
    struct items *t = ITEMS(llama_lines, 2, 0);
    drop_item(t, "model.layers.0.self_attn.v_proj.weight");
    for (size_t i = 0; i < n; i++) add_line(t, lines[i]);
    json_t *root = json_loads(llama_config, 0, NULL), *over = json_loads(patch, 0, NULL);
    json_object_update(root, over);
    char *text = json_dumps(root, 0);
    write_checkpoint(dir, text, t);
    free(text);
    json_decref(root);
    json_decref(over);
    return open_path(m, dir, "");
}

#define V "model.layers.0.self_attn.v_proj."
#define LINES(...) (const char *const[]){__VA_ARGS__}, COUNT_OF(((const char *const[]){__VA_ARGS__}))

static float stored(const struct model *m, const char *name, size_t i)
{
    const struct tensor *t = tensors_find(&m->tensors, name);
    assert_non_null(t);
    struct dmat d = {.type = t->type,
                     .rows = 1,
                     .cols = 1,
                     .data =
                         t->data +
                         i * (t->bytes / item_count(&(struct item){.n_dims = t->n_dims,
                                                                   .dims = {t->dims[0], t->dims[1], t->dims[2]}}))};
    return value_of(&d, 0, 0);
}

static void test_fp8(void **state)
{
    (void)state;
    static const struct {
        const char *scale, *patch, *text;
        size_t of_20_50; /* the scale of element (20, 50) */
    } cases[] = {
        {V "weight_scale F32", "{}", "fp8 per tensor", 0},
        {V "weight_scale BF16 1", ct_json, "compressed-tensors fp8 per tensor", 0},
        {V "weight_scale F32 32", "{}", "fp8 per channel", 20},
        {V "weight_scale BF16 32,1", ct_json, "compressed-tensors fp8 per channel", 20},
        {V "weight_scale_inv BF16 2,2", fp8_json, "fp8 in blocks of 16x48", 3},
        {V "weight_scale_inv F32 2,2", fp8_json, "fp8 in blocks of 16x48", 3},
        {V "weight_scale_inv F32", "{\"quantization_config\":{\"quant_method\":\"fp8\"}}", "fp8 per tensor", 0},
    };
    const char *dir = temp_dir();
    struct model *m;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char name[128];
        sscanf(cases[i].scale, "%127s", name);
        GOOD(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64", cases[i].scale, V "input_scale F32"),
                            cases[i].patch));
        assert_string_equal(model_quantization(m), cases[i].text);
        struct dmat w = model_mat(m, ROLE_V, 0, 0);
        assert_int_equal(w.type, DT_F8_E4M3);
        float want = stored(m, V "weight", 20 * 64 + 50) * stored(m, name, cases[i].of_20_50);
        if (value_of(&w, 20, 50) != want)
            fail_msg("%s: %g, expected %g", cases[i].scale, (double)value_of(&w, 20, 50), (double)want);
        model_close(&m);
    }
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64"), fp8_json), V "weight_scale is missing");
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64", V "weight_scale F32 31"), "{}"),
            "has shape [31], but");
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64", V "weight_scale_inv F32 3,2"), fp8_json),
            "has shape [3, 2], but for a weight [32, 64]");
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64", V "weight_scale F8_E4M3 32"), "{}"),
            "has type F8_E4M3");
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E4M3 32,64", V "weight_scale F32", V "weight_scale_inv F32"),
                           "{}"),
            "has both weight_scale and weight_scale_inv");
    REFUSED(open_quantised(&m, dir, LINES(V "weight F8_E5M2 32,64", V "weight_scale F32"), "{}"), "has type F8_E5M2");
    REFUSED(open_quantised(&m, dir, LINES(V "weight BF16 32,64", V "weight_scale F32"), "{}"),
            "a weight_scale beside it");
    remove_dir(dir);
}

static void test_nvfp4(void **state)
{
    (void)state;
    static const char side[] =
        "{\"producer\":{\"name\":\"modelopt\"},\"quantization\":{\"quant_algo\":\"NVFP4\",\"group_size\":16}}";
    static const char ct[] = "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\","
                             "\"format\":\"nvfp4-pack-quantized\"}}";
    const char *dir = temp_dir();
    struct model *m;
    write_text(dir, "hf_quant_config.json", side);
    GOOD(open_quantised(&m, dir, LINES(V "weight U8 32,32", V "weight_scale F8_E4M3 32,4", V "weight_scale_2 F32"),
                        "{}"));
    assert_string_equal(model_quantization(m), "modelopt nvfp4");
    struct dmat w = model_mat(m, ROLE_V, 0, 0);
    const uint8_t *nibbles = tensors_find(&m->tensors, V "weight")->data;
    float block = stored(m, V "weight_scale", 20 * 4 + 3), whole = stored(m, V "weight_scale_2", 0);
    assert_true(value_of(&w, 20, 51) == e2m1_to_f32(nibbles[20 * 32 + 25] >> 4) * (block * whole));
    model_close(&m);
    remove_dir(dir);

    dir = temp_dir();
    GOOD(open_quantised(&m, dir,
                        LINES(V "weight_packed U8 32,32", V "weight_scale F8_E4M3 32,4",
                              V "weight_global_scale F32 1"),
                        ct));
    assert_string_equal(model_quantization(m), "compressed-tensors nvfp4");
    w = model_mat(m, ROLE_V, 0, 0);
    nibbles = tensors_find(&m->tensors, V "weight_packed")->data;
    block = stored(m, V "weight_scale", 20 * 4 + 3);
    whole = 1 / stored(m, V "weight_global_scale", 0);
    assert_true(value_of(&w, 20, 50) == e2m1_to_f32(nibbles[20 * 32 + 25] & 15) * (block * whole));
    model_close(&m);
    REFUSED(open_quantised(&m, dir, LINES(V "weight U8 32,32", V "weight_scale F8_E4M3 32,4"), "{}"),
            V "weight_scale_2 is missing");
    REFUSED(open_quantised(&m, dir,
                           LINES(V "weight_packed U8 32,32", V "weight_scale U8 32,2", V "weight_global_scale F32"),
                           "{}"),
            "weight_scale has type U8, expected F8_E4M3");
    REFUSED(open_quantised(&m, dir,
                           LINES(V "weight_packed I32 32,8", V "weight_scale BF16 32,1", V "weight_global_scale F32"),
                           "{}"),
            "weight_packed has type I32, expected U8");
    REFUSED(open_quantised(&m, dir, LINES(V "weight U8 32,31", V "weight_scale F8_E4M3 32,4", V "weight_scale_2 F32"),
                           "{}"),
            "has shape [32, 31]");
    remove_dir(dir);
}

/* Under a sanitizer, or on another processor than the build machine's (under qemu), time and memory say nothing. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__x86_64__)
#define SLOW_BUILD 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOW_BUILD 1
#endif
#endif
#ifndef SLOW_BUILD
#define SLOW_BUILD 0
#endif

/* Header and size of a file that is never filled. */
struct sparse {
    struct buf header;
    size_t at;
};

static void add_sparse(struct sparse *s, const char *type, size_t size, size_t rows, size_t cols, const char *format,
                       ...)
{
    char name[128];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    size_t bytes = rows * (cols ? cols : 1) * size;
    assert_int_equal(buf_appendf(&s->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu", s->header.len ? "," : "{",
                                 name, type, rows),
                     OK);
    if (cols) assert_int_equal(buf_appendf(&s->header, ",%zu", cols), OK);
    assert_int_equal(buf_appendf(&s->header, "],\"data_offsets\":[%zu,%zu]}", s->at, s->at + bytes), OK);
    s->at += bytes;
}

enum { BIG_LAYERS = 48, BIG_EXPERTS = 128 };

/* All FP8 matrices, or all their scales: writers of safetensors sort by type, so that scales lie together. */
static void add_sparse_matrices(struct sparse *s, bool scales)
{
    static const struct {
        const char *name;
        size_t rows, cols;
    } parts[] = {{"self_attn.q_proj", 4096, 2048},
                 {"self_attn.k_proj", 512, 2048},
                 {"self_attn.v_proj", 512, 2048},
                 {"self_attn.o_proj", 2048, 4096}},
      of_expert[] = {{"gate", 768, 2048}, {"up", 768, 2048}, {"down", 2048, 768}};
    const char *type = scales ? "BF16" : "F8_E4M3", *tail = scales ? "weight_scale_inv" : "weight";
    size_t size = scales ? 2 : 1, by = scales ? 128 : 1;
    for (int l = 0; l < BIG_LAYERS; l++) {
        for (size_t i = 0; i < COUNT_OF(parts); i++)
            add_sparse(s, type, size, parts[i].rows / by, parts[i].cols / by, "model.layers.%d.%s.%s", l,
                       parts[i].name, tail);
        for (int x = 0; x < BIG_EXPERTS; x++)
            for (size_t i = 0; i < COUNT_OF(of_expert); i++)
                add_sparse(s, type, size, of_expert[i].rows / by, of_expert[i].cols / by,
                           "model.layers.%d.mlp.experts.%d.%s_proj.%s", l, x, of_expert[i].name, tail);
    }
}

/* Qwen3-Coder's shape: 18,432 expert matrices, 30 GB, in a sparse file. Nothing may be read but the header and
 * scales. */
static void test_large_opens_fast(void **state)
{
    (void)state;
    static const char config[] =
        "{\"model_type\":\"qwen3_moe\",\"hidden_size\":2048,\"num_hidden_layers\":48,\"num_attention_heads\":32,"
        "\"num_key_value_heads\":4,\"head_dim\":128,\"moe_intermediate_size\":768,\"vocab_size\":151936,"
        "\"max_position_embeddings\":262144,\"rms_norm_eps\":1e-6,\"num_experts\":128,\"num_experts_per_tok\":8,"
        "\"norm_topk_prob\":true,\"rope_theta\":10000000,\"tie_word_embeddings\":true,"
        "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}";
    static const struct {
        const char *name;
        size_t n;
    } norms[] = {{"input_layernorm", 2048},
                 {"post_attention_layernorm", 2048},
                 {"self_attn.q_norm", 128},
                 {"self_attn.k_norm", 128}};
    const char *dir = temp_dir();
    struct sparse s = {0};
    struct buf start = {0};
    add_sparse(&s, "BF16", 2, 151936, 2048, "model.embed_tokens.weight");
    add_sparse(&s, "BF16", 2, 2048, 0, "model.norm.weight");
    for (int l = 0; l < BIG_LAYERS; l++) {
        for (size_t i = 0; i < COUNT_OF(norms); i++)
            add_sparse(&s, "BF16", 2, norms[i].n, 0, "model.layers.%d.%s.weight", l, norms[i].name);
        add_sparse(&s, "BF16", 2, BIG_EXPERTS, 2048, "model.layers.%d.mlp.gate.weight", l);
    }
    add_sparse_matrices(&s, true);
    add_sparse_matrices(&s, false);
    append(&s.header, "}", 1);
    append_u64(&start, s.header.len);
    append(&start, s.header.data, s.header.len);
    write_file(dir, "model.safetensors", start.data, start.len);
    write_text(dir, "config.json", config);
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (truncate(path, (off_t)(start.len + s.at)) != 0) fail_msg("cannot make a sparse file of %zu bytes", s.at);
    struct model *m;
    double took = 1e9;
    size_t resident = process_resident_bytes();
    for (int i = 0; i < 3; i++) { /* the best of three: other programs run, too */
        double begin = clock_now();
        GOOD(open_path(&m, dir, ""));
        if (clock_now() - begin < took) took = clock_now() - begin;
        assert_true(model_bytes(m) == s.at && s.at > 30000000000u);
        assert_true(model_has(m, ROLE_DOWN, 47, 127));
        if (i == 0 && !SLOW_BUILD) assert_in_range(process_resident_bytes() - resident, 0, 128 << 20);
        model_close(&m);
    }
    print_message("30 GB with %d matrices opened in %.0f ms\n", BIG_LAYERS * BIG_EXPERTS * 3, took * 1e3);
    if (took > (SLOW_BUILD ? 20 : 1)) fail_msg("took %.2f s, expected less than 1", took);
    buf_free(&s.header);
    buf_free(&start);
    remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------------ GGUF models */

#define KV(...)                                                                                                      \
    (const char *const[]) { __VA_ARGS__ }

static void test_llama_gguf(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    write_gguf(dir, "m.gguf", llama_kv, COUNT_OF(llama_kv), ITEMS(llama_gguf_lines, 2, 0));
    GOOD(open_path(&m, dir, "m.gguf"));
    const struct model_config *c = model_config(m);
    assert_true(c->rope_interleaved && !c->tied && c->d_head == 16 && c->n_vocab == 50);
    assert_string_equal(model_name(m), "Tiny");
    assert_string_equal(model_container(m), "gguf");
    assert_string_equal(model_arch(m), "llama");
    assert_string_equal(model_quantization(m), "q4_0");
    /* eos by its key, <|im_end|> by its name; "</s>" is plain text here. */
    assert_int_equal(c->n_stop, 2);
    assert_true(c->stop[0] == 4 && c->stop[1] == 1);
    const struct model_vocab *v = model_vocab(m);
    assert_true(v->n_tokens == 5 && span_is(v->tokens[3], "</s>") && v->types[1] == 3 && v->scores[2] == 0.5f);
    assert_true(v->bos == 0 && v->eos == 4 && v->unk == -1 && v->add_bos == 1 && v->add_space_prefix == -1);
    struct dmat q = model_mat(m, ROLE_Q, 1, 0);
    assert_int_equal(q.type, DT_Q4_0);
    assert_int_equal(q.row_stride, 36);
    assert_ptr_equal(q.data, tensors_find(&m->tensors, "blk.1.attn_q.weight")->data);
    model_close(&m);
    remove_dir(dir);
}

static void test_gguf_each_tensor_matters(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    struct items t = *ITEMS(oss_gguf_lines, 2, 0);
    for (size_t i = 0; i < t.n; i++) {
        struct items bent = t;
        char name[128];
        snprintf(name, sizeof name, "%s", t.at[i].name);
        drop_item(&bent, name);
        write_gguf(dir, "m.gguf", oss_kv, COUNT_OF(oss_kv), &bent);
        if (strcmp(name, "output.weight") == 0) {
            GOOD(open_path(&m, dir, "m.gguf"));
            assert_true(model_config(m)->tied);
            model_close(&m);
        } else {
            REFUSED(open_path(&m, dir, "m.gguf"), name);
        }
        bent = t;
        bent.at[i].dims[0]++;
        write_gguf(dir, "m.gguf", oss_kv, COUNT_OF(oss_kv), &bent);
        if (strcmp(name, "token_embd.weight") != 0 && strcmp(name, "output.weight") != 0)
            REFUSED(open_path(&m, dir, "m.gguf"), name);
    }
    remove_dir(dir);
}

static void test_gpt_oss_gguf(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    write_gguf(dir, "m.gguf", oss_kv, COUNT_OF(oss_kv), ITEMS(oss_gguf_lines, 2, 0));
    GOOD(open_path(&m, dir, "m.gguf"));
    const struct model_config *c = model_config(m);
    assert_true(c->window[0] == 128 && c->window[1] == 0 && c->activation == ACT_SWIGLU_OAI && !c->rope_interleaved);
    assert_int_equal(c->router, ROUTER_TOPK_SOFTMAX);
    assert_true(fabs((double)c->rope_mscale - 1.3465736) < 1e-6);
    struct arena a = {0};
    struct hf_config same;
    GOOD(hf_config_parse(&same, span_of(gpt_oss_config), "config.json", &a, &err));
    for (int i = 0; i < 8; i++) /* YaRN without rounding, though GGUF does not say so */
        assert_true(fabsf(c->rope_inv_freq[i] - same.c.rope_inv_freq[i]) <= 1e-6f * same.c.rope_inv_freq[i]);
    arena_free(&a);
    assert_int_equal(c->n_stop, 3); /* <|return|>, <|call|>, <|endoftext|>, and not <|end|> */
    for (int i = 0; i < 3; i++) assert_int_not_equal(c->stop[i], 2);
    struct dmat up = model_mat(m, ROLE_UP, 1, 2);
    assert_ptr_equal(up.data, tensors_find(&m->tensors, "blk.1.ffn_up_exps.weight")->data + 2 * 32 * 2 * 17);
    float b[2], *want = (float[2]){0};
    model_vec(m, ROLE_DOWN_BIAS, 1, 2, 5, 7, b);
    memcpy(want, tensors_find(&m->tensors, "blk.1.ffn_down_exps.bias")->data + (2 * 64 + 5) * 4, 8);
    assert_true(b[0] == want[0] && b[1] == want[1]);
    model_close(&m);
    remove_dir(dir);
}

static void test_gguf_merged(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    struct items *t = ITEMS(oss_gguf_lines, 2, 0);
    drop_item(t, "blk.0.attn_q.weight"), drop_item(t, "blk.0.attn_k.weight"), drop_item(t, "blk.0.attn_v.weight");
    drop_item(t, "blk.0.attn_q.bias"), drop_item(t, "blk.0.attn_k.bias"), drop_item(t, "blk.0.attn_v.bias");
    drop_item(t, "blk.1.ffn_gate_exps.weight"), drop_item(t, "blk.1.ffn_up_exps.weight");
    add_line(t, "blk.0.attn_qkv.weight BF16 128,64"), add_line(t, "blk.0.attn_qkv.bias F32 128");
    add_line(t, "blk.1.ffn_gate_up_exps.weight MXFP4 3,64,64");
    write_gguf(dir, "m.gguf", oss_kv, COUNT_OF(oss_kv), t);
    GOOD(open_path(&m, dir, "m.gguf"));
    const struct tensor *qkv = tensors_find(&m->tensors, "blk.0.attn_qkv.weight");
    const struct tensor *bias = tensors_find(&m->tensors, "blk.0.attn_qkv.bias");
    const struct tensor *gate_up = tensors_find(&m->tensors, "blk.1.ffn_gate_up_exps.weight");
    assert_ptr_equal(model_mat(m, ROLE_Q, 0, 0).data, qkv->data);
    assert_ptr_equal(model_mat(m, ROLE_K, 0, 0).data, qkv->data + 64 * 128);
    assert_ptr_equal(model_mat(m, ROLE_V, 0, 0).data, qkv->data + 96 * 128);
    assert_int_equal(model_mat(m, ROLE_V, 0, 0).rows, 32);
    assert_ptr_equal(model_mat(m, ROLE_V_BIAS, 0, 0).data, bias->data + 96 * 4);
    assert_ptr_equal(model_mat(m, ROLE_UP, 1, 2).data, gate_up->data + (2 * 64 + 32) * 34);
    model_close(&m);
    remove_dir(dir);
}

/* One key more (a later one wins nothing: it must not be there yet), or one tensor more. */
static void test_gguf_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *drop, *key, *line, *text;
    } cases[] = {
        {"general.architecture", "general.architecture str mamba", NULL,
         "general.architecture is mamba, known are llama, mistral3"},
        {"general.architecture", NULL, NULL, "general.architecture is missing"},
        {"llama.block_count", NULL, NULL, "llama.block_count is missing"},
        {"llama.block_count", "llama.block_count str two", NULL, "llama.block_count is string, expected an integer"},
        {"llama.block_count", "llama.block_count u32 1", NULL, "tensor blk.1."},
        {"llama.block_count", "llama.block_count u64 99999999999", NULL,
         "llama.block_count is 99999999999, expected 1 to 4096"},
        {"llama.attention.head_count_kv", "llama.attention.head_count_kv i32s 2 1", NULL,
         "differs by layer (2, then 1)"},
        {"llama.rope.dimension_count", "llama.rope.dimension_count u32 8", NULL,
         "keys, values and rotation are 16, 16, 8"},
        {"llama.attention.layer_norm_rms_epsilon", NULL, NULL, "RMS norm epsilon 0"},
        {NULL, "llama.expert_count u32 8", NULL, "llama.expert_used_count is missing"},
        {NULL, "llama.logit_scale f32 0.5", NULL, "llama.logit_scale is 0.5, which changes the maths"},
        {NULL, "llama.attention.temperature_scale f32 0.1", NULL, "temperature_scale is 0.1"},
        {NULL, "llama.attention.causal bool false", NULL, "llama.attention.causal is false"},
        {NULL, "llama.rope.scaling.type str longrope", NULL,
         "rope.scaling.type is longrope, known are none, linear, yarn"},
        {NULL, "llama.vocab_size u32 51", NULL, "llama.vocab_size is 51, expected 1 to 50"},
        {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eos_token_id u32 77", NULL,
         "end token 77 is outside the vocabulary of 50"},
        {NULL, NULL, "blk.0.attn_q_norm.weight F32 16", "tensor blk.0.attn_q_norm.weight is none that"},
        {NULL, NULL, "blk.0.ffn_gate.bias F32 96", "tensor blk.0.ffn_gate.bias is none that"},
        {NULL, NULL, "rope_freqs.weight F32 9",
         "tensor rope_freqs.weight has shape [9], but the configuration makes it [8]"},
    };
    const char *dir = temp_dir();
    struct model *m;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char *kv[32];
        size_t n = 0;
        for (size_t k = 0; k < COUNT_OF(llama_kv); k++) {
            size_t len = strcspn(llama_kv[k], " ");
            if (!cases[i].drop || strlen(cases[i].drop) != len || strncmp(llama_kv[k], cases[i].drop, len) != 0)
                kv[n++] = llama_kv[k];
        }
        if (cases[i].key) kv[n++] = cases[i].key;
        struct items *t = ITEMS(llama_gguf_lines, 2, 0);
        if (cases[i].line) add_line(t, cases[i].line);
        write_gguf(dir, "m.gguf", kv, n, t);
        REFUSED(open_path(&m, dir, "m.gguf"), cases[i].text);
        assert_non_null(strstr(err.msg, "m.gguf: "));
    }
    struct items *t = ITEMS(llama_gguf_lines, 2, 0);
    snprintf(find_item(t, "blk.1.ffn_up.weight")->type, 16, "NVFP4");
    write_gguf(dir, "m.gguf", llama_kv, COUNT_OF(llama_kv), t);
    REFUSED(open_path(&m, dir, "m.gguf"),
            "tensor blk.1.ffn_up.weight has type NVFP4, known are F32, F16, BF16, Q8_0");
    t = ITEMS(llama_gguf_lines, 2, 0);
    add_line(t, "rope_freqs.weight F32 8");
    write_gguf(dir, "m.gguf", llama_kv, COUNT_OF(llama_kv), t);
    GOOD(open_path(&m, dir, "m.gguf"));
    double divisor = (double)stored(m, "rope_freqs.weight", 3);
    assert_true(fabs((double)model_config(m)->rope_inv_freq[3] * divisor - pow(10000, -6.0 / 16)) < 1e-6);
    model_close(&m);
    remove_dir(dir);
}

static void write_parts(const char *dir, int count, uint64_t said)
{
    struct items all = *ITEMS(llama_gguf_lines, 2, 0);
    for (int i = 0; i < count; i++) {
        struct items part = {0};
        char no[64], of[64], total[64], name[64];
        const char *kv[32] = {no, of, total};
        size_t n = 3;
        snprintf(no, sizeof no, "split.no u32 %d", i);
        snprintf(of, sizeof of, "split.count u32 %d", count);
        snprintf(total, sizeof total, "split.tensors.count i64 %" PRIu64, said ? said : all.n);
        for (size_t k = 0; i == 0 && k < COUNT_OF(llama_kv); k++) kv[n++] = llama_kv[k];
        for (size_t k = 0; k < all.n; k++)
            if ((int)(k % (size_t)count) == i) part.at[part.n++] = all.at[k];
        snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", i + 1, count);
        write_gguf(dir, name, kv, n, &part);
    }
}

static void test_gguf_parts(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    uint64_t whole;
    write_gguf(dir, "m.gguf", llama_kv, COUNT_OF(llama_kv), ITEMS(llama_gguf_lines, 2, 0));
    GOOD(open_path(&m, dir, "m.gguf"));
    whole = model_fingerprint(m);
    model_close(&m);
    write_parts(dir, 3, 0);
    static const char *const names[] = {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        GOOD(open_path(&m, dir, names[i]));
        assert_true(model_fingerprint(m) == whole);
        assert_int_equal(model_vocab(m)->n_tokens, 5);
        model_close(&m);
    }
    write_parts(dir, 3, 99);
    REFUSED(open_path(&m, dir, names[0]), "split.tensors.count is 99, but the 3 parts hold");
    char from[600], to[600];
    snprintf(from, sizeof from, "%s/%s", dir, names[1]);
    snprintf(to, sizeof to, "%s/other.gguf", dir);
    assert_int_equal(rename(from, to), 0);
    REFUSED(open_path(&m, dir, names[2]), "m-00002-of-00003.gguf: part 2 of 3 is missing");
    REFUSED(open_path(&m, dir, "other.gguf"), "is not named NAME-00001-of-00003.gguf");
    write_parts(dir, 3, 0);
    snprintf(from, sizeof from, "%s/%s", dir, names[1]);
    snprintf(to, sizeof to, "%s/%s", dir, names[2]);
    assert_int_equal(rename(from, to), 0);
    assert_int_equal(link(to, from), 0); /* the second part under the third's name, too */
    REFUSED(open_path(&m, dir, names[0]), "m-00003-of-00003.gguf: split.no is 1, its name and place make it 2");
    remove_dir(dir);
}

/* A whole tiny model, cut at every byte: never a model that reaches past its file. */
static void test_cut_model(void **state)
{
    (void)state;
    const char *dir = temp_dir();
    struct model *m;
    struct buf b = gguf_bytes(llama_kv, COUNT_OF(llama_kv), ITEMS(llama_gguf_lines, 2, 0));
    size_t end = b.len - 32; /* the last tensor ends where the file does, but for padding */
    for (size_t n = 0; n < end; n += n < 4000 ? 1 : 997) {
        write_file(dir, "m.gguf", b.data, n);
        REFUSED(open_path(&m, dir, "m.gguf"), "m.gguf");
    }
    buf_free(&b);
    remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------------ golden cases */

static void check_finite(const struct model *m, enum role role, int layer, int expert)
{
    struct dmat w = model_mat(m, role, layer, expert);
    int64_t rows, cols;
    float *row = malloc((size_t)w.cols * sizeof *row);
    role_shape(model_config(m), role, &rows, &cols);
    assert_true(w.rows == rows && w.cols == cols);
    for (int64_t r = 0; r < w.rows; r++) {
        dmat_row(&w, r, row);
        for (int64_t c = 0; c < w.cols; c++)
            if (!isfinite(row[c]))
                fail_msg("%s of layer %d, row %" PRId64 ": not finite", role_names[role], layer, r);
    }
    free(row);
}

/* Every checkpoint that the reference wrote opens, and every role decodes. What the numbers are is the engine's test. */
static void test_golden_cases(void **state)
{
    (void)state;
    DIR *d = opendir(TEST_GOLDEN);
    struct dirent *entry;
    int opened = 0;
    while (d && (entry = readdir(d))) {
        char path[1024];
        json_error_t bad;
        snprintf(path, sizeof path, "%s/%s/expect.json", TEST_GOLDEN, entry->d_name);
        json_t *expect = json_load_file(path, 0, &bad);
        if (!expect) continue;
        struct model *m;
        snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN, entry->d_name);
        GOOD(open_path(&m, path, json_string_value(json_object_get(expect, "model"))));
        const struct model_config *c = model_config(m);
        assert_int_equal(c->n_vocab, 256);
        bool plain = strcmp(model_quantization(m), "none") == 0;
        const char *dash = strrchr(entry->d_name, '-'), *tail = dash ? dash + 1 : "";
        assert_true(plain == (strcmp(tail, "bf16") == 0 || strcmp(tail, "f16") == 0 || strcmp(tail, "f32") == 0));
        for (enum role role = 0; role < ROLE_COUNT; role++)
            for (int l = 0; l < (role_is_shared(role) ? 1 : c->n_layers); l++)
                for (int x = 0; x < (role_per_expert(m, role) ? c->n_experts : 1); x++)
                    if (model_has(m, role, l, x)) check_finite(m, role, l, x);
        model_close(&m);
        json_decref(expect);
        opened++;
    }
    if (d) closedir(d);
    print_message("%d golden checkpoints\n", opened);
    assert_true(opened > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_directory),
        cmocka_unit_test(test_each_tensor_matters),
        cmocka_unit_test(test_left_over),
        cmocka_unit_test(test_gpt_oss_directory),
        cmocka_unit_test(test_moe_directory),
        cmocka_unit_test(test_mistral3_prefixes),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_no_model),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_nvfp4),
        cmocka_unit_test(test_large_opens_fast),
        cmocka_unit_test(test_llama_gguf),
        cmocka_unit_test(test_gguf_each_tensor_matters),
        cmocka_unit_test(test_gpt_oss_gguf),
        cmocka_unit_test(test_gguf_merged),
        cmocka_unit_test(test_gguf_refusals),
        cmocka_unit_test(test_gguf_parts),
        cmocka_unit_test(test_cut_model),
        cmocka_unit_test(test_golden_cases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
