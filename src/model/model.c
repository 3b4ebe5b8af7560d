/* model: the door of the room. Opens a file or a directory through the container that it is, binds the family's roles
 * to tensors, and answers questions about them. What differs between families is data here: which roles a layer has,
 * and the shape of each from the configuration. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

const char *const family_names[FAMILY_COUNT] = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"};

const char *const role_names[ROLE_COUNT] = {
    "embedding", "output norm", "head",   "attention norm", "q",       "k",         "v",      "o",
    "q bias",    "k bias",      "v bias", "o bias",         "q norm",  "k norm",    "sinks",  "ffn norm",
    "gate",      "up",          "down",   "gate bias",      "up bias", "down bias", "router", "router bias",
};

/* ------------------------------------------------------------------------------------------------ configuration */

bool family_has_experts(enum family f) { return f == FAMILY_QWEN3_MOE || f == FAMILY_GPT_OSS; }

int config_check(const struct model_config *c, struct err *e)
{
    if (c->n_heads % c->n_kv_heads)
        return err_set(e, ERR_INPUT, "%d query heads do not divide among %d key heads", c->n_heads, c->n_kv_heads);
    if (c->d_head % 2 || c->d_head > MODEL_MAX_HEAD)
        return err_set(e, ERR_UNSUPPORTED, "head width %d, known are even widths up to %d", c->d_head,
                       MODEL_MAX_HEAD);
    if (!(c->rms_eps > 0 && c->rms_eps < 1))
        return err_set(e, ERR_INPUT, "RMS norm epsilon %g, expected a number between 0 and 1", (double)c->rms_eps);
    if (c->n_experts_used > c->n_experts)
        return err_set(e, ERR_INPUT, "%d experts a token, but there are %d", c->n_experts_used, c->n_experts);
    if (family_has_experts(c->family) != (c->n_experts > 0))
        return err_set(e, ERR_UNSUPPORTED,
                       "%d experts in a model of family %s: experts are known for qwen3_moe and "
                       "gpt_oss, and those must have them",
                       c->n_experts, family_names[c->family]);
    return OK;
}

int config_add_stop(struct model_config *c, int64_t id, struct err *e)
{
    if (id < 0 || id >= c->n_vocab)
        return err_set(e, ERR_INPUT, "end token %" PRId64 " is outside the vocabulary of %d", id, c->n_vocab);
    for (int i = 0; i < c->n_stop; i++)
        if (c->stop[i] == id) return OK;
    if (c->n_stop == MODEL_MAX_STOP) return err_set(e, ERR_UNSUPPORTED, "more than %d end tokens", MODEL_MAX_STOP);
    c->stop[c->n_stop++] = (int32_t)id;
    return OK;
}

int config_windows(struct model_config *c, int32_t window, int32_t **out, struct arena *a, struct err *e)
{
    int32_t *w = arena_alloc(a, (size_t)c->n_layers * sizeof *w);
    if (!w) return err_set(e, ERR_NOMEM, "out of memory for %d layers", c->n_layers);
    for (int i = 0; i < c->n_layers; i++) w[i] = window;
    c->window = w;
    *out = w;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ roles */

void role_shape(const struct model_config *c, enum role role, int64_t *rows, int64_t *cols)
{
    int64_t d = c->d_model, q = (int64_t)c->n_heads * c->d_head, kv = (int64_t)c->n_kv_heads * c->d_head;
    const int64_t shapes[ROLE_COUNT][2] = {
        [ROLE_EMBED] = {c->n_vocab, d},
        [ROLE_OUT_NORM] = {d, 1},
        [ROLE_HEAD] = {c->n_vocab, d},
        [ROLE_ATTN_NORM] = {d, 1},
        [ROLE_Q] = {q, d},
        [ROLE_K] = {kv, d},
        [ROLE_V] = {kv, d},
        [ROLE_O] = {d, q},
        [ROLE_Q_BIAS] = {q, 1},
        [ROLE_K_BIAS] = {kv, 1},
        [ROLE_V_BIAS] = {kv, 1},
        [ROLE_O_BIAS] = {d, 1},
        [ROLE_Q_NORM] = {c->d_head, 1},
        [ROLE_K_NORM] = {c->d_head, 1},
        [ROLE_SINKS] = {c->n_heads, 1},
        [ROLE_FFN_NORM] = {d, 1},
        [ROLE_GATE] = {c->d_ff, d},
        [ROLE_UP] = {c->d_ff, d},
        [ROLE_DOWN] = {d, c->d_ff},
        [ROLE_GATE_BIAS] = {c->d_ff, 1},
        [ROLE_UP_BIAS] = {c->d_ff, 1},
        [ROLE_DOWN_BIAS] = {d, 1},
        [ROLE_ROUTER] = {c->n_experts, d},
        [ROLE_ROUTER_BIAS] = {c->n_experts, 1},
    };
    *rows = shapes[role][0];
    *cols = shapes[role][1];
}

bool role_per_expert(const struct model *m, enum role role)
{
    return m->config.n_experts && role >= ROLE_GATE && role <= ROLE_DOWN_BIAS;
}

static enum need role_need(const struct model *m, enum role role)
{
    enum family f = m->config.family;
    switch (role) {
    case ROLE_Q_BIAS:
    case ROLE_K_BIAS:
    case ROLE_V_BIAS: return m->qkv_bias;
    case ROLE_O_BIAS: return m->o_bias;
    case ROLE_Q_NORM:
    case ROLE_K_NORM: return f == FAMILY_QWEN3 || f == FAMILY_QWEN3_MOE ? NEED_MUST : NEED_NEVER;
    case ROLE_ROUTER: return family_has_experts(f) ? NEED_MUST : NEED_NEVER;
    case ROLE_SINKS:
    case ROLE_GATE_BIAS:
    case ROLE_UP_BIAS:
    case ROLE_DOWN_BIAS:
    case ROLE_ROUTER_BIAS: return f == FAMILY_GPT_OSS ? NEED_MUST : NEED_NEVER;
    default: return NEED_MUST;
    }
}

struct dmat *role_slot(const struct model *m, enum role role, int layer, int expert)
{
    if (role_is_shared(role)) return &m->shared[role];
    if (role_per_expert(m, role)) return &m->experts[layer][expert * EXPERT_ROLES + (int)(role - ROLE_GATE)];
    return &m->layers[layer * ROLE_COUNT + (int)role];
}

int model_bind(struct model *m, bind_role *bind, void *with, struct err *e)
{
    const struct model_config *c = &m->config;
    size_t layers = (size_t)c->n_layers;
    m->shared = arena_alloc(&m->arena, SHARED_ROLES * sizeof *m->shared);
    m->layers = arena_alloc(&m->arena, layers * ROLE_COUNT * sizeof *m->layers);
    m->experts = arena_alloc(&m->arena, layers * sizeof *m->experts);
    if (!m->shared || !m->layers || !m->experts)
        return err_set(e, ERR_NOMEM, "out of memory for the table of %d layers", c->n_layers);
    TRY(bind(m, ROLE_EMBED, 0, NEED_MUST, with, e));
    TRY(bind(m, ROLE_OUT_NORM, 0, NEED_MUST, with, e));
    TRY(bind(m, ROLE_HEAD, 0, NEED_MAY, with, e));
    m->config.tied = m->shared[ROLE_HEAD].type == DT_NONE;
    if (m->config.tied) m->shared[ROLE_HEAD] = m->shared[ROLE_EMBED];
    for (int i = 0; i < c->n_layers; i++) {
        /* A layer's table only after the layer before was found: a configuration alone cannot make this large. */
        if (c->n_experts) {
            m->experts[i] = arena_alloc(&m->arena, (size_t)c->n_experts * EXPERT_ROLES * sizeof *m->experts[i]);
            if (!m->experts[i])
                return err_set(e, ERR_NOMEM, "out of memory for the table of %d experts", c->n_experts);
        }
        for (enum role role = ROLE_ATTN_NORM; role < ROLE_COUNT; role++) {
            enum need need = role_need(m, role);
            if (need != NEED_NEVER) TRY(bind(m, role, i, need, with, e));
        }
    }
    return OK;
}

void model_use(struct model *m, struct tensor *t)
{
    if (!t->used) m->bytes += t->bytes;
    t->used = true;
}

int model_matrix(struct model *m, struct tensor *t, int64_t leading, int64_t rows, int64_t cols, struct dmat *out,
                 struct err *e)
{
    if (t->type == DT_NONE)
        return err_set(e, ERR_UNSUPPORTED, "tensor %.*s has type %.*s, known are %s", (int)t->name.len, t->name.ptr,
                       (int)t->type_name.len, t->type_name.ptr,
                       strcmp(m->container, "gguf") == 0
                           ? "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4"
                           : "F32, F16, BF16, F8_E4M3, and U8 for NVFP4 and MXFP4");
    const int64_t dims[3] = {leading, rows, cols};
    int skip = leading == 1;
    TRY(tensor_check_shape(t, 3 - skip, dims + skip, e));
    *out = (struct dmat){.type = t->type,
                         .rows = rows,
                         .cols = cols,
                         .data = t->data,
                         .row_stride = dtype_row_bytes(t->type, cols),
                         .map = t->map};
    model_use(m, t);
    return OK;
}

int model_vector(struct model *m, struct tensor *t, int64_t leading, int64_t n, struct dmat *out, struct err *e)
{
    if (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16)
        return err_set(e, ERR_UNSUPPORTED, "tensor %.*s has type %.*s, for a vector F32, F16 and BF16 are known",
                       (int)t->name.len, t->name.ptr, (int)t->type_name.len, t->type_name.ptr);
    const int64_t dims[2] = {leading, n};
    int skip = leading == 1;
    TRY(tensor_check_shape(t, 2 - skip, dims + skip, e));
    *out = (struct dmat){.type = t->type,
                         .rows = n,
                         .cols = 1,
                         .data = t->data,
                         .row_stride = dtype_row_bytes(t->type, 1),
                         .map = t->map};
    model_use(m, t);
    return OK;
}

/* ------------------------------------------------------------------------------------------------ open, close */

static int name_of(struct model *m, const char *path, struct err *e)
{
    char *full = realpath(path, NULL);
    if (!full) return err_set(e, ERR_INPUT, "%s: no such file or directory", path);
    const char *slash = strrchr(full, '/');
    m->path = arena_str(&m->arena, span_of(path));
    m->name = arena_str(&m->arena, span_of(slash && slash[1] ? slash + 1 : full));
    free(full);
    return m->path && m->name ? OK : err_set(e, ERR_NOMEM, "out of memory");
}

int model_open(struct model **out, const char *path, struct err *e)
{
    struct model *m;
    TRY(mem_new(&m, sizeof *m, e));
    m->arch = m->quantization = m->container = "";
    m->vocab = (struct model_vocab){.bos = -1, .eos = -1, .unk = -1, .add_bos = -1, .add_space_prefix = -1};
    int rc = name_of(m, path, e);
    if (rc == OK) rc = file_is_dir(path) ? hf_open(m, e) : gguf_open(m, e);
    if (rc < 0) {
        model_close(&m);
        return rc;
    }
    *out = m;
    return OK;
}

void model_close(struct model **m)
{
    if (!*m) return;
    for (size_t i = 0; i < (*m)->n_maps; i++) fmap_close(&(*m)->maps[i]);
    free((*m)->maps);
    tensors_free(&(*m)->tensors);
    arena_free(&(*m)->arena);
    free(*m);
    *m = NULL;
}

/* ------------------------------------------------------------------------------------------------ questions */

void model_drop_pages(const struct model *m)
{
    for (size_t i = 0; i < m->n_maps; i++) fmap_drop(&m->maps[i], m->maps[i].data, m->maps[i].len);
}

const struct model_config *model_config(const struct model *m) { return &m->config; }
const char *model_path(const struct model *m) { return m->path; }
const char *model_name(const struct model *m) { return m->name; }
const char *model_container(const struct model *m) { return m->container; }
const char *model_arch(const struct model *m) { return m->arch; }
const char *model_quantization(const struct model *m) { return m->quantization; }
size_t model_bytes(const struct model *m) { return m->bytes; }
const struct model_vocab *model_vocab(const struct model *m) { return &m->vocab; }

bool model_has(const struct model *m, enum role role, int layer, int expert)
{
    if (!role_is_shared(role) && (layer < 0 || layer >= m->config.n_layers)) return false;
    if (role_per_expert(m, role) && (expert < 0 || expert >= m->config.n_experts)) return false;
    return role_slot(m, role, layer, expert)->type != DT_NONE;
}

struct dmat model_mat(const struct model *m, enum role role, int layer, int expert)
{
    assert(model_has(m, role, layer, expert));
    return *role_slot(m, role, layer, expert);
}

void model_vec(const struct model *m, enum role role, int layer, int expert, int64_t r0, int64_t r1, float *out)
{
    struct dmat v = model_mat(m, role, layer, expert);
    assert(v.cols == 1 && r0 >= 0 && r0 <= r1 && r1 <= v.rows);
    for (int64_t r = r0; r < r1; r++) dmat_row(&v, r, out++);
}

/* ------------------------------------------------------------------------------------------------ fingerprint */

#define HASH(h, v) hash_bytes(h, &(v), sizeof(v))

static uint64_t hash_config(const struct model_config *c)
{
    const int32_t sizes[] = {
        (int32_t)c->family,
        c->n_layers,
        c->d_model,
        c->n_heads,
        c->n_kv_heads,
        c->d_head,
        c->d_ff,
        c->n_vocab,
        c->n_experts,
        c->n_experts_used,
        c->ctx_train,
        c->rope_interleaved,
        (int32_t)c->activation,
        (int32_t)c->router,
        c->tied,
        c->bos,
        c->n_stop,
    };
    const float scalars[] = {c->rms_eps, c->rope_mscale, c->swiglu_limit};
    uint64_t h = HASH(HASH(HASH_START, sizes), scalars);
    h = hash_bytes(h, c->stop, (size_t)c->n_stop * sizeof *c->stop);
    h = hash_bytes(h, c->rope_inv_freq, (size_t)c->d_head / 2 * sizeof *c->rope_inv_freq);
    return hash_bytes(h, c->window, (size_t)c->n_layers * sizeof *c->window);
}

/* The table alone cannot tell a model from its fine-tuned sister, so each layer gives a few bytes of its queries. */
static uint64_t hash_sample(uint64_t h, const struct dmat *w)
{
    size_t n = dtype_row_bytes(w->type, w->cols);
    return hash_bytes(h, w->data + (size_t)(w->rows / 2) * w->row_stride, n < 64 ? n : 64);
}

uint64_t model_fingerprint(const struct model *m)
{
    uint64_t h = hash_config(&m->config), table = 0;
    for (size_t i = 0; i < m->tensors.n; i++) {
        const struct tensor *t = &m->tensors.items[i];
        if (!t->used) continue;
        uint64_t one = hash_bytes(HASH_START, t->name.ptr, t->name.len);
        one = hash_bytes(one, t->type_name.ptr, t->type_name.len);
        table +=
            hash_bytes(one, t->dims, (size_t)t->n_dims * sizeof *t->dims); /* a sum: order and files do not matter */
    }
    h = HASH(h, table);
    for (int i = 0; i < m->config.n_layers; i++) h = hash_sample(h, role_slot(m, ROLE_Q, i, 0));
    return h;
}
