"""How a mirror learns from Redis.

Covers finding places, following their streams, their end, and the mode. Does not cover reading one
place as a whole (`pie.index.reading`) or what the mirror does with it (`pie.index.mirror`).

One task looks for places every `poll_s` and waits for events of all followed places between. A place
whose announcement is new, or whose stream has a gap, is read as a whole by a task of its own, while
the mirror goes on with what it knew of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pie.index.client import (
    Backoff,
    asking,
    is_cluster,
    look_anew,
    make_async_client,
)
from pie.index.contract import IndexMode
from pie.index.errors import IndexStrangeError, IndexUnavailableError
from pie.index.mirror import Applied, Mirror
from pie.index.names import PlaceKeys, parse_stream_id, places_key, stream_id
from pie.index.reading import (
    Announced,
    Announcement,
    PlaceReader,
    ask_places,
    parse_event,
)
from pie.index.roll import MOST_PLACES, Roll
from pie.index.settings import IndexSettings
from pie.index.streams import waiter_for
from pie.index.tasks import end
from pie.index.trouble import Trouble
from pie.page.events import PlaceId

log = logging.getLogger("pie.index.feed")

_READS_AT_ONCE = 4
"""Places read as a whole at the same time: each costs Redis and us some milliseconds a thousand pages."""

_TURN_BYTES = 64_000
"""Events are taken in for so long, about a millisecond, before others on the event loop have a turn."""

_BLIND = 0.25
"""The part of a place's time to live after which a look counts as late: between looks, a place may
have been alive and Redis forgotten it, because one of us three stood still."""

_QUIET = 0.5
"""The part of its time to live that a place has left when it has missed signs of life: then Redis is asked
whether it takes any, because one that only answers would let all places seem to die."""

_WHILE_READING_S = 0.02
"""Longest wait for events while places are read as a whole: theirs are not among those waited for."""

_LONGEST_RETRY_S = 2.0


@dataclass(slots=True)
class _Followed:
    """What the feed knows of a place that is in the mirror or being read."""

    keys: PlaceKeys
    alive_until_s: float
    ttl_s: float
    announcement: Announcement | None = None
    """What the mirror has; None while the place is read for the first time."""
    last: str = ""
    """Name of the latest event that the mirror has."""
    reading: asyncio.Task[None] | None = None
    lost: bool = False
    """Redis does not have it, though its time is not up."""
    had_grace: bool = False
    """Since it was last seen, its time was made longer because a look was late."""
    read_again_s: float = 0.0
    """When a read that failed may be tried again."""
    backoff: Backoff = field(default_factory=lambda: Backoff(_LONGEST_RETRY_S))


class MirrorFeed:
    """Keeps a mirror equal to what the places publish in Redis.

    Redis may be down at the start, go away and come back, or lose everything. `mirror.mode` says
    how it stands: `DEGRADED` while Redis cannot be reached or takes no writes (the mirror keeps what it knows),
    `RESYNCING` while places are read or expected back, else `OK`.

    Args:
        url: Redis.
        mirror: What to feed; nobody else may change it meanwhile. Read it from the same event loop.
        settings: Key prefix, intervals and limits.
        with_pages: False follows places only, for those who look for pool nodes and not for pages.
        on_mode: Called with every new mode.
    """

    def __init__(
        self,
        url: str,
        mirror: Mirror,
        *,
        settings: IndexSettings | None = None,
        with_pages: bool = True,
        on_mode: Callable[[IndexMode], None] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else IndexSettings()
        self._mirror = mirror
        self._with_pages = with_pages
        self._on_mode = on_mode
        self._client = make_async_client(url)
        self._streams = waiter_for(self._client)
        self._limit_s = self._settings.request_timeout_s
        self._reader = PlaceReader(
            self._client, mirror, limit_s=self._limit_s, with_pages=with_pages
        )
        self._places_key = places_key(self._settings.key_prefix)
        self._followed: dict[PlaceId, _Followed] = {}
        self._strange: set[PlaceId] = set()
        """Places whose keys hold what is not understood; said once."""
        self._listing = Trouble(log)
        self._too_many = Trouble(log)
        self._roll = Roll()
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._reachable = False
        self._looked = False
        self._looked_s = 0.0
        self._closing = False
        self._ok = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self.resyncs = 0
        """How often a place was read as a whole, the first times included."""
        self.gaps = 0
        """How often that was because events were missing."""

    async def start(self) -> None:
        """Begin; returns at once, whether or not Redis answers."""
        self._mirror.mode = IndexMode.RESYNCING
        self._task = asyncio.create_task(self._run(), name="feed the index mirror")

    async def ready(self, timeout_s: float) -> bool:
        """Wait until all places that are up have been read; False when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ok.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop; the mirror keeps what it knows, in mode `DEGRADED`. Takes seconds at most."""
        task, self._task = self._task, None
        self._closing = True
        try:
            await end([*self._reading, *([task] if task is not None else ())])
            await self._streams.close()
        finally:
            await self._client.aclose()
            self._reachable = False
            self._set_mode()

    async def _run(self) -> None:
        """Look for places and wait for events, until closed."""
        backoff = Backoff(limit_s=1.0)
        next_look_s = 0.0
        while not self._closing:
            try:
                now_s = time.monotonic()
                if now_s >= next_look_s:
                    await self._look()
                    next_look_s = now_s + self._settings.poll_s
                more_to_tidy = self._mirror.tidy()
                wait_s = 0.0 if more_to_tidy else next_look_s - time.monotonic()
                await self._read_events(wait_s)
                backoff.reset()
            except IndexUnavailableError as error:
                if self._mirror.mode is not IndexMode.DEGRADED:
                    log.warning("the index is degraded: %s", error)
                self._reachable = False
                self._set_mode()
                next_look_s = 0.0
                await self._begin_anew()
                await asyncio.sleep(backoff.next_s())
            except Exception:
                log.exception("the index feed failed, and goes on")
                # What the mirror says may be old, and whoever watches is to know.
                self._reachable = False
                self._set_mode()
                next_look_s = 0.0
                await self._begin_anew()
                await asyncio.sleep(backoff.next_s())

    async def _begin_anew(self) -> None:
        """Let go of all connections, and first of what goes on over them.

        What is torn would look like the next failure, which would tear what was begun since, and so on.
        """
        await self._streams.close()
        if is_cluster(self._client):
            await end(self._reading)
        await look_anew(self._client)

    async def _look(self) -> None:
        """See which places are there, and which have gone."""
        listed = await self._listed()
        followed_now = self._followed.keys()
        names = sorted(followed_now) if listed is None else self._roll.turn(followed_now, listed)
        all_keys = [PlaceKeys(self._settings.key_prefix, name) for name in names]
        answers = await ask_places(self._client, all_keys, self._limit_s)
        await self._check_writable(
            [
                followed.keys
                for place, (said, ttl_ms) in zip(names, answers, strict=True)
                if (followed := self._followed.get(place)) is not None
                and said is not Announced.WITHDRAWN
                and ttl_ms < _QUIET * followed.ttl_s * 1000
            ]
        )
        now_s = time.monotonic()
        self._give_grace(now_s)
        await self._shorten(all_keys, answers)
        self._reachable = True
        self._looked_s = now_s
        gone: list[PlaceId] = []
        strange: set[PlaceId] = set()
        for place, keys, (said, ttl_ms) in zip(names, all_keys, answers, strict=True):
            alive_until_s = now_s + max(ttl_ms, 0) / 1000
            if isinstance(said, Announcement) and said.record.place == place:
                self._seen(place, keys, said, alive_until_s)
            elif said is Announced.WITHDRAWN:
                self._forget(place, "has left")
            elif said is Announced.UNREADABLE or isinstance(said, Announcement):
                strange.add(place)
                # Not for longer than it was known to live: a start of another version is another place.
                if not self._not_seen(place, now_s, alive_until_s, coming=False) and ttl_ms <= 0:
                    gone.append(place)
            elif not self._not_seen(place, now_s, alive_until_s, coming=said is Announced.COMING):
                gone.append(place)
        for place in strange - self._strange:
            log.warning(
                "place %s is left out: what Redis has of it is of another version or no place's",
                place,
            )
        self._strange = strange | ((self._strange & (listed or set())) - set(names))
        self._looked = self._looked or (listed is not None and self._roll.was_called)
        self._set_mode()
        if gone and listed is not None:
            async with asking(self._limit_s):
                # They add themselves again should they live.
                await self._client.srem(self._places_key, *gone)

    async def _listed(self) -> set[PlaceId] | None:
        """Return the places that say to be there; None where something else is in their stead."""
        try:
            async with asking(self._limit_s):
                members = await self._client.smembers(self._places_key)
        except IndexStrangeError as error:
            self._listing.begins("places are not found until one of them mends this: %s", error)
            return None
        self._listing.ends("places are found again")
        return {PlaceId(n.decode(errors="replace")) for n in members if isinstance(n, bytes)}

    async def _check_writable(self, quiet: Sequence[PlaceKeys]) -> None:
        """See whether places that are not heard of could be: a replica, for one, takes no signs of life.

        Raises:
            IndexUnavailableError: Redis takes no writes.
        """
        if not quiet:
            return
        async with asking(self._limit_s), self._client.pipeline(transaction=False) as pipe:
            for keys in quiet:
                # As said, and not by its method, which in a pipeline to a Cluster does nothing.
                pipe.execute_command("UNLINK", keys.nothing)
            await pipe.execute()

    async def _shorten(
        self,
        places: Sequence[PlaceKeys],
        answers: Sequence[tuple[Announcement | Announced, int]],
    ) -> None:
        """Let no place count as alive for longer than it says, as where Redis's clock was set back."""
        too_long = [
            (keys.alive, most_ms)
            for keys, (said, ttl_ms) in zip(places, answers, strict=True)
            if isinstance(said, Announcement)
            for most_ms in [int(said.record.ttl_s * 1000) + 1]
            if ttl_ms == -1 or ttl_ms > most_ms
        ]
        if not too_long:
            return
        async with asking(self._limit_s), self._client.pipeline(transaction=False) as pipe:
            for name, most_ms in too_long:
                pipe.pexpire(name, most_ms)
            await pipe.execute()

    def _give_grace(self, now_s: float) -> None:
        """Let no place die of our own blindness: each has the time to announce itself again."""
        blind_s = now_s - self._looked_s
        for followed in self._followed.values():
            if self._reachable:
                if blind_s < _BLIND * followed.ttl_s or followed.had_grace:
                    continue
                followed.had_grace = True
            followed.alive_until_s = max(followed.alive_until_s, now_s + followed.ttl_s)

    def _seen(
        self, place: PlaceId, keys: PlaceKeys, said: Announcement, alive_until_s: float
    ) -> None:
        """Take in that a place is alive, and read it where its announcement is new."""
        followed = self._followed.get(place)
        if followed is None:
            if len(self._followed) >= MOST_PLACES:
                self._too_many.begins("of all places %d are followed, and no more", MOST_PLACES)
                return
            self._too_many.ends("there is room for all places again")
            followed = self._followed[place] = _Followed(keys, alive_until_s, said.record.ttl_s)
        followed.alive_until_s = alive_until_s
        followed.ttl_s = said.record.ttl_s
        followed.lost = followed.had_grace = False
        have = followed.announcement
        if have is not None and have.record != said.record and have.generation == said.generation:
            # It says something else of itself, and holds what it held.
            followed.announcement = have = said
            self._mirror.place_up(said.record)
        if have is None or (have.record.epoch, have.generation) != (
            said.record.epoch,
            said.generation,
        ):
            self._read(place, followed)

    def _not_seen(
        self, place: PlaceId, now_s: float, alive_until_s: float, *, coming: bool
    ) -> bool:
        """Take in that Redis has no record of a place: dead, or lost by Redis and soon back.

        Returns False for a dead one.
        """
        followed = self._followed.get(place)
        if followed is not None:
            if coming:
                followed.alive_until_s = max(followed.alive_until_s, alive_until_s)
            if now_s < followed.alive_until_s:
                followed.lost = True
                return True
            self._forget(place, "has not been heard of")
        return coming

    def _forget(self, place: PlaceId, why: str) -> None:
        followed = self._followed.pop(place, None)
        if followed is None:
            return
        if followed.reading is not None:
            followed.reading.cancel()
        if self._mirror.place_down(place):
            log.info("place %s %s", place, why)

    async def _read_events(self, wait_s: float) -> None:
        """Wait for events of the followed places, and take them in."""
        if self._reading:
            wait_s = min(wait_s, _WHILE_READING_S)
        streams = {
            followed.keys.stream: (place, followed)
            for place, followed in self._followed.items()
            if followed.last and followed.reading is None and self._with_pages
        }
        if not streams:
            await asyncio.sleep(max(wait_s, 0))
            return
        after = {name: followed.last for name, (_, followed) in streams.items()}
        try:
            answer = await self._streams.read(after, wait_s, self._limit_s)
        except IndexStrangeError:
            await self._leave_strange(streams)
            return
        turn = 0
        for name, events in answer:
            place, followed = streams[name.decode()]
            for event_id, fields in events:
                if not self._take_in(place, followed, event_id, fields):
                    break
                turn += sum(map(len, fields.values()))
                if turn > _TURN_BYTES:
                    turn = 0
                    await asyncio.sleep(0)

    async def _leave_strange(self, streams: Mapping[str, tuple[PlaceId, _Followed]]) -> None:
        """Follow the places no more whose stream is none; they are read anew once it is."""
        async with asking(self._limit_s), self._client.pipeline(transaction=False) as pipe:
            for name in streams:
                pipe.type(name)
            kinds = await pipe.execute()
        for (name, (place, followed)), kind in zip(streams.items(), kinds, strict=True):
            if kind not in (b"stream", b"none"):
                log.warning("place %s is read anew: %s holds no stream", place, name)
                followed.announcement, followed.last = None, ""
        self._set_mode()

    def _take_in(
        self, place: PlaceId, followed: _Followed, event_id: bytes, fields: Mapping[bytes, bytes]
    ) -> bool:
        """Take in one event; False where the place has to be read as a whole instead."""
        if self._followed.get(place) is not followed or followed.reading is not None:
            return False
        event = parse_event(fields)
        if (
            event is not None
            and event.place == place
            and (event.epoch, event.seq) == parse_stream_id(event_id)
        ):
            applied = self._mirror.apply(event)
            if applied in {Applied.DONE, Applied.OLD}:
                if parse_stream_id(followed.last.encode()) < (event.epoch, event.seq):
                    followed.last = event_id.decode()
                return True
            if applied is Applied.GAP:
                self.gaps += 1
                log.info("events of place %s are missing; it is read anew", place)
        # Not followed until it has been read, so that the same event does not come again at once.
        followed.announcement, followed.last = None, ""
        self._read(place, followed)
        return False

    def _read(self, place: PlaceId, followed: _Followed) -> None:
        """Begin to read a place as a whole, unless that is going on or has just failed."""
        if followed.reading is None and time.monotonic() >= followed.read_again_s:
            followed.reading = asyncio.create_task(
                self._read_now(place, followed), name=f"read {place} from the index"
            )
            self._reading.add(followed.reading)
            followed.reading.add_done_callback(self._reading.discard)
            self._set_mode()

    async def _read_now(self, place: PlaceId, followed: _Followed) -> None:
        """Read a place as a whole, and follow it from there. After a failure a look begins again."""

        def wanted() -> bool:
            return self._followed.get(place) is followed and not self._closing

        followed.announcement, followed.last = None, ""
        try:
            async with self._reads:
                result = await self._reader.read(followed.keys, wanted)
            if result is not None:
                followed.announcement, seq = result
                followed.last = stream_id(followed.announcement.record.epoch, seq)
                followed.backoff.reset()
                self.resyncs += 1
        except IndexUnavailableError as error:
            log.info("place %s could not be read: %s", place, error)
        except Exception:
            log.exception("place %s could not be read", place)
        finally:
            followed.reading = None
            if followed.announcement is None:
                followed.read_again_s = time.monotonic() + followed.backoff.next_s()
            self._set_mode()

    def _set_mode(self) -> None:
        if not self._reachable:
            mode = IndexMode.DEGRADED
        elif not self._looked or any(
            f.lost or f.reading is not None or f.announcement is None
            for f in self._followed.values()
        ):
            mode = IndexMode.RESYNCING
        else:
            mode = IndexMode.OK
        if mode is IndexMode.OK:
            self._ok.set()
        else:
            self._ok.clear()
        if mode is self._mirror.mode:
            return
        log.info("index: %s", mode)
        self._mirror.mode = mode
        if self._on_mode is not None:
            try:
                self._on_mode(mode)
            except Exception:
                log.exception("on_mode raised")
