"""Requests, streams and refusals between a real server and a real client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from pie.page.events import Epoch
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.wire import (
    Peer,
    PeerGone,
    RefusedError,
    WireClient,
    WireSettings,
    WireTimeout,
    new_request_id,
)
from pie.wire.messages import (
    Cancel,
    Generate,
    GetPages,
    Load,
    Lookup,
    LookupResult,
    Message,
    PageData,
    PutPages,
    PutResult,
    RefusalCode,
    Refused,
    StepTokens,
)

from .conftest import EPOCH, SECRET, Connect, Serve
from .helpers import WAIT_S, eventually, header_of

LOAD = Load(0, 0, 0, 0, 0, 0.0, 0.0)


def lookup(*numbers: int, epoch: Epoch = EPOCH) -> Lookup:
    pages = tuple((PageKey(b"%d" % number), 0) for number in numbers)
    return Lookup(new_request_id(), epoch, pages)


def get(count: int) -> GetPages:
    return GetPages(new_request_id(), EPOCH, ((PageKey(b"k"), 0),) * count)


async def echo(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    """Answer a look-up with the numbers that it asked for, pages with themselves."""
    if isinstance(message, Lookup):
        numbers = tuple(int(key) for key, _ in message.pages)
        await peer.send(LookupResult(message.request_id, numbers))
    elif isinstance(message, PutPages):
        await peer.send(PutResult(message.request_id, tuple(len(frame) for frame in frames)))
    elif isinstance(message, GetPages):
        for i in range(len(message.pages)):
            payload = bytes([i % 256]) * 100
            await peer.send(PageData(message.request_id, i, 1, header_of(payload)), [payload])


async def test_a_request_is_answered(serve: Serve, connect: Connect) -> None:
    client = await connect(await serve(echo))
    answer, frames = await client.request(lookup(1, 2), timeout_s=WAIT_S)
    assert isinstance(answer, LookupResult)
    assert answer.statuses == (1, 2)
    assert not frames


async def test_the_handshake_tells_the_epoch(serve: Serve, connect: Connect) -> None:
    client = await connect(await serve(echo))
    assert client.is_up
    assert client.epoch == EPOCH


async def test_frames_of_every_size_arrive(serve: Serve, connect: Connect) -> None:
    client = await connect(await serve(echo))
    sizes = [0, 1, 100, 65_535, 65_536, 3 << 20]
    payloads = [random.randbytes(size) for size in sizes]
    message = PutPages(new_request_id(), EPOCH, tuple(header_of(p) for p in payloads))
    answer, _ = await client.request(message, payloads, timeout_s=WAIT_S)
    assert isinstance(answer, PutResult)
    assert list(answer.statuses) == sizes


async def test_thousands_of_interleaved_requests_get_their_own_answers(
    serve: Serve, connect: Connect
) -> None:
    async def slow(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        await asyncio.sleep(random.random() * 0.01)
        await echo(peer, message, frames)

    server = await serve(slow)
    clients = [await connect(server) for _ in range(3)]

    async def ask(number: int) -> None:
        client = clients[number % 3]
        if number % 10:
            answer, _ = await client.request(lookup(number), timeout_s=WAIT_S)
            assert isinstance(answer, LookupResult)
            assert answer.statuses == (number,)
        else:
            count = number % 7
            positions = [
                (message.position, frames[0][0])
                async for message, frames in client.stream(get(count), timeout_s=WAIT_S)
                if isinstance(message, PageData)
            ]
            assert positions == [(i, i) for i in range(count)]

    await asyncio.gather(*(ask(number) for number in range(6000)))
    assert server.counters.overloads == 0
    assert all(client._pending == {} for client in clients)
    assert server._handling_bytes == 0


async def test_a_stream_yields_every_answer_in_order(serve: Serve, connect: Connect) -> None:
    client = await connect(await serve(echo))
    found = [
        message.position
        async for message, frames in client.stream(get(500), timeout_s=WAIT_S)
        if isinstance(message, PageData) and message.header is not None and len(frames[0]) == 100
    ]
    assert found == list(range(500))


async def test_leaving_a_stream_cancels_its_handler(serve: Serve, connect: Connect) -> None:
    ended = asyncio.Event()

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        try:
            await echo(peer, message, frames)
        except asyncio.CancelledError:
            ended.set()
            raise

    client = await connect(await serve(handler))
    stream = client.stream(get(4000), timeout_s=WAIT_S)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), WAIT_S)
    # What had been sent before is dropped, and its credit given, so that the next one runs.
    assert len([1 async for _ in client.stream(get(100), timeout_s=WAIT_S)]) == 100


async def test_a_refusal_reaches_whoever_asked(serve: Serve, connect: Connect) -> None:
    async def refuse(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        raise RefusedError(RefusalCode.DRAINING, "We are closing.", 2.5)

    client = await connect(await serve(refuse))
    with pytest.raises(RefusedError, match="We are closing") as caught:
        await client.request(lookup(1), timeout_s=WAIT_S)
    assert caught.value.code is RefusalCode.DRAINING
    assert caught.value.retry_after_s == 2.5
    with pytest.raises(RefusedError):
        async for _ in client.stream(get(3), timeout_s=WAIT_S):
            pass


async def test_a_failing_handler_is_a_refusal_that_tells_no_secrets(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        raise ZeroDivisionError("the prompt was: hello")

    server = await serve(fail)
    client = await connect(server)
    with pytest.raises(RefusedError, match="ZeroDivisionError") as caught:
        await client.request(lookup(1), timeout_s=WAIT_S)
    assert caught.value.code is RefusalCode.FAILED
    assert "hello" not in caught.value.message
    assert server.counters.failures == 1


async def test_another_epoch_is_refused(serve: Serve, connect: Connect) -> None:
    handled: list[Message] = []

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        handled.append(message)

    server = await serve(handler)
    client = await connect(server)
    for epoch in (EPOCH - 1, EPOCH + 1):
        with pytest.raises(RefusedError) as caught:
            await client.request(lookup(1, epoch=Epoch(epoch)), timeout_s=WAIT_S)
        assert caught.value.code is RefusalCode.STALE_EPOCH
    assert not handled
    assert server.counters.stale_epochs == 2


async def test_step_tokens_of_another_epoch_are_dropped(serve: Serve, connect: Connect) -> None:
    got: list[Message] = []

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        for _ in range(100):
            await peer.send(StepTokens(Epoch(EPOCH - 1), (), LOAD))
        await peer.send(StepTokens(EPOCH, (), LOAD))
        await echo(peer, message, frames)

    client = await connect(
        await serve(handler), on_message=lambda message, frames: got.append(message)
    )
    await client.request(lookup(1), timeout_s=WAIT_S)
    assert got == [StepTokens(EPOCH, (), LOAD)]
    assert client.counters.stale_epochs == 100


async def test_no_answer_is_a_timeout_and_a_cancel(serve: Serve, connect: Connect) -> None:
    messages: list[Message] = []
    cancelled = asyncio.Event()

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        messages.append(message)
        try:
            if not isinstance(message, Cancel):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    client = await connect(await serve(handler))
    question = lookup(1)
    with pytest.raises(WireTimeout):
        await client.request(question, timeout_s=0.1)
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    await asyncio.sleep(0.05)
    assert messages == [question, Cancel(question.request_id)]


async def test_a_late_answer_goes_to_nobody(serve: Serve, connect: Connect) -> None:
    got: list[Message] = []

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, Cancel):
            await peer.send(LookupResult(message.request_id, (1,)))
        elif message == first:
            await asyncio.sleep(60)
        else:
            await echo(peer, message, frames)

    first = lookup(1)
    client = await connect(
        await serve(handler), on_message=lambda message, frames: got.append(message)
    )
    with pytest.raises(WireTimeout):
        await client.request(first, timeout_s=0.1)
    await client.request(lookup(2), timeout_s=WAIT_S)
    assert not got
    assert client.counters.late_answers == 1


async def test_messages_of_a_peer_start_in_order(serve: Serve, connect: Connect) -> None:
    order: list[str] = []
    done = asyncio.Event()

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        order.append(message.request_id)  # type: ignore[union-attr]
        if len(order) == 200:
            done.set()

    client = await connect(await serve(handler))
    sent = [new_request_id() for _ in range(100)]
    for request_id in sent:
        await client.send(Generate(request_id, EPOCH, 0, 1), [b"\0\0\0\0"])
        await client.send(Cancel(f"not {request_id}"))
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert order == [name for request_id in sent for name in (request_id, f"not {request_id}")]


async def test_too_many_at_once_are_refused(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    go = asyncio.Event()

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        await go.wait()
        await echo(peer, message, frames)

    server = await serve(handler, settings=settings.model_copy(update={"max_handlers": 10}))
    client = await connect(server)
    tasks = [asyncio.create_task(client.request(lookup(i), timeout_s=WAIT_S)) for i in range(30)]
    await eventually(lambda: server.counters.overloads == 20)
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RefusedError)]
    assert len(refused) == 20
    assert {error.code for error in refused} == {RefusalCode.OVERLOADED}
    assert all(error.retry_after_s for error in refused)


async def test_a_cancel_is_taken_where_no_request_is(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    cancels: list[Message] = []

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        if isinstance(message, Cancel):
            cancels.append(message)
        else:
            await asyncio.sleep(WAIT_S)

    server = await serve(handler, settings=settings.model_copy(update={"max_handlers": 10}))
    client = await connect(server)
    for at in range(10):
        await client.send(Generate(str(at), EPOCH, 0, 1), [b"\0\0\0\0"])
    await eventually(lambda: len(server._tasks) == 10)
    for at in range(10):
        await client.send(Cancel(str(at)))
    await eventually(lambda: not server._tasks)
    assert cancels == [Cancel(str(at)) for at in range(10)]


async def test_a_client_waits_for_its_own_window(
    serve: Serve, connect: Connect, settings: WireSettings
) -> None:
    most = 0

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        nonlocal most
        most = max(most, len(server._tasks))
        await asyncio.sleep(0.001)
        await echo(peer, message, frames)

    server = await serve(handler)
    client = await connect(server, settings=settings.model_copy(update={"inflight_requests": 4}))
    await asyncio.gather(*(client.request(lookup(i), timeout_s=WAIT_S) for i in range(100)))
    assert most <= 4


async def test_the_same_id_twice_at_once_is_refused_here(serve: Serve, connect: Connect) -> None:
    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        await asyncio.sleep(0.05)
        await echo(peer, message, frames)

    client = await connect(await serve(handler))
    question = lookup(1)
    first = asyncio.create_task(client.request(question, timeout_s=WAIT_S))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="under way"):
        await client.request(question, timeout_s=WAIT_S)
    await first


async def test_refusals_of_sent_messages_come_unasked(serve: Serve, connect: Connect) -> None:
    got: asyncio.Queue[Message] = asyncio.Queue()
    client = await connect(
        await serve(echo), on_message=lambda message, frames: got.put_nowait(message)
    )
    await client.send(Generate("old", Epoch(1), 0, 1), [b"\0\0\0\0"])
    refusal = await asyncio.wait_for(got.get(), WAIT_S)
    assert isinstance(refusal, Refused)
    assert (refusal.request_id, refusal.code) == ("old", RefusalCode.STALE_EPOCH)


async def test_a_failing_listener_does_not_stop_the_client(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def listen(message: Message, frames: Sequence[memoryview]) -> None:
        raise ZeroDivisionError

    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        await peer.send(StepTokens(EPOCH, (), LOAD))
        await echo(peer, message, frames)

    client = await connect(await serve(handler), on_message=listen)
    for i in range(100):
        await client.request(lookup(i), timeout_s=WAIT_S)
    assert client.counters.failures == 100


async def test_nobody_there_is_a_timeout(address: str, settings: WireSettings) -> None:
    where = address if address.startswith("ipc") else address.replace(":0", ":9")
    impatient = settings.model_copy(update={"connect_timeout_s": 0.2})
    client = WireClient(where, settings=impatient, secret=SECRET)
    with pytest.raises(WireTimeout, match="did not answer"):
        await client.start()


async def test_a_closed_client_says_so(serve: Serve, connect: Connect) -> None:
    async def never(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        await asyncio.sleep(60)

    gone: list[None] = []
    client = await connect(await serve(never), on_gone=lambda: gone.append(None))
    waiting = asyncio.create_task(client.request(lookup(1), timeout_s=WAIT_S))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(PeerGone):
        await waiting
    with pytest.raises(PeerGone):
        await client.send(Cancel("x"))
    with pytest.raises(PeerGone):
        await client.request(lookup(1), timeout_s=WAIT_S)
    assert not gone
    await client.close()


def test_request_ids_differ() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_a_header_names_its_payload() -> None:
    assert isinstance(header_of(b"x"), PageHeader)
