/* jinja_priv: what the interpreter's files share. jinja_lex.c cuts the source into tokens, jinja_parse.c makes the tree,
 * jinja_eval.c walks it; jinja_value.c holds values, printing and JSON; jinja_filter.c filters and tests, jinja_method.c
 * the methods of strings and dicts and the global functions.
 *
 * Errors while rendering are sticky: the first sets ev->rc, everything after returns at once with undefined. So an
 * expression reads as the value it gives. */
#ifndef HEARTH_JINJA_PRIV_H
#define HEARTH_JINJA_PRIV_H

#include "jinja.h"

/* ------------------------------------------------------------------------------------------------ tokens */

enum token_type {
    TOK_DATA,
    TOK_NAME,
    TOK_INT,
    TOK_FLOAT,
    TOK_STR,
    TOK_OP,
    TOK_VAR_BEGIN,
    TOK_VAR_END,
    TOK_BLOCK_BEGIN,
    TOK_BLOCK_END,
    TOK_EOF
};

struct token {
    enum token_type type;
    int line;
    struct span text; /* name, operator, decoded string or data */
    int64_t i;
    double f;
};

struct token_list {
    struct token *tok;
    size_t len, cap;
};

/* Tokens of a source; their texts lie in the arena. */
int jinja_lex(struct token_list *out, struct arena *a, struct span source, const char *what,
              struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ tree */

enum node_kind {
    /* expressions */
    N_CONST_STR,
    N_CONST_INT,
    N_CONST_FLOAT,
    N_CONST_BOOL,
    N_CONST_NONE,
    N_NAME,
    N_LIST,
    N_TUPLE,
    N_DICT,
    N_ATTR,
    N_ITEM,
    N_SLICE,
    N_CALL,
    N_FILTER,
    N_TEST,
    N_NOT,
    N_NEG,
    N_POS,
    N_AND,
    N_OR,
    N_BINARY,
    N_COMPARE,
    N_COND,
    N_CONCAT,
    /* statements */
    N_DATA,
    N_PRINT,
    N_IF,
    N_FOR,
    N_SET,
    N_SET_BLOCK,
    N_MACRO,
    N_CALL_BLOCK,
    N_FILTER_BLOCK,
    N_SCOPE,
    N_BREAK,
    N_CONTINUE
};

/* One node. What each kind keeps where:
 *   ATTR a.name  ITEM a[b]  SLICE a[b:c:d]  CALL a(list, kw)  FILTER/TEST name(a, list, kw)  NOT/NEG/POS a  AND/OR/BINARY a op b
 *   COMPARE a (op list item)...  COND a if b else c  CONCAT list  LIST/TUPLE list  DICT list key, value, ...
 *   IF b, body, other  FOR a target, b iterable, c filter, body, other  SET a target, b value  SET_BLOCK a target, body, list filters
 *   MACRO name, list parameters (NAME nodes), kw defaults, body  CALL_BLOCK a call, list parameters, body  FILTER_BLOCK list, body */
struct node {
    enum node_kind kind;
    int line;
    struct span name; /* names, operators, constants */
    int64_t i;
    double f;
    struct node *a, *b, *c, *d;
    struct node *list, *kw;    /* first of siblings */
    struct node *body, *other; /* first of statements */
    struct node *next;         /* sibling */
};

struct jinja {
    struct arena arena;
    char *what;
    struct node *body;
};

int jinja_build(struct jinja *t, const struct token_list *tokens, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ values */

enum value_kind {
    V_UNDEFINED,
    V_NONE,
    V_BOOL,
    V_INT,
    V_FLOAT,
    V_STR,
    V_LIST,
    V_TUPLE,
    V_DICT,
    V_NAMESPACE,
    V_MACRO,
    V_FUNC,
    V_LOOP
};

/* A string with its marks: one byte a byte, or NULL: none marked. */
struct str {
    const char *p;
    const uint8_t *marks;
    size_t len;
};

struct value {
    enum value_kind kind;
    bool markup; /* STR: it went through safe or escape; what is added to it is escaped first, as markupsafe does */
    union {
        bool b;
        int64_t i;
        double f;
        struct str s;      /* STR; UNDEFINED: the name that was not there */
        struct list *list; /* LIST, TUPLE */
        struct dict *dict; /* DICT, NAMESPACE */
        struct macro *macro;
        struct loop *loop;
        struct func *func;
    };
};

struct list {
    struct value *item;
    size_t len, cap;
    bool lazy; /* Python has a generator here: it can be walked, not measured, indexed or written as JSON */
};

struct dict {
    struct value *key, *val;
    size_t len, cap;
};

struct scope {
    struct scope *parent;
    struct dict vars;
};

struct macro {
    const struct node *node; /* MACRO or CALL_BLOCK */
    struct scope *scope;     /* where it was defined */
};

/* A global function, or a method bound to self. */
struct func {
    const char *name;
    struct value self;
    bool method;
};

struct loop {
    struct list *items;
    size_t index;
    int depth;
    struct value changed;
    bool has_changed;
};

/* Text under construction, in the arena: an error on the way leaves nothing to free. */
struct out {
    char *text;
    uint8_t *marks; /* [cap], meant as far as len */
    size_t len, cap;
};

struct eval {
    const struct jinja *t;
    struct arena arena;
    int rc; /* 0, or the code of the first error */
    struct err *e;
    int line; /* of the node that is evaluated */
    long steps;
    int depth;
    int64_t now;
    struct scope *root;
    struct out *out;
    _Alignas(16) char scratch[256]; /* see ev_alloc */
};

enum { MAX_STEPS = 20000000, MAX_DEPTH = 200 };
static const size_t jinja_max_bytes = 512u << 20, jinja_max_output = 64u << 20;

/* Arguments of a call, filter or test: positional, then by name. */
struct args {
    struct value *pos;
    size_t n;
    struct dict kw;
};

/* jinja_value.c */
struct value fail(struct eval *ev, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void *ev_alloc(struct eval *ev,
               size_t n); /* never NULL: past the limit it fails, and gives a scratch of at least n <= 256 bytes */
struct value v_undefined(struct span name);
struct value v_none(void);
struct value v_bool(bool b);
struct value v_int(int64_t i);
struct value v_float(double f);
struct value v_str(struct str s);
struct value v_text(struct eval *ev, const char *p, size_t n); /* copied, unmarked */
struct value v_list(struct eval *ev, enum value_kind kind);
struct value v_dict(struct eval *ev);
void list_push(struct eval *ev, struct list *l, struct value v);
void dict_set(struct eval *ev, struct dict *d, struct value key, struct value val);
bool dict_get(const struct dict *d, struct value key, struct value *out);
bool dict_get_str(const struct dict *d, const char *key, struct value *out);
struct str str_lit(const char *s);
struct str str_sub(struct str s, size_t from, size_t to);
struct str str_escape(struct eval *ev, struct str s); /* < > & ' " as HTML entities */
struct str str_concat(struct eval *ev, struct str a, struct str b);
/* a + b of strings; if one is markup, the other is escaped and the result is markup. */
struct value value_concat(struct eval *ev, struct value a, struct value b);
bool str_eq(struct str a, struct str b);
size_t str_chars(struct str s);            /* code points */
size_t str_at(struct str s, size_t index); /* byte offset of code point `index` */
bool truthy(struct value v);
bool values_equal(struct value a, struct value b);
/* -1, 0, 1; fails for kinds that have no order. */
int values_compare(struct eval *ev, struct value a, struct value b);
const char *kind_name(enum value_kind k);           /* as Python calls it */
struct str to_str(struct eval *ev, struct value v); /* Python's str() */
/* The members: of lists, tuples, strings (characters), dicts (keys); nothing for undefined; fails otherwise. */
struct list *to_items(struct eval *ev, struct value v);
struct value from_json(struct eval *ev, const json_t *j, bool marked, int depth);
struct json_style {
    int indent; /* -1: one line */
    struct str item_sep, key_sep;
    bool ascii, sort;
};
void write_json(struct eval *ev, struct out *o, struct value v, const struct json_style *style, int depth);
void out_str(struct eval *ev, struct out *o, struct str s);
struct str out_take(const struct out *o); /* its text as a string */

/* jinja_eval.c */
struct value evaluate(struct eval *ev, const struct node *n);
struct value call_value(struct eval *ev, struct value f, const struct args *a);
struct value get_attr(struct eval *ev, struct value v, struct span name);
struct value get_item(struct eval *ev, struct value v, struct value key);

/* jinja_filter.c */
struct value apply_filter(struct eval *ev, struct span name, struct value v, const struct args *a);
bool apply_test(struct eval *ev, struct span name, struct value v, const struct args *a);
/* Argument i, or the one by that name, or fallback. */
struct value arg(const struct args *a, size_t i, const char *name, struct value fallback);
int64_t arg_int(struct eval *ev, const struct args *a, size_t i, const char *name, int64_t fallback);

/* jinja_method.c */
bool is_method(struct value self, struct span name);
struct value call_func(struct eval *ev, const struct func *f, const struct args *a);
bool is_global(struct span name);
struct str str_strip(struct str s, const struct str *chars, bool left, bool right);
struct str str_replace(struct eval *ev, struct str s, struct str from, struct str to, int64_t count);
struct str str_case(struct eval *ev, struct str s, char how); /* 'u' upper 'l' lower 't' title 'c' capitalize */

#endif
