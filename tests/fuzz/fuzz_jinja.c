/* fuzz_jinja: any bytes as a template, rendered over one conversation. */
#include "jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char conversation[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\" a<b> \\u00e9\"},{\"role\":\"assistant\","
        "\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":[1,2.5,true,null]}}}]}],\"tools\":[{\"a\":{}}]}";
    struct jinja *t;
    struct jinja_text r;
    struct err e;
    if (size > 4096 || jinja_parse(&t, (struct span){(const char *)data, size}, "fuzz", &e) < 0) return 0;
    json_t *user = json_loads(conversation, 0, NULL), *trusted = json_pack("{s:s, s:b}", "bos_token", "<s>", "add_generation_prompt", 1);
    if (jinja_render(t, user, trusted, 0, &r, &e) == 0) jinja_text_free(&r);
    json_decref(user);
    json_decref(trusted);
    jinja_close(&t);
    return 0;
}
