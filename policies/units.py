"""Kinds of values that options of policies take.

Covers ranges, times and sizes with units, what a selector goes by, as annotations of constructors' arguments,
and saying a time or a size as a file would. Does not cover checking them (`pie.policies.options`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", re.ASCII)
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_MOST = 1e9
"""A larger number is a mistake, and what is reckoned with it could be none any more."""
_MOST_DAYS = 10_000
_MOST_BYTES = 1 << 60
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Unit:
    """A mark of an annotation: what it holds has a unit."""

    text: Callable[[float], str]
    """Returns a value as a policy file would say it."""


@dataclass(frozen=True, slots=True)
class SelectsBy:
    """A mark of an annotation: what it holds selects pages or conversations by this."""

    what: Literal["tenant", "session", "model", "prefix"]


def seconds_text(value: float) -> str:
    """Return a time as a policy file would say it, in the largest unit that goes into it: `2h`."""
    exact = Decimal(repr(float(value)))
    for name, unit_s in reversed(_UNITS_S.items()):
        count = (exact / Decimal(str(unit_s))).to_integral_value()
        # As it is read, so that it is the same also where that rounds.
        if count and float(count) * unit_s == value:
            return f"{count:f}{name}"
    return f"{exact:f}s"


def bytes_text(value: float) -> str:
    """Return a size as a policy file would say it, in the largest unit that goes into it: `2GiB`."""
    count, unit = int(value), 0
    while count and count % 1024 == 0 and unit < len(_SIZES) - 1:
        count, unit = count // 1024, unit + 1
    return f"{count}{_SIZES[unit]}" if unit else str(count)


def _seconds(value: object) -> object:
    if isinstance(value, str):
        found = _SECONDS.fullmatch(value.strip())
        if found is None:
            raise PydanticCustomError("time", "must be a time such as `30s`, `10m`, `2h` or `1d`")
        value = float(found[1]) * _UNITS_S[found[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PydanticCustomError("time", "must be a time such as `30s`, `10m`, `2h` or `1d`")
    if not 0 < value <= _MOST_DAYS * _UNITS_S["d"]:
        raise PydanticCustomError("time", f"must be longer than 0 and at most {_MOST_DAYS}d")
    return float(value)


def _bytes(value: object) -> object:
    if isinstance(value, str) and not value.lstrip().startswith("-"):
        try:
            value = int(_SIZE.validate_python(value))
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PydanticCustomError("size", "must be a size above 0, such as `512MiB` or `2GiB`")
    if value > _MOST_BYTES:
        raise PydanticCustomError("size", "must be a size of at most `1024PiB`")
    return value


Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False)]
"""A number above 0."""

NonNegative = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]
"""A number from 0."""

Ratio = Annotated[float, Field(ge=1, le=_MOST, allow_inf_nan=False)]
"""How many times as much one may be as another."""

Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""A number between 0 and 1."""

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
"""A whole number from 1."""

Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Unit(seconds_text),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "maximum": _MOST_DAYS * _UNITS_S["d"],
                },
                {"type": "string", "pattern": rf"^{_SECONDS.pattern}$"},
            ]
        }
    ),
]
"""A time in seconds, or with a unit: `30s`, `10m`, `2h`, `1d`."""

Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    Unit(bytes_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": _MOST_BYTES},
                {"type": "string", "pattern": r"^\d"},
            ]
        }
    ),
]
"""A number of bytes, or with a unit: `512MiB`, `2GiB`."""

TenantPattern = Annotated[str, SelectsBy("tenant")]
"""The tag of a tenant's pages, or a pattern; `""` is no tenant."""

SessionPattern = Annotated[str, SelectsBy("session")]
"""The tag of a conversation, or a pattern; `""` is none."""

ModelPattern = Annotated[str, SelectsBy("model")]
"""The root of a model in hexadecimal, or a pattern."""

PrefixName = Annotated[str, SelectsBy("prefix")]
"""A name from the file's `prefixes`, or a page's key in hexadecimal."""
