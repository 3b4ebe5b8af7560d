/* cuda_limits.cu: what this GPU does at best, measured: the rate at which its memory is read, and the rate of its
 * matrix units in bf16: the better of a large product by cuBLASLt, where that is present, and of multiply-adds on
 * registers. And what steps ask of it, counted from shapes. */
#include <string.h>

#include "cuda_launch.h"
#include "cuda_mma.h"

enum { READ_THREADS = 256, READ_RUNS = 8, PEAK_ROUNDS = 4096, PEAK_WARPS = 8, PEAK_CHAINS = 8, SQUARE = 8192 };
static const size_t READ_BYTES = (size_t)2 << 30;

static __global__ void __launch_bounds__(READ_THREADS) read_kernel(const uint4 *p, size_t n, uint4 *out)
{
    uint4 sum[4] = {};
    size_t step = (size_t)gridDim.x * READ_THREADS;
    size_t i = (size_t)blockIdx.x * READ_THREADS + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = __ldcs(p + i + (size_t)k * step);
            sum[k].x |= v.x, sum[k].y |= v.y, sum[k].z |= v.z, sum[k].w |= v.w;
        }
    uint32_t all = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) all |= sum[k].x | sum[k].y | sum[k].z | sum[k].w;
    if (all == 0x5A5A5A5A) out[threadIdx.x] = sum[0]; /* never: the bytes are ones */
}

static __global__ void __launch_bounds__(32 * PEAK_WARPS) peak_kernel(int rounds, float *out)
{
    float c[PEAK_CHAINS][4] = {};
    uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {5, 7};
    for (int i = 0; i < rounds; i++)
#pragma unroll
        for (int k = 0; k < PEAK_CHAINS; k++) cu_mma(c[k], a, b);
    float all = 0;
#pragma unroll
    for (int k = 0; k < PEAK_CHAINS; k++) all += c[k][0] + c[k][1] + c[k][2] + c[k][3];
    if (all == 12345) *out = all;
}

struct clock {
    cudaEvent_t from, to;
};

static double seconds(struct cuda *c, struct clock *t)
{
    float ms = 0;
    cu_ok(c, "timing", cudaEventRecord(t->to, c->stream));
    cu_ok(c, "timing", cudaEventSynchronize(t->to));
    cu_ok(c, "timing", cudaEventElapsedTime(&ms, t->from, t->to));
    return (double)ms / 1e3;
}

static double read_rate(struct cuda *c, struct clock *t)
{
    uint8_t *p = NULL;
    size_t cap = 0;
    double best = 0;
    if (!cu_grow(c, &p, &cap, READ_BYTES)) return 0;
    cu_ok(c, "fill", cudaMemsetAsync(p, 1, READ_BYTES, c->stream));
    for (int i = 0; i < READ_RUNS && !c->err.code; i++) {
        cu_ok(c, "timing", cudaEventRecord(t->from, c->stream));
        read_kernel<<<(unsigned)c->n_sm * 8, READ_THREADS, 0, c->stream>>>((const uint4 *)(const void *)p,
                                                                          READ_BYTES / 16, (uint4 *)(void *)p);
        cu_launched(c, "reading memory");
        double rate = (double)READ_BYTES / seconds(c, t) / 1e9;
        if (rate > best) best = rate;
    }
    cu_free(c, p);
    return best;
}

static double register_rate(struct cuda *c, struct clock *t)
{
    double best = 0, ops = 2.0 * 16 * 8 * 16 * PEAK_CHAINS * PEAK_ROUNDS * PEAK_WARPS * 2 * c->n_sm;
    for (int i = 0; i < 3 && !c->err.code; i++) {
        cu_ok(c, "timing", cudaEventRecord(t->from, c->stream));
        peak_kernel<<<(unsigned)c->n_sm * 2, 32 * PEAK_WARPS, 0, c->stream>>>(PEAK_ROUNDS, NULL);
        cu_launched(c, "multiplying registers");
        double rate = ops / seconds(c, t) / 1e9;
        if (rate > best) best = rate;
    }
    return best;
}

/* 0 where cuBLASLt is not there. */
static double product_rate(struct cuda *c, struct clock *t)
{
    struct bweight w;
    uint16_t *acts = NULL, *weights = NULL;
    float *out = NULL;
    size_t cap[3] = {0}, n = (size_t)SQUARE * SQUARE;
    double best = 0;
    memset(&w, 0, sizeof w);
    w.n_parts = 1;
    w.rows = w.cols = SQUARE;
    w.part[0].type = DT_BF16;
    w.part[0].rows = w.part[0].cols = SQUARE;
    w.part[0].q_stride = SQUARE * sizeof *weights;
    if (!cu_grow(c, &acts, &cap[0], n * sizeof *acts) || !cu_grow(c, &weights, &cap[1], n * sizeof *weights) ||
        !cu_grow(c, &out, &cap[2], n * sizeof *out))
        return 0;
    w.part[0].q = (const uint8_t *)weights;
    cu_ok(c, "fill", cudaMemsetAsync(acts, 0x3C, n * sizeof *acts, c->stream));
    cu_ok(c, "fill", cudaMemsetAsync(weights, 0x3D, n * sizeof *weights, c->stream));
    for (int i = 0; i < 5 && !c->err.code && cu_lt_takes(c, &w); i++) {
        cu_ok(c, "timing", cudaEventRecord(t->from, c->stream));
        if (!cu_lt_product(c, &w, acts, SQUARE, NULL, out)) break;
        double rate = 2.0 * SQUARE * SQUARE * SQUARE / seconds(c, t) / 1e9;
        if (rate > best) best = rate;
    }
    cu_free(c, acts);
    cu_free(c, weights);
    cu_free(c, out);
    return best;
}

int cu_limits(struct backend *be, struct backend_limits *out, struct err *e)
{
    struct cuda *c = (struct cuda *)be;
    struct clock t = {};
    memset(out, 0, sizeof *out);
    TRY(be->ops->sync(be, e));
    if (cu_ok(c, "making an event", cudaEventCreate(&t.from)) &&
        cu_ok(c, "making an event", cudaEventCreate(&t.to))) {
        out->read_gb_s = read_rate(c, &t);
        double by_registers = register_rate(c, &t), by_product = product_rate(c, &t);
        out->n_units = 1;
        strcpy(out->unit[0].name, "bf16");
        out->unit[0].gop_s = by_product > by_registers ? by_product : by_registers;
    }
    if (t.from) (void)cudaEventDestroy(t.from);
    if (t.to) (void)cudaEventDestroy(t.to);
    return be->ops->sync(be, e);
}

/* ------------------------------------------------------------------------------------------------ counting */

static size_t mat_bytes(const struct cu_mat *m) { return (size_t)m->rows * (m->q_stride + m->h_stride + m->s_stride); }

static size_t weight_bytes(const struct bweight *w)
{
    size_t n = 0;
    for (int i = 0; i < w->n_parts; i++) n += mat_bytes(&w->part[i]);
    return n;
}

static void count_product(struct cuda *c, const struct bweight *w, int64_t T, bool bytes)
{
    if (bytes) c->stats.weight_bytes += weight_bytes(w);
    c->stats.ops[0] += 2 * (uint64_t)w->rows * (uint64_t)w->cols * (uint64_t)T;
}

static void count_experts(struct cuda *c, const struct cu_call *k)
{
    const struct bweight *const *up = (const struct bweight *const *)k->p[5];
    const struct bweight *const *down = (const struct bweight *const *)k->p[6];
    count_product(c, (const struct bweight *)k->p[4], k->n[0], true);
    for (int x = 0; x < k->n[1]; x++) {
        if (!up[x]) continue;
        c->expert_bytes = weight_bytes(up[x]) + weight_bytes(down[x]); /* how many were read, the device counts */
        count_product(c, up[x], (int64_t)k->n[0] * k->n[2], false);
        count_product(c, down[x], (int64_t)k->n[0] * k->n[2], false);
        return;
    }
}

void cu_count(struct cuda *c, const struct cu_call *k)
{
    switch (k->op) {
    case CU_LINEAR:
    case CU_GATE: count_product(c, (const struct bweight *)k->p[4], k->n[0], true); break;
    case CU_ATTEND:
        backend_count_attention(&c->stats, 0, c->T, c->host_seq, c->host_pos, k->n[4], k->n[0], k->n[1], k->n[2]);
        break;
    case CU_MOE: count_experts(c, k); break;
    default: break;
    }
}

struct backend_stats cu_stats(const struct backend *be)
{
    struct cuda *c = (struct cuda *)be;
    struct backend_stats s = c->stats;
    unsigned long long experts = 0;
    if (c->experts_read && c->expert_bytes &&
        c->base.ops->download(&c->base, &experts, c->experts_read, sizeof experts, NULL) == OK)
        s.weight_bytes += experts * c->expert_bytes;
    return s;
}
