"""Text that is tokenised once: what lies between special tokens is remembered by its exact text.

Covers which special tokens cut a text so that the parts are tokenised alike wherever they stand, and a
bounded memory of parts. Does not cover which answers a router has given (`pie.router.memory`).

A tokenizer cuts a text at its added tokens before it does anything else, the longest one at the leftmost
place first, and what it makes of the parts depends on the part alone, but for three things: tokens that
take blanks beside them along, tokens that must stand apart from words, and models that put a blank before
the very beginning of a text. So a text is cut here only at tokens that are found wherever they are spelt,
and a part is remembered as the beginning of a text or as what comes after such a token. The tests hold
this to tokenising texts as a whole, for every kind of tokenizer.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from string import punctuation

from pie.tokens.tokenizer import Tokenizer

_ENTRY_BYTES = 500
"""What an entry takes besides its text and ids, measured with `sys.getsizeof` and rounded up."""
_MOST_CUTS = 64
"""Tokens that a text is cut at: all are looked for wherever one of them may begin."""

_EDGES = frozenset(punctuation) - {"_"}

Key = tuple[bytes, bool, str]
Encode = Callable[[str], Sequence[int]]


class PieceMemory:
    """Ids of parts of texts, the least recently used forgotten first. Safe to use from several threads.

    Args:
        budget_bytes: Most memory to take; 0 remembers nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, keys: Iterable[Key]) -> list[array[int] | None]:
        """Return the ids of each part; None where they are not known."""
        found: list[array[int] | None] = []
        with self._lock:
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids)
        return found

    def put(self, parts: Iterable[tuple[Key, array[int]]]) -> None:
        """Remember the ids of parts; nobody changes them from now on."""
        with self._lock:
            for key, ids in parts:
                size = _size(key, ids)
                if key in self._entries or size > self.budget_bytes:
                    continue
                self._entries[key] = ids
                self.used_bytes += size
            while self.used_bytes > self.budget_bytes:
                self.used_bytes -= _size(*self._entries.popitem(last=False))

    def check(self) -> None:
        """Assert that the memory agrees with itself; for tests."""
        assert self.used_bytes == sum(_size(*item) for item in self._entries.items())
        assert self.used_bytes <= self.budget_bytes


class PieceEncoder:
    """Tokenises texts of one tokenizer, each part between special tokens once.

    Args:
        tokenizer: The tokenizer.
        wanted: Special tokens to cut at, as far as that changes nothing; those of a chat template.
        memory: Remembers parts.
    """

    def __init__(self, tokenizer: Tokenizer, wanted: Iterable[str], memory: PieceMemory) -> None:
        self._memory = memory
        self.cuts = sure_cuts(tokenizer, wanted)
        """Tokens at which texts are cut, with their ids."""
        self._cut_ids = frozenset(self.cuts.values())
        spelt = sorted(self.cuts, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, spelt)) if spelt else r"(?!)")

    def encode(self, space: bytes, text: str, encode: Encode) -> array[int]:
        """Return the ids of `text`.

        Args:
            space: What keeps apart those who must not learn from the time that it takes whether
                somebody else has sent a text; the same for all texts of one tokenizer and caller.
            text: The text.
            encode: Tokenises what is not remembered, a part of `text` or all of it.
        """
        marks = list(self._find.finditer(text))
        if not marks or not self._memory.budget_bytes:
            return array("I", encode(text))
        starts = [0, *(mark.end() for mark in marks)]
        ends = [*(mark.start() for mark in marks), len(text)]
        keys = [
            (space, at == 0, text[start:end])
            for at, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        parts = self._memory.get(keys)
        missing = [at for at, ids in enumerate(parts) if ids is None]
        if missing:
            first, last = missing[0], missing[-1]
            begin = marks[first - 1].start() if first else 0
            made = self._cut(encode(text[begin : ends[last]]), after_cut=first > 0)
            if len(made) != last - first + 1:
                # A part spells a token that cuts, which no tokenizer known does; nothing is lost.
                return array("I", encode(text))
            parts[first : last + 1] = made
            self._memory.put((keys[at], made[at - first]) for at in missing)
        ids = array("I")
        for at, part in enumerate(parts):
            assert part is not None
            if at:
                ids.append(self.cuts[marks[at - 1][0]])
            ids += part
        return ids

    def _cut(self, ids: Sequence[int], *, after_cut: bool) -> list[array[int]]:
        """Return the ids of each part of a text that was tokenised as a whole."""
        at = [place for place, id_ in enumerate(ids) if id_ in self._cut_ids]
        starts = [*(() if after_cut else (0,)), *(place + 1 for place in at)]
        ends = [*(at[1:] if after_cut else at), len(ids)]
        return [array("I", ids[start:end]) for start, end in zip(starts, ends, strict=True)]


def sure_cuts(tokenizer: Tokenizer, wanted: Iterable[str]) -> dict[str, int]:
    """Return those of `wanted` at which a text may be cut, with their ids.

    Each is found wherever it is spelt: no other token that is looked for in a text as it stands holds
    it, or ends with what it begins with. And nothing beside it is tokenised otherwise because it is
    there: it takes no blanks along, and begins and ends with a sign that is neither blank nor of a word.
    """
    plain = [token for token in tokenizer.added_tokens if token.content and not token.normalized]
    chosen = frozenset(wanted)
    found: dict[str, int] = {}
    for token in plain:
        text, id_ = token.content, tokenizer.token_id(token.content)
        if text not in chosen or id_ is None or len(found) == _MOST_CUTS:
            continue
        if token.special and tokenizer.splits_special:
            continue
        if token.lstrip or token.rstrip or token.single_word or not {text[0], text[-1]} <= _EDGES:
            continue
        others = (other.content for other in plain if other.content != text)
        if not any(_hides(other, text) for other in others):
            found[text] = id_
    return found


def _hides(other: str, text: str) -> bool:
    """Say whether a text may hold `other` where `text` begins, or around it."""
    return text in other or any(other.endswith(text[:size]) for size in range(1, len(text)))


def _size(key: Key, ids: array[int]) -> int:
    """Return what an entry counts for."""
    return _ENTRY_BYTES + sys.getsizeof(key[2]) + len(ids) * ids.itemsize
