"""`adaptive`: keeps what comes back, as this workload shows it.

Covers one built-in retention policy: classes of pages, their age, and which of both leaves first.
Does not cover how worth is learned (`pie.policies.returns`).

A page's class is how often its sequence has come back: a fresh prompt's pages are in class 0, what
an answered conversation adds at its next turn in class 1, and so on by powers of two; every use of
a page counts as a return, so trunks that many share end in the highest class. A page that has left
is remembered for a while, so that a conversation whose pages had to go is known when it comes back.
Pages used at about the same time stand in one queue for each class. Of all queues the one whose
pages are worth least at their age gives first, and there the page unused for longest.

What is learned can be wrong: a workload changes, a class mixes what returns with what does not. So
hits are held against those that `lru` would have had: it holds what was used within the age at which
as many pages as the tier has were used since. Where it would have had more, its order is taken, for
longer each time.

Where nothing has been learned, or all pages come back alike and ever more seldom with age, the
order is that of `lru`.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from pie.page.key import PageKey
from pie.policies.ghosts import GhostTable
from pie.policies.page_rows import Row
from pie.policies.queued import QueuedRetention
from pie.policies.returns import Returns

_CLASSES = 8
_EPOCHS = 64
"""Queues of a class, used in a circle; an epoch is a sixteenth of the pages in ticks."""
_EPOCHS_A_LENGTH = 16
_EPOCHS_AN_UPDATE = 2
_QUEUES = _CLASSES * _EPOCHS
_MOST_TURNS = 255
_TRUNK_CHILDREN = 4
"""A page with more pages after it is a trunk: what follows it is another's sequence."""
_LOOKED_AT = 4096
"""Pages looked at for an update, held ones and ghosts each; a look at a million takes 20 ms."""
_MOST_GHOSTS = 1 << 20
_GHOSTS_A_PAGE = 16
_FADE = 0.97
"""What is left, at an update, of hits counted before; updates come eight to a tier's length."""
_LEAST_SEEN = 0.5
"""Uses, in times the tier's pages, before hits are compared."""
_MAY_LOSE = 0.98
_FIRST_CAUTION = 16
_MOST_CAUTION = 256
"""Updates for which the order of `lru` is taken, the first time and at most."""
_MOST_MOVED = 512
"""Pages moved out of the epoch that is used anew, in one go."""


class AdaptiveRetention(QueuedRetention):
    """Learns which pages return, by class and age, and lets the others go first."""

    def __init__(self) -> None:
        super().__init__(queues=_QUEUES)
        self._turns = array("B")
        self._children_seen = array("B")
        self._ghosts = GhostTable(1 << 10)
        self._returns = Returns(_CLASSES)
        self._worth = self._returns.worth()
        self._epoch = 0
        self._began = [0] * _EPOCHS
        """The tick at which each epoch in the circle began."""
        self._updated_tick = 0
        self._lru_age = 0
        """What was used within so many ticks, `lru` would hold."""
        self._hits = self._lru_hits = 0.0
        self._caution = 0
        """Updates for which the order of `lru` is still taken."""
        self._next_caution = _FIRST_CAUTION
        self._ranked: list[int] = []
        self._is_ranked = array("B", bytes(_QUEUES))

    def grow(self, rows: int) -> None:
        """Make the columns `rows` long."""
        zeros = bytes(rows - len(self._turns))
        self._turns.frombytes(zeros)
        self._children_seen.frombytes(zeros)

    def place(self, row: Row) -> int:
        """Return the queue of a page that has just been stored."""
        rows, turns = self.rows, 0
        parent = rows.parent(row)
        if parent >= 0 and parent != row:
            seen = self._children_seen[parent]
            if seen < _MOST_TURNS:
                self._children_seen[parent] = seen + 1
            if seen < _TRUNK_CHILDREN:
                turns = self._turns[parent]
        ghost = self._ghosts.take(rows.key(row), rows.parts[row])
        if ghost is not None:
            age = self.tick - ghost.tick
            self._returns.used(_class(ghost.note), age)
            self._lru_hits += age < self._lru_age
            turns = min(_MOST_TURNS, ghost.note + 1)
        self._turns[row] = turns
        self._children_seen[row] = min(rows.children[row], _MOST_TURNS)
        return self._queue(turns)

    def use(self, row: Row) -> int:
        """Return the queue of a page that has just been used."""
        turns = self._turns[row]
        age = self.tick - self.stamps[row]
        self._returns.used(_class(turns), age)
        self._hits += 1
        self._lru_hits += age < self._lru_age
        turns = self._turns[row] = min(_MOST_TURNS, turns + 1)
        return self._queue(turns)

    def forget(self, row: Row, key: PageKey, part: int) -> None:
        """Remember a page that has left."""
        self._ghosts.add(key, part, self.stamps[row], self._turns[row])
        self.stamps[row] = -1

    def ranking(self) -> Sequence[int]:
        """Return the queues that hold pages, those that are worth least in front."""
        self._turn_epoch()
        ranked = self._ranked
        while ranked and self.is_empty(ranked[0]):
            self._is_ranked[ranked.pop(0)] = 0
        return ranked

    def _put_in(self, row: Row) -> None:
        if self._bands[row]:
            super()._put_in(row)
            return
        queue = self.queue_of[row]
        if self.stamps[row] < self._began[queue % _EPOCHS]:
            # It was no leaf when its epoch's queues were used anew.
            self.counts[queue] -= 1
            queue += (self._epoch + 2) % _EPOCHS - queue % _EPOCHS
            self.counts[queue] += 1
            self.queue_of[row] = queue
        super()._put_in(row)
        if not self._is_ranked[queue]:
            self._insert(queue)

    def _insert(self, queue: int) -> None:
        """Take a queue that was empty in among the others."""
        insort(self._ranked, queue, key=self.rank_of.__getitem__)
        self._is_ranked[queue] = 1

    def _queue(self, turns: int) -> int:
        self._turn_epoch()
        return _class(turns) * _EPOCHS + self._epoch % _EPOCHS

    def _turn_epoch(self) -> None:
        """Begin a new epoch where the last one is over."""
        length = max(64, len(self.rows))
        if self.tick - self._began[self._epoch % _EPOCHS] < length // _EPOCHS_A_LENGTH:
            return
        if not self._empty_next():
            return
        self._epoch += 1
        self._began[self._epoch % _EPOCHS] = self.tick
        if self._epoch % _EPOCHS_AN_UPDATE == 0:
            self._update(length)
        self._rank()

    def _empty_next(self) -> bool:
        """Move what stands in the oldest epoch's queues to the next one; say whether that is all."""
        oldest, heir = (self._epoch + 1) % _EPOCHS, (self._epoch + 2) % _EPOCHS
        left = _MOST_MOVED
        for kind in range(_CLASSES):
            rows = list(islice(self.standing(kind * _EPOCHS + oldest), left))
            # The youngest first: each then goes in front of all that stand there.
            for row in reversed(rows):
                self.move(row, kind * _EPOCHS + heir, self.stamps[row])
            left -= len(rows)
        return left > 0

    def _update(self, length: int) -> None:
        """Learn from what is there now, and from what was used since the last time."""
        returns = self._returns
        returns.set_length(length)
        self._ghosts = self._ghosts.fitting(min(_MOST_GHOSTS, _GHOSTS_A_PAGE * length))
        returns.fade()
        held = self._see(self.stamps, self._turns)
        left = self._see(self._ghosts.ticks, self._ghosts.notes)
        self._updated_tick = self.tick
        self._worth = returns.worth()
        self._compare(length, held, left)

    def _compare(self, length: int, *seen: tuple[npt.NDArray[np.int64], int]) -> None:
        """Take or leave the order of `lru`, by the hits that it would have had."""
        ages = np.concatenate([ages for ages, _ in seen])
        pages = np.concatenate([np.full(len(ages), weight) for ages, weight in seen])
        order = np.argsort(ages)
        at = int(np.searchsorted(np.cumsum(pages[order]), length))
        self._lru_age = int(ages[order[at]]) if at < len(ages) else self.tick
        if self._caution:
            self._caution -= 1
            self._hits = self._lru_hits = 0.0
            return
        if self._lru_hits >= _LEAST_SEEN * length and self._hits < _MAY_LOSE * self._lru_hits:
            self._caution = self._next_caution
            self._next_caution = min(_MOST_CAUTION, 2 * self._next_caution)
        self._hits *= _FADE
        self._lru_hits *= _FADE

    def _see(
        self, all_ticks: array[int], all_turns: array[int]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Count some pages that are there, or were, as having been so since the last update.

        Returns their ages, and for how many pages each stands.
        """
        ticks, turns = np.frombuffer(all_ticks, np.int64), np.frombuffer(all_turns, np.uint8)
        stride = -(-len(ticks) // _LOOKED_AT)
        if not stride:
            return np.zeros(0, np.int64), 1
        some = slice(self._epoch % stride, None, stride)
        ages, kinds = self.tick - ticks[some], _CLASS_OF_TURNS[turns[some]]
        is_there = ticks[some] >= 0
        since = self.tick - self._updated_tick
        self._returns.seen(kinds[is_there], ages[is_there], ticks=since, weight=stride)
        return ages[is_there], stride

    def _rank(self) -> None:
        """Order the queues that are not empty, by what their pages are worth at their age."""
        began = np.array(self._began)
        bins = self._returns.bins_of(np.maximum(self.tick - began, 1))
        began = np.tile(began, _CLASSES)
        worth = self._worth[:, bins].reshape(-1)
        order = np.lexsort((began, np.zeros_like(worth) if self._caution else worth))
        self.rank_of = array("d", np.argsort(order).astype(np.float64).tobytes())
        self._ranked = [queue for queue in order.tolist() if not self.is_empty(queue)]
        self._is_ranked = array("B", bytes(_QUEUES))
        for queue in self._ranked:
            self._is_ranked[queue] = 1


def _class(turns: int) -> int:
    return min(_CLASSES - 1, turns.bit_length())


_CLASS_OF_TURNS = np.array([_class(turns) for turns in range(_MOST_TURNS + 1)], dtype=np.intp)
