/* plan: which slice of a model each rank holds. Pure arithmetic over a configuration: the same answer for the loader,
 * the engine and the planner. A plan today has one rank, which holds everything; weights.c nevertheless takes every
 * slice from here, so that more ranks are a matter of this file. */
#ifndef HEARTH_PLAN_H
#define HEARTH_PLAN_H

#include "model.h"

/* Half-open: [begin, end). */
struct range {
    int32_t begin, end;
};

/* What one rank holds. All ranges are in units of the whole model. */
struct plan_rank {
    struct range layers;   /* of L */
    struct range heads;    /* of H */
    struct range kv_heads; /* of Hk */
    struct range ffn;      /* of F: columns of the FFN (of each expert) */
    struct range experts;  /* of E */
    struct range vocab;    /* of V: rows of the head */
    bool embeds;           /* holds the embedding (first stage) */
    bool heads_out;        /* holds the final norm and the head (last stage) */
    bool adds_residual;    /* its partial sums carry the residual and the biases: one rank of each tensor-parallel group */
};

/* The plan of a single rank. */
struct plan_rank plan_single(const struct model_config *c);

/* The slice of a matrix that a rank holds, given the whole one (rows: outputs, columns: inputs). */
struct dmat plan_slice(const struct model_config *c, const struct plan_rank *r, enum role role, struct dmat whole);
/* The same for a vector: elements [begin, end). */
struct range plan_slice_vec(const struct model_config *c, const struct plan_rank *r, enum role role);

#endif
