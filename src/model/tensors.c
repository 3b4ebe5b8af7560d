/* tensors: the table of what a checkpoint's files hold, whatever the container, searched by name through a hash table
 * because a mixture of experts names tens of thousands. Shape and type mismatches are worded here, both sides shown.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

uint64_t hash_bytes(uint64_t h, const void *data, size_t n)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

int tensors_push(struct tensors *t, const struct tensor *item, struct err *e)
{
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 256;
        struct tensor *items = realloc(t->items, cap * sizeof *items);
        if (!items) return err_set(e, ERR_NOMEM, "out of memory for a table of %zu tensors", cap);
        t->items = items;
        t->cap = cap;
    }
    t->items[t->n++] = *item;
    return OK;
}

static size_t slot_of(const struct tensors *t, struct span name)
{
    /* Begun from where the table lies, so that no file can be made of names that all fall together. */
    uint64_t start = HASH_START ^ ((uint64_t)(uintptr_t)t->slots >> 12) * 0x9e3779b97f4a7c15u;
    size_t i = hash_bytes(start, name.ptr, name.len) & (t->n_slots - 1);
    while (t->slots[i] && !span_eq(t->items[t->slots[i] - 1].name, name)) i = (i + 1) & (t->n_slots - 1);
    return i;
}

int tensors_index(struct tensors *t, struct err *e)
{
    if (t->n >= UINT32_MAX / 2) return err_set(e, ERR_INPUT, "%zu tensors are more than can be", t->n);
    free(t->slots);
    t->slots = NULL;
    t->n_slots = 16;
    while (t->n_slots < 2 * t->n) t->n_slots *= 2;
    TRY(mem_new(&t->slots, t->n_slots * sizeof *t->slots, e));
    for (size_t i = 0; i < t->n; i++) {
        struct span name = t->items[i].name;
        size_t at = slot_of(t, name);
        if (t->slots[at])
            return err_set(e, ERR_INPUT, "tensor %.*s occurs twice", (int)(name.len < 200 ? name.len : 200),
                           name.ptr);
        t->slots[at] = (uint32_t)i + 1;
    }
    return OK;
}

struct tensor *tensors_find(const struct tensors *t, const char *name)
{
    if (!t->n_slots) return NULL;
    size_t at = slot_of(t, span_of(name));
    return t->slots[at] ? &t->items[t->slots[at] - 1] : NULL;
}

static int by_data(const void *a, const void *b)
{
    const struct tensor *const *x = a, *const *y = b;
    return ((*x)->data > (*y)->data) - ((*x)->data < (*y)->data);
}

int tensors_check_overlap(const struct tensors *t, size_t first, struct err *e)
{
    size_t n = t->n - first, k = 0;
    const struct tensor **sorted;
    TRY(mem_new(&sorted, (n + 1) * sizeof *sorted, e));
    for (size_t i = first; i < t->n; i++)
        if (t->items[i].bytes) sorted[k++] = &t->items[i];
    qsort(sorted, k, sizeof *sorted, by_data);
    int rc = OK;
    for (size_t i = 1; i < k && rc == OK; i++) {
        size_t room = (size_t)(sorted[i]->data - sorted[i - 1]->data);
        if (room < sorted[i - 1]->bytes)
            rc = err_set(e, ERR_INPUT, "tensor %.*s of %zu bytes overlaps tensor %.*s, which begins %zu bytes later",
                         (int)sorted[i - 1]->name.len, sorted[i - 1]->name.ptr, sorted[i - 1]->bytes,
                         (int)sorted[i]->name.len, sorted[i]->name.ptr, room);
    }
    free(sorted);
    return rc;
}

void tensors_free(struct tensors *t)
{
    free(t->items);
    free(t->slots);
    *t = (struct tensors){0};
}

bool tensor_count(const struct tensor *t, size_t *out)
{
    size_t n = 1;
    for (int i = 0; i < t->n_dims; i++)
        if (!size_mul(n, (size_t)t->dims[i], &n)) return false;
    *out = n;
    return true;
}

void shape_text(char out[SHAPE_TEXT], int n, const int64_t *dims)
{
    size_t at = (size_t)snprintf(out, SHAPE_TEXT, "[");
    for (int i = 0; i < n && at < SHAPE_TEXT; i++)
        at += (size_t)snprintf(out + at, SHAPE_TEXT - at, "%s%" PRId64, i ? ", " : "", dims[i]);
    if (at < SHAPE_TEXT) snprintf(out + at, SHAPE_TEXT - at, "]");
}

int tensor_too_large(const struct tensor *t, struct err *e)
{
    char shape[SHAPE_TEXT];
    shape_text(shape, t->n_dims, t->dims);
    return err_set(e, ERR_INPUT, "shape %s is too large for any file", shape);
}

int tensor_check_shape(const struct tensor *t, int n, const int64_t *dims, struct err *e)
{
    int have = t->n_dims, want = n;
    const int64_t *h = t->dims, *w = dims;
    for (; have > 0 && h[0] == 1; h++) have--;
    for (; want > 0 && w[0] == 1; w++) want--;
    bool same = have == want;
    for (int i = 0; same && i < have; i++) same = h[i] == w[i];
    if (same) return OK;
    char found[SHAPE_TEXT], expected[SHAPE_TEXT];
    shape_text(found, t->n_dims, t->dims);
    shape_text(expected, n, dims);
    return err_set(e, ERR_INPUT, "tensor %.*s has shape %s, but the configuration makes it %s", (int)t->name.len,
                   t->name.ptr, found, expected);
}

int tensor_check_type(const struct tensor *t, const char *want, struct err *e)
{
    if (span_is(t->type_name, want)) return OK;
    return err_set(e, ERR_UNSUPPORTED, "tensor %.*s has type %.*s, expected %s", (int)t->name.len, t->name.ptr,
                   (int)t->type_name.len, t->type_name.ptr, want);
}
