"""Fields of a body that no schema names.

Covers which are ignored, which are refused, and how that is told. Does not cover fields that are
read (`pie.router.api.body`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import msgspec
from pydantic import BaseModel
from pydantic_core import from_json

from pie.router.api.problems import Problem
from pie.router.errors import shown

HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
"""Fields that change nothing about the text of an answer: ignored."""

UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "lora_request": (),
    "tool_calls": ([],),
}
"""Fields that mean something which is not built, each with values that ask for nothing."""


def extra_problems(extra: Mapping[str, object], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each field that is neither known nor harmless."""
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        param = prefix + shown(name)
        if name not in UNSUPPORTED:
            yield Problem(param, f"{param}: unknown field", "unknown_parameter")
        elif value not in UNSUPPORTED[name]:
            yield Problem(param, f"{param}: not supported", "unsupported_parameter")


def unsupported_problems(
    kind: type[BaseModel], data: bytes | bytearray, told: Collection[str | None]
) -> Iterator[Problem]:
    """Yield a problem for each unsupported field of a body that was refused for others (`told`)."""
    for name, raw in raw_fields(kind, data).items():
        if name not in UNSUPPORTED or name in kind.model_fields or name in told:
            continue
        yield from extra_problems({name: from_json(raw)})


def raw_fields(kind: type[BaseModel], data: bytes | bytearray) -> dict[str, bytes]:
    """Return the JSON of each field of a body that is known by name; nothing of what is no body."""
    try:
        found = _raw_reader(kind).decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    fields = {name: bytes(getattr(found, name)) for name in found.__struct_fields__}
    return {name: raw for name, raw in fields.items() if raw}


@cache
def _raw_reader(kind: type[BaseModel]) -> msgspec.json.Decoder[msgspec.Struct]:
    """Return a decoder that skips through what it does not know, and builds nothing."""
    names = sorted({*kind.model_fields, *UNSUPPORTED, *HARMLESS})
    none = msgspec.Raw(b"")
    return msgspec.json.Decoder(
        msgspec.defstruct("RawFields", [(name, msgspec.Raw, none) for name in names])
    )
