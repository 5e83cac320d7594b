"""What goes back to one router.

Covers merging: while a router gives no credit, its steps are merged into one message. Does not
cover sockets and credit (`pie.wire`).

It cannot grow without end: a merged delta is as long as its sequence, a router with too many unsent
ones gets no new requests (`Outbox.is_full`), and one that takes nothing for as long as the wire
waits is taken for gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pie.index.tasks import end
from pie.page.events import Epoch
from pie.wire.errors import PeerGone, WireError
from pie.wire.messages import Load, PositionLogprobs, Refused, StepTokens, TokenDelta
from pie.wire.peer import Peer

log = logging.getLogger("pie.worker.outbox")

_MESSAGE_ENTRIES = 32_768
"""Tokens and rivals of one message, about 1 MiB; what is beyond goes into the next."""


def merge(earlier: TokenDelta, later: TokenDelta) -> TokenDelta:
    """Return two deltas of one request as one."""
    return TokenDelta(
        request_id=later.request_id,
        token_ids=earlier.token_ids + later.token_ids,
        text=earlier.text + later.text,
        finish_reason=later.finish_reason,
        started=earlier.started or later.started,
        logprobs=_both(earlier.logprobs, later.logprobs),
        stop_string=later.stop_string,
        error=later.error,
        prompt_logprobs=_both(earlier.prompt_logprobs, later.prompt_logprobs),
    )


def _both(
    earlier: tuple[PositionLogprobs, ...] | None, later: tuple[PositionLogprobs, ...] | None
) -> tuple[PositionLogprobs, ...] | None:
    """Return the positions of two deltas; None where neither was asked for any."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return earlier + later


class Outbox:
    """Sends to one router. For the event loop.

    Args:
        peer: The router.
        epoch: This start of the worker.
        limit: Requests with something unsent after which it is full.
    """

    def __init__(self, peer: Peer, *, epoch: Epoch, limit: int) -> None:
        self._peer = peer
        self._epoch = epoch
        self._limit = limit
        self._deltas: dict[str, TokenDelta] = {}
        self._refused: list[Refused] = []
        self._load: Load | None = None
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="pie-outbox")

    @property
    def is_full(self) -> bool:
        """Whether so much is unsent that the router should get no new requests."""
        return len(self._deltas) + len(self._refused) >= self._limit

    def put(self, deltas: Iterable[TokenDelta], load: Load) -> None:
        """Send one step's deltas, with the next message that can go."""
        for delta in deltas:
            earlier = self._deltas.get(delta.request_id)
            self._deltas[delta.request_id] = merge(earlier, delta) if earlier else delta
        self._load = load
        self._notify()

    def refuse(self, refused: Refused) -> None:
        """Say that a request was not carried out."""
        self._refused.append(refused)
        self._notify()

    def tell_load(self, load: Load) -> None:
        """Tell the load, unless something is on its way that will, or there is no credit."""
        if not self._deltas and self._peer.has_credit:
            self.put((), load)

    async def sent(self) -> None:
        """Wait until nothing is unsent."""
        await self._empty.wait()

    def stop(self) -> None:
        """Send no more; what is unsent is dropped."""
        self._closed = True
        self._task.cancel()

    async def close(self) -> None:
        """Stop, and wait until nothing runs any more, some seconds at most."""
        self.stop()
        await end([self._task])

    def _notify(self) -> None:
        self._empty.clear()
        self._wake.set()

    async def _run(self) -> None:
        try:
            while not self._closed:
                await self._wake.wait()
                self._wake.clear()
                while self._refused and not self._closed:
                    await self._peer.send(self._refused.pop(0))
                while self._load is not None and not self._closed:
                    # What comes while this waits for credit is merged into the next.
                    await self._peer.send(self._next_message(self._load))
                if not self._wake.is_set():
                    self._empty.set()
        except PeerGone:
            pass  # whoever made this is told by the peer itself
        except WireError as error:
            log.warning("a router takes no answers, so it is taken for gone: %s", error)
            self._peer.end("It took no answers.")
        finally:
            self._deltas.clear()
            self._refused.clear()
            self._empty.set()

    def _next_message(self, load: Load) -> StepTokens:
        deltas: list[TokenDelta] = []
        entries = 0
        while self._deltas and entries < _MESSAGE_ENTRIES:
            delta = self._deltas.pop(next(iter(self._deltas)))
            entries += len(delta.token_ids)
            for told in (delta.logprobs, delta.prompt_logprobs):
                entries += sum(1 + len(position.top) for position in told or ())
            deltas.append(delta)
        if not self._deltas:
            self._load = None
        return StepTokens(self._epoch, tuple(deltas), load)
