/* cuda.cu: the CUDA device: memory, the batch of a step, the table of operations. What an operation computes stands in
 * the other files. */
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
        return err_set(e, r == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE, "cuda: allocating %zu bytes: %s", bytes,
                       cudaGetErrorString(r));
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

static void cuda_free(struct backend *be, void *dev) { cu_free(cuda_of(be), dev); }

static void cuda_upload(struct backend *be, void *dev, const void *host, size_t bytes)
{
    struct cuda *c = cuda_of(be);
    if (!c->err.code) cu_ok(c, "upload", cudaMemcpyAsync(dev, host, bytes, cudaMemcpyHostToDevice, c->stream));
}

static int cuda_sync(struct backend *be, struct err *e)
{
    struct cuda *c = cuda_of(be);
    cu_ok(c, "step", cudaStreamSynchronize(c->stream));
    return report(c, e);
}

static int cuda_download(struct backend *be, void *host, const void *dev, size_t bytes, struct err *e)
{
    struct cuda *c = cuda_of(be);
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
    } arrays[] = {{&c->ids, (size_t)T},           {&c->row_seq, (size_t)T}, {&c->row_pos, (size_t)T},
                  {&c->seq_begin, (size_t)S + 1}, {&c->pos0, (size_t)S},    {&c->pages, (size_t)S * (size_t)max_pages}};
    size_t words = 0;
    for (size_t i = 0; i < COUNT_OF(arrays); i++) {
        if (base) *arrays[i].at = base + words;
        words += size_round_up(arrays[i].n, 4);
    }
    return words;
}

static bool grow_batch(struct cuda *c, size_t bytes)
{
    void *host;
    if (bytes <= c->batch_cap) return true;
    size_t cap = bytes + bytes / 2;
    if (!cu_ok(c, "step", cudaStreamSynchronize(c->stream))) return false;
    if (c->batch_host) cu_ok(c, "free", cudaFreeHost(c->batch_host));
    c->batch_host = NULL;
    size_t old = c->batch_cap;
    c->batch_cap = 0;
    if (!cu_ok(c, "allocating the batch", cudaMallocHost(&host, cap)) || !cu_grow(c, &c->batch_dev, &old, cap)) return false;
    c->batch_host = (uint8_t *)host;
    c->batch_cap = cap;
    return true;
}

static void cuda_begin(struct backend *be, const struct batch *b)
{
    struct cuda *c = cuda_of(be);
    size_t T = (size_t)b->T, S = (size_t)b->n_seqs;
    c->T = 0;
    c->acts_of = NULL;
    if (c->err.code) return;
    size_t bytes = lay_batch(c, NULL, b->T, b->n_seqs, b->max_pages) * sizeof(int32_t);
    cu_heap_settle(c);
    if (!grow_batch(c, bytes)) return;
    /* The copy of the step before may still read the pinned block. */
    if (!cu_ok(c, "step", cudaStreamSynchronize(c->stream))) return;
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
    lay_batch(c, (int32_t *)(void *)c->batch_dev, b->T, b->n_seqs, b->max_pages);
    cu_ok(c, "batch", cudaMemcpyAsync(c->batch_dev, c->batch_host, bytes, cudaMemcpyHostToDevice, c->stream));
    c->T = b->T;
    c->n_seqs = b->n_seqs;
    c->max_pages = b->max_pages;
}

/* ------------------------------------------------------------------------------------------------ operations */

/* acts = bf16 of rms_norm(x), unless the operation before has left them. */
static bool prepare(struct cuda *c, const float *x, int T, int K, const float *norm, float eps)
{
    if (!norm && c->acts_of == x && c->acts_K == K) return true;
    c->acts_of = NULL;
    if (!cu_grow(c, &c->acts, &c->acts_cap, (size_t)T * (size_t)cu_pad(K) * sizeof *c->acts)) return false;
    cu_norm(c, x, T, K, norm, eps, NULL, c->acts);
    return !c->err.code;
}

static void cuda_linear(struct backend *be, const struct linear_args *a)
{
    struct cuda *c = cuda_of(be);
    if (c->err.code || !prepare(c, a->x, a->T, a->w->cols, a->norm, a->eps)) return;
    c->acts_of = NULL;
    cu_product(c, a->w, c->acts, a->T, a->residual, a->out);
}

static void cuda_gate(struct backend *be, const struct gate_args *a)
{
    struct cuda *c = cuda_of(be);
    if (c->err.code || !prepare(c, a->x, a->T, a->w->cols, a->norm, a->eps)) return;
    c->acts_of = NULL;
    cu_product_gate(c, a->w, c->acts, a->T, a->swiglu_limit, a->out, NULL);
}

static void cuda_embed(struct backend *be, float *out, const struct bweight *w)
{
    struct cuda *c = cuda_of(be);
    if (!c->err.code) cu_embed(c, out, w);
}

static void cuda_rope_kv(struct backend *be, const struct rope_kv_args *a)
{
    struct cuda *c = cuda_of(be);
    c->acts_of = NULL;
    if (!c->err.code) cu_rope_kv(c, a);
}

static void cuda_attend(struct backend *be, const struct attend_args *a)
{
    struct cuda *c = cuda_of(be);
    c->acts_of = NULL;
    if (!c->err.code) cu_attend(c, a);
}

static void cuda_moe(struct backend *be, const struct moe_args *a)
{
    struct cuda *c = cuda_of(be);
    c->acts_of = NULL;
    if (!c->err.code) cu_moe(c, a);
}

static void cuda_gather(struct backend *be, float *out, const float *x, int D, const int32_t *rows, int n)
{
    struct cuda *c = cuda_of(be);
    c->acts_of = NULL;
    if (c->err.code) return;
    /* A pageable source is copied aside before the call returns. */
    static_assert(sizeof(int32_t) == 4, "rows are words");
    if (!cu_grow(c, &c->gather_rows, &c->gather_cap, (size_t)n * sizeof *rows)) return;
    if (!cu_ok(c, "gather", cudaMemcpyAsync(c->gather_rows, rows, (size_t)n * sizeof *rows, cudaMemcpyHostToDevice, c->stream)))
        return;
    cu_gather(c, out, x, D, n);
}

/* ------------------------------------------------------------------------------------------------ open, close */

static void cuda_close(struct backend *be)
{
    struct cuda *c = cuda_of(be);
    (void)cudaStreamSynchronize(c->stream);
    cu_moe_free(c);
    cu_tables_free(c);
    cu_heap_free(c);
    cu_lt_close(c);
    void *all[] = {c->batch_dev, c->acts, c->tmp, c->splits, c->attend_tmp, c->gather_rows};
    for (size_t i = 0; i < COUNT_OF(all); i++) cu_free(c, all[i]);
    if (c->batch_host) (void)cudaFreeHost(c->batch_host);
    (void)cudaStreamDestroy(c->stream);
    free(c);
}

static const struct backend_ops cuda_ops = {
    .close = cuda_close, .alloc = cuda_alloc, .free = cuda_free, .upload = cuda_upload, .download = cuda_download,
    .sync = cuda_sync, .free_bytes = cuda_free_bytes,
    .weight_new = cu_weight_new, .weight_free = cu_weight_free, .weight_bytes = cu_weight_bytes,
    .kv_new = cu_kv_new, .kv_free = cu_kv_free, .kv_page_bytes = cu_kv_page_bytes,
    .begin = cuda_begin, .embed = cuda_embed, .linear = cuda_linear, .gate = cuda_gate, .rope_kv = cuda_rope_kv,
    .attend = cuda_attend, .moe = cuda_moe, .gather = cuda_gather,
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
        return err_set(e, ERR_DEVICE, "cuda:%d (%s, compute capability %d.%d): this build has no kernels for it: %s", device,
                       prop.name, prop.major, prop.minor, cudaGetErrorString(r));
    }
    c->n_sm = prop.multiProcessorCount;
    c->unified = attribute(cudaDevAttrIntegrated, device) ||
                 attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device);
    snprintf(c->base.name, sizeof c->base.name, "cuda:%d %.60s%s", device, prop.name, c->unified ? ", shared memory" : "");
    (void)cu_lt_open(c);
    *out = &c->base;
    return OK;
}
