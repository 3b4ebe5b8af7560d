/* cuda_moe.cu: a layer of experts. The router's choices are sorted by expert on the device and never come to the
 * host; the products find their rows by the offsets. A token's results are added in the order of its choices, so
 * that neither the sort nor the other tokens change a bit. */
#include <stdlib.h>

#include "cuda_launch.h"

/* The router's kinds, as model.h numbers them: the contract passes the number. */
enum { SOFTMAX_TOPK, SOFTMAX_TOPK_NORM, TOPK_SOFTMAX };
enum {
    MAX_CHOICES = 32,
    MAX_EXPERTS = 1024,
    ROUTE_WARPS = 4,
    FEW_TOKENS = 32,
    SORT_THREADS = 256,
    COMBINE_THREADS = 256
};

struct cu_moe_scratch {
    float *x, *logits, *weight, *y; /* [T, D] [T, E] [T, k] [slots, D] */
    uint16_t *x_b, *h_b;            /* [T, cu_pad(D)] [slots, cu_pad(F)] */
    int32_t *chosen, *slot_of;      /* [T, k] expert, or -1 if it is not here; [T, k] slot or -1 */
    int32_t *row, *off, *active;    /* [slots] [E + 1] [E + 1]: the last is how many there are */
    size_t cap[11];
};

void cu_moe_free(struct cuda *c)
{
    struct cu_moe_scratch *s = c->moe;
    if (!s) return;
    void *all[] = {s->x,      s->logits,  s->weight, s->y,   s->x_b,   s->h_b,
                   s->chosen, s->slot_of, s->row,    s->off, s->active};
    for (size_t i = 0; i < COUNT_OF(all); i++) cu_free(c, all[i]);
    free(s);
    c->moe = NULL;
}

static_assert(32 * FEW_TOKENS == MAX_EXPERTS, "a thread for each expert");

static bool grow_all(struct cuda *c, struct cu_moe_scratch *s, const struct moe_args *a, int F, int D)
{
    size_t T = (size_t)a->T, E = (size_t)a->E, slots = T * (size_t)a->k;
    return cu_grow(c, &s->x, &s->cap[0], T * (size_t)D * sizeof *s->x) &&
           cu_grow(c, &s->logits, &s->cap[1], T * E * sizeof *s->logits) &&
           cu_grow(c, &s->weight, &s->cap[2], slots * sizeof *s->weight) &&
           cu_grow(c, &s->y, &s->cap[3], slots * (size_t)D * sizeof *s->y) &&
           cu_grow(c, &s->x_b, &s->cap[4], T * (size_t)cu_pad(D) * sizeof *s->x_b) &&
           cu_grow(c, &s->h_b, &s->cap[5], slots * (size_t)cu_pad(F) * sizeof *s->h_b) &&
           cu_grow(c, &s->chosen, &s->cap[6], slots * sizeof *s->chosen) &&
           cu_grow(c, &s->slot_of, &s->cap[7], slots * sizeof *s->slot_of) &&
           cu_grow(c, &s->row, &s->cap[8], slots * sizeof *s->row) &&
           cu_grow(c, &s->off, &s->cap[9], (E + 1) * sizeof *s->off) &&
           cu_grow(c, &s->active, &s->cap[10], (E + 1) * sizeof *s->active);
}

/* ------------------------------------------------------------------------------------------------ choices */

static __device__ double warp_sum(double v)
{
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    return v;
}

/* A warp chooses for one token: the k largest of z[E], ties to the lower index. Lane i < k gets the choice i and its
 * weight, other lanes -1. */
static __device__ int route(const float *z, int E, int k, int kind, float *weight)
{
    int lane = (int)threadIdx.x % 32, mine = -1;
    uint32_t taken = 0; /* bit i: expert 32 i + lane */
    double mass = 0;
    float max = 0;
    for (int i = 0; i < k; i++) {
        float best = 0;
        int at = -1;
        for (int x = lane, b = 0; x < E; x += 32, b++)
            if (!(taken >> b & 1) && (at < 0 || z[x] > best)) best = z[x], at = x;
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
            int from = __shfl_xor_sync(0xFFFFFFFFu, at, step);
            if (from >= 0 && (at < 0 || other > best || (other == best && from < at))) best = other, at = from;
        }
        /* With a NaN among them the lanes may disagree: the first decides. */
        at = __shfl_sync(0xFFFFFFFFu, at, 0);
        best = z[at];
        if (at % 32 == lane) taken |= 1u << at / 32;
        if (i == lane) mine = at;
        if (i == 0) max = best;
        if (kind != SOFTMAX_TOPK) mass += (double)expf(best - max);
    }
    if (kind == SOFTMAX_TOPK) {
        for (int x = lane; x < E; x += 32) mass += (double)expf(z[x] - max);
        mass = warp_sum(mass);
    }
    *weight = mine < 0 ? 0 : (float)((double)expf(z[mine] - max) / mass);
    return mine;
}

static __device__ __forceinline__ bool is_here(const struct bweight *experts, int x)
{
    return experts && experts[x].n_parts;
}

static __global__ void __launch_bounds__(32 * ROUTE_WARPS)
    route_kernel(const float *z, int T, int E, int k, int kind, const struct bweight *experts, int32_t *chosen,
                 float *weight)
{
    int t = (int)(blockIdx.x * ROUTE_WARPS + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    float w;
    cu_wait();
    cu_go();
    if (t >= T) return;
    int mine = route(z + (size_t)t * (size_t)E, E, k, kind, &w);
    if (mine < 0) return;
    size_t at = (size_t)t * (size_t)k + (size_t)lane;
    weight[at] = w;
    chosen[at] = is_here(experts, mine) ? mine : -1;
}

/* The choices of at most FEW_TOKENS tokens and their sort at once, in one block; results as of the two kernels. */
static __global__ void __launch_bounds__(32 * FEW_TOKENS)
    route_few_kernel(const float *z, int T, int E, int k, int kind, const struct bweight *experts, float *weight,
                     int32_t *off, int32_t *active, int32_t *slot_of, int32_t *row, unsigned long long *read)
{
    __shared__ int chosen[32 * FEW_TOKENS], count[MAX_EXPERTS], start[MAX_EXPERTS], sums[2][32];
    int me = (int)threadIdx.x, lane = me % 32, warp = me / 32, n = T * k;
    for (int i = me; i < MAX_EXPERTS; i += (int)blockDim.x) count[i] = 0;
    cu_wait();
    cu_go();
    __syncthreads();
    if (warp < T) {
        float w;
        int mine = route(z + (size_t)warp * (size_t)E, E, k, kind, &w), at = warp * k + lane;
        if (mine >= 0) {
            if (!is_here(experts, mine)) mine = -1;
            weight[at] = w;
            chosen[at] = mine;
            if (mine >= 0) atomicAdd(&count[mine], 1);
        }
    }
    __syncthreads();
    /* A thread for each expert: slots and used experts up to it. */
    int own = count[me], slots = own, used = own > 0;
    for (int step = 1; step < 32; step *= 2) {
        int a = __shfl_up_sync(0xFFFFFFFFu, slots, step), b = __shfl_up_sync(0xFFFFFFFFu, used, step);
        if (lane >= step) slots += a, used += b;
    }
    if (lane == 31) sums[0][warp] = slots, sums[1][warp] = used;
    __syncthreads();
    for (int w = 0; w < warp; w++) slots += sums[0][w], used += sums[1][w];
    start[me] = slots - own;
    if (me < E) off[me] = slots - own;
    if (me < E && own > 0) active[used - 1] = me;
    if (me == MAX_EXPERTS - 1) off[E] = slots, active[E] = used, *read += (unsigned long long)used;
    __syncthreads();
    if (me >= n) return;
    int x = chosen[me], slot = -1;
    if (x >= 0) {
        slot = start[x];
        for (int i = 0; i < me; i++) slot += chosen[i] == x;
        row[slot] = me / k;
    }
    slot_of[me] = slot;
}

/* The sum over a block of SORT_THREADS, in every thread. */
static __device__ int block_sum(int v)
{
    __shared__ int part[SORT_THREADS / 32];
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < SORT_THREADS / 32; i++) v += part[i];
    return v;
}

/* Block x < E gives expert x its slots, tokens ascending; block E closes the lists. Each block counts all choices for
 * itself: no block waits for another. chosen[n], n = T * k. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_kernel(const int32_t *chosen, int n, int k, int E, int32_t *off, int32_t *active, int32_t *slot_of,
                int32_t *row, unsigned long long *read)
{
    __shared__ uint8_t used[MAX_EXPERTS];
    __shared__ int warp_count[SORT_THREADS / 32];
    int x = (int)blockIdx.x, me = (int)threadIdx.x, below = 0, own = 0, rank = 0;
    for (int i = me; i < E; i += SORT_THREADS) used[i] = 0;
    cu_wait();
    cu_go();
    __syncthreads();
    for (int i = me; i < n; i += SORT_THREADS) {
        int e = chosen[i];
        if (e >= 0) {
            below += e < x, own += e == x;
            used[e] = 1;
        } else if (x == E) {
            slot_of[i] = -1;
        }
    }
    below = block_sum(below);
    own = block_sum(own);
    for (int i = me; i < x; i += SORT_THREADS) rank += used[i];
    rank = block_sum(rank);
    if (me == 0) {
        off[x] = below;
        if (x == E) active[E] = rank, *read += (unsigned long long)rank;
        else if (own > 0) active[rank] = x;
    }
    if (own == 0) return;
    int at = below; /* of the first choice of this round */
    for (int i0 = 0; i0 < n; i0 += SORT_THREADS) {
        int i = i0 + me;
        bool here = i < n && chosen[i] == x;
        unsigned mask = __ballot_sync(0xFFFFFFFFu, here);
        if (me % 32 == 0) warp_count[me / 32] = __popc(mask);
        __syncthreads();
        int slot = at + __popc(mask & ((1u << me % 32) - 1));
        for (int w = 0; w < SORT_THREADS / 32; w++) {
            if (w < me / 32) slot += warp_count[w];
            at += warp_count[w];
        }
        if (here) slot_of[i] = slot, row[slot] = i / k;
        __syncthreads();
    }
}

/* ------------------------------------------------------------------------------------------------ the sum */

static __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_kernel(float *out, const float *residual, const float *y, const float *weight, const int32_t *slot_of,
                   int D, int k)
{
    size_t t = blockIdx.x;
    int d = (int)(blockIdx.y * COMBINE_THREADS + threadIdx.x);
    cu_wait();
    cu_go();
    if (d >= D) return;
    float v = residual ? residual[t * (size_t)D + (size_t)d] : 0;
    for (int i = 0; i < k; i++) {
        int slot = slot_of[t * (size_t)k + (size_t)i];
        if (slot >= 0) v += y[(size_t)slot * (size_t)D + (size_t)d] * weight[t * (size_t)k + (size_t)i];
    }
    out[t * (size_t)D + (size_t)d] = v;
}

void cu_moe(struct cuda *c, const struct moe_args *a)
{
    if (c->err.code || a->T == 0) return;
    if (a->k > MAX_CHOICES || a->E > MAX_EXPERTS) {
        err_set(&c->err, ERR_UNSUPPORTED, "%d of %d experts: a GPU takes at most %d of %d", a->k, a->E, MAX_CHOICES,
                MAX_EXPERTS);
        return;
    }
    const struct cu_experts *up = cu_experts_of(c, a->gate_up, a->E), *down = cu_experts_of(c, a->down, a->E);
    if (!c->moe && !c->err.code && mem_new(&c->moe, sizeof *c->moe, &c->err) < 0) return;
    if (c->err.code) return;
    struct cu_moe_scratch *s = c->moe;
    int D = a->router->cols, F = up->any ? up->any->rows / 2 : 0, n = a->T * a->k;
    if (!grow_all(c, s, a, F, D)) return;
    cu_norm(c, a->x, a->T, D, a->norm, a->eps, s->x, s->x_b);
    cu_product_float(c, a->router, s->x, a->T, s->logits);
    if (c->err.code) return;
    if (a->T <= FEW_TOKENS) {
        cu_launch(c, "routing", route_few_kernel, dim3(1), 32 * FEW_TOKENS, 0, s->logits, a->T, a->E, a->k, a->kind,
                  up->dev, s->weight, s->off, s->active, s->slot_of, s->row, c->experts_read);
    } else {
        cu_launch(c, "routing", route_kernel, dim3((unsigned)cu_div_up(a->T, ROUTE_WARPS)), 32 * ROUTE_WARPS, 0,
                  s->logits, a->T, a->E, a->k, a->kind, up->dev, s->chosen, s->weight);
        cu_launch(c, "sorting by expert", sort_kernel, dim3((unsigned)a->E + 1), SORT_THREADS, 0, s->chosen, n, a->k,
                  a->E, s->off, s->active, s->slot_of, s->row, c->experts_read);
    }
    if (c->err.code) return;
    if (up->any) {
        struct cu_slots slots = {s->off, s->active, s->active + a->E, s->row, a->E, n, a->T};
        cu_grouped_gate(c, up, &slots, s->x_b, a->swiglu_limit, s->h_b);
        slots.row = NULL;
        cu_grouped_linear(c, down, &slots, s->h_b, s->y);
        if (c->err.code) return;
    }
    dim3 grid((unsigned)a->T, (unsigned)cu_div_up(D, COMBINE_THREADS));
    cu_launch(c, "experts", combine_kernel, grid, COMBINE_THREADS, 0, a->out, a->residual, s->y, s->weight,
              s->slot_of, D, a->k);
}
