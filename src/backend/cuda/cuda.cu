/* cuda.cu: the CUDA device: memory, the batch of a step, the table of operations. What an operation computes stands
 * in the other files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_priv.h"

/* What no plan counts: kernels, graphs, and the sums that blocks share. */
enum { RESERVE_BYTES = 512 << 20 };

static struct cuda *cuda_of(struct backend *be) { return (struct cuda *)be; }

/* ------------------------------------------------------------------------------------------------ failures */

bool cu_ok(struct cuda *c, const char *what, cudaError_t r)
{
    if (r != cudaSuccess && !c->err.code)
        err_set(&c->err, r == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE, "cuda: %s: %s", what,
                cudaGetErrorString(r));
    return !c->err.code;
}

bool cu_launched(struct cuda *c, const char *what) { return cu_ok(c, what, cudaGetLastError()); }

static int report(const struct cuda *c, struct err *e)
{
    if (e && c->err.code) *e = c->err;
    return c->err.code;
}

/* ------------------------------------------------------------------------------------------------ memory */

int cu_alloc(struct cuda *c, void *out_ptr, size_t bytes, struct err *e)
{
    void *p;
    if (bytes == 0) bytes = 1;
    cudaError_t r = c->unified ? cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) : cudaMalloc(&p, bytes);
    if (r != cudaSuccess) {
        (void)cudaGetLastError(); /* not sticky: memory that is out says nothing about the device */
        return err_set(e, r == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE, "cuda: allocating %zu bytes: %s",
                       bytes, cudaGetErrorString(r));
    }
    memcpy(out_ptr, &p, sizeof p);
    return OK;
}

void cu_free(struct cuda *c, void *dev)
{
    if (dev) cu_ok(c, "free", cudaFree(dev));
}

bool cu_grow(struct cuda *c, void *buf_ptr, size_t *cap, size_t bytes)
{
    void *p;
    if (c->err.code) return false;
    if (bytes <= *cap) return true;
    cu_graphs_drop(c);
    memcpy(&p, buf_ptr, sizeof p);
    cu_free(c, p); /* waits for the work that reads it */
    p = NULL;
    *cap = 0;
    memcpy(buf_ptr, &p, sizeof p);
    if (c->err.code || cu_alloc(c, &p, bytes, &c->err) < 0) return false;
    memcpy(buf_ptr, &p, sizeof p);
    *cap = bytes;
    return true;
}

static int cuda_alloc(struct backend *be, void *out_ptr, size_t bytes, struct err *e)
{
    return cu_alloc(cuda_of(be), out_ptr, bytes, e);
}

static void cuda_free(struct backend *be, void *dev)
{
    struct cuda *c = cuda_of(be);
    if (!dev) return;
    cu_graph_flush(c);
    cu_graphs_drop(c);
    cu_free(c, dev);
}

static void cuda_upload(struct backend *be, void *dev, const void *host, size_t bytes)
{
    struct cuda *c = cuda_of(be);
    cu_graph_flush(c);
    c->busy = true;
    c->acts_of = NULL;
    if (!c->err.code) cu_ok(c, "upload", cudaMemcpyAsync(dev, host, bytes, cudaMemcpyHostToDevice, c->stream));
}

static int cuda_sync(struct backend *be, struct err *e)
{
    struct cuda *c = cuda_of(be);
    cu_graph_flush(c);
    cu_ok(c, "step", cudaStreamSynchronize(c->stream));
    c->busy = false;
    return report(c, e);
}

static int cuda_download(struct backend *be, void *host, const void *dev, size_t bytes, struct err *e)
{
    struct cuda *c = cuda_of(be);
    cu_graph_flush(c);
    if (!c->err.code) cu_ok(c, "download", cudaMemcpyAsync(host, dev, bytes, cudaMemcpyDeviceToHost, c->stream));
    return cuda_sync(be, e);
}

static size_t cuda_free_bytes(const struct backend *be)
{
    const struct cuda *c = (const struct cuda *)be;
    size_t free_now = 0, total = 0;
    if (c->unified) free_now = machine_free_bytes();
    else if (cudaMemGetInfo(&free_now, &total) != cudaSuccess) return 0;
    return free_now > RESERVE_BYTES ? free_now - RESERVE_BYTES : 0;
}

/* ------------------------------------------------------------------------------------------------ the batch */

/* Lays the arrays of a step out in one block of `words` 32-bit words; NULL base counts only. */
static size_t lay_batch(struct cuda *c, int32_t *base, int T, int S, int max_pages)
{
    struct {
        int32_t **at;
        size_t n;
    } arrays[] = {{&c->ids, (size_t)T},     {&c->row_seq, (size_t)T},
                  {&c->row_pos, (size_t)T}, {&c->seq_begin, (size_t)S + 1},
                  {&c->pos0, (size_t)S},    {&c->pages, (size_t)S * (size_t)max_pages}};
    size_t words = 0;
    for (size_t i = 0; i < COUNT_OF(arrays); i++) {
        if (base) *arrays[i].at = base + words;
        words += size_round_up(arrays[i].n, 4);
    }
    return words;
}

/* *dev and *host have at least `bytes` bytes each; content is lost. */
static bool grow_pair(struct cuda *c, void *dev_ptr, void *host_ptr, size_t *cap, size_t bytes)
{
    void *host;
    if (bytes <= *cap) return true;
    size_t dev_cap = *cap, more = bytes + bytes / 2;
    if (!cu_ok(c, "step", cudaStreamSynchronize(c->stream))) return false;
    memcpy(&host, host_ptr, sizeof host);
    if (host) cu_ok(c, "free", cudaFreeHost(host));
    host = NULL;
    memcpy(host_ptr, &host, sizeof host);
    *cap = 0;
    if (!cu_grow(c, dev_ptr, &dev_cap, more) || !cu_ok(c, "allocating pinned memory", cudaMallocHost(&host, more)))
        return false;
    memcpy(host_ptr, &host, sizeof host);
    *cap = more;
    return true;
}

static bool wait(struct cuda *c)
{
    if (c->busy) cu_ok(c, "step", cudaStreamSynchronize(c->stream));
    c->busy = false;
    return !c->err.code;
}

void cu_copy_batch(struct cuda *c)
{
    cu_ok(c, "batch",
          cudaMemcpyAsync(c->batch_dev, c->batch_host, c->batch_bytes, cudaMemcpyHostToDevice, c->stream));
}

static void cuda_begin(struct backend *be, const struct batch *b)
{
    struct cuda *c = cuda_of(be);
    size_t T = (size_t)b->T, S = (size_t)b->n_seqs;
    cu_graph_flush(c);
    c->T = 0;
    c->acts_of = NULL;
    if (c->err.code) return;
    cu_heap_settle(c);
    c->batch_bytes = lay_batch(c, NULL, b->T, b->n_seqs, b->max_pages) * sizeof(int32_t);
    /* The copy of the step before may still read the pinned block. */
    if (!grow_pair(c, &c->batch_dev, &c->batch_host, &c->batch_cap, c->batch_bytes) || !wait(c)) return;
    lay_batch(c, (int32_t *)(void *)c->batch_host, b->T, b->n_seqs, b->max_pages);
    memcpy(c->ids, b->ids, T * sizeof *c->ids);
    memcpy(c->seq_begin, b->seq_begin, (S + 1) * sizeof *c->seq_begin);
    memcpy(c->pos0, b->pos0, S * sizeof *c->pos0);
    memcpy(c->pages, b->pages, S * (size_t)b->max_pages * sizeof *c->pages);
    for (int s = 0; s < b->n_seqs; s++)
        for (int32_t t = b->seq_begin[s]; t < b->seq_begin[s + 1]; t++) {
            c->row_seq[t] = s;
            c->row_pos[t] = b->pos0[s] + t - b->seq_begin[s];
        }
    c->host_seq = c->row_seq, c->host_pos = c->row_pos;
    lay_batch(c, (int32_t *)(void *)c->batch_dev, b->T, b->n_seqs, b->max_pages);
    c->T = b->T;
    c->n_seqs = b->n_seqs;
    c->max_pages = b->max_pages;
    c->busy = true;
    cu_graph_begin(c);
}

/* ------------------------------------------------------------------------------------------------ operations */

/* acts = bf16 of rms_norm(x), unless the operation before has left them. */
static bool prepare(struct cuda *c, const float *x, int T, int K, const float *norm, float eps)
{
    if (!norm && c->acts_of == x && c->acts_T == T && c->acts_K == K) return true;
    c->acts_of = NULL;
    if (!cu_grow(c, &c->acts, &c->acts_cap, (size_t)T * (size_t)cu_pad(K) * sizeof *c->acts)) return false;
    cu_norm(c, x, T, K, norm, eps, NULL, c->acts);
    return !c->err.code;
}

static void do_linear(struct cuda *c, const struct linear_args *a)
{
    if (!prepare(c, a->x, a->T, a->w->cols, a->norm, a->eps)) return;
    c->acts_of = NULL;
    cu_product(c, a->w, c->acts, a->T, a->residual, a->out);
}

static void do_gate(struct cuda *c, const struct gate_args *a)
{
    int F = a->w->rows / 2;
    if (!prepare(c, a->x, a->T, a->w->cols, a->norm, a->eps)) return;
    size_t bytes = (size_t)a->T * (size_t)cu_pad(F) * sizeof *c->acts_next;
    if (!cu_grow(c, &c->acts_next, &c->acts_next_cap, bytes)) return;
    cu_product_gate(c, a->w, c->acts, a->T, a->swiglu_limit, a->out, c->acts_next);
    uint16_t *t = c->acts;
    size_t cap = c->acts_cap;
    c->acts = c->acts_next, c->acts_cap = c->acts_next_cap;
    c->acts_next = t, c->acts_next_cap = cap;
    c->acts_of = a->out;
    c->acts_T = a->T;
    c->acts_K = F;
}

static void do_gather(struct cuda *c, float *out, const float *x, int D, int n)
{
    if (cu_ok(c, "gather",
              cudaMemcpyAsync(c->gather_rows, c->gather_host, (size_t)n * sizeof *c->gather_rows,
                              cudaMemcpyHostToDevice, c->stream)))
        cu_gather(c, out, x, D, n);
}

/* One struct of the contract as a call, and back. */
static struct cu_call call_new(enum cu_op op)
{
    struct cu_call k;
    memset(&k, 0, sizeof k);
    k.op = op;
    return k;
}

void cu_issue(struct cuda *c, const struct cu_call *k)
{
    const float *f0 = (const float *)k->p[0], *f1 = (const float *)k->p[1], *f2 = (const float *)k->p[2];
    const float *f3 = (const float *)k->p[3];
    if (c->err.code) return;
    if (k->op != CU_LINEAR && k->op != CU_GATE) c->acts_of = NULL;
    switch (k->op) {
    case CU_EMBED: cu_embed(c, (float *)f0, (const struct bweight *)k->p[1]); break;
    case CU_LINEAR: {
        struct linear_args a = {(float *)f0, f1, f2, f3, k->f[0], k->n[0], (const struct bweight *)k->p[4]};
        do_linear(c, &a);
        break;
    }
    case CU_GATE: {
        struct gate_args a = {(float *)f0, f1, f2, k->f[0], k->f[1], k->n[0], (const struct bweight *)k->p[4]};
        do_gate(c, &a);
        break;
    }
    case CU_ROPE_KV: {
        struct rope_kv_args a = {(float *)f0,  f1,      f2,      f3,      k->f[0], k->f[1],
                                 k->n[0] != 0, k->n[1], k->n[2], k->n[3], k->n[4], (struct bkv *)k->p[4]};
        cu_rope_kv(c, &a);
        break;
    }
    case CU_ATTEND: {
        struct attend_args a = {(float *)f0, f1,      f2,      k->f[0], k->n[0],
                                k->n[1],     k->n[2], k->n[3], k->n[4], (const struct bkv *)k->p[3]};
        cu_attend(c, &a);
        break;
    }
    case CU_MOE: {
        struct moe_args a = {(float *)f0,
                             f1,
                             f2,
                             f3,
                             k->f[0],
                             k->f[1],
                             k->n[0],
                             k->n[1],
                             k->n[2],
                             k->n[3],
                             (const struct bweight *)k->p[4],
                             (const struct bweight *const *)k->p[5],
                             (const struct bweight *const *)k->p[6]};
        cu_moe(c, &a);
        break;
    }
    case CU_GATHER: do_gather(c, (float *)f0, f1, k->n[0], k->n[1]); break;
    }
}

static void take_call(struct backend *be, const struct cu_call *k)
{
    struct cuda *c = cuda_of(be);
    c->busy = true;
    if (!c->err.code) cu_count(c, k);
    if (!c->err.code && !cu_graph_takes(c, k)) cu_issue(c, k);
}

static void cuda_embed(struct backend *be, float *out, const struct bweight *w)
{
    struct cu_call k = call_new(CU_EMBED);
    k.p[0] = out, k.p[1] = w;
    take_call(be, &k);
}

static void cuda_linear(struct backend *be, const struct linear_args *a)
{
    struct cu_call k = call_new(CU_LINEAR);
    k.p[0] = a->out, k.p[1] = a->x, k.p[2] = a->residual, k.p[3] = a->norm, k.p[4] = a->w;
    k.f[0] = a->eps, k.n[0] = a->T;
    take_call(be, &k);
}

static void cuda_gate(struct backend *be, const struct gate_args *a)
{
    struct cu_call k = call_new(CU_GATE);
    k.p[0] = a->out, k.p[1] = a->x, k.p[2] = a->norm, k.p[4] = a->w;
    k.f[0] = a->eps, k.f[1] = a->swiglu_limit, k.n[0] = a->T;
    take_call(be, &k);
}

static void cuda_rope_kv(struct backend *be, const struct rope_kv_args *a)
{
    struct cu_call k = call_new(CU_ROPE_KV);
    k.p[0] = a->qkv, k.p[1] = a->q_norm, k.p[2] = a->k_norm, k.p[3] = a->inv_freq, k.p[4] = a->kv;
    k.f[0] = a->eps, k.f[1] = a->mscale;
    k.n[0] = a->interleaved, k.n[1] = a->H, k.n[2] = a->Hk, k.n[3] = a->Dh, k.n[4] = a->layer;
    take_call(be, &k);
}

static void cuda_attend(struct backend *be, const struct attend_args *a)
{
    struct cu_call k = call_new(CU_ATTEND);
    k.p[0] = a->out, k.p[1] = a->qkv, k.p[2] = a->sinks, k.p[3] = a->kv;
    k.f[0] = a->scale;
    k.n[0] = a->H, k.n[1] = a->Hk, k.n[2] = a->Dh, k.n[3] = a->layer, k.n[4] = a->window;
    take_call(be, &k);
}

static void cuda_moe(struct backend *be, const struct moe_args *a)
{
    struct cu_call k = call_new(CU_MOE);
    k.p[0] = a->out, k.p[1] = a->x, k.p[2] = a->residual, k.p[3] = a->norm;
    k.p[4] = a->router, k.p[5] = a->gate_up, k.p[6] = a->down;
    k.f[0] = a->eps, k.f[1] = a->swiglu_limit;
    k.n[0] = a->T, k.n[1] = a->E, k.n[2] = a->k, k.n[3] = a->kind;
    take_call(be, &k);
}

static void cuda_gather(struct backend *be, float *out, const float *x, int D, const int32_t *rows, int n)
{
    struct cuda *c = cuda_of(be);
    struct cu_call k = call_new(CU_GATHER);
    k.p[0] = out, k.p[1] = x;
    k.n[0] = D, k.n[1] = n;
    if (c->err.code) return;
    if ((size_t)n * sizeof *rows > c->gather_cap) cu_graph_flush(c);
    /* The pinned rows are read when the copy runs: one gather may wait at a time. */
    if (!cu_graph_gathers(c) && !wait(c)) return;
    if (!grow_pair(c, &c->gather_rows, &c->gather_host, &c->gather_cap, (size_t)n * sizeof *rows)) return;
    memcpy(c->gather_host, rows, (size_t)n * sizeof *rows);
    take_call(be, &k);
}

static int cuda_best(struct backend *be, const float *logits, int n, int V, int32_t *ids, struct err *e)
{
    struct cuda *c = cuda_of(be);
    cu_graph_flush(c);
    if (cu_grow(c, &c->best, &c->best_cap, (size_t)n * sizeof *c->best)) cu_best(c, logits, n, V, c->best);
    return cuda_download(be, ids, c->best, (size_t)n * sizeof *ids, e);
}

/* ------------------------------------------------------------------------------------------------ open, close */

static void cuda_close(struct backend *be)
{
    struct cuda *c = cuda_of(be);
    (void)cudaStreamSynchronize(c->stream);
    cu_graphs_free(c);
    cu_moe_free(c);
    cu_tables_free(c);
    cu_heap_free(c);
    cu_lt_close(c);
    void *all[] = {c->batch_dev, c->acts, c->acts_next, c->tmp, c->splits, c->attend_tmp, c->gather_rows, c->experts_read, c->best};
    for (size_t i = 0; i < COUNT_OF(all); i++) cu_free(c, all[i]);
    if (c->batch_host) (void)cudaFreeHost(c->batch_host);
    if (c->gather_host) (void)cudaFreeHost(c->gather_host);
    (void)cudaStreamDestroy(c->stream);
    free(c);
}

static const struct backend_ops cuda_ops = {
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .sync = cuda_sync,
    .free_bytes = cuda_free_bytes,
    .weight_new = cu_weight_new,
    .weight_free = cu_weight_free,
    .weight_bytes = cu_weight_bytes,
    .kv_new = cu_kv_new,
    .kv_free = cu_kv_free,
    .kv_page_bytes = cu_kv_page_bytes,
    .begin = cuda_begin,
    .embed = cuda_embed,
    .linear = cuda_linear,
    .gate = cuda_gate,
    .rope_kv = cuda_rope_kv,
    .attend = cuda_attend,
    .moe = cuda_moe,
    .gather = cuda_gather,
    .best = cuda_best,
    .stats = cu_stats,
    .limits = cu_limits,
};

extern "C" int backend_count_cuda(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    return n;
}

static int attribute(cudaDeviceAttr which, int device)
{
    int v = 0;
    return cudaDeviceGetAttribute(&v, which, device) == cudaSuccess ? v : 0;
}

/* A kernel of this build must run there, or nothing will. */
static __global__ void touch_kernel() {}

extern "C" int backend_open_cuda(struct backend **out, int device, struct err *e)
{
    struct cuda *c;
    cudaDeviceProp prop;
    TRY(mem_new(&c, sizeof *c, e));
    c->base.ops = &cuda_ops;
    c->base.chunk = 2048;
    c->device = device;
    if (!cu_ok(c, "opening the device", cudaSetDevice(device)) ||
        !cu_ok(c, "reading the device's properties", cudaGetDeviceProperties(&prop, device)) ||
        !cu_ok(c, "making a stream", cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking))) {
        int rc = report(c, e);
        free(c);
        return rc;
    }
    cudaFuncAttributes found;
    cudaError_t r = cudaFuncGetAttributes(&found, touch_kernel);
    if (r != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaStreamDestroy(c->stream);
        free(c);
        return err_set(e, ERR_DEVICE, "cuda:%d (%s, compute capability %d.%d): this build has no kernels for it: %s",
                       device, prop.name, prop.major, prop.minor, cudaGetErrorString(r));
    }
    int rc = cu_alloc(c, &c->experts_read, sizeof *c->experts_read, e);
    if (rc < 0 || !cu_ok(c, "clearing a counter", cudaMemset(c->experts_read, 0, sizeof *c->experts_read))) {
        if (rc == OK) rc = report(c, e);
        cuda_close(&c->base);
        return rc;
    }
    c->n_sm = prop.multiProcessorCount;
    c->unified = attribute(cudaDevAttrIntegrated, device) ||
                 attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device);
    snprintf(c->base.name, sizeof c->base.name, "cuda:%d %.60s%s", device, prop.name,
             c->unified ? ", shared memory" : "");
    (void)cu_lt_open(c);
    *out = &c->base;
    return OK;
}
