/* cpu_moe.c: a layer of experts. Tokens are grouped by expert, so each expert's weights are read once; the results of a
 * token's choices are added in the order of the choices, whatever order the experts were computed in. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_priv.h"

/* The router's kinds, as model.h numbers them: the contract passes the number. */
enum { SOFTMAX_TOPK, SOFTMAX_TOPK_NORM, TOPK_SOFTMAX };

/* slot: one choice of one token, sorted by expert. */
struct cpu_moe_scratch {
    float *logits, *weight, *h, *y;    /* [T, E] [T, k] [slots, F] [slots, D] */
    int32_t *chosen, *slot_of, *token; /* [T, k] expert, [T, k] slot or -1, [slots] token */
    struct cpu_group *groups;          /* [E] */
    int32_t *count;                    /* [E + 1] */
    size_t cap[9];
    struct cpu_acts rows;
    size_t rows_cap[ACT_BUFFERS];
};

void cpu_moe_free(struct cpu *c)
{
    struct cpu_moe_scratch *s = c->moe;
    if (!s) return;
    void *all[] = {s->logits, s->weight, s->h,      s->y,      s->chosen, s->slot_of, s->token,
                   s->groups, s->count,  s->rows.x, s->rows.q, s->rows.d, s->rows.s, s->rows.b};
    for (size_t i = 0; i < COUNT_OF(all); i++) mem_free_aligned(all[i]);
    free(s);
    c->moe = NULL;
}

/* The k largest of z[E], ties to the lower index, and their weights. */
static void route(const float *z, int E, int k, int kind, int32_t *chosen, float *weight)
{
    double mass = 0, kept = 0;
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int x = 0; x < E; x++) {
            bool taken = false;
            for (int j = 0; j < i && !taken; j++) taken = chosen[j] == x;
            if (!taken && (best < 0 || z[x] > z[best])) best = x;
        }
        chosen[i] = best;
    }
    float max = z[chosen[0]];
    for (int x = 0; x < E && kind == SOFTMAX_TOPK; x++) mass += (double)expf(z[x] - max);
    for (int i = 0; i < k; i++) kept += (double)expf(z[chosen[i]] - max);
    for (int i = 0; i < k; i++)
        weight[i] = (float)((double)expf(z[chosen[i]] - max) / (kind == SOFTMAX_TOPK ? mass : kept));
}

static bool grow_all(struct cpu *c, struct cpu_moe_scratch *s, const struct moe_args *a, size_t F, size_t D)
{
    size_t T = (size_t)a->T, E = (size_t)a->E, slots = T * (size_t)a->k;
    return cpu_grow(c, &s->logits, &s->cap[0], T * E * sizeof(float)) &&
           cpu_grow(c, &s->weight, &s->cap[1], slots * sizeof(float)) &&
           cpu_grow(c, &s->h, &s->cap[2], slots * F * sizeof(float)) &&
           cpu_grow(c, &s->y, &s->cap[3], slots * D * sizeof(float)) &&
           cpu_grow(c, &s->chosen, &s->cap[4], slots * sizeof(int32_t)) &&
           cpu_grow(c, &s->slot_of, &s->cap[5], slots * sizeof(int32_t)) &&
           cpu_grow(c, &s->token, &s->cap[6], slots * sizeof(int32_t)) &&
           cpu_grow(c, &s->groups, &s->cap[7], E * sizeof *s->groups) &&
           cpu_grow(c, &s->count, &s->cap[8], (E + 1) * sizeof(int32_t));
}

/* Copies the prepared rows of the slots' tokens side by side: products want an expert's rows together. */
struct gather_job {
    struct cpu *c;
    const struct cpu_acts *from;
    struct cpu_acts *to;
    const int32_t *token;
    int wants;
};

static void gather_tiles(void *arg, int thread, int n_threads)
{
    struct gather_job *j = arg;
    const struct cpu_acts *from = j->from, *to = j->to;
    int64_t t;
    (void)thread, (void)n_threads;
    while ((t = cpu_pool_take(j->c->pool, from->Kp / TILE)) >= 0)
        for (int i = 0; i < to->M; i++) {
            size_t at = acts_at(to, t, i), of = acts_at(from, t, j->token[i]);
            if (j->wants & WANT_FLOAT) memcpy(to->x + at * TILE, from->x + of * TILE, TILE * sizeof *to->x);
            if (j->wants & WANT_BF16) memcpy(to->b + at * TILE, from->b + of * TILE, TILE * sizeof *to->b);
            if (!(j->wants & WANT_QUANT)) continue;
            memcpy(to->q + at * TILE, from->q + of * TILE, TILE);
            memcpy(to->s + 2 * at, from->s + 2 * of, 2 * sizeof *to->s);
            to->d[at] = from->d[of];
        }
}

struct combine_job {
    struct cpu *c;
    const struct moe_args *a;
    int64_t D;
};

static void combine(void *arg, int thread, int n_threads)
{
    struct combine_job *j = arg;
    const struct moe_args *a = j->a;
    struct cpu_moe_scratch *s = j->c->moe;
    int64_t t, D = j->D;
    (void)thread, (void)n_threads;
    while ((t = cpu_pool_take(j->c->pool, a->T)) >= 0) {
        float *out = a->out + t * D;
        if (a->residual && a->residual != a->out) memcpy(out, a->residual + t * D, (size_t)D * sizeof *out);
        else if (!a->residual) memset(out, 0, (size_t)D * sizeof *out);
        for (int i = 0; i < a->k; i++) {
            int32_t slot = s->slot_of[t * a->k + i];
            if (slot >= 0) j->c->level.add_scaled(out, s->y + (int64_t)slot * D, s->weight[t * a->k + i], D);
        }
    }
}

void cpu_moe(struct backend *be, const struct moe_args *a)
{
    struct cpu *c = (struct cpu *)be;
    int64_t D = a->router->cols;
    const struct bweight *any_up = NULL, *any_down = NULL;
    if (c->err.code) return;
    for (int x = 0; x < a->E && !any_up; x++) any_up = a->gate_up[x], any_down = a->down[x];
    if (!c->moe && mem_new(&c->moe, sizeof *c->moe, &c->err) < 0) return;
    struct cpu_moe_scratch *s = c->moe;
    size_t F = any_up ? (size_t)any_up->rows / 2 : 0;
    if (!grow_all(c, s, a, F, (size_t)D)) return;

    int wants = any_up ? cpu_wants(c, any_up) : 0;
    if (!cpu_prepare(c, &c->acts, c->acts_cap, a->x, a->T, D, a->norm, a->eps, wants | cpu_wants(c, a->router))) return;
    cpu_grouped_linear(c, &(struct cpu_group){a->router, 0, a->T}, 1, &c->acts, s->logits, NULL);
    for (int t = 0; t < a->T; t++)
        route(s->logits + (size_t)t * (size_t)a->E, a->E, a->k, a->kind, s->chosen + (size_t)t * (size_t)a->k,
              s->weight + (size_t)t * (size_t)a->k);

    /* Slots sorted by expert, tokens ascending within one. Experts held elsewhere get none. */
    int n_groups = 0, n_slots = 0;
    memset(s->count, 0, (size_t)(a->E + 1) * sizeof *s->count);
    for (int i = 0; i < a->T * a->k; i++) s->count[s->chosen[i]]++;
    for (int x = 0; x < a->E; x++) {
        int n = a->gate_up[x] ? s->count[x] : 0;
        if (n > 0) s->groups[n_groups++] = (struct cpu_group){a->gate_up[x], n_slots, n_slots + n};
        s->count[x] = n > 0 ? n_slots : -1;
        n_slots += n;
    }
    for (int i = 0; i < a->T * a->k; i++) {
        int32_t *next = &s->count[s->chosen[i]];
        s->slot_of[i] = *next;
        if (*next >= 0) s->token[(*next)++] = i / a->k;
    }

    if (n_slots > 0) {
        if (!cpu_acts_grow(c, &s->rows, s->rows_cap, n_slots, D, wants)) return;
        struct gather_job gather = {c, &c->acts, &s->rows, s->token, wants};
        if (n_slots < 32) cpu_pool_run_alone(c->pool, gather_tiles, &gather);
        else cpu_pool_run(c->pool, gather_tiles, &gather);
        cpu_grouped_gate(c, s->groups, n_groups, &s->rows, s->h, a->swiglu_limit);
        for (int g = 0, x = 0; g < n_groups; g++, x++) {
            while (a->gate_up[x] != s->groups[g].w) x++;
            s->groups[g].w = a->down[x];
        }
        if (!cpu_prepare(c, &c->acts2, c->acts2_cap, s->h, n_slots, (int64_t)F, NULL, 0,
                         cpu_wants(c, any_down)))
            return;
        cpu_grouped_linear(c, s->groups, n_groups, &c->acts2, s->y, NULL);
    }
    struct combine_job job = {c, a, D};
    if (a->T < 4) cpu_pool_run_alone(c->pool, combine, &job);
    else cpu_pool_run(c->pool, combine, &job);
}
