/* cpu_pool.c: persistent threads that run one job at a time together. A job begins when its number appears and ends when
 * the last thread has counted itself off; both sides spin for a few microseconds first, because the next job of a step
 * comes at once, and then sleep in the kernel, because an idle engine should use no time. */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_priv.h"

enum { SPIN = 4000, MAX_THREADS = 1024 };

struct cpu_pool {
    int n_threads, cores;
    cpu_job *job;
    void *arg;
    _Alignas(64) atomic_uint epoch; /* number of the newest job */
    _Alignas(64) atomic_uint left;  /* workers that have not finished it */
    _Alignas(64) atomic_int sleepers;
    atomic_int waiter; /* the caller sleeps on `left` */
    _Alignas(64) atomic_llong next;
    atomic_bool quit;
    struct worker {
        struct cpu_pool *pool;
        pthread_t thread;
        int index;
    } worker[];
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *at, unsigned seen)
{
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void futex_wake(atomic_uint *at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

/* More threads than cores: whoever spins takes the time of one that works. */
static int spins(const struct cpu_pool *p) { return p->n_threads <= p->cores ? SPIN : 1; }

static void *work(void *arg)
{
    struct worker *w = arg;
    struct cpu_pool *p = w->pool;
    for (unsigned seen = 0;;) {
        int spin = spins(p);
        while (atomic_load_explicit(&p->epoch, memory_order_acquire) == seen && --spin > 0) relax();
        while (atomic_load_explicit(&p->epoch, memory_order_acquire) == seen) {
            atomic_fetch_add(&p->sleepers, 1);
            futex_wait(&p->epoch, seen);
            atomic_fetch_sub(&p->sleepers, 1);
        }
        seen++;
        if (atomic_load_explicit(&p->quit, memory_order_relaxed)) return NULL;
        p->job(p->arg, w->index, p->n_threads);
        if (atomic_fetch_sub(&p->left, 1) == 1 && atomic_load(&p->waiter)) futex_wake(&p->left);
    }
}

static void start_job(struct cpu_pool *p)
{
    atomic_store_explicit(&p->left, (unsigned)p->n_threads - 1, memory_order_relaxed);
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->sleepers) > 0) futex_wake(&p->epoch);
}

void cpu_pool_run(struct cpu_pool *p, cpu_job *job, void *arg)
{
    if (p->n_threads == 1) {
        cpu_pool_run_alone(p, job, arg);
        return;
    }
    p->job = job;
    p->arg = arg;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    start_job(p);
    job(arg, 0, p->n_threads);
    int spin = spins(p);
    while (atomic_load_explicit(&p->left, memory_order_acquire) > 0 && --spin > 0) relax();
    for (unsigned left; (left = atomic_load(&p->left)) > 0;) {
        atomic_store(&p->waiter, 1);
        if (atomic_load(&p->left) == left) futex_wait(&p->left, left);
        atomic_store(&p->waiter, 0);
    }
}

void cpu_pool_run_alone(struct cpu_pool *p, cpu_job *job, void *arg)
{
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    job(arg, 0, 1);
}

int64_t cpu_pool_take(struct cpu_pool *p, int64_t n)
{
    int64_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
    return i < n ? i : -1;
}

int cpu_pool_threads(const struct cpu_pool *p) { return p->n_threads; }

int cpu_pool_open(struct cpu_pool **out, int threads, struct err *e)
{
    struct cpu_pool *p;
    if (threads < 0 || threads > MAX_THREADS)
        return err_set(e, ERR_INPUT, "threads %d is out of range 1 to %d", threads, MAX_THREADS);
    int n = threads ? threads : machine_cores();
    if (n > machine_cores()) log_line(LOG_WARN, "%d threads on %d cores: they will wait for each other", n, machine_cores());
    TRY(mem_new_aligned(&p, sizeof *p + (size_t)n * sizeof p->worker[0], e));
    *p = (struct cpu_pool){.n_threads = n, .cores = machine_cores()};
    for (int i = 1; i < n; i++) {
        p->worker[i] = (struct worker){.pool = p, .index = i};
        if (pthread_create(&p->worker[i].thread, NULL, work, &p->worker[i])) {
            p->n_threads = i;
            cpu_pool_close(&p);
            return err_set(e, ERR_IO, "thread %d of %d could not be started", i + 1, n);
        }
    }
    *out = p;
    return OK;
}

void cpu_pool_close(struct cpu_pool **p)
{
    if (!*p) return;
    atomic_store(&(*p)->quit, true);
    start_job(*p);
    for (int i = 1; i < (*p)->n_threads; i++) pthread_join((*p)->worker[i].thread, NULL);
    mem_free_aligned(*p);
    *p = NULL;
}
