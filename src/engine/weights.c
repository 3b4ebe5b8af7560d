/* weights.c: from a checkpoint's roles to the packed weights of one rank. One walk visits every weight in load order;
 * a visitor either counts bytes or packs, so the plan and the load cannot disagree. Every slice comes from plan/. */
#include <stdlib.h>
#include <string.h>

#include "engine_priv.h"

enum { MAX_PARTS = 3 };

/* A product's weight before packing: matrices stacked along their rows, and the roles of their biases. */
struct spec {
    struct dmat parts[MAX_PARTS];
    int n_parts;
    enum role role[MAX_PARTS], bias[MAX_PARTS]; /* ROLE_COUNT: no bias */
    int layer, expert;
};

struct walk {
    const struct model *m;
    const struct plan_rank *r;
    struct weights *w;
    int (*weight)(struct walk *k, const struct spec *s, struct bweight **slot);
    int (*vector)(struct walk *k, enum role role, int layer, float **slot);
    /* counting */
    const struct backend *be;
    size_t bytes;
    /* loading */
    struct backend *dev;
    struct progress progress;
    struct err *e;
};

static void spec_add(struct spec *s, const struct walk *k, enum role role, enum role bias)
{
    const struct model_config *c = model_config(k->m);
    s->parts[s->n_parts] = plan_slice(c, k->r, role, model_mat(k->m, role, s->layer, s->expert));
    s->role[s->n_parts] = role;
    s->bias[s->n_parts] = bias != ROLE_COUNT && model_has(k->m, bias, s->layer, s->expert) ? bias : ROLE_COUNT;
    s->n_parts++;
}

static int visit(struct walk *k, int layer, int expert, int n, const enum role *roles, struct bweight **slot)
{
    /* The bias of a product's outputs; one that is added to a partial sum belongs to one rank only. */
    static const enum role bias_of[ROLE_COUNT] = {
        [ROLE_EMBED] = ROLE_COUNT, [ROLE_HEAD] = ROLE_COUNT, [ROLE_Q] = ROLE_Q_BIAS, [ROLE_K] = ROLE_K_BIAS,
        [ROLE_V] = ROLE_V_BIAS, [ROLE_O] = ROLE_O_BIAS, [ROLE_GATE] = ROLE_GATE_BIAS, [ROLE_UP] = ROLE_UP_BIAS,
        [ROLE_DOWN] = ROLE_DOWN_BIAS, [ROLE_ROUTER] = ROLE_ROUTER_BIAS,
    };
    struct spec s = {.layer = layer, .expert = expert};
    for (int i = 0; i < n; i++) {
        bool partial = roles[i] == ROLE_O || roles[i] == ROLE_DOWN;
        spec_add(&s, k, roles[i], partial && !k->r->adds_residual ? ROLE_COUNT : bias_of[roles[i]]);
    }
    return k->weight(k, &s, slot);
}

#define VISIT(k, layer, expert, slot, ...)                                                                           \
    visit(k, layer, expert, (int)COUNT_OF(((enum role[]){__VA_ARGS__})), (const enum role[]){__VA_ARGS__}, slot)

static int walk_layer(struct walk *k, int layer, struct layer *l)
{
    const struct model_config *c = model_config(k->m);
    TRY(k->vector(k, ROLE_ATTN_NORM, layer, &l->attn_norm));
    TRY(VISIT(k, layer, 0, &l->qkv, ROLE_Q, ROLE_K, ROLE_V));
    TRY(k->vector(k, ROLE_Q_NORM, layer, &l->q_norm));
    TRY(k->vector(k, ROLE_K_NORM, layer, &l->k_norm));
    TRY(k->vector(k, ROLE_SINKS, layer, &l->sinks));
    TRY(VISIT(k, layer, 0, &l->o, ROLE_O));
    TRY(k->vector(k, ROLE_FFN_NORM, layer, &l->ffn_norm));
    if (!c->n_experts) {
        TRY(VISIT(k, layer, 0, &l->gate_up, ROLE_GATE, ROLE_UP));
        return VISIT(k, layer, 0, &l->down, ROLE_DOWN);
    }
    TRY(VISIT(k, layer, 0, &l->router, ROLE_ROUTER));
    for (int x = k->r->experts.begin; x < k->r->experts.end; x++) {
        TRY(VISIT(k, layer, x, k->w ? &l->exp_gate_up[x] : NULL, ROLE_GATE, ROLE_UP));
        TRY(VISIT(k, layer, x, k->w ? &l->exp_down[x] : NULL, ROLE_DOWN));
    }
    return OK;
}

static int walk_all(struct walk *k)
{
    const struct model_config *c = model_config(k->m);
    /* Counting fills no slot, but the walk takes their addresses. */
    struct layer no_layer = {0};
    struct weights none = {0}, *w = k->w ? k->w : &none;
    bool shared = k->r->embeds && k->r->heads_out && c->tied;
    if (k->r->embeds) TRY(VISIT(k, 0, 0, &w->embed, ROLE_EMBED));
    for (int i = k->r->layers.begin; i < k->r->layers.end; i++)
        TRY(walk_layer(k, i, k->w ? &w->layers[i - k->r->layers.begin] : &no_layer));
    if (!k->r->heads_out) return OK;
    TRY(k->vector(k, ROLE_OUT_NORM, 0, &w->out_norm));
    if (!shared) return VISIT(k, 0, 0, &w->head, ROLE_HEAD);
    w->head = w->embed;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ counting */

static int count_weight(struct walk *k, const struct spec *s, struct bweight **slot)
{
    (void)slot;
    k->bytes += k->be->ops->weight_bytes(k->be, s->parts, s->n_parts);
    for (int i = 0; i < s->n_parts; i++)
        if (s->bias[i] != ROLE_COUNT) k->bytes += (size_t)s->parts[i].rows * sizeof(float);
    return OK;
}

static int count_vector(struct walk *k, enum role role, int layer, float **slot)
{
    (void)slot;
    if (!model_has(k->m, role, layer, 0)) return OK;
    struct range r = plan_slice_vec(model_config(k->m), k->r, role);
    k->bytes += (size_t)(r.end - r.begin) * sizeof(float);
    return OK;
}

size_t weights_bytes(const struct backend *be, const struct model *m, const struct plan_rank *r)
{
    struct walk k = {.m = m, .r = r, .be = be, .weight = count_weight, .vector = count_vector};
    return walk_all(&k) < 0 ? 0 : k.bytes; /* counting does not fail */
}

/* ------------------------------------------------------------------------------------------------ loading */

static int load_weight(struct walk *k, const struct spec *s, struct bweight **slot)
{
    const struct model_config *c = model_config(k->m);
    int64_t rows = 0, at = 0;
    size_t bytes = 0;
    float *bias = NULL;
    bool any = false;
    for (int i = 0; i < s->n_parts; i++) {
        rows += s->parts[i].rows;
        bytes += dmat_bytes(&s->parts[i]);
        any |= s->bias[i] != ROLE_COUNT;
    }
    if (any) TRY(mem_new(&bias, (size_t)rows * sizeof *bias, k->e));
    for (int i = 0; i < s->n_parts && any; at += s->parts[i++].rows) {
        if (s->bias[i] == ROLE_COUNT) continue;
        struct range r = plan_slice_vec(c, k->r, s->bias[i]);
        model_vec(k->m, s->bias[i], s->layer, s->expert, r.begin, r.end, bias + at);
    }
    int rc = k->dev->ops->weight_new(k->dev, slot, s->parts, s->n_parts, bias, k->e);
    free(bias);
    if (rc < 0) return err_prefix(k->e, "loading %s of layer %d", role_names[s->role[0]], s->layer);
    progress_add(&k->progress, bytes);
    return OK;
}

static int load_floats(struct backend *be, const float *host, size_t n, float **slot, struct err *e)
{
    TRY(be->ops->alloc(be, slot, n * sizeof(float), e));
    be->ops->upload(be, *slot, host, n * sizeof(float));
    return OK;
}

static int load_vector(struct walk *k, enum role role, int layer, float **slot)
{
    if (!model_has(k->m, role, layer, 0)) return OK;
    struct range r = plan_slice_vec(model_config(k->m), k->r, role);
    size_t n = (size_t)(r.end - r.begin);
    float *v;
    TRY(mem_new(&v, n * sizeof *v, k->e));
    model_vec(k->m, role, layer, 0, r.begin, r.end, v);
    int rc = load_floats(k->dev, v, n, slot, k->e);
    free(v);
    return rc;
}

int weights_load(struct weights *w, struct backend *be, const struct model *m, const struct plan_rank *r, bool quiet,
                 struct err *e)
{
    const struct model_config *c = model_config(m);
    *w = (struct weights){.n_layers = r->layers.end - r->layers.begin, .n_experts = c->n_experts};
    w->layers = arena_alloc(&w->arena, (size_t)w->n_layers * sizeof *w->layers);
    if (!w->layers) return err_set(e, ERR_NOMEM, "out of memory for the table of %d layers", w->n_layers);
    for (int i = 0; i < w->n_layers && c->n_experts; i++) {
        size_t bytes = (size_t)c->n_experts * sizeof(struct bweight *);
        w->layers[i].exp_gate_up = arena_alloc(&w->arena, bytes);
        w->layers[i].exp_down = arena_alloc(&w->arena, bytes);
        if (!w->layers[i].exp_gate_up || !w->layers[i].exp_down)
            return err_set(e, ERR_NOMEM, "out of memory for the table of %d experts", c->n_experts);
    }
    struct walk k = {.m = m, .r = r, .w = w, .dev = be, .weight = load_weight, .vector = load_vector, .e = e};
    if (!quiet) progress_start(&k.progress, "loading", "B", model_bytes(m));
    int rc = walk_all(&k);
    if (!quiet) progress_end(&k.progress);
    TRY(rc);
    model_drop_pages(m);
    return load_floats(be, c->rope_inv_freq, (size_t)c->d_head / 2, &w->inv_freq, e);
}

void weights_free(struct weights *w, struct backend *be)
{
    int n_experts = w->n_experts;
    const struct backend_ops *op = be->ops;
    for (int i = 0; i < w->n_layers && w->layers; i++) {
        struct layer *l = &w->layers[i];
        float *vectors[] = {l->attn_norm, l->ffn_norm, l->q_norm, l->k_norm, l->sinks};
        struct bweight *products[] = {l->qkv, l->o, l->gate_up, l->down, l->router};
        for (size_t j = 0; j < COUNT_OF(vectors); j++) op->free(be, vectors[j]);
        for (size_t j = 0; j < COUNT_OF(products); j++) op->weight_free(be, products[j]);
        for (int x = 0; x < n_experts && l->exp_gate_up; x++) {
            op->weight_free(be, l->exp_gate_up[x]);
            op->weight_free(be, l->exp_down[x]);
        }
    }
    op->free(be, w->out_norm);
    op->free(be, w->inv_freq);
    if (w->head != w->embed) op->weight_free(be, w->head);
    op->weight_free(be, w->embed);
    arena_free(&w->arena);
    *w = (struct weights){0};
}
