"""Options of a policy, checked against its constructor.

Covers which options a class takes and whether values fit. Does not cover where in the file they
stand (`pie.policies.loader`).
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic_core import SchemaError

from pie.policies.containing import is_own
from pie.policies.registry import did_you_mean
from pie.policies.telling import name_of, said_by

_Mark = TypeVar("_Mark")


@dataclass(frozen=True, slots=True)
class OptionProblem:
    """One thing wrong with an option; `option` is empty where it is about all of them."""

    option: str
    message: str


def check_options(
    policy: type[object], options: Mapping[str, object]
) -> tuple[dict[str, object], list[OptionProblem]]:
    """Return the options as the constructor wants them, and what is wrong with them.

    A policy's options are its constructor's arguments; their annotations say what they may be. The
    policy is made once, so that its own checks speak too. Runs its code, whatever that may do and raise.
    """
    model, takes_any = _options_model(policy)
    told = json.dumps(options, default=str)
    try:
        # JSON mode is strict where it should be ("5" is no number) and takes a list for a tuple.
        checked = model.model_validate_json(told, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        wrong = [_explain(model, detail, options) for detail in details]
        if all(detail["type"] == "extra_forbidden" for detail in details):
            # What it says of the others is to be told at once too.
            unknown = {problem.option for problem in wrong}
            known = {name: value for name, value in options.items() if name not in unknown}
            wrong += check_options(policy, known)[1]
        return {}, wrong
    values: dict[str, object] = {name: getattr(checked, f"o_{name}") for name in _given(checked)}
    if takes_any:
        values.update(checked.model_extra or {})
    name = name_of(policy)
    try:
        made = type(policy(**values))
    except BaseException as error:
        if not is_own(error):
            raise
        said = said_by(error)
        return {}, [OptionProblem(_named_in(said, options), f"{name} refuses its options: {said}")]
    if not issubclass(made, policy):
        # A `__new__` of its own may return anything.
        said = f"{name} is of the wrong kind: it makes a {name_of(made)}, and no {name}"
        return {}, [OptionProblem("", said)]
    return values, []


def _named_in(said: str, options: Collection[str]) -> str:
    """Return the option that a sentence is about: it begins with its name, or has it alone in quotes."""
    quoted = [name for name in options if re.search(rf"[`'\"]{re.escape(name)}[`'\"]", said)]
    first = re.match(r"[`'\"]?(\w+)", said)
    if first is not None and first[1] in options:
        return first[1]
    return quoted[0] if len(quoted) == 1 else ""


def options_schema(policy: type[object]) -> dict[str, object]:
    """Return the JSON Schema of a policy's options."""
    schema = _options_model(policy)[0].model_json_schema(by_alias=True)
    schema.pop("title", None)
    for option in schema.get("properties", {}).values():
        option.pop("title", None)
    return schema


def marked(policy: type[object], kind: type[_Mark]) -> Mapping[str, _Mark]:
    """Return the options whose annotations have a mark of a kind, such as `Unit`, with that mark."""
    found = {name: _mark_in(annotation, kind) for name, annotation in _hints(policy).items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def _hints(policy: type[object]) -> Mapping[str, object]:
    try:
        return typing.get_type_hints(policy.__init__, include_extras=True)
    except (NameError, TypeError, AttributeError):  # names that exist for a type checker alone
        return {}


def _mark_in(annotation: object, kind: type[_Mark]) -> _Mark | None:
    """Return the mark of an annotation, or of one of those that it is made of."""
    for one in getattr(annotation, "__metadata__", ()):
        if isinstance(one, kind):
            return one
    inner = (_mark_in(one, kind) for one in typing.get_args(annotation))
    return next((mark for mark in inner if mark is not None), None)


def _given(checked: BaseModel) -> list[str]:
    """Return the names of the options that were set."""
    fields = type(checked).model_fields
    return [str(fields[name].alias) for name in sorted(checked.model_fields_set) if name in fields]


def _options_model(policy: type[object]) -> tuple[type[BaseModel], bool]:
    """Return a model with a field for each argument of the constructor, and whether it takes any."""
    try:
        parameters = list(inspect.signature(policy).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    hints = _hints(policy)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    fields: dict[str, typing.Any] = {}
    for parameter in parameters:
        if parameter.kind not in {
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        }:
            continue
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        annotation = hints.get(parameter.name, typing.Any)
        # The prefix keeps options apart from what pydantic models have themselves.
        fields[f"o_{parameter.name}"] = (annotation, Field(default, alias=parameter.name))
    config = ConfigDict(extra="allow" if takes_any else "forbid")
    try:
        return create_model("Options", __config__=config, **fields), takes_any
    except SchemaError as error:
        text = str(error)
        option = re.search(r'Field "o_(\w+)"', text)
        of = f" of `{option[1]}`" if option else ""
        raise TypeError(f"the annotation{of}: {text.splitlines()[-1].strip()}") from None
    except PydanticUserError:  # an annotation that no value from a file could have
        loose: dict[str, typing.Any] = {n: (typing.Any, field[1]) for n, field in fields.items()}
        return create_model("Options", __config__=config, **loose), takes_any


def _explain(
    model: type[BaseModel],
    detail: typing.Any,  # noqa: ANN401
    options: Mapping[str, object],
) -> OptionProblem:
    """Return one of pydantic's error details as a problem."""
    option = str(detail["loc"][0]) if detail["loc"] else ""
    names = [str(info.alias) for info in model.model_fields.values()]
    if detail["type"] == "extra_forbidden":
        allowed = ", ".join(f"`{name}`" for name in names) or "none"
        hint = did_you_mean(option, names)
        return OptionProblem(option, f"no such option{hint}; allowed are {allowed}")
    if detail["type"] == "missing":
        return OptionProblem("", f"option `{option}` is needed")
    if detail["type"] == "string_type" and isinstance(detail["input"], (int, float)):
        # Such as a tag of nothing but digits.
        said = f"must be text, in quotes where it could be read as a number, not {_short(detail['input'])}"
        return OptionProblem(option, said)
    message = str(detail["msg"])
    held = options.get(option)
    # Of a mapping the key whose value is meant, but for where the key itself is.
    inner = detail["loc"][1] if isinstance(held, Mapping) and len(detail["loc"]) == 2 else None
    at = "" if inner is None else f"`{inner}`: "
    return OptionProblem(
        option, f"{at}{message[0].lower()}{message[1:]}, not {_short(detail['input'])}"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
