/* plan.c: slices as arithmetic. Rows of a matrix are outputs, columns are inputs; what splits along which of the two
 * is the table below, in one place for every family. */
#include "plan.h"

#include <assert.h>

struct plan_rank plan_single(const struct model_config *c)
{
    return (struct plan_rank){
        .layers = {0, c->n_layers},
        .heads = {0, c->n_heads},
        .kv_heads = {0, c->n_kv_heads},
        .ffn = {0, c->d_ff},
        .experts = {0, c->n_experts},
        .vocab = {0, c->n_vocab},
        .embeds = true,
        .heads_out = true,
        .adds_residual = true,
    };
}

enum axis { AXIS_NONE, AXIS_ROWS, AXIS_COLS };

/* Which axis of a role is cut, and the range in elements of that axis. */
static enum axis slice_of(const struct model_config *c, const struct plan_rank *r, enum role role, struct range *out)
{
    int32_t dh = c->d_head;
    struct range heads = {r->heads.begin * dh, r->heads.end * dh};
    struct range kv = {r->kv_heads.begin * dh, r->kv_heads.end * dh};
    switch (role) {
    case ROLE_Q: case ROLE_Q_BIAS: *out = heads; return AXIS_ROWS;
    case ROLE_K: case ROLE_K_BIAS: *out = kv; return AXIS_ROWS;
    case ROLE_V: case ROLE_V_BIAS: *out = kv; return AXIS_ROWS;
    case ROLE_O: *out = heads; return AXIS_COLS;
    case ROLE_SINKS: *out = r->heads; return AXIS_ROWS;
    case ROLE_GATE: case ROLE_GATE_BIAS: *out = r->ffn; return AXIS_ROWS;
    case ROLE_UP: case ROLE_UP_BIAS: *out = r->ffn; return AXIS_ROWS;
    case ROLE_DOWN: *out = r->ffn; return AXIS_COLS;
    case ROLE_HEAD: *out = r->vocab; return AXIS_ROWS;
    case ROLE_EMBED: case ROLE_OUT_NORM: case ROLE_ATTN_NORM: case ROLE_O_BIAS: case ROLE_Q_NORM: case ROLE_K_NORM:
    case ROLE_FFN_NORM: case ROLE_DOWN_BIAS: case ROLE_ROUTER: case ROLE_ROUTER_BIAS: case ROLE_COUNT: break;
    }
    return AXIS_NONE;
}

struct dmat plan_slice(const struct model_config *c, const struct plan_rank *r, enum role role, struct dmat whole)
{
    struct range s;
    switch (slice_of(c, r, role, &s)) {
    case AXIS_ROWS: return dmat_rows(&whole, s.begin, s.end);
    case AXIS_COLS: return dmat_cols(&whole, s.begin, s.end);
    case AXIS_NONE: break;
    }
    return whole;
}

struct range plan_slice_vec(const struct model_config *c, const struct plan_rank *r, enum role role)
{
    struct range s = {0, 0};
    enum axis axis = slice_of(c, r, role, &s);
    assert(axis != AXIS_COLS);
    if (axis == AXIS_ROWS) return s;
    switch (role) {
    case ROLE_Q_NORM: case ROLE_K_NORM: return (struct range){0, c->d_head};
    case ROLE_ROUTER_BIAS: return (struct range){0, c->n_experts};
    default: return (struct range){0, c->d_model};
    }
}
