"""What an answer must look like: `response_format`, and vLLM's `structured_outputs` and `guided_*`.

Covers their schemas, and the one grammar that they come to. Does not cover compiling it
(`pie.worker.grammar`) or tools (`pie.router.api.tools`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from pie.router.errors import invalid
from pie.wire.messages import Grammar, GrammarKind

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

Schema = dict[str, Any] | bool
"""A JSON Schema."""


class TextFormat(BaseModel):
    """Any text."""

    model_config = _STRICT

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = _STRICT

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON Schema with a name."""

    model_config = _STRICT

    name: str | None = Field(default=None, description="Not used.")
    description: str | None = Field(default=None, description="Not used.")
    schema_: dict[str, Any] = Field(
        alias="schema", description="The schema; an empty one is any JSON object."
    )
    strict: bool | None = Field(default=None, description="Not used: answers always match.")


class JsonSchemaFormat(BaseModel):
    """JSON that matches a schema."""

    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format_kind(value: object) -> str:
    """Tell formats apart by their type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}"


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("~text")]
    | Annotated[JsonObjectFormat, Tag("~json_object")]
    | Annotated[JsonSchemaFormat, Tag("~json_schema")],
    Discriminator(
        _format_kind,
        custom_error_type="bad_format",
        custom_error_message="must be an object of type text, json_object or json_schema",
    ),
]


class StructuredOutputs(BaseModel):
    """vLLM's way to say it; one of these."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), populate_by_name=True
    )

    json_: str | Schema | None = Field(
        default=None, alias="json", description="A JSON Schema, or its text."
    )
    regex: str | None = Field(
        default=None, description="A regular expression for the whole answer."
    )
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="The answers that there are."
    )
    grammar: str | None = Field(default=None, description="A Lark grammar as llguidance reads it.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")


def format_grammar(format_: ResponseFormat | None) -> tuple[str, Grammar] | None:
    """Return the grammar of a `response_format`, with its field; None for any text."""
    if format_ is None or isinstance(format_, TextFormat):
        return None
    schema = None
    if isinstance(format_, JsonSchemaFormat):
        schema = format_.json_schema.schema_
    return _checked("response_format", _of_schema(schema or {"type": "object"}))


def structured_grammar(given: StructuredOutputs, field: str) -> tuple[str, Grammar] | None:
    """Return the grammar of `structured_outputs` or of `guided_*`, with its field.

    Raises:
        ApiError: More than one is given, or it is too long.
    """
    found: list[Grammar] = []
    if given.json_ is not None:
        text = given.json_
        found.append(
            Grammar(GrammarKind.JSON_SCHEMA, text) if isinstance(text, str) else _of_schema(text)
        )
    if given.regex is not None:
        found.append(Grammar(GrammarKind.REGEX, given.regex))
    if given.choice is not None:
        found.append(Grammar(GrammarKind.CHOICE, msgspec.json.encode(given.choice).decode()))
    if given.grammar is not None:
        found.append(Grammar(GrammarKind.LARK, given.grammar))
    if given.json_object:
        found.append(_of_schema({"type": "object"}))
    if len(found) > 1:
        raise invalid(f"{field}: only one of json, regex, choice, grammar and json_object", field)
    return _checked(field, found[0]) if found else None


def only_one(*given: tuple[str, Grammar] | None) -> tuple[str, Grammar] | None:
    """Return the one grammar of several fields; None where there is none.

    Raises:
        ApiError: There are several.
    """
    found = [one for one in given if one is not None]
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(f"{second}: an answer cannot follow `{first}` as well", second)
    return found[0] if found else None


def _of_schema(schema: Schema) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def _checked(field: str, grammar: Grammar) -> tuple[str, Grammar]:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise invalid(f"{field}: has more than {MAX_GRAMMAR_CHARS:,} characters", field)
    return field, grammar
