"""Shapes of `/v1/models` and of errors."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    """One served model."""

    id: str
    created: int
    max_model_len: int
    """Most tokens of prompt and answer together."""
    object: Literal["model"] = "model"
    owned_by: str = "pie"


class ModelList(msgspec.Struct):
    """The models that can be asked for."""

    data: list[Model]
    object: Literal["list"] = "list"


class ApiErrorDetails(msgspec.Struct):
    """What is wrong with a request, or with us."""

    message: str
    type: str
    param: str | None
    code: str | None


class ApiErrorBody(msgspec.Struct):
    """Every answer that is not a success."""

    error: ApiErrorDetails
