/* cmd_tokenize.c: hearth tokenize: text on standard input to ids on one line, and back. */
#include <stdlib.h>

#include "cli.h"

static int encode(const struct tokenizer *t, struct span text, bool no_bos, bool no_special, struct err *e)
{
    struct ids ids = {0};
    const struct mark all = {0, text.len};
    int rc = tokenizer_encode(t, text, &all, no_special && text.len ? 1 : 0, !no_bos, &ids, e);
    for (size_t i = 0; i < ids.len && rc == OK; i++) printf("%s%d", i ? " " : "", ids.id[i]);
    if (rc == OK) putchar('\n');
    ids_free(&ids);
    return rc == OK ? out_flush(e) : rc;
}

static int decode(const struct tokenizer *t, const char *list, bool no_special, struct err *e)
{
    struct buf text = {0};
    struct detok d = {0};
    struct ids ids = {0};
    int rc = parse_ids(&ids, "standard input", list, e);
    for (size_t i = 0; i < ids.len && rc == OK; i++) {
        if (ids.id[i] >= tokenizer_size(t))
            rc = err_set(e, ERR_INPUT, "id %zu is %d, the vocabulary runs from 0 to %d", i, ids.id[i],
                         tokenizer_size(t) - 1);
        else rc = detok_push(&d, t, ids.id[i], !no_special, &text);
    }
    if (rc == OK) rc = detok_end(&d, &text);
    if (rc == OK && text.len) fwrite(text.data, 1, text.len, stdout);
    ids_free(&ids);
    buf_free(&text);
    return rc == OK ? out_flush(e) : rc;
}

int cmd_tokenize(int argc, char **argv, struct err *e)
{
    bool back = false, no_bos = false, no_special = false;
    const char *model;
    const struct flag flags[] = {
        {"decode", 'd', FLAG_SWITCH, &back, 0, 0, NULL, "ids on standard input (spaces or commas between) to text"},
        {"no-bos", 0, FLAG_SWITCH, &no_bos, 0, 0, NULL, "no BOS id in front, even where the model wants one"},
        {"no-special", 0, FLAG_SWITCH, &no_special, 0, 0, NULL,
         "take control tokens in the text as plain text; with --decode, leave them out"},
    };
    const struct usage u = {
        "tokenize",
        "Turns text on standard input into token ids on one line, or ids into text.",
        "MODEL",
        flags,
        COUNT_OF(flags),
        "Control tokens written in the text, such as <|im_end|>, become their ids unless --no-special is given.\n"
        "Every byte of the input counts, the newline at its end too (printf leaves it out, echo does not).\n",
        "  printf 'Hello world' | hearth tokenize model.gguf\n"
        "  echo 19556 905 | hearth tokenize model.gguf --decode\n"};
    struct buf path = {0}, input = {0};
    struct tokenizer *t = NULL;
    int rc = flags_parse(&u, argc, argv, &model, e);
    if (rc) return rc < 0 ? rc : OK;
    rc = resolve_model(&path, model, e);
    if (rc == OK) rc = tokenizer_of_path(&t, path.data, e);
    if (rc == OK) rc = read_stdin(&input, e);
    if (rc == OK)
        rc = back ? decode(t, input.data ? input.data : "", no_special, e)
                  : encode(t, buf_span(&input), no_bos, no_special, e);
    tokenizer_close(&t);
    buf_free(&input);
    buf_free(&path);
    return rc;
}
