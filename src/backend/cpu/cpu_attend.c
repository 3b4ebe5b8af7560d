/* cpu_attend.c: RoPE, the KV pages and attention over them. One task is one row and one KV head: it walks the row's
 * context page by page with an online softmax, for all query heads that share the KV head. What it computes depends on
 * the row alone, so neither the batch nor the chunking of a prompt changes a bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_priv.h"

enum { MAX_DH = 256 };

/* ------------------------------------------------------------------------------------------------ pages */

size_t cpu_kv_page_bytes(const struct backend *be, int n_layers, int Hk, int Dh)
{
    (void)be;
    return (size_t)n_layers * 2 * (size_t)Hk * KV_PAGE * (size_t)Dh * sizeof(uint16_t);
}

int cpu_kv_new(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e)
{
    size_t half = cpu_kv_page_bytes(be, n_layers, Hk, Dh) / 2, bytes;
    struct bkv *kv;
    if (!size_mul(half, (size_t)n_pages, &bytes))
        return err_set(e, ERR_NOMEM, "%d KV pages of %zu bytes are too many", n_pages, 2 * half);
    if (Dh > MAX_DH || Dh % 2)
        return err_set(e, ERR_UNSUPPORTED, "head width %d: even widths up to %d are supported", Dh, MAX_DH);
    TRY(mem_new(&kv, sizeof *kv, e));
    *kv = (struct bkv){.n_layers = n_layers, .n_pages = n_pages, .Hk = Hk, .Dh = Dh};
    int rc = mem_new_aligned(&kv->k, bytes + 32, e); /* the last value may be read 16 at a time */
    if (rc == OK) rc = mem_new_aligned(&kv->v, bytes + 32, e);
    if (rc < 0) {
        cpu_kv_free(be, kv);
        return rc;
    }
    *out = kv;
    return OK;
}

void cpu_kv_free(struct backend *be, struct bkv *kv)
{
    (void)be;
    if (!kv) return;
    mem_free_aligned(kv->k);
    mem_free_aligned(kv->v);
    free(kv);
}

/* Offset of the block of one layer, page and head in k and in v. */
static size_t block_at(const struct bkv *kv, int layer, int32_t page, int head)
{
    size_t index = ((size_t)layer * (size_t)kv->n_pages + (size_t)page) * (size_t)kv->Hk + (size_t)head;
    return index * KV_PAGE * (size_t)kv->Dh;
}

static int32_t page_of(const struct cpu *c, int row, int32_t pos)
{
    return c->pages[(size_t)c->row_seq[row] * (size_t)c->max_pages + (size_t)(pos / KV_PAGE)];
}

/* ------------------------------------------------------------------------------------------------ rope */

static void rotate(float *x, const float *cos_sin, int Dh, bool interleaved)
{
    int half = Dh / 2, step = interleaved ? 1 : half;
    for (int i = 0; i < half; i++) {
        float *a = interleaved ? x + 2 * i : x + i, *b = a + step;
        float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], p = *a, q = *b;
        *a = p * c - q * s;
        *b = q * c + p * s;
    }
}

struct rope_job {
    struct cpu *c;
    const struct rope_kv_args *a;
};

static void rope_row(struct cpu *c, const struct rope_kv_args *a, int t)
{
    int Dh = a->Dh, half = Dh / 2;
    int32_t pos = c->row_pos[t], page = page_of(c, t, pos);
    float *row = a->qkv + (size_t)t * (size_t)(a->H + 2 * a->Hk) * (size_t)Dh;
    float *cos_sin = c->rope + (size_t)t * (size_t)Dh;
    if (!c->rope_ready)
        for (int i = 0; i < half; i++) {
            float angle = (float)pos * a->inv_freq[i];
            cos_sin[2 * i] = cosf(angle) * a->mscale;
            cos_sin[2 * i + 1] = sinf(angle) * a->mscale;
        }
    for (int h = 0; h < a->H + a->Hk; h++) {
        float *x = row + h * Dh;
        const float *norm = h < a->H ? a->q_norm : a->k_norm;
        if (norm) c->level.rms_norm(x, x, norm, a->eps, Dh);
        rotate(x, cos_sin, Dh, a->interleaved);
    }
    for (int h = 0; h < a->Hk; h++) {
        size_t at = block_at(a->kv, a->layer, page, h);
        uint16_t half_k[MAX_DH];
        c->level.to_f16(half_k, row + (a->H + h) * Dh, Dh);
        for (int d = 0; d < Dh; d++) a->kv->k[at + (size_t)d * KV_PAGE + (size_t)(pos % KV_PAGE)] = half_k[d];
        c->level.to_f16(a->kv->v + at + (size_t)(pos % KV_PAGE) * (size_t)Dh, row + (a->H + a->Hk + h) * Dh, Dh);
    }
}

static void rope_rows(void *arg, int thread, int n_threads)
{
    struct rope_job *j = arg;
    int64_t t;
    (void)thread, (void)n_threads;
    while ((t = cpu_pool_take(j->c->pool, j->c->T)) >= 0) rope_row(j->c, j->a, (int)t);
}

void cpu_rope_kv(struct backend *be, const struct rope_kv_args *a)
{
    struct cpu *c = (struct cpu *)be;
    if (c->err.code) return;
    if (!cpu_grow(c, &c->rope, &c->rope_cap, (size_t)c->T * (size_t)a->Dh * sizeof(float))) return;
    struct rope_job job = {c, a};
    if (c->T < 4) cpu_pool_run_alone(c->pool, rope_rows, &job);
    else cpu_pool_run(c->pool, rope_rows, &job);
    c->rope_ready = true;
}

/* ------------------------------------------------------------------------------------------------ attention */

struct attend_job {
    struct cpu *c;
    const struct attend_args *a;
};

/* Query heads [h0, h0 + n) of row t over its context; they share one KV head. */
static void attend_heads(struct cpu *c, const struct attend_args *a, int t, int h0, int n)
{
    _Alignas(64) float p[ATTEND_GROUP][KV_PAGE], acc[ATTEND_GROUP * MAX_DH];
    float max[ATTEND_GROUP], sum[ATTEND_GROUP], keep[ATTEND_GROUP];
    int Dh = a->Dh, kv_head = h0 / (a->H / a->Hk);
    int32_t pos = c->row_pos[t], first = a->window > 0 && pos >= a->window ? pos - a->window + 1 : 0;
    const float *q = a->qkv + ((size_t)t * (size_t)(a->H + 2 * a->Hk) + (size_t)h0) * (size_t)Dh;
    memset(acc, 0, (size_t)(n * Dh) * sizeof *acc);
    for (int h = 0; h < n; h++) {
        max[h] = a->sinks ? a->sinks[h0 + h] : -INFINITY;
        sum[h] = a->sinks ? 1 : 0;
    }
    for (int32_t page0 = first / KV_PAGE * KV_PAGE; page0 <= pos; page0 += KV_PAGE) {
        size_t at = block_at(a->kv, a->layer, page_of(c, t, page0), kv_head);
        int from = first > page0 ? first - page0 : 0, to = pos - page0 < KV_PAGE ? pos - page0 + 1 : KV_PAGE;
        c->level.score(p, q, n, a->kv->k + at, Dh, a->scale);
        for (int h = 0; h < n; h++) {
            float best = max[h];
            for (int j = from; j < to; j++)
                if (!(p[h][j] <= best)) best = p[h][j]; /* NaN is taken: it must show */
            keep[h] = max[h] == -INFINITY ? 0 : expf(max[h] - best);
            sum[h] = sum[h] * keep[h] + c->level.softmax(p[h], from, to, best);
            max[h] = best;
        }
        c->level.mix(acc, n, keep, p, a->kv->v + at, from, to, Dh);
    }
    for (int h = 0; h < n; h++) {
        float *out = a->out + ((size_t)t * (size_t)a->H + (size_t)(h0 + h)) * (size_t)Dh;
        for (int d = 0; d < Dh; d++) out[d] = acc[h * Dh + d] / sum[h];
    }
}

static void attend_some(void *arg, int thread, int n_threads)
{
    struct attend_job *j = arg;
    const struct attend_args *a = j->a;
    int group = a->H / a->Hk;
    int64_t i;
    (void)thread, (void)n_threads;
    /* Longest contexts last would leave threads idle: rows are taken from the end. */
    while ((i = cpu_pool_take(j->c->pool, (int64_t)j->c->T * a->Hk)) >= 0) {
        int t = j->c->T - 1 - (int)(i / a->Hk), kv_head = (int)(i % a->Hk);
        for (int h = 0; h < group; h += ATTEND_GROUP)
            attend_heads(j->c, a, t, kv_head * group + h, group - h < ATTEND_GROUP ? group - h : ATTEND_GROUP);
    }
}

static void count_attention(struct cpu *c, const struct attend_args *a)
{
    for (int t = 0; t < c->T; t++) {
        uint64_t keys = (uint64_t)c->row_pos[t] + 1, width = (uint64_t)a->Dh;
        if (a->window > 0 && keys > (uint64_t)a->window) keys = (uint64_t)a->window;
        c->stats.ops[UNIT_FP32] += 4 * keys * width * (uint64_t)a->H;
        bool last = t + 1 == c->T || c->row_seq[t + 1] != c->row_seq[t];
        if (last) c->stats.kv_bytes += 2 * sizeof(uint16_t) * keys * width * (uint64_t)a->Hk;
    }
}

void cpu_attend(struct backend *be, const struct attend_args *a)
{
    struct cpu *c = (struct cpu *)be;
    if (c->err.code) return;
    struct attend_job job = {c, a};
    count_attention(c, a);
    /* One short context is done before another thread would have woken. */
    if (c->T == 1 && c->row_pos[0] < 64) cpu_pool_run_alone(c->pool, attend_some, &job);
    else cpu_pool_run(c->pool, attend_some, &job);
}
