"""Direct look-up in Redis, for tools and clients without a router.

Covers answers that are exact at the moment of the question, and hints for a small part of the time
(`benchmarks/results/index.json`). Does not cover answers without a round trip: routers read a mirror
(`pie.index.mirror`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from pie.index.client import is_strange, make_client, raise_others, translated
from pie.index.contract import IndexMode, PlaceRecord
from pie.index.errors import IndexUnavailableError
from pie.index.mirror import tier_counts
from pie.index.names import PlaceKeys, places_key
from pie.index.reading import (
    PLACES_AT_ONCE,
    Announcement,
    parse_announcement,
    parse_masks,
    parse_record,
)
from pie.index.runs import MaskRun
from pie.index.settings import IndexSettings
from pie.page.events import PartMask, PlaceId, Tier
from pie.page.key import PageKey

_KEYS_AT_ONCE = 256
_SCAN_PAGES = 1_000
_PROBES = 12
"""Keys that a hint asks of each place in one round trip; three rounds tell 2,197 pages apart."""


class DirectLookup:
    """An `IndexReader` that asks Redis at every call; exact, blocking and slow: for tools.

    Raises `IndexUnavailableError` where Redis does not answer.
    """

    def __init__(self, url: str, *, settings: IndexSettings | None = None) -> None:
        self._settings = settings if settings is not None else IndexSettings()
        self._client = make_client(url, self._settings)

    @property
    def mode(self) -> IndexMode:
        """`OK`, or `DEGRADED` where Redis does not answer."""
        try:
            with translated():
                self._client.ping()
        except IndexUnavailableError:
            return IndexMode.DEGRADED
        return IndexMode.OK

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are alive."""
        return {place: found.record for place, found in self._announcements().items()}

    def silent(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are not heard of and have not withdrawn: halted, killed or cut off.

        They are known for as long as Redis keeps what they have announced.
        """
        names = PlaceKeys(self._settings.key_prefix, PlaceId("*")).record
        before, _, behind = names.partition("*")
        with translated():
            found = list(self._client.scan_iter(names, count=_SCAN_PAGES))
        keys = (name.decode(errors="replace") for name in found)
        places = sorted(PlaceId(key[len(before) : -len(behind)]) for key in keys)
        return {
            place: said.record
            for place, fields, alive in self._ask(places)
            if alive is None and isinstance(said := parse_record(fields), Announcement)
        }

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, Sequence[PartMask]]:
        """See `IndexReader.matches`."""
        found = {
            place: self._run(place, said, keys) for place, said in self._announcements().items()
        }
        return {place: run for place, run in found.items() if run}

    def hint(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, MaskRun]:
        """Return about what `matches` does, in a few round trips of a few keys for each place.

        Each run's end is searched between keys that are held and keys that are not, so that one with a
        hole is taken to end at one of its ends; pages between two probes count as the latter.
        Places that have states alone are left out: nothing can be said of their runs from a few keys.
        """
        said = {
            place: one
            for place, one in self._announcements().items()
            if not one.record.has_states_alone
        }
        names = {
            place: PlaceKeys(self._settings.key_prefix, place).pages(one.generation)
            for place, one in said.items()
        }
        searches = {place: _Search(len(keys)) for place in said}
        while going := {place: s.probes() for place, s in searches.items() if not s.is_over}:
            with translated(), self._client.pipeline(transaction=False) as pipe:
                for place, probes in going.items():
                    pipe.hmget(names[place], [keys[at] for at in probes])
                answers = pipe.execute()
            for (place, probes), masks in zip(going.items(), answers, strict=True):
                searches[place].learn(probes, masks)
        return {place: run for place, search in searches.items() if (run := search.run())}

    def pages(self, place: PlaceId) -> Mapping[Tier, int]:
        """Return how many page parts a place holds in each tier; nothing for a place not up."""
        said = self._announcements().get(place)
        if said is None:
            return {}
        counts: dict[PartMask, int] = {}
        name = PlaceKeys(self._settings.key_prefix, place).pages(said.generation)
        with translated():
            for field in self._client.hscan_iter(name, count=_SCAN_PAGES):
                for _, mask in parse_masks(dict([field])):
                    counts[mask] = counts.get(mask, 0) + 1
        return tier_counts(counts)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _announcements(self) -> dict[PlaceId, Announcement]:
        with translated():
            members = cast(
                "set[bytes]", self._client.smembers(places_key(self._settings.key_prefix))
            )
        places = sorted(PlaceId(name.decode(errors="replace")) for name in members)
        said = {
            place: parse_announcement(fields, alive) for place, fields, alive in self._ask(places)
        }
        return {place: found for place, found in said.items() if isinstance(found, Announcement)}

    def _ask(
        self, places: Sequence[PlaceId]
    ) -> Iterator[tuple[PlaceId, Sequence[bytes | None], bytes | None]]:
        """Return the record's fields of places, and the epoch that was heard of last."""
        for at in range(0, len(places), PLACES_AT_ONCE):
            some = places[at : at + PLACES_AT_ONCE]
            with translated():
                with self._client.pipeline(transaction=False) as pipe:
                    for place in some:
                        keys = PlaceKeys(self._settings.key_prefix, place)
                        pipe.hmget(keys.record, list(Announcement.FIELDS))
                        pipe.get(keys.alive)
                    answers = pipe.execute(raise_on_error=False)
                raise_others(answers)
            for place, fields, alive in zip(some, answers[::2], answers[1::2], strict=True):
                if not is_strange(fields) and not is_strange(alive):
                    yield place, fields, alive

    def _run(
        self, place: PlaceId, said: Announcement, keys: Sequence[PageKey]
    ) -> Sequence[PartMask]:
        """Return the masks of a place's leading run of `keys`."""
        name = PlaceKeys(self._settings.key_prefix, place).pages(said.generation)
        run: list[PartMask] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            with translated():
                masks = self._client.hmget(name, list(keys[start : start + _KEYS_AT_ONCE]))
            for mask in cast("list[bytes | None]", masks):
                known = mask is not None and mask.isdigit()
                if not known and not said.record.has_states_alone:
                    return run
                run.append(PartMask(int(mask or 0) if known else 0))
        while run and not run[-1]:
            del run[-1]
        return run


class _Search:
    """Where a leading run of `pages` pages ends, found by asking for a few of them at a time."""

    def __init__(self, pages: int) -> None:
        self._held = 0
        """Pages that are taken to be held."""
        self._end = pages
        """The first page that is known not to be, or where the prompt ends."""
        self._masks: dict[int, PartMask] = {}

    @property
    def is_over(self) -> bool:
        return self._held >= self._end

    def probes(self) -> list[int]:
        """Return the pages to ask for: evenly spread, the last that may be held among them."""
        left = self._end - self._held
        count = min(_PROBES, left)
        return [self._held + (number + 1) * left // count - 1 for number in range(count)]

    def learn(self, probes: Sequence[int], masks: Sequence[bytes | None]) -> None:
        """Take in the masks of the pages that were asked for."""
        for at, mask in zip(probes, masks, strict=True):
            if mask is None or not mask.isdigit() or not int(mask):
                self._end = at
                return
            self._masks[at] = PartMask(int(mask))
            self._held = at + 1

    def run(self) -> MaskRun:
        """Return what was found."""
        segments: list[tuple[PartMask, int]] = []
        start = 0
        for at, mask in sorted(self._masks.items()):
            pages = at + 1 - start
            start = at + 1
            if segments and segments[-1][0] == mask:
                segments[-1] = (mask, segments[-1][1] + pages)
            else:
                segments.append((mask, pages))
        return MaskRun(tuple(segments))
