/* backend: one device that computes. The contract between forward.c, which reads as a transformer, and the code that
 * knows a machine. forward.c is written once for all backends and holds no backend words.
 *
 * Calls are queued on the device's one stream, in order, and return nothing; the first failure is kept and comes out
 * of sync. Pointers marked `dev` come from alloc and are not to be dereferenced by the caller. Activations are float.
 * T tokens in the batch; D, H, Hk, Dh, F, E, V as in model.h. Nothing allocates after open, weight_new, kv_new and
 * the first step of a given size.
 *
 * Sum order: each output element of a product is summed over its inputs in one fixed order, whatever the number of
 * rows in the batch, the chunking of a prompt or the number of threads. A request's numbers do not depend on its
 * company. On CUDA this holds within each of three classes of kernels: products of 1 to 16 rows, of 17 to 128, and
 * of more; they add in different orders, and so differ in the last bits of a float sum of bf16 products. Attention
 * there has two: rows that are alone in their sequence, and rows of a longer chunk. */
#ifndef HEARTH_BACKEND_H
#define HEARTH_BACKEND_H

#include "base.h"
#include "dtype.h"

enum { KV_PAGE = 32 }; /* tokens a KV page */

struct backend;  /* the device */
struct bweight;  /* a packed weight: one to three matrices stacked along their rows, with an optional bias */
struct bkv;      /* the KV pages of one rank's layers */

/* The tokens of one step. Sequences are consecutive runs of rows. Host arrays, copied by `begin`. */
struct batch {
    int T, n_seqs;
    const int32_t *ids;       /* [T] token ids */
    const int32_t *seq_begin; /* [n_seqs + 1] rows of sequence s: seq_begin[s] .. seq_begin[s+1]-1 */
    const int32_t *pos0;      /* [n_seqs] position of the sequence's first row: its context is already in the pages */
    const int32_t *pages;     /* [n_seqs, max_pages] page numbers of the sequence from position 0 on */
    int max_pages;
};

/* out[T, N] = residual[T, N] + rms_norm(x[T, K]; norm, eps) * W[N, K]^T + bias
 * rms_norm(x) = x / sqrt(mean(x^2) + eps) * norm; norm == NULL: x as it is. residual == NULL: 0; it may alias out.
 * out must not alias x. */
struct linear_args {
    float *out;
    const float *x, *residual, *norm;
    float eps;
    int T;
    const struct bweight *w;
};

/* out[T, F] = act(rms_norm(x) * Wgate^T + bg, rms_norm(x) * Wup^T + bu); w stacks gate (F rows), then up (F rows).
 * swiglu_limit > 0 chooses ACT_SWIGLU_OAI of model.h, 0 chooses SiLU. */
struct gate_args {
    float *out;
    const float *x, *norm;
    float eps, swiglu_limit;
    int T;
    const struct bweight *w;
};

/* In qkv[T, (H + 2 Hk) Dh] (q heads, k heads, v heads): rms_norm of each q and k head by q_norm/k_norm [Dh] where not
 * NULL, then RoPE (angle = pos * inv_freq[i], cos and sin times mscale) on q in place; k with RoPE and v go into the
 * pages of `layer` at each token's position. */
struct rope_kv_args {
    float *qkv;
    const float *q_norm, *k_norm, *inv_freq; /* dev: [Dh] [Dh] [Dh/2] */
    float eps, mscale;
    bool interleaved;
    int H, Hk, Dh, layer;
    struct bkv *kv;
};

/* out[T, H Dh]: causal attention of the q part of qkv[T, (H + 2 Hk) Dh] over the pages of `layer`.
 * score = scale * q.k for keys p with pos - window < p <= pos (window 0: all p <= pos); with sinks[H] one more logit
 * per head joins the softmax and brings no value. Query head h reads KV head h / (H / Hk). */
struct attend_args {
    float *out;
    const float *qkv, *sinks; /* dev */
    float scale;
    int H, Hk, Dh, layer, window;
    const struct bkv *kv;
};

/* out[T, D] = residual[T, D] + sum over the token's chosen experts e of p_e * (down_e(act(gate_up_e(x'))) + bias),
 * x' = rms_norm(x; norm). The router (weight [E, D], bias inside) is computed in float, ties to the lower index.
 * kind: enum router of model.h. gate_up[E], down[E]: a NULL entry is an expert that another rank holds: it adds
 * nothing here. residual may be NULL. */
struct moe_args {
    float *out;
    const float *x, *residual, *norm;
    float eps, swiglu_limit;
    int T, E, k, kind;
    const struct bweight *router;
    const struct bweight *const *gate_up, *const *down;
};

/* Arithmetic units of a device, as far as their rates differ. Which one a weight type uses is the backend's choice. */
enum { BACKEND_UNITS = 4 };

/* What was asked of memory and of the units since the device was opened, counted from shapes: a weight's bytes (as they
 * lie on the device) once for each product that reads it, of experts only those that had tokens; the keys and values of
 * a sequence once for each step that attends to them; 2 operations a multiply-add. */
struct backend_stats {
    uint64_t weight_bytes, kv_bytes;
    uint64_t ops[BACKEND_UNITS];
};

/* What was asked between two times. */
static inline struct backend_stats backend_stats_minus(struct backend_stats now, const struct backend_stats *before)
{
    now.weight_bytes -= before->weight_bytes;
    now.kv_bytes -= before->kv_bytes;
    for (int i = 0; i < BACKEND_UNITS; i++) now.ops[i] -= before->ops[i];
    return now;
}

/* What the device does at best, measured when asked: reading memory far larger than its caches, and each unit's
 * multiply-adds on registers. */
struct backend_limits {
    double read_gb_s;
    int n_units;
    struct {
        char name[16]; /* "int8", "fp32" */
        double gop_s;
    } unit[BACKEND_UNITS];
};

/* Every slot is set by every backend. */
struct backend_ops {
    void (*close)(struct backend *be);
    /* dev memory, its content undefined. free takes what alloc gave, or NULL. */
    int (*alloc)(struct backend *be, void *out_ptr, size_t bytes, struct err *e);
    void (*free)(struct backend *be, void *dev);
    void (*upload)(struct backend *be, void *dev, const void *host, size_t bytes);
    /* Queues the copy and waits for it. */
    int (*download)(struct backend *be, void *host, const void *dev, size_t bytes, struct err *e);
    /* Waits for all that was queued; the first failure since the last sync comes out here. */
    int (*sync)(struct backend *be, struct err *e);
    /* Bytes that weights, pages and scratch may take now. */
    size_t (*free_bytes)(const struct backend *be);

    /* Packs 1..3 matrices of equal cols, stacked along their rows, with bias[sum of rows] (host) or NULL. The sources
     * are read once and may go afterwards. */
    int (*weight_new)(struct backend *be, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
                      struct err *e);
    /* Ends the use of a weight; its memory may stay with the backend until that closes. */
    void (*weight_free)(struct backend *be, struct bweight *w);
    /* Bytes that weight_new would take on the device. */
    size_t (*weight_bytes)(const struct backend *be, const struct dmat *parts, int n_parts);

    int (*kv_new)(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e);
    void (*kv_free)(struct backend *be, struct bkv *kv);
    size_t (*kv_page_bytes)(const struct backend *be, int n_layers, int Hk, int Dh);

    /* Opens a step: all following operations work on this batch. */
    void (*begin)(struct backend *be, const struct batch *b);
    /* out[T, D] = rows ids of W[V, D] */
    void (*embed)(struct backend *be, float *out, const struct bweight *w);
    void (*linear)(struct backend *be, const struct linear_args *a);
    void (*gate)(struct backend *be, const struct gate_args *a);
    void (*rope_kv)(struct backend *be, const struct rope_kv_args *a);
    void (*attend)(struct backend *be, const struct attend_args *a);
    void (*moe)(struct backend *be, const struct moe_args *a);
    /* out[n, D] = x[rows[i]] (rows: host array, copied by the call) */
    void (*gather)(struct backend *be, float *out, const float *x, int D, const int32_t *rows, int n);
    /* Of each row of logits[n, V] (dev) the column of the largest number, the lowest on ties, into ids[n] (host); -1 where
     * nothing is larger than -inf. Waits for it. */
    int (*best)(struct backend *be, const float *logits, int n, int V, int32_t *ids, struct err *e);

    struct backend_stats (*stats)(const struct backend *be);
    /* Takes about a second. */
    int (*limits)(struct backend *be, struct backend_limits *out, struct err *e);
};

struct backend {
    const struct backend_ops *ops;
    char name[96]; /* "cpu avx2, 2 threads", for people; begins with the kind of device: "cpu", "cuda" */
    int chunk;     /* rows of a step from which more bring no speed */
};

struct backend_opts {
    const char *device;    /* "cpu" (NULL too), "cuda:N", or "auto": the first GPU if there is one, else the CPU */
    int threads;           /* 0: one a core this process may use */
    const char *cpu_level; /* "c", "avx2", "avx512", "avx512bf16", "neon", "neonmm": at most this; NULL: the best there is */
};

/* Opens a device. An unknown device, or an unknown or absent level, is refused with the list of those here. With
 * "auto" a cpu_level chooses the CPU. */
int backend_open(struct backend **out, const struct backend_opts *o, struct err *e) MUST_CHECK;
void backend_close(struct backend **be);

#endif
