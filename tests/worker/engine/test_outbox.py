from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from pie.page.events import Epoch, Part
from pie.page.lookup import LookupStatus
from pie.wire.errors import PeerGone, WireTimeout
from pie.wire.messages import (
    CachedTokens,
    FinishReason,
    Generate,
    Load,
    Message,
    PositionLogprobs,
    RefusalCode,
    Refused,
    Started,
    StepTokens,
    TokenDelta,
    TokenLogprob,
)
from pie.wire.peer import Peer
from pie.worker.awaiting import Awaiting
from pie.worker.intake import Intake
from pie.worker.outbox import Outbox, merge
from pie.worker.outboxes import Outboxes
from pie.worker.page_copies import PageNames
from pie.worker.page_pool import PagePool

LOAD = Load(1, 0, 0, 5, 9, 100.0, 2.0)
BUSIER = Load(2, 0, 0, 4, 9, 100.0, 2.0)
STARTED = Started(CachedTokens(), 0, 0, 0)


class FakePeer:
    """A router whose credit the test hands out."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.credit = asyncio.Semaphore(0)
        self.error: Exception | None = None
        self.ended: str | None = None
        self.id = b""

    def on_gone(self, told: Callable[[], object]) -> None:
        """It never goes."""

    @property
    def has_credit(self) -> bool:
        return not self.credit.locked()

    async def send(self, message: Message) -> None:
        if isinstance(message, StepTokens):
            await self.credit.acquire()
        if self.error is not None:
            raise self.error
        self.sent.append(message)

    def end(self, reason: str) -> None:
        self.ended = reason

    @property
    def steps(self) -> list[StepTokens]:
        return [message for message in self.sent if isinstance(message, StepTokens)]


def delta(request_id: str, *tokens: int, finish: FinishReason | None = None) -> TokenDelta:
    text = "".join(f"<{token}>" for token in tokens)
    return TokenDelta(request_id, tokens, text, finish)


@pytest.fixture
def peer() -> FakePeer:
    return FakePeer()


def make(peer: FakePeer, limit: int = 10) -> Outbox:
    return Outbox(cast(Peer, peer), epoch=Epoch(3), limit=limit)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_merging_keeps_everything_in_order() -> None:
    logprobs = [PositionLogprobs(TokenLogprob(n, b"x", -1.0), ()) for n in (1, 2)]
    first = TokenDelta("r", (1,), "a", started=STARTED, logprobs=(logprobs[0],))
    second = TokenDelta("r", (2,), "b", FinishReason.STOP, logprobs=(logprobs[1],), stop_string="c")
    assert merge(first, second) == TokenDelta(
        "r", (1, 2), "ab", FinishReason.STOP, STARTED, tuple(logprobs), "c"
    )


def test_merging_loses_nothing_that_a_delta_can_say() -> None:
    logprobs = (PositionLogprobs(TokenLogprob(1, b"x", -1.0), ()),)
    begins = TokenDelta("r", (1,), "a", started=STARTED, prompt_logprobs=logprobs)
    ends = TokenDelta("r", (2,), "b", FinishReason.FAILED, None, logprobs, "c", "broken")
    merged = merge(begins, ends)
    for name in TokenDelta.__struct_fields__:
        assert getattr(merged, name) is not None, name
    assert merge(TokenDelta("r", (), ""), begins).prompt_logprobs == logprobs
    assert merge(begins, TokenDelta("r", (2,), "b")).prompt_logprobs == logprobs


async def test_what_comes_while_there_is_no_credit_goes_as_one(peer: FakePeer) -> None:
    outbox = make(peer)
    for token in range(5):
        outbox.put([delta("a", token), delta("b", token)], LOAD)
        await settle()
    assert not peer.sent
    for _ in range(3):
        peer.credit.release()
        await settle()
    first, second = peer.steps
    assert [one.token_ids for one in first.deltas] == [(0,), (0,)]
    assert [one.token_ids for one in second.deltas] == [(1, 2, 3, 4), (1, 2, 3, 4)]
    assert second.deltas[0].text == "<1><2><3><4>"
    assert second.epoch == 3
    await outbox.close()


async def test_a_refusal_needs_no_credit(peer: FakePeer) -> None:
    outbox = make(peer)
    refused = Refused("r", RefusalCode.OVERLOADED, "busy")
    outbox.refuse(refused)
    await settle()
    assert peer.sent == [refused]
    await outbox.close()


async def test_a_large_backlog_is_cut_into_messages(peer: FakePeer) -> None:
    outbox = make(peer)
    for name in "abcd":
        outbox.put([delta(name, *range(20_000))], LOAD)
    for _ in range(4):
        peer.credit.release()
    await settle()
    assert [len(step.deltas) for step in peer.steps] == [2, 2]
    await outbox.close()


async def test_is_full_of_many_unsent_requests(peer: FakePeer) -> None:
    outbox = make(peer, limit=3)
    outbox.put([delta("first", 1)], LOAD)
    await settle()
    for name in "abc":
        assert not outbox.is_full
        outbox.put([delta(name, 1)], LOAD)
    assert outbox.is_full
    await outbox.close()


async def test_a_load_is_told_again_and_again_but_only_where_there_is_credit(
    peer: FakePeer,
) -> None:
    outbox = make(peer)
    outbox.tell_load(LOAD)
    await settle()
    assert not peer.sent
    for load in (LOAD, LOAD, BUSIER):
        peer.credit.release()
        outbox.tell_load(load)
        await settle()
    assert [step.load for step in peer.steps] == [LOAD, LOAD, BUSIER]
    await outbox.close()


async def test_sent_waits_for_the_last_message(peer: FakePeer) -> None:
    outbox = make(peer)
    outbox.put([delta("a", 1)], LOAD)
    waiting = asyncio.create_task(outbox.sent())
    await settle()
    assert not waiting.done()
    peer.credit.release()
    await asyncio.wait_for(waiting, 60)
    await outbox.close()


async def test_a_router_that_takes_nothing_is_taken_for_gone(peer: FakePeer) -> None:
    outbox = make(peer)
    peer.error = WireTimeout("no credit")
    peer.credit.release()
    outbox.put([delta("a", 1)], LOAD)
    await settle()
    assert peer.ended is not None
    await asyncio.wait_for(outbox.sent(), 60)
    await outbox.close()


async def test_a_router_that_went_is_forgotten_quietly(peer: FakePeer) -> None:
    outbox = make(peer)
    peer.error = PeerGone("it ended")
    peer.credit.release()
    outbox.put([delta("a", 1)], LOAD)
    await asyncio.wait_for(outbox.sent(), 60)
    assert peer.ended is None
    await outbox.close()


class DeafPeer(FakePeer):
    """Loses a cancellation, as libraries do now and then, and still waits."""

    async def send(self, message: Message) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await super().send(message)
        await super().send(message)


async def test_closing_ends_where_cancellations_are_lost() -> None:
    outboxes = Outboxes(Epoch(3), 10, lambda _: None)
    peers = [DeafPeer() for _ in range(3)]
    for at, peer in enumerate(peers):
        peer.id = bytes([at])
        outboxes.open(cast(Peer, peer))
        outbox = outboxes.of(peer.id)
        assert outbox is not None
        outbox.put([delta("a", 1)], LOAD)
    await settle()
    async with asyncio.timeout(50):
        await outboxes.close()
    assert not any(peer.sent for peer in peers)


class DeafPool:
    """Loses a cancellation, and does not answer after it either."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def lookup(self, *_: object, **__: object) -> list[LookupStatus]:
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)
        return []


async def test_nobody_waits_for_pages_once_it_closes_whatever_the_pool_does() -> None:
    awaiting, pool = Awaiting(9), DeafPool()
    layout = SimpleNamespace(page_tokens=4, attention_parts=(Part.FULL,))
    names = SimpleNamespace(layout=layout, model_root=bytes(32))
    intake = SimpleNamespace(tokens=lambda *_: array("I", range(8)))
    awaiting.attach(cast(PagePool, pool), cast(PageNames, names), cast(Intake, intake))
    request = cast(
        Generate,
        SimpleNamespace(request_id="r", await_pages=2, await_s=60.0, salt=None, deadline_s=None),
    )
    waiting = asyncio.create_task(awaiting.wait(b"o", request, ()))
    async with asyncio.timeout(50):
        await pool.asked.wait()
        await awaiting.close()
        assert await waiting is None
        assert await awaiting.wait(b"o", request, ()) is request
    assert len(awaiting) == 0
