"""Answers come apart into reasoning, content and calls, however they are cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from pie.router.reading import (
    AnswerReader,
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
    _merged,
)
from pie.router.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat

CALL = '{"name": "weather", "arguments": {"city": "O\\"slo}", "days": [1, {"a": "{"}]}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
OTHER = '{"name": "time", "arguments": {}}'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
ARGUMENTS = json.loads(CALL)["arguments"]

TEXTS = [
    "just text",
    "a < b and <tool and </tool_call> alone",
    HERMES_CALL,
    f"Let me see. {HERMES_CALL}",
    f"{HERMES_CALL}\n<tool_call>\n{OTHER}\n</tool_call>",
    f"<think>\nhm, <tool_call> maybe\n</think>\n\n{HERMES_CALL}",
    "<think>never ends",
    "<tool_call>\n{not json at all\n</tool_call> and on",
    "<tool_call> no object </tool_call>",
    '<tool_call>\n{"nome": "x"}\n</tool_call>',
    '<tool_call>\n{"arguments": {"a": 1}, "name": "late"}\n</tool_call>',
    '<tool_call>\n{"name": "text", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
    '<tool_call>\n{"name": "cut", "arguments": {"a": 1',
    f"[TOOL_CALLS] [{CALL}, {OTHER}]",
    f"[TOOL_CALLS][{CALL}]",
    LLAMA_CALL,
    f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}",
    '{"answer": 42}',
    f"no call: {LLAMA_CALL}",
    "",
]


def read(
    text: str, format_: ToolFormat | None, pieces: list[str] | None = None, **how: bool
) -> list[Part]:
    reader = AnswerReader(format_, **how)
    parts = [part for piece in pieces or [text] for part in reader.push(piece)]
    return _merged([*parts, *reader.end()])


def calls(parts: list[Part]) -> list[tuple[str, object]]:
    names = {part.index: part.name for part in parts if isinstance(part, CallBegun)}
    texts = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] += part.text
    return [(name, json.loads(texts[index])) for index, name in names.items()]


def content(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


@given(
    st.sampled_from(TEXTS),
    st.sampled_from([None, HERMES, MISTRAL, LLAMA3]),
    st.booleans(),
    st.data(),
)
def test_it_does_not_matter_how_a_text_is_cut(
    text: str, format_: ToolFormat | None, reasons: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(text, format_, reasons=reasons)
    cut = read(text, format_, pieces, reasons=reasons)
    assert content(whole) == content(cut)
    assert [part for part in whole if not isinstance(part, Content)] == [
        part for part in cut if not isinstance(part, Content)
    ]


@given(st.sampled_from(TEXTS))
def test_without_a_format_all_is_content(text: str) -> None:
    assert content(read(text, None)) == text


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        (HERMES_CALL, HERMES),
        (f"[TOOL_CALLS] [{CALL}]", MISTRAL),
        (LLAMA_CALL, LLAMA3),
        (f"<|python_tag|>{LLAMA_CALL}", LLAMA3),
    ],
)
def test_a_call_is_read_in_each_format(text: str, format_: ToolFormat) -> None:
    parts = read(text, format_)
    assert calls(parts) == [("weather", ARGUMENTS)]
    assert content(parts) == ""


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        (f"{HERMES_CALL}\n<tool_call>\n{OTHER}\n</tool_call>\n", HERMES),
        (f"[TOOL_CALLS] [{CALL}, {OTHER}]", MISTRAL),
        (f"{LLAMA_CALL}; {OTHER}", LLAMA3),
    ],
)
def test_several_calls_are_told_apart(text: str, format_: ToolFormat) -> None:
    parts = read(text, format_)
    assert calls(parts) == [("weather", ARGUMENTS), ("time", {})]
    assert content(parts) == ""


def test_arguments_are_passed_on_while_they_come() -> None:
    reader = AnswerReader(HERMES)
    begin = '<tool_call>\n{"name": "weather", "arguments": '
    assert reader.push(begin) == []
    assert reader.push('{"ci') == [CallBegun(0, "weather"), CallArguments(0, '{"ci')]
    assert reader.push('ty": 1}') == [CallArguments(0, 'ty": 1}')]
    assert reader.push("}\n</tool_call>") == []


def test_reasoning_is_told_from_the_answer() -> None:
    assert read("<think>\nhm\n</think>\n\nYes.", None, reasons=True) == [
        Reasoning("\nhm\n"),
        Content("Yes."),
    ]
    assert read("hm</think>Yes.", None, reasons=True, is_thinking=True) == [
        Reasoning("hm"),
        Content("Yes."),
    ]
    assert read("Yes.", None, reasons=True) == [Content("Yes.")]


def test_a_call_within_reasoning_is_none() -> None:
    parts = read(f"<think>{HERMES_CALL}</think>ok", HERMES, reasons=True)
    assert calls(parts) == []
    assert content(parts) == "ok"


@pytest.mark.parametrize("text", [TEXTS[7], TEXTS[8], TEXTS[9]])
def test_what_is_no_call_is_content_as_it_stands(text: str) -> None:
    assert content(read(text, HERMES)) == text


def test_an_object_that_is_no_call_is_content() -> None:
    assert read('{"answer": 42}', LLAMA3) == [Content('{"answer": 42}')]


def test_no_more_calls_than_are_wanted() -> None:
    reader = AnswerReader(HERMES, most_calls=1)
    parts = reader.push(f"{HERMES_CALL}\n<tool_call>\n{OTHER}\n</tool_call>") + reader.end()
    assert calls(parts) == [("weather", ARGUMENTS)]
