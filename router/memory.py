"""Token ids of answers, remembered for the next turn of their conversation.

Covers finding, in a new conversation, the longest beginning that ended with an answer made here,
with the very ids that the model read and generated. A model need not spell an answer the way its
tokenizer would; without this, the pages of such an answer are never hit again. Does not cover
rendering or tokenising (`pie.router.prompt`). Pure: bounded by bytes, least recently used first.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

_ENTRY_BYTES = 400
"""What an entry takes besides its ids, measured with `sys.getsizeof` and rounded up."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the memory sees it."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """The ids of a rendered conversation up to the end of an answer."""

    chars: int
    """Characters of the rendered conversation that `ids` spell."""
    ids: array[int]


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    """Of the rendered text: a hit is checked against the text itself."""
    found: Remembered


class AnswerMemory:
    """Remembers conversations by exact text.

    Args:
        budget_bytes: Most memory to take; 0 remembers nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(
        self, space: bytes, turns: Iterable[Turn], answer: str, rendered: str, ids: array[int]
    ) -> None:
        """Keep the ids of a conversation that ended with an answer.

        Args:
            space: What keeps models and salts apart.
            turns: The messages that were asked about.
            answer: The text that the client was given.
            rendered: The rendered prompt, up to where the answer began.
            ids: Ids of `rendered` and `answer` together, without the token that ended the answer.
        """
        size = _ENTRY_BYTES + len(ids) * ids.itemsize
        if size > self.budget_bytes:
            return
        key = space
        for key in _chain(space, (*turns, Turn("assistant", answer))):  # noqa: B007
            pass
        text = rendered + answer
        old = self._entries.pop(key, None)
        if old is not None:
            self.used_bytes -= _size(old)
        self._entries[key] = _Entry(_digest(text), Remembered(len(text), ids))
        self.used_bytes += size
        while self.used_bytes > self.budget_bytes:
            _, victim = self._entries.popitem(last=False)
            self.used_bytes -= _size(victim)

    def recall(self, space: bytes, turns: Iterable[Turn], rendered: str) -> Remembered | None:
        """Return the longest remembered beginning of `rendered`; None where there is none."""
        if not self._entries:
            return None
        turns = tuple(turns)
        known = [
            key
            for turn, key in zip(turns, _chain(space, turns), strict=True)
            if turn.role == "assistant" and key in self._entries
        ]
        for key in reversed(known):
            entry = self._entries[key]
            chars = entry.found.chars
            if len(rendered) >= chars and _digest(rendered[:chars]) == entry.digest:
                self._entries.move_to_end(key)
                return entry.found
        return None

    def check(self) -> None:
        """Assert that the memory agrees with itself; for tests."""
        assert self.used_bytes == sum(map(_size, self._entries.values()))
        assert self.used_bytes <= self.budget_bytes


def _size(entry: _Entry) -> int:
    """Return what an entry counts for."""
    return _ENTRY_BYTES + len(entry.found.ids) * entry.found.ids.itemsize


def _digest(text: str) -> bytes:
    """Return a name for a text."""
    return blake3(text.encode("utf-8", errors="surrogatepass")).digest()


def _chain(space: bytes, turns: Iterable[Turn]) -> Iterator[bytes]:
    """Yield a name for each beginning of a conversation."""
    key = space
    for turn in turns:
        text = turn.text.encode("utf-8", errors="surrogatepass")
        role = turn.role.encode()
        head = struct.pack("<IQ", len(role), len(text))
        key = blake3(key + head + role + text).digest()
        yield key
