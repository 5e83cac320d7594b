"""What all routers have in common in Redis: one connection, and whether it can be relied on.

Covers calling scripts within a short time, and leaving Redis alone for a while after it did not answer or was
full, so that nobody waits again for it. A script that it refuses, as to a user who may not run a command of it, is
tried each time: others are none the worse for it. Does not cover what the scripts do (`pie.index.allowance_redis`,
`pie.index.shelf_redis`).

    <prefix>:{routers}:up   hash: router → when it was last heard of, in Redis's milliseconds
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

from redis.commands.core import AsyncScript

from pie.index.client import asking, look_anew, make_async_client
from pie.index.errors import IndexNotAskedError, IndexRefusedError, IndexUnavailableError
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.index.trouble import Trouble

log = logging.getLogger("pie.index.commons")

ANSWER_S = 0.25
"""Longest that a request waits for what routers share."""
_STEPS = 5
_AGAIN_S = 1.0
_AT_ONCE = 16
"""Calls under way, each of which has a connection."""
_UP_S = 20.0
"""A router that has said nothing for so long is none."""

Argument: TypeAlias = str | bytes | int | float

NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""
"""What scripts begin with that tell the time, in milliseconds; tests put another time in its place."""

_UP = (
    NOW
    + """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('UNLINK', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', now))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local all, count = redis.call('HGETALL', KEYS[1]), 0
for i = 1, #all, 2 do
  local heard = tonumber(all[i + 1])
  if heard and heard > now then
    -- The clock was set back since.
    heard = now
    redis.call('HSET', KEYS[1], all[i], string.format('%d', now))
  end
  if heard and heard + tonumber(ARGV[2]) > now then count = count + 1
  else redis.call('HDEL', KEYS[1], all[i]) end
end
return count
"""
)


class Commons:
    """One router's connection to what all share. For one event loop.

    Args:
        url: Redis.
        settings: Key prefix.
        answer_s: Longest wait for an answer; `ANSWER_S` where nothing is said.
    """

    def __init__(
        self, url: str, settings: IndexSettings | None = None, answer_s: float | None = None
    ) -> None:
        settings = settings or IndexSettings()
        self._client = make_async_client(url)
        self._answer_s = ANSWER_S if answer_s is None else answer_s
        self._trouble = Trouble(log)
        self._scripts: dict[str, AsyncScript] = {}
        self._calls = asyncio.Semaphore(_AT_ONCE)
        self._mending: asyncio.Task[None] | None = None
        self._closed = False
        self.prefix = settings.key_prefix
        self.router = secrets.token_hex(8)
        """Names this start of this router."""
        self._is_away = False
        self._refused: set[str] = set()
        """Scripts that Redis refused when they were called last."""
        self._said: set[str] = set()
        self.on_back: Callable[[], None] = lambda: None
        """Called when Redis is back."""

    @property
    def is_degraded(self) -> bool:
        """Whether Redis did not do what it was asked last, or what one of the scripts was called for last."""
        return self._is_away or bool(self._refused)

    async def call(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> object:
        """Run a script.

        Raises:
            IndexRefusedError: Redis answered that it will not do this.
            IndexNotAskedError: Redis was away a moment ago.
            IndexUnavailableError: Redis does not do it, or has done it and nobody knows.
        """
        if self._is_away:
            raise IndexNotAskedError("Redis: what routers share is not to be had at present")
        try:
            answer = await self._call(script, keys, args)
        except IndexRefusedError as error:
            self._refused.add(script)
            if script not in self._said:
                self._said.add(script)
                log.warning("Redis refuses a part of what routers share: %s", error)
            raise
        except IndexUnavailableError as error:
            self._trouble.begins("what routers share is not to be had: %s", error)
            self._is_away = True
            if self._mending is None:
                self._mending = asyncio.get_running_loop().create_task(self._mend())
            raise
        self._refused.discard(script)
        return answer

    async def _call(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> object:
        call = asyncio.create_task(self._within(script, keys, args))
        try:
            # In steps: an answer that came while this process was busy otherwise is not late.
            for _ in range(_STEPS):
                await asyncio.wait({call}, timeout=self._answer_s / _STEPS)
                if call.done():
                    return call.result()
        finally:
            call.cancel()
        raise IndexUnavailableError(f"Redis: no answer within {self._answer_s:g} s")

    async def _within(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> object:
        async with asking(_STEPS * self._answer_s), self._calls:
            answer: object = await self._script(script)(keys=keys, args=args)
        return answer

    async def _mend(self) -> None:
        """Try until Redis is back: no request waits for that."""
        while self._is_away and not self._closed:
            await asyncio.sleep(_AGAIN_S)
            try:
                await look_anew(self._client)
                with contextlib.suppress(IndexRefusedError):
                    await self._call(_UP, *self._up)
                self._is_away = False
                self._trouble.ends("what routers share is to be had again")
                self.on_back()
            except IndexUnavailableError as error:
                log.debug("what routers share is not to be had yet: %s", error)
            except Exception:
                log.exception("Redis was not asked again")
        self._mending = None

    @property
    def _up(self) -> tuple[Sequence[str], Sequence[Argument]]:
        return [f"{self.prefix}:{{routers}}:up"], [self.router, int(_UP_S * 1000)]

    async def routers(self) -> int:
        """Say that this router is there; return how many are.

        Raises:
            IndexUnavailableError: As `call`.
        """
        count = await self.call(_UP, *self._up)
        return count if isinstance(count, int) else 1

    def _script(self, text: str) -> AsyncScript:
        if text not in self._scripts:
            self._scripts[text] = self._client.register_script(text)
        return self._scripts[text]

    async def close(self) -> None:
        """Let go of the connection, at once."""
        self._closed = True
        if self._mending is not None:
            await end([self._mending])
        await self._client.aclose()
