"""Bodies that hold very much: a bound on what is built of them, and a sentence that names it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from pie.router.api import body, bulk, long_ids
from pie.router.api.body import MAX_LOGIT_BIASES, BodyLimits, GenerationBody, parse_body
from pie.router.api.bulk import MAX_OBJECTS, MAX_STRINGS, MAX_VALUES
from pie.router.api.chat import ChatBody
from pie.router.api.completions import CompletionBody
from pie.router.api.conversation import MAX_MESSAGES, MAX_PARTS
from pie.router.errors import ApiError

LIMITS = BodyLimits(max_choices=4, max_prompts=3, max_stop_strings=4, max_logprobs=20)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
MANY = 1000


def refused(kind: type[GenerationBody], data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, data, LIMITS)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000
    return caught.value


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"messages": [{}] * MANY}, "messages[0].role"),
        (ChatBody, {"messages": [0] * MANY}, "messages[0]"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{}] * MANY}] * 9},
            "messages[0].content[0].type",
        ),
        (ChatBody, {"messages": [{"role": "function", "content": ""}] * MANY}, "messages[0].role"),
        (ChatBody, {"stop": [0] * MANY}, "stop[0]"),
        (ChatBody, {"stop_token_ids": ["0"] * MANY}, "stop_token_ids[0]"),
        (ChatBody, {"logit_bias": {str(token): "" for token in range(MANY)}}, "logit_bias"),
        (ChatBody, {"logit_bias": {f"t{token}": 0 for token in range(MANY)}}, "logit_bias"),
        (CompletionBody, {"prompt": ["a", *[0] * MANY]}, "prompt[1]"),
        (CompletionBody, {"prompt": [0, *["a"] * MANY]}, "prompt[1]"),
        (CompletionBody, {"prompt": [[0], *["a"] * MANY]}, "prompt[1]"),
        (CompletionBody, {"prompt": [["a"] * MANY] * 9}, "prompt[0][0]"),
    ],
)
def test_a_list_stops_at_its_first_mistake(
    kind: type[GenerationBody], fields: dict[str, object], param: str
) -> None:
    data = json.dumps((CHAT if kind is ChatBody else TEXT) | fields).encode()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(data, context=LIMITS)
    assert caught.value.error_count() <= 2
    error = refused(kind, data)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("kind", "fields", "param", "limit"),
    [
        (
            ChatBody,
            {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)},
            "messages",
            MAX_MESSAGES,
        ),
        (
            ChatBody,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}
                ]
            },
            "messages[0].content",
            MAX_PARTS,
        ),
        (ChatBody, {"stop": [""] * 257}, "stop", 256),
        (ChatBody, {"stop_token_ids": [0] * 129}, "stop_token_ids", 128),
        (
            ChatBody,
            {"logit_bias": {str(token): 0 for token in range(MAX_LOGIT_BIASES + 1)}},
            "logit_bias",
            MAX_LOGIT_BIASES,
        ),
    ],
)
def test_a_list_that_is_too_long_is_told_with_its_limit(
    kind: type[GenerationBody], fields: dict[str, object], param: str, limit: int
) -> None:
    error = refused(kind, json.dumps(CHAT | fields).encode())
    assert error.param == param
    assert error.message.replace(",", "").startswith(f"{param}: at most {limit} ")


@pytest.mark.parametrize(
    ("kind", "fields", "param", "limit"),
    [
        (ChatBody, {"messages": [{}] * 700_000}, "messages", MAX_OBJECTS),
        (ChatBody, {"messages": [[]] * 700_000}, "messages", MAX_VALUES),
        (ChatBody, {"tools": [{}] * 700_000}, "tools", MAX_OBJECTS),
        (ChatBody, {"metadata": {"a": [0] * 700_000}}, "metadata", MAX_VALUES),
        (ChatBody, {"stop": [""] * 700_000}, "stop", MAX_STRINGS),
        (ChatBody, {"unheard-of": [0] * 700_000}, None, MAX_VALUES),
        (CompletionBody, {"prompt": ["a", *[0] * 700_000]}, "prompt", MAX_VALUES),
        (CompletionBody, {"prompt": [0] * 700_000}, "prompt", MAX_VALUES),
    ],
)
def test_a_body_that_holds_too_much_is_told_so_before_it_is_read(
    kind: type[GenerationBody],
    fields: dict[str, object],
    param: str | None,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind, "model_validate_json", None)
    error = refused(kind, json.dumps((CHAT if kind is ChatBody else TEXT) | fields).encode())
    assert error.param == param
    assert f"at most {limit:,}" in error.message
    assert error.message.startswith(param or "at most")


def test_what_stands_inside_a_text_is_not_counted() -> None:
    text = '{"\\}, [,' * 200_000
    body = parse_body(
        ChatBody,
        json.dumps(CHAT | {"messages": [{"role": "user", "content": text}]}).encode(),
        LIMITS,
    )
    assert body.messages[0].text == text


def test_as_many_token_ids_as_a_body_may_hold_are_read() -> None:
    ids = [7] * (MAX_VALUES - 10)
    assert parse_body(CompletionBody, json.dumps(TEXT | {"prompt": ids}).encode(), LIMITS).prompts


@pytest.mark.parametrize("depth", [300, 30_000, 3_000_000])
@pytest.mark.parametrize("begin", [b"[", b'{"a":'])
def test_deep_nesting_is_refused(depth: int, begin: bytes) -> None:
    error = refused(ChatBody, b'{"messages":' + begin * depth)
    assert "nested" in error.message or "at most" in error.message


def test_unknown_fields_are_told_up_to_a_number() -> None:
    error = refused(ChatBody, json.dumps(CHAT | {f"x{i}": 1 for i in range(MANY)}).encode())
    assert error.message.endswith("; and more")
    assert error.message.count(";") == 10


def test_a_long_name_of_a_field_is_cut() -> None:
    assert refused(ChatBody, json.dumps(CHAT | {"x" * 100_000: 1}).encode()).param == "x" * 64 + "…"
    refused(ChatBody, json.dumps(CHAT | {"logit_bias": {"x" * 100_000: 1}}).encode())


@pytest.mark.parametrize("fields", [{"messages": [1]}, {"stream_options": 3}, {"messages": {}}])
def test_no_message_has_a_name_of_ours(fields: dict[str, object]) -> None:
    assert "Chat" not in refused(ChatBody, json.dumps(CHAT | fields).encode()).message


@pytest.mark.parametrize("value", [b"1e999", b"9" * 400, b"-1e-999", b"[1e999]", b'"\\u0000"'])
def test_what_is_not_supported_is_told_beside_other_mistakes_whatever_its_value(
    value: bytes,
) -> None:
    data = b'{"model": 3, "messages": 3, "tools": ' + value + b"}"
    assert refused(ChatBody, data).message.startswith("model: ")


def test_a_body_that_is_no_object_is_told_so() -> None:
    assert refused(ChatBody, b"[]").message == "The body must be a JSON object."


@pytest.mark.parametrize("more", ["", ', "n": 2', ', "colour": 1', ', "prompt": "b"', ', "n": "a"'])
@pytest.mark.parametrize(
    "last", ["7", " 8 ", "-1", "1.0", '"a"', "[1]", "true", "1" * 30, "1,", ""]
)
def test_long_lists_of_ids_are_read_as_the_schema_reads_them(
    more: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f'{{"model": "m", "prompt": [{"1, 2 ,3," * 30}{last}]{more}}}'.encode()

    def read() -> str:
        try:
            return str(parse_body(CompletionBody, data, LIMITS).model_dump())
        except ApiError as error:
            return str((error.message, error.param, error.code))

    whole = read()
    monkeypatch.setattr(body, "LONG_BYTES", 10)
    monkeypatch.setattr(long_ids, "LONG_BYTES", 10)
    monkeypatch.setattr(long_ids, "_PIECE_BYTES", 7)
    assert read() == whole


@given(
    st.lists(st.sampled_from(["\\", '"', "NaN", "Infinity", "{", "[", ",", "a", "N", "I"])).map(
        "".join
    ),
    st.sampled_from([2, 4, 8]),
)
def test_a_text_holds_the_same_however_it_is_cut(text: str, size: int) -> None:
    data = text.encode()
    whole = bulk._scanned(data)
    named = whole.number is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "_SLICE_BYTES", size)
        cut = bulk._scanned(data)
    assert (cut.number is not None) is named
    assert (cut.strings, cut.objects, cut.values) == (whole.strings, whole.objects, whole.values)


@given(
    st.recursive(
        st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_stands_in_strings_is_not_counted(value: object) -> None:
    def counts(one: object) -> tuple[int, int]:
        if isinstance(one, dict):
            inner = [counts(part) for part in one.values()]
            strings = len(one) + sum(s for s, _ in inner)
            return strings, 1 + sum(o for _, o in inner)
        if isinstance(one, list):
            inner = [counts(part) for part in one]
            return sum(s for s, _ in inner), sum(o for _, o in inner)
        return int(isinstance(one, str)), 0

    found = bulk._scanned(json.dumps(value).encode())
    assert (found.strings, found.objects, found.number) == (*counts(value), None)
