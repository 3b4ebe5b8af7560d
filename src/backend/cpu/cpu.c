/* cpu.c: the CPU device: memory, the batch of a step, and the operations that are products with something before and
 * after. Attention stands in cpu_attend.c, experts in cpu_moe.c, the arithmetic of each CPU level in cpu_level_*.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend_priv.h"
#include "cpu_priv.h"

static struct cpu *cpu_of(struct backend *be) { return (struct cpu *)be; }

/* ------------------------------------------------------------------------------------------------ memory */

static int cpu_alloc(struct backend *be, void *out_ptr, size_t bytes, struct err *e)
{
    (void)be;
    return mem_new_aligned(out_ptr, bytes, e);
}

static void cpu_free(struct backend *be, void *dev)
{
    (void)be;
    mem_free_aligned(dev);
}

static void cpu_upload(struct backend *be, void *dev, const void *host, size_t bytes)
{
    (void)be;
    memcpy(dev, host, bytes);
}

static int cpu_sync(struct backend *be, struct err *e)
{
    struct cpu *c = cpu_of(be);
    if (!c->err.code) return OK;
    if (e) *e = c->err;
    return c->err.code;
}

static int cpu_download(struct backend *be, void *host, const void *dev, size_t bytes, struct err *e)
{
    TRY(cpu_sync(be, e));
    memcpy(host, dev, bytes);
    return OK;
}

static size_t cpu_free_bytes(const struct backend *be)
{
    (void)be;
    return machine_free_bytes();
}

bool cpu_grow(struct cpu *c, void *buf_ptr, size_t *cap, size_t bytes)
{
    void *p;
    if (bytes <= *cap) return true;
    memcpy(&p, buf_ptr, sizeof p);
    mem_free_aligned(p);
    p = NULL;
    *cap = 0;
    memcpy(buf_ptr, &p, sizeof p);
    if (mem_new_aligned(&p, bytes, &c->err) < 0) return false;
    memcpy(buf_ptr, &p, sizeof p);
    *cap = bytes;
    return true;
}

static int cpu_weight_new(struct backend *be, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
                          struct err *e)
{
    struct cpu *c = cpu_of(be);
    return cpu_pack(c->pool, &c->heap, out, parts, n_parts, bias, e);
}

static void cpu_weight_free(struct backend *be, struct bweight *w)
{
    (void)be;
    cpu_pack_free(w);
}

static size_t cpu_weight_bytes(const struct backend *be, const struct dmat *parts, int n_parts)
{
    (void)be;
    return cpu_pack_bytes(parts, n_parts);
}

/* ------------------------------------------------------------------------------------------------ the batch */

static void cpu_begin(struct backend *be, const struct batch *b)
{
    struct cpu *c = cpu_of(be);
    size_t T = (size_t)b->T, table = (size_t)b->n_seqs * (size_t)b->max_pages;
    c->T = 0;
    c->rope_ready = false;
    if (!cpu_grow(c, &c->ids, &c->ids_cap, T * sizeof *c->ids) || !cpu_grow(c, &c->row_seq, &c->seq_cap, T * sizeof *c->row_seq) ||
        !cpu_grow(c, &c->row_pos, &c->pos_cap, T * sizeof *c->row_pos) ||
        !cpu_grow(c, &c->pages, &c->pages_cap, table * sizeof *c->pages))
        return;
    c->T = b->T;
    c->n_seqs = b->n_seqs;
    c->max_pages = b->max_pages;
    memcpy(c->ids, b->ids, T * sizeof *c->ids);
    memcpy(c->pages, b->pages, table * sizeof *c->pages);
    for (int s = 0; s < b->n_seqs; s++)
        for (int32_t t = b->seq_begin[s]; t < b->seq_begin[s + 1]; t++) {
            c->row_seq[t] = s;
            c->row_pos[t] = b->pos0[s] + t - b->seq_begin[s];
        }
}

/* ------------------------------------------------------------------------------------------------ activations */

int cpu_wants(const struct cpu *c, const struct bweight *w)
{
    int wants = 0;
    for (int i = 0; i < w->n_parts; i++) wants |= c->level.wants(w->part[i].type);
    return wants;
}

struct prepare_job {
    struct cpu *c;
    struct cpu_acts *a;
    const float *x, *norm;
    float eps;
    int wants;
};

/* Rows side by side share cache lines: two threads must not take turns with them. */
enum { PREPARE_ROWS = 8 };

static void prepare_row(const struct prepare_job *j, int m, float *scratch)
{
    const struct cpu_acts *a = j->a;
    const struct cpu_level *l = &j->c->level;
    const float *row = j->x + m * a->cols;
    if (j->norm || a->cols < a->Kp) {
        l->rms_norm(scratch, row, j->norm, j->eps, a->cols);
        row = scratch;
    }
    if (j->wants & WANT_QUANT) l->quantise(a, m, row, j->wants & WANT_SUMS);
    if (j->wants & WANT_BF16) l->to_bf16(a, m, row);
    for (int64_t t = 0; t < a->Kp / TILE && j->wants & WANT_FLOAT; t++)
        memcpy(a->x + acts_at(a, t, m) * TILE, row + t * TILE, TILE * sizeof *row);
}

static void prepare_rows(void *arg, int thread, int n_threads)
{
    struct prepare_job *j = arg;
    const struct cpu_acts *a = j->a;
    float *scratch = j->c->row + (int64_t)thread * a->Kp;
    int64_t i;
    (void)n_threads;
    memset(scratch + a->cols, 0, (size_t)(a->Kp - a->cols) * sizeof *scratch);
    while ((i = cpu_pool_take(j->c->pool, (a->M + PREPARE_ROWS - 1) / PREPARE_ROWS)) >= 0)
        for (int m = (int)i * PREPARE_ROWS; m < a->M && m < ((int)i + 1) * PREPARE_ROWS; m++) prepare_row(j, m, scratch);
}

bool cpu_acts_grow(struct cpu *c, struct cpu_acts *a, size_t cap[ACT_BUFFERS], int M, int64_t K, int wants)
{
    int64_t Kp = (K + TILE - 1) / TILE * TILE;
    size_t n = (size_t)M * (size_t)Kp, tiles = n / TILE;
    a->M = M;
    a->cols = K;
    a->Kp = Kp;
    if (wants & WANT_FLOAT && !cpu_grow(c, &a->x, &cap[0], n * sizeof *a->x)) return false;
    if (wants & WANT_BF16 && !cpu_grow(c, &a->b, &cap[4], n * sizeof *a->b)) return false;
    return !(wants & WANT_QUANT) ||
           (cpu_grow(c, &a->q, &cap[1], n) && cpu_grow(c, &a->d, &cap[2], tiles * sizeof *a->d) &&
            cpu_grow(c, &a->s, &cap[3], 2 * tiles * sizeof *a->s));
}

bool cpu_prepare(struct cpu *c, struct cpu_acts *a, size_t cap[ACT_BUFFERS], const float *x, int M, int64_t K, const float *norm, float eps,
                 int wants)
{
    size_t threads = (size_t)cpu_pool_threads(c->pool);
    if (!cpu_acts_grow(c, a, cap, M, K, wants)) return false;
    if (!cpu_grow(c, &c->row, &c->row_cap, threads * (size_t)a->Kp * sizeof *c->row)) return false;
    struct prepare_job job = {c, a, x, norm, eps, wants};
    if (M <= PREPARE_ROWS) cpu_pool_run_alone(c->pool, prepare_rows, &job);
    else cpu_pool_run(c->pool, prepare_rows, &job);
    return true;
}

/* ------------------------------------------------------------------------------------------------ products */

struct product_job {
    struct cpu *c;
    const struct cpu_group *groups;
    int n_groups;
    const struct cpu_acts *a;
    float *out;
    const float *residual;
    float limit;
    int64_t panels, per, chunks; /* panels of a weight; of a task; tasks a weight */
};

static size_t part_bytes(const struct cpu_part *p)
{
    return (size_t)p->panels * p->panel_bytes + (size_t)(p->panels * p->scale_runs) * PANEL * sizeof *p->scale;
}

static void count_products(struct cpu *c, const struct cpu_group *groups, int n)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < groups[i].w->n_parts; k++) {
            const struct cpu_part *p = &groups[i].w->part[k];
            int wants = c->level.wants(p->type);
            int unit = wants & WANT_QUANT ? UNIT_INT8 : wants & WANT_BF16 ? UNIT_BF16 : UNIT_FP32;
            c->stats.weight_bytes += part_bytes(p);
            c->stats.ops[unit] += 2 * (uint64_t)(p->rows * p->cols) * (uint64_t)(groups[i].last - groups[i].first);
        }
}

/* Panels a task: several tasks a thread, so that threads finish together, and pieces large enough to stream. */
static void cut_tasks(struct product_job *j)
{
    int64_t all = j->panels * j->n_groups, tasks = 8 * (int64_t)cpu_pool_threads(j->c->pool);
    j->per = all / tasks;
    if (j->per < 1) j->per = 1;
    if (j->per > 16) j->per = 16;
    if (j->per > 1) j->per += j->per % 2; /* kernels may take panels in pairs */
    j->chunks = (j->panels + j->per - 1) / j->per;
}

static void linear_tasks(void *arg, int thread, int n_threads)
{
    struct product_job *j = arg;
    int64_t i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(j->c->pool, j->chunks * j->n_groups)) >= 0) {
        const struct cpu_group *g = &j->groups[i / j->chunks];
        int64_t from = i % j->chunks * j->per, to = from + j->per, row0 = 0;
        /* [from, to) counts the panels of all parts one after the other. */
        for (int k = 0; k < g->w->n_parts; k++) {
            const struct cpu_part *p = &g->w->part[k];
            int64_t p0 = from > 0 ? from : 0, p1 = to < p->panels ? to : p->panels;
            struct cpu_out out = {.out = j->out + row0, .stride = (size_t)g->w->rows, .bias = g->w->bias ? g->w->bias + row0 : NULL,
                                  .residual = j->residual ? j->residual + row0 : NULL};
            if (p0 < p1) j->c->level.product(p, p0, p1, j->a, g->first, g->last, &out);
            from -= p->panels;
            to -= p->panels;
            row0 += p->rows;
        }
    }
}

void cpu_grouped_linear(struct cpu *c, const struct cpu_group *groups, int n, const struct cpu_acts *a, float *out,
                        const float *residual)
{
    struct product_job j = {.c = c, .groups = groups, .n_groups = n, .a = a, .out = out, .residual = residual};
    for (int k = 0; k < groups[0].w->n_parts; k++) j.panels += groups[0].w->part[k].panels;
    count_products(c, groups, n);
    cut_tasks(&j);
    cpu_pool_run(c->pool, linear_tasks, &j);
}

enum { GATE_ROWS = 128 };

static void gate_tasks(void *arg, int thread, int n_threads)
{
    struct product_job *j = arg;
    struct cpu *c = j->c;
    size_t width = (size_t)j->per * PANEL;
    float *up = c->tmp + (size_t)thread * GATE_ROWS * width;
    int64_t i;
    (void)n_threads;
    while ((i = cpu_pool_take(c->pool, j->chunks * j->n_groups)) >= 0) {
        const struct cpu_group *g = &j->groups[i / j->chunks];
        const struct cpu_part *gate = &g->w->part[0], *upper = &g->w->part[1];
        int64_t p0 = i % j->chunks * j->per, p1 = p0 + j->per < gate->panels ? p0 + j->per : gate->panels;
        int64_t r0 = p0 * PANEL, r1 = p1 * PANEL < gate->rows ? p1 * PANEL : gate->rows, F = gate->rows;
        for (int m0 = g->first; m0 < g->last; m0 += GATE_ROWS) {
            int m1 = m0 + GATE_ROWS < g->last ? m0 + GATE_ROWS : g->last;
            /* The gate goes to its place; up goes beside it: element (m, r) at up[(m - m0) * width + r - r0]. */
            struct cpu_out to_out = {.out = j->out, .stride = (size_t)F, .bias = g->w->bias};
            struct cpu_out to_up = {.out = up, .stride = width, .bias = g->w->bias ? g->w->bias + F : NULL,
                                    .row0 = (size_t)r0, .m0 = (size_t)m0};
            c->level.product(gate, p0, p1, j->a, m0, m1, &to_out);
            c->level.product(upper, p0, p1, j->a, m0, m1, &to_up);
            for (int m = m0; m < m1; m++) {
                float *row = j->out + (int64_t)m * F + r0;
                c->level.gate(row, row, up + (size_t)(m - m0) * width, j->limit, r1 - r0);
            }
        }
    }
}

void cpu_grouped_gate(struct cpu *c, const struct cpu_group *groups, int n, const struct cpu_acts *a, float *out, float limit)
{
    struct product_job j = {.c = c, .groups = groups, .n_groups = n, .a = a, .out = out, .limit = limit};
    j.panels = groups[0].w->part[0].panels;
    count_products(c, groups, n);
    cut_tasks(&j);
    size_t threads = (size_t)cpu_pool_threads(c->pool);
    if (!cpu_grow(c, &c->tmp, &c->tmp_cap, threads * GATE_ROWS * (size_t)j.per * PANEL * sizeof(float))) return;
    cpu_pool_run(c->pool, gate_tasks, &j);
}

static void cpu_linear(struct backend *be, const struct linear_args *a)
{
    struct cpu *c = cpu_of(be);
    if (c->err.code) return;
    if (!cpu_prepare(c, &c->acts, c->acts_cap, a->x, a->T, a->w->cols, a->norm, a->eps, cpu_wants(c, a->w))) return;
    cpu_grouped_linear(c, &(struct cpu_group){a->w, 0, a->T}, 1, &c->acts, a->out, a->residual);
}

static void cpu_gate(struct backend *be, const struct gate_args *a)
{
    struct cpu *c = cpu_of(be);
    if (c->err.code) return;
    if (!cpu_prepare(c, &c->acts, c->acts_cap, a->x, a->T, a->w->cols, a->norm, a->eps, cpu_wants(c, a->w))) return;
    cpu_grouped_gate(c, &(struct cpu_group){a->w, 0, a->T}, 1, &c->acts, a->out, a->swiglu_limit);
}

static void cpu_embed(struct backend *be, float *out, const struct bweight *w)
{
    struct cpu *c = cpu_of(be);
    for (int t = 0; t < c->T && !c->err.code; t++) cpu_part_row(&w->part[0], c->ids[t], out + (int64_t)t * w->cols);
}

static void cpu_gather(struct backend *be, float *out, const float *x, int D, const int32_t *rows, int n)
{
    (void)be;
    for (int i = 0; i < n; i++) memcpy(out + (size_t)i * (size_t)D, x + (size_t)rows[i] * (size_t)D, (size_t)D * sizeof *out);
}

struct best_job {
    struct cpu *c;
    const float *logits;
    int n, V;
    int32_t *ids;
};

static void best_rows(void *arg, int thread, int n_threads)
{
    struct best_job *j = arg;
    int64_t i;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(j->c->pool, j->n)) >= 0) j->ids[i] = j->c->level.best(j->logits + i * j->V, j->V);
}

static int cpu_best(struct backend *be, const float *logits, int n, int V, int32_t *ids, struct err *e)
{
    struct cpu *c = cpu_of(be);
    struct best_job job = {c, logits, n, V, ids};
    TRY(cpu_sync(be, e));
    if (n == 1) cpu_pool_run_alone(c->pool, best_rows, &job);
    else cpu_pool_run(c->pool, best_rows, &job);
    return OK;
}

static struct backend_stats cpu_stats(const struct backend *be) { return ((const struct cpu *)be)->stats; }

/* ------------------------------------------------------------------------------------------------ open, close */

static void acts_free(struct cpu_acts *a)
{
    mem_free_aligned(a->x);
    mem_free_aligned(a->q);
    mem_free_aligned(a->d);
    mem_free_aligned(a->s);
    mem_free_aligned(a->b);
}

static void cpu_close(struct backend *be)
{
    struct cpu *c = cpu_of(be);
    cpu_pool_close(&c->pool);
    cpu_heap_free(&c->heap);
    cpu_moe_free(c);
    acts_free(&c->acts);
    acts_free(&c->acts2);
    void *all[] = {c->ids, c->row_seq, c->row_pos, c->pages, c->rope, c->tmp, c->row, c->blocks};
    for (size_t i = 0; i < COUNT_OF(all); i++) mem_free_aligned(all[i]);
    free(c);
}

static const struct backend_ops cpu_ops = {
    .close = cpu_close, .alloc = cpu_alloc, .free = cpu_free, .upload = cpu_upload, .download = cpu_download, .sync = cpu_sync,
    .free_bytes = cpu_free_bytes,
    .weight_new = cpu_weight_new, .weight_free = cpu_weight_free, .weight_bytes = cpu_weight_bytes,
    .kv_new = cpu_kv_new, .kv_free = cpu_kv_free, .kv_page_bytes = cpu_kv_page_bytes,
    .begin = cpu_begin, .embed = cpu_embed, .linear = cpu_linear, .gate = cpu_gate, .rope_kv = cpu_rope_kv,
    .attend = cpu_attend, .moe = cpu_moe, .gather = cpu_gather, .best = cpu_best,
    .stats = cpu_stats, .limits = cpu_limits,
};

int backend_open_cpu(struct backend **out, const struct backend_opts *o, struct err *e)
{
    struct cpu *c;
    int rc;
    TRY(mem_new(&c, sizeof *c, e));
    c->base.ops = &cpu_ops;
    c->base.chunk = 256;
    if ((rc = cpu_level_choose(&c->level, o->cpu_level, e)) < 0 || (rc = cpu_pool_open(&c->pool, o->threads, e)) < 0) {
        free(c);
        return rc;
    }
    int n = cpu_pool_threads(c->pool);
    snprintf(c->base.name, sizeof c->base.name, "cpu %s, %d thread%s", c->level.name, n, n == 1 ? "" : "s");
    *out = &c->base;
    return OK;
}
