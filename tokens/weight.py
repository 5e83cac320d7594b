"""How long a value is once it is written out.

Covers measuring without writing. Does not cover the limit itself (`pie.tokens.limits`).

A list that holds another twenty times, which holds another twenty times, is small in memory and
never ends as text; comparing two such lists, or hashing one, never ends either. So a value is
measured before an operation goes through all of it, and the measuring stops at the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from jinja2.utils import Namespace

from pie.tokens.errors import TemplateLimitError
from pie.tokens.limits import Run, current

_MAX_NODES = 500_000
_MAX_DEPTH = 400
"""Python compares and hashes nested values by recursion; some of it does not look at its depth."""
_NODE_CHARS = 4
"""What stands around a value: brackets, a comma, a space."""
_NUMBER_CHARS = 24
_OTHER_CHARS = 100
"""Of what is neither text, number nor container: Python writes its type and address."""
_ESCAPE_CHARS = 12
"""The longest escape of one character: a surrogate pair in JSON."""
_CONTROLS = (*map(chr, range(32)), "\x7f")
_VIEWS: tuple[type, ...] = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, *_VIEWS, Namespace)


@dataclass(frozen=True, slots=True)
class Weight:
    """A value written out, at most.

    Attributes:
        chars: Characters.
        nodes: Values in it, itself among them.
        depth: How deep they are nested.
    """

    chars: int
    nodes: int
    depth: int


def weigh(*values: object, escaped: bool = False, ascii_only: bool = False) -> Weight:
    """Return the weight of values together.

    Args:
        values: What is measured; what a generator would make is not.
        escaped: Strings inside containers are written with escapes, as `repr` and JSON do.
        ascii_only: So is whatever is not ASCII.

    Raises:
        TemplateLimitError: It is more than a rendering may write.
    """
    run = current()
    weight = _walk(run, values, escaped=False, ascii_only=False)
    if escaped and weight.chars * _ESCAPE_CHARS > run.limits.output_chars:
        weight = _walk(run, values, escaped=True, ascii_only=ascii_only)
    return weight


def length(value: object) -> int:
    """Return how long `str(value)` may be.

    Raises:
        TemplateLimitError: It is longer than a rendering may write.
    """
    if isinstance(value, str):
        return len(value)
    return weigh(value, escaped=True).chars


def is_plain(values: Iterable[object]) -> bool:
    """Whether all values are such as a conversation has, their weight that of all their parts."""
    plain: tuple[type, ...] = (str, bytes, int, float, type(None), *_CONTAINERS)
    return all(isinstance(value, plain) for value in values)


def _walk(run: Run, values: Iterable[object], *, escaped: bool, ascii_only: bool) -> Weight:
    chars = nodes = deepest = 0
    limit = run.limits.output_chars
    layers: list[Iterator[object]] = [iter(values)]
    while layers:
        for value in layers[-1]:
            nodes += 1
            inside: Iterable[object] | None = None
            if isinstance(value, str):
                # One that stands alone is written as it is.
                nested = escaped and len(layers) > 1
                chars += _escaped_length(value, ascii_only) if nested else len(value)
            elif isinstance(value, _CONTAINERS):
                inside = _inside(value)
            else:
                chars += _chars(value)
            chars += _NODE_CHARS if len(layers) > 1 else 0
            if chars > limit or nodes > _MAX_NODES:
                run.check_size(limit + 1)
            if inside is not None:
                layers.append(iter(inside))
                deepest = max(deepest, len(layers) - 1)
                if deepest > _MAX_DEPTH:
                    raise TemplateLimitError(
                        f"The chat template made lists more than {_MAX_DEPTH} deep in each other."
                    )
                break
        else:
            layers.pop()
    run.tick(1 + nodes // 4 + chars // 4096)
    return Weight(chars, nodes, deepest)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    if isinstance(value, Namespace):
        attributes: object = object.__getattribute__(value, "_Namespace__attrs")
        return (attributes,)
    assert isinstance(value, Iterable)
    return value


def _chars(value: object) -> int:
    if isinstance(value, bytes):
        return 4 * len(value)
    if isinstance(value, int):
        return _NUMBER_CHARS + value.bit_length() // 3
    return _NUMBER_CHARS if value is None or isinstance(value, float) else _OTHER_CHARS


def _escaped_length(text: str, ascii_only: bool) -> int:
    """Return how long a text is in quotes, at most."""
    chars = len(text) + 2
    plain = text.isprintable()
    if not text.isascii() and (ascii_only or not plain):
        # Letters beyond ASCII stay as they are in JSON; `repr` may escape some.
        return _ESCAPE_CHARS * chars
    chars += sum(map(text.count, "\"'\\"))
    return chars if plain else chars + 5 * sum(map(text.count, _CONTROLS))
