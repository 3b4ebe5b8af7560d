/* chat: a conversation in OpenAI's shape to the ids of a prompt, through the checkpoint's own template.
 *
 * Finds the template (tokenizer_config.json as a string or a list of named ones, chat_template.jinja,
 * chat_template.json, GGUF metadata, or a bare name that maps to a template shipped here) and checks the messages
 * (known roles, contents as text) before the template sees them. */
#ifndef HEARTH_CHAT_H
#define HEARTH_CHAT_H

#include <jansson.h>

#include "base.h"
#include "jinja.h"
#include "tokenizer.h"

struct chat;

/* From a template's text, or from a bare name ("mistral-v7-tekken", "chatml", ...; an unknown name lists the known).
 * bos and eos are the token texts that the template may print (empty where there are none). */
int chat_from_template(struct chat **out, struct span source_or_name, struct span bos, struct span eos, const char *what,
                       struct err *e) MUST_CHECK;
/* From a checkpoint directory. *out is NULL, with OK, where the checkpoint has no template (a base model). */
int chat_from_dir(struct chat **out, const char *dir, struct err *e) MUST_CHECK;
void chat_close(struct chat **c);
const char *chat_origin(const struct chat *c); /* "chat_template.jinja", "tokenizer.chat_template", ... for people */

/* Renders `messages` (a JSON array of {role, content, ...} as OpenAI clients send it; `arguments` of tool calls given
 * as a JSON string are parsed into objects; a content given as parts is joined from its text parts) with `tools`
 * (array or NULL) and `extra` (an object of further template variables such as enable_thinking, or NULL). */
int chat_render(const struct chat *c, const json_t *messages, const json_t *tools, const json_t *extra, bool add_generation,
                int64_t now, struct jinja_text *out, struct err *e) MUST_CHECK;
/* chat_render, then tokenizer_encode with the marks and without a second BOS. */
int chat_encode(const struct chat *c, const struct tokenizer *t, const json_t *messages, const json_t *tools,
                const json_t *extra, bool add_generation, int64_t now, struct ids *out, struct err *e) MUST_CHECK;

#endif
