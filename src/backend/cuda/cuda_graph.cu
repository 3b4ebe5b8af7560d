/* cuda_graph.cu: a decode step as one launch. A step is known by its number of rows and its page table's width; its
 * second time it is captured, from then on replayed: operations are only compared with those of the capture, and
 * what asks for results launches the graph. All that differs from step to step is read from the batch's block, which
 * the graph's first node copies from pinned memory. A step that takes another course is run operation by operation,
 * and its graph dropped. */
#include <stdlib.h>
#include <string.h>

#include "cuda_priv.h"

enum mode { PLAIN, CAPTURE, REPLAY };
enum { MAX_GRAPHS = 256, MAX_CALLS = 4096 };

struct cu_graph {
    struct cu_graph *next;
    int T, max_pages;
    struct cu_call *calls;
    int n, cap;
    cudaGraphExec_t exec; /* NULL: not captured yet */
    bool seen;            /* once since addresses last changed: everything has its size */
    bool never;           /* it could not be captured */
};

struct cu_graphs {
    struct cu_graph *all, *now;
    int count;
    enum mode mode;
    int at;       /* REPLAY: operations met so far */
    bool broken;  /* CAPTURE: addresses have changed under it */
    bool gathers; /* the step has gathered: its rows wait in pinned memory */
};

static void graph_clear(struct cu_graph *g)
{
    if (g->exec) (void)cudaGraphExecDestroy(g->exec);
    g->exec = NULL;
    g->n = 0;
    g->seen = false;
}

void cu_graphs_drop(struct cuda *c)
{
    struct cu_graphs *s = c->graphs;
    if (!s) return;
    s->broken = true;
    for (struct cu_graph *g = s->all; g; g = g->next)
        if (g != s->now) graph_clear(g);
    if (s->now && s->mode == PLAIN) graph_clear(s->now);
}

void cu_graphs_free(struct cuda *c)
{
    struct cu_graphs *s = c->graphs;
    if (!s) return;
    for (struct cu_graph *g = s->all, *next; g; g = next) {
        next = g->next;
        graph_clear(g);
        free(g->calls);
        free(g);
    }
    free(s);
    c->graphs = NULL;
}

static struct cu_graph *graph_of(const struct cuda *c)
{
    struct cu_graph *g = c->graphs->all;
    while (g && (g->T != c->T || g->max_pages != c->max_pages)) g = g->next;
    return g;
}

static bool push(struct cu_graph *g, const struct cu_call *k)
{
    if (g->n == g->cap) {
        struct cu_call *more;
        int cap = g->cap ? 2 * g->cap : 256;
        if (cap > MAX_CALLS || mem_new(&more, (size_t)cap * sizeof *more, NULL) < 0) return false;
        if (g->n) memcpy(more, g->calls, (size_t)g->n * sizeof *more);
        free(g->calls);
        g->calls = more;
        g->cap = cap;
    }
    memcpy(&g->calls[g->n++], k, sizeof *k);
    return true;
}

/* The first n operations of the step, one by one. */
static void run_plain(struct cuda *c, struct cu_graph *g, int n)
{
    c->graphs->mode = PLAIN;
    c->acts_of = NULL;
    cu_copy_batch(c);
    for (int i = 0; i < n && !c->err.code; i++) cu_issue(c, &g->calls[i]);
}

void cu_graph_begin(struct cuda *c)
{
    struct cu_graphs *s = c->graphs;
    if (!s) {
        if (mem_new(&c->graphs, sizeof *c->graphs, &c->err) < 0) return;
        s = c->graphs;
    }
    s->mode = PLAIN;
    s->now = NULL;
    s->at = 0;
    s->gathers = s->broken = false;
    if (c->T == c->n_seqs) {
        struct cu_graph *g = graph_of(c);
        if (g && g->exec) {
            s->now = g;
            s->mode = REPLAY;
            return;
        }
        if (g && g->seen && !g->never) {
            g->n = 0;
            if (!cu_ok(c, "capturing a step", cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeRelaxed)))
                return;
            s->now = g;
            s->mode = CAPTURE;
        } else if (g) {
            g->seen = true;
        } else if (s->count < MAX_GRAPHS) {
            if (mem_new(&g, sizeof *g, &c->err) < 0) return;
            g->T = c->T;
            g->max_pages = c->max_pages;
            g->seen = true;
            g->next = s->all;
            s->all = g;
            s->count++;
        }
    }
    cu_copy_batch(c);
}

/* Ends the capture and launches what it gave; where that failed, runs the operations plainly. */
static void end_capture(struct cuda *c, struct cu_graph *g)
{
    struct cu_graphs *s = c->graphs;
    cudaGraph_t graph = NULL;
    cudaError_t r = cudaStreamEndCapture(c->stream, &graph);
    if (r == cudaSuccess && graph && !s->broken && !c->err.code) r = cudaGraphInstantiate(&g->exec, graph, 0);
    if (graph) (void)cudaGraphDestroy(graph);
    s->mode = PLAIN;
    if (c->err.code) return;
    if (r == cudaSuccess && !s->broken) {
        cu_ok(c, "step", cudaGraphLaunch(g->exec, c->stream));
        return;
    }
    (void)cudaGetLastError();
    g->exec = NULL;
    g->never = r != cudaSuccess;
    run_plain(c, g, g->n);
    g->n = 0;
}

void cu_graph_flush(struct cuda *c)
{
    struct cu_graphs *s = c->graphs;
    if (!s || s->mode == PLAIN) return;
    struct cu_graph *g = s->now;
    if (s->mode == CAPTURE) {
        end_capture(c, g);
    } else if (s->at == g->n && !s->broken) {
        s->mode = PLAIN;
        if (!c->err.code) cu_ok(c, "step", cudaGraphLaunch(g->exec, c->stream));
    } else {
        run_plain(c, g, s->at);
        graph_clear(g);
    }
    s->now = NULL;
}

bool cu_graph_gathers(struct cuda *c)
{
    struct cu_graphs *s = c->graphs;
    if (!s || s->mode == PLAIN) return false;
    if (!s->gathers) return true;
    cu_graph_flush(c); /* the rows of the one before are still to be read */
    return false;
}

bool cu_graph_takes(struct cuda *c, const struct cu_call *k)
{
    struct cu_graphs *s = c->graphs;
    if (!s || s->mode == PLAIN) return false;
    if (k->op == CU_GATHER) s->gathers = true;
    struct cu_graph *g = s->now;
    if (s->mode == REPLAY) {
        if (s->at < g->n && !s->broken && !memcmp(&g->calls[s->at], k, sizeof *k)) {
            s->at++;
            return true;
        }
        run_plain(c, g, s->at);
        graph_clear(g);
        s->now = NULL;
        return false;
    }
    if (push(g, k)) return false;
    s->broken = g->never = true; /* too long: what is recorded runs now, the rest as it comes */
    end_capture(c, g);
    g->never = true;
    s->now = NULL;
    return false;
}
