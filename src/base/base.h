/* base: what every room stands on: status codes, the one-line error, spans, an arena, a byte buffer, the clock,
 * read-only file maps, the progress line and the log.
 *
 * Convention of the whole tree: a function that can fail returns int, 0 for good and one of the negative codes
 * below, and takes a `struct err *` as its last argument. The first to know the cause writes the message; callers
 * forward the code with TRY. Outputs are set only on success. Nothing here keeps mutable file-level state except
 * the log level, which cli/ sets once at start. */
#ifndef HEARTH_BASE_H
#define HEARTH_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HEARTH_VERSION "0.1.0"

enum status {
    OK = 0,
    ERR_INPUT = -1,       /* a file, flag or request is wrong: the user can mend it */
    ERR_IO = -2,          /* the operating system refused a read, write, map or spawn */
    ERR_NOMEM = -3,       /* memory: the budget or the machine does not hold it */
    ERR_UNSUPPORTED = -4, /* well-formed, but of a kind that Hearth does not know; the message lists what is known */
    ERR_DEVICE = -5,      /* a backend or a peer failed */
    ERR_CANCELLED = -6
};

/* The first failure, as one line without a trailing newline: what was wrong, where, both values, what to do. */
struct err {
    int code;
    char msg[768];
};

/* Formats the message into e (if e is not NULL), sets e->code and returns code. Control characters that come in
 * through %s arguments are replaced by '?', so a hostile name cannot break the one line. */
int err_set(struct err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Puts "prefix: " before the message that is there: adds where, never what. Returns e->code. */
int err_prefix(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define TRY(call)                                                                                                    \
    do {                                                                                                             \
        int try_rc_ = (call);                                                                                        \
        if (try_rc_ < 0) return try_rc_;                                                                             \
    } while (0)

#define MUST_CHECK __attribute__((warn_unused_result))
#define COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

/* ------------------------------------------------------------------------------------------------ spans */

/* Text or bytes owned by someone else. Not NUL-terminated. All-zero is the empty span. */
struct span {
    const char *ptr;
    size_t len;
};

struct span span_of(const char *cstr);
bool span_eq(struct span a, struct span b);
bool span_is(struct span a, const char *cstr);
bool span_starts(struct span a, const char *cstr);
bool span_ends(struct span a, const char *cstr);

/* ------------------------------------------------------------------------------------------------ sizes */

/* Checked arithmetic for sizes that come from outside: false if the result does not fit, *out untouched. */
bool size_mul(size_t a, size_t b, size_t *out);
bool size_add(size_t a, size_t b, size_t *out);
static inline size_t size_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* ------------------------------------------------------------------------------------------------ memory */

/* malloc that fills e with the number of bytes when it fails; *out is zeroed memory. Freed with free(). */
int mem_new(void *out_ptr, size_t bytes, struct err *e) MUST_CHECK;
/* Memory aligned to 64 bytes (2 MiB and huge pages asked for from 4 MiB up), not zeroed. For mem_free_aligned. */
int mem_new_aligned(void *out_ptr, size_t bytes, struct err *e) MUST_CHECK;
void mem_free_aligned(void *p);

/* An arena: allocations of one lifetime, freed in one call. All-zero is a valid empty arena. */
struct arena {
    struct arena_block *head;
    size_t bytes; /* handed out so far */
};
/* n bytes aligned to 16, zeroed; NULL when memory is out. */
void *arena_alloc(struct arena *a, size_t n) MUST_CHECK;
/* A NUL-terminated copy of s in the arena; NULL when memory is out. */
char *arena_str(struct arena *a, struct span s) MUST_CHECK;
void arena_free(struct arena *a);

/* A growing byte buffer. All-zero is a valid empty buffer. data is always NUL-terminated when not NULL. */
struct buf {
    char *data;
    size_t len, cap;
};
int buf_append(struct buf *b, const void *data, size_t n) MUST_CHECK; /* OK or ERR_NOMEM */
int buf_appendf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3))) MUST_CHECK;
struct span buf_span(const struct buf *b);
void buf_free(struct buf *b);

/* ------------------------------------------------------------------------------------------------ time, machine */

double clock_now(void);          /* monotonic seconds */
size_t machine_free_bytes(void); /* memory that can be had without swapping (MemAvailable, and the cgroup's limit) */
size_t machine_total_bytes(void);
size_t process_resident_bytes(void); /* resident set now */
int machine_cores(void);             /* cores this process may run on (affinity mask) */

/* ------------------------------------------------------------------------------------------------ files */

/* A whole file mapped read-only. The map's pages are dropped from the resident set by fmap_drop. */
struct fmap {
    const uint8_t *data;
    size_t len;
    char *path; /* owned, for messages */
};
int fmap_open(struct fmap *out, const char *path, struct err *e) MUST_CHECK;
void fmap_close(struct fmap *m);
/* Says that [data, data+len) inside the map is not needed any more (whole pages only). What reaches past the end of
 * the map is cut off, so that the last row of a slice may be given by its stride. */
void fmap_drop(const struct fmap *m, const uint8_t *data, size_t len);
/* Reads a whole file of at most max bytes into memory; buf_free it. */
int file_read(struct buf *out, const char *path, size_t max, struct err *e) MUST_CHECK;
bool file_exists(const char *path);
bool file_is_dir(const char *path);

/* ------------------------------------------------------------------------------------------------ text helpers */

/* Length in bytes of the valid UTF-8 sequence at s (1..4), 0 if the bytes there are not valid UTF-8, or -k if they
 * are a valid beginning that needs at least one more byte than the n given. n > 0. */
int utf8_step(const char *s, size_t n);
bool utf8_valid(struct span s);
/* Decodes the sequence that utf8_step measured. */
uint32_t utf8_code(const char *s, int len);
/* Writes cp as UTF-8 (1..4 bytes), returns the length. */
int utf8_put(char *out, uint32_t cp);

/* ------------------------------------------------------------------------------------------------ progress, log */

/* One line on stderr that rewrites itself: what, share, rate, time left. Silent where stderr is no terminal. */
struct progress {
    const char *what;
    double start, last;
    size_t done, total; /* bytes or items; unit says which */
    const char *unit;   /* "B" scales to MB and GB, anything else is printed as it is */
    bool on, shown;
};
void progress_start(struct progress *p, const char *what, const char *unit, size_t total);
void progress_add(struct progress *p, size_t n); /* thread-safe; prints at most ten times a second */
void progress_end(struct progress *p);           /* clears the line */

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
void log_set_level(enum log_level level);
/* One line to stderr: "hearth: warning: ..." */
void log_line(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
