/* kv.c: who owns which KV page, and the prefix cache over full pages.
 *
 * A cached page is a node: (chain of the page before it, its ids) -> page, in a hash table. Chains are numbers given
 * out once and never again, and a lookup compares the chain and all ids, so two contexts are never confused, whatever
 * a user sends. When a page is taken for new content its chain dies with it, and the pages after it can no longer be
 * reached: they grow old and are taken in turn. Lists are intrusive and indices are page numbers: nothing allocates
 * after open. */
#include <stdlib.h>
#include <string.h>

#include "engine_priv.h"

struct page {
    int refs;
    bool published;
    int32_t prev, next;  /* idle list: free pages at its head, cached ones behind, longest unused first */
    int32_t bucket_next; /* in its hash bucket */
    kv_chain before, chain;
    int32_t ids[KV_PAGE];
};

struct kv_pages {
    struct page *page; /* [n + 1]: the last one is the idle list's sentinel */
    int32_t *bucket;   /* [n_buckets] page or -1 */
    size_t n_buckets;  /* a power of two */
    int n, n_idle, n_cached;
    kv_chain next_chain;
};

static void idle_remove(struct kv_pages *k, int32_t p)
{
    struct page *g = &k->page[p];
    k->page[g->prev].next = g->next;
    k->page[g->next].prev = g->prev;
    k->n_idle--;
    k->n_cached -= g->published;
}

static void idle_insert(struct kv_pages *k, int32_t p)
{
    struct page *g = &k->page[p], *end = &k->page[k->n];
    int32_t after = g->published ? end->prev : k->n; /* cached: at the tail; free: at the head */
    g->prev = after;
    g->next = k->page[after].next;
    k->page[g->next].prev = p;
    k->page[after].next = p;
    k->n_idle++;
    k->n_cached += g->published;
}

int kv_pages_open(struct kv_pages **out, int n_pages, struct err *e)
{
    struct kv_pages *k = NULL;
    size_t n = (size_t)n_pages;
    int rc;
    if ((rc = mem_new(&k, sizeof *k, e)) < 0) return rc;
    k->n = n_pages;
    k->n_buckets = 16;
    while (k->n_buckets < 2 * n) k->n_buckets *= 2;
    if ((rc = mem_new(&k->page, (n + 1) * sizeof *k->page, e)) < 0) goto fail;
    if ((rc = mem_new(&k->bucket, k->n_buckets * sizeof *k->bucket, e)) < 0) goto fail;
    for (size_t i = 0; i < k->n_buckets; i++) k->bucket[i] = -1;
    k->page[n_pages].prev = k->page[n_pages].next = n_pages;
    for (int32_t p = n_pages - 1; p >= 0; p--) idle_insert(k, p);
    k->next_chain = 1;
    *out = k;
    return OK;
fail:
    kv_pages_close(&k);
    return rc;
}

void kv_pages_close(struct kv_pages **k)
{
    if (!*k) return;
    free((*k)->page);
    free((*k)->bucket);
    free(*k);
    *k = NULL;
}

int kv_pages_available(const struct kv_pages *k) { return k->n_idle; }
int kv_pages_held(const struct kv_pages *k) { return k->n - k->n_idle; }
int kv_pages_cached(const struct kv_pages *k) { return k->n_cached; }

static int32_t *bucket_of(struct kv_pages *k, kv_chain before, const int32_t *ids)
{
    uint64_t h = before * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < KV_PAGE; i++) {
        h = (h ^ (uint32_t)ids[i]) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    return &k->bucket[h & (k->n_buckets - 1)];
}

static void unpublish(struct kv_pages *k, int32_t p)
{
    struct page *g = &k->page[p];
    int32_t *at = bucket_of(k, g->before, g->ids);
    while (*at != p) at = &k->page[*at].bucket_next;
    *at = g->bucket_next;
    g->published = false;
}

int32_t kv_page_take(struct kv_pages *k)
{
    int32_t p = k->page[k->n].next;
    if (p == k->n) return -1;
    idle_remove(k, p);
    if (k->page[p].published) unpublish(k, p);
    k->page[p].refs = 1;
    return p;
}

void kv_page_release(struct kv_pages *k, int32_t page)
{
    if (--k->page[page].refs == 0) idle_insert(k, page);
}

static int32_t lookup(struct kv_pages *k, kv_chain prev, const int32_t *ids)
{
    int32_t p = *bucket_of(k, prev, ids);
    for (; p >= 0; p = k->page[p].bucket_next)
        if (k->page[p].before == prev && !memcmp(k->page[p].ids, ids, sizeof k->page[p].ids)) break;
    return p;
}

kv_chain kv_page_publish(struct kv_pages *k, int32_t page, kv_chain prev, const int32_t ids[KV_PAGE])
{
    struct page *g = &k->page[page];
    int32_t known = lookup(k, prev, ids);
    if (known >= 0) return k->page[known].chain;
    int32_t *at = bucket_of(k, prev, ids);
    memcpy(g->ids, ids, sizeof g->ids);
    g->before = prev;
    g->chain = k->next_chain++;
    g->published = true;
    g->bucket_next = *at;
    *at = page;
    return g->chain;
}

int32_t kv_page_find(struct kv_pages *k, kv_chain prev, const int32_t ids[KV_PAGE], kv_chain *next)
{
    int32_t p = lookup(k, prev, ids);
    if (p < 0) return -1;
    if (k->page[p].refs++ == 0) idle_remove(k, p);
    *next = k->page[p].chain;
    return p;
}
