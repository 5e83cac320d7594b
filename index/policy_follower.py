"""Following the policies in force, at one place.

Covers noticing a new version in Redis and saying which one the place runs. Does not cover what is done
with a version (`pie.policies.versions`, and whoever owns them).

A place asks every half second: a version is everywhere within a second, and what was missed while
Redis was away is seen when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import msgspec

from pie.index.client import asking, look_anew, make_async_client
from pie.index.errors import PageIndexError
from pie.index.orders import read_table
from pie.index.policy_store import (
    TELL,
    PlacePolicies,
    PolicyKeys,
    PolicyVersion,
    RefusedEdit,
    read_refused,
    read_version,
)
from pie.index.settings import IndexSettings
from pie.index.trouble import Trouble
from pie.page.key import PageKey

log = logging.getLogger("pie.index.policy_follower")

_EVERY_S = 0.5
_TAKE_S = 30.0
"""Longest that taking a version on may last: a user's module may be slow to import."""

Take = Callable[[int, PolicyVersion], Awaitable[str]]
"""Takes a version on; returns why it cannot be, or nothing."""


class PolicyFollower:
    """Tells a place of each version that comes into force. For one event loop.

    Args:
        url: Redis.
        place: What the place or router is called.
        take: Called for each version, one after the other.
        on_copies: Called with the table of groups that have more copies than usual, when it changes.
        settings: Key prefix and time limits.
    """

    def __init__(
        self,
        url: str,
        place: str,
        take: Take,
        *,
        on_copies: Callable[[Mapping[PageKey, int]], object] = lambda _: None,
        settings: IndexSettings | None = None,
    ) -> None:
        self._settings = settings or IndexSettings()
        self._client = make_async_client(url)
        self._keys = PolicyKeys(self._settings.key_prefix)
        self._place = place
        self._take = take
        self._trouble = Trouble(log)
        self._seen = 0
        self._on_copies = on_copies
        self._copies: bytes | str = b""
        self._task: asyncio.Task[None] | None = None
        self.state = PlacePolicies(0)
        """What the place runs."""
        self.refused_edit: RefusedEdit | None = None
        """The latest edit of a file that is watched, where it was not acceptable."""

    async def start(self) -> None:
        """Take on what is in force now, if Redis says so, and follow it from then on."""
        await self._look()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        try:
            number = await self._ask()
            if number and number != self._seen:
                await self._change(number)
                await self._ask()
        except PageIndexError as error:
            self._trouble.begins("policies in Redis cannot be followed: %s", error)
            await look_anew(self._client)
        except Exception:
            log.exception("a version of the policies was not taken on")
        else:
            self._trouble.ends("policies in Redis are followed again")

    async def _ask(self) -> int:
        """Say what this place runs; return the number of the version in force, 0 for none."""
        keys = [self._keys.places, self._keys.count, self._keys.copies, self._keys.refused]
        state = msgspec.json.encode(self.state)
        async with asking(self._settings.request_timeout_s):
            told = await self._client.eval(TELL, 4, *keys, self._place, state)
        number, copies, refused = cast(list[bytes], told)
        self.refused_edit = read_refused(refused)
        if copies != self._copies:
            self._copies = copies
            self._on_copies(read_table(copies or None).by_key())
        return int(number)

    async def _change(self, number: int) -> None:
        async with asking(self._settings.request_timeout_s):
            raw = await self._client.hget(self._keys.versions, str(number))
        if raw is None:
            return
        self._seen = number
        reason = "it took too long"
        try:
            async with asyncio.timeout(_TAKE_S):
                reason = await self._take(number, read_version(raw))
        except TimeoutError:
            log.exception("version %d of the policies", number)
        if reason:
            log.warning("version %d of the policies is not taken on: %s", number, reason)
            self.state = msgspec.structs.replace(self.state, refused=number, reason=reason)
        else:
            log.info("version %d of the policies is in force", number)
            self.state = PlacePolicies(number)
