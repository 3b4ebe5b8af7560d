/* engine.c: the engine's door and its step. Opening plans all memory first and refuses what does not fit; everything a
 * step touches is allocated here or when a request is submitted, so a step allocates nothing. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine_priv.h"

enum { DEFAULT_CTX = 8192, DEFAULT_SEQS = 8, MIN_HEAD_ROWS = 16, MAX_SEQS = 4096 };

/* ------------------------------------------------------------------------------------------------ plan of memory */

static int complete_opts(struct engine_opts *o, const struct model_config *c, struct err *e)
{
    if (o->ctx < 0 || o->ctx > c->ctx_train)
        return err_set(e, ERR_INPUT, "context %d is out of range: the model was made for 1 to %d positions", o->ctx,
                       c->ctx_train);
    if (o->max_seqs < 0 || o->max_seqs > MAX_SEQS)
        return err_set(e, ERR_INPUT, "max_seqs %d is out of range 1 to %d", o->max_seqs, MAX_SEQS);
    if (o->chunk < 0 || o->chunk > 65536) return err_set(e, ERR_INPUT, "chunk %d is out of range 1 to 65536", o->chunk);
    if (o->ctx == 0) o->ctx = c->ctx_train < DEFAULT_CTX ? c->ctx_train : DEFAULT_CTX;
    if (o->max_seqs == 0) o->max_seqs = DEFAULT_SEQS;
    if (o->kv_tokens < (size_t)o->ctx) o->kv_tokens = (size_t)o->ctx;
    if (o->kv_tokens > (size_t)INT32_MAX / 2)
        return err_set(e, ERR_INPUT, "kv_tokens %zu is too large, at most %d", o->kv_tokens, INT32_MAX / 2);
    return OK;
}

static void complete_chunk(struct engine_opts *o, const struct backend *be)
{
    if (o->chunk == 0) o->chunk = be->chunk;
    if (o->chunk < o->max_seqs) o->chunk = o->max_seqs; /* every running request gets its row */
}

struct sizes {
    size_t x, qkv, att, h, last, logits; /* floats */
    int head_rows, n_pages, max_pages;
};

static struct sizes sizes_of(const struct engine_opts *o, const struct model_config *c)
{
    size_t T = (size_t)o->chunk, D = (size_t)c->d_model, Dh = (size_t)c->d_head, H = (size_t)c->n_heads;
    struct sizes s = {.head_rows = o->max_seqs > MIN_HEAD_ROWS ? o->max_seqs : MIN_HEAD_ROWS};
    s.x = T * D;
    s.qkv = T * (H + 2 * (size_t)c->n_kv_heads) * Dh;
    s.att = T * H * Dh;
    s.h = c->n_experts ? 0 : T * (size_t)c->d_ff;
    s.last = (size_t)s.head_rows * D;
    s.logits = (size_t)s.head_rows * (size_t)c->n_vocab;
    s.max_pages = (o->ctx + KV_PAGE - 1) / KV_PAGE;
    s.n_pages = (int)((o->kv_tokens + KV_PAGE - 1) / KV_PAGE);
    return s;
}

/* Scratch that the backend keeps for a step of T rows: norms, and with experts a row for each choice. A bound that
 * holds for a float and a byte copy of the widest input. */
static size_t backend_scratch(const struct engine_opts *o, const struct model_config *c)
{
    size_t T = (size_t)o->chunk, D = (size_t)c->d_model, F = (size_t)c->d_ff;
    size_t HDh = (size_t)c->n_heads * (size_t)c->d_head, wide = D > HDh ? D : HDh;
    if (c->n_experts) return T * (size_t)c->n_experts_used * (3 * F + 2 * D) * 5 + T * D * 5;
    return T * (wide > F ? wide : F) * 6;
}

static struct engine_bytes plan_bytes(const struct backend *be, const struct model *m, const struct engine_opts *o)
{
    const struct model_config *c = model_config(m);
    struct sizes s = sizes_of(o, c);
    struct plan_rank r = plan_single(c);
    struct engine_bytes b = {.free = be->ops->free_bytes(be)};
    memcpy(b.device, be->name, sizeof b.device);
    b.weights = weights_bytes(be, m, &r);
    b.kv = (size_t)s.n_pages * be->ops->kv_page_bytes(be, c->n_layers, c->n_kv_heads, c->d_head);
    b.scratch = (2 * s.x + s.qkv + s.att + s.h + s.last + 2 * s.logits) * sizeof(float) + backend_scratch(o, c);
    return b;
}

int engine_plan_bytes(const struct model *m, const struct engine_opts *o, struct engine_bytes *out, struct err *e)
{
    struct engine_opts opts = *o;
    struct backend *be;
    TRY(complete_opts(&opts, model_config(m), e));
    TRY(backend_open(&be, &opts.backend, e));
    complete_chunk(&opts, be);
    *out = plan_bytes(be, m, &opts);
    backend_close(&be);
    return OK;
}

static int check_fits(const struct model *m, const struct engine_bytes *b, const struct engine_opts *o, struct err *e)
{
    const double gb = 1e9;
    size_t need = b->weights + b->kv + b->scratch;
    if (need <= b->free) return OK;
    return err_set(e, ERR_NOMEM,
                   "%s needs %.2f GB (weights %.2f, KV for %zu tokens %.2f, scratch %.2f) and %.2f GB are free: "
                   "choose a smaller context or a smaller format",
                   model_name(m), (double)need / gb, (double)b->weights / gb, o->kv_tokens, (double)b->kv / gb,
                   (double)b->scratch / gb, (double)b->free / gb);
}

/* ------------------------------------------------------------------------------------------------ open, close */

static int alloc_floats(struct engine *en, float **out, size_t n, struct err *e)
{
    return n ? en->be->ops->alloc(en->be, out, n * sizeof(float), e) : OK;
}

static int open_scratch(struct engine *en, struct err *e)
{
    const struct model_config *c = &en->config;
    struct sizes s = sizes_of(&en->opts, c);
    size_t T = (size_t)en->opts.chunk, S = (size_t)en->opts.max_seqs;
    en->head_rows = s.head_rows;
    en->n_pages = s.n_pages;
    en->max_pages = s.max_pages;
    TRY(alloc_floats(en, &en->x, s.x, e));
    TRY(alloc_floats(en, &en->y, s.x, e));
    TRY(alloc_floats(en, &en->qkv, s.qkv, e));
    TRY(alloc_floats(en, &en->att, s.att, e));
    TRY(alloc_floats(en, &en->h, s.h, e));
    TRY(alloc_floats(en, &en->last, s.last, e));
    TRY(alloc_floats(en, &en->logits, s.logits, e));
    TRY(mem_new(&en->host_logits, s.logits * sizeof(float), e));
    TRY(mem_new(&en->rows, (T > (size_t)s.head_rows ? T : (size_t)s.head_rows) * sizeof *en->rows, e));
    TRY(mem_new(&en->best, (size_t)s.head_rows * sizeof *en->best, e));
    TRY(en->be->ops->kv_new(en->be, &en->kv, c->n_layers, en->n_pages, c->n_kv_heads, c->d_head, e));
    TRY(kv_pages_open(&en->pages, en->n_pages, e));
    TRY(sampler_open(&en->sampler, c->n_vocab, e));
    TRY(mem_new(&en->running, S * sizeof *en->running, e));
    TRY(mem_new(&en->step.seqs, S * sizeof *en->step.seqs, e));
    TRY(mem_new(&en->step.ids, T * sizeof *en->step.ids, e));
    TRY(mem_new(&en->step.seq_begin, (S + 1) * sizeof *en->step.seq_begin, e));
    TRY(mem_new(&en->step.pos0, S * sizeof *en->step.pos0, e));
    TRY(mem_new(&en->step.pages, S * (size_t)en->max_pages * sizeof *en->step.pages, e));
    en->ev_cap = 4 * S;
    return mem_new(&en->events, en->ev_cap * sizeof *en->events, e);
}

int engine_open(struct engine **out, const struct model *m, const struct engine_opts *o, struct err *e)
{
    const struct model_config *c = model_config(m);
    struct engine *en;
    int rc;
    TRY(mem_new(&en, sizeof *en, e));
    en->config = *c;
    en->config.window = NULL;
    en->opts = *o;
    en->rank = plan_single(c);
    en->waiting_tail = &en->waiting;
    if ((rc = complete_opts(&en->opts, c, e)) < 0) goto fail;
    if ((rc = mem_new(&en->window, (size_t)c->n_layers * sizeof *en->window, e)) < 0) goto fail;
    memcpy(en->window, c->window, (size_t)c->n_layers * sizeof *en->window);
    en->config.window = en->window;
    if ((rc = backend_open(&en->be, &en->opts.backend, e)) < 0) goto fail;
    complete_chunk(&en->opts, en->be);
    if ((rc = comm_self_open(&en->comm, en->be, e)) < 0) goto fail;
    struct engine_bytes bytes = plan_bytes(en->be, m, &en->opts);
    if ((rc = check_fits(m, &bytes, &en->opts, e)) < 0) goto fail;
    if ((rc = weights_load(&en->w, en->be, m, &en->rank, en->opts.quiet, e)) < 0) goto fail;
    if ((rc = open_scratch(en, e)) < 0) goto fail;
    if ((rc = en->be->ops->sync(en->be, e)) < 0) goto fail;
    *out = en;
    return OK;
fail:
    engine_close(&en);
    return rc;
}

void engine_close(struct engine **handle)
{
    struct engine *en = *handle;
    if (!en) return;
    while (en->n_running > 0) sched_drop(en, en->running[en->n_running - 1]);
    while (en->waiting) sched_drop(en, en->waiting);
    if (en->be) {
        float *dev[] = {en->x, en->y, en->qkv, en->att, en->h, en->last, en->logits};
        for (size_t i = 0; i < COUNT_OF(dev); i++) en->be->ops->free(en->be, dev[i]);
        en->be->ops->kv_free(en->be, en->kv);
        weights_free(&en->w, en->be);
    }
    comm_close(&en->comm);
    backend_close(&en->be);
    kv_pages_close(&en->pages);
    sampler_close(&en->sampler);
    free(en->host_logits);
    free(en->rows);
    free(en->best);
    free(en->running);
    free(en->step.seqs);
    free(en->step.ids);
    free(en->step.seq_begin);
    free(en->step.pos0);
    free(en->step.pages);
    free(en->events);
    free(en->window);
    free(en);
    *handle = NULL;
}

/* ------------------------------------------------------------------------------------------------ requests */

static int check_number(const char *name, double v, double lo, double hi, struct err *e)
{
    if (v >= lo && v <= hi) return OK; /* false for NaN */
    return err_set(e, ERR_INPUT, "%s %g is out of range %g to %g", name, v, lo, hi);
}

static int check_request(const struct engine *en, const struct request *r, struct err *e)
{
    const struct sampling *s = &r->sampling;
    int V = en->config.n_vocab;
    if (r->n_ids == 0) return err_set(e, ERR_INPUT, "the prompt is empty: at least one token is needed");
    if (r->n_ids > (size_t)en->opts.ctx || (r->n_ids == (size_t)en->opts.ctx && r->max_new > 0))
        return err_set(e, ERR_INPUT, "the prompt has %zu tokens and the context holds %d, answer included: shorten the "
                       "prompt or raise the context", r->n_ids, en->opts.ctx);
    for (size_t i = 0; i < r->n_ids; i++)
        if (r->ids[i] < 0 || r->ids[i] >= V)
            return err_set(e, ERR_INPUT, "token %zu of the prompt is %d, the vocabulary runs from 0 to %d", i, r->ids[i],
                           V - 1);
    if (r->max_new < 0) return err_set(e, ERR_INPUT, "max_new %d is negative", r->max_new);
    TRY(check_number("temperature", (double)s->temperature, 0, 100, e));
    TRY(check_number("top_p", (double)s->top_p, 0, 1, e));
    TRY(check_number("min_p", (double)s->min_p, 0, 1, e));
    TRY(check_number("top_k", s->top_k, 0, INT32_MAX, e));
    TRY(check_number("repetition_penalty", (double)s->repetition_penalty, 0, 100, e));
    TRY(check_number("presence_penalty", (double)s->presence_penalty, -100, 100, e));
    TRY(check_number("frequency_penalty", (double)s->frequency_penalty, -100, 100, e));
    TRY(check_number("n_top", s->n_top, 0, ENGINE_MAX_TOP, e));
    for (int i = 0; i < s->n_bias; i++) {
        if (s->bias[i].id < 0 || s->bias[i].id >= V)
            return err_set(e, ERR_INPUT, "logit bias for token %d, the vocabulary runs from 0 to %d", s->bias[i].id, V - 1);
        if (isnan(s->bias[i].bias)) return err_set(e, ERR_INPUT, "logit bias for token %d is not a number", s->bias[i].id);
    }
    return OK;
}

int engine_submit(struct engine *en, const struct request *r, uint64_t *id, struct err *e)
{
    struct seq *s;
    int rc;
    TRY(check_request(en, r, e));
    size_t room = (size_t)en->opts.ctx - r->n_ids;
    size_t max_new = (size_t)r->max_new < room ? (size_t)r->max_new : room;
    TRY(mem_new(&s, sizeof *s, e));
    s->cap = (int)(r->n_ids + max_new);
    s->len = s->n_prompt = (int)r->n_ids;
    s->max_new = (int)max_new;
    s->n_stop = r->n_stop;
    s->sampling = r->sampling;
    s->on_logits = r->on_logits;
    s->user = r->user;
    if ((rc = mem_new(&s->ids, (size_t)s->cap * sizeof *s->ids, e)) < 0) goto fail;
    if ((rc = mem_new(&s->pages, (size_t)en->max_pages * sizeof *s->pages, e)) < 0) goto fail;
    if ((rc = mem_new(&s->stop, (size_t)r->n_stop * sizeof *s->stop + 1, e)) < 0) goto fail;
    if ((rc = mem_new(&s->bias, (size_t)r->sampling.n_bias * sizeof *s->bias + 1, e)) < 0) goto fail;
    memcpy(s->ids, r->ids, r->n_ids * sizeof *s->ids);
    if (r->n_stop) memcpy(s->stop, r->stop, (size_t)r->n_stop * sizeof *s->stop);
    if (r->sampling.n_bias) memcpy(s->bias, r->sampling.bias, (size_t)r->sampling.n_bias * sizeof *s->bias);
    s->sampling.bias = s->bias;
    s->id = ++en->next_id;
    s->order = ++en->next_order;
    s->state = SEQ_WAITING;
    *en->waiting_tail = s;
    en->waiting_tail = &s->next;
    *id = s->id;
    return OK;
fail:
    seq_free(s);
    return rc;
}

static struct seq *find(struct engine *en, uint64_t id)
{
    for (int i = 0; i < en->n_running; i++)
        if (en->running[i]->id == id) return en->running[i];
    for (struct seq *s = en->waiting; s; s = s->next)
        if (s->id == id) return s;
    return NULL;
}

void engine_cancel(struct engine *en, uint64_t id)
{
    struct seq *s = find(en, id);
    if (s) s->cancelled = true;
}

/* ------------------------------------------------------------------------------------------------ events */

static struct event *event_push(struct engine *en, const struct seq *s, enum event_kind kind)
{
    struct event *ev = &en->events[(en->ev_head + en->ev_len++) % en->ev_cap];
    ev->kind = kind;
    ev->request = s->id;
    return ev;
}

bool engine_poll(struct engine *en, struct event *out)
{
    if (!en->ev_len) return false;
    *out = en->events[en->ev_head];
    en->ev_head = (en->ev_head + 1) % en->ev_cap;
    en->ev_len--;
    return true;
}

static void finish(struct engine *en, struct seq *s, enum finish why)
{
    event_push(en, s, EVENT_DONE)->finish = why;
    sched_drop(en, s);
}

/* ------------------------------------------------------------------------------------------------ the step */

/* Ends what was cancelled, as far as there is room for events. */
static void end_cancelled(struct engine *en)
{
    for (int i = en->n_running - 1; i >= 0 && en->ev_len < en->ev_cap; i--)
        if (en->running[i]->cancelled) finish(en, en->running[i], FINISH_CANCELLED);
    for (struct seq *s = en->waiting, *next; s && en->ev_len < en->ev_cap; s = next) {
        next = s->next;
        if (s->cancelled) finish(en, s, FINISH_CANCELLED);
    }
}

/* Hands out the logits of the prompt positions that this step computed and on_logits has not seen yet. */
static int prompt_logits(struct engine *en, struct seq *s, int first_row, struct err *e)
{
    int from = s->done - s->rows, to = s->done < s->n_prompt ? s->done : s->n_prompt;
    for (int pos = from > s->logits_seen ? from : s->logits_seen; pos < to;) {
        int n = to - pos < en->head_rows ? to - pos : en->head_rows;
        for (int i = 0; i < n; i++) en->rows[i] = first_row + pos - from + i;
        TRY(forward_logits(en, en->rows, n, e));
        s->on_logits(s->user, pos, n, en->host_logits);
        s->logits_seen = pos += n;
    }
    return OK;
}

static bool is_stop(const struct seq *s, int32_t id)
{
    for (int i = 0; i < s->n_stop; i++)
        if (s->stop[i] == id) return true;
    return false;
}

/* Gives the request its next id, from the logits or, where they are NULL, the one that is best; or ends it. */
static void advance(struct engine *en, struct seq *s, const float *logits, int32_t best)
{
    struct event ev = {.id = best};
    if (logits ? !sample(en->sampler, &s->sampling, s->ids, s->len, s->n_prompt, logits, &ev) : best < 0) {
        finish(en, s, FINISH_ERROR);
        return;
    }
    ev.kind = EVENT_TOKEN;
    ev.request = s->id;
    *event_push(en, s, EVENT_TOKEN) = ev;
    en->stats.new_tokens++;
    s->ids[s->len++] = ev.id;
    if (is_stop(s, ev.id)) finish(en, s, FINISH_STOP);
    else if (s->len == s->cap) finish(en, s, FINISH_LENGTH);
}

int engine_step(struct engine *en, struct err *e)
{
    double start = clock_now();
    struct step *st = &en->step;
    end_cancelled(en);
    if (en->ev_len + 2 * (size_t)en->opts.max_seqs > en->ev_cap) return 1; /* events first */
    if (!sched_plan(en)) return en->waiting || en->n_running;

    forward(en);
    sched_commit(en);

    for (int i = 0; i < st->batch.n_seqs; i++)
        if (st->seqs[i]->on_logits) TRY(prompt_logits(en, st->seqs[i], st->seq_begin[i], e));

    /* Sequences whose every id is computed now get the next one, from their last row. */
    int n = 0;
    bool plain = true;
    for (int i = 0; i < st->batch.n_seqs; i++) {
        struct seq *s = st->seqs[i];
        if (s->done < s->len) continue;
        if (s->max_new == 0) {
            finish(en, s, FINISH_LENGTH);
            continue;
        }
        plain &= sampling_is_plain(&s->sampling);
        en->rows[n] = st->seq_begin[i + 1] - 1;
        st->seqs[n++] = s;
    }
    if (n == 0) TRY(en->be->ops->sync(en->be, e));
    else if (plain) TRY(forward_best(en, en->rows, n, e));
    else TRY(forward_logits(en, en->rows, n, e));
    for (int i = 0; i < n; i++)
        advance(en, st->seqs[i], plain ? NULL : en->host_logits + (size_t)i * (size_t)en->config.n_vocab, en->best[i]);

    en->stats.steps++;
    *(st->prefill ? &en->stats.prefill_seconds : &en->stats.decode_seconds) += clock_now() - start;
    return en->waiting || en->n_running;
}

/* ------------------------------------------------------------------------------------------------ what is asked of it */

struct engine_stats engine_stats(const struct engine *en)
{
    struct engine_stats s = en->stats;
    s.running = en->n_running;
    for (const struct seq *q = en->waiting; q; q = q->next) s.waiting++;
    s.pages = en->n_pages;
    s.pages_used = kv_pages_held(en->pages);
    s.pages_cached = kv_pages_cached(en->pages);
    s.device = en->be->ops->stats(en->be);
    return s;
}

const struct model_config *engine_config(const struct engine *en) { return &en->config; }
const char *engine_device(const struct engine *en) { return en->be->name; }
int engine_ctx(const struct engine *en) { return en->opts.ctx; }
int engine_limits(struct engine *en, struct backend_limits *out, struct err *e)
{
    return en->be->ops->limits(en->be, out, e);
}
