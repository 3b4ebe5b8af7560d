/* jinja_lex.c: a template's source as tokens, with Jinja's white space rules: trim_blocks (the newline after a block or
 * comment goes), lstrip_blocks (white space before a block that begins its line goes), '-' (all white space on that side
 * goes), '+' (nothing goes), and the last newline of the source goes. */
#include <stdlib.h>
#include <string.h>

#include "jinja_priv.h"

struct lexer {
    struct token_list *out;
    struct arena *arena;
    const char *p, *end; /* newlines are \n here */
    int line;
    const char *what;
    struct err *e;
    bool line_start; /* the last tag ended with a newline, or nothing came before */
    bool strip_next; /* the last tag ended with '-' */
};

static int push(struct lexer *x, struct token t)
{
    struct token_list *l = x->out;
    if (l->len == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 256;
        struct token *p = realloc(l->tok, cap * sizeof *p);
        if (!p) return err_set(x->e, ERR_NOMEM, "out of memory for a template");
        l->tok = p;
        l->cap = cap;
    }
    l->tok[l->len++] = t;
    return OK;
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}
static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static int count_lines(const char *p, const char *end)
{
    int n = 0;
    for (; p < end; p++) n += *p == '\n';
    return n;
}

/* Text up to `to`, where a tag with this sign after its brace begins (0: the end of the source). */
static int data(struct lexer *x, const char *to, char sign, bool is_var)
{
    const char *from = x->p, *end = to;
    if (x->strip_next)
        while (from < end && is_space(*from)) from++;
    if (sign == '-') {
        while (end > from && is_space(end[-1])) end--;
    } else if (sign != '+' && sign && !is_var) {
        const char *line = end;
        while (line > x->p && line[-1] != '\n') line--;
        bool begins = line > x->p || x->line_start;
        bool blank = true;
        for (const char *c = line; c < end; c++) blank &= is_space(*c);
        if (begins && blank && line >= from) end = line;
    }
    int line = x->line;
    x->line += count_lines(x->p, to);
    x->p = to;
    if (end <= from) return OK;
    return push(x, (struct token){.type = TOK_DATA, .line = line, .text = {from, (size_t)(end - from)}});
}

/* A quoted string with Python's escapes. */
static int string(struct lexer *x)
{
    char quote = *x->p++;
    const char *end = x->p;
    while (end < x->end && *end != quote) end += *end == '\\' && end + 1 < x->end ? 2 : 1;
    if (end >= x->end) return err_set(x->e, ERR_INPUT, "%s: line %d: a string is not closed", x->what, x->line);
    char *text = arena_alloc(x->arena, (size_t)(end - x->p) + 1);
    size_t n = 0;
    if (!text) return err_set(x->e, ERR_NOMEM, "out of memory for a template");
    int line = x->line;
    for (const char *c = x->p; c < end; c++) {
        static const char from[] = "ntr\\'\"abfv0", to[] = "\n\t\r\\'\"\a\b\f\v";
        if (*c != '\\') {
            text[n++] = *c;
            continue;
        }
        c++;
        const char *simple = *c ? strchr(from, *c) : NULL;
        int digits = *c == 'x' ? 2 : *c == 'u' ? 4 : *c == 'U' ? 8 : 0;
        if (digits && end - c > digits) {
            uint32_t cp = 0;
            for (int i = 1; i <= digits; i++) {
                char h = c[i];
                int v = is_digit(h)            ? h - '0'
                        : h >= 'a' && h <= 'f' ? h - 'a' + 10
                        : h >= 'A' && h <= 'F' ? h - 'A' + 10
                                               : -1;
                if (v < 0)
                    return err_set(x->e, ERR_INPUT, "%s: line %d: a bad \\%c escape in a string", x->what, line, *c);
                cp = cp * 16 + (uint32_t)v;
            }
            if (cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
                return err_set(x->e, ERR_INPUT, "%s: line %d: an escape names no character", x->what, line);
            n += (size_t)utf8_put(text + n, cp);
            c += digits;
        } else if (simple && *c != '0') {
            text[n++] = to[simple - from];
        } else if (*c == '0') {
            text[n++] = 0;
        } else if (*c == '\n') {
            continue; /* a line that goes on */
        } else {
            text[n++] = '\\';
            text[n++] = *c;
        }
    }
    x->line += count_lines(x->p, end);
    x->p = end + 1;
    return push(x, (struct token){.type = TOK_STR, .line = line, .text = {text, n}});
}

static int number(struct lexer *x)
{
    const char *from = x->p;
    struct token t = {.type = TOK_INT, .line = x->line};
    char digits[64];
    size_t n = 0;
    while (x->p < x->end && (is_digit(*x->p) || *x->p == '_' ||
                             (*x->p == '.' && t.type == TOK_INT && x->p + 1 < x->end && is_digit(x->p[1])) ||
                             ((*x->p == 'e' || *x->p == 'E') && x->p + 1 < x->end &&
                              (is_digit(x->p[1]) ||
                               ((x->p[1] == '-' || x->p[1] == '+') && x->p + 2 < x->end && is_digit(x->p[2])))))) {
        if (*x->p == '.' || *x->p == 'e' || *x->p == 'E') t.type = TOK_FLOAT;
        if ((*x->p == 'e' || *x->p == 'E') && !is_digit(x->p[1]) && n < sizeof digits - 1) digits[n++] = *x->p++;
        if (*x->p != '_' && n < sizeof digits - 1) digits[n++] = *x->p;
        x->p++;
    }
    digits[n] = 0;
    if (n >= sizeof digits - 1 || (t.type == TOK_INT && n > 18))
        return err_set(x->e, ERR_INPUT, "%s: line %d: the number %.*s is too long", x->what, x->line,
                       (int)(x->p - from < 40 ? x->p - from : 40), from);
    t.i = strtoll(digits, NULL, 10);
    t.f = strtod(digits, NULL);
    return push(x, t);
}

/* The inside of {{ }} or {% %} up to its end. */
static int tag(struct lexer *x, bool is_var)
{
    static const char *const ops[] = {"**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<",
                                      ">",  "=",  "(",  ")",  "[",  "]",  "{", "}", ".", ",", ":", "|"};
    int open = 0;
    char close = is_var ? '}' : '%';
    for (;;) {
        while (x->p < x->end && is_space(*x->p)) x->line += *x->p++ == '\n';
        if (x->p >= x->end) return err_set(x->e, ERR_INPUT, "%s: line %d: a tag is not closed", x->what, x->line);
        const char *c = x->p;
        size_t left = (size_t)(x->end - c);
        char sign = left > 2 && (*c == '-' || *c == '+') ? *c : 0;
        const char *at = sign ? c + 1 : c;
        if (open == 0 && x->end - at >= 2 && at[0] == close && at[1] == '}' && !(sign == '+' && is_var)) {
            x->p = at + 2;
            x->strip_next = sign == '-';
            x->line_start = false;
            if (!is_var && sign != '+' && sign != '-' && x->p < x->end && *x->p == '\n') {
                x->p++;
                x->line++;
                x->line_start = true;
            } else if (sign == '-') {
                const char *q = x->p;
                while (q < x->end && is_space(*q)) q++;
                x->line_start = q > x->p && q[-1] == '\n';
            }
            return push(x, (struct token){.type = is_var ? TOK_VAR_END : TOK_BLOCK_END, .line = x->line});
        }
        if (*c == '"' || *c == '\'') {
            TRY(string(x));
            continue;
        }
        if (is_digit(*c)) {
            TRY(number(x));
            continue;
        }
        if (is_name_char(*c)) {
            while (x->p < x->end && is_name_char(*x->p)) x->p++;
            TRY(push(x, (struct token){.type = TOK_NAME, .line = x->line, .text = {c, (size_t)(x->p - c)}}));
            continue;
        }
        size_t i = 0;
        while (i < COUNT_OF(ops) && (strlen(ops[i]) > left || memcmp(c, ops[i], strlen(ops[i])))) i++;
        if (i == COUNT_OF(ops))
            return err_set(x->e, ERR_INPUT, "%s: line %d: unexpected character '%c'", x->what, x->line, *c);
        if (strchr("([{", *c)) open++;
        if (strchr(")]}", *c) && open > 0) open--;
        x->p += strlen(ops[i]);
        TRY(push(x, (struct token){.type = TOK_OP, .line = x->line, .text = span_of(ops[i])}));
    }
}

static int comment(struct lexer *x)
{
    const char *c = x->p;
    while (c + 1 < x->end && !(c[0] == '#' && c[1] == '}')) c++;
    if (c + 1 >= x->end) return err_set(x->e, ERR_INPUT, "%s: line %d: a comment is not closed", x->what, x->line);
    x->strip_next = c > x->p && c[-1] == '-';
    bool plus = c > x->p && c[-1] == '+';
    x->line += count_lines(x->p, c);
    x->p = c + 2;
    x->line_start = false;
    if (!x->strip_next && !plus && x->p < x->end && *x->p == '\n') {
        x->p++;
        x->line++;
        x->line_start = true;
    }
    return OK;
}

/* At "{% raw": takes everything up to the matching endraw as data. False if this is no raw block. */
static bool raw_block(struct lexer *x, int *rc)
{
    const char *c = x->p;
    while (c < x->end && is_space(*c)) c++;
    if (x->end - c < 4 || memcmp(c, "raw", 3) || is_name_char(c[3])) return false;
    c += 3;
    while (c < x->end && is_space(*c)) c++;
    bool strip = c < x->end && *c == '-';
    if (strip || (c < x->end && *c == '+')) c++;
    if (x->end - c < 2 || c[0] != '%' || c[1] != '}') return false;
    c += 2;
    if (!strip && c < x->end && *c == '\n') c++;
    for (const char *q = c; q + 1 < x->end; q++) {
        if (q[0] != '{' || q[1] != '%') continue;
        const char *r = q + 2;
        char sign = r < x->end && (*r == '-' || *r == '+') ? *r++ : 0;
        while (r < x->end && is_space(*r)) r++;
        if (x->end - r < 6 || memcmp(r, "endraw", 6)) continue;
        r += 6;
        while (r < x->end && is_space(*r)) r++;
        bool strip_after = r < x->end && *r == '-';
        if (strip_after) r++;
        if (x->end - r < 2 || r[0] != '%' || r[1] != '}') continue;
        x->p = c;
        x->strip_next = strip;
        x->line_start = false;
        if ((*rc = data(x, q, sign ? sign : ' ', false)) < 0) return true;
        x->p = r + 2;
        x->strip_next = strip_after;
        if (!strip_after && x->p < x->end && *x->p == '\n') {
            x->p++;
            x->line++;
            x->line_start = true;
        }
        return true;
    }
    *rc = err_set(x->e, ERR_INPUT, "%s: line %d: raw is not closed", x->what, x->line);
    return true;
}

static int lex_all(struct lexer *x)
{
    while (x->p < x->end) {
        const char *c = x->p;
        while (c + 1 < x->end && !(c[0] == '{' && (c[1] == '{' || c[1] == '%' || c[1] == '#'))) c++;
        if (c + 1 >= x->end) {
            TRY(data(x, x->end, 0, false));
            break;
        }
        char kind = c[1], sign = x->end - c > 2 ? c[2] : ' ';
        bool is_var = kind == '{';
        TRY(data(x, c, sign == '-' || (sign == '+' && !is_var) ? sign : ' ', is_var));
        x->p += 2 + (sign == '-' || (sign == '+' && !is_var) || (sign == '+' && is_var));
        if (x->p > x->end) x->p = x->end;
        x->strip_next = false;
        if (kind == '#') {
            TRY(comment(x));
            continue;
        }
        int rc = OK;
        if (!is_var && raw_block(x, &rc)) {
            TRY(rc);
            continue;
        }
        TRY(push(x, (struct token){.type = is_var ? TOK_VAR_BEGIN : TOK_BLOCK_BEGIN, .line = x->line}));
        TRY(tag(x, is_var));
    }
    return push(x, (struct token){.type = TOK_EOF, .line = x->line});
}

int jinja_lex(struct token_list *out, struct arena *a, struct span source, const char *what, struct err *e)
{
    char *text = arena_alloc(a, source.len + 1);
    size_t n = 0;
    if (!text) return err_set(e, ERR_NOMEM, "out of memory for a template");
    for (size_t i = 0; i < source.len; i++) { /* every line end becomes \n */
        if (source.ptr[i] == '\r') {
            text[n++] = '\n';
            if (i + 1 < source.len && source.ptr[i + 1] == '\n') i++;
        } else {
            text[n++] = source.ptr[i];
        }
    }
    if (n > 0 && text[n - 1] == '\n') n--;
    struct lexer x = {
        .out = out, .arena = a, .p = text, .end = text + n, .line = 1, .what = what, .e = e, .line_start = true};
    return lex_all(&x);
}
