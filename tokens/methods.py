"""Methods of Python's own values that chat templates may call.

Covers which there are, and what each may make of what it is given. Does not cover filters
(`pie.tokens.filters`) or `str.format` (`pie.tokens.formatting`).

It is a list of what is allowed: a method that a later Python adds is refused until someone has
thought about its size.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import SupportsIndex

from jinja2.runtime import LoopContext
from markupsafe import Markup

from pie.tokens.errors import TemplateLimitError
from pie.tokens.formatting import ESCAPE_FACTOR
from pie.tokens.limits import current
from pie.tokens.weight import weigh

_PIECE_CHARS = 60
"""What a short string takes in memory, and its place in a list."""
_CASE_FACTOR = 3
"""Some letters become three when their case changes."""
_CODECS = {"utf8", "ascii", "latin1", "iso88591", "utf16", "utf16le", "utf16be", "utf32"}
_SCOPES = ("_block_vars", "_loop_vars")
_CODEC_ERRORS = {"strict", "ignore", "replace"}
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_WORD = re.compile(r"\S+")

_TEXT = frozenset(
    [
        "capitalize",
        "casefold",
        "center",
        "count",
        "encode",
        "endswith",
        "expandtabs",
        "find",
        "format",
        "format_map",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    ]
)
_MARKUP = _TEXT | {"striptags", "unescape"}
_NUMBER = frozenset(
    [
        "as_integer_ratio",
        "bit_count",
        "bit_length",
        "conjugate",
        "denominator",
        "hex",
        "imag",
        "is_integer",
        "numerator",
        "real",
    ]
)
_SEQUENCE = frozenset({"copy", "count", "index"})
_RANGE = _SEQUENCE | {"start", "step", "stop"}
# `groupby` makes tuples with names.
_TUPLE = _SEQUENCE | {"grouper", "list"}
_ALLOWED: tuple[tuple[type, frozenset[str]], ...] = (
    (Markup, _MARKUP),
    (str, _TEXT),
    (bytes, frozenset({"decode"})),
    (int, _NUMBER),
    (float, _NUMBER),
    (complex, _NUMBER),
    (list, _SEQUENCE),
    (tuple, _TUPLE),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (range, _RANGE),
)


def is_allowed(value: object, name: str) -> bool:
    """Whether templates may use this attribute, which `value` has."""
    # mypy takes the type of an object for unhashable.
    names = _names(type(value))  # type: ignore[arg-type]
    return names is None or name in names


@lru_cache(maxsize=256)
def _names(kind: type) -> frozenset[str] | None:
    """Return the attributes that templates may use of values of a type; None where they may use all."""
    for allowed, names in _ALLOWED:
        if issubclass(kind, allowed):
            return names
    # Loops, macros, namespaces and the like; what else there is has nothing for templates.
    return None if kind.__module__.startswith(("jinja2.", "pie.")) else frozenset()


def check_method(
    method: object, args: tuple[object, ...], named: dict[str, object]
) -> tuple[object, ...]:
    """Return the arguments to call a method with, which is a method of a value or any function.

    Raises:
        TemplateLimitError: It would make or read too much.
    """
    owner = getattr(method, "__self__", None)
    # jinja2 adds these for functions that take a context.
    given = {key: value for key, value in named.items() if key not in _SCOPES}
    name = getattr(method, "__name__", "")
    if isinstance(owner, str):
        if name == "join" and args and not isinstance(args[0], str | list | tuple | dict):
            args = (_listed(args[0]), *args[1:])
        weigh(args, given)
        text_check = _TEXT_CHECKS.get(name)
        if text_check is not None:
            text_check(owner, *args, **given)
        current().check_size(len(owner))
    elif isinstance(owner, bytes):
        weigh(args, given)
        _encoded("", *args, **given)
    elif isinstance(owner, dict):
        # What it gives when there is nothing may be long; the key is what takes time.
        weigh(*args[:1])
    elif isinstance(owner, list | tuple | range):
        weigh(owner, args)
    elif isinstance(owner, LoopContext):
        # `changed` compares them with those of the turn before.
        weigh(args)
    return args


def _listed(values: object) -> list[object]:
    if not isinstance(values, Iterable):
        raise TypeError("can only join an iterable")
    return list(current().each(values))


def _padded(text: str, width: SupportsIndex, fill: str = " ") -> None:
    del fill
    current().check_size(max(len(text), operator.index(width)))


def _tabs(text: str, tabsize: SupportsIndex = 8) -> None:
    current().check_size(len(text) + text.count("\t") * max(0, operator.index(tabsize)))


def check_replace(text: str, old: str, new: str, count: SupportsIndex = -1) -> None:
    """Refuse `text.replace` if its result may be too long."""
    # Python counts one more empty string than there are characters.
    found, most = text.count(old), operator.index(count)
    if most >= 0:
        found = min(found, most)
    factor = ESCAPE_FACTOR if isinstance(text, Markup) else 1
    current().check_size(len(text) + found * max(0, factor * len(new) - len(old)))


def _joined(text: str, values: Iterable[object]) -> None:
    listed = values if isinstance(values, str | list | tuple | dict) else ()
    factor = ESCAPE_FACTOR if isinstance(text, Markup) else 1
    chars = sum(len(value) for value in listed if isinstance(value, str))
    if factor > 1:
        # It takes what is not text too.
        chars = weigh(listed, escaped=True).chars
    current().check_size(factor * chars + len(text) * len(listed))


def _split(text: str, sep: str | None = None, maxsplit: SupportsIndex = -1) -> None:
    most = operator.index(maxsplit)
    limit = current().limits.output_chars // _PIECE_CHARS
    pieces = len(text) // 2 + 1 if sep is None else text.count(sep) + 1
    if most >= 0:
        pieces = min(pieces, most + 1)
    if sep is None and pieces > limit:
        pieces = sum(1 for _ in islice(_WORD.finditer(text), limit + 1))
    current().check_size(len(text) + _PIECE_CHARS * pieces)


def _rsplit(text: str, sep: str | None = None, maxsplit: SupportsIndex = -1) -> None:
    _split(text, sep, maxsplit)
    _backwards(text, sep)


def _split_lines(text: str, keepends: object = False) -> None:
    del keepends
    check_lines(text, 0)


def check_lines(text: str, added_chars: int) -> int:
    """Return how many lines a text has; refuse it if it is too long with something in each."""
    lines = 1 + sum(map(text.count, _LINE_ENDS))
    current().check_size(len(text) + lines * (_PIECE_CHARS + added_chars))
    return lines


def _backwards(text: str, other: object = None, *ends: object) -> None:
    del ends
    # Python searches forwards in linear time, backwards and for sets of characters it does not.
    if isinstance(other, str):
        current().check_work(len(text) * len(other))


def _cased(text: str) -> None:
    current().check_size(_CASE_FACTOR * len(text))


def _encoded(_: str, encoding: object = "utf-8", errors: object = "strict") -> None:
    plain = re.sub(r"[-_ ]", "", str(encoding).lower())
    if plain not in _CODECS or errors not in _CODEC_ERRORS:
        raise TemplateLimitError(
            "The chat template asks for an encoding other than UTF-8 and its like."
        )


def check_stripped(text: str) -> None:
    """Refuse a text too long to be freed from tags, which takes time with its square."""
    current().check_size(256 * len(text))


_TEXT_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip"), _backwards),
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _cased),
    "encode": _encoded,
    "expandtabs": _tabs,
    "join": _joined,
    "replace": check_replace,
    "rsplit": _rsplit,
    "split": _split,
    "splitlines": _split_lines,
    "striptags": check_stripped,
}
