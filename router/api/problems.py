"""How the mistakes in a body are told.

Covers turning all that is wrong with a body into one OpenAI-shaped error. Does not cover finding
mistakes (`pie.router.api.body`, `pie.router.api.extras`, `pie.router.api.bulk`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pie.router.errors import invalid

_MOST_TOLD = 10
"""Problems that one answer names."""

_OF_SEVERAL_FIELDS = (
    "stream_options",
    "best_of",
    "echo",
    "max_tokens",
    "prompt_logprobs",
    "top_logprobs",
    "tool_choice",
    "continue_final_message",
)
"""Mistakes that lie in how fields go together, named like the field that they are told of."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one field."""

    param: str | None
    message: str
    code: str | None = None


def problems_of(error: ValidationError) -> list[Problem]:
    """Return what a schema found; few, because every list and dictionary stops at its first mistake.

    Raises:
        ApiError: The body is no JSON, or nested too deeply.
    """
    return [_problem(item) for item in error.errors(include_url=False, include_input=False)]


def refuse(problems: Iterable[Problem]) -> None:
    """Do nothing where there is no problem; no more are looked for than are told.

    Raises:
        ApiError: 400 that names the first ones.
    """
    found = list(islice(problems, _MOST_TOLD + 1))
    if not found:
        return
    told = [problem.message for problem in found[:_MOST_TOLD]]
    if len(found) > len(told):
        told.append("and more")
    raise invalid("; ".join(told), found[0].param, found[0].code) from None


def field_path(loc: Sequence[int | str]) -> str | None:
    """Return where a problem is, such as `messages[0].content`; None for the body itself."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path or None


def _problem(item: ErrorDetails) -> Problem:
    kind, message = item["type"], item["msg"]
    if kind == "json_invalid":
        if "recursion limit" in message:
            raise invalid("The body is nested more than 200 levels deep.", None, "invalid_json")
        raise invalid(f"The body is not JSON: {message}", None, "invalid_json")
    if kind == "model_type":
        message = "must be an object"
    elif kind == "missing":
        message = "is required"
    elif kind == "too_long":
        message = f"at most {item['ctx']['max_length']:,} items"
    loc = item["loc"]
    if (field := item.get("ctx", {}).get("field")) is not None:
        # What a rule for several fields says of one of them.
        loc = (*loc, field)
    param = field_path(loc)
    if kind in _OF_SEVERAL_FIELDS:
        param = kind
    elif param is not None:
        message = f"{param}: {message[:1].lower()}{message[1:]}"
    elif kind == "model_type":
        message = "The body must be a JSON object."
    return Problem(param, message, _code(kind))


def _code(kind: str) -> str:
    """Return OpenAI's code for a kind of mistake that pydantic found."""
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
