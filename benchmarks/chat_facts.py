#!/usr/bin/env python3
"""Writes the texts that transformers renders with chat templates into lm/tests/suite/lm/chat.json, and those with tools and
variables into chat_variables.json.

Usage: PYTHON benchmarks/chat_facts.py [FILE.gguf], with a Python that has transformers 5 and jinja2

The templates are those of SmolLM2 (from its GGUF file, with the ids of transformers' tokenizer) and, in their published
form or shortened to messages without tools, those of other families. The clock stands still.
"""
import datetime
import json
import sys
from pathlib import Path

import transformers.utils.chat_template_utils as chat

PATH = Path(__file__).resolve().parent.parent / "lm" / "tests" / "suite" / "lm" / "chat.json"

LLAMA3 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

GEMMA2 = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

PHI3 = r"""{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

# What the others do not have: marks of what is learned, loop controls, blocks with blanks in front, Python's names, JSON.
MIXED = r"""{%- macro turn(role, text) %}
<|{{ role }}|>{{ text }}
{% endmacro -%}
  {% for message in messages %}
    {% if loop.index0 > 3 %}
      {% break %}
    {% endif %}
    {% if message.role == 'assistant' %}
      {% generation %}{{ turn('a', message.content) }}{%- endgeneration %}

    {% else %}
{{ turn(message.role, message.content.removeprefix(' ').title()) }}
    {% endif %}
  {% endfor %}
{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ strftime_now('%Y-%m-%d %H:%M %A %b') }}
{{ add_generation_prompt }} {{ tools }} {{ messages | length }} {{ missing }} {{ 'é' ~ 1.5 ~ 3 // 2 }} {{ dict(a=1).get('b', 'none') }}
"""

FAMILIES = {
    "llama3": (LLAMA3, dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")),
    "qwen2.5": (QWEN25, dict(eos_token="<|im_end|>")),
    "qwen3": (QWEN3, dict(eos_token="<|im_end|>")),
    "gemma2": (GEMMA2, dict(bos_token="<bos>", eos_token="<eos>")),
    "gemma3": (GEMMA3, dict(bos_token="<bos>", eos_token="<eos>")),
    "mistral": (MISTRAL, dict(bos_token="<s>", eos_token="</s>")),
    "phi3": (PHI3, dict(bos_token="<s>", eos_token="<|endoftext|>")),
    "mixed": (MIXED, {}),
}

SYSTEM, ASK = dict(role="system", content=" Be brief. "), dict(role="user", content=" What is 2 + 2? \n")
REPLY, AGAIN = dict(role="assistant", content="\n<think>\nSum.\n</think>\n\nIt's \"4\" <b>é</b>."), dict(role="user", content="Sûr? 你好 🙂")
CONVERSATIONS = [[ASK], [SYSTEM, ASK], [ASK, REPLY, AGAIN], [SYSTEM, ASK, REPLY, AGAIN], [ASK, AGAIN]]
NOW = datetime.datetime(2026, 3, 7, 9, 5, 0)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, *_):
        return NOW


# Shortened from those of Qwen 3 and Llama 3.1: tools, and switches of a template.
QWEN3_TOOLS = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA31 = r"""{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}
{% endfor %}{% endif %}{{ reasoning_effort | default("medium") }} {{ budget }} {{ messages[0].content }}"""
# The keys are in no order of the alphabet.
CLOCK = dict(
    type="function",
    function=dict(
        name="get_time",
        description="The time \u2014 <b>now</b>, in \"zone\"",
        parameters=dict(
            type="object", properties=dict(zone=dict(type="string", enum=["UTC", "Z\u00fcrich"]), digits=dict(type="integer")),
            required=["zone"],
        ),
        strict=False, most=3, rate=0.5, more=None,
    ),
)
VARIABLES = [
    ("qwen3", QWEN3_TOOLS, dict(enable_thinking=False)),
    ("qwen3", QWEN3_TOOLS, dict(enable_thinking=True, tools=[CLOCK])),
    ("qwen3", QWEN3_TOOLS, dict(tools=[CLOCK, dict(CLOCK, type="other")])),
    ("llama 3.1", LLAMA31, dict(tools=[CLOCK], reasoning_effort="high", budget=7)),
    ("llama 3.1", LLAMA31, dict(budget=[1, 2.5, None, {"b": True, "a": "x"}])),
]


def rendered_with(name, template, variables):
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="What time is it?")]
    text, _ = chat.render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True, **variables
    )
    # In the order of the keys.
    given = {name: json.dumps(value, ensure_ascii=False) for name, value in variables.items()}
    return dict(name=name, template=template, messages=messages, variables=given, text=text[0])


def rendered(template, tokens, messages):
    try:
        text, _ = chat.render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, **tokens
        )
        return dict(messages=messages, text=text[0])
    except Exception as error:
        return dict(messages=messages, error=str(error))


def main():
    chat.datetime = Clock
    varied = [rendered_with(*case) for case in VARIABLES]
    PATH.with_name("chat_variables.json").write_text(json.dumps(varied, ensure_ascii=False, indent=1) + "\n")
    facts = []
    for name, (template, tokens) in FAMILIES.items():
        cases = [rendered(template, tokens, messages) for messages in CONVERSATIONS]
        facts.append(dict(name=name, template=template, tokens=tokens, cases=cases))
    smollm2 = None
    if len(sys.argv) > 1:
        from transformers import AutoTokenizer

        file = Path(sys.argv[1])
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        smollm2 = []
        for messages in CONVERSATIONS:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            smollm2.append(dict(messages=messages, text=text, ids=ids))
    PATH.write_text(json.dumps(dict(families=facts, smollm2=smollm2), ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
