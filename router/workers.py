"""The workers that a router is connected to.

Covers keeping connections up with the index's place records. Does not cover one connection
(`pie.router.link`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId, PlaceKind
from pie.router.link import WorkerLink
from pie.wire import AddressError, WireSettings

log = logging.getLogger("pie.router.workers")

_MOST_NAMED = 8
"""Workers that a sentence names."""


class WorkerSet:
    """Links by place. Use it on one event loop only.

    Args:
        max_links: Most links to keep; further workers are left out, with a log line.
        settings: Limits of the wire.
        secret: 32 bytes that all of the cluster share, for workers beyond this host.
    """

    def __init__(
        self,
        max_links: int,
        settings: WireSettings | None = None,
        *,
        secret: bytes | None = None,
    ) -> None:
        self._max_links = max_links
        self._settings = settings
        self._secret = secret
        self._links: dict[PlaceId, WorkerLink] = {}
        self._retired: set[WorkerLink] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._refused: set[tuple[PlaceId, int]] = set()

    @property
    def links(self) -> Mapping[PlaceId, WorkerLink]:
        """Links to workers that have a record, usable or not."""
        return self._links

    def usable(self, model_name: str, digest: str) -> list[WorkerLink]:
        """Return the links that take requests for a model now."""
        return [
            link
            for link in self._links.values()
            if link.record.model_name == model_name
            and link.record.tokenizer_digest == digest
            and link.usable
        ]

    def none_takes(self, model_name: str, place: PlaceId | None = None) -> str:
        """Return why no worker takes requests for a model, or not the one that was asked for, in a sentence."""
        if place is not None:
            link = self._links.get(place)
            why = ": it is draining" if link is not None and link.record.draining else ""
            return f"Worker {place} takes no requests{why}."
        links = [link for link in self._links.values() if link.record.model_name == model_name]
        leaving = [link for link in links if link.record.draining]
        lost = [link for link in links if not link.usable and link not in leaving]
        if not leaving:
            return f"No worker for {model_name} is there."
        named = f"draining ({_named(leaving)})"
        if len(leaving) == len(links):
            return f"All workers for {model_name} are {named}: they take no requests."
        said = f"of {len(links)} workers {len(leaving)} {_are(leaving)} {named}"
        if lost:
            said += f" and {len(lost)} {_are(lost)} unreachable ({_named(lost)})"
        return f"No worker for {model_name} takes requests: {said}."

    def without_worker(self) -> list[str]:
        """Return why none takes requests, for each model of which no worker does."""
        usable = {link.record.model_name for link in self._links.values() if link.usable}
        known = {link.record.model_name for link in self._links.values()}
        return [self.none_takes(name) for name in sorted(known - usable)]

    def sync(self, records: Iterable[PlaceRecord]) -> None:
        """Connect to workers that came and let go of those that went."""
        seen: set[PlaceId] = set()
        starts: set[tuple[PlaceId, int]] = set()
        for record in records:
            if record.kind is not PlaceKind.WORKER or record.model_root is None:
                continue
            seen.add(record.place)
            starts.add((record.place, record.epoch))
            link = self._links.get(record.place)
            if link is not None:
                same = (record.epoch, record.address) == (link.record.epoch, link.record.address)
                if same:
                    link.record = record
                    continue
                self._drop(record.place)
            self._add(record)
        self._refused &= starts
        for place in [place for place in self._links if place not in seen]:
            # Its record may have run out while Redis was slow: what runs there goes on.
            link = self._links[place]
            if link.running:
                link.retired = True
                self._retired.add(self._links.pop(place))
            else:
                self._drop(place)
        for link in [link for link in self._retired if not link.running]:
            self._retired.discard(link)
            self._close(link)

    async def close(self) -> None:
        """Let go of every worker."""
        for place in list(self._links):
            self._drop(place)
        for link in self._retired:
            self._close(link)
        self._retired.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _add(self, record: PlaceRecord) -> None:
        start = (record.place, record.epoch)
        if len(self._links) >= self._max_links:
            self._refuse(start, "this router has as many workers as router.max_workers_connected")
            return
        try:
            link = WorkerLink(record, self._settings, secret=self._secret)
            link.start()
        except AddressError as error:
            self._refuse(start, str(error))
            return
        self._links[record.place] = link

    def _refuse(self, start: tuple[PlaceId, int], reason: str) -> None:
        if start not in self._refused:
            log.warning("worker %s is left out: %s", start[0], reason)
            self._refused.add(start)

    def _drop(self, place: PlaceId) -> None:
        with suppress(KeyError):
            self._close(self._links.pop(place))

    def _close(self, link: WorkerLink) -> None:
        task = asyncio.ensure_future(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _named(links: Sequence[WorkerLink]) -> str:
    """Return the names of workers, of many the first."""
    names = sorted(link.record.place for link in links)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _are(links: Sequence[WorkerLink]) -> str:
    return "is" if len(links) == 1 else "are"
