"""How many sequences a router carries at once.

Covers the cap, the state of draining and waiting for the last to end. Pure but for the waiting.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from pie.router.errors import invalid, overloaded, unavailable
from pie.router.metrics import RouterMetrics


class Gate:
    """Lets sequences in, up to a cap.

    Args:
        most: The cap.
        retry_after_s: What a client that is not let in is told to wait.
        metrics: Shows how many are in.
    """

    def __init__(self, most: int, retry_after_s: float, metrics: RouterMetrics) -> None:
        self._most = most
        self._retry_after_s = retry_after_s
        self._inside = 0
        # Asked when somebody reads it: it changes twice with each request.
        metrics.in_flight.set_function(lambda: self._inside)
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """Sequences that are in."""
        return self._inside

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._draining

    def check(self, sequences: int = 1) -> None:
        """Refuse early what `enter` would refuse, before any work is done for it.

        Raises:
            ApiError: 429 where the cap is reached, 503 while draining, 400 for what never fits.
        """
        if sequences > self._most:
            raise invalid(
                f"{sequences} sequences for one request (its prompts times n or best_of) are more "
                f"than the {self._most} that this router carries at once (router.max_in_flight)",
                "n",
            )
        if self._draining:
            raise unavailable("The router is stopping.", self._retry_after_s, "draining")
        if self._inside + sequences > self._most:
            raise overloaded(
                f"{self._inside} sequences are in flight, of {self._most} (router.max_in_flight).",
                self._retry_after_s,
            )

    def enter(self, sequences: int) -> AbstractContextManager[None]:
        """Count sequences in when the context is entered, and out at its end.

        Raises:
            ApiError: See `check`; entering does.
        """
        return _Inside(self, sequences)

    def drain(self) -> None:
        """Let nobody in any more."""
        self._draining = True

    async def empty(self, timeout_s: float) -> bool:
        """Wait until nobody is in; False when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def count(self, sequences: int) -> None:
        """Count sequences in, or out where there are fewer than none; for `enter` alone."""
        self._inside += sequences
        if self._inside:
            self._empty.clear()
        else:
            self._empty.set()


class _Inside(AbstractContextManager[None]):
    """Sequences that are in; a generator would do, at five times the cost."""

    __slots__ = ("_gate", "_sequences")

    def __init__(self, gate: Gate, sequences: int) -> None:
        self._gate = gate
        self._sequences = sequences

    def __enter__(self) -> None:
        self._gate.check(self._sequences)
        self._gate.count(self._sequences)

    def __exit__(self, *_: object) -> None:
        self._gate.count(-self._sequences)
