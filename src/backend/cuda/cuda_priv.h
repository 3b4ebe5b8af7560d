/* cuda_priv: what the files of the CUDA backend share: the device, the weight as it lies in device memory, and the
 * pieces that one file offers to the others. CUDA C compiled as C++, kept C-shaped; templates for kernels only.
 *
 * All work goes to one stream. Every call's result is checked: the first failure is kept in cuda->err, later work is
 * skipped, and sync reports it. Device memory grows before a step of a new size and never inside one of a known size.
 *
 * Activations are float between operations. Products read them as bf16 (rounded once, after the fused norm),
 * multiply on the tensor cores and accumulate in float; the router alone reads floats. */
#ifndef HEARTH_CUDA_PRIV_H
#define HEARTH_CUDA_PRIV_H

#include <cuda_runtime.h>

extern "C" {
#include "backend.h"
#include "backend_priv.h"
}

enum { CU_MAX_PARTS = 3, CU_SMALL_ROWS = 16, CU_MEDIUM_ROWS = 128, CU_PAD = 128 };

/* Columns of a matrix of activations or weights as kernels walk them: padded with zeros. */
static inline int cu_pad(int64_t cols) { return (int)((cols + CU_PAD - 1) / CU_PAD * CU_PAD); }

/* --------------------------------------------------------------------------------------- weights (cuda_weight.cu) */

/* One matrix in device memory. Rows of q, h and s start on 16 bytes; the columns are padded with zeros to whole
 * units of the type (32, 64 or 128 columns), the layout inside is drawn and decoded in cuda_unpack.h only. */
struct cu_mat {
    int type; /* enum dtype */
    int rows, cols;
    const uint8_t *q;                      /* quants or elements */
    const uint8_t *h;                      /* high bits of Q5_*, Q6_K; else NULL */
    const uint8_t *s;                      /* block scales; else NULL */
    uint32_t q_stride, h_stride, s_stride; /* bytes a row */
    /* F8, NVFP4: element (r, c) is multiplied by scale[(r + row0) / scale_rows * scale_stride + (c + col0) /
     * scale_cols]; NULL: 1 */
    const float *scale;
    int scale_rows, scale_cols, scale_stride, scale_row0, scale_col0;
};

struct bweight {
    int n_parts, rows, cols; /* rows of all parts together */
    struct cu_mat part[CU_MAX_PARTS];
    float *bias; /* dev [rows] or NULL */
};

/* Experts of a layer as kernels see them: dev [E], an absent expert has n_parts 0. */
struct cu_experts {
    const struct bweight *dev;
    const struct bweight *any; /* host: the shape of one that is present, NULL if none is */
    int E;
};

/* ------------------------------------------------------------------------------------------- the device (cuda.cu) */

struct cu_graphs;
struct cu_heap;
struct cu_moe_scratch;
struct cu_tables;
struct cu_lt;

struct cuda {
    struct backend base;
    int device, n_sm;
    bool unified; /* CPU and GPU share memory */
    cudaStream_t stream;
    struct err err; /* the first failure; err.code == 0: none */

    /* The step's batch; all but the numbers is dev, at addresses that stay while sizes stay. */
    int T, n_seqs, max_pages;
    int32_t *ids, *row_seq, *row_pos;   /* [T] */
    int32_t *seq_begin, *pos0;          /* [n_seqs + 1] [n_seqs] */
    int32_t *pages;                     /* [n_seqs, max_pages] */
    int32_t *gather_rows, *gather_host; /* [n] of the last gather, and its pinned copy */
    size_t gather_cap;
    uint8_t *batch_dev, *batch_host; /* the one block they lie in, and its pinned copy */
    size_t batch_cap, batch_bytes;
    const int32_t *host_seq, *host_pos; /* [T] row_seq and row_pos in the pinned copy */
    bool busy; /* work was queued since the last wait */

    struct backend_stats stats; /* but for the experts that steps have read: */
    unsigned long long *experts_read; /* dev */
    size_t expert_bytes;              /* of one expert of a layer; all have one shape */

    /* Activations of a product as bf16, [T][cu_pad(K)]. Where the operation before has left a copy of its output
     * there, acts_of is that output (and acts_T, acts_K its rows and width); every operation that writes to it sets
     * or clears acts_of. */
    uint16_t *acts, *acts_next; /* acts_next: where such a copy is made; then the two change places */
    size_t acts_cap, acts_next_cap;
    const float *acts_of;
    int acts_T, acts_K;

    /* Scratch by user, grown with cu_grow. */
    float *tmp,
        *splits; /* gate: gate and up before the activation; products: sums of the blocks that share the columns */
    size_t tmp_cap, splits_cap;
    int32_t *best; /* [n] of the last best */
    size_t best_cap;
    float *attend_tmp; /* attention: partial results of the splits */
    size_t attend_cap;
    struct cu_moe_scratch *moe;
    struct cu_graphs *graphs;
    struct cu_heap *heap;
    struct cu_tables *tables;
    struct cu_lt *lt; /* cuBLASLt, or NULL where it is not there */
};

/* An operation with all its arguments: what a captured step is made of. Every byte is set: calls are compared by
 * memcmp. */
enum cu_op { CU_EMBED = 1, CU_LINEAR, CU_GATE, CU_ROPE_KV, CU_ATTEND, CU_MOE, CU_GATHER };
struct cu_call {
    enum cu_op op;
    int n[9]; /* sizes */
    float f[4];
    const void *p[8]; /* dev memory, weights, pages */
};
/* cuda.cu: runs an operation; queues the copy of the step's batch. */
void cu_issue(struct cuda *c, const struct cu_call *k);
void cu_copy_batch(struct cuda *c);
/* cuda_graph.cu. begin: after the batch's block is filled. takes: true if the operation is part of the step being
 * replayed, and so nothing is to be done. flush: launches what waits; before anything that reads results or changes
 * memory outside the step. drop: addresses are about to change. */
void cu_graph_begin(struct cuda *c);
bool cu_graph_takes(struct cuda *c, const struct cu_call *k);
void cu_graph_flush(struct cuda *c);
/* Makes room for a gather: true if it may go into the step that is captured or replayed. */
bool cu_graph_gathers(struct cuda *c);
void cu_graphs_drop(struct cuda *c);
void cu_graphs_free(struct cuda *c);

/* Keeps the first failure: "cuda: WHAT: TEXT". Returns true if r is cudaSuccess and nothing failed before. */
bool cu_ok(struct cuda *c, const char *what, cudaError_t r);
/* The same for the launch just made. */
bool cu_launched(struct cuda *c, const char *what);
/* *buf (of *cap bytes) has at least `bytes` bytes of device memory afterwards; content is lost when it grows. False,
 * with c->err set, if memory is out. Growing drops all captured graphs. */
bool cu_grow(struct cuda *c, void *buf_ptr, size_t *cap, size_t bytes);
/* Device memory (managed where unified); *out set on success. */
int cu_alloc(struct cuda *c, void *out_ptr, size_t bytes, struct err *e) MUST_CHECK;
void cu_free(struct cuda *c, void *dev);
static inline int cu_div_up(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }

int cu_weight_new(struct backend *be, struct bweight **out, const struct dmat *parts, int n_parts, const float *bias,
                  struct err *e);
void cu_weight_free(struct backend *be, struct bweight *w);
size_t cu_weight_bytes(const struct backend *be, const struct dmat *parts, int n_parts);
void cu_heap_free(struct cuda *c);
void cu_heap_settle(struct cuda *c); /* gives back what loading needed */
/* The device table of w[E], made at the first call and kept until a weight is freed; NULL with c->err set on
 * failure. */
const struct cu_experts *cu_experts_of(struct cuda *c, const struct bweight *const *w, int E);
void cu_tables_free(struct cuda *c);

/* ------------------------------------------------------------------------ products (cuda_linear.cu, cuda_gemm.cu) */

/* out[T, N] = x[T, K] W^T + bias + residual. acts: dev bf16 [T][cu_pad(K)], padded with zeros. residual may be out.
 * */
void cu_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                float *out);
/* out[T, F] = act(gate, up) (gate_args), and the same as bf16 to out_bf16 [T][cu_pad(F)]; one of the two may be
 * NULL. */
void cu_product_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                     uint16_t *out_bf16);
/* out[T, N] = x[T, K] W^T + bias from floats x (rows of K), summed in float: for routers. Any type. */
void cu_product_float(struct cuda *c, const struct bweight *w, const float *x, int T, float *out);

/* A step's choices sorted by expert; all arrays dev. Slot i belongs to the expert e with off[e] <= i < off[e + 1]. */
struct cu_slots {
    const int32_t *off;      /* [E + 1]; experts that are not here have none */
    const int32_t *active;   /* [E] experts with slots, ascending; [n_active[0]] of them */
    const int32_t *n_active; /* [1] */
    const int32_t *row;      /* [slots] row of acts that a slot reads; NULL: its own number */
    int E, max_slots;        /* host: at most this many slots, T * k */
    int max_rows;            /* host: at most this many slots an expert, T */
};
/* out_bf16[slot][cu_pad(F)] = act of expert's gate_up on acts row of the slot. */
void cu_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                     float limit, uint16_t *out_bf16);
/* out[slot][N] = expert's W x + bias, rows of acts as in s. */
void cu_grouped_linear(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                       float *out);
/* The class of 1 to 16 rows by itself; more rows in pieces of 16. gate: false if the two halves differ in type. */
void cu_small_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                      float *out);
bool cu_small_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                   uint16_t *out_bf16);
void cu_small_grouped(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                      float *out);
void cu_small_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                           float limit, uint16_t *out_bf16);
/* The classes of more rows. gate: false where the two halves differ in type or blocks share out the columns. */
void cu_gemm(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual, float *out);
bool cu_gemm_gate(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, float limit, float *out,
                  uint16_t *out_bf16);
void cu_gemm_grouped(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                     float *out);
void cu_gemm_grouped_gate(struct cuda *c, const struct cu_experts *w, const struct cu_slots *s, const uint16_t *acts,
                          float limit, uint16_t *out_bf16);
/* cuda_lt.cu. open: false where cuBLASLt cannot be used; not an error. takes: whether product would take w. product:
 * false if it does not take w; then nothing has happened. */
bool cu_lt_open(struct cuda *c);
bool cu_lt_takes(const struct cuda *c, const struct bweight *w);
bool cu_lt_product(struct cuda *c, const struct bweight *w, const uint16_t *acts, int T, const float *residual,
                   float *out);
void cu_lt_close(struct cuda *c);

/* cuda_limits.cu: see backend.h. count: k is about to be issued or replayed. */
int cu_limits(struct backend *be, struct backend_limits *out, struct err *e);
struct backend_stats cu_stats(const struct backend *be);
void cu_count(struct cuda *c, const struct cu_call *k);

/* ----------------------------------------------------------- the rest (cuda_norm.cu, cuda_attend.cu, cuda_moe.cu) */

/* dst_f[T][K] and dst_b[T][cu_pad(K)] (bf16, zeros behind K) = rms_norm(x[T, K]; norm, eps), or x as it is where
 * norm is NULL. Either dst may be NULL; dst_f may be x. A row's numbers do not depend on T. */
void cu_norm(struct cuda *c, const float *x, int T, int K, const float *norm, float eps, float *dst_f,
             uint16_t *dst_b);
/* dst[T][F], or dst_b[T][cu_pad(F)] as bf16, or both = gate_args' activation of gu[T][2 F] (gate, then up) */
void cu_gate_act(struct cuda *c, const float *gu, int T, int F, float limit, float *dst, uint16_t *dst_b);
void cu_embed(struct cuda *c, float *out, const struct bweight *w);
/* rows: c->gather_rows */
void cu_gather(struct cuda *c, float *out, const float *x, int D, int n);
/* ids[n] (dev): see backend.h */
void cu_best(struct cuda *c, const float *logits, int n, int V, int32_t *ids);
void cu_rope_kv(struct cuda *c, const struct rope_kv_args *a);
/* May leave the bf16 copy of its output in c->acts (acts_of, acts_K). */
void cu_attend(struct cuda *c, const struct attend_args *a);
void cu_moe(struct cuda *c, const struct moe_args *a);
void cu_moe_free(struct cuda *c);
int cu_kv_new(struct backend *be, struct bkv **out, int n_layers, int n_pages, int Hk, int Dh, struct err *e);
void cu_kv_free(struct backend *be, struct bkv *kv);
size_t cu_kv_page_bytes(const struct backend *be, int n_layers, int Hk, int Dh);

/* F16 keys and values, [layer][page][Hk][KV_PAGE * DP]; cuda_attend.cu tells how a page lies inside. */
struct bkv {
    int n_layers, n_pages, Hk, Dh, DP; /* DP: Dh rounded up to a width that kernels are made for */
    uint16_t *k, *v;
    unsigned *done; /* attention: splits done, zeros between launches */
};

#endif
