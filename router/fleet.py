"""What is kept of many workers between requests: their loads in columns, and who computes which page.

Covers following the books of one choice's workers. Does not cover who is chosen (`pie.router.shortlist`,
`pie.router.choice`) or the books (`pie.router.books`). Pure.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.routing import encoded
from pie.router.books import WorkerBooks
from pie.router.rates import ColumnRates, RateColumns

_EARLY_S = 1e-3
"""The books themselves say when a report is too old: they are asked from a little before on."""
Rows: TypeAlias = npt.NDArray[np.int64]
"""Some of a fleet's workers."""

_NOBODY: Mapping[int, int] = {}


class Fleet:
    """The workers that a choice is made from, each with a row.

    Args:
        links: All of them; their books are watched until `close`.
        clock: Theirs.
    """

    def __init__(self, links: Iterable[WorkerBooks], *, clock: Callable[[], float]) -> None:
        self.links = list(links)
        workers = len(self.links)
        self._clock = clock
        self._rows: dict[WorkerBooks, int] = {link: row for row, link in enumerate(self.links)}
        self.places: Sequence[PlaceId] = [link.record.place for link in self.links]
        self.names: Sequence[bytes] = [encoded(place) for place in self.places]
        self.row_of: Mapping[PlaceId, int] = {place: row for row, place in enumerate(self.places)}
        self.queued_tokens = np.zeros(workers)
        self.waiting = np.zeros(workers)
        self.running = np.zeros(workers)
        self.decode_step_ms = np.zeros(workers)
        self._fresh_until_s = np.full(workers, math.inf)
        self._prefill = RateColumns(workers)
        self._load: dict[str, RateColumns] = {}
        self._dirty: set[int] = set()
        self._records: list[PlaceRecord] = [link.record for link in self.links]
        self._kinds: Counter[tuple[object, ...]] = Counter(map(_kind, self._records))
        self._makers: dict[PageKey, dict[int, int]] = {}
        self._in_flight: Counter[PageKey] = Counter()
        self._lingering: deque[tuple[float, int, Sequence[PageKey]]] = deque()
        for link in self.links:
            link.watch(self)
        self._lingering = deque(sorted(self._lingering, key=lambda one: one[0]))

    def close(self) -> None:
        """Watch no more."""
        for link in self.links:
            link.unwatch(self)

    @property
    def is_of_one_kind(self) -> bool:
        """Whether all workers name pages alike and use the same parts of them; known once refreshed."""
        return len(self._kinds) == 1

    def refresh(self) -> ColumnRates:
        """Take in what has changed; return what is believed of rates now."""
        now_s = self._clock()
        self._dirty.update((self._fresh_until_s <= now_s + _EARLY_S).nonzero()[0].tolist())
        for row in self._dirty:
            self._take_in(row)
        self._dirty.clear()
        while self._lingering and self._lingering[0][0] <= now_s:
            _, row, keys = self._lingering.popleft()
            self._forget(row, keys)
        return ColumnRates(self._prefill, self._load)

    def makers(self, key: PageKey) -> Mapping[int, int]:
        """Return the rows of those that compute a page, or did a moment ago."""
        return self._makers.get(key, _NOBODY)

    def hot_pages(self, keys: Sequence[PageKey], requests: int) -> int:
        """Return how many leading pages at least so many requests share now."""
        in_flight = self._in_flight
        return bisect.bisect_left(keys, True, key=lambda key: in_flight.get(key, 0) < requests)

    def changed(self, books: WorkerBooks) -> None:
        """See `pie.router.books.BooksWatcher`."""
        self._dirty.add(self._rows[books])

    def makes(self, books: WorkerBooks, keys: Sequence[PageKey]) -> None:
        """See `pie.router.books.BooksWatcher`."""
        row, makers = self._rows[books], self._makers
        self._in_flight.update(keys)
        for key in keys:
            rows = makers.get(key)
            if rows is None:
                makers[key] = {row: 1}
            else:
                rows[row] = rows.get(row, 0) + 1

    def made(self, books: WorkerBooks, keys: Sequence[PageKey], held_until_s: float | None) -> None:
        """See `pie.router.books.BooksWatcher`."""
        row, in_flight = self._rows[books], self._in_flight
        for key in keys:
            if (left := in_flight[key] - 1) > 0:
                in_flight[key] = left
            else:
                in_flight.pop(key)
        if held_until_s is None:
            self._forget(row, keys)
        else:
            self._lingering.append((held_until_s, row, keys))

    def check(self) -> None:
        """Raise `AssertionError` where columns and books contradict each other; slow, for tests."""
        self.refresh()
        in_flight = Counter[PageKey]()
        for row, link in enumerate(self.links):
            ahead = link.ahead()
            assert self.queued_tokens[row] == ahead.queued_tokens
            assert self.waiting[row] == ahead.waiting
            assert self.running[row] == ahead.decoding
            assert self.decode_step_ms[row] == link.decode_step_ms
            in_flight.update(link.inflight_keys)
            for key, rows in self._makers.items():
                assert (row in rows) == bool(link.pages_in_making([key]))
        assert in_flight == self._in_flight

    def _take_in(self, row: int) -> None:
        link = self.links[row]
        ahead = link.ahead()
        self.queued_tokens[row] = ahead.queued_tokens
        self.waiting[row] = ahead.waiting
        self.running[row] = ahead.decoding
        self.decode_step_ms[row] = link.decode_step_ms
        self._fresh_until_s[row] = link.fresh_until_s
        self._prefill.put(row, link.rates.prefill)
        for tier, rate in link.rates.load.items():
            if tier not in self._load:
                self._load[tier] = RateColumns(len(self.links))
            self._load[tier].put(row, rate)
        if link.record is not self._records[row]:
            self._kinds -= Counter([_kind(self._records[row])])
            self._records[row] = link.record
            self._kinds[_kind(link.record)] += 1

    def _forget(self, row: int, keys: Sequence[PageKey]) -> None:
        for key in keys:
            rows = self._makers[key]
            if (left := rows[row] - 1) > 0:
                rows[row] = left
            elif len(rows) > 1:
                del rows[row]
            else:
                del self._makers[key]


def _kind(record: PlaceRecord) -> tuple[object, ...]:
    """Return what must be alike for two workers to use the same pages alike."""
    return (record.model_root, record.page_tokens, record.parts, record.window_tokens)
