/* base.c: errors, spans, sizes, memory, progress and log. Messages are made printable before anyone sees them,
 * because the names in them come from files that nobody has vouched for. Memory that cannot be had is an error with
 * the number of bytes, or NULL where there is no struct err to say it in; nothing here ends the process. */
#include "base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ------------------------------------------------------------------------------------------------ errors */

/* One printable line: whatever a hostile name brought along that a terminal could act on becomes '?'. */
static void make_printable(char *s)
{
    size_t n = strlen(s);
    for (size_t i = 0; i < n;) {
        int len = utf8_step(s + i, n - i);
        if (len <= 0 || (len == 1 && ((unsigned char)s[i] < 0x20 || s[i] == 0x7f)) ||
            (len == 2 && (unsigned char)s[i] == 0xC2 && (unsigned char)s[i + 1] < 0xA0)) {
            s[i++] = '?';
            if (len == 2) s[i++] = '?';
            continue;
        }
        i += (size_t)len;
    }
}

int err_set(struct err *e, int code, const char *fmt, ...)
{
    va_list ap;
    if (!e) return code;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    make_printable(e->msg);
    e->code = code;
    return code;
}

int err_prefix(struct err *e, const char *fmt, ...)
{
    char prefix[256], both[sizeof e->msg + sizeof prefix + 1];
    va_list ap;
    if (!e) return ERR_INPUT;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    snprintf(both, sizeof both, "%s: %s", prefix, e->msg);
    both[sizeof e->msg - 1] = 0; /* what does not fit is the end of the message, not the place */
    make_printable(both);
    memcpy(e->msg, both, strlen(both) + 1);
    return e->code;
}

/* ------------------------------------------------------------------------------------------------ spans, sizes */

struct span span_of(const char *cstr) { return (struct span){cstr, strlen(cstr)}; }

bool span_eq(struct span a, struct span b) { return a.len == b.len && (a.len == 0 || !memcmp(a.ptr, b.ptr, a.len)); }

bool span_is(struct span a, const char *cstr) { return span_eq(a, span_of(cstr)); }

bool span_starts(struct span a, const char *cstr)
{
    size_t n = strlen(cstr);
    return a.len >= n && (n == 0 || !memcmp(a.ptr, cstr, n));
}

bool span_ends(struct span a, const char *cstr)
{
    size_t n = strlen(cstr);
    return a.len >= n && (n == 0 || !memcmp(a.ptr + a.len - n, cstr, n));
}

bool size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) return false;
    *out = product;
    return true;
}

bool size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return false;
    *out = sum;
    return true;
}

/* ------------------------------------------------------------------------------------------------ memory */

int mem_new(void *out_ptr, size_t bytes, struct err *e)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) return err_set(e, ERR_NOMEM, "out of memory: %zu bytes could not be had", bytes);
    memcpy(out_ptr, &p, sizeof p);
    return OK;
}

enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 4 << 20 };

int mem_new_aligned(void *out_ptr, size_t bytes, struct err *e)
{
    size_t align = bytes >= HUGE_FROM ? HUGE_PAGE : 64;
    void *p = NULL;
    if (bytes > SIZE_MAX - align || posix_memalign(&p, align, size_round_up(bytes ? bytes : 1, 64)))
        return err_set(e, ERR_NOMEM, "out of memory: %zu bytes could not be had", bytes);
    if (bytes >= HUGE_FROM) (void)madvise(p, bytes, MADV_HUGEPAGE); /* a wish: slower without, right all the same */
    memcpy(out_ptr, &p, sizeof p);
    return OK;
}

void mem_free_aligned(void *p) { free(p); }

struct arena_block {
    struct arena_block *next;
    size_t used, size;
    _Alignas(16) unsigned char data[];
};

enum { ARENA_BLOCK = 64 << 10 };

void *arena_alloc(struct arena *a, size_t n)
{
    size_t want = size_round_up(n ? n : 1, 16);
    struct arena_block *b = a->head;
    if (want < n) return NULL;
    if (!b || b->size - b->used < want) {
        size_t size = want > ARENA_BLOCK / 4 ? want : ARENA_BLOCK;
        struct arena_block *fresh = size > SIZE_MAX - sizeof *b ? NULL : calloc(1, sizeof *b + size);
        if (!fresh) return NULL;
        fresh->size = size;
        if (b && size == want) { /* a large one of its own: the open block stays in front */
            fresh->next = b->next;
            b->next = fresh;
        } else {
            fresh->next = b;
            a->head = fresh;
        }
        b = fresh;
    }
    void *p = b->data + b->used;
    b->used += want;
    a->bytes += want;
    return p;
}

char *arena_str(struct arena *a, struct span s)
{
    char *p = arena_alloc(a, s.len + 1);
    if (p && s.len) memcpy(p, s.ptr, s.len);
    return p;
}

void arena_free(struct arena *a)
{
    for (struct arena_block *b = a->head, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    *a = (struct arena){0};
}

static int buf_reserve(struct buf *b, size_t more)
{
    size_t need;
    if (!size_add(b->len, more, &need) || !size_add(need, 1, &need)) return ERR_NOMEM;
    if (need <= b->cap) return OK;
    size_t cap = b->cap < 64 ? 64 : b->cap;
    while (cap < need) cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    char *p = realloc(b->data, cap);
    if (!p) return ERR_NOMEM;
    b->data = p;
    b->cap = cap;
    return OK;
}

int buf_append(struct buf *b, const void *data, size_t n)
{
    TRY(buf_reserve(b, n));
    if (n) memcpy(b->data + b->len, data, n);
    b->len += n;
    b->data[b->len] = 0;
    return OK;
}

int buf_appendf(struct buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) return ERR_NOMEM;
    TRY(buf_reserve(b, (size_t)n));
    va_start(ap, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
    return OK;
}

struct span buf_span(const struct buf *b) { return (struct span){b->data, b->len}; }

void buf_free(struct buf *b)
{
    free(b->data);
    *b = (struct buf){0};
}

/* ------------------------------------------------------------------------------------------------ progress, log */

static const char *scaled(double v, const char *unit, char out[32])
{
    if (unit[0] != 'B' || unit[1]) snprintf(out, 32, "%.0f %s", v, unit);
    else if (v >= 1e9) snprintf(out, 32, "%.2f GB", v / 1e9);
    else snprintf(out, 32, "%.1f MB", v / 1e6);
    return out;
}

void progress_start(struct progress *p, const char *what, const char *unit, size_t total)
{
    *p = (struct progress){.what = what, .unit = unit, .total = total, .start = clock_now(), .on = isatty(2) == 1};
    p->last = p->start;
}

void progress_add(struct progress *p, size_t n)
{
    size_t done = __atomic_add_fetch(&p->done, n, __ATOMIC_RELAXED);
    if (!p->on) return;
    double now = clock_now(), last;
    __atomic_load(&p->last, &last, __ATOMIC_RELAXED);
    if (now - last < 0.1) return;
    if (!__atomic_compare_exchange(&p->last, &last, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return; /* another thread prints */
    char a[32], b[32], rate[32];
    double seconds = now - p->start, per_second = (double)done / seconds;
    double left = p->total > done && per_second > 0 ? (double)(p->total - done) / per_second : 0;
    fprintf(stderr, "\r\033[K%s %3.0f%%  %s of %s  %s/s  %.0f s left", p->what,
            p->total ? 100.0 * (double)done / (double)p->total : 0.0, scaled((double)done, p->unit, a),
            scaled((double)p->total, p->unit, b), scaled(per_second, p->unit, rate), left);
    fflush(stderr);
    __atomic_store_n(&p->shown, true, __ATOMIC_RELAXED);
}

void progress_end(struct progress *p)
{
    if (p->shown) fputs("\r\033[K", stderr);
    p->on = p->shown = false;
}

static enum log_level log_limit = LOG_WARN;

void log_set_level(enum log_level level) { log_limit = level; }

void log_line(enum log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    char line[1024];
    va_list ap;
    if (level > log_limit) return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    make_printable(line);
    fprintf(stderr, "hearth: %s: %s\n", names[level], line);
}
