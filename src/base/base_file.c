/* base_file.c: files as read-only maps, and small files as bytes. Only regular files are accepted: a pipe or a device
 * that stands where a checkpoint should would block, or never end. A file that shrinks while it is mapped is not
 * guarded against. */
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Opens a regular file for reading: *fd and its size. */
static int open_regular(const char *path, int *fd, size_t *size, struct err *e)
{
    struct stat st = {0};
    int f = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer is refused, not awaited */
    if (f < 0) return err_set(e, ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    if (fstat(f, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(f);
        return err_set(e, ERR_INPUT, "%s: is %s, a regular file is needed", path,
                       S_ISDIR(st.st_mode) ? "a directory" : "a pipe or a device");
    }
    *fd = f;
    *size = (size_t)st.st_size;
    return OK;
}

int fmap_open(struct fmap *out, const char *path, struct err *e)
{
    static const uint8_t nothing[1];
    struct fmap m = {.data = nothing};
    int fd;
    TRY(open_regular(path, &fd, &m.len, e));
    if (m.len > 0) {
        void *p = mmap(NULL, m.len, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            int why = errno;
            close(fd);
            return err_set(e, ERR_IO, "%s: %zu bytes cannot be mapped: %s", path, m.len, strerror(why));
        }
        m.data = p;
    }
    close(fd);
    m.path = strdup(path);
    if (!m.path) {
        fmap_close(&m);
        return err_set(e, ERR_NOMEM, "out of memory for a path");
    }
    *out = m;
    return OK;
}

void fmap_close(struct fmap *m)
{
    if (m->len > 0) munmap((void *)(uintptr_t)m->data, m->len);
    free(m->path);
    *m = (struct fmap){0};
}

void fmap_drop(const struct fmap *m, const uint8_t *data, size_t len)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)data, offset = at - (uintptr_t)m->data;
    if (offset >= m->len) return; /* behind the map, or in front of it, where the offset wraps */
    if (len > m->len - offset) len = m->len - offset;
    uintptr_t begin = size_round_up(at, page), end = (at + len) / page * page;
    if (begin >= end) return;
    (void)madvise((void *)begin, end - begin, MADV_DONTNEED); /* a clean file map: the pages can be read again */
}

int file_read(struct buf *out, const char *path, size_t max, struct err *e)
{
    struct buf b = {0};
    size_t size;
    int fd;
    TRY(open_regular(path, &fd, &size, e));
    if (size > max) {
        close(fd);
        return err_set(e, ERR_INPUT, "%s: has %zu bytes, at most %zu are accepted", path, size, max);
    }
    b.data = malloc(size + 1);
    b.cap = size + 1;
    while (b.data && b.len < size) {
        ssize_t n = read(fd, b.data + b.len, size - b.len);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            int why = errno;
            close(fd);
            buf_free(&b);
            return err_set(e, ERR_IO, "%s: cannot be read: %s", path, n < 0 ? strerror(why) : "it became shorter");
        }
        b.len += (size_t)n;
    }
    close(fd);
    if (!b.data) return err_set(e, ERR_NOMEM, "out of memory: %zu bytes for %s", size, path);
    b.data[b.len] = 0;
    *out = b;
    return OK;
}

bool file_exists(const char *path) { return access(path, F_OK) == 0; }

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
