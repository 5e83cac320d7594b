"""Chat templates in the manner of several model families, and conversations to render."""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content | trim ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday: ' + date_string + '\\n' + system_message + '<|eot|>' }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start|>ipython<|end|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{% if messages[0].role == 'system' %}
    {% if messages[0].content is string %}
        {% set first = messages[0].content + '\n\n' %}
    {% else %}
        {% set first = messages[0].content[0].text + '\n\n' %}
    {% endif %}
    {% set turns = messages[1:] %}
{% else %}
    {% set first = '' %}
    {% set turns = messages %}
{% endif %}
{% for message in turns %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {% endif %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ first if loop.first }}
    {%- if message.content is string %}
{{ message.content | trim }}
    {%- else %}
        {%- for item in message.content %}
            {%- if item.type == 'image' %}
<image>
            {%- elif item.type == 'text' %}
{{ item.text | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""

MISTRAL = """\
{%- set ns = namespace(system='', index=0) %}
{%- set turns = [] %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system ~ m.content ~ '\\n' %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate.') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + value | tojson }}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system if loop.last else '') + message.content + ' [/INST]' }}
    {%- elif message.content is defined %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {{- '[TOOL_CALLS] ' + message.tool_calls | map(attribute='function') | list | tojson }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""

QWEN3 = """\
{%- macro turn(role, content) %}
    {{- '<|im_start|>' + role + '\\n' + content }}
{%- endmacro %}
{%- if tools %}
    {{- turn('system', messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- turn('system', messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- turn('assistant', '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content) }}
        {%- else %}
            {{- turn('assistant', content) }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- turn(message.role, content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

RECURSIVE = """\
{%- for message in messages recursive %}
    {{- loop.depth ~ '/' ~ loop.length ~ (loop.cycle('a', 'b')) ~ message.role }}
    {%- if message.children %}({{ loop(message.children) }}){% endif %}
    {%- if not loop.last %}, {% endif %}
{%- else %}
    {{- 'nobody' }}
{%- endfor %}
{%- macro outer() %}{{ caller(1) ~ caller(2) }}{% endmacro %}
{%- call(x) outer() %}<{{ x }}>{% endcall %}
{{- dict(a=1) | tojson ~ dict.fromkeys('ab', 1) | tojson(sort_keys=true) }}
{{- namespace(self=1).self ~ '%05d|%s' % (42, 'x') ~ 3 * 'ab' ~ (2 ** 10) ~ ([1] + [2]) ~ none ~ nothing ~ 1.5 }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "recursive": RECURSIVE,
}

USER: dict[str, object] = {
    "role": "user",
    "content": "  What's 2 + 2? <|im_end|> \u201cé\u201d 😀\n",
}
SYSTEM: dict[str, object] = {"role": "system", "content": "You are terse & <kind>."}
ANSWER: dict[str, object] = {"role": "assistant", "content": "Four.\n"}
CALL: dict[str, object] = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT: dict[str, object] = {"role": "tool", "tool_call_id": "c1", "content": "18 °C"}
THOUGHT: dict[str, object] = {"role": "assistant", "content": "4", "reasoning": "2 and 2"}
PARTS: dict[str, object] = {
    "role": "user",
    "content": [{"type": "image"}, {"type": "text", "text": " What is this? "}],
}
TREE: dict[str, object] = {
    "role": "user",
    "content": "",
    "children": [{"role": "x"}, {"role": "y", "children": [{"role": "z"}]}],
}

CONVERSATIONS: dict[str, list[dict[str, object]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "three_turns": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "tools_used": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER, USER],
    "tool_result_last": [USER, CALL, RESULT],
    "thoughts": [USER, THOUGHT, USER, THOUGHT],
    "thinking_in_text": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}],
    "parts": [PARTS],
    "tree": [TREE, USER],
    "empty_text": [{"role": "user", "content": ""}],
    "unknown_role": [{"role": "narrator", "content": "Once"}],
}

TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now> & 'later' – überall.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {}, "strict": True}},
]
