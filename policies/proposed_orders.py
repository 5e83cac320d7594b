"""What a policy proposes, as orders that run no code of its.

Covers telling orders from anything else, and cutting texts to what can be kept. Pure. Does not cover whether an order
makes sense (`pie.policies.order_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

from pie.page.key import KEY_BYTES
from pie.policies.cluster_policy import (
    FetchPages,
    LetGo,
    MoveSession,
    Order,
    SetCopies,
    StorePages,
    WantWorkers,
)
from pie.policies.containing import is_own
from pie.policies.order_limits import MOST_SEQUENCE_PAGES

MOST_CHARS = 300
"""Of a reason or a name: an event is kept in Redis, and there are a thousand."""
_MOST_NUMBER = (1 << 31) - 1
_PAGES: Mapping[str, type[object]] = {"place": str, "pages": Sequence, "reason": str}
_FIELDS: Mapping[type[object], Mapping[str, type[object]]] = {
    SetCopies: {"group": bytes, "copies": int, "reason": str},
    StorePages: _PAGES,
    FetchPages: _PAGES,
    LetGo: {**_PAGES, "start": int, "also_last": bool},
    MoveSession: {"session": str, "place": str, "reason": str},
    WantWorkers: {"model": str, "workers": int, "reason": str},
}
"""What the fields of an order must be: a user's policy may say anything."""


def order_of(proposal: object) -> Order | None:
    """Return a proposal with fields of Python's own types, so that none runs a policy's code; None where it is no order."""
    kind = type(proposal)
    fields = _FIELDS.get(kind)
    if fields is None:
        return None
    try:
        found = {name: _field(getattr(proposal, name), of) for name, of in fields.items()}
    except BaseException as error:
        if not is_own(error):
            raise
        return None
    return cast(Order, kind(**found))


def _field(value: object, kind: type[object]) -> object:
    """Return what a field says.

    Raises:
        TypeError: It is of another type; whatever else the value raises.
        ValueError: It is a number, or a key, that nothing has.
    """
    if not isinstance(value, kind):
        raise TypeError(kind.__name__)
    if kind is bytes:
        key = bytes(memoryview(cast(bytes, value)))
        if len(key) != KEY_BYTES:
            raise ValueError("key")
        return key
    if kind is int:
        number = int.__int__(cast(int, value))
        if abs(number) > _MOST_NUMBER:
            raise ValueError("number")
        return number
    if kind is str:
        # More than is kept, so that a longer name is not taken for one that is there.
        return str.__str__(cast(str, value))[: MOST_CHARS + 1]
    if kind is Sequence:
        few = type(value) is tuple and len(value) <= MOST_SEQUENCE_PAGES
        if few and set(map(type, cast(tuple[object, ...], value))) <= {bytes}:
            # Most are parts of what was shown, some of them long.
            if set(map(len, cast(tuple[bytes, ...], value))) <= {KEY_BYTES}:
                return value
            raise ValueError("key")
        pages = islice(cast(Sequence[object], value), MOST_SEQUENCE_PAGES + 1)
        return tuple(_field(page, bytes) for page in pages)
    return value


def kept(text: str) -> str:
    """Return a text as it is kept in the log of events."""
    cut = text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"
    escaped = cut.encode("utf-8", "backslashreplace").decode()
    return escaped if len(escaped) <= MOST_CHARS else f"{escaped[: MOST_CHARS - 1]}…"
