/* tokenizer_bpe.c: merges the symbols of one piece, best pair first, leftmost on ties. A heap of candidate pairs
 * over a doubly linked list of symbols: n log n however long the piece is. Pairs whose symbols changed since are
 * skipped. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_priv.h"

struct symbol {
    const char *ptr;
    size_t len; /* 0: merged away */
    int32_t id; /* -1: no token */
    int64_t prev, next;
};

struct bigram {
    double key; /* smallest first */
    size_t left, right;
    size_t len; /* of both together when the pair was found */
    int32_t id;
};

void bpe_free(struct bpe *b)
{
    free(b->sym);
    free(b->heap);
    *b = (struct bpe){0};
}

static bool sooner(const struct bigram *a, const struct bigram *b)
{
    return a->key < b->key || (a->key == b->key && a->left < b->left);
}

static int heap_push(struct bpe *b, struct bigram g)
{
    if (b->heap_len == b->heap_cap) {
        size_t cap = b->heap_cap ? 2 * b->heap_cap : 64;
        struct bigram *p = realloc(b->heap, cap * sizeof *p);
        if (!p) return ERR_NOMEM;
        b->heap = p;
        b->heap_cap = cap;
    }
    size_t i = b->heap_len++;
    for (; i > 0 && sooner(&g, &b->heap[(i - 1) / 2]); i = (i - 1) / 2) b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = g;
    return OK;
}

static struct bigram heap_pop(struct bpe *b)
{
    struct bigram top = b->heap[0], last = b->heap[--b->heap_len];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < b->heap_len; i = child) {
        if (child + 1 < b->heap_len && sooner(&b->heap[child + 1], &b->heap[child])) child++;
        if (!sooner(&b->heap[child], &last)) break;
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = last;
    return top;
}

/* Pushes the pair (left, its right neighbour) if it merges into something. */
static int consider(const struct tokenizer *t, struct bpe *b, int64_t left)
{
    if (left < 0 || b->sym[left].next < 0) return OK;
    const struct symbol *l = &b->sym[left], *r = &b->sym[l->next];
    struct bigram g = {.left = (size_t)left, .right = (size_t)l->next, .len = l->len + r->len};
    if (t->rule == MERGE_TABLE) {
        const struct merge *m = l->id < 0 || r->id < 0 ? NULL : tokenizer_merge_find(t, l->id, r->id);
        if (!m) return OK;
        g.key = m->rank;
        g.id = m->id;
    } else {
        g.id = token_map_find(t, l->ptr, g.len);
        if (g.id < 0) return OK;
        g.key = t->rule == MERGE_RANK ? (double)g.id : -(double)t->scores[g.id];
    }
    return heap_push(b, g);
}

static bool has_byte_tokens(const struct tokenizer *t, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (t->byte_id[(unsigned char)p[i]] < 0) return false;
    return true;
}

/* Symbols of the piece before any merge: bytes, or characters. Characters without a token become their byte tokens
 * where merges go by a table (they take no part in it); by score they stay one symbol, which may still merge. */
static int split_symbols(const struct tokenizer *t, struct bpe *b, struct span piece, size_t *count)
{
    size_t n = 0;
    if (piece.len > b->sym_cap) {
        struct symbol *p = realloc(b->sym, piece.len * sizeof *p);
        if (!p) return ERR_NOMEM;
        b->sym = p;
        b->sym_cap = piece.len;
    }
    for (size_t i = 0; i < piece.len;) {
        const char *p = piece.ptr + i;
        int len = t->chars ? utf8_step(p, piece.len - i) : 1;
        size_t step = len > 0 ? (size_t)len : 1;
        int32_t id = t->chars ? token_map_find(t, p, step) : t->byte_id[(unsigned char)*p];
        bool as_bytes = t->chars && id < 0 && t->rule == MERGE_TABLE && has_byte_tokens(t, p, step);
        for (size_t j = 0; j < (as_bytes ? step : 1); j++) {
            int32_t byte = as_bytes ? t->byte_id[(unsigned char)p[j]] : id;
            b->sym[n] = (struct symbol){p + j, as_bytes ? 1 : step, byte, (int64_t)n - 1, (int64_t)n + 1};
            n++;
        }
        i += step;
    }
    if (n > 0) b->sym[n - 1].next = -1;
    *count = n;
    return OK;
}

/* A symbol that is no token: its bytes if they all are, else the unknown token once. */
static int push_unknown(const struct tokenizer *t, struct bpe *b, const struct symbol *s, struct ids *out)
{
    if (has_byte_tokens(t, s->ptr, s->len)) {
        for (size_t j = 0; j < s->len; j++) TRY(ids_push(out, t->byte_id[(unsigned char)s->ptr[j]]));
        return OK;
    }
    if (t->unk >= 0) return ids_push(out, t->unk);
    b->lost = (unsigned char)*s->ptr;
    return ERR_INPUT;
}

int bpe_encode(const struct tokenizer *t, struct bpe *b, struct span piece, struct ids *out)
{
    size_t n;
    if (piece.len == 0) return OK;
    if (t->whole_first) {
        int32_t id = token_map_find(t, piece.ptr, piece.len);
        if (id >= 0 && t->kinds[id] == TOKEN_NORMAL) return ids_push(out, id);
    }
    TRY(split_symbols(t, b, piece, &n));
    b->heap_len = 0;
    for (size_t i = 0; i + 1 < n; i++) TRY(consider(t, b, (int64_t)i));
    while (b->heap_len > 0) {
        struct bigram g = heap_pop(b);
        struct symbol *l = &b->sym[g.left], *r = &b->sym[g.right];
        if (l->len == 0 || r->len == 0 || l->len + r->len != g.len) continue; /* merged otherwise meanwhile */
        l->len = g.len;
        l->id = g.id;
        r->len = 0;
        l->next = r->next;
        if (r->next >= 0) b->sym[r->next].prev = (int64_t)g.left;
        TRY(consider(t, b, l->prev));
        TRY(consider(t, b, (int64_t)g.left));
    }
    for (int64_t i = 0; i >= 0; i = b->sym[i].next) {
        const struct symbol *s = &b->sym[i];
        if (s->id >= 0) TRY(ids_push(out, s->id));
        else TRY(push_unknown(t, b, s, out));
    }
    return OK;
}
