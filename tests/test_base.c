/* test_base: what every room stands on. Messages that stay one line, sizes that do not wrap, memory, files that are
 * no files, limits of control groups (a tree of files stands in for them), UTF-8 in every wrong form, and the
 * progress line on a terminal (a pseudo-terminal) and off it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base_priv.h"

static struct err err; /* of the last call in a test */

#define GOOD(call)                                                                                                   \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ != OK) fail_msg("%s: %s", #call, err.msg);                                                           \
    } while (0)

/* The call must fail with that code, and its one line must hold the text. */
#define REFUSED(call, code_, text)                                                                                   \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ != (code_)) fail_msg("%s: returned %d, expected %d", #call, rc_, (code_));                           \
        assert_int_equal(err.code, (code_));                                                                         \
        if (!strstr(err.msg, text) || strchr(err.msg, '\n')) fail_msg("message '%s', expected '%s'", err.msg, text); \
    } while (0)

/* Sanitizers end the process at an allocation beyond their limit, unless told to fail like malloc. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "allocator_may_return_null=1"; }

/* ------------------------------------------------------------------------------------------------ a directory */

static char dir[] = "/tmp/hearth-base-XXXXXX";
static char path_buffer[512];

static const char *in_dir(const char *name)
{
    snprintf(path_buffer, sizeof path_buffer, "%s/%s", dir, name);
    return path_buffer;
}

/* Writes a file, with the directories above it. */
static const char *write_file(const char *name, const void *data, size_t n)
{
    char *path = (char *)(uintptr_t)in_dir(name);
    for (char *s = path + strlen(dir) + 1; (s = strchr(s, '/')); *s++ = '/') {
        *s = 0;
        (void)mkdir(path, 0700); /* may be there already; fopen tells if it is not */
    }
    FILE *f = fopen(path, "wb");
    if (!f) fail_msg("%s cannot be written", path);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}

static const char *write_text(const char *name, const char *text) { return write_file(name, text, strlen(text)); }

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    char command[600];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

/* ------------------------------------------------------------------------------------------------ errors */

static void test_message(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(err_set(&e, ERR_INPUT, "tensor %s has %d rows", "a.b", 3), ERR_INPUT);
    assert_int_equal(e.code, ERR_INPUT);
    assert_string_equal(e.msg, "tensor a.b has 3 rows");
    assert_int_equal(err_prefix(&e, "file %d", 7), ERR_INPUT);
    assert_string_equal(e.msg, "file 7: tensor a.b has 3 rows");
    assert_int_equal(err_set(NULL, ERR_IO, "%s", "nobody listens"), ERR_IO);
    assert_true(err_prefix(NULL, "nor here") < 0);
}

static void test_message_is_one_printable_line(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"a\nb\rc\td", "a?b?c?d"},
        {"\x1b[31mred\x07", "?[31mred?"},
        {"\x7f", "?"},
        {"\xc2\x9b"
         "31m",
         "??31m"}, /* CSI as one character of Latin-1's upper controls */
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"\xff\xfe", "??"},
        {"\xe2\x82", "??"},
        {"\xc0\xaf\xed\xa0\x80", "?????"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct err e = {0};
        err_set(&e, ERR_INPUT, "%s", cases[i].in);
        assert_string_equal(e.msg, cases[i].out);
        err_set(&e, ERR_INPUT, "x");
        err_prefix(&e, "%s", cases[i].in);
        assert_int_equal(strlen(e.msg), strlen(cases[i].out) + 3);
        assert_memory_equal(e.msg, cases[i].out, strlen(cases[i].out));
    }
}

static void test_long_messages_are_cut_at_the_end(void **state)
{
    (void)state;
    struct err e = {0};
    char text[2000];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    err_set(&e, ERR_INPUT, "%s", text);
    assert_int_equal(strlen(e.msg), sizeof e.msg - 1);
    text[700] = 0, text[699] = 'z';
    err_set(&e, ERR_INPUT, "%s", text);
    err_prefix(&e, "here");
    assert_int_equal(strlen(e.msg), 706); /* all of it has room */
    assert_int_equal(e.msg[705], 'z');
    text[699] = 'x';
    err_prefix(&e, "%s", text);
    assert_int_equal(strlen(e.msg), sizeof e.msg - 1);
    assert_non_null(strstr(e.msg, ": here: xxx"));
    /* Two bytes a character: wherever the end falls, half a character is not left there. */
    for (size_t i = 0; i + 2 < sizeof text; i += 2) memcpy(text + i, "\xc3\xa9", 2);
    for (int shift = 0; shift < 2; shift++) {
        err_set(&e, ERR_INPUT, "%s%.*s", shift ? "x" : "", 1998, text);
        assert_true(utf8_valid(span_of(e.msg)));
        err_prefix(&e, "%s", "y");
        assert_true(utf8_valid(span_of(e.msg)));
    }
}

/* ------------------------------------------------------------------------------------------------ spans, sizes */

static void test_spans(void **state)
{
    (void)state;
    struct span s = span_of("model.layers"), none = {0};
    assert_int_equal(s.len, 12);
    assert_true(span_is(s, "model.layers") && !span_is(s, "model.layer") && !span_is(s, "model.layersx"));
    assert_true(span_starts(s, "model.") && span_starts(s, "") && !span_starts(s, "layers"));
    assert_true(span_ends(s, ".layers") && span_ends(s, "") && !span_ends(s, "model"));
    assert_false(span_starts(s, "model.layers.0") || span_ends(s, "the.model.layers"));
    assert_true(span_eq(s, (struct span){"model.layers.7", 12}) && !span_eq(s, (struct span){"model.layerz", 12}));
    assert_true(span_eq(none, span_of("")) && span_is(none, "") && span_starts(none, "") && span_ends(none, ""));
    assert_false(span_is(none, "x") || span_eq(none, s));
    assert_false(span_is((struct span){"a\0b", 3}, "a"));
    struct span cut = {"model.layers", 5}; /* what stands behind a span is not of it */
    assert_true(span_starts(cut, "model") && span_ends(cut, "del"));
    assert_false(span_starts(cut, "model.") || span_is(cut, "model.") || span_ends(cut, "model.layers"));
}

static void test_sizes_do_not_wrap(void **state)
{
    (void)state;
    size_t out = 7;
    assert_true(size_mul(6, 7, &out) && out == 42);
    assert_true(size_add(6, 7, &out) && out == 13);
    assert_true(size_mul(SIZE_MAX, 1, &out) && out == SIZE_MAX);
    assert_true(size_mul(0, SIZE_MAX, &out) && out == 0);
    assert_true(size_add(SIZE_MAX - 1, 1, &out) && out == SIZE_MAX);
    out = 7;
    assert_false(size_mul((size_t)1 << 32, (size_t)1 << 32, &out));
    assert_false(size_mul(SIZE_MAX / 2, 3, &out));
    assert_false(size_add(SIZE_MAX, 1, &out));
    assert_int_equal(out, 7); /* untouched */
    assert_int_equal(size_round_up(0, 64), 0);
    assert_int_equal(size_round_up(1, 64), 64);
    assert_int_equal(size_round_up(64, 64), 64);
    assert_int_equal(size_round_up(65, 48), 96);
}

/* ------------------------------------------------------------------------------------------------ memory */

static void test_memory(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 4096, (4 << 20) - 1, 4 << 20, (5 << 20) + 12345};
    volatile size_t huge = SIZE_MAX / 2, whole = SIZE_MAX;
    unsigned char *p = NULL;
    char number[32];
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        GOOD(mem_new(&p, sizes[i], &err));
        for (size_t k = 0; k < sizes[i]; k++)
            if (p[k]) fail_msg("byte %zu of %zu is not zero", k, sizes[i]);
        free(p);
        GOOD(mem_new_aligned(&p, sizes[i], &err));
        assert_int_equal((uintptr_t)p % (sizes[i] >= 4 << 20 ? 2 << 20 : 64), 0);
        memset(p, 1, sizes[i]);
        mem_free_aligned(p);
    }
    p = (unsigned char *)&err;
    snprintf(number, sizeof number, "%zu bytes", huge);
    REFUSED(mem_new(&p, huge, &err), ERR_NOMEM, number);
    REFUSED(mem_new_aligned(&p, huge, &err), ERR_NOMEM, number);
    REFUSED(mem_new_aligned(&p, whole, &err), ERR_NOMEM, "bytes");
    REFUSED(mem_new_aligned(&p, whole - 100, &err), ERR_NOMEM, "bytes");
    assert_ptr_equal(p, &err); /* set only on success */
    mem_free_aligned(NULL);
}

static void test_arena(void **state)
{
    (void)state;
    struct arena a = {0};
    unsigned char *all[600];
    size_t sizes[600], total = 0;
    for (size_t i = 0; i < COUNT_OF(all); i++) { /* small ones, and now and then one larger than a block */
        sizes[i] = i % 50 == 7 ? 100000 + i : i * 7 % 501;
        all[i] = arena_alloc(&a, sizes[i]);
        assert_non_null(all[i]);
        assert_int_equal((uintptr_t)all[i] % 16, 0);
        for (size_t k = 0; k < sizes[i]; k++)
            if (all[i][k]) fail_msg("byte %zu of allocation %zu is not zero", k, i);
        memset(all[i], (int)(i % 255 + 1), sizes[i]);
        total += sizes[i];
    }
    for (size_t i = 0; i < COUNT_OF(all); i++) /* none lies in another */
        for (size_t k = 0; k < sizes[i]; k++)
            if (all[i][k] != i % 255 + 1) fail_msg("byte %zu of allocation %zu was overwritten", k, i);
    assert_true(a.bytes >= total && a.bytes <= total + 16 * COUNT_OF(all));
    /* A large one does not close the block that small ones are taken from. */
    char *before = arena_alloc(&a, 16), *large = arena_alloc(&a, 1 << 20), *after = arena_alloc(&a, 16);
    assert_non_null(large);
    assert_ptr_equal(after, before + 16);

    volatile size_t whole = SIZE_MAX;
    size_t bytes = a.bytes;
    assert_null(arena_alloc(&a, whole));
    assert_null(arena_alloc(&a, whole - 8));
    assert_null(arena_alloc(&a, whole - 15));
    assert_null(arena_alloc(&a, whole / 2));
    assert_int_equal(a.bytes, bytes);
    char *s = arena_str(&a, (struct span){"hearth and home", 6}), *empty = arena_str(&a, (struct span){0});
    assert_string_equal(s, "hearth");
    assert_string_equal(empty, "");
    char *full = arena_str(&a, span_of("sixteen letters.")), *next = arena_alloc(&a, 16);
    memset(next, 'x', 16);
    assert_string_equal(full, "sixteen letters.");
    arena_free(&a);
    assert_null(a.head);
    assert_int_equal(a.bytes, 0);
    arena_free(&a);
}

static void test_buffer(void **state)
{
    (void)state;
    struct buf b = {0};
    assert_int_equal(buf_span(&b).len, 0);
    assert_int_equal(buf_append(&b, NULL, 0), OK);
    assert_string_equal(b.data, "");
    assert_int_equal(buf_append(&b, "a\0b", 3), OK);
    assert_int_equal(buf_appendf(&b, "%d-%s", 12, "x"), OK);
    assert_int_equal(b.len, 7);
    assert_memory_equal(b.data, "a\0b12-x", 8);
    for (int i = 0; i < 5000; i++) assert_int_equal(buf_appendf(&b, "%04d", i), OK);
    assert_int_equal(b.len, 7 + 20000);
    assert_memory_equal(b.data + 7 + 4 * 4321, "4321", 4);
    assert_int_equal(b.data[b.len], 0);
    assert_true(b.cap > b.len);
    volatile size_t whole = SIZE_MAX;
    assert_int_equal(buf_append(&b, b.data, whole), ERR_NOMEM);
    assert_int_equal(buf_append(&b, b.data, whole - b.len), ERR_NOMEM);
    assert_int_equal(buf_append(&b, b.data, whole / 2 - b.len), ERR_NOMEM);
    assert_int_equal(b.len, 7 + 20000); /* as it was */
    assert_int_equal(buf_span(&b).len, b.len);
    buf_free(&b);
    assert_null(b.data);
    assert_int_equal(b.len + b.cap, 0);
}

/* ------------------------------------------------------------------------------------------------ machine */

static void test_machine(void **state)
{
    (void)state;
    double before = clock_now();
    usleep(2000);
    double passed = clock_now() - before;
    assert_true(passed >= 0.002 && passed < 60);
    assert_true(machine_free_bytes() > 0 && machine_free_bytes() <= machine_total_bytes());

    size_t n = 64 << 20, resident = process_resident_bytes();
    char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    for (size_t i = 0; i < n; i += 4096) ((volatile char *)p)[i] = 1;
    size_t grown = process_resident_bytes();
    assert_in_range(grown, resident + n / 2, resident + 2 * n);
    munmap(p, n);

    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    assert_int_equal(machine_cores(), CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (size_t i = 0; CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    int cores = machine_cores();
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    assert_int_equal(cores, 1);
}

static size_t group_bytes(const char *tree)
{
    char membership[512], mount[512];
    snprintf(membership, sizeof membership, "%s/%s/self", dir, tree);
    snprintf(mount, sizeof mount, "%s/%s/fs", dir, tree);
    return machine_group_bytes(membership, mount);
}

static void test_limits_of_groups(void **state)
{
    (void)state;
    assert_true(group_bytes("nowhere") == SIZE_MAX);

    /* Version 2. The group itself has no limit, the one above has: 1000 - (700 - 150 of files) are left. */
    write_text("v2/self", "0::/user.slice/job\n");
    write_text("v2/fs/user.slice/job/memory.max", "max\n");
    write_text("v2/fs/user.slice/job/memory.current", "600\n");
    assert_true(group_bytes("v2") == SIZE_MAX);
    write_text("v2/fs/user.slice/memory.max", "1000\n");
    assert_int_equal(group_bytes("v2"), 1000);
    write_text("v2/fs/user.slice/memory.current", "700\n");
    write_text("v2/fs/user.slice/memory.stat", "anon 5\nfile 9999\nactive_file 50\ninactive_file 100\n");
    assert_int_equal(group_bytes("v2"), 450);
    write_text("v2/fs/user.slice/job/memory.max", "1000\n"); /* 400: less than above */
    assert_int_equal(group_bytes("v2"), 400);
    write_text("v2/fs/memory.max", "123\n"); /* of the mount, which is all that a container sees */
    assert_int_equal(group_bytes("v2"), 123);
    write_text("v2/fs/memory.current", "999\n"); /* above its limit: nothing is left, and nothing wraps */
    assert_int_equal(group_bytes("v2"), 0);

    /* A container that is told the path it has outside. */
    write_text("box/self", "0::/../../docker/0123\n");
    write_text("box/fs/memory.max", "5000\n");
    write_text("box/fs/memory.current", "1000\n");
    assert_int_equal(group_bytes("box"), 4000);

    /* Version 1, among other controllers. */
    write_text("v1/self", "9:name=systemd:/\n4:memory:/job\n3:cpuset:/\n0::/\n");
    write_text("v1/fs/memory/memory.limit_in_bytes", "9223372036854771712\n");
    write_text("v1/fs/memory/memory.usage_in_bytes", "0\n");
    write_text("v1/fs/memory/job/memory.limit_in_bytes", "3000\n");
    write_text("v1/fs/memory/job/memory.usage_in_bytes", "2500\n");
    write_text("v1/fs/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 200\ntotal_active_file 100\n");
    assert_int_equal(group_bytes("v1"), 800);

    /* Nonsense is no limit. */
    write_text("odd/self", "\n::\nmemory\n4:memory\n0::\n");
    write_text("odd/fs/memory.max", "none\n");
    assert_true(group_bytes("odd") == SIZE_MAX);
}

/* ------------------------------------------------------------------------------------------------ files */

static void test_maps(void **state)
{
    (void)state;
    struct fmap m = {0};
    const char *path = write_file("map", "GGUF\0\1\2\3", 8);
    GOOD(fmap_open(&m, path, &err));
    assert_int_equal(m.len, 8);
    assert_memory_equal(m.data, "GGUF\0\1\2\3", 8);
    assert_string_equal(m.path, path);
    assert_ptr_not_equal(m.path, path);
    fmap_close(&m);
    assert_null(m.data);
    assert_null(m.path);
    fmap_close(&m);

    GOOD(fmap_open(&m, write_file("empty", "", 0), &err));
    assert_int_equal(m.len, 0);
    assert_non_null(m.data);
    fmap_drop(&m, m.data, 0);
    fmap_close(&m);
}

static void test_what_is_no_file(void **state)
{
    (void)state;
    struct fmap m = {.len = 77};
    struct buf b = {.len = 77};
    assert_int_equal(mkfifo(in_dir("pipe"), 0600), 0);
    alarm(20); /* a pipe that nobody writes must not be waited for */
    REFUSED(fmap_open(&m, in_dir("pipe"), &err), ERR_INPUT, "pipe: is a pipe or a device, a regular file is needed");
    REFUSED(file_read(&b, in_dir("pipe"), 10, &err), ERR_INPUT, "pipe: is a pipe or a device");
    alarm(0);
    REFUSED(fmap_open(&m, dir, &err), ERR_INPUT, "is a directory, a regular file is needed");
    REFUSED(file_read(&b, dir, 10, &err), ERR_INPUT, "is a directory");
    REFUSED(fmap_open(&m, "/dev/null", &err), ERR_INPUT, "/dev/null: is a pipe or a device");
    REFUSED(fmap_open(&m, in_dir("absent"), &err), ERR_IO, "absent: cannot be opened: No such file");
    REFUSED(file_read(&b, in_dir("absent"), 10, &err), ERR_IO, "absent: cannot be opened: No such file");
    REFUSED(fmap_open(&m, in_dir("a\nb"), &err), ERR_IO, "a?b: cannot be opened");
    assert_int_equal(m.len, 77);
    assert_int_equal(b.len, 77);
    assert_true(file_exists(dir) && file_is_dir(dir));
    assert_true(file_exists(write_text("plain", "x")) && !file_is_dir(in_dir("plain")));
    assert_false(file_exists(in_dir("absent")) || file_is_dir(in_dir("absent")));
}

static void test_small_files(void **state)
{
    (void)state;
    struct buf b = {0};
    const char *path = write_file("small", "a\0bc", 4);
    GOOD(file_read(&b, path, 4, &err));
    assert_int_equal(b.len, 4);
    assert_memory_equal(b.data, "a\0bc", 5);
    assert_int_equal(buf_append(&b, "d", 1), OK);
    buf_free(&b);
    REFUSED(file_read(&b, path, 3, &err), ERR_INPUT, "has 4 bytes, at most 3 are accepted");
    GOOD(file_read(&b, write_file("nothing", "", 0), 0, &err));
    assert_int_equal(b.len, 0);
    assert_string_equal(b.data, "");
    buf_free(&b);
}

static void test_dropped_pages_can_be_read_again(void **state)
{
    (void)state;
    size_t n = 32 << 20, sum = 0;
    unsigned char *bytes = malloc(n);
    assert_non_null(bytes);
    for (size_t i = 0; i < n; i++) bytes[i] = (unsigned char)(i * 31 >> 8);
    struct fmap m;
    GOOD(fmap_open(&m, write_file("large", bytes, n), &err));
    for (size_t i = 0; i < n; i += 512) sum += m.data[i];
    assert_true(sum > 0);
    size_t before = process_resident_bytes();
    fmap_drop(&m, m.data + 100, n - 200);
    size_t after = process_resident_bytes();
    assert_true(after + n * 3 / 4 < before);
    assert_memory_equal(m.data, bytes, n);
    fmap_close(&m);
    free(bytes);
}

static void test_drop_stays_inside_the_map(void **state)
{
    (void)state;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *p = mmap(NULL, 6 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    memset(p, 5, 6 * page); /* private pages lose what they hold when they are dropped */
    struct fmap m = {.data = p + 2 * page, .len = 2 * page};
    fmap_drop(&m, p, 6 * page);            /* begins before the map: no range of it */
    fmap_drop(&m, p + 4 * page, page);     /* begins at its end */
    fmap_drop(&m, p + 5 * page, page);     /* begins behind it */
    fmap_drop(&m, p + 2 * page + 1, page); /* these hold no whole page */
    fmap_drop(&m, p + 2 * page, page - 1);
    fmap_drop(&m, p + 2 * page + 1, 10);
    for (size_t i = 0; i < 6 * page; i++) assert_int_equal(p[i], 5);
    fmap_drop(&m, p + 3 * page, 3 * page); /* reaches past it */
    fmap_drop(&m, p + 3 * page, SIZE_MAX);
    for (size_t i = 0; i < 6 * page; i++) assert_int_equal(p[i], i / page == 3 ? 0 : 5);
    munmap(p, 6 * page);
}

/* ------------------------------------------------------------------------------------------------ UTF-8 */

static void test_utf8_of_every_code_point(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp++) {
        char s[5] = {0};
        int len = utf8_put(s, cp), want = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
        if (len != want) fail_msg("U+%04X takes %d bytes, expected %d", cp, len, want);
        if (cp >= 0xD800 && cp < 0xE000) {
            if (utf8_step(s, 3) != 0) fail_msg("the surrogate U+%04X is valid", cp);
            continue;
        }
        if (utf8_step(s, 5) != len || utf8_step(s, (size_t)len) != len || utf8_code(s, len) != cp)
            fail_msg("U+%04X is %d bytes and reads as U+%04X", cp, utf8_step(s, 5), utf8_code(s, len));
        for (int n = 1; n < len; n++)
            if (utf8_step(s, (size_t)n) != -n) fail_msg("%d bytes of U+%04X give %d", n, cp, utf8_step(s, (size_t)n));
    }
}

static void test_utf8_of_wrong_sequences(void **state)
{
    (void)state;
    static const struct {
        const char *s;
        int n, step;
    } cases[] = {
        {"\x80", 1, 0},
        {"\xbf", 1, 0}, /* a continuation in front */
        {"\xc0\x80", 2, 0},
        {"\xc1\xbf", 2, 0},
        {"\xc0", 1, 0}, /* overlong, two bytes */
        {"\xe0\x80\x80", 3, 0},
        {"\xe0\x9f\xbf", 3, 0},
        {"\xe0\x9f", 2, 0}, /* overlong, three */
        {"\xf0\x80\x80\x80", 4, 0},
        {"\xf0\x8f\xbf\xbf", 4, 0},
        {"\xf0\x8f", 2, 0},
        {"\xed\xa0\x80", 3, 0},
        {"\xed\xbf\xbf", 3, 0},
        {"\xed\xa0", 2, 0}, /* surrogates */
        {"\xf4\x90\x80\x80", 4, 0},
        {"\xf4\x90", 2, 0}, /* above U+10FFFF */
        {"\xf5\x80\x80\x80", 4, 0},
        {"\xf5", 1, 0},
        {"\xff", 1, 0},
        {"\xfe", 1, 0},
        {"\xf8\x88\x80\x80", 4, 0},
        {"\xc3"
         "A",
         2, 0},
        {"\xe2\x82"
         "A",
         3, 0},
        {"\xe2"
         "A\x82",
         3, 0},
        {"\xf0\x9f\x98"
         "A",
         4, 0}, /* broken off */
        {"\xc3\xc3", 2, 0},
        {"\xe2\x82\xc2", 3, 0},
        {"\xf0\x9f\x98\xf0", 4, 0},
        {"\xc3", 1, -1},
        {"\xe2", 1, -1},
        {"\xe2\x82", 2, -2},
        {"\xf0\x9f\x98", 3, -3},
        {"\xed\x9f", 2, -2}, /* cut */
        {"\xe0\xa0", 2, -2},
        {"\xf0\x90", 2, -2},
        {"\xf4\x8f", 2, -2},
        {"\xf4\x8f\xbf", 3, -3},
        {"\0", 1, 1},
        {"\x7f", 1, 1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int step = utf8_step(cases[i].s, (size_t)cases[i].n);
        if (step != cases[i].step) fail_msg("case %zu gives %d, expected %d", i, step, cases[i].step);
        assert_int_equal(utf8_valid((struct span){cases[i].s, (size_t)cases[i].n}), cases[i].step > 0);
    }
    assert_true(utf8_valid((struct span){0}));
    assert_true(utf8_valid(span_of("Gr\xc3\xbc\xc3\x9f"
                                   "e \xe2\x82\xac \xf0\x9f\x98\x80")));
    assert_false(utf8_valid(span_of("fine, and then \xc3")));
}

/* Of all strings of a length, as many are one character as there are characters of that length. */
static void test_utf8_counts(void **state)
{
    (void)state;
    static const unsigned char tails[] = {0x00, 0x7F, 0x80, 0xBF, 0xC0, 0xFF}; /* two of them continue */
    size_t one = 0, two = 0, three = 0, four = 0;
    unsigned char s[4];
    for (int a = 0; a < 256; a++) {
        s[0] = (unsigned char)a;
        one += utf8_step((char *)s, 1) == 1;
        for (int b = 0; b < 256; b++) {
            s[1] = (unsigned char)b;
            two += utf8_step((char *)s, 2) == 2;
            for (int c = 0; c < 256; c++) {
                s[2] = (unsigned char)c;
                three += utf8_step((char *)s, 3) == 3;
            }
            for (size_t c = 0; c < COUNT_OF(tails); c++)
                for (size_t d = 0; d < COUNT_OF(tails); d++) {
                    s[2] = tails[c], s[3] = tails[d];
                    four += utf8_step((char *)s, 4) == 4;
                }
        }
    }
    assert_int_equal(one, 0x80);
    assert_int_equal(two, 0x800 - 0x80);
    assert_int_equal(three, 0x10000 - 0x800 - 0x800);
    assert_int_equal(four, 0x100000 / 64 / 64 * 2 * 2);
}

/* ------------------------------------------------------------------------------------------------ progress, log */

/* stderr goes to fd until the second call, which takes what the first returned. */
static int stderr_to(int fd)
{
    fflush(stderr);
    int saved = dup(2);
    assert_true(saved >= 0 && dup2(fd, 2) == 2);
    return saved;
}

static void stderr_back(int saved)
{
    fflush(stderr);
    assert_true(dup2(saved, 2) == 2);
    close(saved);
}

/* What has been written to fd so far; waits a little for a terminal's other end. */
static size_t take(int fd, char *out, size_t max)
{
    size_t n = 0;
    while (n + 1 < max && poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 100) > 0) {
        ssize_t got = read(fd, out + n, max - 1 - n);
        if (got <= 0) break;
        n += (size_t)got;
    }
    out[n] = 0;
    return n;
}

static void test_progress_is_silent_in_a_pipe(void **state)
{
    (void)state;
    int ends[2];
    char text[256];
    struct progress p;
    assert_int_equal(pipe(ends), 0);
    int saved = stderr_to(ends[1]);
    progress_start(&p, "loading", "B", 1000);
    usleep(120000);
    progress_add(&p, 500);
    progress_end(&p);
    stderr_back(saved);
    close(ends[1]);
    assert_int_equal(take(ends[0], text, sizeof text), 0);
    assert_int_equal(p.done, 500);
    close(ends[0]);
}

static void test_progress_on_a_terminal(void **state)
{
    (void)state;
    int master = posix_openpt(O_RDWR | O_NOCTTY), slave = -1;
    char text[4096];
    struct progress p;
    if (master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0)
        slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    if (slave < 0) skip(); /* no pseudo-terminals here */
    int saved = stderr_to(slave);
    progress_start(&p, "loading", "B", 4000000000);
    progress_add(&p, 1);
    size_t early = take(master, text, sizeof text);
    usleep(120000);
    progress_add(&p, 999999999);
    take(master, text, sizeof text);
    for (int i = 0; i < 1000; i++) progress_add(&p, 0); /* at most ten lines a second */
    char more[4096];
    size_t flood = take(master, more, sizeof more);
    progress_end(&p);
    char last[64];
    take(master, last, sizeof last);
    progress_start(&p, "reading", "tokens", 10);
    usleep(120000);
    progress_add(&p, 5);
    char tokens[256];
    take(master, tokens, sizeof tokens);
    progress_end(&p);
    stderr_back(saved);
    close(slave);
    close(master);
    assert_int_equal(early, 0);
    assert_non_null(strstr(text, "loading  25%  1.00 GB of 4.00 GB  "));
    assert_non_null(strstr(text, " s left"));
    assert_null(strchr(text, '\n'));
    assert_true(flood < 200);
    assert_string_equal(last, "\r\033[K");
    assert_non_null(strstr(tokens, "reading  50%  5 tokens of 10 tokens  "));
}

enum { THREADS = 4, ADDS = 500000 };

static void *add_many(void *p)
{
    for (int i = 0; i < ADDS; i++) progress_add(p, 3);
    return NULL;
}

static void test_progress_of_many_threads(void **state)
{
    (void)state;
    for (int on = 0; on < 2; on++) { /* counting alone, and with the printing that a terminal would get */
        pthread_t threads[THREADS];
        struct progress p;
        int null = open("/dev/null", O_WRONLY), saved = stderr_to(null);
        progress_start(&p, "loading", "B", 3 * THREADS * ADDS);
        p.on = on;
        for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, add_many, &p), 0);
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        progress_end(&p);
        stderr_back(saved);
        close(null);
        assert_int_equal(p.done, 3 * THREADS * ADDS);
    }
}

static void test_log(void **state)
{
    (void)state;
    int ends[2];
    char text[4096];
    assert_int_equal(pipe(ends), 0);
    int saved = stderr_to(ends[1]);
    log_line(LOG_INFO, "not at this level");
    log_line(LOG_WARN, "the name %s is odd", "a\nb");
    log_set_level(LOG_INFO);
    log_line(LOG_INFO, "%d layers", 3);
    log_line(LOG_DEBUG, "not this");
    log_set_level(LOG_ERROR);
    log_line(LOG_WARN, "nor this");
    log_line(LOG_ERROR, "but this");
    log_set_level(LOG_WARN);
    stderr_back(saved);
    close(ends[1]);
    take(ends[0], text, sizeof text);
    close(ends[0]);
    assert_string_equal(text,
                        "hearth: warning: the name a?b is odd\nhearth: info: 3 layers\nhearth: error: but this\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_message),
        cmocka_unit_test(test_message_is_one_printable_line),
        cmocka_unit_test(test_long_messages_are_cut_at_the_end),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_sizes_do_not_wrap),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_buffer),
        cmocka_unit_test(test_machine),
        cmocka_unit_test(test_limits_of_groups),
        cmocka_unit_test(test_maps),
        cmocka_unit_test(test_what_is_no_file),
        cmocka_unit_test(test_small_files),
        cmocka_unit_test(test_dropped_pages_can_be_read_again),
        cmocka_unit_test(test_drop_stays_inside_the_map),
        cmocka_unit_test(test_utf8_of_every_code_point),
        cmocka_unit_test(test_utf8_of_wrong_sequences),
        cmocka_unit_test(test_utf8_counts),
        cmocka_unit_test(test_progress_is_silent_in_a_pipe),
        cmocka_unit_test(test_progress_on_a_terminal),
        cmocka_unit_test(test_progress_of_many_threads),
        cmocka_unit_test(test_log),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
