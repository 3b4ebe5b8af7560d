/* cuda_lt.cu: cuBLASLt, where it is: products of BF16 weights with many rows. The library is looked for when the
 * device opens, so that the program starts, and runs, without it. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_mma.h"

enum { LT_WORK_BYTES = 32 << 20, LT_PLANS = 64 };

/* The functions used: cublasLtCreate and so on. */
#define LT_FUNCTIONS(X)                                                                                              \
    X(Create)                                                                                                        \
    X(Destroy)                                                                                                       \
    X(Matmul)                                                                                                        \
    X(MatmulAlgoGetHeuristic)                                                                                        \
    X(MatmulDescCreate)                                                                                              \
    X(MatmulDescDestroy)                                                                                             \
    X(MatmulDescSetAttribute)                                                                                        \
    X(MatrixLayoutCreate)                                                                                            \
    X(MatrixLayoutDestroy)                                                                                           \
    X(MatmulPreferenceCreate)                                                                                        \
    X(MatmulPreferenceDestroy)                                                                                       \
    X(MatmulPreferenceSetAttribute)

/* A product's shape and how it is computed. out is [T][ld_out], a part's rows are N of its columns. */
struct lt_plan {
    int N, T, K, ld_w, ld_x, ld_out;
    cublasLtMatrixLayout_t w, x, out;
    cublasLtMatmulAlgo_t algo;
};

struct cu_lt {
    void *library;
#define MEMBER(name) decltype(&cublasLt##name) name;
    LT_FUNCTIONS(MEMBER)
#undef MEMBER
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    void *work;
    struct lt_plan plans[LT_PLANS];
    int n_plans;
};

static bool lt_ok(struct cuda *c, cublasStatus_t r)
{
    if (r != CUBLAS_STATUS_SUCCESS && !c->err.code)
        err_set(&c->err, ERR_DEVICE, "cuda: product: cuBLASLt failed with status %d", (int)r);
    return !c->err.code;
}

static bool find_functions(struct cu_lt *lt)
{
    char name[32];
    snprintf(name, sizeof name, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    lt->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!lt->library) return false;
    bool all = true;
#define FIND(name)                                                                                                   \
    do {                                                                                                             \
        void *f = dlsym(lt->library, "cublasLt" #name);                                                              \
        memcpy(&lt->name, &f, sizeof f);                                                                             \
        all = all && f;                                                                                              \
    } while (0);
    LT_FUNCTIONS(FIND)
#undef FIND
    return all;
}

bool cu_lt_open(struct cuda *c)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    struct cu_lt *lt;
    if (mem_new(&lt, sizeof *lt, NULL) < 0) return false;
    c->lt = lt;
    if (!find_functions(lt) || lt->Create(&lt->handle) != CUBLAS_STATUS_SUCCESS ||
        lt->MatmulDescCreate(&lt->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS ||
        lt->MatmulDescSetAttribute(lt->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) !=
            CUBLAS_STATUS_SUCCESS ||
        cu_alloc(c, &lt->work, LT_WORK_BYTES, NULL) < 0) {
        cu_lt_close(c);
        return false;
    }
    return true;
}

void cu_lt_close(struct cuda *c)
{
    struct cu_lt *lt = c->lt;
    if (!lt) return;
    for (int i = 0; i < lt->n_plans; i++) {
        (void)lt->MatrixLayoutDestroy(lt->plans[i].w);
        (void)lt->MatrixLayoutDestroy(lt->plans[i].x);
        (void)lt->MatrixLayoutDestroy(lt->plans[i].out);
    }
    if (lt->desc) (void)lt->MatmulDescDestroy(lt->desc);
    if (lt->handle) (void)lt->Destroy(lt->handle);
    cu_free(c, lt->work);
    if (lt->library) (void)dlclose(lt->library);
    free(lt);
    c->lt = NULL;
}

/* In cuBLAS's terms, where columns are contiguous: out [N, T] = (w [K, N])^T x [K, T]. */
static struct lt_plan *plan_of(struct cuda *c, int N, int T, int K, int ld_w, int ld_x, int ld_out)
{
    struct cu_lt *lt = c->lt;
    for (int i = 0; i < lt->n_plans; i++) {
        struct lt_plan *p = &lt->plans[i];
        if (p->N == N && p->T == T && p->K == K && p->ld_w == ld_w && p->ld_x == ld_x && p->ld_out == ld_out)
            return p;
    }
    if (lt->n_plans == LT_PLANS) { /* odd sizes come from prompts' ends: the last place is theirs */
        struct lt_plan *p = &lt->plans[--lt->n_plans];
        (void)lt->MatrixLayoutDestroy(p->w);
        (void)lt->MatrixLayoutDestroy(p->x);
        (void)lt->MatrixLayoutDestroy(p->out);
    }
    struct lt_plan *p = &lt->plans[lt->n_plans];
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    const size_t work = LT_WORK_BYTES;
    int n = 0;
    memset(p, 0, sizeof *p);
    if (!lt_ok(c, lt->MatmulPreferenceCreate(&preference))) return NULL;
    bool ok = lt_ok(c, lt->MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &work,
                                                        sizeof work)) &&
              lt_ok(c, lt->MatrixLayoutCreate(&p->w, CUDA_R_16BF, (uint64_t)K, (uint64_t)N, ld_w)) &&
              lt_ok(c, lt->MatrixLayoutCreate(&p->x, CUDA_R_16BF, (uint64_t)K, (uint64_t)T, ld_x)) &&
              lt_ok(c, lt->MatrixLayoutCreate(&p->out, CUDA_R_32F, (uint64_t)N, (uint64_t)T, ld_out)) &&
              lt_ok(c, lt->MatmulAlgoGetHeuristic(lt->handle, lt->desc, p->w, p->x, p->out, p->out, preference, 1,
                                                  &found, &n));
    (void)lt->MatmulPreferenceDestroy(preference);
    if (ok && n == 0) ok = lt_ok(c, CUBLAS_STATUS_NOT_SUPPORTED);
    if (!ok) {
        if (p->w) (void)lt->MatrixLayoutDestroy(p->w);
        if (p->x) (void)lt->MatrixLayoutDestroy(p->x);
        if (p->out) (void)lt->MatrixLayoutDestroy(p->out);
        return NULL;
    }
    p->algo = found.algo;
    p->N = N, p->T = T, p->K = K, p->ld_w = ld_w, p->ld_x = ld_x, p->ld_out = ld_out;
    lt->n_plans++;
    return p;
}

/* out = bias + residual: what the product is added to */
static __global__ void begin_kernel(const float *bias, const float *residual, int N, size_t n, float *out)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (bias ? bias[i % (size_t)N] : 0) + (residual ? residual[i] : 0);
}

bool cu_lt_takes(const struct cuda *c, const struct bweight *w)
{
    if (!c->lt) return false;
    for (int i = 0; i < w->n_parts; i++)
        if (w->part[i].type != DT_BF16 || w->part[i].rows % 8 || w->cols % 8)
            return false; /* what all its kernels take */
    return true;
}

bool cu_lt_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                   float *out)
{
    struct cu_lt *lt = c->lt;
    const float one = 1, zero = 0;
    if (c->err.code || !cu_lt_takes(c, w)) return false;
    size_t n = (size_t)T * (size_t)w->rows;
    bool add = w->bias || residual;
    if (w->bias || (residual && residual != out)) {
        begin_kernel<<<(unsigned)cu_div_up((int64_t)n, 256), 256, 0, c->stream>>>(w->bias, residual, w->rows, n, out);
        if (!cu_launched(c, "product")) return true;
    }
    for (int i = 0, at = 0; i < w->n_parts; at += w->part[i++].rows) {
        const struct cu_mat *m = &w->part[i];
        struct lt_plan *p = plan_of(c, m->rows, T, m->cols, (int)m->q_stride / 2, cu_pad(m->cols), w->rows);
        if (!p) return true;
        if (!lt_ok(c, lt->Matmul(lt->handle, lt->desc, &one, m->q, p->w, acts, p->x, add ? &one : &zero, out + at,
                                 p->out, out + at, p->out, &p->algo, lt->work, LT_WORK_BYTES, c->stream)))
            return true;
    }
    return true;
}
