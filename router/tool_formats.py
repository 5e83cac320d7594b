"""How models spell calls of tools: what begins one, and the grammar of answers that must call.

Covers the formats of Hermes and Qwen, Llama 3 and Mistral, and telling which one a chat template is
written for. Pure. Does not cover reading answers (`pie.router.reading`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pie.router.api.tools import Tool
from pie.wire.messages import Grammar, GrammarKind

_WHITESPACE = r"[ \t\n]{0,20}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models calls tools.

    A call is a JSON object with `name` and, under `arguments_key`, its arguments.
    """

    name: str
    begin: str
    """What stands before a call; it may be a special token."""
    end: str = ""
    """What stands behind it; nothing where the answer ends."""
    arguments_key: str = "arguments"
    is_list: bool = False
    """Whether one `begin` is followed by a JSON list of calls."""
    is_bare: bool = False
    """Whether an answer that begins with a JSON object is a call, without `begin`."""
    separator: str = ""
    """What stands between two calls that have no `begin` of their own."""
    id_chars: int = 24
    """Length of a call's id; a template may take no other."""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, id_chars=9)
LLAMA3 = ToolFormat(
    "llama3", "<|python_tag|>", arguments_key="parameters", is_bare=True, separator=";"
)
FORMATS = {one.name: one for one in (HERMES, MISTRAL, LLAMA3)}


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template is written for; None where it is none of ours."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA3
    return None


def calling_grammar(
    format_: ToolFormat, tools: Sequence[Tool], *, several: bool, begin_id: int | None
) -> Grammar:
    """Return the grammar of an answer that calls one of `tools`, or several times where allowed.

    Args:
        format_: How calls are spelled.
        tools: What may be called.
        several: Whether there may be more than one call.
        begin_id: The id of `format_.begin` where that is a special token of the model.
    """
    begin = json.dumps(format_.begin) if begin_id is None else f"<[{begin_id}]>"
    rules = [f"any: {' | '.join(f'call{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "{format_.arguments_key}": '
        rules.append(f'call{at}: {json.dumps(head)} args{at} "}}"')
        schema = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
        schema |= tool.function.parameters or {"type": "object"}
        rules.append(f"args{at}: %json {json.dumps(schema)}")
    if format_.is_list:
        more = ' (", " any)*' if several else ""
        start = f'{begin} "[" any{more} "]"'
    elif format_.end:
        one = f'{begin} "\\n" any "\\n{format_.end}"'
        start = f'{one} ("\\n" {one})*' if several else one
    else:
        start = 'any ("; " any)*' if several else "any"
    return Grammar(GrammarKind.LARK, "\n".join([f"start: {start}", *rules]))
