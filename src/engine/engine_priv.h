/* engine_priv: what the files of the engine share. engine.c owns the object and the step; weights.c loads; kv.c keeps the
 * pages; sched.c chooses the rows of a step; forward.c is the transformer; sample.c chooses ids. */
#ifndef HEARTH_ENGINE_PRIV_H
#define HEARTH_ENGINE_PRIV_H

#include "backend.h"
#include "comm.h"
#include "engine.h"
#include "model.h"
#include "plan.h"

/* ------------------------------------------------------------------------------------------------ weights (weights.c) */

/* Vectors are dev memory; NULL where the family has none. */
struct layer {
    float *attn_norm, *ffn_norm;      /* [D] */
    float *q_norm, *k_norm;           /* [Dh] */
    float *sinks;                     /* [H] */
    struct bweight *qkv, *o;          /* [(H + 2 Hk) Dh, D] [D, H Dh] */
    struct bweight *gate_up, *down;   /* [2 F, D] [D, F], dense */
    struct bweight *router;           /* [E, D] */
    struct bweight **exp_gate_up, **exp_down; /* [E] of [2 F, D] and [D, F] */
};

struct weights {
    struct bweight *embed, *head; /* [V, D]; the same object where the model ties them */
    float *out_norm;              /* [D] */
    float *inv_freq;              /* [Dh / 2] */
    int n_layers, n_experts;
    struct layer *layers; /* [n_layers] */
    struct arena arena;
};

/* Bytes the weights of this rank take on the device. */
size_t weights_bytes(const struct backend *be, const struct model *m, const struct plan_rank *r);
int weights_load(struct weights *w, struct backend *be, const struct model *m, const struct plan_rank *r, bool quiet,
                 struct err *e) MUST_CHECK;
void weights_free(struct weights *w, struct backend *be);

/* ------------------------------------------------------------------------------------------------ KV pages (kv.c) */

/* Page numbers, their owners, and the prefix cache: a full page can be found again by what it holds and by the page
 * before it. The bytes of the pages belong to the backend. A page is free, held (refs > 0), or cached (refs 0, but
 * found by its content until it is needed). */
struct kv_pages;
int kv_pages_open(struct kv_pages **out, int n_pages, struct err *e) MUST_CHECK;
void kv_pages_close(struct kv_pages **k);
/* A page for the caller, the longest-unused cached one if none is free; -1 if all are held. */
int32_t kv_page_take(struct kv_pages *k);
void kv_page_release(struct kv_pages *k, int32_t page);
int kv_pages_available(const struct kv_pages *k); /* free and cached */
int kv_pages_held(const struct kv_pages *k);
int kv_pages_cached(const struct kv_pages *k);
/* Where a chain of pages stands; 0 is the start of every sequence. */
typedef uint64_t kv_chain;
/* Makes a full page findable: it holds `ids` after the chain `prev`. Returns the chain that ends with it (the one known
 * already if another page holds the same). */
kv_chain kv_page_publish(struct kv_pages *k, int32_t page, kv_chain prev, const int32_t ids[KV_PAGE]);
/* The page that holds `ids` after `prev`, now held by the caller too; -1 if there is none. *next is its chain. */
int32_t kv_page_find(struct kv_pages *k, kv_chain prev, const int32_t ids[KV_PAGE], kv_chain *next);

/* ------------------------------------------------------------------------------------------------ requests, rows (sched.c) */

enum seq_state { SEQ_FREE, SEQ_WAITING, SEQ_RUNNING };

/* One request. ids = prompt, then answer. Positions [0, done) are in the pages. */
struct seq {
    enum seq_state state;
    uint64_t id, order; /* order: arrival, which preemption does not change */
    bool cancelled;
    int32_t *ids;
    int len, cap, n_prompt, max_new;
    int done;
    int rows;        /* of the current step */
    int logits_seen; /* positions whose logits on_logits has had */
    int32_t *pages;
    int n_pages, n_published;
    kv_chain chain; /* of the published pages */
    int32_t *stop;
    int n_stop;
    struct sampling sampling;
    struct logit_bias *bias;
    engine_logits_fn *on_logits;
    void *user;
    struct seq *next; /* waiting list, in order of arrival */
};

/* The rows of one step, as the backend takes them, and whose they are. */
struct step {
    struct batch batch;
    struct seq **seqs; /* [max_seqs] */
    int32_t *ids, *seq_begin, *pos0, *pages;
    bool prefill; /* some sequence computes more than its newest id */
};

struct engine {
    struct model_config config;
    int32_t *window; /* [L], the copy that config.window points to */
    struct engine_opts opts;
    struct plan_rank rank;
    struct backend *be;
    struct comm *comm;
    struct weights w;
    struct bkv *kv;
    struct kv_pages *pages;
    int n_pages, max_pages; /* in all; of one sequence */

    /* Scratch, dev: x, y [chunk, D], qkv [chunk, (H + 2 Hk) Dh], att [chunk, H Dh], h [chunk, F] (dense),
     * last [head_rows, D], logits [head_rows, V]. Host: host_logits [head_rows, V]. */
    float *x, *y, *qkv, *att, *h, *last, *logits, *host_logits;
    int head_rows;

    struct seq **running; /* [max_seqs], by order of arrival */
    int n_running;
    struct seq *waiting, **waiting_tail;
    uint64_t next_id, next_order;
    struct step step;
    int32_t *rows; /* [head_rows] for gather */
    int32_t *best; /* [head_rows] */

    struct event *events; /* ring */
    size_t ev_cap, ev_head, ev_len;
    struct sampler *sampler;
    struct engine_stats stats;
};

/* Fills en->step from running and waiting requests; preempts where pages run out. False if there is nothing to do. */
bool sched_plan(struct engine *en);
/* After the pass: rows count as done, full pages are published. */
void sched_commit(struct engine *en);
/* Gives the request's pages back and frees it. */
void sched_drop(struct engine *en, struct seq *s);
void seq_free(struct seq *s);

/* ------------------------------------------------------------------------------------------------ forward (forward.c) */

/* Runs the layers over en->step.batch: en->x holds the last layer's output afterwards. */
void forward(struct engine *en);
/* Logits of n <= head_rows rows of that output into en->host_logits[n, V]. */
int forward_logits(struct engine *en, const int32_t *rows, int n, struct err *e) MUST_CHECK;
/* The id of each row's largest logit into en->best[n]; -1 where none is a number. Nothing else leaves the device. */
int forward_best(struct engine *en, const int32_t *rows, int n, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ sampling (sample.c) */

struct sampler;
int sampler_open(struct sampler **out, int n_vocab, struct err *e) MUST_CHECK;
void sampler_close(struct sampler **s);
/* Chooses the id at position n, after ids[n] (the first n_prompt are the prompt), from logits[V]. Fills ev->id, logprob,
 * n_top and top. False if no logit is a number to choose: damaged weights, not a matter of chance. */
/* Whether p asks for the id of the largest logit and nothing more. */
bool sampling_is_plain(const struct sampling *p);
bool sample(struct sampler *s, const struct sampling *p, const int32_t *ids, int n, int n_prompt, const float *logits,
            struct event *ev);

#endif
