/* tool_jinja: renders templates for the tests. Each line of standard input is a job {"template", "messages", "tools", "extra",
 * "bos", "eos", "now", "generate"}; each line of output is {"text", "marks": [[begin, end], ...]} or {"error"}. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat.h"

static struct span text_of(const json_t *job, const char *key)
{
    const json_t *j = json_object_get(job, key);
    return (struct span){json_string_value(j), json_string_length(j)};
}

static json_t *run(const json_t *job, struct err *e)
{
    struct chat *c;
    struct jinja_text r;
    if (chat_from_template(&c, text_of(job, "template"), text_of(job, "bos"), text_of(job, "eos"), "template", e) < 0) return NULL;
    int rc = chat_render(c, json_object_get(job, "messages"), json_object_get(job, "tools"), json_object_get(job, "extra"),
                         json_is_true(json_object_get(job, "generate")), json_integer_value(json_object_get(job, "now")), &r, e);
    chat_close(&c);
    if (rc < 0) return NULL;
    json_t *marks = json_array();
    for (size_t i = 0; i < r.n_marks; i++)
        json_array_append_new(marks, json_pack("[I, I]", (json_int_t)r.marks[i].begin, (json_int_t)r.marks[i].end));
    json_t *out = json_object();
    json_object_set_new(out, "text", json_stringn(r.text.data ? r.text.data : "", r.text.len));
    json_object_set_new(out, "marks", marks);
    jinja_text_free(&r);
    return out;
}

int main(void)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        struct err e = {0};
        json_t *job = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, NULL), *out = job ? run(job, &e) : NULL;
        if (!out) out = json_pack("{s:s}", "error", job ? e.msg : "no JSON");
        json_dumpf(out, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(job);
        json_decref(out);
    }
    free(line);
    return 0;
}
