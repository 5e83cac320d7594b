"""What an object store can still do: a circuit breaker.

Covers reading failures as one of four states, with a counter by reason and one line in the log for
each change. Does not cover who asks the store again (`pie.pool.object_keeper`) or what the tier
does without it (`pie.pool.object`).

    ok ── a store is refused for lack of rights ──> read_only ── one succeeds ──> ok
    ok, read_only ── several failures in a row ──> off ── time ──> probing ── it answers ──> ok
"""

from __future__ import annotations

import enum
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable

from pie.pool.object_errors import ObjectStoreError, StoreFailure

log = logging.getLogger("pie.pool.object")

READ_ONLY_S = 30.0
"""How long a store that refused an object is left alone before the next one tries."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_MOST_FAILURES = 3
"""In a row, each after the client's own attempts."""


class ObjectState(enum.IntEnum):
    """What the store can do."""

    OK = 0
    READ_ONLY = 1
    """It gives pages and takes none."""
    OFF = 2
    """It is not asked."""
    PROBING = 3
    """Half open: one request finds out whether it answers again, and nobody waits for it."""


class ObjectHealth:
    """The state of one bucket. Thread-safe."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        chance: random.Random | None = None,
    ) -> None:
        """Begin well.

        Args:
            name: What log lines call it.
            clock: Seconds, going forward only.
            chance: Spreads probes of many nodes.
        """
        self.state = ObjectState.OK
        self.errors: Counter[str] = Counter()
        """Requests that failed, by reason."""
        self.opened = 0
        """How often it went off."""
        self._name = name
        self._clock = clock
        self._chance = chance or random.Random()
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self._retry_at_s = 0.0
        self._lock = threading.Lock()

    @property
    def is_off(self) -> bool:
        """Whether nothing is asked of it."""
        return self.state in {ObjectState.OFF, ObjectState.PROBING}

    @property
    def takes_stores(self) -> bool:
        """Whether an object may be sent now."""
        if self.state is ObjectState.READ_ONLY:
            return self._clock() >= self._retry_at_s
        return self.state is ObjectState.OK

    def failed(self, error: ObjectStoreError, doing: str) -> bool:
        """Take in what came of `doing` (`open`, `store`, `load`, `remove`, `list`).

        Returns whether the store is off because of it; one that cannot be opened is.
        """
        with self._lock:
            self.errors[error.failure.value] += 1
            if self.is_off:
                return False
            if error.failure is StoreFailure.DENIED and doing in {"store", "remove"}:
                self._retry_at_s = self._clock() + READ_ONLY_S
                if self.state is ObjectState.OK:
                    self.state = ObjectState.READ_ONLY
                    log.error("%s takes no more pages: %s failed: %s", self._name, doing, error)
                return False
            self._failures += 1
            is_lost = error.failure in {StoreFailure.NO_BUCKET, StoreFailure.TLS}
            if not is_lost and doing != "open" and self._failures < _MOST_FAILURES:
                return False
            self._turn_off(error, doing)
            return True

    def worked(self, doing: str) -> None:
        """Take in that something succeeded."""
        self._failures = 0
        if doing == "store" and self.state is ObjectState.READ_ONLY:
            with self._lock:
                if self.state is ObjectState.READ_ONLY:
                    self.state = ObjectState.OK
                    log.info("%s takes pages again", self._name)

    def begin_probe(self) -> bool:
        """Say whether the one request is due that finds out whether the store answers again.

        Whoever is told so ends it by `end_probe`.
        """
        with self._lock:
            if self.state is not ObjectState.OFF or self._clock() < self._retry_at_s:
                return False
            self.state = ObjectState.PROBING
            return True

    def end_probe(self, error: ObjectStoreError | None) -> None:
        """Take in what came of the probe."""
        with self._lock:
            assert self.state is ObjectState.PROBING
            if error is None:
                self.state = ObjectState.OK
                self._failures = 0
                self._wait_s = FIRST_WAIT_S
                log.info("%s answers again", self._name)
                return
            self.errors[error.failure.value] += 1
            self.state = ObjectState.OFF
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
            self._retry_at_s = self._clock() + self._jittered()

    def _turn_off(self, error: ObjectStoreError, doing: str) -> None:
        self.state = ObjectState.OFF
        self.opened += 1
        self._retry_at_s = self._clock() + self._jittered()
        log.error("%s is off: %s failed: %s", self._name, doing, error)

    def _jittered(self) -> float:
        """Return the wait, or somewhat less, so that nodes do not all ask at once."""
        return self._wait_s * (0.5 + self._chance.random() / 2)
