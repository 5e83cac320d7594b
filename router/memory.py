"""Token ids of answers, remembered for the next turn of their conversation.

Covers finding, in a new conversation, the longest beginning that ended with an answer made here,
with the very ids that the model read and generated. A model need not spell an answer the way its
tokenizer would; without this, the pages of such an answer are never hit again. Does not cover
rendering or tokenising (`pie.router.prompt`). Bounded by bytes, least recently used first.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
from blake3 import blake3

_ENTRY_BYTES = 400
"""What an entry takes besides its ids, measured with `sys.getsizeof` and rounded up."""


class Turn(msgspec.Struct, frozen=True):
    """One message as the memory sees it."""

    role: str
    text: str


class Remembered(msgspec.Struct, frozen=True):
    """The ids of a rendered conversation up to the end of an answer."""

    chars: int
    """Characters of the rendered conversation that `ids` spell."""
    ids: array[int]


class _Entry(msgspec.Struct, frozen=True):
    digest: bytes
    """BLAKE3 of the rendered text: a hit is checked against the text itself."""
    found: Remembered


class Said:
    """What has been said in a conversation, named and hashed once: to look for it, and then to add its answer.

    Args:
        space: What keeps models and salts apart.
        turns: The messages.
    """

    def __init__(self, space: bytes, turns: Sequence[Turn]) -> None:
        self._space = space
        self.turns = turns
        self._hashed = blake3()
        self._rendered = ""

    @cached_property
    def keys(self) -> Sequence[bytes]:
        """Names of its beginnings, one for each message."""
        return list(_chain(self._space, self.turns))

    @property
    def answers(self) -> Iterator[bytes]:
        """Names of those that end with an answer."""
        return (
            key for turn, key in zip(self.turns, self.keys, strict=True) if turn.role == "assistant"
        )

    def with_answer(self, answer: str) -> bytes:
        """Return the name of all of it with an answer behind it."""
        before = self.keys[-1] if self.turns else self._space
        return next(_chain(before, (Turn("assistant", answer),)))

    def digest(self, rendered: str, chars: int) -> bytes:
        """Return BLAKE3 of a text's first `chars` characters; cheap for a text that goes on as the last one did."""
        seen = len(self._rendered)
        if seen > chars or not rendered.startswith(self._rendered):
            self._hashed, seen = blake3(), 0
        self._hashed.update(_utf8(rendered[seen:chars]))
        self._rendered = rendered[:chars]
        return self._hashed.digest()


class AnswerMemory:
    """Remembers conversations by exact text. Safe to use from several threads.

    Args:
        budget_bytes: Most memory to take; 0 remembers nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        # Held for look-ups alone, never while a text is hashed.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, said: Said, answer: str, rendered: str, ids: array[int]) -> None:
        """Keep the ids of a conversation that ended with an answer.

        Args:
            said: What was asked about.
            answer: The text that the client was given.
            rendered: The rendered prompt, up to where the answer began.
            ids: Ids of `rendered` and `answer` together, without the token that ended the answer.
        """
        size = _ENTRY_BYTES + len(ids) * ids.itemsize
        if size > self.budget_bytes:
            return
        key, chars = said.with_answer(answer), len(rendered) + len(answer)
        entry = _Entry(said.digest(rendered + answer, chars), Remembered(chars, ids))
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.used_bytes -= _size(old)
            self._entries[key] = entry
            self.used_bytes += size
            while self.used_bytes > self.budget_bytes:
                _, victim = self._entries.popitem(last=False)
                self.used_bytes -= _size(victim)

    def recall(self, said: Said, rendered: str) -> Remembered | None:
        """Return the longest remembered beginning of `rendered`; None where there is none."""
        if not self._entries:
            return None
        keys = list(said.answers)
        with self._lock:
            known = [(key, entry) for key in keys if (entry := self._entries.get(key)) is not None]
        best: bytes | None = None
        found: Remembered | None = None
        # The shorter ones first, so that the text is hashed once, however many of its beginnings are known.
        for key, entry in sorted(known, key=lambda one: one[1].found.chars):
            chars = entry.found.chars
            if chars > len(rendered):
                break
            if said.digest(rendered, chars) == entry.digest:
                best, found = key, entry.found
        if best is not None:
            with self._lock:
                # Another thread may have let it go meanwhile.
                if best in self._entries:
                    self._entries.move_to_end(best)
        return found

    def check(self) -> None:
        """Assert that the memory agrees with itself; for tests."""
        assert self.used_bytes == sum(map(_size, self._entries.values()))
        assert self.used_bytes <= self.budget_bytes


def _size(entry: _Entry) -> int:
    """Return what an entry counts for."""
    return _ENTRY_BYTES + len(entry.found.ids) * entry.found.ids.itemsize


def _utf8(text: str) -> bytes:
    """Return a text as bytes; half of a surrogate pair is no mistake here."""
    return text.encode("utf-8", errors="surrogatepass")


def _chain(space: bytes, turns: Iterable[Turn]) -> Iterator[bytes]:
    """Yield a name for each beginning of a conversation."""
    key = space
    for turn in turns:
        text = _utf8(turn.text)
        role = turn.role.encode()
        head = struct.pack("<IQ", len(role), len(text))
        key = blake3(key + head + role + text).digest()
        yield key
