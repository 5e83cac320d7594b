"""Every way to ask for structure comes to one grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pie.router.api.chat import ChatBody
from pie.router.errors import ApiError
from pie.wire.messages import Grammar, GrammarKind
from tests.router.test_bodies import chat

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar(**fields: Any) -> tuple[str, Grammar] | None:
    body: ChatBody = chat(**fields)
    return body.grammar()


def schema_of(found: tuple[str, Grammar] | None) -> tuple[str, Any]:
    assert found is not None
    assert found[1].kind is GrammarKind.JSON_SCHEMA
    return found[0], json.loads(found[1].text)


@pytest.mark.parametrize(
    ("fields", "field", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "guided_json", SCHEMA),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, "guided_json", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", SCHEMA),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs",
            {"type": "object"},
        ),
    ],
)
def test_schemas(fields: dict[str, Any], field: str, schema: dict[str, Any]) -> None:
    assert schema_of(grammar(**fields)) == (field, schema)


def test_others() -> None:
    assert grammar(guided_regex="a+") == ("guided_regex", Grammar(GrammarKind.REGEX, "a+"))
    assert grammar(guided_choice=["a", "b"]) == (
        "guided_choice",
        Grammar(GrammarKind.CHOICE, '["a","b"]'),
    )
    assert grammar(structured_outputs={"grammar": "start: A"}) == (
        "structured_outputs",
        Grammar(GrammarKind.LARK, "start: A"),
    )


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_any_text_needs_none(fields: dict[str, Any]) -> None:
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ],
)
def test_two_at_once_or_too_long_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
