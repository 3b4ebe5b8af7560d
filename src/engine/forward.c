/* forward.c: the transformer, once, for every family and every backend. Families differ by what their configuration and
 * their weights hold: a NULL norm, bias or sink is simply not there. Nothing here looks at a number in mid-step. */
#include "engine_priv.h"

static void attention(struct engine *en, const struct layer *w, int l)
{
    const struct model_config *c = &en->config;
    const struct backend_ops *op = en->be->ops;
    int T = en->step.batch.T, Dh = c->d_head;
    int H = en->rank.heads.end - en->rank.heads.begin, Hk = en->rank.kv_heads.end - en->rank.kv_heads.begin;

    /* q, k, v = rms_norm(x) Wqkv^T + b */
    op->linear(en->be, &(struct linear_args){
        .out = en->qkv, .x = en->x, .norm = w->attn_norm, .eps = c->rms_eps, .T = T, .w = w->qkv});
    /* norm of heads, RoPE; k and v into the pages */
    op->rope_kv(en->be, &(struct rope_kv_args){
        .qkv = en->qkv, .q_norm = w->q_norm, .k_norm = w->k_norm, .inv_freq = en->w.inv_freq, .eps = c->rms_eps,
        .mscale = c->rope_mscale, .interleaved = c->rope_interleaved, .H = H, .Hk = Hk, .Dh = Dh, .layer = l,
        .kv = en->kv});
    /* softmax(q k^T / sqrt(Dh)) v */
    op->attend(en->be, &(struct attend_args){
        .out = en->att, .qkv = en->qkv, .sinks = w->sinks, .scale = 1.0f / __builtin_sqrtf((float)Dh), .H = H, .Hk = Hk,
        .Dh = Dh, .layer = l, .window = c->window[en->rank.layers.begin + l], .kv = en->kv});
    /* x += Wo a, summed over the ranks that hold the heads */
    op->linear(en->be, &(struct linear_args){
        .out = en->x, .x = en->att, .residual = en->rank.adds_residual ? en->x : NULL, .T = T, .w = w->o});
    en->comm->ops->sum(en->comm, en->x, (size_t)T * (size_t)c->d_model);
}

static void ffn(struct engine *en, const struct layer *w)
{
    const struct model_config *c = &en->config;
    const struct backend_ops *op = en->be->ops;
    int T = en->step.batch.T;
    const float *residual = en->rank.adds_residual ? en->x : NULL;
    float limit = c->activation == ACT_SWIGLU_OAI ? c->swiglu_limit : 0;

    if (c->n_experts) {
        /* y = x + sum of the chosen experts */
        op->moe(en->be, &(struct moe_args){
            .out = en->y, .x = en->x, .residual = residual, .norm = w->ffn_norm, .eps = c->rms_eps,
            .swiglu_limit = limit, .T = T, .E = c->n_experts, .k = c->n_experts_used, .kind = (int)c->router,
            .router = w->router, .gate_up = (const struct bweight *const *)w->exp_gate_up,
            .down = (const struct bweight *const *)w->exp_down});
    } else {
        /* y = x + Wdown act(Wgate x', Wup x'), x' = rms_norm(x) */
        op->gate(en->be, &(struct gate_args){
            .out = en->h, .x = en->x, .norm = w->ffn_norm, .eps = c->rms_eps, .swiglu_limit = limit, .T = T,
            .w = w->gate_up});
        op->linear(en->be, &(struct linear_args){.out = en->y, .x = en->h, .residual = residual, .T = T, .w = w->down});
    }
    en->comm->ops->sum(en->comm, en->y, (size_t)T * (size_t)c->d_model);
    float *t = en->x;
    en->x = en->y;
    en->y = t;
}

void forward(struct engine *en)
{
    /* Layers swap the two; each step begins with the same one, so that a backend can know a step again. */
    if ((uintptr_t)en->x > (uintptr_t)en->y) {
        float *t = en->x;
        en->x = en->y;
        en->y = t;
    }
    en->be->ops->begin(en->be, &en->step.batch);
    if (en->rank.embeds) en->be->ops->embed(en->be, en->x, en->w.embed);
    for (int l = 0; l < en->w.n_layers; l++) {
        attention(en, &en->w.layers[l], l);
        ffn(en, &en->w.layers[l]);
    }
}

static void head(struct engine *en, const int32_t *rows, int n)
{
    const struct model_config *c = &en->config;
    const struct backend_ops *op = en->be->ops;
    op->gather(en->be, en->last, en->x, c->d_model, rows, n);
    op->linear(en->be, &(struct linear_args){
        .out = en->logits, .x = en->last, .norm = en->w.out_norm, .eps = c->rms_eps, .T = n, .w = en->w.head});
}

int forward_logits(struct engine *en, const int32_t *rows, int n, struct err *e)
{
    head(en, rows, n);
    return en->be->ops->download(en->be, en->host_logits, en->logits, (size_t)n * (size_t)en->config.n_vocab * sizeof(float), e);
}

int forward_best(struct engine *en, const int32_t *rows, int n, struct err *e)
{
    head(en, rows, n);
    return en->be->ops->best(en->be, en->logits, n, en->config.n_vocab, en->best, e);
}
