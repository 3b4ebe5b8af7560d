/* flags.c: from a table of flags to parsed values, to --help, and to messages that list what is known. getopt_long
 * does the parsing; every wrong flag or value ends in one line that names it. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_FLAGS = 40, LONG_BASE = 1000, HELP_LETTER = 'h' };

int parse_number(const char *what, const char *text, double min, double max, double *out, struct err *e)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end)
        return err_set(e, ERR_INPUT, "%s '%s' is no number; %g to %g is accepted", what, text, min, max);
    if (!(v >= min && v <= max))
        return err_set(e, ERR_INPUT, "%s '%s' is out of range: %g to %g is accepted", what, text, min, max);
    *out = v;
    return OK;
}

int parse_int(const char *what, const char *text, double min, double max, int64_t *out, struct err *e)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end)
        return err_set(e, ERR_INPUT, "%s '%s' is no whole number; %.0f to %.0f is accepted", what, text, min, max);
    if (errno == ERANGE || (double)v < min || (double)v > max)
        return err_set(e, ERR_INPUT, "%s '%s' is out of range: %.0f to %.0f is accepted", what, text, min, max);
    *out = v;
    return OK;
}

int parse_ids(struct ids *out, const char *what, const char *list, struct err *e)
{
    static const char between[] = ", \t\r\n";
    for (const char *p = list + strspn(list, between); *p; p += strspn(p, between)) {
        char word[24];
        size_t len = strcspn(p, between);
        int64_t id;
        snprintf(word, sizeof word, "%.*s", (int)(len < sizeof word ? len : sizeof word - 1), p);
        TRY(parse_int(what, word, 0, INT32_MAX, &id, e));
        if (ids_push(out, (int32_t)id) < 0) return err_set(e, ERR_NOMEM, "out of memory for ids");
        p += len;
    }
    return OK;
}

static int store(const struct flag *f, const char *text, struct err *e)
{
    char what[64];
    snprintf(what, sizeof what, "--%s", f->name);
    switch (f->kind) {
    case FLAG_SWITCH: *(bool *)f->to = true; return OK;
    case FLAG_INT: return parse_int(what, text, f->min, f->max, f->to, e);
    case FLAG_NUMBER: return parse_number(what, text, f->min, f->max, f->to, e);
    case FLAG_TEXT: *(const char **)f->to = text; return OK;
    case FLAG_LIST: break;
    }
    struct flag_list *l = f->to;
    if (l->n == FLAG_LIST_MAX)
        return err_set(e, ERR_INPUT, "--%s is given more than %d times", f->name, FLAG_LIST_MAX);
    l->items[l->n++] = text;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ help */

static void print_flag(char letter, const char *name, const char *value, const char *help)
{
    char left[64], dash[8] = "    ";
    if (letter) snprintf(dash, sizeof dash, "-%c, ", letter);
    snprintf(left, sizeof left, "%s--%s%s%s", dash, name, value ? " " : "", value ? value : "");
    printf("  %-32s %s\n", left, help);
}

static void print_help(const struct usage *u)
{
    printf("Usage: hearth %s %s [flags]\n\n%s\n\nFlags:\n", u->verb, u->operands, u->summary);
    for (int i = 0; i < u->n_flags; i++)
        print_flag(u->flags[i].letter, u->flags[i].name, u->flags[i].value, u->flags[i].help);
    print_flag(HELP_LETTER, "help", NULL, "show this text");
    if (u->notes) printf("\n%s", u->notes);
    printf("\nExamples:\n%s", u->examples);
}

static int unknown_flag(const struct usage *u, const char *given, struct err *e)
{
    struct buf known = {0};
    int rc = OK;
    for (int i = 0; i < u->n_flags && rc == OK; i++) {
        if (u->flags[i].letter) rc = buf_appendf(&known, "-%c ", u->flags[i].letter);
        if (rc == OK) rc = buf_appendf(&known, "--%s ", u->flags[i].name);
    }
    if (rc == OK) rc = buf_appendf(&known, "--help");
    if (rc == OK) err_set(e, ERR_INPUT, "unknown flag %s of hearth %s; known: %s", given, u->verb, known.data);
    else err_set(e, rc, "out of memory");
    buf_free(&known);
    return e->code;
}

/* ------------------------------------------------------------------------------------------------ parsing */

static const struct flag *by_letter(const struct usage *u, int letter)
{
    for (int i = 0; i < u->n_flags; i++)
        if (u->flags[i].letter == letter) return &u->flags[i];
    return NULL;
}

/* getopt's '?' and ':' say too little: finds out what was wrong. */
static int bad_flag(const struct usage *u, int kind, char *const *argv, struct err *e)
{
    const struct flag *f = optopt >= LONG_BASE ? &u->flags[optopt - LONG_BASE] : optopt ? by_letter(u, optopt) : NULL;
    char given[8];
    if (f && kind == ':') return err_set(e, ERR_INPUT, "--%s needs a value: --%s %s", f->name, f->name, f->value);
    if (f) return err_set(e, ERR_INPUT, "--%s takes no value", f->name);
    if (!optopt) return unknown_flag(u, argv[optind - 1], e);
    snprintf(given, sizeof given, "-%c", optopt);
    return unknown_flag(u, given, e);
}

static int parse_operands(const struct usage *u, int argc, char **argv, const char **operands, struct err *e)
{
    const char *name = u->operands;
    int n = 0;
    for (; *name; n++) {
        size_t len = strcspn(name, " ");
        operands[n] = NULL;
        if (optind + n >= argc && *name == '[') break;
        if (optind + n >= argc)
            return err_set(e, ERR_INPUT, "%.*s is missing: hearth %s %s [flags]; see hearth %s --help", (int)len,
                           name, u->verb, u->operands, u->verb);
        operands[n] = argv[optind + n];
        name += len + strspn(name + len, " ");
    }
    if (optind + n < argc)
        return err_set(e, ERR_INPUT, "'%s' is one argument too many: hearth %s %s [flags]", argv[optind + n], u->verb,
                       u->operands);
    return OK;
}

int flags_parse(const struct usage *u, int argc, char **argv, const char **operands, struct err *e)
{
    struct option longs[MAX_FLAGS + 2] = {0};
    char shorts[2 * MAX_FLAGS + 4] = ":h";
    size_t n_shorts = 2;
    int got;
    for (int i = 0; i < u->n_flags; i++) {
        const struct flag *f = &u->flags[i];
        int has_value = f->kind == FLAG_SWITCH ? no_argument : required_argument;
        longs[i] = (struct option){f->name, has_value, NULL, LONG_BASE + i};
        if (f->letter) shorts[n_shorts++] = f->letter;
        if (f->letter && has_value) shorts[n_shorts++] = ':';
    }
    longs[u->n_flags] = (struct option){"help", no_argument, NULL, HELP_LETTER};
    opterr = 0;
    optind = 1;
    while ((got = getopt_long(argc, argv, shorts, longs, NULL)) != -1) {
        if (got == '?' || got == ':') return bad_flag(u, got, argv, e);
        if (got == HELP_LETTER) {
            print_help(u);
            TRY(out_flush(e));
            return 1;
        }
        const struct flag *f = got >= LONG_BASE ? &u->flags[got - LONG_BASE] : by_letter(u, got);
        TRY(store(f, optarg, e));
    }
    return parse_operands(u, argc, argv, operands, e);
}
