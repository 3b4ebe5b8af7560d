/* test_engine: what a request yields does not depend on its company, the threads, the chunks, the cache or preemption;
 * requests end as they should; a step allocates nothing. The model is tiny and random: numbers matter here, not text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "engine_priv.h"
#include "tiny_model.h"

/* ------------------------------------------------------------------------------------------------ allocation guard */

/* The linker sends the tree's allocations through these (see --wrap in CMakeLists.txt). */
void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t m);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t a, size_t n);
int __real_posix_memalign(void **p, size_t a, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t m);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t a, size_t n);
int __wrap_posix_memalign(void **p, size_t a, size_t n);

static long allocations;
void *__wrap_malloc(size_t n) { return allocations++, __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t m) { return allocations++, __real_calloc(n, m); }
void *__wrap_realloc(void *p, size_t n) { return allocations++, __real_realloc(p, n); }
void *__wrap_aligned_alloc(size_t a, size_t n) { return allocations++, __real_aligned_alloc(a, n); }
int __wrap_posix_memalign(void **p, size_t a, size_t n) { return allocations++, __real_posix_memalign(p, a, n); }

/* ------------------------------------------------------------------------------------------------ fixture */

enum { MAX_REQUESTS = 80, MAX_NEW = 24, PROMPT = 70 };

static char dir[64];
static struct model *model;

static int open_model(void **state)
{
    struct err e;
    (void)state;
    tiny_model_write(dir);
    if (model_open(&model, dir, &e) < 0) fail_msg("%s", e.msg);
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    model_close(&model);
    tiny_model_remove(dir);
    return 0;
}

static struct engine *engine_of(struct engine_opts o)
{
    struct engine *en;
    struct err e;
    o.quiet = true;
    if (engine_open(&en, model, &o, &e) < 0) fail_msg("%s", e.msg);
    return en;
}

/* Prompt i: its own ids and length. */
static size_t prompt_of(int i, int32_t *ids)
{
    size_t n = (size_t)(3 + (i * 37) % PROMPT);
    for (size_t j = 0; j < n; j++) ids[j] = (int32_t)((j * j + 31 * (size_t)i + 5 * j * (size_t)i) % TINY_VOCAB);
    return n;
}

struct answer {
    int32_t ids[MAX_NEW];
    float logprobs[MAX_NEW];
    int n;
    enum finish finish;
    bool done;
};

static uint64_t submit(struct engine *en, int i, int max_new, float temperature)
{
    int32_t ids[PROMPT + 3];
    struct request r = {.ids = ids, .n_ids = prompt_of(i, ids), .max_new = max_new,
                        .sampling = {.temperature = temperature, .seed = (uint64_t)i, .logprobs = true}};
    uint64_t id;
    struct err e;
    if (engine_submit(en, &r, &id, &e) < 0) fail_msg("%s", e.msg);
    return id;
}

/* Runs until all are done; ids[k] is the request of answers[k]. */
static void drive(struct engine *en, const uint64_t *ids, struct answer *answers, int n)
{
    struct err e;
    struct event ev;
    int rc = 1;
    for (int steps = 0; rc > 0; steps++) {
        assert_true(steps < 100000);
        if ((rc = engine_step(en, &e)) < 0) fail_msg("%s", e.msg);
        while (engine_poll(en, &ev)) {
            int k = 0;
            while (k < n && ids[k] != ev.request) k++;
            assert_true(k < n);
            assert_false(answers[k].done);
            if (ev.kind == EVENT_DONE) {
                answers[k].done = true;
                answers[k].finish = ev.finish;
            } else {
                answers[k].ids[answers[k].n] = ev.id;
                answers[k].logprobs[answers[k].n++] = ev.logprob;
            }
        }
    }
    for (int k = 0; k < n; k++) assert_true(answers[k].done);
}

static struct answer answer_alone(struct engine_opts o, int i, float temperature)
{
    struct engine *en = engine_of(o);
    struct answer a = {0};
    uint64_t id = submit(en, i, MAX_NEW, temperature);
    drive(en, &id, &a, 1);
    engine_close(&en);
    return a;
}

static void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->ids, b->ids, (size_t)a->n * sizeof a->ids[0]);
    assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * sizeof a->logprobs[0]); /* the same bits */
}

/* ------------------------------------------------------------------------------------------------ independence */

static void company_does_not_matter(void **state)
{
    static const int sizes[] = {3, 64};
    static struct answer alone[64], together[64];
    (void)state;
    for (int i = 0; i < 64; i++) alone[i] = answer_alone((struct engine_opts){.backend.threads = 2}, i, i % 2 ? 1.0f : 0);
    for (size_t s = 0; s < COUNT_OF(sizes); s++) {
        struct engine *en = engine_of((struct engine_opts){.backend.threads = 2, .max_seqs = sizes[s], .kv_tokens = 8192});
        uint64_t ids[64];
        memset(together, 0, sizeof together);
        for (int i = 0; i < sizes[s]; i++) ids[i] = submit(en, i, MAX_NEW, i % 2 ? 1.0f : 0);
        drive(en, ids, together, sizes[s]);
        assert_int_equal(engine_stats(en).preemptions, 0);
        for (int i = 0; i < sizes[s]; i++) assert_same(&alone[i], &together[i]);
        engine_close(&en);
    }
}

/* Greedy requests that ask for nothing more need no logits on the host: alone, together, and beside one that does. */
static void plain_greedy_is_greedy(void **state)
{
    enum { N = 5 };
    struct answer want[N], got[N];
    (void)state;
    for (int i = 0; i < N; i++) want[i] = answer_alone((struct engine_opts){.backend.threads = 2}, i, 0);
    for (int beside = 0; beside < 2; beside++) { /* the last one asks for probabilities */
        struct engine *en = engine_of((struct engine_opts){.backend.threads = 2, .kv_tokens = 8192});
        uint64_t ids[N];
        memset(got, 0, sizeof got);
        for (int i = 0; i < N; i++) {
            int32_t prompt[PROMPT + 3];
            struct request r = {.ids = prompt, .n_ids = prompt_of(i, prompt), .max_new = MAX_NEW};
            struct err e;
            if (beside && i == N - 1) ids[i] = submit(en, i, MAX_NEW, 0);
            else if (engine_submit(en, &r, &ids[i], &e) < 0) fail_msg("%s", e.msg);
        }
        drive(en, ids, got, N);
        for (int i = 0; i < N; i++) {
            assert_int_equal(got[i].n, want[i].n);
            assert_memory_equal(got[i].ids, want[i].ids, sizeof want[i].ids);
        }
        engine_close(&en);
    }
}

struct seen {
    float rows[PROMPT + 3][TINY_VOCAB];
    int64_t n;
};

static void keep_logits(void *user, int64_t pos, int n, const float *rows)
{
    struct seen *s = user;
    assert_int_equal(pos, s->n);
    memcpy(s->rows[pos], rows, (size_t)n * sizeof s->rows[0]);
    s->n += n;
}

static void prompt_logits_of(struct engine_opts o, int i, struct seen *out)
{
    struct engine *en = engine_of(o);
    int32_t ids[PROMPT + 3];
    struct request r = {.ids = ids, .n_ids = prompt_of(i, ids), .on_logits = keep_logits, .user = out};
    struct answer a = {0};
    uint64_t id;
    struct err e;
    out->n = 0;
    if (engine_submit(en, &r, &id, &e) < 0) fail_msg("%s", e.msg);
    drive(en, &id, &a, 1);
    assert_int_equal(a.n, 0);
    assert_int_equal(out->n, (int64_t)r.n_ids);
    engine_close(&en);
}

static void threads_and_chunks_do_not_matter(void **state)
{
    static const int threads[] = {1, 2, 5}, chunks[] = {1, 7, 33, 512};
    static struct seen want, got;
    (void)state;
    prompt_logits_of((struct engine_opts){.backend.threads = 1, .max_seqs = 1}, 50, &want);
    for (int64_t i = 0; i < want.n; i++)
        for (int v = 0; v < TINY_VOCAB; v++) assert_true(isfinite(want.rows[i][v]));
    for (size_t t = 0; t < COUNT_OF(threads); t++)
        for (size_t c = 0; c < COUNT_OF(chunks); c++) {
            prompt_logits_of((struct engine_opts){.backend.threads = threads[t], .max_seqs = 1, .chunk = chunks[c]}, 50, &got);
            assert_int_equal(got.n, want.n);
            assert_memory_equal(got.rows, want.rows, (size_t)want.n * sizeof want.rows[0]);
        }
}

static void a_found_prefix_does_not_matter(void **state)
{
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 1});
    struct answer first = {0}, again = {0};
    (void)state;
    uint64_t id = submit(en, 9, MAX_NEW, 0); /* 3 + 333 % 70 = 56 ids: one full page */
    drive(en, &id, &first, 1);
    assert_int_equal(engine_stats(en).prefix_tokens, 0);
    id = submit(en, 9, MAX_NEW, 0);
    drive(en, &id, &again, 1);
    assert_int_equal(engine_stats(en).prefix_tokens, KV_PAGE);
    assert_same(&first, &again);
    engine_close(&en);
}

static void preemption_does_not_matter(void **state)
{
    enum { N = 12 };
    static struct answer alone[N], crowded[N];
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 2, .max_seqs = N, .ctx = 160, .kv_tokens = 160});
    uint64_t ids[N];
    (void)state;
    for (int i = 0; i < N; i++) ids[i] = submit(en, i, MAX_NEW, 0.7f);
    drive(en, ids, crowded, N);
    assert_true(engine_stats(en).preemptions > 0);
    assert_int_equal(engine_stats(en).pages_used, 0);
    engine_close(&en);
    for (int i = 0; i < N; i++) {
        alone[i] = answer_alone((struct engine_opts){.backend.threads = 2}, i, 0.7f);
        assert_same(&alone[i], &crowded[i]);
    }
}

static void a_continuation_is_the_one_it_would_have_been(void **state)
{
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 1});
    struct answer whole = {0}, rest = {0};
    int32_t ids[PROMPT + 3 + MAX_NEW];
    size_t n = prompt_of(4, ids);
    struct err e;
    (void)state;
    uint64_t id = submit(en, 4, MAX_NEW, 1.0f);
    drive(en, &id, &whole, 1);
    memcpy(ids + n, whole.ids, 10 * sizeof *ids);
    struct request r = {.ids = ids, .n_ids = n + 10, .max_new = MAX_NEW - 10,
                        .sampling = {.temperature = 1.0f, .seed = 4, .logprobs = true}};
    if (engine_submit(en, &r, &id, &e) < 0) fail_msg("%s", e.msg);
    drive(en, &id, &rest, 1);
    assert_int_equal(rest.n, MAX_NEW - 10);
    assert_memory_equal(rest.ids, whole.ids + 10, (MAX_NEW - 10) * sizeof *ids);
    engine_close(&en);
}

static void a_step_allocates_nothing(void **state)
{
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 2, .max_seqs = 4});
    static struct answer answers[4];
    uint64_t ids[4];
    struct err e;
    struct event ev;
    (void)state;
    /* Warm-up: scratch of the largest step. */
    for (int i = 0; i < 4; i++) ids[i] = submit(en, i + 50, MAX_NEW, 1.0f);
    drive(en, ids, answers, 4);
    for (int i = 0; i < 4; i++) submit(en, i + 50, MAX_NEW, 1.0f);
    long before = allocations;
    int rc;
    while ((rc = engine_step(en, &e)) > 0)
        while (engine_poll(en, &ev)) {}
    assert_int_equal(rc, 0);
    assert_int_equal(allocations, before);
    engine_close(&en);
}

/* ------------------------------------------------------------------------------------------------ ends */

static void requests_end(void **state)
{
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 1, .ctx = 96, .max_seqs = 2});
    static struct answer b[3];
    struct answer a = {0};
    struct err e;
    (void)state;

    uint64_t id = submit(en, 1, 5, 0);
    drive(en, &id, &a, 1);
    assert_int_equal(a.finish, FINISH_LENGTH);
    assert_int_equal(a.n, 5);

    /* the third id it gives, as a stop id, ends it there */
    int32_t ids[PROMPT + 3], stop = a.ids[2];
    int first = 0;
    while (a.ids[first] != stop) first++;
    struct request r = {.ids = ids, .n_ids = prompt_of(1, ids), .max_new = 5, .stop = &stop, .n_stop = 1};
    memset(&a, 0, sizeof a);
    if (engine_submit(en, &r, &id, &e) < 0) fail_msg("%s", e.msg);
    drive(en, &id, &a, 1);
    assert_int_equal(a.finish, FINISH_STOP);
    assert_int_equal(a.n, first + 1);
    assert_int_equal(a.ids[first], stop);

    /* the context's end */
    memset(&a, 0, sizeof a);
    r = (struct request){.ids = ids, .n_ids = prompt_of(1, ids), .max_new = 1000};
    size_t n = r.n_ids;
    if (engine_submit(en, &r, &id, &e) < 0) fail_msg("%s", e.msg);
    int rc;
    struct event ev;
    int got = 0;
    while ((rc = engine_step(en, &e)) >= 0) {
        while (engine_poll(en, &ev)) {
            if (ev.kind == EVENT_TOKEN) got++;
            else assert_int_equal(ev.finish, FINISH_LENGTH);
        }
        if (rc == 0) break;
    }
    assert_int_equal(got, 96 - (int)n);

    /* cancelled: one that runs, one that waits */
    uint64_t three[3];
    for (int i = 0; i < 3; i++) three[i] = submit(en, i, 20, 0);
    engine_cancel(en, three[2]);
    engine_cancel(en, 999);
    assert_true(engine_step(en, &e) == 1);
    engine_cancel(en, three[0]);
    drive(en, three, b, 3);
    assert_int_equal(b[0].finish, FINISH_CANCELLED);
    assert_int_equal(b[1].finish, FINISH_LENGTH);
    assert_int_equal(b[1].n, 20);
    assert_int_equal(b[2].finish, FINISH_CANCELLED);
    assert_int_equal(b[2].n, 0);
    assert_int_equal(engine_stats(en).pages_used, 0);
    engine_close(&en);
}

static void bad_requests_are_refused(void **state)
{
    struct engine *en = engine_of((struct engine_opts){.backend.threads = 1, .ctx = 64});
    static int32_t ids[100];
    struct logit_bias bias = {TINY_VOCAB, 1};
    struct err e;
    uint64_t id;
    (void)state;
    ids[2] = TINY_VOCAB;
    static const struct { const char *needle; int n, max_new; float temperature, top_p; int n_bias; } cases[] = {
        {"prompt is empty", 0, 1, 0, 0, 0},
        {"64", 64, 1, 0, 0, 0},
        {"64", 65, 0, 0, 0, 0},
        {"128", 3, 1, 0, 0, 0},
        {"temperature", 2, 1, NAN, 0, 0},
        {"temperature", 2, 1, -1, 0, 0},
        {"top_p", 2, 1, 0, 1.5f, 0},
        {"logit bias", 2, 1, 0, 0, 1},
        {"max_new", 2, -1, 0, 0, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct request r = {.ids = ids, .n_ids = (size_t)cases[i].n, .max_new = cases[i].max_new,
                            .sampling = {.temperature = cases[i].temperature, .top_p = cases[i].top_p, .bias = &bias,
                                         .n_bias = cases[i].n_bias}};
        assert_int_equal(engine_submit(en, &r, &id, &e), ERR_INPUT);
        if (!strstr(e.msg, cases[i].needle)) fail_msg("case %zu: '%s' lacks '%s'", i, e.msg, cases[i].needle);
    }
    assert_int_equal(engine_step(en, &e), 0);
    engine_close(&en);
    struct engine_opts o = {.ctx = 100000, .quiet = true};
    assert_int_equal(engine_open(&en, model, &o, &e), ERR_INPUT);
    o = (struct engine_opts){.kv_tokens = 1000000000, .quiet = true};
    assert_int_equal(engine_open(&en, model, &o, &e), ERR_NOMEM);
    assert_non_null(strstr(e.msg, "GB are free"));
}

/* ------------------------------------------------------------------------------------------------ sampler, pages */

static int32_t choose(struct sampling p, const float *logits, int V, const int32_t *ids, int n, int n_prompt)
{
    struct sampler *s;
    struct event ev;
    struct err e;
    assert_int_equal(sampler_open(&s, V, &e), OK);
    bool ok = sample(s, &p, ids, n, n_prompt, logits, &ev);
    sampler_close(&s);
    return ok ? ev.id : -1;
}

static void the_sampler_chooses(void **state)
{
    enum { V = 1000 };
    static float z[V];
    static const int32_t ids[] = {5, 7, 7};
    (void)state;
    for (int i = 0; i < V; i++) z[i] = (float)(i % 10);
    assert_int_equal(choose((struct sampling){0}, z, V, ids, 3, 1), 9); /* the lowest of the ties */
    struct logit_bias up = {500, 100}, down = {9, -INFINITY};
    assert_int_equal(choose((struct sampling){.bias = &up, .n_bias = 1}, z, V, ids, 3, 1), 500);
    assert_int_equal(choose((struct sampling){.bias = &down, .n_bias = 1}, z, V, ids, 3, 1), 19);
    z[7] = 20, z[5] = 19;
    assert_int_equal(choose((struct sampling){0}, z, V, ids, 3, 1), 7);
    assert_int_equal(choose((struct sampling){.presence_penalty = 2}, z, V, ids, 3, 1), 5);    /* 5 is in the prompt only */
    assert_int_equal(choose((struct sampling){.frequency_penalty = 0.6f}, z, V, ids, 3, 1), 5); /* 7 twice in the answer */
    assert_int_equal(choose((struct sampling){.frequency_penalty = 0.4f}, z, V, ids, 3, 1), 7);
    assert_int_equal(choose((struct sampling){.repetition_penalty = 4}, z, V, ids, 3, 1), 9); /* prompt and answer */

    /* Draws follow the probabilities: two ids with odds 3 to 1, everything else far away. */
    for (int i = 0; i < V; i++) z[i] = -60;
    z[100] = logf(3), z[900] = 0;
    static const struct sampling kinds[] = {{.temperature = 1}, {.temperature = 1, .top_k = 5}, {.temperature = 1, .top_p = 0.999f},
                                            {.temperature = 1, .min_p = 0.1f}};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        int hits = 0;
        for (int seed = 0; seed < 4000; seed++) {
            struct sampling p = kinds[k];
            p.seed = (uint64_t)seed;
            int32_t id = choose(p, z, V, ids, 3, 1);
            assert_true(id == 100 || id == 900);
            hits += id == 100;
        }
        assert_in_range(hits, 2890, 3110); /* 3000 +- 4 sigma (27) */
    }
    /* The cuts: each leaves only the best. */
    static const struct sampling narrow[] = {{.temperature = 1, .top_k = 1}, {.temperature = 1, .top_p = 0.7f},
                                             {.temperature = 1, .min_p = 0.5f}};
    for (size_t k = 0; k < COUNT_OF(narrow); k++)
        for (int seed = 0; seed < 200; seed++) {
            struct sampling p = narrow[k];
            p.seed = (uint64_t)seed;
            assert_int_equal(choose(p, z, V, ids, 3, 1), 100);
        }
    /* A flat distribution needs more candidates than the first selection: all are reached, none beyond the cut. */
    for (int i = 0; i < V; i++) z[i] = -(float)i * 1e-3f;
    int last = 0;
    for (int seed = 0; seed < 3000; seed++) {
        int32_t id = choose((struct sampling){.temperature = 1, .top_p = 0.5f, .seed = (uint64_t)seed}, z, V, ids, 3, 1);
        if (id > last) last = id;
    }
    assert_in_range(last, 350, 380); /* 1 - exp(-n / 1000) = 0.5 (1 - exp(-1)) at n = 379.9 */
    for (int i = 0; i < V; i++) z[i] = NAN;
    assert_int_equal(choose((struct sampling){0}, z, V, ids, 3, 1), -1);
    assert_int_equal(choose((struct sampling){.temperature = 1}, z, V, ids, 3, 1), -1);
    assert_int_equal(choose((struct sampling){.temperature = 1, .top_k = 3}, z, V, ids, 3, 1), -1);
}

static void pages_are_found_and_taken(void **state)
{
    struct kv_pages *k;
    struct err e;
    int32_t a[KV_PAGE], b[KV_PAGE];
    kv_chain chain;
    (void)state;
    for (int i = 0; i < KV_PAGE; i++) a[i] = i, b[i] = 2 * i;
    assert_int_equal(kv_pages_open(&k, 3, &e), OK);
    int32_t p = kv_page_take(k), q = kv_page_take(k), r = kv_page_take(k);
    assert_int_equal(kv_page_take(k), -1);
    kv_chain ca = kv_page_publish(k, p, 0, a), cb = kv_page_publish(k, q, ca, b);
    assert_int_equal(kv_page_publish(k, r, 0, a), ca); /* known already: r stays private */
    assert_int_equal(kv_page_find(k, 0, b, &chain), -1);
    assert_int_equal(kv_page_find(k, 0, a, &chain), p);
    assert_int_equal(chain, ca);
    assert_int_equal(kv_page_find(k, ca, b, &chain), q);
    assert_int_equal(chain, cb);
    kv_page_release(k, r), kv_page_release(k, q), kv_page_release(k, q), kv_page_release(k, p);
    assert_int_equal(kv_pages_held(k), 1); /* p is still held once */
    kv_page_release(k, p);
    assert_int_equal(kv_pages_cached(k), 2);
    assert_int_equal(kv_page_take(k), r); /* free before cached */
    assert_int_equal(kv_page_take(k), q); /* the tail was released first */
    assert_int_equal(kv_page_find(k, ca, b, &chain), -1);
    assert_int_equal(kv_page_find(k, 0, a, &chain), p);
    kv_page_release(k, p);
    assert_int_equal(kv_page_take(k), p);
    assert_int_equal(kv_page_find(k, 0, a, &chain), -1);
    kv_pages_close(&k);
    assert_null(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(company_does_not_matter),
        cmocka_unit_test(plain_greedy_is_greedy),
        cmocka_unit_test(threads_and_chunks_do_not_matter),
        cmocka_unit_test(a_found_prefix_does_not_matter),
        cmocka_unit_test(preemption_does_not_matter),
        cmocka_unit_test(a_continuation_is_the_one_it_would_have_been),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(requests_end),
        cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(the_sampler_chooses),
        cmocka_unit_test(pages_are_found_and_taken),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
