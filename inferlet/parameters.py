"""What a program takes: the parameters of the function that is called, read without running it.

Covers names, kinds, defaults and the docstring, and turning text into values. Does not cover command
lines (`pie.cluster.run`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

Value = str | int | float | bool
KINDS: dict[str, type[Value]] = {"str": str, "int": int, "float": float, "bool": bool}
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class ProgramTextError(Exception):
    """A program's text, or what is passed to it, is not as it has to be; says so in one sentence."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of `main` after the context."""

    name: str
    kind: str
    """One of `KINDS`."""
    default: Value | None
    """None where a value must be given."""


@dataclass(frozen=True, slots=True)
class ProgramText:
    """What can be known of a program from its text."""

    doc: str
    """The function's docstring, or else the file's."""
    parameters: tuple[Parameter, ...]

    def convert(self, arguments: Mapping[str, str]) -> dict[str, Value]:
        """Return the values to call the function with.

        Raises:
            ProgramTextError: One is missing, unknown or of another kind.
        """
        known = {one.name: one for one in self.parameters}
        for name in arguments:
            if name not in known:
                there = ", ".join(known) or "none"
                raise ProgramTextError(f"there is no parameter {name}: the program takes {there}")
        values: dict[str, Value] = {}
        for name, one in known.items():
            if name in arguments:
                values[name] = _value(one, arguments[name])
            elif one.default is None:
                raise ProgramTextError(f"the parameter {name} ({one.kind}) is missing")
        return values


def read_program(source: str, name: str = "the program", entry: str = "main") -> ProgramText:
    """Return what a program's text says of it.

    Args:
        source: The text.
        name: What it is called in errors.
        entry: The function to be called.

    Raises:
        ProgramTextError: It is not Python, or has no such function, or one that takes something else.
    """
    try:
        tree = ast.parse(source)
    except (MemoryError, RecursionError) as error:
        raise ProgramTextError(f"{name} is nested too deeply, or too long, for Python") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise ProgramTextError(f"{name} is not Python{where}: {error}") from error
    mains = [
        one for one in tree.body if isinstance(one, ast.AsyncFunctionDef) and one.name == entry
    ]
    if not mains:
        raise ProgramTextError(f"{name} has no `async def {entry}(ctx, …)`")
    main = mains[-1]
    taken = main.args
    if taken.vararg or taken.kwarg or taken.posonlyargs or not taken.args:
        raise ProgramTextError(f"`{entry}` in {name} takes the context and then named parameters")
    filled = len(taken.args) - len(taken.defaults)
    defaults: list[ast.expr | None] = [None] * filled + list(taken.defaults)
    pairs = [*zip(taken.args, defaults, strict=True)][1:]
    pairs += zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    parameters = tuple(_parameter(one, default, name) for one, default in pairs)
    return ProgramText(ast.get_docstring(main) or ast.get_docstring(tree) or "", parameters)


def _parameter(one: ast.arg, default: ast.expr | None, program: str) -> Parameter:
    kind = one.annotation.id if isinstance(one.annotation, ast.Name) else ""
    if kind not in KINDS:
        raise ProgramTextError(
            f"the parameter {one.arg} of {program} needs a type that text can be turned into: "
            f"{', '.join(KINDS)}"
        )
    value: Value | None = None
    if default is not None:
        try:
            found = ast.literal_eval(default)
        except ValueError:
            found = None
        if not isinstance(found, (str, int, float, bool)):
            raise ProgramTextError(f"the default of {one.arg} in {program} is not a plain {kind}")
        value = float(found) if kind == "float" and isinstance(found, int) else found
    return Parameter(one.arg, kind, value)


def _value(one: Parameter, text: str) -> Value:
    if one.kind == "bool":
        if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        raise ProgramTextError(f"{one.name} is true or false, not {text!r}")
    try:
        return KINDS[one.kind](text)
    except ValueError as error:
        raise ProgramTextError(f"{one.name} is of type {one.kind}, not {text!r}") from error
