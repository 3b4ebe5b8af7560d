/* npy.c: writes a NumPy file (format 1.0) of little-endian float32 rows. The file is opened without truncation before
 * the work begins, so that an unwritable place shows at once and a good file is only replaced when there is something
 * new. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

static int write_failed(const struct npy *n, struct err *e)
{
    return err_set(e, ERR_IO, "%s: cannot be written: %s", n->path, strerror(errno));
}

int npy_open(struct npy *n, const char *path, struct err *e)
{
    struct stat st;
    *n = (struct npy){.path = path};
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || fstat(fd, &st) < 0) {
        write_failed(n, e);
        if (fd >= 0) close(fd);
        return e->code;
    }
    n->regular = S_ISREG(st.st_mode);
    n->f = fdopen(fd, "wb");
    if (n->f) return OK;
    close(fd);
    return err_set(e, ERR_NOMEM, "out of memory for a file");
}

int npy_begin(struct npy *n, size_t rows, size_t cols, struct err *e)
{
    enum { LEAD = 10, ALIGN = 64 };
    char head[2 * ALIGN];
    memset(head, ' ', sizeof head);
    int len = snprintf(head + LEAD, sizeof head - LEAD,
                       "{'descr': '<f4', 'fortran_order': False, 'shape': (%zu, %zu), }", rows, cols);
    size_t total = size_round_up(LEAD + (size_t)len + 1, ALIGN), dict = total - LEAD;
    head[LEAD + len] = ' ';
    head[total - 1] = '\n';
    memcpy(head, "\x93NUMPY\x01\x00", 8);
    head[8] = (char)(dict & 0xff);
    head[9] = (char)(dict >> 8);
    n->begun = true;
    if (n->regular && ftruncate(fileno(n->f), 0) < 0) return write_failed(n, e);
    return fwrite(head, 1, total, n->f) == total ? OK : write_failed(n, e);
}

int npy_write(struct npy *n, const float *data, size_t count, struct err *e)
{
    return fwrite(data, sizeof *data, count, n->f) == count ? OK : write_failed(n, e);
}

int npy_end(struct npy *n, struct err *e)
{
    FILE *f = n->f;
    n->f = NULL;
    if (fclose(f) == 0) return OK;
    write_failed(n, e);
    npy_drop(n);
    return e->code;
}

void npy_drop(struct npy *n)
{
    struct stat st;
    if (n->f) fclose(n->f);
    n->f = NULL;
    if (n->regular && (n->begun || (stat(n->path, &st) == 0 && st.st_size == 0))) unlink(n->path);
}
