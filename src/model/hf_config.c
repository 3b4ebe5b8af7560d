/* hf_config: config.json and generation_config.json, in the spelling of published checkpoints (rope_theta,
 * rope_scaling, num_experts) and in that of transformers 5 (rope_parameters, num_local_experts). Sizes must be
 * stated; what else is absent has the value that transformers gives it; what would change the maths in a way not done
 * here is refused by name. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

static const struct family_of {
    const char *model_type, *architecture;
    enum family family;
    double theta;   /* where rope_theta is absent */
    int64_t window; /* where sliding_window is absent */
} families[] = {
    {"llama", "LlamaForCausalLM", FAMILY_LLAMA, 10000, 0},
    {"mistral", "MistralForCausalLM", FAMILY_MISTRAL, 10000, 4096},
    {"mistral3", "Mistral3ForConditionalGeneration", FAMILY_MISTRAL, 10000, 4096},
    {"qwen2", "Qwen2ForCausalLM", FAMILY_QWEN2, 10000, 4096},
    {"qwen3", "Qwen3ForCausalLM", FAMILY_QWEN3, 10000, 4096},
    {"qwen3_moe", "Qwen3MoeForCausalLM", FAMILY_QWEN3_MOE, 10000, 4096},
    {"gpt_oss", "GptOssForCausalLM", FAMILY_GPT_OSS, 150000, 128},
};

/* Fields that change the maths in ways not done here, unless absent, null, false, 0, empty, or (where it is a
 * factor) 1. */
static const struct {
    const char *key;
    bool one;
} refused[] = {
    {"mlp_bias", false},
    {"attn_logit_softcapping", false},
    {"final_logit_softcapping", false},
    {"logit_scale", true},
    {"logits_scaling", true},
    {"embedding_multiplier", true},
    {"residual_multiplier", true},
    {"attention_multiplier", false},
    {"query_pre_attn_scalar", false},
    {"clip_qkv", false},
    {"no_rope_layers", false},
    {"no_rope_layer_interval", false},
    {"attention_chunk_size", false},
    {"qk_layernorm", false},
    {"rope_interleaved", false},
    {"alibi", false},
    {"parallel_attn", false},
    {"scale_emb", true},
    {"shared_expert_intermediate_size", false},
    {"n_shared_experts", false},
    {"first_k_dense_replace", false},
    {"decoder_sparse_step", true},
    {"mlp_only_layers", false},
    {"partial_rotary_factor", true},
    {"use_bidirectional_attention", false},
    {"llama_4_scaling", false},
    {"attn_temperature_tuning", false},
};

static bool neutral(const json_t *v, bool one)
{
    if (!v || json_is_false(v)) return true;
    if (json_is_number(v)) return json_number_value(v) == 0 || (one && json_number_value(v) == 1);
    return (json_is_array(v) && json_array_size(v) == 0) || (json_is_object(v) && json_object_size(v) == 0);
}

static int check_refused(const json_t *o, const struct family_of *f, struct err *e)
{
    bool qk_norm = f->family == FAMILY_QWEN3 || f->family == FAMILY_QWEN3_MOE, flag = qk_norm;
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        const json_t *v = hf_get(o, refused[i].key);
        if (neutral(v, refused[i].one)) continue;
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
        int rc = err_set(e, ERR_UNSUPPORTED, "%s is %.60s, which changes the maths in a way that is not known",
                         refused[i].key, text ? text : "set");
        free(text);
        return rc;
    }
    TRY(hf_flag(o, "use_qk_norm", &flag, e));
    if (flag != qk_norm)
        return err_set(e, ERR_UNSUPPORTED, "use_qk_norm is %s, but family %s is known %s such norms only",
                       flag ? "true" : "false", family_names[f->family], qk_norm ? "with" : "without");
    flag = false;
    TRY(hf_flag(o, "qkv_bias", &flag, e));
    if (flag && f->family != FAMILY_QWEN2)
        return err_set(e, ERR_UNSUPPORTED, "qkv_bias is true, which is not known for family %s",
                       family_names[f->family]);
    const char *act = "silu";
    TRY(hf_text(o, "hidden_act", &act, e));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        return err_set(e, ERR_UNSUPPORTED, "hidden_act is %.40s, known is silu", act);
    double alpha = 1.702;
    TRY(hf_float(o, "swiglu_alpha", &alpha, e));
    if (alpha != 1.702) return err_set(e, ERR_UNSUPPORTED, "swiglu_alpha is %g, known is 1.702", alpha);
    return OK;
}

/* ------------------------------------------------------------------------------------------------ family */

static int unknown_family(const char *key, const char *value, struct err *e)
{
    char known[256] = "";
    for (size_t i = 0; i < COUNT_OF(families); i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "",
                 *key == 'a' ? families[i].architecture : families[i].model_type);
    }
    return err_set(e, ERR_UNSUPPORTED, "%s is %.60s, known are %s", key, value, known);
}

static const struct family_of *find_family(const char *model_type, const char *architecture)
{
    for (size_t i = 0; i < COUNT_OF(families); i++)
        if ((model_type && strcmp(families[i].model_type, model_type) == 0) ||
            (architecture && strcmp(families[i].architecture, architecture) == 0))
            return &families[i];
    return NULL;
}

/* By model_type, else by architectures. An architecture that is stated must be the one with a language-model head:
 * one that ends in a classifier has no head tensor, and would be taken for a tied model. */
static int read_family(const json_t *root, const struct family_of **out, const char **arch, struct err *e)
{
    const char *type = NULL, *architecture = json_string_value(json_array_get(hf_get(root, "architectures"), 0));
    TRY(hf_text(root, "model_type", &type, e));
    if (!type && !architecture) return err_set(e, ERR_INPUT, "both model_type and architectures are missing");
    const struct family_of *f = find_family(type, type ? NULL : architecture);
    if (!f) return type ? unknown_family("model_type", type, e) : unknown_family("architecture", architecture, e);
    if (architecture && strcmp(f->architecture, architecture) != 0)
        return unknown_family("architecture", architecture, e);
    *out = f;
    *arch = architecture ? architecture : type;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ sizes */

static int read_size(const json_t *o, const char *key, const char *other, int64_t max, int32_t *out, struct err *e)
{
    int64_t v = *out;
    if (other) TRY(hf_int(o, other, 1, max, &v, e));
    TRY(hf_int(o, key, 1, max, &v, e));
    if (v < 1) return err_set(e, ERR_INPUT, "%s is missing", key);
    *out = (int32_t)v;
    return OK;
}

static int read_sizes(const json_t *o, struct model_config *c, struct err *e)
{
    TRY(read_size(o, "num_hidden_layers", NULL, MAX_LAYERS, &c->n_layers, e));
    TRY(read_size(o, "hidden_size", NULL, MAX_WIDTH, &c->d_model, e));
    TRY(read_size(o, "vocab_size", NULL, MAX_VOCAB, &c->n_vocab, e));
    TRY(read_size(o, "max_position_embeddings", NULL, INT32_MAX, &c->ctx_train, e));
    TRY(read_size(o, "num_attention_heads", NULL, MAX_HEADS, &c->n_heads, e));
    if (c->family == FAMILY_LLAMA || json_is_null(json_object_get(o, "num_key_value_heads")))
        c->n_kv_heads = c->n_heads;
    TRY(read_size(o, "num_key_value_heads", NULL, MAX_HEADS, &c->n_kv_heads, e));
    c->d_head = c->d_model / c->n_heads;
    TRY(read_size(o, "head_dim", NULL, MAX_WIDTH, &c->d_head, e));
    double eps = 0;
    TRY(hf_float(o, "rms_norm_eps", &eps, e));
    c->rms_eps = (float)eps;
    if (c->family == FAMILY_QWEN3_MOE) TRY(read_size(o, "moe_intermediate_size", NULL, MAX_FFN, &c->d_ff, e));
    else TRY(read_size(o, "intermediate_size", NULL, MAX_FFN, &c->d_ff, e));
    if (family_has_experts(c->family)) {
        TRY(read_size(o, "num_local_experts", "num_experts", MAX_EXPERTS, &c->n_experts, e));
        TRY(read_size(o, "num_experts_per_tok", "experts_per_token", MAX_EXPERTS, &c->n_experts_used, e));
    }
    return config_check(c, e);
}

static int read_maths(const json_t *o, struct hf_config *out, struct err *e)
{
    struct model_config *c = &out->c;
    bool norm = false, bias = c->family == FAMILY_GPT_OSS;
    TRY(hf_flag(o, "attention_bias", &bias, e));
    out->qkv_bias = bias || c->family == FAMILY_QWEN2;
    out->o_bias = bias;
    TRY(hf_flag(o, "norm_topk_prob", &norm, e));
    c->router = norm ? ROUTER_SOFTMAX_TOPK_NORM : ROUTER_SOFTMAX_TOPK;
    if (c->family != FAMILY_GPT_OSS) return OK;
    double limit = 7;
    TRY(hf_float(o, "swiglu_limit", &limit, e));
    if (!(limit > 0 && limit < 1e6))
        return err_set(e, ERR_INPUT, "swiglu_limit is %g, expected a positive number", limit);
    c->router = ROUTER_TOPK_SOFTMAX;
    c->activation = ACT_SWIGLU_OAI;
    c->swiglu_limit = (float)limit;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ windows */

static int read_layer_type(const json_t *types, int layer, bool *sliding, struct err *e)
{
    const char *type = json_string_value(json_array_get(types, (size_t)layer));
    *sliding = type && strcmp(type, "sliding_attention") == 0;
    if (*sliding || (type && strcmp(type, "full_attention") == 0)) return OK;
    return err_set(e, ERR_UNSUPPORTED,
                   "layer_types of layer %d is %.40s, known are full_attention and sliding_attention", layer,
                   type ? type : "no string");
}

static int read_windows(const json_t *o, const struct family_of *f, struct model_config *c, struct arena *a,
                        struct err *e)
{
    bool qwen = f->family == FAMILY_QWEN2 || f->family == FAMILY_QWEN3 || f->family == FAMILY_QWEN3_MOE;
    bool by_layer = f->family == FAMILY_QWEN2 || f->family == FAMILY_QWEN3 || f->family == FAMILY_GPT_OSS;
    bool use = !qwen;
    int64_t window = json_object_get(o, "sliding_window") ? 0 : f->window, from = 28;
    int32_t *w;
    TRY(hf_int(o, "sliding_window", 1, INT32_MAX, &window, e));
    TRY(hf_flag(o, "use_sliding_window", &use, e));
    TRY(hf_int(o, "max_window_layers", 0, INT32_MAX, &from, e));
    if (!use || f->family == FAMILY_LLAMA) window = 0;
    TRY(config_windows(c, 0, &w, a, e));
    const json_t *types = hf_get(o, "layer_types");
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return err_set(e, ERR_INPUT, "layer_types has %zu elements for %d layers", json_array_size(types),
                       c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        bool sliding = window > 0, stated;
        if (f->family == FAMILY_GPT_OSS) sliding = i % 2 == 0;
        else if (by_layer) sliding = window > 0 && i >= from;
        stated = sliding;
        if (types) TRY(read_layer_type(types, i, &stated, e));
        if (stated && !window)
            return err_set(e, ERR_INPUT,
                           "layer_types of layer %d is sliding_attention, but no sliding_window applies", i);
        if (stated != sliding && !by_layer)
            return err_set(e, ERR_UNSUPPORTED,
                           "layer_types of layer %d is %s, but family %s has one kind in all layers", i,
                           stated ? "sliding_attention" : "full_attention", family_names[f->family]);
        w[i] = stated ? (int32_t)window : 0;
    }
    return OK;
}

/* ------------------------------------------------------------------------------------------------ rope */

static int rope_type(const json_t *r, const char **out, struct err *e)
{
    TRY(hf_text(r, "type", out, e));
    return hf_text(r, "rope_type", out, e);
}

static int rope_kind(const char *type, enum rope_kind *out, struct err *e)
{
    static const char *const kinds[] = {"default", "linear", "llama3", "yarn"};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        if (strcmp(type, kinds[i]) != 0) continue;
        *out = (enum rope_kind)i;
        return OK;
    }
    return err_set(e, ERR_UNSUPPORTED, "rope type is %.40s, known are default, linear, llama3, yarn", type);
}

static int read_rope_scaling(const json_t *o, const json_t *r, const struct model_config *c, struct rope_spec *s,
                             struct err *e)
{
    double factor = 0;
    s->original = c->ctx_train;
    TRY(hf_float(r, "original_max_position_embeddings", &s->original, e));
    TRY(hf_float(o, "original_max_position_embeddings", &s->original, e));
    TRY(hf_float(r, "factor", &factor, e));
    if (factor == 0 && s->kind == ROPE_YARN && s->original > 0) factor = c->ctx_train / s->original;
    if (factor == 0) return err_set(e, ERR_INPUT, "rope factor is missing");
    s->factor = factor;
    if (s->kind == ROPE_LLAMA3 && (!hf_get(r, "low_freq_factor") || !hf_get(r, "high_freq_factor")))
        return err_set(e, ERR_INPUT, "rope low_freq_factor or high_freq_factor is missing");
    TRY(hf_float(r, "low_freq_factor", &s->low_freq, e));
    TRY(hf_float(r, "high_freq_factor", &s->high_freq, e));
    TRY(hf_float(r, "beta_fast", &s->beta_fast, e));
    TRY(hf_float(r, "beta_slow", &s->beta_slow, e));
    TRY(hf_float(r, "attention_factor", &s->attention, e));
    TRY(hf_float(r, "mscale", &s->mscale, e));
    TRY(hf_float(r, "mscale_all_dim", &s->mscale_all, e));
    return hf_flag(r, "truncate", &s->truncate, e);
}

static int read_rope(const json_t *o, const struct family_of *f, struct model_config *c, struct err *e)
{
    struct rope_spec s = rope_spec_new();
    const json_t *old = NULL, *new = NULL, *r;
    const char *type = "default", *new_type = NULL;
    TRY(hf_object(o, "rope_scaling", &old, e));
    TRY(hf_object(o, "rope_parameters", &new, e));
    r = old && json_object_size(old) ? old : new;
    s.theta = f->theta;
    if (r) TRY(rope_type(r, &type, e));
    if (new) TRY(rope_type(new, &new_type, e));
    if (new_type && strcmp(type, new_type) != 0)
        return err_set(e, ERR_INPUT, "rope_scaling has type %.40s, but rope_parameters %.40s", type, new_type);
    TRY(rope_kind(type, &s.kind, e));
    TRY(hf_float(o, "rope_theta", &s.theta, e));
    if (new) TRY(hf_float(new, "rope_theta", &s.theta, e));
    if (r) TRY(hf_float(r, "rope_theta", &s.theta, e));
    static const char *const nested[] = {"full_attention", "sliding_attention"};
    for (size_t i = 0; r && i < COUNT_OF(nested); i++)
        if (hf_get(r, nested[i]))
            return err_set(e, ERR_UNSUPPORTED, "rope parameters by layer type (%s) are not known", nested[i]);
    double part = 1;
    if (r) TRY(hf_float(r, "partial_rotary_factor", &part, e));
    if (part != 1) return err_set(e, ERR_UNSUPPORTED, "partial_rotary_factor is %g, known is 1", part);
    if (r && hf_get(r, "llama_4_scaling_beta"))
        return err_set(e, ERR_UNSUPPORTED, "llama_4_scaling_beta changes the maths in a way that is not known");
    if (s.kind != ROPE_DEFAULT) TRY(read_rope_scaling(o, r, c, &s, e));
    /* gpt_oss without a word on rope means its own YaRN, which no published file relies on. */
    if (!r && f->family == FAMILY_GPT_OSS) return err_set(e, ERR_INPUT, "rope_scaling is missing");
    return rope_fill(c, &s, NULL, e);
}

/* ------------------------------------------------------------------------------------------------ token ids */

static int read_stops(const json_t *o, struct model_config *c, struct err *e)
{
    const json_t *v = hf_get(o, "eos_token_id");
    size_t n = json_is_array(v) ? json_array_size(v) : v != NULL;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id)) return err_set(e, ERR_INPUT, "eos_token_id is no number and no list of numbers");
        if (config_add_stop(c, json_integer_value(id), e) < 0) return err_prefix(e, "eos_token_id");
    }
    return OK;
}

static int read_bos(const json_t *o, struct model_config *c, struct err *e)
{
    int64_t bos = c->bos;
    TRY(hf_int(o, "bos_token_id", 0, c->n_vocab - 1, &bos, e));
    c->bos = (int32_t)bos;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ the files */

static int read_config(const json_t *root, struct hf_config *out, struct arena *a, struct err *e)
{
    const struct family_of *f = NULL;
    const char *arch = NULL, *text_type = "mistral";
    const json_t *o = root;
    TRY(read_family(root, &f, &arch, e));
    if (strcmp(f->model_type, "mistral3") == 0) {
        o = NULL;
        TRY(hf_object(root, "text_config", &o, e));
        if (!o) return err_set(e, ERR_INPUT, "text_config is missing");
        TRY(hf_text(o, "model_type", &text_type, e));
        if (strcmp(text_type, "mistral") != 0)
            return err_set(e, ERR_UNSUPPORTED, "text_config.model_type is %.40s, known is mistral", text_type);
    }
    struct model_config *c = &out->c;
    c->family = f->family;
    c->bos = -1;
    c->sampling = (struct sampling_defaults){-1, -1, -1, -1, -1};
    TRY(check_refused(o, f, e));
    TRY(read_sizes(o, c, e));
    TRY(read_maths(o, out, e));
    TRY(read_windows(o, f, c, a, e));
    TRY(read_rope(o, f, c, e));
    TRY(read_bos(o, c, e));
    TRY(read_stops(o, c, e));
    if (o != root) TRY(read_stops(root, c, e));
    TRY(hf_scheme_read(&out->scheme, root, e));
    out->arch = arena_str(a, span_of(arch));
    return out->arch ? OK : err_set(e, ERR_NOMEM, "out of memory");
}

int hf_config_parse(struct hf_config *out, struct span json, const char *where, struct arena *a, struct err *e)
{
    json_t *root;
    *out = (struct hf_config){0};
    TRY(hf_parse(&root, json, where, e));
    int rc = read_config(root, out, a, e);
    json_decref(root);
    return rc < 0 ? err_prefix(e, "%s", where) : OK;
}

static int read_generation(const json_t *o, struct model_config *c, struct err *e)
{
    struct sampling_defaults *s = &c->sampling;
    const struct {
        const char *key;
        float *out;
    } keys[] = {{"temperature", &s->temperature},
                {"top_p", &s->top_p},
                {"min_p", &s->min_p},
                {"repetition_penalty", &s->repetition_penalty}};
    for (size_t i = 0; i < COUNT_OF(keys); i++) {
        double v = (double)*keys[i].out;
        TRY(hf_float(o, keys[i].key, &v, e));
        *keys[i].out = (float)v;
    }
    int64_t top_k = s->top_k;
    TRY(hf_int(o, "top_k", 0, INT32_MAX, &top_k, e));
    s->top_k = (int32_t)top_k;
    if (c->bos < 0) TRY(read_bos(o, c, e));
    return read_stops(o, c, e);
}

int hf_generation_parse(struct model_config *c, struct span json, const char *where, struct err *e)
{
    json_t *root;
    TRY(hf_parse(&root, json, where, e));
    int rc = read_generation(root, c, e);
    json_decref(root);
    return rc < 0 ? err_prefix(e, "%s", where) : OK;
}
