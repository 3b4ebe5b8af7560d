/* main.c: finds the verb, runs it, and turns its error into one line on stderr and exit code 1. */
#include <locale.h>
#include <langinfo.h>
#include <string.h>

#include "cli.h"

static const struct verb {
    const char *name, *summary;
    int (*run)(int argc, char **argv, struct err *e);
} verbs[] = {
    {"run", "answer a prompt, or chat", cmd_run},
    {"info", "show what a model is and what fits on this machine", cmd_info},
    {"tokenize", "text to token ids, and back", cmd_tokenize},
    {"logits", "write the logits of a forward pass to a .npy file", cmd_logits},
    {"perplexity", "measure how well a model predicts a text", cmd_perplexity},
    {"bench", "measure speed beside what the machine could do", cmd_bench},
};

enum { EXIT_INTERRUPTED = 130 };

static void print_help(FILE *out)
{
    fputs("Hearth runs a large language model on this machine.\n\nUsage: hearth VERB MODEL [flags]\n\nVerbs:\n", out);
    for (size_t i = 0; i < COUNT_OF(verbs); i++) fprintf(out, "  %-12s %s\n", verbs[i].name, verbs[i].summary);
    fputs("\nMODEL is a GGUF file, a checkpoint directory, or org/name in the local Hugging Face cache.\n"
          "hearth VERB --help shows the flags of a verb with examples; hearth --version the version.\n",
          out);
}

/* "run, info, ..." */
static int verb_list(struct buf *out)
{
    for (size_t i = 0; i < COUNT_OF(verbs); i++) TRY(buf_appendf(out, "%s%s", i ? ", " : "", verbs[i].name));
    return OK;
}

static int dispatch(int argc, char **argv, struct err *e)
{
    struct buf known = {0};
    if (argc < 2) {
        print_help(stderr);
        return err_set(e, ERR_INPUT, "no verb given");
    }
    if (!strcmp(argv[1], "--version")) {
        printf("hearth %s\n", HEARTH_VERSION);
        return out_flush(e);
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return out_flush(e);
    }
    for (size_t i = 0; i < COUNT_OF(verbs); i++)
        if (!strcmp(argv[1], verbs[i].name)) return verbs[i].run(argc - 1, argv + 1, e);
    if (verb_list(&known) < 0) return err_set(e, ERR_NOMEM, "out of memory");
    err_set(e, ERR_INPUT, "unknown %s '%s'; known: %s%s", argv[1][0] == '-' ? "flag" : "verb", argv[1], known.data,
            argv[1][0] == '-' ? ", --help, --version" : "");
    buf_free(&known);
    return ERR_INPUT;
}

/* The line editor reads multibyte characters by the locale; prompts are UTF-8 whatever the locale says. */
static void set_utf8(void)
{
    if (!setlocale(LC_CTYPE, "") || strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
}

int main(int argc, char **argv)
{
    struct err e = {0};
    set_utf8();
    int rc = dispatch(argc, argv, &e);
    if (rc >= 0) return 0;
    if (e.msg[0] || rc == ERR_NOMEM) fprintf(stderr, "hearth: %s\n", e.msg[0] ? e.msg : "out of memory");
    return rc == ERR_CANCELLED ? EXIT_INTERRUPTED : 1;
}
