"""What is told of a user's class, and of an error that a user's code has raised.

Covers names, texts and places of which none runs the user's code and none is long, so that the thread that tells
neither hangs nor raises; and, for threads where the user's code may run, what an error says by itself. Pure. Does not
cover when that is told (`pie.policies.failing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

MOST_SAID = 300
"""Characters of what an error says: it may be of any length."""
_MOST_NAMED = 100
_MOST_PARTS = 8
_MOST_NUMBER_BITS = 1_024
_MOST_FRAMES = 20

# As the base types read them: a user's type may answer in their place.
_NAME, _QUALIFIED, _MODULE, _BASES, _VARIABLES = (
    vars(type)[name].__get__
    for name in ("__name__", "__qualname__", "__module__", "__mro__", "__dict__")
)
_ARGUMENTS, _TRACEBACK = (vars(BaseException)[name].__get__ for name in ("args", "__traceback__"))
_UNICODE = ("encoding", "reason")
_READ: Mapping[type[BaseException], Sequence[str]] = {
    OSError: ("errno", "strerror", "filename", "filename2"),
    ImportError: ("msg",),
    SyntaxError: ("msg", "filename", "lineno"),
    UnicodeEncodeError: _UNICODE,
    UnicodeDecodeError: _UNICODE,
    UnicodeTranslateError: ("reason",),
    BaseExceptionGroup: ("message",),
}
"""Errors of Python's that say more than their arguments, with what they read for it."""


def name_of(kind: type[object]) -> str:
    """Return a class's name."""
    return _text_of(_NAME(kind))


def qualified_name_of(kind: type[object]) -> str:
    """Return a class's name, with those of the classes that it stands in."""
    return _text_of(_QUALIFIED(kind))


def module_of(kind: type[object]) -> str:
    """Return the name of a class's module."""
    return _text_of(_MODULE(kind))


def told(error: BaseException) -> str:
    """Return what an error is, what it says and where it was raised, in one line.

    What only code of the user's could say is left out.
    """
    text = _said(error)
    kind = name_of(type(error))
    return f"{kind}: {text}{place_of(error, ' (', ')')}" if text else f"{kind}{place_of(error)}"


def said_by(error: BaseException, *, names_kind: bool = False) -> str:
    """Return what an error says, in one line; runs the user's code, but never raises what that raises.

    For a thread of the user's own.

    Args:
        error: The error.
        names_kind: Whether its class is named also where it is an `Exception` that says something.
    """
    kind = name_of(type(error))
    try:
        text = str.__str__(str(error))
    except BaseException:  # noqa: BLE001 - whatever it is, it is the user's code's
        return f"{kind}{place_of(error)}, which does not say what it is"
    if not text:
        return kind
    return (
        f"{kind}: {line(text)}"
        if names_kind or not issubclass(type(error), Exception)
        else line(text)
    )


def place_of(error: BaseException, before: str = " at ", after: str = "") -> str:
    """Return where an error was raised, between `before` and `after`; nothing where it was not."""
    last = ""
    for last in _places(error, ":{}"):  # noqa: B007
        pass
    return f"{before}{last}{after}" if last else ""


def trace_of(error: BaseException) -> list[str]:
    """Return the way to where an error was raised, a line for each of the last calls."""
    return list(_places(error, ", line {}, in {}"))[-_MOST_FRAMES:]


def line(text: str, most: int = MOST_SAID) -> str:
    """Return a text in one line, whatever is in it, and no more than some of it."""
    short = text if len(text) <= most else f"{text[:most]}…"
    return "".join(c if c.isprintable() else " " for c in short)


def _places(error: BaseException, form: str) -> Iterator[str]:
    frame: TracebackType | None = _TRACEBACK(error)
    while frame is not None:
        code = frame.tb_frame.f_code
        yield _text_of(code.co_filename, MOST_SAID) + form.format(
            frame.tb_lineno, _text_of(code.co_qualname)
        )
        frame = frame.tb_next


def _text_of(name: object, most: int = _MOST_NAMED) -> str:
    return line(str.__str__(name)[:most]) if issubclass(type(name), str) else "?"


def _said(error: BaseException) -> str:
    """Return what an error says of Python's own values, by code of Python's."""
    owner = next(base for base in _BASES(type(error)) if "__str__" in _VARIABLES(base))
    arguments: tuple[object, ...] = _ARGUMENTS(error)
    # A class of a class of a user's may have any hash.
    read = _READ.get(owner) if type(owner) is type else None
    if read is not None:
        values = [_VARIABLES(owner)[name].__get__(error) for name in read]
        if not issubclass(owner, (UnicodeError, SyntaxError, BaseExceptionGroup)):
            values += arguments
        if all(_is_short(value) for value in values):
            text: str = _VARIABLES(owner)["__str__"](error)
            return line(text)
    elif owner is not BaseException and owner is not KeyError:
        return ""
    if len(arguments) == 1 and type(arguments[0]) is str and owner is not KeyError:
        return line(arguments[0])
    return line(_together(arguments) if len(arguments) != 1 else _shown(arguments[0]))


def _is_short(value: object) -> bool:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value) <= MOST_SAID  # type: ignore[arg-type]
    return value is None or (kind is int and _is_small(value))


def _is_small(number: Any) -> bool:  # noqa: ANN401
    return bool(number.bit_length() <= _MOST_NUMBER_BITS)


def _shown(value: object, depth: int = 0) -> str:
    """Return a value as code has it where it is Python's own and small, else the name of its type."""
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:MOST_SAID])  # type: ignore[index]
    if value is None or kind is bool or kind is float or (kind is int and _is_small(value)):
        return repr(value)
    if kind is tuple and depth < 2:
        return f"({_together(value, depth + 1)})"  # type: ignore[arg-type]
    return f"<{name_of(kind)}>"


def _together(values: tuple[object, ...], depth: int = 0) -> str:
    shown = [_shown(one, depth) for one in values[:_MOST_PARTS]]
    return ", ".join([*shown, "…"] if len(values) > _MOST_PARTS else shown)
