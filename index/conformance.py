"""The suite that every page index passes: what is published can be read, and nothing else.

Covers the contract of `pie.index.contract`, writer and reader together. Does not cover Redis going
away (`tests/index/test_faults.py`). An implementation is tested by a subclass:

    class TestMyIndex(IndexConformance):
        @asynccontextmanager
        async def index(self) -> AsyncIterator[IndexUnderTest]:
            ...

pytest runs it, with asynchronous tests on (`asyncio_mode = "auto"`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from pie.index.contract import IndexMode, IndexReader, IndexWriter, PlaceRecord
from pie.page.events import Epoch, PageEntry, Part, PartMask, PlaceId, PlaceKind, Tier, part_bit
from pie.page.key import PageKey, RootKey

DEVICE = part_bit(Part.FULL, Tier.DEVICE)
HOST = part_bit(Part.FULL, Tier.HOST)


class PlaceUnderTest(IndexWriter, Protocol):
    """A place that publishes."""

    def cleared(self) -> None:
        """Say that the place holds nothing any more."""

    async def leave(self) -> None:
        """Withdraw the place."""


class IndexUnderTest(Protocol):
    """An implementation with what tests need around it."""

    @property
    def reader(self) -> IndexReader:
        """The reader under test."""
        ...

    async def join(
        self, record: PlaceRecord, snapshot: Callable[[], Iterable[PageEntry]]
    ) -> PlaceUnderTest:
        """Let a place begin to publish."""
        ...

    async def settle(self) -> None:
        """Wait until the reader has all that was published."""


def key(number: int) -> PageKey:
    """Return a key that a test can name."""
    return PageKey(number.to_bytes(32, "big"))


def entry(number: int, part: Part = Part.FULL, tier: Tier = Tier.DEVICE) -> PageEntry:
    """Return an entry for the page with that key."""
    return PageEntry(key(number), key(number - 1) if number else bytes(32), number, part, tier, 64)


def record(name: str, epoch: int = 1, ttl_s: float = 1.0) -> PlaceRecord:
    """Return what a worker of that name says of itself."""
    return PlaceRecord(
        place=PlaceId(name),
        epoch=Epoch(epoch),
        kind=PlaceKind.WORKER,
        address=f"ipc:///{name}",
        model_root=RootKey(bytes(range(32))),
        model_name="tiny",
        eos_token_ids=(2, 3),
        ttl_s=ttl_s,
    )


def _nothing() -> Iterable[PageEntry]:
    return ()


def _runs(index: IndexUnderTest, numbers: Iterable[int]) -> dict[str, list[PartMask]]:
    found = index.reader.matches([key(number) for number in numbers])
    return {str(place): list(run) for place, run in found.items()}


class IndexConformance:
    """Tests of one implementation; `index` makes a new, empty one."""

    def index(self) -> AbstractAsyncContextManager[IndexUnderTest]:
        """Return an index that is closed at the end of the block."""
        raise NotImplementedError

    async def test_an_empty_index_knows_nothing(self) -> None:
        """No places, no matches, and that is fine."""
        async with self.index() as index:
            await index.settle()
            assert index.reader.places() == {}
            assert index.reader.matches([key(0)]) == {}
            assert index.reader.matches([]) == {}
            assert index.reader.mode is IndexMode.OK

    async def test_a_place_is_known_by_its_whole_record(self) -> None:
        """Every field arrives."""
        async with self.index() as index:
            said = record("w0")
            await index.join(said, _nothing)
            await index.settle()
            assert index.reader.places() == {"w0": said}

    async def test_a_stored_page_is_found_at_its_place(self) -> None:
        """Only there, and only that page."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            await index.join(record("w1"), _nothing)
            place.stored([entry(0)])
            await index.settle()
            assert _runs(index, [0]) == {"w0": [DEVICE]}
            assert _runs(index, [1]) == {}

    async def test_a_removed_page_is_not_found(self) -> None:
        """The pages beside it are."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            place.stored([entry(0), entry(1)])
            place.removed([entry(1)])
            place.removed([entry(7)])
            await index.settle()
            assert _runs(index, [0, 1]) == {"w0": [DEVICE]}

    async def test_a_run_ends_before_the_first_page_that_is_not_held(self) -> None:
        """Pages behind a hole do not count, and each place has its own run."""
        async with self.index() as index:
            first = await index.join(record("w0"), _nothing)
            second = await index.join(record("w1"), _nothing)
            first.stored([entry(number) for number in (0, 1, 3)])
            second.stored([entry(number) for number in (1, 2, 3)])
            await index.settle()
            assert _runs(index, range(4)) == {"w0": [DEVICE] * 2}
            assert _runs(index, range(1, 4)) == {"w0": [DEVICE], "w1": [DEVICE] * 3}

    async def test_a_place_that_has_states_alone_may_hold_any_pages(self) -> None:
        """Of a model without attention a snapshot is all that is needed; beside it others are as ever."""
        async with self.index() as index:
            said = msgspec.structs.replace(record("w0"), parts=(int(Part.STATE),))
            sparse = await index.join(said, _nothing)
            other = await index.join(record("w1"), _nothing)
            sparse.stored([entry(number, Part.STATE) for number in (1, 2, 5)])
            other.stored([entry(number) for number in (0, 1, 3)])
            await index.settle()
            state = part_bit(Part.STATE, Tier.DEVICE)
            held = [0, state, state, 0, 0, state]
            assert _runs(index, range(9)) == {"w0": held, "w1": [DEVICE] * 2}
            assert _runs(index, range(5, 6)) == {"w0": [state]}
            assert _runs(index, range(3, 5)) == {"w1": [DEVICE]}
            sparse.removed([entry(number, Part.STATE) for number in (2, 5)])
            await index.settle()
            assert _runs(index, range(9)) == {"w0": [0, state], "w1": [DEVICE] * 2}

    async def test_parts_and_tiers_of_a_page_are_kept_apart(self) -> None:
        """Removing one leaves the others; the page is gone with the last."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            all_of_it = [entry(0, part, tier) for part in Part for tier in Tier]
            place.stored(all_of_it)
            await index.settle()
            mask = sum(part_bit(part, tier) for part in Part for tier in Tier)
            assert _runs(index, [0]) == {"w0": [mask]}
            place.removed(
                [e for e in all_of_it if (e.part, e.tier) != (Part.STATE, Tier.POOL_OBJECT)]
            )
            await index.settle()
            assert _runs(index, [0]) == {"w0": [part_bit(Part.STATE, Tier.POOL_OBJECT)]}
            place.removed(all_of_it)
            await index.settle()
            assert _runs(index, [0]) == {}

    async def test_storing_twice_is_storing_once(self) -> None:
        """A place may say a thing again."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            place.stored([entry(0), entry(0)])
            place.stored([entry(0)])
            place.removed([entry(0)])
            await index.settle()
            assert _runs(index, [0]) == {}

    async def test_a_cleared_place_is_up_and_holds_nothing(self) -> None:
        """What it stores afterwards counts again."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            place.stored([entry(0), entry(1)])
            place.cleared()
            place.stored([entry(1)])
            await index.settle()
            assert set(index.reader.places()) == {"w0"}
            assert _runs(index, [0, 1]) == {}
            assert _runs(index, [1]) == {"w0": [DEVICE]}

    async def test_what_a_place_holds_when_it_joins_is_found(self) -> None:
        """A worker may come up with pages on its disk."""
        async with self.index() as index:
            held: Sequence[PageEntry] = [entry(0), entry(0, tier=Tier.HOST), entry(1)]
            place = await index.join(record("w0"), lambda: held)
            await index.settle()
            assert _runs(index, [0, 1]) == {"w0": [PartMask(DEVICE | HOST), DEVICE]}
            place.removed([entry(0)])
            await index.settle()
            assert _runs(index, [0, 1]) == {"w0": [HOST, DEVICE]}

    async def test_a_place_that_leaves_is_gone_with_its_pages(self) -> None:
        """The others stay."""
        async with self.index() as index:
            going = await index.join(record("w0"), _nothing)
            staying = await index.join(record("w1"), _nothing)
            going.stored([entry(0)])
            staying.stored([entry(0)])
            await index.settle()
            await going.leave()
            await index.settle()
            assert set(index.reader.places()) == {"w1"}
            assert _runs(index, [0]) == {"w1": [DEVICE]}

    async def test_a_restarted_place_holds_what_it_says_now(self) -> None:
        """Nothing of its earlier start is left, and that one may not speak any more."""
        async with self.index() as index:
            before = await index.join(record("w0", epoch=1), _nothing)
            before.stored([entry(0), entry(1)])
            await index.settle()
            after = await index.join(record("w0", epoch=2), _nothing)
            after.stored([entry(1)])
            await index.settle()
            before.stored([entry(0)])
            await index.settle()
            assert index.reader.places()[PlaceId("w0")].epoch == 2
            assert _runs(index, [0]) == {}
            assert _runs(index, [1]) == {"w0": [DEVICE]}

    async def test_a_place_that_comes_back_after_leaving_is_up_again(self) -> None:
        """Leaving is not for ever."""
        async with self.index() as index:
            place = await index.join(record("w0", epoch=1), _nothing)
            place.stored([entry(0)])
            await index.settle()
            await place.leave()
            await index.settle()
            back = await index.join(record("w0", epoch=2), _nothing)
            back.stored([entry(1)])
            await index.settle()
            assert _runs(index, [0]) == {}
            assert _runs(index, [1]) == {"w0": [DEVICE]}

    async def test_long_runs_and_large_batches_arrive_whole(self) -> None:
        """Whatever an implementation cuts into pieces is put together again."""
        async with self.index() as index:
            place = await index.join(record("w0"), _nothing)
            place.stored([entry(number) for number in range(3_000)])
            place.stored([entry(number, tier=Tier.HOST) for number in range(1_000, 2_000)])
            place.removed([entry(number) for number in range(1_500, 2_000)])
            await index.settle()
            both = PartMask(DEVICE | HOST)
            expected = [DEVICE] * 1_000 + [both] * 500 + [HOST] * 500 + [DEVICE] * 1_000
            assert _runs(index, range(3_001)) == {"w0": expected}

    async def test_odd_names_of_places_do_no_harm(self) -> None:
        """A name is a name."""
        names = ["a b", "{x}", "a:b", "é", "w*"]
        async with self.index() as index:
            for number, name in enumerate(names):
                place = await index.join(record(name), _nothing)
                place.stored([entry(number)])
            await index.settle()
            assert set(index.reader.places()) == set(names)
            for number, name in enumerate(names):
                assert _runs(index, [number]) == {name: [DEVICE]}
