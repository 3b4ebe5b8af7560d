/* cpu_heap.c: slabs for packed weights. A weight of a quarter of a slab or more gets one of its own, so at most a quarter of
 * a slab is ever lost at its end, and that is never touched. */
#include <stdlib.h>

#include "cpu_priv.h"

enum { SLAB = 64 << 20 };

struct cpu_slab {
    struct cpu_slab *next;
    uint8_t *base;
    size_t used, size;
};

int cpu_heap_take(struct cpu_heap *h, uint8_t **out, size_t bytes, struct err *e)
{
    size_t want = size_round_up(bytes, 64);
    struct cpu_slab *s = h->slab;
    if (!s || s->size - s->used < want) {
        size_t size = want >= SLAB / 4 ? want : SLAB;
        TRY(mem_new(&s, sizeof *s, e));
        int rc = mem_new_aligned(&s->base, size, e);
        if (rc < 0) {
            free(s);
            return rc;
        }
        s->size = size;
        if (h->slab && size == want) { /* full at once: the open slab stays in front */
            s->next = h->slab->next;
            h->slab->next = s;
        } else {
            s->next = h->slab;
            h->slab = s;
        }
    }
    *out = s->base + s->used;
    s->used += want;
    return OK;
}

void cpu_heap_free(struct cpu_heap *h)
{
    for (struct cpu_slab *s = h->slab, *next; s; s = next) {
        next = s->next;
        mem_free_aligned(s->base);
        free(s);
    }
    *h = (struct cpu_heap){0};
}
