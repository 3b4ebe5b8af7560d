/* engine: token ids in, token ids out. Owns the weights, the KV pages, the scheduler (continuous batching, chunked
 * prefill, prefix sharing, preemption) and the sampler of one rank. It knows nothing of text.
 *
 * The caller holds one object, `struct engine`, and drives it from one thread: submit, then step until events say that
 * the request is done. After warm-up a step neither allocates nor locks.
 *
 * What a request yields depends on its ids, its sampling and the weights alone: not on the requests beside it, the
 * number of threads, the chunk size, preemption, or prefixes found in the cache. */
#ifndef HEARTH_ENGINE_H
#define HEARTH_ENGINE_H

#include "backend.h"
#include "model.h"

struct engine;

struct engine_opts {
    struct backend_opts backend;
    int ctx;         /* positions a request may use, prompt and answer together; 0: the model's own, at most 8192 */
    int max_seqs;    /* requests that run at once; 0: 8 */
    int chunk;       /* rows of one step at most; 0: what suits the device */
    size_t kv_tokens; /* tokens that the KV pages hold in all; 0: ctx */
    bool quiet;      /* no progress line while loading */
};

/* Plans the memory, refuses what does not fit with the numbers, then loads. The model must stay open until
 * engine_open returned; the engine keeps no pointer into it but its configuration, which it copies. */
int engine_open(struct engine **out, const struct model *m, const struct engine_opts *o, struct err *e) MUST_CHECK;
void engine_close(struct engine **en);

/* The bytes of a plan, before anything is loaded. */
struct engine_bytes {
    size_t weights, kv, scratch, free;
    char device[96]; /* where it was planned for, for people */
};
int engine_plan_bytes(const struct model *m, const struct engine_opts *o, struct engine_bytes *out, struct err *e) MUST_CHECK;

struct logit_bias {
    int32_t id;
    float bias;
};

/* How the next id is chosen from the logits. All-zero is greedy decoding. In this order: logit_bias is added; the
 * penalties apply (repetition over prompt and answer: positive logits divided, negative multiplied; presence and
 * frequency over the answer, subtracted); temperature divides; top_k, top_p, min_p each cut the rest of the
 * candidates; one is drawn with a generator keyed by (seed, position). */
struct sampling {
    float temperature;        /* 0: the largest logit, the lowest id on ties */
    int32_t top_k;            /* 0: all */
    float top_p;              /* 0 or 1: all */
    float min_p;              /* keep p >= min_p * max p; 0: all */
    float repetition_penalty; /* 0 or 1: none */
    float presence_penalty, frequency_penalty;
    uint64_t seed;
    const struct logit_bias *bias; /* copied by submit */
    int n_bias;
    bool logprobs; /* fill logprob in each event, and the log-probabilities of the n_top most likely ids */
    int n_top;     /* at most ENGINE_MAX_TOP */
};

enum { ENGINE_MAX_TOP = 20 };

/* rows[n][V] are the logits after prompt positions pos .. pos+n-1. Borrowed for the call. */
typedef void engine_logits_fn(void *user, int64_t pos, int n, const float *rows);

struct request {
    const int32_t *ids; /* [n_ids] the prompt, at least one id; copied */
    size_t n_ids;
    int max_new;         /* ids to produce at most; with 0, only on_logits sees anything */
    const int32_t *stop; /* [n_stop] ids that end the answer (the stop id itself is the last event); copied */
    int n_stop;
    struct sampling sampling;
    engine_logits_fn *on_logits; /* NULL: logits are computed where they are sampled, only. Turns prefix sharing off. */
    void *user;
};

/* Checks the request (ids in range, length within ctx, numbers finite) and queues it. *id names it in events. */
int engine_submit(struct engine *en, const struct request *r, uint64_t *id, struct err *e) MUST_CHECK;
/* Ends a request at the next step with FINISH_CANCELLED; unknown ids are ignored (it may just have ended). */
void engine_cancel(struct engine *en, uint64_t id);

/* One forward pass over what the scheduler chose. Returns 1 if work remains, 0 if all requests are done. On an error
 * (the device failed) the engine is of no further use. */
int engine_step(struct engine *en, struct err *e) MUST_CHECK;

enum event_kind { EVENT_TOKEN, EVENT_DONE };
/* FINISH_ERROR: the logits held no number (damaged weights, or a bias of -inf on everything). */
enum finish { FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED, FINISH_ERROR };
struct token_prob {
    int32_t id;
    float logprob;
};
struct event {
    enum event_kind kind;
    uint64_t request;
    int32_t id;         /* EVENT_TOKEN */
    float logprob;      /* log softmax of the raw logits at id, if asked for */
    int n_top;
    struct token_prob top[ENGINE_MAX_TOP]; /* descending */
    enum finish finish; /* EVENT_DONE */
};
/* Takes the oldest event; false when there is none. Events not taken hold the engine back, never get lost. */
bool engine_poll(struct engine *en, struct event *out);

struct engine_stats {
    uint64_t steps, prompt_tokens, prefix_tokens, new_tokens, preemptions;
    int running, waiting, pages, pages_used, pages_cached;
    double prefill_seconds, decode_seconds; /* of steps with, and without, prompt rows */
    struct backend_stats device;            /* what the steps asked of memory and arithmetic */
};
struct engine_stats engine_stats(const struct engine *en);
const struct model_config *engine_config(const struct engine *en);
const char *engine_device(const struct engine *en);
int engine_ctx(const struct engine *en);
/* What the device does at best, measured now, while nothing else runs on it. */
int engine_limits(struct engine *en, struct backend_limits *out, struct err *e) MUST_CHECK;

/* One product or attention, timed alone. */
struct kernel_time {
    const char *device;   /* "cpu avx2, 2 threads" */
    const char *kernel;   /* "linear q8_0", "attend" */
    int rows, context;    /* rows of the step; keys each row sees, 0 for products */
    double seconds;       /* median */
    struct backend_stats work; /* of one run */
};
typedef void engine_kernel_fn(void *user, const struct kernel_time *t, const struct backend_limits *limits);
/* Times every weight format and attention at a long context, each at rows[n_rows] (1 .. ENGINE_MAX_KERNEL_ROWS), on each CPU
 * level of this machine or on the one that o names. seen is called after each. */
enum { ENGINE_MAX_KERNEL_ROWS = 512 };
int engine_time_kernels(const struct backend_opts *o, const int *rows, int n_rows, engine_kernel_fn *seen, void *user,
                        struct err *e) MUST_CHECK;

#endif
