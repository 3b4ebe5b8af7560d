/* jinja_parse.c: tokens to a tree, by recursive descent in the order of precedence of Jinja's own parser. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jinja_priv.h"

enum { MAX_NESTING = 150 };

struct parser {
    struct jinja *t;
    const struct token *tok;
    int depth;
    struct err *e;
    bool failed;
};

static struct node *expression(struct parser *p);
static struct node *unary(struct parser *p, bool with_filter);
static struct node *statements(struct parser *p, const char *const *ends);

static struct node *error(struct parser *p, const char *why, struct span what)
{
    if (!p->failed) {
        if (what.len)
            err_set(p->e, ERR_UNSUPPORTED, "%s: line %d: %s '%.*s'", p->t->what, p->tok->line, why,
                    (int)(what.len < 80 ? what.len : 80), what.ptr);
        else err_set(p->e, ERR_INPUT, "%s: line %d: %s", p->t->what, p->tok->line, why);
    }
    p->failed = true;
    return NULL;
}

static struct node *node(struct parser *p, enum node_kind kind)
{
    struct node *n = arena_alloc(&p->t->arena, sizeof *n);
    if (!n) return error(p, "out of memory", (struct span){0});
    n->kind = kind;
    n->line = p->tok->line;
    return n;
}

static bool at_op(const struct parser *p, const char *op)
{
    return p->tok->type == TOK_OP && span_is(p->tok->text, op);
}
static bool at_name(const struct parser *p, const char *name)
{
    return p->tok->type == TOK_NAME && span_is(p->tok->text, name);
}

static bool take_op(struct parser *p, const char *op)
{
    if (!at_op(p, op)) return false;
    p->tok++;
    return true;
}

static bool take_name(struct parser *p, const char *name)
{
    if (!at_name(p, name)) return false;
    p->tok++;
    return true;
}

static bool want_op(struct parser *p, const char *op)
{
    if (p->failed || take_op(p, op)) return !p->failed;
    char why[48];
    snprintf(why, sizeof why, "'%s' is missing", op);
    error(p, why, (struct span){0});
    return false;
}

static bool want_end(struct parser *p)
{
    if (p->failed) return false;
    if (p->tok->type != TOK_BLOCK_END) {
        error(p, "unexpected text at the end of a statement", (struct span){0});
        return false;
    }
    p->tok++;
    return true;
}

static struct node *append(struct node ***tail, struct node *n)
{
    if (n) {
        **tail = n;
        *tail = &n->next;
    }
    return n;
}

/* ------------------------------------------------------------------------------------------------ expressions */

/* "(" was taken: positional arguments to list, named ones (NAME nodes with b = value) to kw. */
static void arguments(struct parser *p, struct node *call)
{
    struct node **pos = &call->list, **kw = &call->kw;
    while (!p->failed && !take_op(p, ")")) {
        if (at_op(p, "*") || at_op(p, "**")) {
            error(p, "unsupported argument unpacking", p->tok->text);
            return;
        }
        if (p->tok->type == TOK_NAME && p->tok[1].type == TOK_OP && span_is(p->tok[1].text, "=")) {
            struct node *n = node(p, N_NAME);
            if (!n) return;
            n->name = p->tok->text;
            p->tok += 2;
            n->b = expression(p);
            append(&kw, n);
        } else {
            append(&pos, expression(p));
        }
        if (!at_op(p, ")") && !want_op(p, ",")) return;
    }
}

/* Members up to `end`; trailing comma allowed. *comma: there was one at all. */
static void members(struct parser *p, struct node *into, const char *end, bool *comma)
{
    struct node **tail = &into->list;
    *comma = false;
    while (!p->failed && !take_op(p, end)) {
        append(&tail, expression(p));
        if (at_op(p, end)) continue;
        if (!want_op(p, ",")) return;
        *comma = true;
    }
}

static struct node *constant(struct parser *p, enum node_kind kind)
{
    struct node *n = node(p, kind);
    if (!n) return NULL;
    n->name = p->tok->text;
    n->i = p->tok->i;
    n->f = p->tok->f;
    p->tok++;
    return n;
}

static struct node *primary(struct parser *p)
{
    const struct token *t = p->tok;
    struct node *n;
    bool comma;
    switch (t->type) {
    case TOK_NAME:
        if (span_is(t->text, "true") || span_is(t->text, "True") || span_is(t->text, "false") ||
            span_is(t->text, "False")) {
            if ((n = constant(p, N_CONST_BOOL))) n->i = t->text.ptr[0] == 't' || t->text.ptr[0] == 'T';
            return n;
        }
        if (span_is(t->text, "none") || span_is(t->text, "None")) return constant(p, N_CONST_NONE);
        return constant(p, N_NAME);
    case TOK_INT: return constant(p, N_CONST_INT);
    case TOK_FLOAT: return constant(p, N_CONST_FLOAT);
    case TOK_STR:
        n = constant(p, N_CONST_STR);
        while (n && p->tok->type == TOK_STR) { /* adjacent strings are one */
            char *both = arena_alloc(&p->t->arena, n->name.len + p->tok->text.len + 1);
            if (!both) return error(p, "out of memory", (struct span){0});
            memcpy(both, n->name.ptr, n->name.len);
            memcpy(both + n->name.len, p->tok->text.ptr, p->tok->text.len);
            n->name = (struct span){both, n->name.len + p->tok->text.len};
            p->tok++;
        }
        return n;
    case TOK_OP:
        if (take_op(p, "(")) {
            if (!(n = node(p, N_TUPLE))) return NULL;
            members(p, n, ")", &comma);
            return n->list && !comma ? n->list : n;
        }
        if (take_op(p, "[")) {
            if ((n = node(p, N_LIST))) members(p, n, "]", &comma);
            return n;
        }
        if (take_op(p, "{")) {
            if (!(n = node(p, N_DICT))) return NULL;
            struct node **tail = &n->list;
            while (!p->failed && !take_op(p, "}")) {
                append(&tail, expression(p));
                if (!want_op(p, ":")) return NULL;
                append(&tail, expression(p));
                if (!at_op(p, "}") && !want_op(p, ",")) return NULL;
            }
            return n;
        }
        return error(p, "unexpected", t->text);
    default: return error(p, "an expression is missing", (struct span){0});
    }
}

/* After "[": an index or a slice. */
static struct node *subscript(struct parser *p, struct node *of)
{
    struct node *n = node(p, N_ITEM);
    if (!n) return NULL;
    n->a = of;
    if (!at_op(p, ":")) n->b = expression(p);
    if (take_op(p, "]")) return n;
    n->kind = N_SLICE;
    if (!want_op(p, ":")) return NULL;
    if (!at_op(p, ":") && !at_op(p, "]")) n->c = expression(p);
    if (take_op(p, ":") && !at_op(p, "]")) n->d = expression(p);
    return want_op(p, "]") ? n : NULL;
}

static struct node *postfix(struct parser *p, struct node *n)
{
    while (n && !p->failed) {
        struct node *m;
        if (take_op(p, ".")) {
            if (p->tok->type == TOK_INT) {
                if (!(m = node(p, N_ITEM))) return NULL;
                m->a = n;
                m->b = constant(p, N_CONST_INT);
            } else {
                if (p->tok->type != TOK_NAME) return error(p, "a name is missing after '.'", (struct span){0});
                if (!(m = constant(p, N_ATTR))) return NULL;
                m->a = n;
            }
            n = m;
        } else if (take_op(p, "[")) {
            n = subscript(p, n);
        } else if (take_op(p, "(")) {
            if (!(m = node(p, N_CALL))) return NULL;
            m->a = n;
            arguments(p, m);
            n = m;
        } else {
            break;
        }
    }
    return n;
}

/* The name of a filter or test (dotted names are not known), then its arguments. */
static struct node *named(struct parser *p, enum node_kind kind, struct node *of)
{
    if (p->tok->type != TOK_NAME) return error(p, "a filter's or test's name is missing", (struct span){0});
    struct node *n = constant(p, kind);
    if (!n) return NULL;
    n->a = of;
    if (take_op(p, "(")) {
        arguments(p, n);
    } else if (kind == N_TEST) {
        bool starts = p->tok->type == TOK_STR || p->tok->type == TOK_INT || p->tok->type == TOK_FLOAT ||
                      at_op(p, "[") || at_op(p, "{") ||
                      (p->tok->type == TOK_NAME && !at_name(p, "else") && !at_name(p, "or") && !at_name(p, "and") &&
                       !at_name(p, "if") && !at_name(p, "is") && !at_name(p, "in") && !at_name(p, "not"));
        if (starts) n->list = postfix(p, primary(p));
    }
    return n;
}

static struct node *filters(struct parser *p, struct node *n)
{
    while (n && !p->failed) {
        if (take_op(p, "|")) {
            n = named(p, N_FILTER, n);
        } else if (take_name(p, "is")) {
            bool negated = take_name(p, "not");
            n = named(p, N_TEST, n);
            if (n && negated) {
                struct node *m = node(p, N_NOT);
                if (m) m->a = n;
                n = m;
            }
        } else if (take_op(p, "(")) {
            struct node *m = node(p, N_CALL);
            if (!m) return NULL;
            m->a = n;
            arguments(p, m);
            n = m;
        } else {
            break;
        }
    }
    return n;
}

static struct node *unary(struct parser *p, bool with_filter)
{
    struct node *n;
    if (++p->depth > MAX_NESTING) return error(p, "expressions are nested too deeply", (struct span){0});
    if (at_op(p, "-") || at_op(p, "+")) {
        if ((n = node(p, at_op(p, "-") ? N_NEG : N_POS))) {
            p->tok++;
            n->a = unary(p, false);
        }
    } else {
        n = primary(p);
    }
    n = postfix(p, n);
    if (with_filter) n = filters(p, n);
    p->depth--;
    return n;
}

static struct node *binary(struct parser *p, struct node *a, struct node *(*right)(struct parser *))
{
    struct node *n = constant(p, N_BINARY);
    if (!n) return NULL;
    n->a = a;
    n->b = right(p);
    return n;
}

static struct node *plain_unary(struct parser *p) { return unary(p, true); }

static struct node *power(struct parser *p)
{
    struct node *n = plain_unary(p);
    while (n && !p->failed && at_op(p, "**")) n = binary(p, n, plain_unary);
    return n;
}

static struct node *product(struct parser *p)
{
    struct node *n = power(p);
    while (n && !p->failed && (at_op(p, "*") || at_op(p, "/") || at_op(p, "//") || at_op(p, "%")))
        n = binary(p, n, power);
    return n;
}

static struct node *concat(struct parser *p)
{
    struct node *n = product(p);
    if (!n || !at_op(p, "~")) return n;
    struct node *all = node(p, N_CONCAT), **tail;
    if (!all) return NULL;
    tail = &all->list;
    append(&tail, n);
    while (!p->failed && take_op(p, "~")) append(&tail, product(p));
    return all;
}

static struct node *sum(struct parser *p)
{
    struct node *n = concat(p);
    while (n && !p->failed && (at_op(p, "+") || at_op(p, "-"))) n = binary(p, n, concat);
    return n;
}

static struct node *comparison(struct parser *p)
{
    static const char *const ops[] = {"==", "!=", "<=", ">=", "<", ">"};
    struct node *n = sum(p), *chain = NULL, **tail = NULL;
    while (n && !p->failed) {
        struct span op = {0};
        for (size_t i = 0; i < COUNT_OF(ops); i++)
            if (at_op(p, ops[i])) op = p->tok->text;
        if (at_name(p, "in")) op = span_of("in");
        if (at_name(p, "not") && p->tok[1].type == TOK_NAME && span_is(p->tok[1].text, "in")) {
            op = span_of("not in");
            p->tok++;
        }
        if (!op.len) break;
        p->tok++;
        if (!chain) {
            if (!(chain = node(p, N_COMPARE))) return NULL;
            chain->a = n;
            tail = &chain->list;
            n = chain;
        }
        struct node *part = node(p, N_COMPARE);
        if (!part) return NULL;
        part->name = op;
        part->a = sum(p);
        append(&tail, part);
    }
    return n;
}

static struct node *negation(struct parser *p)
{
    if (!at_name(p, "not")) return comparison(p);
    if (++p->depth > MAX_NESTING) return error(p, "expressions are nested too deeply", (struct span){0});
    p->tok++;
    struct node *n = node(p, N_NOT);
    if (n) n->a = negation(p);
    p->depth--;
    return n;
}

static struct node *logical(struct parser *p, const char *word, enum node_kind kind,
                            struct node *(*part)(struct parser *))
{
    struct node *n = part(p);
    while (n && !p->failed && take_name(p, word)) {
        struct node *m = node(p, kind);
        if (!m) return NULL;
        m->a = n;
        m->b = part(p);
        n = m;
    }
    return n;
}

static struct node *conjunction(struct parser *p) { return logical(p, "and", N_AND, negation); }
static struct node *disjunction(struct parser *p) { return logical(p, "or", N_OR, conjunction); }

static struct node *expression(struct parser *p)
{
    if (++p->depth > MAX_NESTING) return error(p, "expressions are nested too deeply", (struct span){0});
    struct node *n = disjunction(p);
    while (n && !p->failed && take_name(p, "if")) {
        struct node *m = node(p, N_COND);
        if (!m) return NULL;
        m->a = n;
        m->b = disjunction(p);
        if (take_name(p, "else")) m->c = expression(p);
        n = m;
    }
    p->depth--;
    return p->failed ? NULL : n;
}

/* An expression, or several with commas between them: a tuple without parentheses. */
static struct node *tuple(struct parser *p)
{
    struct node *n = expression(p);
    if (!n || !at_op(p, ",")) return n;
    struct node *all = node(p, N_TUPLE), **tail;
    if (!all) return NULL;
    tail = &all->list;
    append(&tail, n);
    while (!p->failed && take_op(p, ",") && p->tok->type != TOK_BLOCK_END && p->tok->type != TOK_VAR_END)
        append(&tail, expression(p));
    return all;
}

/* ------------------------------------------------------------------------------------------------ statements */

/* What for and set assign to: a name, names with commas (in parentheses or not), or for set namespace.attribute. */
static struct node *target(struct parser *p, bool attributes)
{
    bool paren = take_op(p, "(");
    struct node *first = NULL, **tail = &first, *all;
    int n = 0;
    do {
        if (p->tok->type != TOK_NAME) return error(p, "a name to assign to is missing", (struct span){0});
        struct node *name = constant(p, N_NAME);
        if (name && attributes && take_op(p, ".")) {
            if (p->tok->type != TOK_NAME) return error(p, "a name is missing after '.'", (struct span){0});
            struct node *attr = constant(p, N_ATTR);
            if (attr) attr->a = name;
            name = attr;
        }
        append(&tail, name);
        n++;
    } while (!p->failed && take_op(p, ","));
    if (paren && !want_op(p, ")")) return NULL;
    if (n == 1) return first;
    if ((all = node(p, N_TUPLE))) all->list = first;
    return all;
}

static bool at_end_of(const struct parser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (at_name(p, *ends)) return true;
    return false;
}

/* The block's closing tag was reached: "endX" and "%}". */
static bool close_block(struct parser *p, const char *end)
{
    if (p->failed) return false;
    if (!take_name(p, end)) {
        char why[48];
        snprintf(why, sizeof why, "'%s' is missing", end);
        error(p, why, (struct span){0});
        return false;
    }
    while (p->tok->type == TOK_NAME) p->tok++; /* endmacro may repeat the name */
    return want_end(p);
}

static struct node *parse_if(struct parser *p)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct node *n = node(p, N_IF);
    if (!n) return NULL;
    n->b = tuple(p);
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    if (p->failed) return NULL;
    if (take_name(p, "elif")) {
        n->other = parse_if(p); /* it takes the endif */
        return n;
    }
    if (take_name(p, "else")) {
        if (!want_end(p)) return NULL;
        n->other = statements(p, ends + 2);
    }
    return close_block(p, "endif") ? n : NULL;
}

static struct node *parse_for(struct parser *p)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    struct node *n = node(p, N_FOR);
    if (!n) return NULL;
    n->a = target(p, false);
    if (p->failed) return NULL;
    if (!take_name(p, "in")) return error(p, "'in' is missing", (struct span){0});
    n->b = disjunction(p);
    if (n->b && at_op(p, ",")) return error(p, "unsupported tuple in", span_of("for"));
    if (take_name(p, "if")) n->c = expression(p);
    if (at_name(p, "recursive")) return error(p, "unsupported", p->tok->text);
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    if (!p->failed && take_name(p, "else")) {
        if (!want_end(p)) return NULL;
        n->other = statements(p, ends + 1);
    }
    return close_block(p, "endfor") ? n : NULL;
}

static struct node *parse_set(struct parser *p)
{
    static const char *const ends[] = {"endset", NULL};
    struct node *n = node(p, N_SET);
    if (!n) return NULL;
    n->a = target(p, true);
    if (p->failed) return NULL;
    if (take_op(p, "=")) {
        n->b = tuple(p);
        return want_end(p) ? n : NULL;
    }
    n->kind = N_SET_BLOCK;
    for (struct node **tail = &n->list; !p->failed && take_op(p, "|");) append(&tail, named(p, N_FILTER, NULL));
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    return close_block(p, "endset") ? n : NULL;
}

/* "(" a, b=1 ")" to NAME nodes with their defaults in b. */
static void parameters(struct parser *p, struct node *n)
{
    struct node **tail = &n->list;
    if (!want_op(p, "(")) return;
    while (!p->failed && !take_op(p, ")")) {
        if (p->tok->type != TOK_NAME) {
            error(p, "a parameter's name is missing", (struct span){0});
            return;
        }
        struct node *name = constant(p, N_NAME);
        if (name && take_op(p, "=")) name->b = expression(p);
        append(&tail, name);
        if (!at_op(p, ")") && !want_op(p, ",")) return;
    }
}

static struct node *parse_macro(struct parser *p)
{
    static const char *const ends[] = {"endmacro", NULL};
    if (p->tok->type != TOK_NAME) return error(p, "the macro's name is missing", (struct span){0});
    struct node *n = constant(p, N_MACRO);
    if (!n) return NULL;
    parameters(p, n);
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    return close_block(p, "endmacro") ? n : NULL;
}

static struct node *parse_call(struct parser *p)
{
    static const char *const ends[] = {"endcall", NULL};
    struct node *n = node(p, N_CALL_BLOCK);
    if (!n) return NULL;
    if (at_op(p, "(")) parameters(p, n);
    n->a = p->failed ? NULL : expression(p);
    if (n->a && n->a->kind != N_CALL) return error(p, "call needs a macro call", (struct span){0});
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    return close_block(p, "endcall") ? n : NULL;
}

static struct node *parse_filter(struct parser *p)
{
    static const char *const ends[] = {"endfilter", NULL};
    struct node *n = node(p, N_FILTER_BLOCK), **tail;
    if (!n) return NULL;
    tail = &n->list;
    do append(&tail, named(p, N_FILTER, NULL));
    while (!p->failed && take_op(p, "|"));
    if (!want_end(p)) return NULL;
    n->body = statements(p, ends);
    return close_block(p, "endfilter") ? n : NULL;
}

static struct node *parse_generation(struct parser *p)
{
    static const char *const ends[] = {"endgeneration", NULL};
    struct node *n = node(p, N_SCOPE);
    if (!n || !want_end(p)) return NULL;
    n->body = statements(p, ends);
    return close_block(p, "endgeneration") ? n : NULL;
}

static struct node *parse_jump(struct parser *p, enum node_kind kind)
{
    struct node *n = node(p, kind);
    return want_end(p) ? n : NULL;
}

static struct node *statement(struct parser *p)
{
    if (p->tok->type != TOK_NAME) return error(p, "a statement's name is missing", (struct span){0});
    if (take_name(p, "if")) return parse_if(p);
    if (take_name(p, "for")) return parse_for(p);
    if (take_name(p, "set")) return parse_set(p);
    if (take_name(p, "macro")) return parse_macro(p);
    if (take_name(p, "call")) return parse_call(p);
    if (take_name(p, "filter")) return parse_filter(p);
    if (take_name(p, "generation")) return parse_generation(p);
    if (take_name(p, "break")) return parse_jump(p, N_BREAK);
    if (take_name(p, "continue")) return parse_jump(p, N_CONTINUE);
    return error(p, "unsupported statement", p->tok->text);
}

/* Statements up to a tag that begins with one of `ends` (its name is the current token then), or to the end. */
static struct node *statements(struct parser *p, const char *const *ends)
{
    struct node *first = NULL, **tail = &first;
    if (++p->depth > MAX_NESTING) return error(p, "statements are nested too deeply", (struct span){0});
    while (!p->failed) {
        struct node *n;
        switch (p->tok->type) {
        case TOK_DATA: append(&tail, constant(p, N_DATA)); break;
        case TOK_VAR_BEGIN:
            p->tok++;
            if ((n = node(p, N_PRINT))) n->a = tuple(p);
            if (!p->failed && p->tok->type != TOK_VAR_END) return error(p, "'}}' is missing", (struct span){0});
            if (!p->failed) p->tok++;
            append(&tail, n);
            break;
        case TOK_BLOCK_BEGIN:
            p->tok++;
            if (ends && at_end_of(p, ends)) {
                p->depth--;
                return first;
            }
            append(&tail, statement(p));
            break;
        case TOK_EOF:
            if (ends) {
                while (ends[1]) ends++; /* the last of them closes the block */
                return error(p, "the template ends before", span_of(*ends));
            }
            p->depth--;
            return first;
        default: return error(p, "unexpected end of a tag", (struct span){0});
        }
    }
    return NULL;
}

int jinja_build(struct jinja *t, const struct token_list *tokens, struct err *e)
{
    struct parser p = {.t = t, .tok = tokens->tok, .e = e};
    t->body = statements(&p, NULL);
    return p.failed ? (e ? e->code : ERR_INPUT) : OK;
}

int jinja_parse(struct jinja **out, struct span source, const char *what, struct err *e)
{
    struct token_list tokens = {0};
    struct jinja *t;
    TRY(mem_new(&t, sizeof *t, e));
    t->what = arena_str(&t->arena, span_of(what));
    int rc = t->what ? OK : err_set(e, ERR_NOMEM, "out of memory for a template");
    if (rc == OK && !utf8_valid(source)) rc = err_set(e, ERR_INPUT, "%s: the template is not valid UTF-8", what);
    if (rc == OK) rc = jinja_lex(&tokens, &t->arena, source, what, e);
    if (rc == OK) rc = jinja_build(t, &tokens, e);
    free(tokens.tok);
    if (rc < 0) {
        jinja_close(&t);
        return rc;
    }
    *out = t;
    return OK;
}

void jinja_close(struct jinja **t)
{
    if (!*t) return;
    arena_free(&(*t)->arena);
    free(*t);
    *t = NULL;
}
