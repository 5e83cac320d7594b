"""Closing ends soon at any moment, whatever Redis does, and a command that was cut short leaves no trace."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from pie.index.client import asking, make_async_client
from pie.index.conformance import entry, record
from pie.index.errors import IndexUnavailableError
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.publisher import Publisher
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from tests.index.places import running

pytestmark = pytest.mark.live

LIMIT_S = 60.0
"""Closing takes a request's time to withdraw; the rest is for busy machines."""


async def round_of_closing(server: EmbeddedServer, chance: random.Random, number: int) -> None:
    settings = IndexSettings(
        url=server.url,
        key_prefix=f"closing{number}",
        poll_s=chance.choice([0.001, 0.05]),
        request_timeout_s=chance.choice([0.02, 0.3]),
    )
    feed = MirrorFeed(server.url, Mirror(), settings=settings)
    place = Publisher(
        server.url, record("w0", 1, 1.0), lambda: [entry(n) for n in range(50)], settings=settings
    )
    await feed.start()
    await place.start()
    busy = asyncio.create_task(keep_storing(place, chance))
    await asyncio.sleep(chance.uniform(0, 0.03))
    async with disturbed(server, number):
        await asyncio.sleep(chance.uniform(0, 0.03))
        await asyncio.wait_for(asyncio.gather(feed.close(), place.close()), LIMIT_S)
    busy.cancel()
    await asyncio.wait([busy])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def keep_storing(place: Publisher, chance: random.Random) -> None:
    while True:
        place.stored([entry(chance.randrange(100))])
        await asyncio.sleep(chance.choice([0, 0.0005]))


@contextlib.asynccontextmanager
async def disturbed(server: EmbeddedServer, number: int) -> AsyncIterator[None]:
    """Let Redis stand still in every tenth round, and die in another tenth."""
    if number % 10 == 3:
        with stopped(server):
            yield
    elif number % 10 == 7:
        server.kill()
        yield
        await asyncio.to_thread(server.start)
    else:
        yield


@contextlib.contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("seed", range(2))
async def test_closing_ends_soon_at_any_moment(own_redis_server: EmbeddedServer, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(100):
        await round_of_closing(own_redis_server, chance, number)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_closing_ends_soon_thousands_of_times(
    own_redis_server: EmbeddedServer, seed: int
) -> None:
    chance = random.Random(seed)
    for number in range(500):
        await round_of_closing(own_redis_server, chance, number)


async def test_a_task_that_loses_every_cancellation_is_left_alone_after_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = asyncio.Event()

    async def deaf() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    task = asyncio.create_task(deaf(), name="deaf")
    await asyncio.sleep(0)
    await end([task], limit_s=0.3)
    assert "deaf" in caplog.text
    over.set()
    await task


async def test_after_commands_that_were_cut_short_every_answer_is_to_its_own_question(
    own_redis_server: EmbeddedServer,
) -> None:
    chance = random.Random(1)
    client = make_async_client(own_redis_server.url)
    counts = {"answered": 0, "late": 0, "cancelled": 0}

    async def ask(word: str, limit_s: float) -> None:
        try:
            async with asking(limit_s):
                async with client.pipeline(transaction=False) as pipe:
                    for turn in range(3):
                        pipe.echo(f"{word}.{turn}")
                    said = await pipe.execute()
                assert said == [f"{word}.{turn}".encode() for turn in range(3)]
                assert await client.echo(word) == word.encode()
            counts["answered"] += 1
        except IndexUnavailableError:
            counts["late"] += 1
        except asyncio.CancelledError:
            counts["cancelled"] += 1
            raise

    try:
        for number in range(150):
            asks = [
                asyncio.create_task(ask(f"{number}.{each}", chance.choice([0.001, 0.01, 2.0])))
                for each in range(8)
            ]
            await asyncio.sleep(chance.choice([0, 0.0003, 0.001]))
            for task in asks[:2]:
                task.cancel()
            if number % 15 == 0:
                with stopped(own_redis_server):
                    await asyncio.sleep(0.02)
            done, _ = await asyncio.wait(asks)
            # A cancellation is never lost: whoever was not cancelled has ended by itself.
            assert all(task.cancelled() or task.exception() is None for task in done)
    finally:
        await client.aclose()
    assert min(counts.values()) > 20, counts


async def test_a_large_command_that_a_stopped_redis_did_not_take_is_not_sent_later(
    own_redis_server: EmbeddedServer,
) -> None:
    client = make_async_client(own_redis_server.url)
    async with asking(LIMIT_S):
        await client.set("key", "before")
    with stopped(own_redis_server):
        # Neither waits for Redis, which goes on only after them.
        with pytest.raises(IndexUnavailableError, match="in time"):
            async with asking(0.05):
                await client.set("key", b"x" * 20_000_000)
        await client.aclose()
    try:
        async with asking(LIMIT_S):
            await asyncio.sleep(0.1)
            assert await client.get("key") == b"before"
    finally:
        await client.aclose()


async def test_requests_that_time_out_again_and_again_do_no_harm(
    own_redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = IndexSettings(
        url=own_redis_server.url, ttl_s=2.0, poll_s=0.02, request_timeout_s=0.05, queue_entries=500
    )
    chance = random.Random(2)
    async with running(settings) as index:
        place = await index.join("w0", holding=300)
        await index.settled()
        for _ in range(25):
            for _ in range(10):
                place.store(*chance.sample(range(2_000), 50))
                place.remove(*chance.sample(range(2_000), 50))
                await asyncio.sleep(chance.choice([0, 0.001]))
            with stopped(own_redis_server):
                place.store(*chance.sample(range(2_000), 50))
                await asyncio.sleep(chance.choice([0.01, 0.06, 0.2]))
        await index.settled()
    assert not [r for r in caplog.records if "script" in r.getMessage() or r.exc_info]
