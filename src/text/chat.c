/* chat.c: finds a checkpoint's template, checks a conversation, renders it and tokenises the result. */
#include "chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_priv.h"

enum { MAX_FILE = 64 << 20 };

struct chat {
    struct jinja *jinja;
    char *bos, *eos, *origin;
};

void chat_close(struct chat **c)
{
    if (!*c) return;
    jinja_close(&(*c)->jinja);
    free((*c)->bos);
    free((*c)->eos);
    free((*c)->origin);
    free(*c);
    *c = NULL;
}

const char *chat_origin(const struct chat *c) { return c->origin; }

static bool is_bare_name(struct span s)
{
    if (s.len == 0 || s.len > 64) return false;
    for (size_t i = 0; i < s.len; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.", s.ptr[i])) return false;
    return true;
}

static int shipped(struct span name, const char *what, struct span *source, struct err *e)
{
    char known[128] = "";
    for (const struct chat_template *t = chat_templates; t->name; t++) {
        if (span_is(name, t->name)) {
            *source = span_of(t->source);
            return OK;
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", *known ? ", " : "", t->name);
    }
    return err_set(e, ERR_UNSUPPORTED, "%s: holds the template name %.*s, which is not known; known are %s", what, (int)name.len, name.ptr, known);
}

int chat_from_template(struct chat **out, struct span source, struct span bos, struct span eos, const char *what, struct err *e)
{
    struct chat *c;
    if (is_bare_name(source)) TRY(shipped(source, what, &source, e));
    TRY(mem_new(&c, sizeof *c, e));
    c->bos = strndup(bos.len ? bos.ptr : "", bos.len);
    c->eos = strndup(eos.len ? eos.ptr : "", eos.len);
    c->origin = strdup(what);
    int rc = c->bos && c->eos && c->origin ? jinja_parse(&c->jinja, source, what, e) : err_set(e, ERR_NOMEM, "out of memory for a template");
    if (rc < 0) {
        chat_close(&c);
        return rc;
    }
    *out = c;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ a directory */

static int read_json(json_t **out, const char *path, struct err *e)
{
    struct buf b;
    json_error_t je;
    *out = NULL;
    if (!file_exists(path)) return OK;
    TRY(file_read(&b, path, MAX_FILE, e));
    *out = json_loadb(b.data, b.len, JSON_ALLOW_NUL, &je);
    buf_free(&b);
    return *out ? OK : err_set(e, ERR_INPUT, "%s: is no valid JSON: %s (line %d)", path, je.text, je.line);
}

static struct span text_of(const json_t *j) { return (struct span){json_string_value(j), json_string_length(j)}; }

/* A token's text: a string, or an object with "content". */
static struct span token_text(const json_t *config, const char *key)
{
    const json_t *j = json_object_get(config, key);
    return text_of(json_is_object(j) ? json_object_get(j, "content") : j);
}

/* "chat_template" as a string, or a list of {name, template}: the default one. */
static const json_t *template_in(const json_t *config)
{
    const json_t *t = json_object_get(config, "chat_template"), *item;
    size_t i;
    if (json_is_string(t)) return t;
    json_array_foreach(t, i, item) {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && !strcmp(name, "default") && json_is_string(json_object_get(item, "template"))) return json_object_get(item, "template");
    }
    return NULL;
}

int chat_from_dir(struct chat **out, const char *dir, struct err *e)
{
    char file[4096], config_path[4096], json_path[4096];
    json_t *config = NULL, *other = NULL;
    struct buf b = {0};
    struct span source = {0};
    const char *origin = NULL;
    struct chat *c = NULL;
    int rc;
    snprintf(file, sizeof file, "%s/chat_template.jinja", dir);
    snprintf(config_path, sizeof config_path, "%s/tokenizer_config.json", dir);
    snprintf(json_path, sizeof json_path, "%s/chat_template.json", dir);
    if ((rc = read_json(&config, config_path, e)) < 0) goto done;
    if (file_exists(file)) {
        if ((rc = file_read(&b, file, MAX_FILE, e)) < 0) goto done;
        source = buf_span(&b);
        origin = file;
    } else if (template_in(config)) {
        source = text_of(template_in(config));
        origin = config_path;
    } else {
        if ((rc = read_json(&other, json_path, e)) < 0) goto done;
        if (template_in(other)) {
            source = text_of(template_in(other));
            origin = json_path;
        }
    }
    if (origin) rc = chat_from_template(&c, source, token_text(config, "bos_token"), token_text(config, "eos_token"), origin, e);
    if (rc == OK) *out = c;
done:
    buf_free(&b);
    json_decref(config);
    json_decref(other);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ conversations */

static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", "ipython", "function"};

static int check_role(const json_t *message, size_t i, struct err *e)
{
    const json_t *role = json_object_get(message, "role");
    char known[128] = "";
    if (!json_is_string(role)) return err_set(e, ERR_INPUT, "message %zu has no role", i);
    for (size_t k = 0; k < COUNT_OF(roles); k++) {
        if (!strcmp(json_string_value(role), roles[k])) return OK;
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", k ? ", " : "", roles[k]);
    }
    return err_set(e, ERR_INPUT, "message %zu has role %.40s: known are %s", i, json_string_value(role), known);
}

/* Text parts joined; other parts are refused by their type. */
static int join_parts(const json_t *parts, size_t i, json_t **out, struct err *e)
{
    struct buf b = {0};
    size_t k;
    json_t *part;
    json_array_foreach(parts, k, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (!json_is_string(text) || (type && strcmp(type, "text"))) {
            buf_free(&b);
            return err_set(e, ERR_UNSUPPORTED, "message %zu has a content part of type %.40s: only text is supported", i, type ? type : "(none)");
        }
        if (buf_append(&b, json_string_value(text), json_string_length(text)) < 0) break;
    }
    *out = json_stringn(b.data ? b.data : "", b.len);
    buf_free(&b);
    return *out ? OK : err_set(e, ERR_NOMEM, "out of memory for message %zu", i);
}

/* Tool calls whose arguments are a JSON string get the object in its place, which the templates iterate over. */
static void parse_arguments(json_t *message)
{
    size_t i;
    json_t *call;
    json_array_foreach(json_object_get(message, "tool_calls"), i, call) {
        json_t *function = json_object_get(call, "function"), *arguments = json_object_get(function, "arguments");
        json_t *parsed = json_is_string(arguments) ? json_loadb(json_string_value(arguments), json_string_length(arguments), JSON_ALLOW_NUL, NULL) : NULL;
        if (json_is_object(parsed)) json_object_set(function, "arguments", parsed);
        json_decref(parsed);
    }
}

/* A checked deep copy of the messages in the shape that templates expect. */
static int prepare(const json_t *messages, json_t **out, struct err *e)
{
    size_t i;
    json_t *message, *copy;
    int rc = OK;
    if (!json_is_array(messages) || json_array_size(messages) == 0) return err_set(e, ERR_INPUT, "messages must be an array with at least one message");
    if (!(copy = json_deep_copy(messages))) return err_set(e, ERR_NOMEM, "out of memory for %zu messages", json_array_size(messages));
    json_array_foreach(copy, i, message) {
        json_t *content = json_object_get(message, "content"), *joined;
        if (!json_is_object(message)) rc = err_set(e, ERR_INPUT, "message %zu is no object", i);
        if (rc == OK) rc = check_role(message, i, e);
        if (rc == OK && json_is_array(content)) {
            rc = join_parts(content, i, &joined, e);
            if (rc == OK && json_object_set_new(message, "content", joined) < 0) rc = err_set(e, ERR_NOMEM, "out of memory for message %zu", i);
        } else if (rc == OK && content && !json_is_string(content) && !json_is_null(content)) {
            rc = err_set(e, ERR_INPUT, "message %zu has a content that is neither text, parts nor null", i);
        }
        if (rc < 0) {
            json_decref(copy);
            return rc;
        }
        parse_arguments(message);
    }
    *out = copy;
    return OK;
}

int chat_render(const struct chat *c, const json_t *messages, const json_t *tools, const json_t *extra, bool add_generation, int64_t now,
                struct jinja_text *out, struct err *e)
{
    json_t *copy, *user, *trusted;
    TRY(prepare(messages, &copy, e));
    user = extra ? json_deep_copy(extra) : json_object();
    trusted = json_pack("{s:s, s:s, s:b}", "bos_token", c->bos, "eos_token", c->eos, "add_generation_prompt", add_generation);
    int rc = user && trusted && json_object_set_new(user, "messages", copy) == 0 ? OK : err_set(e, ERR_NOMEM, "out of memory for a conversation");
    if (rc == OK && tools && json_object_set(user, "tools", (json_t *)(uintptr_t)tools) < 0) rc = err_set(e, ERR_NOMEM, "out of memory for tools");
    if (rc == OK) rc = jinja_render(c->jinja, user, trusted, now, out, e);
    json_decref(user);
    json_decref(trusted);
    return rc;
}

int chat_encode(const struct chat *c, const struct tokenizer *t, const json_t *messages, const json_t *tools, const json_t *extra,
                bool add_generation, int64_t now, struct ids *out, struct err *e)
{
    struct jinja_text r;
    TRY(chat_render(c, messages, tools, extra, add_generation, now, &r, e));
    int rc = tokenizer_encode(t, buf_span(&r.text), r.marks, r.n_marks, false, out, e);
    jinja_text_free(&r);
    return rc;
}
