"""What a router knows of one worker's load: what it sent there, what the worker said, how fast it is.

Covers tokens ahead, prefixes in the making, and rates learned from answers; pure, with the clock as a
parameter. Does not cover the connection (`pie.router.link`) or which worker is chosen
(`pie.router.choice`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pie.index.contract import PlaceRecord
from pie.page.key import PageKey
from pie.router.rates import Rates
from pie.wire.messages import Load, Refused, TokenDelta

_LOAD_FRESH_S = 3.0
"""A load report says nothing of other routers' requests after so long without a newer one."""
_ON_ITS_WAY_S = 0.02
"""A report that came so soon after a request was sent may be older than the request."""
_ON_ITS_WAY_TO_OTHERS_S = 0.5
"""Pages that were just computed take so long at most until the pool has them and the index says so."""
_ON_ITS_WAY_TO_THE_INDEX_S = 0.5
"""Pages of a prompt whose answer has just ended are known to the index after so long at most."""
_DECODE_STEP_MS = 50.0


class AttemptSink(Protocol):
    """Takes what a worker says about one attempt. Nothing here may block."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens; the last delta has a finish reason."""

    def on_refused(self, refused: Refused) -> None:
        """Learn that the worker does not carry it out."""

    def on_gone(self) -> None:
        """Learn that the worker is gone."""


@dataclass(eq=False, slots=True)
class Running:
    """What an attempt counts for at its worker."""

    sink: AttemptSink
    keys: Sequence[PageKey]
    """The prompt's pages: held there, or in the making."""
    new_tokens: int
    """Prompt tokens that the worker was expected to compute."""
    prompt_tokens: int
    later_keys: Sequence[PageKey] = ()
    """Pages that it waits for, which another worker computes, and those behind them: they are held there
    once it has begun."""
    started: bool = False
    sent_s: float = 0.0
    began_s: float = 0.0


class Ahead(NamedTuple):
    """What is ahead of a new request at a worker, whoever sent it.

    What the worker said last, and what was sent since. Where it has said nothing for a while, all that was
    sent from here.
    """

    queued_tokens: int
    """Prompt tokens that wait there."""
    waiting: int
    """Requests without a token yet."""
    decoding: int
    """Sequences in decode; a program counts as one."""


class BooksWatcher(Protocol):
    """Learns of what changes in the books of a worker, as it does."""

    def changed(self, books: WorkerBooks) -> None:
        """Learn that load, rates or record may be others."""

    def makes(self, books: WorkerBooks, keys: Sequence[PageKey]) -> None:
        """Learn of the pages of an attempt that runs there now."""

    def made(self, books: WorkerBooks, keys: Sequence[PageKey], held_until_s: float | None) -> None:
        """Learn that it does no more, and until when its pages count as held all the same."""


class WorkerBooks:
    """One worker's load, as one router sees it.

    Args:
        record: The worker's record.
        clock: Seconds, from anywhere, going forward.
    """

    def __init__(self, record: PlaceRecord, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._programs = 0
        self._watchers: list[BooksWatcher] = []
        self.load: Load | None = None
        self.rates = Rates()
        self.inflight_keys: Counter[PageKey] = Counter()
        self._clock = clock
        self._load_at_s = 0.0
        self._began_s = 0.0
        """When an attempt had its first token last."""
        self._just_ended: deque[tuple[float, Sequence[PageKey]]] = deque()
        """Prompts whose first token has come and which are over, and until when they count as held."""
        self._just_held: Counter[PageKey] = Counter()
        self._waiting: dict[str, Running] = {}
        self._decoding: dict[str, Running] = {}

    @property
    def record(self) -> PlaceRecord:
        """What the worker says of itself."""
        return self._record

    @record.setter
    def record(self, record: PlaceRecord) -> None:
        self._record = record
        self._changed()

    @property
    def programs(self) -> int:
        """Programs of this router's clients that run there."""
        return self._programs

    @programs.setter
    def programs(self, programs: int) -> None:
        self._programs = programs
        self._changed()

    def watch(self, watcher: BooksWatcher) -> None:
        """Let somebody learn of changes, and of what runs already."""
        self._watchers.append(watcher)
        for running in (*self._waiting.values(), *self._decoding.values()):
            watcher.makes(self, running.keys)
        for until_s, keys in self._just_ended:
            watcher.makes(self, keys)
            watcher.made(self, keys, until_s)
        watcher.changed(self)

    def unwatch(self, watcher: BooksWatcher) -> None:
        """Tell somebody no more."""
        self._watchers.remove(watcher)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.changed(self)

    @property
    def fresh_until_s(self) -> float:
        """When what the worker said last will be too long ago, about; infinite where it says nothing."""
        fresh = self._fresh_load is not None
        return self._load_at_s + _LOAD_FRESH_S if fresh else math.inf

    @property
    def running(self) -> int:
        """Attempts and programs of this router that run there."""
        return len(self._waiting) + len(self._decoding) + self._programs

    def ahead(self) -> Ahead:
        """Return what a new request would find there."""
        waiting, decoding = len(self._waiting), len(self._decoding)
        reported = self._fresh_load
        if reported is None:
            sent = [running.new_tokens for running in self._waiting.values()]
            return Ahead(sum(sent), waiting, self._programs + decoding)
        queued = reported.waiting_tokens
        since_s = self._load_at_s - _ON_ITS_WAY_S
        # In the order in which they were sent, so the latest come first.
        for running in reversed(self._waiting.values()):
            if running.sent_s < since_s:
                break
            queued += running.new_tokens
        return Ahead(
            queued, max(waiting, reported.waiting), self._programs + max(decoding, reported.running)
        )

    @property
    def waiting(self) -> int:
        """Requests without a token yet, whoever sent them."""
        return self.ahead().waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there, whoever sent them."""
        return self.ahead().queued_tokens

    @property
    def decoding(self) -> int:
        """Sequences in decode there, whoever sent them; a program counts as one."""
        return self.ahead().decoding

    @property
    def decode_step_ms(self) -> float:
        """Reported, else a guess."""
        return self.load.step_ms if self.load and self.load.step_ms > 0 else _DECODE_STEP_MS

    @property
    def free_share(self) -> float:
        """How much of its device memory is free or only kept for later, as it said last."""
        load = self.load
        return load.free_pages / load.total_pages if load and load.total_pages else 1.0

    @property
    def busy_s(self) -> float:
        """For how long the first of the attempts that wait here has been computed, at most."""
        first = next(iter(self._waiting.values()), None)
        return 0.0 if first is None else self._clock() - max(first.sent_s, self._began_s)

    def pages_in_making(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages are computed there, or were a moment ago."""
        self._forget()
        inflight, held = self.inflight_keys, self._just_held
        if not inflight and not held:
            return 0
        pages = 0
        for key in keys:
            if key not in inflight and key not in held:
                break
            pages += 1
        return pages

    def tokens_until(self, key: PageKey, at: int) -> int | None:
        """Return how many prompt tokens are computed until a page is, those ahead of it included.

        `at` is its place in its sequence. 0 where that was done a moment ago, so that the page may still be
        on its way to where others find it; None where no attempt of this router computes it.
        """
        tokens = 0
        for running in self._waiting.values():
            tokens += running.new_tokens
            if len(running.keys) > at and running.keys[at] == key:
                return tokens
        since_s = self._clock() - _ON_ITS_WAY_TO_OTHERS_S
        # In the order in which they began, so the latest come first.
        for running in reversed(self._decoding.values()):
            if running.began_s < since_s:
                break
            if len(running.keys) > at and running.keys[at] == key:
                return 0
        return None

    def sent(self, request_id: str, running: Running) -> None:
        """Enter an attempt."""
        running.sent_s = self._clock()
        self._waiting[request_id] = running
        self.inflight_keys.update(running.keys)
        for watcher in self._watchers:
            watcher.makes(self, running.keys)
            watcher.changed(self)

    def ended(self, request_id: str) -> Running | None:
        """Take an attempt out of the books; None where it is not in them."""
        running = self._waiting.pop(request_id, None) or self._decoding.pop(request_id, None)
        if running is None:
            return None
        _count_down(self.inflight_keys, running.keys)
        self._forget()
        until_s = None
        if running.started:
            until_s = self._clock() + _ON_ITS_WAY_TO_THE_INDEX_S
            self._just_ended.append((until_s, running.keys))
            self._just_held.update(running.keys)
        for watcher in self._watchers:
            watcher.made(self, running.keys, until_s)
            watcher.changed(self)
        return running

    def _forget(self) -> None:
        """Count what ended a while ago as held no longer: the index knows."""
        ended = self._just_ended
        if not ended or ended[0][0] > (now_s := self._clock()):
            return
        while ended and ended[0][0] <= now_s:
            _count_down(self._just_held, ended.popleft()[1])

    def told_load(self, load: Load) -> None:
        """Learn how busy the worker is."""
        self.load = load
        self._load_at_s = self._clock()
        self._changed()

    def told(self, delta: TokenDelta) -> Running | None:
        """Learn what one step added to an attempt; return the attempt where it is in the books."""
        request_id = delta.request_id
        running = self._waiting.get(request_id) or self._decoding.get(request_id)
        if running is None:
            return None
        if delta.started is not None and not running.started:
            running.started = True
            self._began_s = running.began_s = self._clock()
            if running.later_keys:
                self.inflight_keys.update(running.later_keys)
                for watcher in self._watchers:
                    watcher.makes(self, running.later_keys)
                running.keys, running.later_keys = [*running.keys, *running.later_keys], ()
            self._decoding[request_id] = self._waiting.pop(request_id)
            self.rates.learn(running.prompt_tokens, delta.started)
            self._changed()
        if delta.finish_reason is not None:
            self.ended(request_id)
        return running

    @property
    def _fresh_load(self) -> Load | None:
        """What the worker said, unless that is too long ago."""
        fresh = self.load is not None and self._clock() - self._load_at_s < _LOAD_FRESH_S
        return self.load if fresh else None


def _count_down(counts: Counter[PageKey], keys: Sequence[PageKey]) -> None:
    for key in keys:
        if (left := counts[key] - 1) > 0:
            counts[key] = left
        else:
            # `del` of a Counter is a method in Python.
            counts.pop(key)
