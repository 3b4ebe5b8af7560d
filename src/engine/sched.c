/* sched.c: which rows the next step computes. Continuous batching: every running request that only lacks its newest id
 * gets one row first; what is left of the chunk goes to prompts, oldest first. Pages are taken as positions need them;
 * when none is left the youngest request gives its pages back and waits (preemption), to be computed again later from
 * its ids. The oldest running request is never preempted, and the pages hold at least one full context, so there is
 * always progress. */
#include <stdlib.h>
#include <string.h>

#include "engine_priv.h"

static void seq_release_pages(struct engine *en, struct seq *s)
{
    /* Last page first: of a cached context the tail is the first to be taken for other use. */
    while (s->n_pages > 0) kv_page_release(en->pages, s->pages[--s->n_pages]);
    s->n_published = 0;
    s->chain = 0;
    s->done = 0;
}

void seq_free(struct seq *s)
{
    free(s->ids);
    free(s->pages);
    free(s->stop);
    free(s->bias);
    free(s);
}

void sched_drop(struct engine *en, struct seq *s)
{
    seq_release_pages(en, s);
    if (s->state == SEQ_RUNNING) {
        int i = 0;
        while (en->running[i] != s) i++;
        memmove(&en->running[i], &en->running[i + 1], (size_t)(--en->n_running - i) * sizeof(struct seq *));
    } else {
        struct seq **at = &en->waiting;
        while (*at != s) at = &(*at)->next;
        *at = s->next;
        if (!s->next) en->waiting_tail = at;
    }
    seq_free(s);
}

/* Puts a request back among the waiting, in order of arrival. */
static void preempt(struct engine *en, struct seq *s)
{
    struct seq **at = &en->waiting;
    seq_release_pages(en, s);
    s->state = SEQ_WAITING;
    en->n_running--; /* the youngest stands last */
    while (*at && (*at)->order < s->order) at = &(*at)->next;
    s->next = *at;
    *at = s;
    if (!s->next) en->waiting_tail = &s->next;
    en->stats.preemptions++;
}

/* Pages for positions [0, upto) of s. Takes them from younger requests if need be; gives the number of positions that
 * there are pages for. s itself is never preempted here. */
static int ensure_pages(struct engine *en, struct seq *s, int upto)
{
    int want = (upto + KV_PAGE - 1) / KV_PAGE;
    while (s->n_pages < want) {
        int32_t p = kv_page_take(en->pages);
        if (p < 0) {
            struct seq *youngest = en->running[en->n_running - 1];
            if (youngest == s || youngest->rows > 0) break;
            preempt(en, youngest);
            continue;
        }
        s->pages[s->n_pages++] = p;
    }
    int have = s->n_pages * KV_PAGE;
    return have < upto ? have : upto;
}

/* Finds the full pages of s's ids that some earlier request has computed. The last id is always computed anew: its
 * logits are wanted. */
static void share_prefix(struct engine *en, struct seq *s)
{
    if (s->on_logits) return;
    while ((s->n_pages + 1) * KV_PAGE < s->len) {
        kv_chain next;
        int32_t p = kv_page_find(en->pages, s->chain, s->ids + s->n_pages * KV_PAGE, &next);
        if (p < 0) break;
        s->pages[s->n_pages++] = p;
        s->chain = next;
    }
    s->n_published = s->n_pages;
    s->done = s->n_pages * KV_PAGE;
    en->stats.prefix_tokens += (uint64_t)s->done;
}

/* Lets waiting requests run while there is room for their ids and one page to spare for each running one. */
static void admit(struct engine *en)
{
    while (en->waiting && en->n_running < en->opts.max_seqs) {
        struct seq *s = en->waiting;
        share_prefix(en, s);
        int need = (s->len + KV_PAGE - 1) / KV_PAGE - s->n_pages + en->n_running;
        if (en->n_running > 0 && need > kv_pages_available(en->pages)) {
            en->stats.prefix_tokens -= (uint64_t)s->done;
            seq_release_pages(en, s);
            break;
        }
        en->waiting = s->next;
        if (!en->waiting) en->waiting_tail = &en->waiting;
        s->state = SEQ_RUNNING;
        int at = en->n_running++; /* a preempted request is older than some that run: keep the order */
        for (; at > 0 && en->running[at - 1]->order > s->order; at--) en->running[at] = en->running[at - 1];
        en->running[at] = s;
    }
}

static void add_rows(struct engine *en, struct seq *s, int rows)
{
    struct step *st = &en->step;
    struct batch *b = &st->batch;
    memcpy(st->ids + b->T, s->ids + s->done, (size_t)rows * sizeof *s->ids);
    memcpy(st->pages + (size_t)b->n_seqs * (size_t)en->max_pages, s->pages, (size_t)s->n_pages * sizeof *s->pages);
    st->seqs[b->n_seqs] = s;
    st->pos0[b->n_seqs++] = s->done;
    b->T += rows;
    st->seq_begin[b->n_seqs] = b->T;
    s->rows = rows;
    st->prefill |= rows > 1 || s->len == s->n_prompt;
}

bool sched_plan(struct engine *en)
{
    struct step *st = &en->step;
    st->batch = (struct batch){.ids = st->ids, .seq_begin = st->seq_begin, .pos0 = st->pos0, .pages = st->pages,
                               .max_pages = en->max_pages};
    st->seq_begin[0] = 0;
    st->prefill = false;
    admit(en);
    for (int i = 0; i < en->n_running; i++) en->running[i]->rows = 0;
    for (int pass = 0; pass < 2; pass++) { /* decode rows, then prompts; both oldest first */
        for (int i = 0; i < en->n_running; i++) {
            struct seq *s = en->running[i];
            int left = s->len - s->done, room = en->opts.chunk - st->batch.T;
            if (s->rows > 0 || room == 0 || (pass == 0) != (left == 1)) continue;
            int rows = ensure_pages(en, s, s->done + (left < room ? left : room)) - s->done;
            if (rows > 0) add_rows(en, s, rows);
        }
    }
    return st->batch.T > 0;
}

void sched_commit(struct engine *en)
{
    for (int i = 0; i < en->step.batch.n_seqs; i++) {
        struct seq *s = en->step.seqs[i];
        s->done += s->rows;
        if (s->done <= s->n_prompt) en->stats.prompt_tokens += (uint64_t)s->rows;
        for (; (s->n_published + 1) * KV_PAGE <= s->done; s->n_published++) {
            int at = s->n_published;
            s->chain = kv_page_publish(en->pages, s->pages[at], s->chain, s->ids + at * KV_PAGE);
        }
    }
}
