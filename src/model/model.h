/* model: what a checkpoint is. Opens a GGUF file or a checkpoint directory, reads its configuration into one struct
 * that serves every family, and answers "which bytes are this matrix" by role. Nothing is converted or copied here:
 * matrices are views into read-only file maps.
 *
 * The caller holds one object, `struct model`; all spans, strings and matrices it hands out live as long as it does.
 * Dimension names, used in no other sense in the tree:
 *   T tokens in a batch   D model width   L layers   H query heads   Hk KV heads   Dh head width
 *   F FFN width (of one expert where there are experts)   E experts   V vocabulary rows */
#ifndef HEARTH_MODEL_H
#define HEARTH_MODEL_H

#include "base.h"
#include "dtype.h"

enum family { FAMILY_LLAMA, FAMILY_MISTRAL, FAMILY_QWEN2, FAMILY_QWEN3, FAMILY_QWEN3_MOE, FAMILY_GPT_OSS, FAMILY_COUNT };
extern const char *const family_names[FAMILY_COUNT]; /* "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss" */

/* h = act(gate, up):
 *   ACT_SILU        gate * sigmoid(gate) * up
 *   ACT_SWIGLU_OAI  g = min(gate, limit), u = clamp(up, -limit, limit): g * sigmoid(1.702 g) * (u + 1) */
enum activation { ACT_SILU, ACT_SWIGLU_OAI };

/* Expert weights of a token from its router logits z[E]:
 *   ROUTER_SOFTMAX_TOPK       softmax over E, keep the k largest (not renormalised)
 *   ROUTER_SOFTMAX_TOPK_NORM  the same, divided by the sum of the k kept
 *   ROUTER_TOPK_SOFTMAX       keep the k largest logits, softmax over those k
 * Ties go to the lower index. */
enum router { ROUTER_SOFTMAX_TOPK, ROUTER_SOFTMAX_TOPK_NORM, ROUTER_TOPK_SOFTMAX };

enum { MODEL_MAX_HEAD = 256, MODEL_MAX_STOP = 16 };

/* Sampling defaults that the checkpoint recommends (generation_config.json); negative: not stated. */
struct sampling_defaults {
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
};

struct model_config {
    enum family family;
    int32_t n_layers, d_model, n_heads, n_kv_heads, d_head, d_ff, n_vocab;
    int32_t n_experts, n_experts_used; /* 0: a dense FFN */
    int32_t ctx_train;                 /* positions the model was made for */
    float rms_eps;
    float rope_inv_freq[MODEL_MAX_HEAD / 2]; /* [Dh/2], every scaling rule applied: angle = position * inv_freq[i] */
    float rope_mscale;                       /* factor on cos and sin (YaRN), else 1 */
    bool rope_interleaved;                   /* pairs (2i, 2i+1) as GGUF's llama has them; else (i, i + Dh/2) */
    const int32_t *window;                   /* [L] keys a query sees, itself counted; 0: all */
    enum activation activation;
    float swiglu_limit;
    enum router router;
    bool tied;                       /* the head is the embedding */
    int32_t bos;                     /* -1: none stated */
    int32_t stop[MODEL_MAX_STOP];    /* ids that end an answer: config.json and generation_config.json together */
    int32_t n_stop;
    struct sampling_defaults sampling;
};

/* What a tensor is for. Matrices are W[rows = outputs, cols = inputs]; vectors are [n, 1]. */
enum role {
    ROLE_EMBED,    /* [V, D] */
    ROLE_OUT_NORM, /* [D, 1] */
    ROLE_HEAD,     /* [V, D]; tied models answer with the embedding */
    ROLE_ATTN_NORM, ROLE_Q, ROLE_K, ROLE_V, ROLE_O, /* [D,1] [H*Dh,D] [Hk*Dh,D] [Hk*Dh,D] [D,H*Dh] */
    ROLE_Q_BIAS, ROLE_K_BIAS, ROLE_V_BIAS, ROLE_O_BIAS,
    ROLE_Q_NORM, ROLE_K_NORM, /* [Dh, 1] */
    ROLE_SINKS,               /* [H, 1] */
    ROLE_FFN_NORM, ROLE_GATE, ROLE_UP, ROLE_DOWN, /* [D,1] [F,D] [F,D] [D,F]; per expert where there are experts */
    ROLE_GATE_BIAS, ROLE_UP_BIAS, ROLE_DOWN_BIAS, /* per expert */
    ROLE_ROUTER, ROLE_ROUTER_BIAS,                /* [E, D] [E, 1] */
    ROLE_COUNT
};
extern const char *const role_names[ROLE_COUNT];

struct model;

/* path: a .gguf file (any part of a split one) or a checkpoint directory. Every tensor that the family needs is found
 * and its shape and type checked before this returns; no weight is read. */
int model_open(struct model **out, const char *path, struct err *e) MUST_CHECK;
/* A model of a real shape with random weights and no file, for measuring. spec: SHAPE:FORMAT[:layers=N], such as
 * "llama-3.1-8b:q8_0" or "gpt-oss-20b:mxfp4:layers=4"; what is not known is refused with the list of what is. The
 * formats are those of dtype_infos. */
int model_synthetic(struct model **out, const char *spec, struct err *e) MUST_CHECK;
void model_close(struct model **m);

/* Takes the files' pages out of the resident set: the weights are packed, and what is asked for later is read again. */
void model_drop_pages(const struct model *m);

const struct model_config *model_config(const struct model *m);
const char *model_path(const struct model *m);
const char *model_name(const struct model *m);         /* general.name, or the directory's last part */
const char *model_container(const struct model *m);    /* "gguf" or "safetensors" */
const char *model_arch(const struct model *m);         /* as the checkpoint spells it: "gpt-oss", "MistralForCausalLM" */
const char *model_quantization(const struct model *m); /* "compressed-tensors fp8 per channel", ... or "none", for people */

/* True if the checkpoint has this tensor (layer 0.. L-1, expert 0..E-1; 0 where the role has none). */
bool model_has(const struct model *m, enum role role, int layer, int expert);
/* The matrix or vector; it must be there (assert model_has). */
struct dmat model_mat(const struct model *m, enum role role, int layer, int expert);
/* Elements [r0, r1) of a vector as float. */
void model_vec(const struct model *m, enum role role, int layer, int expert, int64_t r0, int64_t r1, float *out);
/* Bytes of all tensors that the family uses, as stored. */
size_t model_bytes(const struct model *m);
/* A hash over configuration, tensor table (names, types, shapes) and a few bytes of each layer: equal on two machines
 * that hold the same model, however it is cut into files, and different for another, fine-tunes included. */
uint64_t model_fingerprint(const struct model *m);

/* The vocabulary and template inside a GGUF file (container "gguf"; all empty otherwise). */
struct model_vocab {
    struct span model, pre, chat_template;
    const struct span *tokens;
    const int32_t *types;
    const float *scores;
    size_t n_tokens;
    const struct span *merges;
    size_t n_merges;
    int64_t bos, eos, unk;
    int add_bos, add_space_prefix; /* 1, 0, -1 absent */
};
const struct model_vocab *model_vocab(const struct model *m);

#endif
