/* gguf_model: what a GGUF file says about its model: configuration from metadata keys, vocabulary, and roles bound to
 * llama.cpp's tensor names. Every tensor in the file must be one that is used: in GGUF a tensor that is left over
 * means maths that were left out. The same holds for metadata that changes the maths (caps, scales, shared experts).
 */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

static const struct {
    const char *arch;
    enum family family;
    bool interleaved; /* the converter permuted the rows of q and k for rotary pairs (2i, 2i+1) */
} archs[] = {
    {"llama", FAMILY_LLAMA, true},  {"mistral3", FAMILY_MISTRAL, true},    {"qwen2", FAMILY_QWEN2, false},
    {"qwen3", FAMILY_QWEN3, false}, {"qwen3moe", FAMILY_QWEN3_MOE, false}, {"gpt-oss", FAMILY_GPT_OSS, false},
};

/* Keys that change the maths in ways not done here, unless absent or neutral: 0, or also 1 where that is a factor. */
static const struct {
    const char *key;
    bool one;
} refused[] = {
    {"attn_logit_softcapping", false},
    {"final_logit_softcapping", false},
    {"router_logit_softcapping", false},
    {"logit_scale", true},
    {"residual_scale", true},
    {"embedding_scale", true},
    {"attention.scale", false},
    {"attention.output_scale", true},
    {"attention.value_scale", true},
    {"attention.clamp_kqv", false},
    {"attention.max_alibi_bias", false},
    {"attention.temperature_scale", false},
    {"attention.q_lora_rank", false},
    {"attention.kv_lora_rank", false},
    {"use_parallel_residual", false},
    {"expert_shared_count", false},
    {"expert_shared_feed_forward_length", false},
    {"leading_dense_block_count", false},
    {"expert_group_count", true},
    {"expert_weights_scale", true},
    {"interleave_moe_layer_step", true},
    {"nextn_predict_layers", false},
    {"swiglu_clamp_exp", false},
    {"swiglu_clamp_shexp", false},
    {"rope.dimension_sections", false},
    {"rope.scaling.alpha", true},
};

enum { KEY = 128 };

/* Reads one metadata key of the architecture. */
struct reader {
    const struct gguf *g;
    const char *arch;
    struct err *e;
};

static const char *key_of(const struct reader *r, char text[KEY], const char *key)
{
    snprintf(text, KEY, "%s.%s", r->arch, key);
    return text;
}

static int read_int(const struct reader *r, const char *key, int64_t max, int32_t *out)
{
    char text[KEY];
    int64_t v = *out;
    TRY(gguf_int(r->g, key_of(r, text, key), 1, max, &v, r->e));
    if (v < 1) return err_set(r->e, ERR_INPUT, "key %s is missing", text);
    *out = (int32_t)v;
    return OK;
}

static int read_float(const struct reader *r, const char *key, double *out)
{
    char text[KEY];
    return gguf_float(r->g, key_of(r, text, key), out, r->e);
}

static int check_refused(const struct reader *r)
{
    char text[KEY];
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        const struct gguf_kv *kv = gguf_find(r->g, key_of(r, text, refused[i].key));
        if (!kv) continue;
        int flag = 0;
        double v = 0;
        if (kv->type == GGUF_BOOL && !kv->array) {
            TRY(gguf_bool(r->g, text, &flag, r->e));
            v = flag;
        } else if (kv->array || gguf_float(r->g, text, &v, r->e) < 0) {
            return err_set(r->e, ERR_UNSUPPORTED, "%s changes the maths in a way that is not known", text);
        }
        if (v != 0 && !(refused[i].one && v == 1))
            return err_set(r->e, ERR_UNSUPPORTED, "%s is %g, which changes the maths in a way that is not known",
                           text, v);
    }
    int causal = 1;
    TRY(gguf_bool(r->g, key_of(r, text, "attention.causal"), &causal, r->e));
    return causal ? OK : err_set(r->e, ERR_UNSUPPORTED, "%s is false, only causal models are known", text);
}

/* ------------------------------------------------------------------------------------------------ configuration */

static int read_arch(struct model *m, struct reader *r)
{
    struct span arch = {0};
    TRY(gguf_string(r->g, "general.architecture", &arch, r->e));
    if (!arch.len) return err_set(r->e, ERR_INPUT, "key general.architecture is missing");
    char known[128] = "";
    for (size_t i = 0; i < COUNT_OF(archs); i++) {
        size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "", archs[i].arch);
        if (!span_is(arch, archs[i].arch)) continue;
        m->arch = r->arch = archs[i].arch;
        m->config.family = archs[i].family;
        m->config.rope_interleaved = archs[i].interleaved;
        return OK;
    }
    return err_set(r->e, ERR_UNSUPPORTED, "general.architecture is %.*s, known are %s",
                   (int)(arch.len < 64 ? arch.len : 64), arch.ptr, known);
}

static int read_sizes(struct model *m, const struct reader *r)
{
    struct model_config *c = &m->config;
    TRY(read_int(r, "block_count", MAX_LAYERS, &c->n_layers));
    TRY(read_int(r, "embedding_length", MAX_WIDTH, &c->d_model));
    TRY(read_int(r, "context_length", INT32_MAX, &c->ctx_train));
    TRY(read_int(r, "attention.head_count", MAX_HEADS, &c->n_heads));
    c->n_kv_heads = c->n_heads;
    TRY(read_int(r, "attention.head_count_kv", MAX_HEADS, &c->n_kv_heads));
    c->d_head = c->d_model / c->n_heads;
    TRY(read_int(r, "attention.key_length", MODEL_MAX_HEAD, &c->d_head));
    int32_t d_value = c->d_head, d_rope = c->d_head;
    TRY(read_int(r, "attention.value_length", MODEL_MAX_HEAD, &d_value));
    TRY(read_int(r, "rope.dimension_count", MODEL_MAX_HEAD, &d_rope));
    if (d_value != c->d_head || d_rope != c->d_head)
        return err_set(r->e, ERR_UNSUPPORTED,
                       "head widths of keys, values and rotation are %d, %d, %d: only equal ones are "
                       "known",
                       c->d_head, d_value, d_rope);
    char text[KEY];
    if (gguf_find(r->g, key_of(r, text, "expert_count"))) {
        int64_t n = 0;
        TRY(gguf_int(r->g, text, 0, MAX_EXPERTS, &n, r->e));
        c->n_experts = (int32_t)n;
    }
    if (!c->n_experts) return read_int(r, "feed_forward_length", MAX_FFN, &c->d_ff);
    TRY(read_int(r, "expert_used_count", MAX_EXPERTS, &c->n_experts_used));
    return read_int(r, "expert_feed_forward_length", MAX_FFN, &c->d_ff);
}

/* The embedding's rows are the vocabulary; what the metadata says may be less (padding), never more. */
static int read_vocab_size(struct model *m, const struct reader *r)
{
    const struct tensor *t = tensors_find(&m->tensors, "token_embd.weight");
    if (!t) return err_set(r->e, ERR_INPUT, "tensor token_embd.weight is missing");
    int64_t rows = t->n_dims == 2 ? t->dims[0] : 0;
    if (rows < 1 || rows > MAX_VOCAB)
        return err_set(r->e, ERR_INPUT,
                       "tensor token_embd.weight has %" PRId64 " rows in %d dimensions, expected 1 to %d "
                       "rows in 2",
                       rows, t->n_dims, MAX_VOCAB);
    m->config.n_vocab = (int32_t)rows;
    TRY(read_int(r, "vocab_size", rows, &m->config.n_vocab));
    if (m->vocab.n_tokens > (size_t)rows)
        return err_set(r->e, ERR_INPUT,
                       "tokenizer.ggml.tokens holds %zu tokens, but the embedding has %" PRId64 " rows",
                       m->vocab.n_tokens, rows);
    return OK;
}

static int read_windows(struct model *m, const struct reader *r)
{
    struct model_config *c = &m->config;
    char text[KEY];
    int64_t window = 0, period = 2;
    int32_t *w;
    TRY(gguf_int(r->g, key_of(r, text, "attention.sliding_window"), 0, INT32_MAX, &window, r->e));
    if (window && (c->family == FAMILY_QWEN2 || c->family == FAMILY_QWEN3 || c->family == FAMILY_QWEN3_MOE))
        return err_set(r->e, ERR_UNSUPPORTED, "%s is %" PRId64 ", but which layers of %s it is for is not stated",
                       text, window, m->arch);
    TRY(config_windows(c, (int32_t)window, &w, &m->arena, r->e));
    if (c->family != FAMILY_GPT_OSS) return OK;
    if (!window) return err_set(r->e, ERR_INPUT, "key %s is missing", text);
    const struct gguf_kv *kv = gguf_find(r->g, key_of(r, text, "attention.sliding_window_pattern"));
    if (kv && kv->array) {
        const int32_t *sliding = NULL;
        size_t n = 0;
        TRY(gguf_ints(r->g, text, &sliding, &n, &m->arena, r->e));
        if (n != (size_t)c->n_layers)
            return err_set(r->e, ERR_INPUT, "%s has %zu elements for %d layers", text, n, c->n_layers);
        for (int i = 0; i < c->n_layers; i++) w[i] = sliding[i] ? (int32_t)window : 0;
        return OK;
    }
    TRY(gguf_int(r->g, text, 1, MAX_LAYERS, &period, r->e));
    for (int i = 0; i < c->n_layers; i++) w[i] = i % period < period - 1 ? (int32_t)window : 0;
    return OK;
}

static int read_rope_divisors(struct model *m, float out[MODEL_MAX_HEAD / 2], bool *found, struct err *e)
{
    struct tensor *t = tensors_find(&m->tensors, "rope_freqs.weight");
    *found = t != NULL;
    if (!t) return OK;
    struct dmat v;
    TRY(model_vector(m, t, 1, m->config.d_head / 2, &v, e));
    for (int64_t i = 0; i < v.rows; i++) dmat_row(&v, i, out + i);
    return OK;
}

static int read_rope(struct model *m, const struct reader *r)
{
    struct model_config *c = &m->config;
    struct rope_spec s = rope_spec_new();
    char text[KEY];
    struct span kind = span_of("linear"); /* what llama.cpp takes a bare factor for */
    int32_t original = c->ctx_train;
    double factor = 0, log_mul = 0, ext = 1, theta_window;
    TRY(gguf_string(r->g, key_of(r, text, "rope.scaling.type"), &kind, r->e));
    TRY(read_float(r, "rope.freq_base", &s.theta));
    theta_window = s.theta;
    TRY(read_float(r, "rope.freq_base_swa", &theta_window));
    if (theta_window != s.theta)
        return err_set(r->e, ERR_UNSUPPORTED,
                       "rope.freq_base is %g, but rope.freq_base_swa %g: only equal ones are known", s.theta,
                       theta_window);
    TRY(read_float(r, "rope.scale_linear", &factor));
    TRY(read_float(r, "rope.scaling.factor", &factor));
    TRY(read_float(r, "rope.scaling.attn_factor", &s.scale));
    TRY(read_float(r, "rope.scaling.yarn_attn_factor", &s.attention));
    TRY(read_float(r, "rope.scaling.yarn_beta_fast", &s.beta_fast));
    TRY(read_float(r, "rope.scaling.yarn_beta_slow", &s.beta_slow));
    TRY(read_float(r, "rope.scaling.yarn_log_multiplier", &log_mul));
    TRY(read_float(r, "rope.scaling.yarn_ext_factor", &ext));
    TRY(read_int(r, "rope.scaling.original_context_length", INT32_MAX, &original));
    s.factor = factor == 0 ? 1 : factor;
    s.original = original;
    if (span_is(kind, "linear")) s.kind = ROPE_LINEAR;
    else if (span_is(kind, "yarn")) s.kind = ROPE_YARN;
    else if (!span_is(kind, "none"))
        return err_set(r->e, ERR_UNSUPPORTED, "%s is %.*s, known are none, linear, yarn", text,
                       (int)(kind.len < 64 ? kind.len : 64), kind.ptr);
    if (s.kind == ROPE_YARN && ext != 1)
        return err_set(r->e, ERR_UNSUPPORTED, "%s is %g, only 1 is known",
                       key_of(r, text, "rope.scaling.yarn_ext_factor"), ext);
    if (log_mul != 0) {
        s.mscale = 1;
        s.mscale_all = log_mul;
    }
    /* GGUF has no key for it, but the released models were trained without the rounding. */
    if (c->family == FAMILY_GPT_OSS) s.truncate = false;
    float divisors[MODEL_MAX_HEAD / 2];
    bool bent;
    TRY(read_rope_divisors(m, divisors, &bent, r->e));
    return rope_fill(c, &s, bent ? divisors : NULL, r->e);
}

static int read_router(struct model_config *c, const struct reader *r)
{
    char text[KEY];
    int64_t gating = 0;
    int norm = 1;
    TRY(gguf_int(r->g, key_of(r, text, "expert_gating_func"), 0, 64, &gating, r->e));
    bool known = gating == 0 || gating == (c->family == FAMILY_GPT_OSS ? 3 : 1);
    if (!known) return err_set(r->e, ERR_UNSUPPORTED, "%s is %" PRId64 ", which is not known here", text, gating);
    TRY(gguf_bool(r->g, key_of(r, text, "expert_weights_norm"), &norm, r->e));
    c->router = norm ? ROUTER_SOFTMAX_TOPK_NORM : ROUTER_SOFTMAX_TOPK;
    if (c->family != FAMILY_GPT_OSS) return OK;
    c->router = ROUTER_TOPK_SOFTMAX;
    c->activation = ACT_SWIGLU_OAI;
    c->swiglu_limit = 7;
    return OK;
}

static int read_sampling(struct model_config *c, const struct gguf *g, struct err *e)
{
    struct sampling_defaults *s = &c->sampling;
    const struct {
        const char *key;
        float *out;
    } keys[] = {
        {"general.sampling.temp", &s->temperature},
        {"general.sampling.top_p", &s->top_p},
        {"general.sampling.min_p", &s->min_p},
        {"general.sampling.penalty_repeat", &s->repetition_penalty},
    };
    int64_t top_k = -1;
    TRY(gguf_int(g, "general.sampling.top_k", INT32_MIN, INT32_MAX, &top_k, e));
    s->top_k = (int32_t)top_k;
    for (size_t i = 0; i < COUNT_OF(keys); i++) {
        double v = -1;
        TRY(gguf_float(g, keys[i].key, &v, e));
        *keys[i].out = (float)v;
    }
    return OK;
}

/* The metadata names one or a few end tokens; the vocabulary knows the others by their text. gpt-oss ends its
 * thinking with <|end|>, which ends no answer, so that name is not among these. */
static int read_stops(struct model *m, const struct gguf *g, struct err *e)
{
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    static const char *const names[] = {"<|eot_id|>",    "<|eom_id|>", "<|im_end|>", "<|end_of_text|>",
                                        "<|endoftext|>", "<|return|>", "<|call|>",   "</s>"};
    const struct model_vocab *v = &m->vocab;
    for (size_t i = 0; i < COUNT_OF(keys); i++) {
        int64_t id = -1;
        TRY(gguf_int(g, keys[i], -1, INT64_MAX, &id, e));
        if (id >= 0 && config_add_stop(&m->config, id, e) < 0) return err_prefix(e, "%s", keys[i]);
    }
    for (size_t i = 0; i < v->n_tokens && i < (size_t)m->config.n_vocab; i++) {
        if (v->tokens[i].len < 4 || v->tokens[i].ptr[0] != '<') continue;
        for (size_t k = 0; k < COUNT_OF(names); k++) {
            /* "</s>" is also plain text (HTML), so only a control token (type 3) of that name counts. */
            bool plain = names[k][1] == '/' && !(v->types && v->types[i] == 3);
            if (!plain && span_is(v->tokens[i], names[k])) TRY(config_add_stop(&m->config, (int64_t)i, e));
        }
    }
    return OK;
}

int gguf_config(struct model *m, const struct gguf *g, struct err *e)
{
    struct reader r = {.g = g, .e = e};
    struct model_config *c = &m->config;
    double eps = 0;
    TRY(read_arch(m, &r));
    TRY(check_refused(&r));
    TRY(read_sizes(m, &r));
    TRY(read_vocab_size(m, &r));
    TRY(read_float(&r, "attention.layer_norm_rms_epsilon", &eps));
    c->rms_eps = (float)eps;
    TRY(config_check(c, e));
    TRY(read_windows(m, &r));
    TRY(read_rope(m, &r));
    TRY(read_router(c, &r));
    TRY(read_sampling(c, g, e));
    c->bos = m->vocab.bos < c->n_vocab ? (int32_t)m->vocab.bos : -1;
    return read_stops(m, g, e);
}

int gguf_vocab(struct model_vocab *v, const struct gguf *g, struct arena *a, struct err *e)
{
    size_t n = 0;
    TRY(gguf_string(g, "tokenizer.ggml.model", &v->model, e));
    TRY(gguf_string(g, "tokenizer.ggml.pre", &v->pre, e));
    TRY(gguf_string(g, "tokenizer.chat_template", &v->chat_template, e));
    TRY(gguf_strings(g, "tokenizer.ggml.tokens", &v->tokens, &v->n_tokens, a, e));
    TRY(gguf_strings(g, "tokenizer.ggml.merges", &v->merges, &v->n_merges, a, e));
    TRY(gguf_ints(g, "tokenizer.ggml.token_type", &v->types, &n, a, e));
    if (v->types && n != v->n_tokens)
        return err_set(e, ERR_INPUT, "tokenizer.ggml.token_type has %zu elements for %zu tokens", n, v->n_tokens);
    TRY(gguf_floats(g, "tokenizer.ggml.scores", &v->scores, &n, a, e));
    if (v->scores && n != v->n_tokens)
        return err_set(e, ERR_INPUT, "tokenizer.ggml.scores has %zu elements for %zu tokens", n, v->n_tokens);
    TRY(gguf_int(g, "tokenizer.ggml.bos_token_id", -1, INT64_MAX, &v->bos, e));
    TRY(gguf_int(g, "tokenizer.ggml.eos_token_id", -1, INT64_MAX, &v->eos, e));
    TRY(gguf_int(g, "tokenizer.ggml.unknown_token_id", -1, INT64_MAX, &v->unk, e));
    TRY(gguf_bool(g, "tokenizer.ggml.add_bos_token", &v->add_bos, e));
    return gguf_bool(g, "tokenizer.ggml.add_space_prefix", &v->add_space_prefix, e);
}

/* ------------------------------------------------------------------------------------------------ tensors */

static const char *const names[ROLE_COUNT] = {
    [ROLE_EMBED] = "token_embd.weight",
    [ROLE_OUT_NORM] = "output_norm.weight",
    [ROLE_HEAD] = "output.weight",
    [ROLE_ATTN_NORM] = "attn_norm.weight",
    [ROLE_Q] = "attn_q.weight",
    [ROLE_K] = "attn_k.weight",
    [ROLE_V] = "attn_v.weight",
    [ROLE_O] = "attn_output.weight",
    [ROLE_Q_BIAS] = "attn_q.bias",
    [ROLE_K_BIAS] = "attn_k.bias",
    [ROLE_V_BIAS] = "attn_v.bias",
    [ROLE_O_BIAS] = "attn_output.bias",
    [ROLE_Q_NORM] = "attn_q_norm.weight",
    [ROLE_K_NORM] = "attn_k_norm.weight",
    [ROLE_SINKS] = "attn_sinks.weight",
    [ROLE_FFN_NORM] = "ffn_norm.weight",
    [ROLE_GATE] = "ffn_gate.weight",
    [ROLE_UP] = "ffn_up.weight",
    [ROLE_DOWN] = "ffn_down.weight",
    [ROLE_ROUTER] = "ffn_gate_inp.weight",
    [ROLE_ROUTER_BIAS] = "ffn_gate_inp.bias",
};
static const char *const expert_names[EXPERT_ROLES] = {
    "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight",
    "ffn_gate_exps.bias",   "ffn_up_exps.bias",   "ffn_down_exps.bias",
};

static void tensor_name(const struct model *m, enum role role, int layer, char out[TENSOR_MAX_NAME])
{
    const char *name = role_per_expert(m, role) ? expert_names[role - ROLE_GATE] : names[role];
    if (role == ROLE_FFN_NORM && m->config.family == FAMILY_GPT_OSS) name = "post_attention_norm.weight";
    if (role_is_shared(role)) snprintf(out, TENSOR_MAX_NAME, "%s", name);
    else snprintf(out, TENSOR_MAX_NAME, "blk.%d.%s", layer, name);
}

/* Where a tensor holds several roles, one after the other along its rows: the name, the rows of all, where this one's
 * begin. False if the role occurs in no such form. */
static bool merged_name(const struct model *m, enum role role, int layer, char out[TENSOR_MAX_NAME], int64_t *all,
                        int64_t *begin)
{
    const struct model_config *c = &m->config;
    int64_t q = (int64_t)c->n_heads * c->d_head, kv = (int64_t)c->n_kv_heads * c->d_head;
    const char *name;
    if ((role >= ROLE_Q && role <= ROLE_V) || (role >= ROLE_Q_BIAS && role <= ROLE_V_BIAS)) {
        int i = (int)role - (role >= ROLE_Q_BIAS ? ROLE_Q_BIAS : ROLE_Q);
        name = role >= ROLE_Q_BIAS ? "attn_qkv.bias" : "attn_qkv.weight";
        *all = q + 2 * kv;
        *begin = i == 0 ? 0 : i == 1 ? q : q + kv;
    } else if (c->n_experts && (role == ROLE_GATE || role == ROLE_UP)) {
        name = "ffn_gate_up_exps.weight";
        *all = 2 * (int64_t)c->d_ff;
        *begin = role == ROLE_UP ? c->d_ff : 0;
    } else {
        return false;
    }
    snprintf(out, TENSOR_MAX_NAME, "blk.%d.%s", layer, name);
    return true;
}

static int bind(struct model *m, enum role role, int layer, enum need need, void *with, struct err *e)
{
    (void)with;
    char name[TENSOR_MAX_NAME], merged[TENSOR_MAX_NAME];
    int64_t rows, cols, all, begin = 0;
    role_shape(&m->config, role, &rows, &cols);
    all = rows;
    tensor_name(m, role, layer, name);
    struct tensor *t = tensors_find(&m->tensors, name);
    if (!t && merged_name(m, role, layer, merged, &all, &begin)) t = tensors_find(&m->tensors, merged);
    if (!t && need == NEED_MUST) return err_set(e, ERR_INPUT, "tensor %s is missing", name);
    if (!t) return OK;
    if (role_is_shared(role) && cols > 1 && t->n_dims == 2 && t->dims[0] > rows)
        all = t->dims[0]; /* padded vocabulary */
    int experts = role_per_expert(m, role) ? m->config.n_experts : 1;
    struct dmat first;
    if (cols == 1) TRY(model_vector(m, t, experts, all, &first, e));
    else TRY(model_matrix(m, t, experts, all, cols, &first, e));
    for (int x = 0; x < experts; x++) {
        struct dmat whole = first;
        whole.data += (size_t)x * (size_t)all * first.row_stride;
        *role_slot(m, role, layer, x) = dmat_rows(&whole, begin, begin + rows);
    }
    return OK;
}

static int check_left_over(const struct model *m, struct err *e)
{
    for (size_t i = 0; i < m->tensors.n; i++) {
        const struct tensor *t = &m->tensors.items[i];
        if (!t->used)
            return err_set(e, ERR_UNSUPPORTED,
                           "tensor %.*s is none that a model of architecture %s with %d layers is known "
                           "to have",
                           (int)t->name.len, t->name.ptr, m->arch, m->config.n_layers);
    }
    return OK;
}

/* The type that holds most of the layers' bytes speaks for the file. */
static const char *main_type(const struct model *m)
{
    size_t bytes[DT_COUNT] = {0};
    int best = DT_NONE;
    for (size_t i = 0; i < m->tensors.n; i++) {
        const struct tensor *t = &m->tensors.items[i];
        if (span_starts(t->name, "blk.")) bytes[t->type] += t->bytes;
    }
    for (int i = 1; i < DT_COUNT; i++)
        if (bytes[i] > bytes[best]) best = i;
    return best == DT_F32 || best == DT_F16 || best == DT_BF16 ? "none" : dtype_infos[best].name;
}

/* ------------------------------------------------------------------------------------------------ files */

static int parse_part(struct model *m, size_t i, const char *path, struct gguf *g, struct err *e)
{
    TRY(fmap_open(&m->maps[i], path, e));
    m->n_maps = i + 1;
    size_t first = m->tensors.n;
    TRY(gguf_parse(g, &m->tensors, m->maps[i].data, m->maps[i].len, m->maps[i].path, &m->arena, e));
    for (size_t k = first; k < m->tensors.n; k++) m->tensors.items[k].map = &m->maps[i];
    return OK;
}

/* "dir/name-00002-of-00003.gguf" and 3 give "dir/name" in stem; false for any other name. */
static bool split_stem(const char *path, int64_t count, struct span *stem)
{
    char tail[32];
    struct span p = span_of(path);
    snprintf(tail, sizeof tail, "-of-%05" PRId64 ".gguf", count);
    if (!span_ends(p, tail) || p.len < strlen(tail) + 6) return false;
    *stem = (struct span){p.ptr, p.len - strlen(tail) - 6};
    return p.ptr[stem->len] == '-' && strspn(p.ptr + stem->len + 1, "0123456789") == 5;
}

static int part_number(const struct gguf *g, int64_t want, const char *path, struct err *e)
{
    int64_t no = -1;
    int rc = gguf_int(g, "split.no", 0, 65535, &no, e);
    if (rc == OK && no != want)
        rc = err_set(e, ERR_INPUT, "split.no is %" PRId64 ", its name and place make it %" PRId64, no, want);
    return rc < 0 ? err_prefix(e, "%s", path) : OK;
}

/* Opens all parts of the split file that m->path is one of; *g is the first part's, which holds the metadata. */
static int open_parts(struct model *m, int64_t count, struct gguf *g, struct err *e)
{
    struct span stem;
    if (!split_stem(m->path, count, &stem))
        return err_set(e, ERR_INPUT,
                       "%s: is one of %" PRId64 " parts, but is not named NAME-00001-of-%05" PRId64
                       ".gguf, so the others cannot be found",
                       m->path, count, count);
    tensors_free(&m->tensors);
    fmap_close(&m->maps[0]);
    free(m->maps);
    m->maps = NULL;
    m->n_maps = 0;
    TRY(mem_new(&m->maps, (size_t)count * sizeof *m->maps, e));
    int64_t tensors = -1;
    for (int64_t i = 0; i < count; i++) {
        char path[PATH_MAX];
        struct gguf part, *p = i ? &part : g;
        int n = snprintf(path, sizeof path, "%.*s-%05" PRId64 "-of-%05" PRId64 ".gguf", (int)stem.len, stem.ptr,
                         i + 1, count);
        if (n < 0 || (size_t)n >= sizeof path)
            return err_set(e, ERR_INPUT, "%s: the path is longer than %d bytes", m->path, PATH_MAX - 1);
        if (!file_exists(path))
            return err_set(e, ERR_INPUT, "%s: part %" PRId64 " of %" PRId64 " is missing", path, i + 1, count);
        TRY(parse_part(m, (size_t)i, path, p, e));
        TRY(part_number(p, i, path, e));
    }
    TRY(gguf_int(g, "split.tensors.count", 0, INT64_MAX, &tensors, e));
    if (tensors >= 0 && (size_t)tensors != m->tensors.n)
        return err_set(e, ERR_INPUT,
                       "%s: split.tensors.count is %" PRId64 ", but the %" PRId64 " parts hold %zu tensors", m->path,
                       tensors, count, m->tensors.n);
    return OK;
}

static int build(struct model *m, const struct gguf *g, struct err *e)
{
    struct span name = {0};
    TRY(tensors_index(&m->tensors, e));
    TRY(gguf_vocab(&m->vocab, g, &m->arena, e));
    TRY(gguf_config(m, g, e));
    m->qkv_bias = m->config.family == FAMILY_QWEN2 || m->config.family == FAMILY_GPT_OSS ? NEED_MUST : NEED_MAY;
    m->o_bias = m->config.family == FAMILY_GPT_OSS ? NEED_MUST : NEED_MAY;
    TRY(model_bind(m, bind, NULL, e));
    TRY(check_left_over(m, e));
    m->quantization = main_type(m);
    TRY(gguf_string(g, "general.name", &name, e));
    if (!name.len) return OK;
    m->name = arena_str(&m->arena, name);
    return m->name ? OK : err_set(e, ERR_NOMEM, "out of memory");
}

int gguf_open(struct model *m, struct err *e)
{
    struct gguf g;
    int64_t parts = 1;
    m->container = "gguf";
    TRY(mem_new(&m->maps, sizeof *m->maps, e));
    TRY(parse_part(m, 0, m->path, &g, e));
    int rc = gguf_int(&g, "split.count", 0, 65535, &parts, e);
    if (rc == OK && parts > 1) TRY(open_parts(m, parts, &g, e));
    if (rc == OK) rc = build(m, &g, e);
    return rc < 0 ? err_prefix(e, "%s", m->path) : OK;
}
