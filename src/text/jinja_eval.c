/* jinja_eval.c: walks the tree. Scopes follow Jinja: a loop's body and a macro have their own, an if has none. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "jinja_priv.h"

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

static enum flow execute(struct eval *ev, const struct node *n, struct scope *sc);
static struct value eval_in(struct eval *ev, const struct node *n, struct scope *sc);

static struct str name_str(const struct node *n) { return (struct str){n->name.ptr, NULL, n->name.len}; }

static bool count_step(struct eval *ev, const struct node *n)
{
    ev->line = n->line;
    if (++ev->steps > MAX_STEPS) fail(ev, ERR_INPUT, "the template runs for more than %d steps", MAX_STEPS);
    return !ev->rc;
}

static struct value lookup(struct eval *ev, struct span name, struct scope *sc)
{
    struct value v, key = v_str((struct str){name.ptr, NULL, name.len});
    for (; sc; sc = sc->parent)
        if (dict_get(&sc->vars, key, &v)) return v;
    if (is_global(name)) {
        struct func *f = ev_alloc(ev, sizeof *f);
        char *copy = ev_alloc(ev, name.len + 1);
        if (ev->rc) return v_undefined(name);
        memcpy(copy, name.ptr, name.len);
        copy[name.len] = 0;
        *f = (struct func){.name = copy};
        return (struct value){.kind = V_FUNC, .func = f};
    }
    return v_undefined(name);
}

/* ------------------------------------------------------------------------------------------------ members */

static struct value loop_attr(struct eval *ev, struct loop *l, struct span name)
{
    size_t i = l->index, n = l->items->len;
    if (span_is(name, "index")) return v_int((int64_t)i + 1);
    if (span_is(name, "index0")) return v_int((int64_t)i);
    if (span_is(name, "revindex")) return v_int((int64_t)(n - i));
    if (span_is(name, "revindex0")) return v_int((int64_t)(n - i - 1));
    if (span_is(name, "first")) return v_bool(i == 0);
    if (span_is(name, "last")) return v_bool(i + 1 == n);
    if (span_is(name, "length")) return v_int((int64_t)n);
    if (span_is(name, "depth")) return v_int(l->depth);
    if (span_is(name, "depth0")) return v_int(l->depth - 1);
    if (span_is(name, "previtem")) return i > 0 ? l->items->item[i - 1] : v_undefined(name);
    if (span_is(name, "nextitem")) return i + 1 < n ? l->items->item[i + 1] : v_undefined(name);
    if (span_is(name, "cycle") || span_is(name, "changed")) {
        struct func *f = ev_alloc(ev, sizeof *f);
        *f = (struct func){.name = span_is(name, "cycle") ? "cycle" : "changed",
                           .self = {.kind = V_LOOP, .loop = l},
                           .method = true};
        return (struct value){.kind = V_FUNC, .func = f};
    }
    return v_undefined(name);
}

static struct value bind(struct eval *ev, struct value self, struct span name)
{
    struct func *f = ev_alloc(ev, sizeof *f);
    char *copy = ev_alloc(ev, name.len + 1);
    if (ev->rc || !copy) return v_undefined(name);
    memcpy(copy, name.ptr, name.len);
    copy[name.len] = 0;
    *f = (struct func){.name = copy, .self = self, .method = true};
    return (struct value){.kind = V_FUNC, .func = f};
}

struct value get_attr(struct eval *ev, struct value v, struct span name)
{
    struct value out;
    if (v.kind == V_UNDEFINED)
        return fail(ev, ERR_INPUT, "'%.*s' is undefined (asked for '%.*s')", (int)v.s.len, v.s.p, (int)name.len,
                    name.ptr);
    if (v.kind == V_LOOP) return loop_attr(ev, v.loop, name);
    if (is_method(v, name)) return bind(ev, v, name);
    if ((v.kind == V_DICT || v.kind == V_NAMESPACE) &&
        dict_get(v.dict, v_str((struct str){name.ptr, NULL, name.len}), &out))
        return out;
    return v_undefined(name);
}

struct value get_item(struct eval *ev, struct value v, struct value key)
{
    struct value out;
    struct span name = {0};
    if (key.kind == V_STR) name = (struct span){key.s.p, key.s.len};
    if (v.kind == V_UNDEFINED)
        return fail(ev, ERR_INPUT, "'%.*s' is undefined (asked for an item)", (int)v.s.len, v.s.p);
    if (v.kind == V_DICT && dict_get(v.dict, key, &out)) return out;
    if ((v.kind == V_LIST || v.kind == V_TUPLE || v.kind == V_STR) && (key.kind == V_INT || key.kind == V_BOOL)) {
        int64_t n = v.kind == V_STR ? (int64_t)str_chars(v.s) : (int64_t)v.list->len,
                i = key.kind == V_INT ? key.i : key.b;
        if (i < 0) i += n;
        if (i < 0 || i >= n) return v_undefined((struct span){"index", 5});
        if (v.kind != V_STR) return v.list->item[i];
        return v_str(str_sub(v.s, str_at(v.s, (size_t)i), str_at(v.s, (size_t)i + 1)));
    }
    if (key.kind == V_STR) return get_attr(ev, v, name);
    return v_undefined(name);
}

static struct value slice(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct value of = eval_in(ev, n->a, sc), bound[3];
    const struct node *parts[3] = {n->b, n->c, n->d};
    for (int i = 0; i < 3; i++) {
        bound[i] = parts[i] ? eval_in(ev, parts[i], sc) : v_none();
        if (!ev->rc && bound[i].kind != V_NONE && bound[i].kind != V_INT)
            return fail(ev, ERR_INPUT, "a slice's bounds are integers or none, not %s", kind_name(bound[i].kind));
    }
    if (ev->rc) return of;
    if (of.kind == V_UNDEFINED)
        return fail(ev, ERR_INPUT, "'%.*s' is undefined (asked for a slice)", (int)of.s.len, of.s.p);
    if (of.kind != V_STR && of.kind != V_LIST && of.kind != V_TUPLE)
        return fail(ev, ERR_INPUT, "a %s cannot be sliced", kind_name(of.kind));
    struct list *items = to_items(ev, of);
    int64_t len = (int64_t)items->len, step = bound[2].kind == V_INT ? bound[2].i : 1;
    if (step == 0) return fail(ev, ERR_INPUT, "slice step cannot be zero");
    int64_t lo = step > 0 ? 0 : -1, hi = step > 0 ? len : len - 1, from, to;
    from = bound[0].kind == V_INT ? bound[0].i + (bound[0].i < 0 ? len : 0) : step > 0 ? lo : hi;
    to = bound[1].kind == V_INT ? bound[1].i + (bound[1].i < 0 ? len : 0) : step > 0 ? hi : lo;
    from = from < lo ? lo : from > hi ? hi : from;
    to = to < lo ? lo : to > hi ? hi : to;
    if (of.kind == V_STR && step == 1)
        return v_str(from >= to ? str_lit("") : str_sub(of.s, str_at(of.s, (size_t)from), str_at(of.s, (size_t)to)));
    struct value out = v_list(ev, of.kind == V_STR ? V_LIST : of.kind);
    for (int64_t i = from; (step > 0 ? i < to : i > to) && !ev->rc; i += step)
        list_push(ev, out.list, items->item[i]);
    if (of.kind != V_STR) return out;
    struct out o = {0};
    for (size_t i = 0; i < out.list->len; i++) out_str(ev, &o, out.list->item[i].s);
    return v_str(out_take(&o));
}

/* ------------------------------------------------------------------------------------------------ operators */

static bool is_number(struct value v) { return v.kind == V_INT || v.kind == V_FLOAT || v.kind == V_BOOL; }
static double as_double(struct value v) { return v.kind == V_FLOAT ? v.f : v.kind == V_INT ? (double)v.i : v.b; }
static int64_t as_int(struct value v) { return v.kind == V_INT ? v.i : v.b; }

static struct value int_arithmetic(struct eval *ev, struct span op, int64_t x, int64_t y)
{
    int64_t r = 0;
    bool over = false;
    if (span_is(op, "+")) over = __builtin_add_overflow(x, y, &r);
    else if (span_is(op, "-")) over = __builtin_sub_overflow(x, y, &r);
    else if (span_is(op, "*")) over = __builtin_mul_overflow(x, y, &r);
    else if (span_is(op, "**")) {
        if (y < 0) return v_float(pow((double)x, (double)y));
        r = 1;
        for (int64_t i = 0; i < y && !over && !(r == 0 || (r == 1 && i > 0 && x == 1)); i++)
            over = __builtin_mul_overflow(r, x, &r);
    } else { /* / // % */
        if (y == 0) return fail(ev, ERR_INPUT, "division by zero");
        if (span_is(op, "/")) return v_float((double)x / (double)y);
        if (y == -1) over = span_is(op, "//") && __builtin_sub_overflow((int64_t)0, x, &r); /* x % -1 is 0 */
        else {
            int64_t q = x / y, m = x % y;
            if (m != 0 && (m < 0) != (y < 0)) q--, m += y;
            r = span_is(op, "//") ? q : m;
        }
    }
    return over ? fail(ev, ERR_UNSUPPORTED, "an integer grows past 64 bits, which is not supported") : v_int(r);
}

static struct value float_arithmetic(struct eval *ev, struct span op, double x, double y)
{
    if (span_is(op, "+")) return v_float(x + y);
    if (span_is(op, "-")) return v_float(x - y);
    if (span_is(op, "*")) return v_float(x * y);
    if (span_is(op, "**")) return v_float(pow(x, y));
    if (y == 0) return fail(ev, ERR_INPUT, "float division by zero");
    if (span_is(op, "/")) return v_float(x / y);
    double m = fmod(x, y);
    if (m != 0 && (m < 0) != (y < 0)) m += y;
    return span_is(op, "%") ? v_float(m) : v_float(floor((x - m) / y + 0.5));
}

static struct value repeat(struct eval *ev, struct value v, int64_t times)
{
    if (v.kind == V_STR) {
        struct out o = {0};
        for (int64_t i = 0; i < times && !ev->rc && v.s.len; i++) out_str(ev, &o, v.s);
        return v_str(out_take(&o));
    }
    struct value out = v_list(ev, v.kind);
    for (int64_t i = 0; i < times && !ev->rc && v.list->len; i++)
        for (size_t j = 0; j < v.list->len; j++) list_push(ev, out.list, v.list->item[j]);
    return out;
}

static struct value binary(struct eval *ev, struct span op, struct value a, struct value b)
{
    if (ev->rc) return a;
    if (is_number(a) && is_number(b)) {
        if (a.kind == V_FLOAT || b.kind == V_FLOAT) return float_arithmetic(ev, op, as_double(a), as_double(b));
        return int_arithmetic(ev, op, as_int(a), as_int(b));
    }
    if (span_is(op, "+") && a.kind == V_STR && b.kind == V_STR) return value_concat(ev, a, b);
    if (span_is(op, "+") && (a.kind == V_LIST || a.kind == V_TUPLE) && a.kind == b.kind) {
        struct value out = v_list(ev, a.kind);
        for (size_t i = 0; i < a.list->len; i++) list_push(ev, out.list, a.list->item[i]);
        for (size_t i = 0; i < b.list->len; i++) list_push(ev, out.list, b.list->item[i]);
        return out;
    }
    if (span_is(op, "*") && (a.kind == V_STR || a.kind == V_LIST || a.kind == V_TUPLE) &&
        (b.kind == V_INT || b.kind == V_BOOL))
        return repeat(ev, a, as_int(b));
    if (span_is(op, "*") && (b.kind == V_STR || b.kind == V_LIST || b.kind == V_TUPLE) &&
        (a.kind == V_INT || a.kind == V_BOOL))
        return repeat(ev, b, as_int(a));
    if (span_is(op, "%") && a.kind == V_STR) {
        struct args args = {.pos = b.kind == V_TUPLE ? b.list->item : &b, .n = b.kind == V_TUPLE ? b.list->len : 1};
        return apply_filter(ev, span_of("format"), a, &args);
    }
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED) {
        struct value u = a.kind == V_UNDEFINED ? a : b;
        return fail(ev, ERR_INPUT, "'%.*s' is undefined", (int)u.s.len, u.s.p);
    }
    return fail(ev, ERR_INPUT, "unsupported operand type(s) for %.*s: '%s' and '%s'", (int)op.len, op.ptr,
                kind_name(a.kind), kind_name(b.kind));
}

static bool contains(struct eval *ev, struct value item, struct value in)
{
    struct value ignored;
    if (in.kind == V_STR) {
        if (item.kind != V_STR) {
            fail(ev, ERR_INPUT, "'in <string>' requires string as left operand, not %s", kind_name(item.kind));
            return false;
        }
        return item.s.len == 0 || (in.s.len >= item.s.len && memmem(in.s.p, in.s.len, item.s.p, item.s.len));
    }
    if (in.kind == V_DICT) return dict_get(in.dict, item, &ignored);
    struct list *l = to_items(ev, in);
    for (size_t i = 0; i < l->len; i++)
        if (values_equal(l->item[i], item)) return true;
    return false;
}

static struct value compare(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct value left = eval_in(ev, n->a, sc);
    for (const struct node *part = n->list; part && !ev->rc; part = part->next) {
        struct value right = eval_in(ev, part->a, sc);
        struct span op = part->name;
        bool yes;
        if (ev->rc) break;
        if (span_is(op, "==")) yes = values_equal(left, right);
        else if (span_is(op, "!=")) yes = !values_equal(left, right);
        else if (span_is(op, "in")) yes = contains(ev, left, right);
        else if (span_is(op, "not in")) yes = !contains(ev, left, right);
        else {
            int c = values_compare(ev, left, right);
            yes = span_is(op, "<") ? c < 0 : span_is(op, ">") ? c > 0 : span_is(op, "<=") ? c <= 0 : c >= 0;
        }
        if (!yes) return v_bool(false);
        left = right;
    }
    return v_bool(true);
}

/* ------------------------------------------------------------------------------------------------ calls */

static struct args arguments(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct value pos = v_list(ev, V_LIST), kw = v_dict(ev);
    for (const struct node *a = n->list; a && !ev->rc; a = a->next) list_push(ev, pos.list, eval_in(ev, a, sc));
    for (const struct node *a = n->kw; a && !ev->rc; a = a->next)
        dict_set(ev, kw.dict, v_str(name_str(a)), eval_in(ev, a->b, sc));
    return (struct args){.pos = pos.list->item, .n = pos.list->len, .kw = *kw.dict};
}

/* Runs the body of a macro or call block with its parameters; caller: what `caller` is inside, or undefined. */
static struct value call_macro(struct eval *ev, const struct macro *m, const struct args *a, struct value caller)
{
    struct scope *sc = ev_alloc(ev, sizeof *sc);
    struct out o = {0}, *saved = ev->out;
    size_t i = 0, used = 0;
    if (ev->depth > MAX_DEPTH / 2) return fail(ev, ERR_INPUT, "macros call each other too deeply");
    *sc = (struct scope){.parent = m->scope};
    for (const struct node *p = m->node->list; p && !ev->rc; p = p->next, i++) {
        struct value v;
        if (i < a->n) v = a->pos[i];
        else if (dict_get(&a->kw, v_str(name_str(p)), &v)) used++;
        else v = p->b ? eval_in(ev, p->b, sc) : v_undefined(p->name);
        dict_set(ev, &sc->vars, v_str(name_str(p)), v);
    }
    if (!ev->rc && (a->n > i || used < a->kw.len))
        return fail(ev, ERR_INPUT, "macro '%.*s' is called with arguments that it does not take",
                    (int)m->node->name.len, m->node->name.ptr);
    if (caller.kind == V_MACRO) dict_set(ev, &sc->vars, v_str(str_lit("caller")), caller);
    ev->out = &o;
    ev->depth++;
    execute(ev, m->node->body, sc);
    ev->depth--;
    ev->out = saved;
    return v_str(out_take(&o));
}

struct value call_value(struct eval *ev, struct value f, const struct args *a)
{
    if (ev->rc) return f;
    if (f.kind == V_MACRO) return call_macro(ev, f.macro, a, v_undefined((struct span){0}));
    if (f.kind == V_FUNC) return call_func(ev, f.func, a);
    if (f.kind == V_UNDEFINED)
        return fail(ev, ERR_INPUT, "'%.*s' is undefined and cannot be called", (int)f.s.len, f.s.p);
    return fail(ev, ERR_INPUT, "a %s cannot be called", kind_name(f.kind));
}

static struct value literal(struct eval *ev, const struct node *n, struct scope *sc)
{
    if (n->kind == N_DICT) {
        struct value d = v_dict(ev);
        for (const struct node *k = n->list; k && k->next && !ev->rc; k = k->next->next) {
            struct value key = eval_in(ev, k, sc);
            dict_set(ev, d.dict, key, eval_in(ev, k->next, sc));
        }
        return d;
    }
    struct value l = v_list(ev, n->kind == N_LIST ? V_LIST : V_TUPLE);
    for (const struct node *item = n->list; item && !ev->rc; item = item->next)
        list_push(ev, l.list, eval_in(ev, item, sc));
    return l;
}

static struct value negate(struct eval *ev, struct value v, bool minus)
{
    if (ev->rc) return v;
    if (v.kind == V_FLOAT) return v_float(minus ? -v.f : v.f);
    if (v.kind == V_INT || v.kind == V_BOOL) return int_arithmetic(ev, span_of(minus ? "-" : "+"), 0, as_int(v));
    return fail(ev, ERR_INPUT, "bad operand type for unary %c: '%s'", minus ? '-' : '+', kind_name(v.kind));
}

static struct value eval_node(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct value v;
    struct args a;
    switch (n->kind) {
    case N_CONST_STR: return v_str(name_str(n));
    case N_CONST_INT: return v_int(n->i);
    case N_CONST_FLOAT: return v_float(n->f);
    case N_CONST_BOOL: return v_bool(n->i != 0);
    case N_CONST_NONE: return v_none();
    case N_NAME: return lookup(ev, n->name, sc);
    case N_LIST:
    case N_TUPLE:
    case N_DICT: return literal(ev, n, sc);
    case N_ATTR:
        v = eval_in(ev, n->a, sc);
        ev->line = n->line;
        return ev->rc ? v : get_attr(ev, v, n->name);
    case N_ITEM: {
        v = eval_in(ev, n->a, sc);
        struct value key = eval_in(ev, n->b, sc);
        ev->line = n->line;
        return ev->rc ? v : get_item(ev, v, key);
    }
    case N_SLICE: return slice(ev, n, sc);
    case N_CALL:
        v = eval_in(ev, n->a, sc);
        a = arguments(ev, n, sc);
        ev->line = n->line;
        return call_value(ev, v, &a);
    case N_FILTER:
    case N_TEST:
        v = eval_in(ev, n->a, sc);
        a = arguments(ev, n, sc);
        ev->line = n->line;
        if (ev->rc) return v;
        return n->kind == N_FILTER ? apply_filter(ev, n->name, v, &a) : v_bool(apply_test(ev, n->name, v, &a));
    case N_NOT: return v_bool(!truthy(eval_in(ev, n->a, sc)));
    case N_NEG:
    case N_POS: return negate(ev, eval_in(ev, n->a, sc), n->kind == N_NEG);
    case N_AND: v = eval_in(ev, n->a, sc); return truthy(v) ? eval_in(ev, n->b, sc) : v;
    case N_OR: v = eval_in(ev, n->a, sc); return truthy(v) ? v : eval_in(ev, n->b, sc);
    case N_BINARY: {
        v = eval_in(ev, n->a, sc);
        struct value right = eval_in(ev, n->b, sc);
        ev->line = n->line;
        return binary(ev, n->name, v, right);
    }
    case N_COMPARE: return compare(ev, n, sc);
    case N_COND:
        if (truthy(eval_in(ev, n->b, sc))) return eval_in(ev, n->a, sc);
        return n->c ? eval_in(ev, n->c, sc) : v_undefined(span_of("the inline if-expression without else"));
    case N_CONCAT: {
        struct str s = {"", NULL, 0}; /* plain, even of markup: str() of each part */
        for (const struct node *part = n->list; part && !ev->rc; part = part->next)
            s = str_concat(ev, s, to_str(ev, eval_in(ev, part, sc)));
        return v_str(s);
    }
    default: return fail(ev, ERR_UNSUPPORTED, "a statement stands where a value should");
    }
}

static struct value eval_in(struct eval *ev, const struct node *n, struct scope *sc)
{
    if (!n || !count_step(ev, n)) return v_undefined((struct span){0});
    if (++ev->depth > MAX_DEPTH) {
        ev->depth--;
        return fail(ev, ERR_INPUT, "expressions are nested too deeply");
    }
    struct value v = eval_node(ev, n, sc);
    ev->depth--;
    return v;
}

/* ------------------------------------------------------------------------------------------------ statements */

static void assign(struct eval *ev, const struct node *target, struct value v, struct scope *sc)
{
    if (ev->rc) return;
    if (target->kind == N_NAME) {
        dict_set(ev, &sc->vars, v_str(name_str(target)), v);
    } else if (target->kind == N_ATTR) {
        struct value ns = lookup(ev, target->a->name, sc);
        if (ns.kind != V_NAMESPACE)
            fail(ev, ERR_INPUT, "cannot assign attribute '%.*s' on non-namespace object", (int)target->name.len,
                 target->name.ptr);
        else dict_set(ev, ns.dict, v_str(name_str(target)), v);
    } else {
        struct list *items = to_items(ev, v);
        size_t i = 0, n = 0;
        for (const struct node *t = target->list; t; t = t->next) n++;
        if (!ev->rc && items->len != n)
            fail(ev, ERR_INPUT, "%zu values cannot be unpacked to %zu names", items->len, n);
        for (const struct node *t = target->list; t && !ev->rc; t = t->next) assign(ev, t, items->item[i++], sc);
    }
}

static void run_for(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct list *all = to_items(ev, eval_in(ev, n->b, sc)), *kept = all;
    int depth = 1;
    struct value outer;
    if (ev->rc) return;
    if (n->c) {
        kept = v_list(ev, V_LIST).list;
        for (size_t i = 0; i < all->len && !ev->rc; i++) {
            struct scope *test = ev_alloc(ev, sizeof *test);
            *test = (struct scope){.parent = sc};
            assign(ev, n->a, all->item[i], test);
            if (truthy(eval_in(ev, n->c, test))) list_push(ev, kept, all->item[i]);
        }
    }
    if (kept->len == 0) {
        struct scope *body = ev_alloc(ev, sizeof *body);
        *body = (struct scope){.parent = sc};
        if (n->other) execute(ev, n->other, body);
        return;
    }
    outer = lookup(ev, span_of("loop"), sc);
    if (outer.kind == V_LOOP) depth = outer.loop->depth; /* depth counts recursion, not nesting: it stays */
    struct loop *l = ev_alloc(ev, sizeof *l);
    *l = (struct loop){.items = kept, .depth = depth};
    for (; l->index < kept->len && !ev->rc; l->index++) {
        struct scope *body = ev_alloc(ev, sizeof *body);
        *body = (struct scope){.parent = sc};
        dict_set(ev, &body->vars, v_str(str_lit("loop")), (struct value){.kind = V_LOOP, .loop = l});
        assign(ev, n->a, kept->item[l->index], body);
        if (execute(ev, n->body, body) == FLOW_BREAK) break;
    }
}

/* Runs statements with their output caught. */
static struct str capture(struct eval *ev, const struct node *body, struct scope *sc)
{
    struct out o = {0}, *saved = ev->out;
    struct scope *inner = ev_alloc(ev, sizeof *inner);
    *inner = (struct scope){.parent = sc};
    ev->out = &o;
    execute(ev, body, inner);
    ev->out = saved;
    return out_take(&o);
}

static struct value filtered(struct eval *ev, const struct node *filters, struct value v, struct scope *sc)
{
    for (const struct node *f = filters; f && !ev->rc; f = f->next) {
        struct args a = arguments(ev, f, sc);
        v = apply_filter(ev, f->name, v, &a);
    }
    return v;
}

static void run_call_block(struct eval *ev, const struct node *n, struct scope *sc)
{
    struct macro *m = ev_alloc(ev, sizeof *m);
    struct value f = eval_in(ev, n->a->a, sc);
    struct args a = arguments(ev, n->a, sc);
    *m = (struct macro){n, sc};
    if (ev->rc) return;
    if (f.kind != V_MACRO) {
        fail(ev, ERR_INPUT, "call needs a macro, not a %s", kind_name(f.kind));
        return;
    }
    out_str(ev, ev->out, call_macro(ev, f.macro, &a, (struct value){.kind = V_MACRO, .macro = m}).s);
}

static enum flow execute(struct eval *ev, const struct node *n, struct scope *sc)
{
    enum flow flow = FLOW_ON;
    if (++ev->depth > MAX_DEPTH) fail(ev, ERR_INPUT, "statements are nested too deeply");
    for (; n && flow == FLOW_ON && count_step(ev, n); n = n->next) {
        struct macro *m;
        switch (n->kind) {
        case N_DATA: out_str(ev, ev->out, name_str(n)); break;
        case N_PRINT: out_str(ev, ev->out, to_str(ev, eval_in(ev, n->a, sc))); break;
        case N_IF:
            if (truthy(eval_in(ev, n->b, sc))) flow = execute(ev, n->body, sc);
            else if (n->other) flow = execute(ev, n->other, sc);
            break;
        case N_FOR: run_for(ev, n, sc); break;
        case N_SET: assign(ev, n->a, eval_in(ev, n->b, sc), sc); break;
        case N_SET_BLOCK: assign(ev, n->a, filtered(ev, n->list, v_str(capture(ev, n->body, sc)), sc), sc); break;
        case N_MACRO:
            m = ev_alloc(ev, sizeof *m);
            *m = (struct macro){n, sc};
            dict_set(ev, &sc->vars, v_str(name_str(n)), (struct value){.kind = V_MACRO, .macro = m});
            break;
        case N_CALL_BLOCK: run_call_block(ev, n, sc); break;
        case N_FILTER_BLOCK:
            out_str(ev, ev->out, to_str(ev, filtered(ev, n->list, v_str(capture(ev, n->body, sc)), sc)));
            break;
        case N_SCOPE: flow = execute(ev, n->body, sc); break;
        case N_BREAK: flow = FLOW_BREAK; break;
        case N_CONTINUE: flow = FLOW_CONTINUE; break;
        default: fail(ev, ERR_UNSUPPORTED, "an expression stands where a statement should"); break;
        }
    }
    ev->depth--;
    return flow;
}

/* ------------------------------------------------------------------------------------------------ render */

void jinja_text_free(struct jinja_text *r)
{
    buf_free(&r->text);
    free(r->marks);
    *r = (struct jinja_text){0};
}

static void add_variables(struct eval *ev, const json_t *object, bool marked)
{
    struct value all = object ? from_json(ev, object, marked, 0) : v_none();
    for (size_t i = 0; all.kind == V_DICT && i < all.dict->len; i++) {
        struct value key = all.dict->key[i], val = all.dict->val[i];
        key.s.marks = NULL;
        dict_set(ev, &ev->root->vars, key, val);
        if (!marked || val.kind != V_LIST || !str_eq(key.s, str_lit("messages"))) continue;
        for (size_t m = 0; m < val.list->len; m++) {
            struct value message = val.list->item[m], role;
            if (message.kind != V_DICT || !dict_get_str(message.dict, "role", &role) || role.kind != V_STR) continue;
            role.s.marks = NULL;
            dict_set(ev, message.dict, v_str(str_lit("role")), role);
        }
    }
}

static int collect_marks(const struct out *o, struct jinja_text *r)
{
    size_t n = 0, cap = 0, len = o->len;
    for (size_t i = 0; i < len;) {
        size_t from = i;
        uint8_t m = o->marks[i];
        while (i < len && o->marks[i] == m) i++;
        if (!m) continue;
        if (n == cap) {
            struct mark *p = realloc(r->marks, (cap = cap ? 2 * cap : 16) * sizeof *p);
            if (!p) return ERR_NOMEM;
            r->marks = p;
        }
        r->marks[n++] = (struct mark){from, i};
    }
    r->n_marks = n;
    return OK;
}

int jinja_render(const struct jinja *t, const json_t *user, const json_t *trusted, int64_t now,
                 struct jinja_text *out, struct err *e)
{
    struct out o = {0};
    struct scope root = {0};
    struct eval ev = {.t = t, .e = e, .now = now, .root = &root, .out = &o};
    struct jinja_text r = {0};
    add_variables(&ev, user, true);
    add_variables(&ev, trusted, false);
    if (!ev.rc) execute(&ev, t->body, &root);
    if (!ev.rc && (buf_append(&r.text, o.text, o.len) < 0 || collect_marks(&o, &r) < 0))
        ev.rc = err_set(e, ERR_NOMEM, "out of memory");
    arena_free(&ev.arena);
    if (ev.rc) {
        jinja_text_free(&r);
        return ev.rc;
    }
    *out = r;
    return OK;
}
