/* cpu_limits.c: what this machine does at best, measured: the rate at which its memory is read, and the rate of each unit
 * that products use at this level. Bench figures stand beside these. */
#include <math.h>
#include <string.h>

#include "cpu_priv.h"

enum { PIECE = 4 << 20, PIECES = 128, READ_RUNS = 6, PEAK_RUNS = 5, ROUNDS = 200000 };

struct limit_job {
    struct cpu *c;
    const uint8_t *bytes;
    float (*peak)(int n);
    uint64_t sink;
};

static void read_pieces(void *arg, int thread, int n_threads)
{
    struct limit_job *j = arg;
    int64_t i;
    uint64_t sum = 0;
    (void)thread, (void)n_threads;
    while ((i = cpu_pool_take(j->c->pool, PIECES)) >= 0) sum += j->c->level.read(j->bytes + (size_t)i * PIECE, PIECE);
    __atomic_fetch_add(&j->sink, sum, __ATOMIC_RELAXED);
}

static void peak_rounds(void *arg, int thread, int n_threads)
{
    struct limit_job *j = arg;
    (void)thread, (void)n_threads;
    float sum = j->peak(ROUNDS);
    __atomic_fetch_add(&j->sink, (uint64_t)(isfinite(sum) ? 1 : 0), __ATOMIC_RELAXED);
}

/* Seconds of the fastest of `runs`: a limit is what the machine can do, not what its neighbours leave of it. */
static double fastest(struct limit_job *j, cpu_job *job, int runs)
{
    double best = INFINITY;
    for (int i = 0; i < runs; i++) {
        double start = clock_now();
        cpu_pool_run(j->c->pool, job, j);
        best = fmin(best, clock_now() - start);
    }
    return best;
}

static void add_unit(struct backend_limits *out, struct limit_job *j, const char *name, float (*peak)(int), int ops)
{
    double n = (double)ROUNDS * (double)ops * (double)cpu_pool_threads(j->c->pool);
    j->peak = peak;
    strcpy(out->unit[out->n_units].name, name);
    out->unit[out->n_units++].gop_s = n / fastest(j, peak_rounds, PEAK_RUNS) / 1e9;
}

int cpu_limits(struct backend *be, struct backend_limits *out, struct err *e)
{
    struct cpu *c = (struct cpu *)be;
    struct limit_job j = {.c = c};
    uint8_t *bytes;
    *out = (struct backend_limits){0};
    TRY(mem_new_aligned(&bytes, (size_t)PIECE * PIECES, e));
    memset(bytes, 1, (size_t)PIECE * PIECES);
    j.bytes = bytes;
    out->read_gb_s = (double)PIECE * PIECES / fastest(&j, read_pieces, READ_RUNS) / 1e9;
    mem_free_aligned(bytes);
    add_unit(out, &j, "fp32", c->level.peak_fp32, c->level.fp32_ops); /* in the order of UNIT_ */
    if (c->level.int8_ops) add_unit(out, &j, "int8", c->level.peak_int8, c->level.int8_ops);
    if (c->level.bf16_ops) add_unit(out, &j, "bf16", c->level.peak_bf16, c->level.bf16_ops);
    return OK;
}
