"""Kinds of values that options of policies take.

Covers ranges, times and sizes with units, as annotations of constructors' arguments. Does not cover
checking them (`pie.policies.options`).
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _seconds(value: object) -> object:
    if isinstance(value, str):
        found = _SECONDS.fullmatch(value.strip())
        if found is None:
            raise PydanticCustomError("time", "must be a time such as `30s`, `10m`, `2h` or `1d`")
        value = float(found[1]) * _UNITS_S[found[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PydanticCustomError("time", "must be a time such as `30s`, `10m`, `2h` or `1d`")
    if not 0 < value < math.inf:
        raise PydanticCustomError("time", "must be longer than 0")
    return float(value)


def _bytes(value: object) -> object:
    if isinstance(value, str) and not value.lstrip().startswith("-"):
        try:
            value = int(_SIZE.validate_python(value))
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PydanticCustomError("size", "must be a size above 0, such as `512MiB` or `2GiB`")
    return value


Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""

Share = Annotated[float, Field(gt=0, lt=1)]
"""A number between 0 and 1."""

Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""

Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": rf"^{_SECONDS.pattern}$"},
            ]
        }
    ),
]
"""A time in seconds, or with a unit: `30s`, `10m`, `2h`, `1d`."""

Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\d"}]}
    ),
]
"""A number of bytes, or with a unit: `512MiB`, `2GiB`."""
