/* terminal.c: the person's side: standard output that notices a full disk or a closed pipe, prompts read with editing
 * where there is a terminal, and Ctrl-C. The flag that Ctrl-C sets is the one mutable variable of this program. */
#include <errno.h>
#include <histedit.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

/* ------------------------------------------------------------------------------------------------ Ctrl-C */

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig)
{
    (void)sig;
    interrupted = 1;
}

void interrupt_catch(bool once)
{
    struct sigaction sa = {.sa_handler = on_interrupt, .sa_flags = once ? (int)SA_RESETHAND : 0};
    sigaction(SIGINT, &sa, NULL);
}

bool interrupt_taken(void)
{
    bool was = interrupted != 0;
    interrupted = 0;
    return was;
}

/* ------------------------------------------------------------------------------------------------ output */

/* A reader that went away (head, less) is no error worth a line: the code alone says it. */
static int out_failed(struct err *e)
{
    if (errno == EPIPE) {
        if (e) *e = (struct err){.code = ERR_IO};
        return ERR_IO;
    }
    return err_set(e, ERR_IO, "standard output cannot be written: %s", strerror(errno));
}

int out_flush(struct err *e) { return fflush(stdout) == 0 && !ferror(stdout) ? OK : out_failed(e); }

/* Bytes of a control character at p, 0 if there is none: C0 but newline and tab, DEL, and C1 (U+0080 to U+009F). */
static size_t control_len(const char *p, size_t left)
{
    unsigned char c = (unsigned char)p[0];
    if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f) return 1;
    return c == 0xc2 && left > 1 && (unsigned char)p[1] < 0xa0 ? 2 : 0;
}

int out_text(struct span text, struct err *e)
{
    bool terminal = isatty(STDOUT_FILENO) == 1;
    for (size_t at = 0; at < text.len;) {
        size_t n = 0, control = 0;
        while (at + n < text.len && !(terminal && (control = control_len(text.ptr + at + n, text.len - at - n)) > 0))
            n++;
        if (fwrite(text.ptr + at, 1, n, stdout) != n) return out_failed(e);
        if (control && putchar('?') == EOF) return out_failed(e);
        at += n + control;
    }
    return out_flush(e);
}

int out_json(json_t *o, size_t flags, struct err *e)
{
    if (!o)
        return err_set(e, ERR_NOMEM,
                       "the JSON object cannot be built: out of memory, or a name in the checkpoint is "
                       "not valid UTF-8");
    int rc = json_dumpf(o, stdout, JSON_PRESERVE_ORDER | flags);
    json_decref(o);
    return rc < 0 || putchar('\n') == EOF ? out_failed(e) : out_flush(e);
}

/* ------------------------------------------------------------------------------------------------ input */

struct line_reader {
    EditLine *el; /* NULL: no terminal */
    History *history;
    HistEvent ev;
    char *plain; /* getline's */
    size_t plain_cap;
    struct buf text;
    bool more; /* inside a prompt of several lines */
};

/* Reads one character for the editor. A Ctrl-C may come to any thread and at any moment, so the flag is looked at
 * between short waits: no press is lost before a read that would not end. */
static int read_char(EditLine *el, wchar_t *out)
{
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    char s[4];
    size_t n = 0;
    (void)el;
    while (!interrupted) {
        int ready = poll(&in, 1, 50);
        if (ready < 0 && errno != EINTR) return -1;
        if (ready <= 0) continue;
        ssize_t got = read(STDIN_FILENO, s + n, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return (int)got;
        int len = utf8_step(s, ++n);
        if (len > 0) {
            *out = (wchar_t)utf8_code(s, len);
            return 1;
        }
        if (len == 0) n = 0; /* no UTF-8: not typed by a person */
    }
    return -1;
}

static char *prompt_of(EditLine *el)
{
    static char first[] = "> ", next[] = ". ";
    void *r = NULL;
    el_get(el, EL_CLIENTDATA, &r);
    return ((struct line_reader *)r)->more ? next : first;
}

int line_open(struct line_reader **out, struct err *e)
{
    struct line_reader *r;
    TRY(mem_new(&r, sizeof *r, e));
    if (isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1) {
        r->el = el_init("hearth", stdin, stdout, stderr);
        r->history = history_init();
        if (!r->el || !r->history) {
            line_close(&r);
            return err_set(e, ERR_NOMEM, "out of memory for the line editor");
        }
        history(r->history, &r->ev, H_SETSIZE, 1000);
        el_set(r->el, EL_CLIENTDATA, r);
        el_set(r->el, EL_PROMPT, prompt_of);
        el_set(r->el, EL_EDITOR, "emacs");
        el_set(r->el, EL_SIGNAL, 0);
        el_set(r->el, EL_GETCFN, read_char);
        el_set(r->el, EL_HIST, history, r->history);
    }
    *out = r;
    return OK;
}

void line_close(struct line_reader **handle)
{
    struct line_reader *r = *handle;
    if (!r) return;
    if (r->el) el_end(r->el);
    if (r->history) history_end(r->history);
    free(r->plain);
    buf_free(&r->text);
    free(r);
    *handle = NULL;
}

bool line_editing(const struct line_reader *r) { return r->el != NULL; }

/* One line as typed, NULL at the end. Ctrl-C drops what was typed; a second one on an empty line is the end. */
static const char *edit_line(struct line_reader *r, int *len)
{
    for (bool warned = false;;) {
        interrupt_taken();
        el_set(r->el, EL_PREP_TERM, 1); /* before the prompt shows, or what is typed at once goes astray */
        const char *line = el_gets(r->el, len);
        if (line) return line;
        bool interrupt = interrupt_taken();
        if (!interrupt) return NULL;
        const LineInfo *typed = el_line(r->el);
        bool empty = typed->lastchar == typed->buffer;
        el_reset(r->el);
        fputs("\n", stdout);
        if (r->more) {
            r->more = false;
            buf_free(&r->text);
            empty = false;
        }
        if (empty && warned) return NULL;
        warned = empty;
        if (empty) fputs("(Ctrl-C again or Ctrl-D ends the chat)\n", stdout);
        fflush(stdout);
    }
}

static const char *plain_line(struct line_reader *r, int *len)
{
    ssize_t n = getline(&r->plain, &r->plain_cap, stdin);
    if (n < 0 || n > INT32_MAX) return NULL;
    *len = (int)n;
    return r->plain;
}

int line_read(struct line_reader *r, struct span *line, struct err *e)
{
    buf_free(&r->text);
    r->more = false;
    for (;;) {
        int len = 0;
        const char *got = r->el ? edit_line(r, &len) : plain_line(r, &len);
        if (!got) {
            if (!r->el && ferror(stdin))
                return err_set(e, ERR_IO, "standard input cannot be read: %s", strerror(errno));
            if (!r->more) return 0;
            break;
        }
        while (len > 0 && (got[len - 1] == '\n' || got[len - 1] == '\r')) len--;
        bool goes_on = len > 0 && got[len - 1] == '\\';
        TRY(buf_append(&r->text, got, (size_t)(goes_on ? len - 1 : len)));
        if (!goes_on) break;
        TRY(buf_append(&r->text, "\n", 1));
        r->more = true;
    }
    r->more = false;
    *line = buf_span(&r->text);
    if (r->history && line->len) history(r->history, &r->ev, H_ENTER, r->text.data);
    return 1;
}

int read_stdin(struct buf *out, struct err *e)
{
    char block[65536];
    size_t n;
    while ((n = fread(block, 1, sizeof block, stdin)) > 0)
        if (buf_append(out, block, n) < 0) return err_set(e, ERR_NOMEM, "out of memory for standard input");
    return ferror(stdin) ? err_set(e, ERR_IO, "standard input cannot be read: %s", strerror(errno)) : OK;
}
