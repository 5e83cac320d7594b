"""Waiting for events of many places at once.

Covers one question to a server for all streams, and one for each stream to a Cluster, which refuses
keys of several slots in one command. Does not cover what events mean (`pie.index.feed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import redis.asyncio

from pie.index.client import CLUSTER_ANSWER_S, asking, is_cluster
from pie.index.tasks import end

EVENTS_AT_ONCE = 32
"""Events taken in one answer, of all streams together. Each has 256 entries at most, for which Redis and
we take some 80 microseconds each, so that nobody else waits for more than some milliseconds."""

Streams = Sequence[tuple[bytes, Sequence[tuple[bytes, Mapping[bytes, bytes]]]]]
"""Name of each stream that has something new, and its events with their names."""


class StreamWaiter(Protocol):
    """Waits for what comes after given events."""

    async def read(self, after: Mapping[str, str], wait_s: float, limit_s: float) -> Streams:
        """Return the events behind those in `after`, by stream; nothing when none came in `wait_s`.

        Raises:
            IndexUnavailableError: Redis did not answer within `limit_s` more.
            IndexStrangeError: One of the streams is something else.
        """
        ...

    async def close(self) -> None:
        """Wait for nothing any more; `read` may begin again."""
        ...


def waiter_for(client: redis.asyncio.Redis) -> StreamWaiter:
    """Return how to wait with that client."""
    if is_cluster(client):
        return _EachStream(client)
    return _AllStreams(client)


async def _ask(
    client: redis.asyncio.Redis, after: Mapping[str, str], wait_s: float, limit_s: float
) -> Streams:
    """Ask in one command, whose `count` is for each stream."""
    wait_ms = int(wait_s * 1000)
    async with asking(max(wait_s, 0) + limit_s):
        answer = await client.xread(
            cast("dict[bytes | str | memoryview, int | bytes | str | memoryview]", dict(after)),
            count=max(1, EVENTS_AT_ONCE // len(after)),
            block=wait_ms if wait_ms > 0 else None,  # 0 would wait for ever
        )
    # The client's types cover both of its protocols and what it may decode.
    return cast("Streams", answer or ())


class _AllStreams:
    """One command for all."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def read(self, after: Mapping[str, str], wait_s: float, limit_s: float) -> Streams:
        """See `StreamWaiter.read`."""
        names = list(after)
        if len(names) > EVENTS_AT_ONCE:
            # Many that are behind would make one long answer; where none is, few have something new.
            found: list[tuple[bytes, Sequence[tuple[bytes, Mapping[bytes, bytes]]]]] = []
            for at in range(0, len(names), EVENTS_AT_ONCE):
                group = {name: after[name] for name in names[at : at + EVENTS_AT_ONCE]}
                found += await _ask(self._client, group, 0, limit_s)
            if found:
                return found
        return await _ask(self._client, after, wait_s, limit_s)

    async def close(self) -> None:
        """See `StreamWaiter.close`."""


class _EachStream:
    """One command for each, all of them under way at once."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._asked: dict[str, tuple[str, asyncio.Task[Streams]]] = {}
        self._failed: BaseException | None = None
        """What is still to be raised: answers that came with it are taken in first."""

    async def read(self, after: Mapping[str, str], wait_s: float, limit_s: float) -> Streams:
        """See `StreamWaiter.read`."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        stale = [name for name, (said, _) in self._asked.items() if after.get(name) != said]
        await self._let_go(stale)
        for name in after.keys() - self._asked.keys():
            waiting_s = CLUSTER_ANSWER_S / 2
            asked = asyncio.create_task(
                _ask(self._client, {name: after[name]}, waiting_s, limit_s), name=f"wait for {name}"
            )
            self._asked[name] = (after[name], asked)
        done, _ = await asyncio.wait(
            [asked for _, asked in self._asked.values()],
            timeout=max(wait_s, 0),
            return_when=asyncio.FIRST_COMPLETED,
        )
        over = [name for name, (_, asked) in self._asked.items() if asked in done]
        answers = await asyncio.gather(
            *(self._asked.pop(name)[1] for name in over), return_exceptions=True
        )
        found = [
            stream
            for answer in answers
            if not isinstance(answer, BaseException)
            for stream in answer
        ]
        failed = next((said for said in answers if isinstance(said, BaseException)), None)
        if failed is not None and not found:
            raise failed
        self._failed = failed
        return found

    async def close(self) -> None:
        """See `StreamWaiter.close`."""
        self._failed = None
        await self._let_go(list(self._asked))

    async def _let_go(self, names: Sequence[str]) -> None:
        """Wait for some of them no more; what they fail with meanwhile is of no interest."""
        asked = [self._asked.pop(name)[1] for name in names]
        await end(asked)
        for task in asked:
            if task.done() and not task.cancelled():
                task.exception()
