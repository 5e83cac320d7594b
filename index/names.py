"""Names of keys in Redis.

Covers where each thing about a place lies. Does not cover what is written there
(`pie.index.scripts`).

    <prefix>:places                       set: names of places that may be up; a hint for readers
    <prefix>:{<place>}:alive              epoch of the start that was heard of last; expires
    <prefix>:{<place>}:record             hash: epoch, and while it is up record, generation, seq
                                          and the number of its pages
    <prefix>:{<place>}:pages:<generation> hash: key of a page → mask of part × tier
    <prefix>:{<place>}:stream             stream: latest events, entry `<epoch>-<seq>`
    <prefix>:{<place>}:nothing            never there; readers remove it to see that writes are taken

All that belongs to a place has its name as hash tag, so that one script may touch it all and a
cluster of Redis shards by place. `alive` expires when the place is not heard of; the rest expires
much later by itself, so that a dead place leaves nothing for ever, and a place that could not be heard
of for a while (Redis stood still) goes on where it was.
"""

from __future__ import annotations

from pie.page.events import Epoch, PlaceId


def places_key(prefix: str) -> str:
    """Return the key of the set of places."""
    return f"{prefix}:places"


class PlaceKeys:
    """The keys of one place."""

    __slots__ = ("_base", "alive", "nothing", "record", "stream")

    def __init__(self, prefix: str, place: PlaceId) -> None:
        self._base = f"{prefix}:{{{place}}}"
        self.alive = f"{self._base}:alive"
        self.record = f"{self._base}:record"
        self.stream = f"{self._base}:stream"
        self.nothing = f"{self._base}:nothing"

    def pages(self, generation: str) -> str:
        """Return the key of the pages of one announcement."""
        return f"{self._base}:pages:{generation}"


def stream_id(epoch: Epoch, seq: int) -> str:
    """Return the name of an event in its place's stream: gaps are seen from names alone."""
    return f"{epoch}-{seq}"


def parse_stream_id(name: bytes) -> tuple[Epoch, int]:
    """Return epoch and seq of an event in a stream."""
    epoch, _, seq = name.partition(b"-")
    return Epoch(int(epoch)), int(seq)
