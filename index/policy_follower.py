"""Following the policies in force, at one place.

Covers noticing a new version in Redis and saying which one the place runs. Does not cover what is done
with a version (`pie.policies.versions`, and whoever owns them).

A place asks every half second: a version is everywhere within a second, and what was missed while
Redis was away is seen when it is back. A version is its number and its digest: in a Redis that was emptied numbers begin
again. Such a Redis is told the latest version that a place knows of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import msgspec

from pie.index.client import asking, look_anew, make_async_client
from pie.index.errors import PageIndexError
from pie.index.orders import read_table
from pie.index.policy_store import (
    FORGET,
    FORGOTTEN_S,
    RESTORE,
    TELL,
    PlacePolicies,
    PolicyKeys,
    PolicyVersion,
    RefusedEdit,
    head_of,
    read_count,
    read_refused,
    read_version,
)
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.index.trouble import Trouble
from pie.page.key import PageKey

log = logging.getLogger("pie.index.policy_follower")

_EVERY_S = 0.5
_TAKE_S = 30.0
"""Longest that taking a version on may last: a user's module may be slow to import."""

_MOST_CHARS = 1_000
"""Of a reason: every place tells its own twice a second."""
_AGAIN_S = 30.0
"""How soon a version is tried again that failed for a reason of the place, not of its own."""

Take = Callable[[int, PolicyVersion], Awaitable[str]]
"""Takes a version on; returns why it cannot be, or nothing. What it raises is no fault of the version."""


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
        """The number of the latest version that was seen, taken on or not."""
        self._seen_raw = b""
        self._seen_digest = b""
        """As Redis told it."""
        self._again_at_s: float | None = None
        self._on_copies = on_copies
        self._copies: bytes | str = b""
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.state = PlacePolicies(0)
        """What the place runs."""
        self.refused_edit: RefusedEdit | None = None
        """The latest edit of a file that is watched, where it was not acceptable."""

    async def start(self) -> None:
        """Take on what is in force now, if Redis says so, and follow it from then on."""
        await self._look()
        await self._forget()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop following, and tell that this place runs nothing any more."""
        self._closed = True
        if self._task is not None:
            await end([self._task])
        try:
            async with asking(self._settings.request_timeout_s):
                await self._client.hdel(self._keys.places, self._place)
        except PageIndexError as error:
            log.info("that %s has left is not told: %s", self._place, error)
        await self._client.aclose()

    async def _follow(self) -> None:
        while not self._closed:
            await asyncio.sleep(_EVERY_S)
            await self._look()

    async def _forget(self) -> None:
        """Let go of places that are long gone: each start of a router has a name of its own."""
        try:
            async with asking(self._settings.request_timeout_s):
                await self._client.eval(FORGET, 1, self._keys.places, str(FORGOTTEN_S))
        except PageIndexError as error:
            log.debug("places that are gone are not forgotten yet: %s", error)

    async def _look(self) -> None:
        try:
            number, digest = await self._ask()
            if number < self._seen and await self._restore(number):
                return
            if number and (self._is_other(number, digest) or self._is_due()):
                await self._change(number, digest)
                await self._ask()
        except PageIndexError as error:
            self._trouble.begins("policies in Redis cannot be followed: %s", error)
            await look_anew(self._client)
        except Exception:
            log.exception("a version of the policies was not taken on")
        else:
            self._trouble.ends("policies in Redis are followed again")

    def _is_other(self, number: int, digest: bytes) -> bool:
        return (number, digest) != (self._seen, self._seen_digest)

    def _is_due(self) -> bool:
        return self._again_at_s is not None and time.monotonic() >= self._again_at_s

    async def _ask(self) -> tuple[int, bytes]:
        """Say what this place runs; return the number of the version in force, 0 for none, and its SHA-1."""
        names = self._keys
        keys = [names.places, names.count, names.copies, names.refused, names.heads, names.versions]
        state = msgspec.json.encode(self.state)
        async with asking(self._settings.request_timeout_s):
            told = await self._client.eval(TELL, len(keys), *keys, self._place, state)
        number, copies, refused, digest = cast(list[bytes], told)
        self.refused_edit = read_refused(refused)
        if copies != self._copies:
            self._copies = copies
            self._on_copies(read_table(copies or None).by_key())
        return read_count(number, self._keys), digest

    async def _raw(self, number: int) -> bytes | None:
        async with asking(self._settings.request_timeout_s):
            return cast(bytes | None, await self._client.hget(self._keys.versions, str(number)))

    async def _restore(self, number: int) -> bool:
        """Tell a Redis that has lost versions the latest one, unless one was applied since; say whether."""
        raw = await self._raw(number) if number else None
        if raw is not None:
            applied = read_version(raw).applied_unix_s
            if applied > read_version(self._seen_raw).applied_unix_s:
                return False
        async with asking(self._settings.request_timeout_s):
            is_restored = await self._client.eval(
                RESTORE,
                3,
                self._keys.count,
                self._keys.versions,
                self._keys.heads,
                str(number),
                str(self._seen),
                self._seen_raw,
                head_of(self._seen_raw),
            )
        if is_restored:
            log.warning("Redis has lost version %d of the policies, and was told it", self._seen)
        return True

    async def _change(self, number: int, digest: bytes) -> None:
        raw = await self._raw(number)
        if raw is None:
            return
        self._seen, self._seen_raw, self._again_at_s = number, raw, None
        self._seen_digest = digest
        try:
            async with asyncio.timeout(_TAKE_S):
                reason = await self._take(number, read_version(raw))
        except Exception as error:
            log.exception("version %d of the policies", number)
            is_late = isinstance(error, TimeoutError)
            reason = "it took too long" if is_late else f"{type(error).__name__}: {error}"
            self._again_at_s = time.monotonic() + _AGAIN_S
        if reason:
            reason = reason[:_MOST_CHARS].encode("utf-8", "backslashreplace").decode()
            log.warning("version %d of the policies is not taken on: %s", number, reason)
            self.state = msgspec.structs.replace(self.state, refused=number, reason=reason)
        else:
            log.info("version %d of the policies is in force", number)
            self.state = PlacePolicies(number)
