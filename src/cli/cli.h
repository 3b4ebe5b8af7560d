/* cli: the command line. One cmd_*.c a verb; what several verbs need stands in the other files of this room. Only
 * here are flags parsed, the environment read, and text and engine brought together.
 *
 * A verb returns OK or a negative code with its one-line message in `e`; main.c prints it after "hearth: " and exits
 * 1. A file that is to be written is opened before long work begins. */
#ifndef HEARTH_CLI_H
#define HEARTH_CLI_H

#include <stdio.h>

#include "base.h"
#include "chat.h"
#include "engine.h"
#include "model.h"
#include "tokenizer.h"

/* ------------------------------------------------------------------------------------------------ verbs */

int cmd_run(int argc, char **argv, struct err *e) MUST_CHECK;
int cmd_info(int argc, char **argv, struct err *e) MUST_CHECK;
int cmd_logits(int argc, char **argv, struct err *e) MUST_CHECK;
int cmd_tokenize(int argc, char **argv, struct err *e) MUST_CHECK;
int cmd_perplexity(int argc, char **argv, struct err *e) MUST_CHECK;
int cmd_bench(int argc, char **argv, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ flags.c */

enum flag_kind {
    FLAG_SWITCH, /* bool *: set to true */
    FLAG_INT,    /* int64_t *, within [min, max] */
    FLAG_NUMBER, /* double *, within [min, max] */
    FLAG_TEXT,   /* const char ** */
    FLAG_LIST    /* struct flag_list *: may be given again and again */
};
enum { FLAG_LIST_MAX = 512 };
struct flag_list {
    const char *items[FLAG_LIST_MAX];
    int n;
};
/* A flag of a verb; parsing and --help are made from the same line. */
struct flag {
    const char *name; /* without the dashes */
    char letter;      /* 0: only the long form */
    enum flag_kind kind;
    void *to; /* keeps what it held where the flag is not given */
    double min, max;
    const char *value; /* what --help calls the value */
    const char *help;
};
struct usage {
    const char *verb, *summary;
    const char *operands; /* "MODEL FILE": all must be given; "[MODEL]" may be left out, and is NULL then */
    const struct flag *flags;
    int n_flags;
    const char *notes, *examples; /* indented lines, each ending in a newline; notes may be NULL */
};
/* Parses argv (argv[0] is the verb). operands[i] are set in order; extra or missing ones are refused. Gives 1 when
 * --help was asked for and printed: the verb returns OK at once. */
int flags_parse(const struct usage *u, int argc, char **argv, const char **operands, struct err *e) MUST_CHECK;
/* text as a whole number or a number within [min, max]; the message names `what`, the text and the range. */
int parse_int(const char *what, const char *text, double min, double max, int64_t *out, struct err *e) MUST_CHECK;
int parse_number(const char *what, const char *text, double min, double max, double *out, struct err *e) MUST_CHECK;
/* Appends the ids of a list, commas or white space between them. */
int parse_ids(struct ids *out, const char *what, const char *list, struct err *e) MUST_CHECK;

/* The flags that every verb with an engine has. */
#define FLAG_THREADS(to)                                                                                             \
    {                                                                                                                \
        "threads", 't', FLAG_INT, to, 1, 4096, "N", "threads that compute (default: one a core)"                     \
    }
#define FLAG_CPU(to)                                                                                                 \
    {                                                                                                                \
        "cpu", 0, FLAG_TEXT, to, 0, 0, "LEVEL", "at most this level, such as avx2 or neon (default: the best here)"           \
    }
/* Begins as DEVICE_DEFAULT. */
#define FLAG_DEVICE(to)                                                                                              \
    {                                                                                                                \
        "device", 0, FLAG_TEXT, to, 0, 0, "NAME", "cpu or cuda:N (default: the first GPU if there is one)"           \
    }
#define DEVICE_DEFAULT "auto"
enum { MAX_CTX = 1 << 30 };

/* ------------------------------------------------------------------------------------------------ resolve.c */

/* A MODEL argument to the path of a file or directory: a path that exists, or org/name in the local Hugging Face
 * cache. Not found: the message says where it looked. */
int resolve_model(struct buf *path, const char *model, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ model_text.c */

/* The text side of an open model. */
int tokenizer_of_model(struct tokenizer **out, const struct model *m, struct err *e) MUST_CHECK;
/* *out is NULL, with OK, where the checkpoint has no chat template. */
int chat_of_model(struct chat **out, const struct model *m, const struct tokenizer *t, struct err *e) MUST_CHECK;
/* The tokenizer alone; of a checkpoint directory nothing but the tokenizer's files is needed. */
int tokenizer_of_path(struct tokenizer **out, const char *path, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ npy.c */

/* A NumPy file of float32 [rows, cols], written row by row. Open it before the work, end it after. */
struct npy {
    FILE *f;
    const char *path; /* borrowed */
    bool regular, begun;
};
/* Opens the file without touching what it holds. */
int npy_open(struct npy *n, const char *path, struct err *e) MUST_CHECK;
int npy_begin(struct npy *n, size_t rows, size_t cols, struct err *e) MUST_CHECK;
int npy_write(struct npy *n, const float *data, size_t count, struct err *e) MUST_CHECK;
/* Flushes and closes; a failed write shows here at the latest. */
int npy_end(struct npy *n, struct err *e) MUST_CHECK;
/* After a failure: closes, and removes a file that is empty or half-written. */
void npy_drop(struct npy *n);

/* ------------------------------------------------------------------------------------------------ terminal.c */

/* Catches Ctrl-C from here on. With `once` the second one ends the program as usual. */
void interrupt_catch(bool once);
/* True if Ctrl-C was pressed since the last call. */
bool interrupt_taken(void);

/* Writes to standard output and flushes. On a terminal, control characters in the text are shown as '?', so that no
 * model can drive the terminal. */
int out_text(struct span text, struct err *e) MUST_CHECK;
/* Prints o, which may be NULL when it could not be built, and releases it. */
int out_json(json_t *o, size_t flags, struct err *e) MUST_CHECK;
/* Flushes standard output: what could not be written is an error. */
int out_flush(struct err *e) MUST_CHECK;

/* Reads prompts: with editing and history on a terminal, plain lines elsewhere. */
struct line_reader;
int line_open(struct line_reader **out, struct err *e) MUST_CHECK;
void line_close(struct line_reader **r);
bool line_editing(const struct line_reader *r);
/* The next line without its end; a line that ends in a backslash goes on in the next. Gives 1, or 0 at the end of the
 * input. The span lives until the next call. */
int line_read(struct line_reader *r, struct span *line, struct err *e) MUST_CHECK;
/* All of standard input. */
int read_stdin(struct buf *out, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ answer.c */

/* What one request gave. */
struct answer {
    struct ids ids;      /* every id produced, the stop id too */
    struct buf text;     /* what was said, without control tokens */
    struct buf thinking; /* gpt-oss: the text of channels other than `final` */
    enum finish finish;
    size_t prompt_tokens, cached_tokens;
    double prefill_tok_s, decode_tok_s; /* 0: nothing to measure */
    double first_token_s, total_s;      /* from submit */
    double first_token_at;              /* clock_now of the first token */
};
void answer_free(struct answer *a);
const char *finish_name(enum finish f);
/* Runs one request to its end. With `show`, the text goes to standard output as it comes, ended by a newline; in a
 * `chat` the channels of gpt-oss are told apart. Ctrl-C ends the answer early (FINISH_CANCELLED). Stop ids are those
 * of the model and of the tokenizer. */
int answer_run(struct answer *out, struct engine *en, const struct tokenizer *tok, const struct ids *prompt,
               int max_new, const struct sampling *sampling, bool chat, bool show, struct err *e) MUST_CHECK;
/* One line on stderr: prompt tokens and speed, new tokens and speed. */
void answer_print_speed(const struct answer *a);

#endif
