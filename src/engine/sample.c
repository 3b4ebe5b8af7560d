/* sample.c: from logits to one id. Works on a list of candidates kept in one scratch array; a full sort of the
 * vocabulary happens only where a cut needs more candidates than the first selection holds. Nothing allocates. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine_priv.h"

struct candidate {
    float logit;
    int32_t id;
};

struct sampler {
    int n_vocab;
    struct candidate *cand; /* [V] */
    float *work;            /* [V] logits after bias, penalties and temperature */
    uint16_t *count;        /* [V] uses of each id in prompt (bit 15) and answer; all zero between calls */
};

enum { FIRST_SELECTION = 256, IN_PROMPT = 1 << 15 };

int sampler_open(struct sampler **out, int n_vocab, struct err *e)
{
    struct sampler *s;
    TRY(mem_new(&s, sizeof *s, e));
    s->n_vocab = n_vocab;
    int rc = mem_new(&s->cand, (size_t)n_vocab * sizeof *s->cand, e);
    if (rc == OK) rc = mem_new(&s->work, (size_t)n_vocab * sizeof *s->work, e);
    if (rc == OK) rc = mem_new(&s->count, (size_t)n_vocab * sizeof *s->count, e);
    if (rc < 0) {
        sampler_close(&s);
        return rc;
    }
    *out = s;
    return OK;
}

void sampler_close(struct sampler **s)
{
    if (!*s) return;
    free((*s)->cand);
    free((*s)->work);
    free((*s)->count);
    free(*s);
    *s = NULL;
}

/* Greater first: larger logit, then lower id, so that ties do not depend on the order of a sort. NaN counts as least. */
static bool before(struct candidate a, struct candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

static void swap(struct candidate *a, struct candidate *b)
{
    struct candidate t = *a;
    *a = *b;
    *b = t;
}

static void sift_down(struct candidate *heap, int n, int at)
{
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(heap[child], heap[child + 1])) child++; /* the worst of the kept is on top */
        if (!before(heap[at], heap[child])) return;
        swap(&heap[at], &heap[child]);
    }
}

/* The k best of logits[n], sorted, into out; returns how many there are. Logits of -inf and NaN are no candidates.
 * A heap with the worst of the kept on top, then a heap sort of it: in place, where qsort may allocate. */
static int select_best(const float *logits, int n, int k, struct candidate *out)
{
    int have = 0;
    bool heap = false;
    for (int i = 0; i < n && k > 0; i++) {
        struct candidate c = {logits[i], i};
        if (!(c.logit > -INFINITY)) continue;
        if (have < k) {
            out[have++] = c;
            continue;
        }
        if (!heap)
            for (int j = k / 2 - 1; j >= 0; j--) sift_down(out, k, j);
        heap = true;
        if (before(c, out[0])) {
            out[0] = c;
            sift_down(out, k, 0);
        }
    }
    for (int j = have / 2 - 1; j >= 0 && !heap; j--) sift_down(out, have, j);
    for (int last = have - 1; last > 0; last--) {
        swap(&out[0], &out[last]);
        sift_down(out, last, 0);
    }
    return have;
}

/* splitmix64 over (seed, position): a counter-based generator, so the draw at a position needs no history.
 * Uniform in [0, 1). */
static double uniform(uint64_t seed, uint64_t position)
{
    uint64_t z = seed + (position + 1) * 0x9E3779B97F4A7C15u;
    for (int round = 0; round < 2; round++) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        z += seed;
    }
    return (double)(z >> 11) * 0x1p-53;
}

static void penalise(struct sampler *s, const struct sampling *p, const int32_t *ids, int n, int n_prompt, float *logits)
{
    bool repetition = p->repetition_penalty > 0 && p->repetition_penalty != 1;
    if (!repetition && p->presence_penalty == 0 && p->frequency_penalty == 0) return;
    for (int i = 0; i < n; i++) {
        if (i < n_prompt) s->count[ids[i]] |= IN_PROMPT;
        else if ((s->count[ids[i]] & (IN_PROMPT - 1)) < IN_PROMPT - 1) s->count[ids[i]]++;
    }
    for (int i = 0; i < n; i++) {
        int32_t id = ids[i];
        int used = s->count[id] & (IN_PROMPT - 1);
        if (s->count[id] == 0) continue; /* seen before in this loop */
        if (repetition) logits[id] = logits[id] > 0 ? logits[id] / p->repetition_penalty : logits[id] * p->repetition_penalty;
        if (used > 0) logits[id] -= p->presence_penalty + p->frequency_penalty * (float)used;
        s->count[id] = 0;
    }
}

/* log(sum(exp(logits))) over all ids, in double: order of the sum is that of the ids. */
static double log_sum_exp(const float *logits, int n, float *max)
{
    double sum = 0;
    *max = -INFINITY;
    for (int i = 0; i < n; i++)
        if (logits[i] > *max) *max = logits[i];
    for (int i = 0; i < n; i++)
        if (logits[i] > -INFINITY) sum += (double)expf(logits[i] - *max);
    return log(sum) + (double)*max;
}

/* The id drawn from all of logits[n], in the order of the ids: no cut needs no sort. -1 if there is none to draw. */
static int32_t draw_any(const float *logits, int n, double u)
{
    float max;
    double mass = exp(log_sum_exp(logits, n, &max) - (double)max), run = 0;
    int32_t last = -1;
    for (int i = 0; i < n; i++) {
        if (!(logits[i] > -INFINITY)) continue;
        run += (double)expf(logits[i] - max);
        last = i;
        if (run > u * mass) break;
    }
    return last;
}

/* Index of the candidate drawn with weights exp(logit - best) among the n that a cut left. */
static int draw(const struct candidate *cand, int n, double u)
{
    double sum = 0, run = 0;
    for (int i = 0; i < n; i++) sum += (double)expf(cand[i].logit - cand[0].logit);
    for (int i = 0; i < n; i++) {
        run += (double)expf(cand[i].logit - cand[0].logit);
        if (run > u * sum) return i;
    }
    return n - 1;
}

/* Of the n best candidates, how many top_p and min_p leave; n if the cut may lie beyond them. mass: the sum of
 * exp(logit - best) that top_p is a share of. */
static int cut_at(const struct candidate *cand, int n, const struct sampling *p, double mass)
{
    bool nucleus = p->top_p > 0 && p->top_p < 1;
    double run = 0;
    for (int i = 0; i < n; i++) {
        double weight = (double)expf(cand[i].logit - cand[0].logit);
        if (i > 0 && p->min_p > 0 && weight < (double)p->min_p) return i;
        run += weight;
        if (nucleus && run >= (double)p->top_p * mass) return i + 1;
    }
    return n;
}

/* Fills s->cand with the candidates that top_k, top_p and min_p leave, best first; returns their number. */
static int cut(struct sampler *s, const struct sampling *p, const float *logits)
{
    int V = s->n_vocab, k = p->top_k > 0 && p->top_k < V ? p->top_k : V;
    double mass = 0;
    if (k == V) {
        /* top_p over all ids: their mass needs no order, and the cut nearly always lies among the first few. */
        int n = select_best(logits, V, V < FIRST_SELECTION ? V : FIRST_SELECTION, s->cand);
        for (int i = 0; i < V && n > 0; i++)
            if (logits[i] > -INFINITY) mass += (double)expf(logits[i] - s->cand[0].logit);
        int kept = cut_at(s->cand, n, p, mass);
        if (kept < n || n < FIRST_SELECTION) return kept;
        n = select_best(logits, V, V, s->cand);
        return cut_at(s->cand, n, p, mass);
    }
    int n = select_best(logits, V, k, s->cand);
    for (int i = 0; i < n; i++) mass += (double)expf(s->cand[i].logit - s->cand[0].logit);
    return cut_at(s->cand, n, p, mass);
}

static bool reshapes(const struct sampling *p)
{
    return p->n_bias > 0 || p->temperature > 0 || (p->repetition_penalty > 0 && p->repetition_penalty != 1) ||
           p->presence_penalty != 0 || p->frequency_penalty != 0;
}

bool sampling_is_plain(const struct sampling *p) { return !reshapes(p) && !p->logprobs; }

bool sample(struct sampler *s, const struct sampling *p, const int32_t *ids, int n, int n_prompt, const float *logits,
            struct event *ev)
{
    const float *from = logits;
    if (reshapes(p)) {
        memcpy(s->work, logits, (size_t)s->n_vocab * sizeof *logits);
        for (int i = 0; i < p->n_bias; i++) s->work[p->bias[i].id] += p->bias[i].bias;
        penalise(s, p, ids, n, n_prompt, s->work);
        for (int i = 0; i < s->n_vocab && p->temperature > 0; i++) s->work[i] /= p->temperature;
        from = s->work;
    }
    bool cuts = (p->top_k > 0 && p->top_k < s->n_vocab) || (p->top_p > 0 && p->top_p < 1) || p->min_p > 0;
    double u = uniform(p->seed, (uint64_t)n);
    int kept;
    ev->n_top = 0;
    ev->logprob = 0;
    if (p->temperature <= 0) {
        kept = select_best(from, s->n_vocab, 1, s->cand);
        ev->id = kept ? s->cand[0].id : -1;
    } else if (cuts) {
        kept = cut(s, p, from);
        ev->id = kept ? s->cand[draw(s->cand, kept, u)].id : -1;
    } else {
        ev->id = draw_any(from, s->n_vocab, u);
    }
    if (ev->id < 0) return false;
    if (!p->logprobs) return true;
    float max;
    double lse = log_sum_exp(logits, s->n_vocab, &max);
    ev->logprob = (float)((double)logits[ev->id] - lse);
    ev->n_top = select_best(logits, s->n_vocab, p->n_top, s->cand);
    for (int i = 0; i < ev->n_top; i++)
        ev->top[i] = (struct token_prob){s->cand[i].id, (float)((double)s->cand[i].logit - lse)};
    return true;
}
