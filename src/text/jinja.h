/* jinja: a small interpreter of the Jinja subset that chat templates use, with Python's semantics as transformers
 * sets them up (trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escaping, `raise_exception`,
 * `strftime_now`, the `generation` block). A template runs as it is: a construct that is not known is an error
 * that names line and construct, never an approximation.
 *
 * Text that came from the user stays marked: every string value carries, for each byte, whether it came from the
 * variables of the context (marked) or from the template (not marked), through concatenation, slicing, filters and
 * methods. The rendered result says which bytes are marked, so that the tokenizer never finds a control token in them.
 *
 * Bounds: rendering stops with an error past limits on output size, loop iterations and nesting, so that a hostile
 * template ends. */
#ifndef HEARTH_JINJA_H
#define HEARTH_JINJA_H

#include <jansson.h>

#include "base.h"
#include "tokenizer.h" /* struct mark */

struct jinja;

/* Parses a template. `what` names it in messages ("chat template of model.gguf"). On success the caller owns *out. */
int jinja_parse(struct jinja **out, struct span source, const char *what, struct err *e) MUST_CHECK;
void jinja_close(struct jinja **t);

/* A rendered text: bytes, and the ascending disjoint ranges of it that are marked. jinja_text_free it. */
struct jinja_text {
    struct buf text;
    struct mark *marks;
    size_t n_marks;
};
void jinja_text_free(struct jinja_text *r);

/* Renders with the members of the JSON object `user` (strings inside it, keys included, are marked) and of `trusted`
 * (not marked: bos_token, add_generation_prompt, ...) as variables. The "role" of each member of "messages" is not
 * marked: the caller has checked it against the known roles. `now` is what strftime_now formats (local time).
 * raise_exception gives ERR_INPUT with the template's own message. */
int jinja_render(const struct jinja *t, const json_t *user, const json_t *trusted, int64_t now, struct jinja_text *out,
                 struct err *e) MUST_CHECK;

#endif
