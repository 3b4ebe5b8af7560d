/* cuda_attend.cu: RoPE, the KV pages and attention over them, on the tensor cores in F16 with float sums.
 *
 * A warp carries 16 rows, a row being one query head of one token, through pages of 32 keys with an online softmax.
 * Pages are laid out for it: each lane loads 16 bytes of keys or values and a warp 512 contiguous ones, straight into
 * the operands of mma.m16n8k16, without shared memory. The order of columns inside a product does not matter as long
 * as both sides agree:
 *   keys    [DP / 32 units][32 places][32 columns]: key 8 t + 2 i + j (j < 2) of a page stands at place 8 i + 2 t + j,
 *           so that the scores a lane t gets from tiles i = 0..3 are those of keys 8 t .. 8 t + 7;
 *   values  [DP columns][32 keys], so that the values of these keys are what lane t loads for a column.
 * DP is the head's width rounded up to what kernels are made for; key columns behind the width are zero.
 *
 * Two kinds of kernel. A sequence with one row (decode) is cut along its context into splits that its length alone
 * decides, and the warps of a block share the pages of one. A sequence of more rows is cut into tiles of rows, and
 * each warp walks the whole context of its own. In both a row's numbers depend on its own sequence only; the two
 * differ in the last bits. */
#include <math.h>
#include <stdlib.h>

#include "cuda_launch.h"
#include "cuda_mma.h"

enum { MAX_DH = 256, ROPE_WARPS = 4 };
enum { ATTEND_WARPS = 4, MAX_SPLITS = 32, MIN_SPLIT_PAGES = 8, MAX_WAITING = 1 << 16 };

/* ------------------------------------------------------------------------------------------------ pages */

static int padded(int Dh) { return Dh <= 64 ? 64 : Dh <= 96 ? 96 : Dh <= 128 ? 128 : 256; }

size_t cu_kv_page_bytes(const struct backend *be, int n_layers, int Hk, int Dh)
{
    (void)be;
    return (size_t)n_layers * 2 * (size_t)Hk * KV_PAGE * (size_t)padded(Dh) * sizeof(uint16_t);
}

int cu_kv_new(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e)
{
    struct cuda *c = (struct cuda *)be;
    size_t one_half = cu_kv_page_bytes(be, n_layers, Hk, Dh) / 2, bytes;
    struct bkv *kv;
    if (!size_mul(one_half, (size_t)n_pages, &bytes))
        return err_set(e, ERR_NOMEM, "%d KV pages of %zu bytes are too many", n_pages, 2 * one_half);
    if (Dh > MAX_DH || Dh % 2)
        return err_set(e, ERR_UNSUPPORTED, "head width %d: even widths up to %d are supported", Dh, MAX_DH);
    TRY(mem_new(&kv, sizeof *kv, e));
    kv->n_layers = n_layers, kv->n_pages = n_pages, kv->Hk = Hk, kv->Dh = Dh, kv->DP = padded(Dh);
    int rc = cu_alloc(c, &kv->k, bytes, e);
    if (rc == OK) rc = cu_alloc(c, &kv->v, bytes, e);
    if (rc == OK) rc = cu_alloc(c, &kv->done, MAX_WAITING * sizeof *kv->done, e);
    if (rc < 0) {
        cu_kv_free(be, kv);
        return rc;
    }
    cu_graph_flush(c);
    cu_ok(c, "pages", cudaMemsetAsync(kv->done, 0, MAX_WAITING * sizeof *kv->done, c->stream));
    c->busy = true;
    *out = kv;
    return OK;
}

void cu_kv_free(struct backend *be, struct bkv *kv)
{
    struct cuda *c = (struct cuda *)be;
    if (!kv) return;
    cu_graph_flush(c);
    cu_graphs_drop(c);
    cu_free(c, kv->k);
    cu_free(c, kv->v);
    cu_free(c, kv->done);
    free(kv);
}

/* Offset of one layer, page 0, head 0 in k and in v. */
static size_t layer_at(const struct bkv *kv, int layer)
{
    return (size_t)layer * (size_t)kv->n_pages * (size_t)kv->Hk * KV_PAGE * (size_t)kv->DP;
}

/* Inside the block of one page and head: key j and value j, column d. */
static __device__ __forceinline__ int key_at(int j, int d)
{
    int place = 8 * (j % 8 / 2) + 2 * (j / 8) + j % 2;
    return (d / 32 * KV_PAGE + place) * 32 + d % 32;
}
static __device__ __forceinline__ int value_at(int j, int d) { return d * KV_PAGE + j; }

static __device__ __forceinline__ uint32_t f16_pack(float lo, float hi)
{
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)(void *)&h;
}
static __device__ __forceinline__ uint16_t f16_of(float v) { return __half_as_ushort(__float2half_rn(v)); }

/* ------------------------------------------------------------------------------------------------ rope */

struct rope_job {
    struct rope_kv_args a;
    uint16_t *k, *v; /* the layer's pages */
    int DP, max_pages;
    const int32_t *row_seq, *row_pos, *pages;
};

/* A block has one token, a warp one head of it: q and k heads, then v heads. */
static __global__ void __launch_bounds__(32 * ROPE_WARPS) rope_kernel(const __grid_constant__ struct rope_job j)
{
    __shared__ float cs[MAX_DH / 2], sn[MAX_DH / 2];
    int t = (int)blockIdx.x, lane = (int)threadIdx.x % 32, Dh = j.a.Dh, n_pairs = Dh / 2;
    int head = (int)(blockIdx.y * ROPE_WARPS + threadIdx.x / 32), H = j.a.H, Hk = j.a.Hk;
    cu_wait();
    cu_go();
    int pos = j.row_pos[t], key = pos % KV_PAGE;
    for (int i = (int)threadIdx.x; i < n_pairs; i += 32 * ROPE_WARPS) {
        float s, c;
        sincosf(__fmul_rn((float)pos, j.a.inv_freq[i]), &s, &c);
        cs[i] = c * j.a.mscale, sn[i] = s * j.a.mscale;
    }
    __syncthreads();
    if (head >= H + 2 * Hk) return;
    float *x = j.a.qkv + ((size_t)t * (size_t)(H + 2 * Hk) + (size_t)head) * (size_t)Dh;
    uint16_t *page = NULL;
    if (head >= H) {
        int32_t p = j.pages[(size_t)j.row_seq[t] * (size_t)j.max_pages + (size_t)(pos / KV_PAGE)];
        size_t at = ((size_t)p * (size_t)Hk + (size_t)((head - H) % Hk)) * KV_PAGE * (size_t)j.DP;
        page = (head < H + Hk ? j.k : j.v) + at;
    }
    if (head >= H + Hk) {
        for (int d = lane; d < Dh; d += 32) page[value_at(key, d)] = f16_of(x[d]);
        return;
    }
    const float *norm = head < H ? j.a.q_norm : j.a.k_norm;
    float scale = 1;
    if (norm) {
        float sum = 0;
        for (int d = lane; d < Dh; d += 32) sum += x[d] * x[d];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        scale = 1.0f / sqrtf(sum / (float)Dh + j.a.eps);
    }
    for (int i = lane; i < n_pairs; i += 32) {
        int p = j.a.interleaved ? 2 * i : i, q = j.a.interleaved ? 2 * i + 1 : i + n_pairs;
        float u = x[p], v = x[q];
        if (norm) u = u * scale * norm[p], v = v * scale * norm[q];
        float r = u * cs[i] - v * sn[i], w = v * cs[i] + u * sn[i];
        if (page) page[key_at(key, p)] = f16_of(r), page[key_at(key, q)] = f16_of(w);
        else x[p] = r, x[q] = w;
    }
    if (page)
        for (int d = Dh + lane; d < j.DP; d += 32) page[key_at(key, d)] = 0;
}

void cu_rope_kv(struct cuda *c, const struct rope_kv_args *a)
{
    if (c->err.code || c->T == 0) return;
    size_t at = layer_at(a->kv, a->layer);
    struct rope_job j = {*a, a->kv->k + at, a->kv->v + at, a->kv->DP, c->max_pages, c->row_seq, c->row_pos, c->pages};
    dim3 grid((unsigned)c->T, (unsigned)cu_div_up(a->H + 2 * a->Hk, ROPE_WARPS));
    cu_launch(c, "rope", rope_kernel, grid, 32 * ROPE_WARPS, 0, j);
}

/* ------------------------------------------------------------------------------------------------ one page */

/* As cu_mma, in F16. */
static __device__ __forceinline__ void mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint4 load16(const uint16_t *p) { return __ldg((const uint4 *)(const void *)p); }

/* 16 R rows of a warp. Lane (g, t) has rows g + 8 h of each 16, h < NH: with NH 1 only the first 8 are there. max and
 * sum in units of log2; a lane's sum is that of its own keys. */
template <int DP, int R, int NH> struct rows {
    uint32_t q[R][DP / 16][4];
    float o[R][DP / 8][4], max[R][2], sum[R][2];
};

/* Eight columns of row x (floats) as F16, zeros from column n on and for a NULL row; into half h of two steps. */
static __device__ __forceinline__ void query_unit(uint32_t q[2][4], const float *x, int d, int n, int h)
{
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = x && d + i < n ? x[d + i] : 0;
    q[0][h] = f16_pack(v[0], v[1]), q[0][2 + h] = f16_pack(v[2], v[3]);
    q[1][h] = f16_pack(v[4], v[5]), q[1][2 + h] = f16_pack(v[6], v[7]);
}

/* x[NH i + h]: row g + 8 h of the 16 of i */
template <int DP, int R, int NH>
static __device__ __forceinline__ void rows_begin(struct rows<DP, R, NH> &r, const float *const *x, int Dh, int t)
{
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int u = 0; u < DP / 32; u++)
                query_unit(&r.q[i][2 * u], h < NH ? x[NH * i + h] : NULL, 32 * u + 8 * t, Dh, h);
}

template <int DP, int R, int NH> static __device__ __forceinline__ void rows_clear(struct rows<DP, R, NH> &r)
{
#pragma unroll
    for (int i = 0; i < R; i++) {
        r.max[i][0] = r.max[i][1] = -INFINITY;
        r.sum[i][0] = r.sum[i][1] = 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) r.o[i][n][k] = 0;
    }
}

/* Of two keys in a word those that are among the first n. */
static __device__ __forceinline__ uint32_t first_keys(uint32_t w, int n)
{
    return n >= 2 ? w : n == 1 ? w & 0xFFFF : 0;
}

/* The pages' keys and values join the rows. With bounds, row (i, h) sees keys lo <= j < hi of the page only, and
 * values from key `end` on are not read into the sums: they may be anything. */
template <bool BOUNDS, int DP, int R, int NH>
static __device__ __forceinline__ void rows_page(struct rows<DP, R, NH> &r, const uint16_t *k, const uint16_t *v,
                                                 float scale, const int *lo, const int *hi, int end, int g, int t)
{
    float s[R][4][4] = {};
    const uint16_t *k_lane = k + g * 32 + 8 * t, *v_lane = v + g * KV_PAGE + 8 * t;
#pragma unroll
    for (int u = 0; u < DP / 32; u++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint4 w = load16(k_lane + (u * KV_PAGE + 8 * n) * 32);
#pragma unroll
            for (int i = 0; i < R; i++) {
                mma_f16(s[i][n], r.q[i][2 * u], w.x, w.y);
                mma_f16(s[i][n], r.q[i][2 * u + 1], w.z, w.w);
            }
        }
    uint32_t p[R][2][4] = {};
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int h = 0; h < NH; h++) {
            float max = r.max[i][h], sum = 0;
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = s[i][n][2 * h + e];
                    int j = 8 * t + 2 * n + e;
                    x *= scale;
                    if (BOUNDS && (j < lo[NH * i + h] || j >= hi[NH * i + h])) x = -INFINITY;
                    max = fmaxf(max, x);
                }
            max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 1));
            max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 2));
            float from = max == -INFINITY ? 0 : max, keep = exp2f(r.max[i][h] - from);
            r.max[i][h] = max;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float a = exp2f(s[i][n][2 * h] - from), b = exp2f(s[i][n][2 * h + 1] - from);
                sum += a + b;
                p[i][n / 2][2 * (n % 2) + h] = f16_pack(a, b);
            }
            r.sum[i][h] = r.sum[i][h] * keep + sum;
#pragma unroll
            for (int n = 0; n < DP / 8; n++) r.o[i][n][2 * h] *= keep, r.o[i][n][2 * h + 1] *= keep;
        }
#pragma unroll
    for (int n = 0; n < DP / 8; n++) {
        uint4 w = load16(v_lane + n * 8 * KV_PAGE);
        if (BOUNDS) {
            int m = end - 8 * t;
            w.x = first_keys(w.x, m), w.y = first_keys(w.y, m - 2);
            w.z = first_keys(w.z, m - 4), w.w = first_keys(w.w, m - 6);
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            mma_f16(r.o[i][n], p[i][0], w.x, w.y);
            mma_f16(r.o[i][n], p[i][1], w.z, w.w);
        }
    }
}

template <int DP, int R, int NH> static __device__ __forceinline__ void rows_end(struct rows<DP, R, NH> &r)
{
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int h = 0; h < NH; h++) {
            r.sum[i][h] += __shfl_xor_sync(0xFFFFFFFFu, r.sum[i][h], 1);
            r.sum[i][h] += __shfl_xor_sync(0xFFFFFFFFu, r.sum[i][h], 2);
        }
}

/* ------------------------------------------------------------------------------------------------ jobs */

struct attend_job {
    float *out;
    uint16_t *out_b; /* the same as bf16, [T][Kp], zeros behind H Dh */
    const float *qkv, *sinks;
    const uint16_t *k, *v; /* the layer's pages */
    const int32_t *seq_begin, *pos0, *pages;
    int n_seqs, max_pages, H, Hk, Dh, window, group, Kp;
    float scale; /* with log2(e) */
    /* decode */
    int seq0, head_tiles;
    float *acc, *stats; /* [n_seqs, H, MAX_SPLITS, DP] [n_seqs, H, MAX_SPLITS, 2]: max and sum */
    unsigned *done;     /* splits done of each block column of the grid; zeros between launches */
};

static __device__ __forceinline__ const float *query_of(const struct attend_job &j, int t, int head)
{
    return j.qkv + ((size_t)t * (size_t)(j.H + 2 * j.Hk) + (size_t)head) * (size_t)j.Dh;
}

template <int DP> static __device__ __forceinline__ size_t page_at(const struct attend_job &j, int page, int kv_head)
{
    return ((size_t)page * (size_t)j.Hk + (size_t)kv_head) * (size_t)(KV_PAGE * DP);
}

static __device__ __forceinline__ int first_key(int pos, int window)
{
    return window > 0 && pos >= window ? pos - window + 1 : 0;
}

/* What a row's softmax lacks: *keep is the factor of its values, with the sink's logit among the others. */
static __device__ __forceinline__ void add_sink(const float *sinks, int head, float max, float sum, float *keep)
{
    if (sinks) {
        float sink = sinks[head] * 1.44269504f, most = fmaxf(max, sink), m = exp2f(max - most);
        *keep = m / (sum * m + exp2f(sink - most));
    } else {
        *keep = 1 / sum;
    }
}

static __device__ __forceinline__ void store_one(const struct attend_job &j, int t, int head, int d, float v)
{
    size_t at = (size_t)head * (size_t)j.Dh + (size_t)d;
    j.out[(size_t)t * (size_t)(j.H * j.Dh) + at] = v;
    j.out_b[(size_t)t * (size_t)j.Kp + at] = __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

/* ------------------------------------------------------------------------------------------------ decode */

template <int DP, int NH> struct decode_shared {
    float o[ATTEND_WARPS][8 * NH][DP + 8], max[ATTEND_WARPS][8 * NH], sum[ATTEND_WARPS][8 * NH];
    float row_max[8 * NH], row_sum[8 * NH], factor[ATTEND_WARPS][8 * NH], weight[8 * NH][MAX_SPLITS];
    unsigned before;
};

/* What the warps of a block found for its rows, and how to add it up: row_max, row_sum, factor. */
template <int DP, int NH>
static __device__ __forceinline__ void merge_warps(struct rows<DP, 1, NH> &r, struct decode_shared<DP, NH> &m,
                                                   int warp, int g, int t)
{
    rows_end(r);
#pragma unroll
    for (int h = 0; h < NH; h++) {
        if (t == 0) m.max[warp][g + 8 * h] = r.max[0][h], m.sum[warp][g + 8 * h] = r.sum[0][h];
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
            *(float2 *)(void *)&m.o[warp][g + 8 * h][8 * n + 2 * t] =
                make_float2(r.o[0][n][2 * h], r.o[0][n][2 * h + 1]);
    }
    __syncthreads();
    if (threadIdx.x < 8 * NH) {
        float max = -INFINITY, sum = 0;
        for (int w = 0; w < ATTEND_WARPS; w++) max = fmaxf(max, m.max[w][threadIdx.x]);
        float from = max == -INFINITY ? 0 : max;
        for (int w = 0; w < ATTEND_WARPS; w++) {
            m.factor[w][threadIdx.x] = exp2f(m.max[w][threadIdx.x] - from);
            sum += m.sum[w][threadIdx.x] * m.factor[w][threadIdx.x];
        }
        m.row_max[threadIdx.x] = max, m.row_sum[threadIdx.x] = sum;
    }
    __syncthreads();
}

template <int DP, int NH>
static __device__ __forceinline__ float merged(const struct decode_shared<DP, NH> &m, int row, int d)
{
    float v = 0;
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) v += m.o[w][row][d] * m.factor[w][row];
    return v;
}

/* The splits of row t together, in order. What other blocks wrote is read past the first-level cache. */
template <int DP, int NH>
static __device__ void merge_splits(const struct attend_job &j, struct decode_shared<DP, NH> &m, size_t at,
                                    int n_splits, int t, int head0, int n_heads, int warp, int lane)
{
    for (int r = warp; r < n_heads; r += ATTEND_WARPS) {
        const float *stats = j.stats + (at + (size_t)r) * MAX_SPLITS * 2 + (size_t)lane * 2;
        float max = -INFINITY, sum = 0, keep;
        if (lane < n_splits) max = __ldcg(stats), sum = __ldcg(stats + 1);
        float most = max;
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
        float part = exp2f(max - most);
        sum *= part;
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        add_sink(j.sinks, head0 + r, most, sum, &keep);
        m.weight[r][lane] = part * keep;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n_heads * j.Dh; i += 32 * ATTEND_WARPS) {
        int r = i / j.Dh, d = i % j.Dh;
        const float *acc = j.acc + (at + (size_t)r) * MAX_SPLITS * DP + (size_t)d;
        float v = 0;
        for (int s = 0; s < n_splits; s++) v += m.weight[r][s] * __ldcg(acc + (size_t)s * DP);
        store_one(j, t, head0 + r, d, v);
    }
}

/* Grid: splits (a block takes every gridDim.x'th), KV heads x head tiles, sequences. */
template <int DP, int NH>
static __global__ void __launch_bounds__(32 * ATTEND_WARPS, DP <= 64    ? 4
                                                            : DP <= 128 ? 3
                                                                        : 1)
    decode_kernel(const __grid_constant__ struct attend_job j)
{
    extern __shared__ __align__(16) uint8_t memory[];
    struct decode_shared<DP, NH> &m = *(struct decode_shared<DP, NH> *)(void *)memory;
    cu_wait();
    cu_go();
    int s = j.seq0 + (int)blockIdx.z, row = j.seq_begin[s];
    if (j.seq_begin[s + 1] - row != 1) return;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int kv_head = (int)blockIdx.y / j.head_tiles, tile = (int)blockIdx.y % j.head_tiles;
    int head0 = kv_head * j.group + 8 * NH * tile, n_heads = min(8 * NH, j.group - 8 * NH * tile);
    int pos = j.pos0[s], first = first_key(pos, j.window), page0 = first / KV_PAGE;
    int n_pages = pos / KV_PAGE - page0 + 1, n_splits = (n_pages + MIN_SPLIT_PAGES - 1) / MIN_SPLIT_PAGES;
    if (n_splits > MAX_SPLITS) n_splits = MAX_SPLITS;
    int per = (n_pages + n_splits - 1) / n_splits;
    n_splits = (n_pages + per - 1) / per;
    if ((int)blockIdx.x >= n_splits) return;
    const int32_t *pages = j.pages + (size_t)s * (size_t)j.max_pages;
    size_t at = (size_t)s * (size_t)j.H + (size_t)head0; /* of row 0 in acc and stats */

    const float *x[2] = {g < n_heads ? query_of(j, row, head0 + g) : NULL,
                         g + 8 < n_heads ? query_of(j, row, head0 + g + 8) : NULL};
    struct rows<DP, 1, NH> r;
    rows_begin(r, x, j.Dh, t);
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = j.H * j.Dh + (int)threadIdx.x; i < j.Kp; i += 32 * ATTEND_WARPS)
            j.out_b[(size_t)row * (size_t)j.Kp + (size_t)i] = 0;
    for (int split = (int)blockIdx.x; split < n_splits; split += (int)gridDim.x) {
        int end = min((split + 1) * per, n_pages);
        rows_clear(r);
        for (int p = split * per + warp; p < end; p += ATTEND_WARPS) {
            int key0 = (page0 + p) * KV_PAGE;
            size_t block = page_at<DP>(j, pages[page0 + p], kv_head);
            if (key0 >= first && key0 + KV_PAGE - 1 <= pos) {
                rows_page<false>(r, j.k + block, j.v + block, j.scale, NULL, NULL, 0, g, t);
            } else {
                int lo[2] = {first - key0, first - key0}, hi[2] = {pos + 1 - key0, pos + 1 - key0};
                rows_page<true>(r, j.k + block, j.v + block, j.scale, lo, hi, hi[0], g, t);
            }
        }
        merge_warps(r, m, warp, g, t);
        if (n_splits == 1) {
            for (int i = (int)threadIdx.x; i < n_heads * j.Dh; i += 32 * ATTEND_WARPS) {
                int h = i / j.Dh, d = i % j.Dh;
                float keep;
                add_sink(j.sinks, head0 + h, m.row_max[h], m.row_sum[h], &keep);
                store_one(j, row, head0 + h, d, merged(m, h, d) * keep);
            }
            return;
        }
        for (int i = (int)threadIdx.x; i < n_heads * DP; i += 32 * ATTEND_WARPS) {
            int h = i / DP, d = i % DP;
            j.acc[((at + (size_t)h) * MAX_SPLITS + (size_t)split) * DP + (size_t)d] = merged(m, h, d);
        }
        if ((int)threadIdx.x < n_heads) {
            float *stats = j.stats + ((at + threadIdx.x) * MAX_SPLITS + (size_t)split) * 2;
            stats[0] = m.row_max[threadIdx.x], stats[1] = m.row_sum[threadIdx.x];
        }
        __threadfence();
        __syncthreads();
        unsigned *done = j.done + blockIdx.z * gridDim.y + blockIdx.y;
        if (threadIdx.x == 0) m.before = atomicAdd(done, 1u);
        __syncthreads();
        if ((int)m.before != n_splits - 1) continue;
        __threadfence();
        merge_splits(j, m, at, n_splits, row, head0, n_heads, warp, lane);
        if (threadIdx.x == 0) *done = 0;
    }
}

/* ------------------------------------------------------------------------------------------------ many rows */

/* Rows of a block's tile. Row m of a sequence's KV head is query head m % group of token m / group. */
template <int R> struct tile_rows {
    static constexpr int n = 16 * R * ATTEND_WARPS;
};

/* Grid: tiles of all sequences with more than one row, the last first (they see most keys); KV heads. */
template <int DP, int R>
static __global__ void __launch_bounds__(32 * ATTEND_WARPS, DP <= 128 && R == 1 ? 3 : 1)
    prefill_kernel(const __grid_constant__ struct attend_job j)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, t = lane % 4;
    cu_wait();
    cu_go();
    int tile = (int)(gridDim.x - 1 - blockIdx.x), kv_head = (int)blockIdx.y, s = 0, row0, n;
    for (;; s++) {
        row0 = j.seq_begin[s], n = j.seq_begin[s + 1] - row0;
        if (n == 1) continue;
        int tiles = (n * j.group + tile_rows<R>::n - 1) / tile_rows<R>::n;
        if (tile < tiles) break;
        tile -= tiles;
    }
    int last_row = n * j.group - 1, m0 = tile * tile_rows<R>::n + warp * 16 * R, pos0 = j.pos0[s];
    if (m0 > last_row) return;
    const float *x[2 * R];
    int low = pos0 + m0 / j.group, high = pos0 + min(m0 + 16 * R - 1, last_row) / j.group; /* positions */
    int begin[2 * R], end[2 * R];
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int row = min(m0 + 8 * i + g, last_row), pos = pos0 + row / j.group;
        x[i] = query_of(j, row0 + row / j.group, kv_head * j.group + row % j.group);
        begin[i] = first_key(pos, j.window);
        end[i] = pos + 1;
    }
    struct rows<DP, R, 2> r;
    rows_begin(r, x, j.Dh, t);
    rows_clear(r);
    const int32_t *pages = j.pages + (size_t)s * (size_t)j.max_pages;
    int all_from = first_key(high, j.window);
    for (int p = first_key(low, j.window) / KV_PAGE; p <= high / KV_PAGE; p++) {
        int key0 = p * KV_PAGE;
        size_t block = page_at<DP>(j, pages[p], kv_head);
        if (key0 >= all_from && key0 + KV_PAGE - 1 <= low) {
            rows_page<false>(r, j.k + block, j.v + block, j.scale, NULL, NULL, 0, g, t);
        } else {
            int lo[2 * R], hi[2 * R];
#pragma unroll
            for (int i = 0; i < 2 * R; i++) lo[i] = begin[i] - key0, hi[i] = end[i] - key0;
            rows_page<true>(r, j.k + block, j.v + block, j.scale, lo, hi, high + 1 - key0, g, t);
        }
    }
    rows_end(r);
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = m0 + 16 * i + 8 * h + g, head = kv_head * j.group + row % j.group;
            size_t token = (size_t)(row0 + row / j.group);
            float keep;
            if (row > last_row) continue;
            add_sink(j.sinks, head, r.max[i][h], r.sum[i][h], &keep);
            float *out = j.out + (token * (size_t)j.H + (size_t)head) * (size_t)j.Dh;
            uint16_t *out_b = j.out_b + token * (size_t)j.Kp + (size_t)head * (size_t)j.Dh;
#pragma unroll
            for (int k = 0; k < DP / 8; k++) {
                int d = 8 * k + 2 * t;
                if (d >= j.Dh) continue;
                float2 v = make_float2(r.o[i][k][2 * h] * keep, r.o[i][k][2 * h + 1] * keep);
                *(float2 *)(void *)(out + d) = v;
                *(uint32_t *)(void *)(out_b + d) = cu_bf16_pack(v.x, v.y);
            }
            if (head == j.H - 1)
                for (int d = j.H * j.Dh + t; d < j.Kp; d += 4) j.out_b[token * (size_t)j.Kp + (size_t)d] = 0;
        }
}

/* ------------------------------------------------------------------------------------------------ the choice */

template <int DP, int NH> static bool launch_decode(struct cuda *c, struct attend_job *j, unsigned *done)
{
    size_t rows = (size_t)j->n_seqs * (size_t)j->H * MAX_SPLITS;
    j->head_tiles = cu_div_up(j->group, 8 * NH);
    int columns = j->Hk * j->head_tiles, at_once = MAX_WAITING / columns;
    if (!cu_grow(c, &c->attend_tmp, &c->attend_cap, rows * (DP + 2) * sizeof *c->attend_tmp)) return false;
    j->acc = c->attend_tmp;
    j->stats = c->attend_tmp + rows * DP;
    j->done = done;
    if (at_once > 65535) at_once = 65535;
    constexpr int bytes = sizeof(struct decode_shared<DP, NH>);
    if (!cu_ok(c, "attention",
               cudaFuncSetAttribute((decode_kernel<DP, NH>), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
        return false;
    for (j->seq0 = 0; j->seq0 < j->n_seqs && !c->err.code; j->seq0 += at_once) {
        int n = j->n_seqs - j->seq0 < at_once ? j->n_seqs - j->seq0 : at_once;
        /* As many splits at a time as fill the GPU; which split a block takes changes no bit. */
        int splits = cu_div_up(4 * c->n_sm, columns * n), most = cu_div_up(j->max_pages, MIN_SPLIT_PAGES);
        if (splits > MAX_SPLITS) splits = MAX_SPLITS;
        if (splits > most) splits = most;
        dim3 grid((unsigned)splits, (unsigned)columns, (unsigned)n);
        cu_launch(c, "attention", decode_kernel<DP, NH>, grid, 32 * ATTEND_WARPS, bytes, *j);
    }
    return !c->err.code;
}

template <int DP> static void launch_prefill(struct cuda *c, const struct attend_job *j, const int32_t *seq_begin)
{
    constexpr int R = DP <= 64 ? 2 : 1;
    int tiles = 0;
    for (int s = 0; s < j->n_seqs; s++) {
        int n = seq_begin[s + 1] - seq_begin[s];
        if (n > 1) tiles += cu_div_up((int64_t)n * j->group, tile_rows<R>::n);
    }
    if (tiles == 0) return;
    dim3 grid((unsigned)tiles, (unsigned)j->Hk);
    cu_launch(c, "attention of many rows", prefill_kernel<DP, R>, grid, 32 * ATTEND_WARPS, 0, *j);
}

template <int DP> static void launch(struct cuda *c, struct attend_job *j, unsigned *done)
{
    /* The host's copy of the step's batch. A step that is captured has one row a sequence, always. */
    const int32_t *seq_begin =
        (const int32_t *)(const void *)(c->batch_host + ((const uint8_t *)(const void *)c->seq_begin - c->batch_dev));
    bool single = c->T == c->n_seqs;
    for (int s = 0; s < j->n_seqs && !single; s++) single = seq_begin[s + 1] - seq_begin[s] == 1;
    if (single && !(j->group <= 8 ? launch_decode<DP, 1>(c, j, done) : launch_decode<DP, 2>(c, j, done))) return;
    if (c->T != c->n_seqs) launch_prefill<DP>(c, j, seq_begin);
}

void cu_attend(struct cuda *c, const struct attend_args *a)
{
    const struct bkv *kv = a->kv;
    size_t at = layer_at(kv, a->layer);
    int K = a->H * a->Dh;
    if (c->err.code || c->T == 0) return;
    if (!cu_grow(c, &c->acts, &c->acts_cap, (size_t)c->T * (size_t)cu_pad(K) * sizeof *c->acts)) return;
    struct attend_job j = {};
    j.out = a->out, j.out_b = c->acts;
    j.qkv = a->qkv, j.sinks = a->sinks;
    j.k = kv->k + at, j.v = kv->v + at;
    j.seq_begin = c->seq_begin, j.pos0 = c->pos0, j.pages = c->pages;
    j.n_seqs = c->n_seqs, j.max_pages = c->max_pages;
    j.H = a->H, j.Hk = a->Hk, j.Dh = a->Dh, j.window = a->window, j.group = a->H / a->Hk, j.Kp = cu_pad(K);
    j.scale = a->scale * 1.44269504f;
    switch (kv->DP) {
    case 64: launch<64>(c, &j, kv->done); break;
    case 96: launch<96>(c, &j, kv->done); break;
    case 128: launch<128>(c, &j, kv->done); break;
    default: launch<256>(c, &j, kv->done); break;
    }
    if (c->err.code) return;
    c->acts_of = a->out;
    c->acts_T = c->T, c->acts_K = K;
}
