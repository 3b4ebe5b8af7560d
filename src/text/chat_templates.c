/* chat_templates.c: templates for the bare names that some GGUF files store in place of Jinja, written from the families'
 * published formats. */
#include <stddef.h>

#include "chat_priv.h"

static const char chatml[] =
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n";

static const char llama3[] =
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}\n";

/* V7: [SYSTEM_PROMPT], no spaces around the tags; tools before the last user message. */
static const char mistral_v7_tekken[] =
    "{{- bos_token -}}\n"
    "{%- set ns = namespace(last=-1) -%}\n"
    "{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'system' -%}\n"
    "{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}\n"
    "{%- elif message.role == 'user' -%}\n"
    "{%- if tools and loop.index0 == ns.last -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}\n"
    "{{- '[INST]' + message.content + '[/INST]' -}}\n"
    "{%- elif message.role == 'assistant' -%}\n"
    "{%- if message.tool_calls -%}\n"
    "{{- '[TOOL_CALLS][' -}}\n"
    "{%- for call in message.tool_calls -%}\n"
    "{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}\n"
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{{- ']' + eos_token -}}\n"
    "{%- else -%}\n"
    "{{- message.content + eos_token -}}\n"
    "{%- endif -%}\n"
    "{%- elif message.role == 'tool' -%}\n"
    "{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' -}}\n"
    "{%- else -%}{{- raise_exception('role ' + message.role + ' is not part of this format') -}}{%- endif -%}\n"
    "{%- endfor -%}\n";

/* V3: the system text goes before the last user message, a blank line between. */
static const char mistral_v3_tekken[] =
    "{{- bos_token -}}\n"
    "{%- set ns = namespace(system='', last=-1) -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}{%- endif -%}\n"
    "{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'user' -%}\n"
    "{{- '[INST]' -}}{%- if loop.index0 == ns.last -%}{{- ns.system -}}{%- endif -%}{{- message.content + '[/INST]' -}}\n"
    "{%- elif message.role == 'assistant' -%}{{- message.content + eos_token -}}\n"
    "{%- elif message.role != 'system' -%}{{- raise_exception('role ' + message.role + ' is not part of this format') -}}{%- endif -%}\n"
    "{%- endfor -%}\n";

const struct chat_template chat_templates[] = {
    {"chatml", chatml}, {"llama3", llama3}, {"mistral-v7-tekken", mistral_v7_tekken}, {"mistral-v3-tekken", mistral_v3_tekken}, {NULL, NULL},
};
