"""The mirror against a plain dictionary, and what it promises beside the contract."""

from collections.abc import Iterator

import pytest
from blake3 import blake3
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pie.index.conformance import DEVICE, HOST, entry, key, record
from pie.index.lanes import Lane, Lanes
from pie.index.mirror import Applied, Mirror, PlaceLoad
from pie.index.runs import MaskRun
from pie.page.events import (
    Epoch,
    PageEntry,
    PageEvent,
    PageRemoved,
    PageStored,
    Part,
    PartMask,
    PlaceCleared,
    PlaceId,
    Tier,
    part_bit,
)
from pie.page.key import PageKey

W0 = PlaceId("w0")


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    yield mirror
    mirror.check()
    while mirror.tidy(3):
        mirror.check()
    mirror.check()


def stored(seq: int, *numbers: int, place: PlaceId = W0, epoch: int = 1) -> PageEvent:
    return PageStored(place, Epoch(epoch), seq, tuple(entry(number) for number in numbers))


def test_no_part_of_what_is_held_is_so_large_that_a_step_with_it_takes_long() -> None:
    lanes = Lanes()
    lane = lanes.open()
    keys = [PageKey(blake3(b"%d" % number).digest()) for number in range(20_000)]
    lanes.change(lane, [(one, PartMask(1)) for one in keys], stored=True)
    assert max(map(len, lanes._held)) < 200
    assert lanes.states(keys) == [1] * len(keys)
    lanes.close(lane)
    steps = 0
    while lanes.tidy(100):
        steps += 1
        lanes.check()
    assert steps >= 199
    assert len(lanes) == 0


def test_an_event_is_taken_in_once(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    assert mirror.apply(stored(1, 0)) is Applied.DONE
    removed = PageRemoved(W0, Epoch(1), 2, (entry(0),))
    assert mirror.apply(removed) is Applied.DONE
    assert mirror.apply(stored(1, 0)) is Applied.OLD
    assert mirror.masks(W0) == {}


def test_an_event_after_a_gap_changes_nothing(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    assert mirror.apply(stored(2, 0)) is Applied.GAP
    assert mirror.masks(W0) == {}


def test_events_of_unknown_places_and_other_epochs_change_nothing(mirror: Mirror) -> None:
    assert mirror.apply(stored(1, 0)) is Applied.UNKNOWN
    mirror.place_up(record("w0", epoch=2))
    assert mirror.apply(stored(1, 0, epoch=1)) is Applied.OLD
    assert mirror.apply(stored(1, 0, epoch=3)) is Applied.UNKNOWN
    assert mirror.masks(W0) == {}


def test_an_earlier_start_cannot_come_up_or_take_a_place_down(mirror: Mirror) -> None:
    mirror.place_up(record("w0", epoch=2))
    assert not mirror.place_up(record("w0", epoch=1))
    assert not mirror.place_down(W0, Epoch(1))
    assert mirror.epoch(W0) == 2
    assert mirror.place_down(W0, Epoch(2))
    assert not mirror.place_down(W0)
    assert mirror.epoch(W0) is None


def test_what_was_known_holds_until_what_is_read_anew_is_complete(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    mirror.apply(stored(1, 0, 1))
    load = mirror.load(record("w0"), seq=5)
    load.put([(key(7), DEVICE)])
    assert set(mirror.masks(W0)) == {key(0), key(1)}
    assert load.apply(stored(6, 8)) is Applied.DONE
    assert load.apply(stored(6, 9)) is Applied.OLD
    assert load.apply(stored(8, 9)) is Applied.GAP
    assert load.apply(stored(7, 9, epoch=2)) is Applied.UNKNOWN
    assert load.commit()
    assert set(mirror.masks(W0)) == {key(7), key(8)}
    assert mirror.apply(stored(7, 9)) is Applied.DONE


def test_a_discarded_load_leaves_no_trace(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    load = mirror.load(record("w0", epoch=2), seq=0)
    load.put([(key(7), DEVICE)])
    load.discard()
    load.discard()
    assert mirror.epoch(W0) == 1
    assert mirror.matches([key(7)]) == {}


def test_a_load_of_an_earlier_start_does_not_replace_a_later_one(mirror: Mirror) -> None:
    load = mirror.load(record("w0", epoch=1), seq=0)
    mirror.place_up(record("w0", epoch=2))
    assert not load.commit()
    assert mirror.epoch(W0) == 2


def test_pages_are_counted_by_tier(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    entries = (
        entry(0),
        entry(0, tier=Tier.HOST),
        entry(1, part=Part.WINDOW),
        entry(1, part=Part.FULL),
    )
    mirror.apply(PageStored(W0, Epoch(1), 1, entries))
    assert mirror.pages(W0) == {Tier.DEVICE: 3, Tier.HOST: 1}
    assert mirror.pages(PlaceId("other")) == {}


def test_a_lane_is_not_used_again_before_it_is_clean(mirror: Mirror) -> None:
    mirror.place_up(record("w0"))
    mirror.apply(stored(1, *range(50)))
    mirror.place_down(W0)
    mirror.place_up(record("w1"))
    assert mirror.tidy(10)
    mirror.place_up(record("w2"))
    assert mirror.matches([key(0)]) == {}
    while mirror.tidy(10):
        mirror.place_up(record("w3"))
        assert mirror.matches([key(49)]) == {}


def test_a_run_says_the_same_as_a_sequence_and_as_segments() -> None:
    run = MaskRun(((DEVICE, 2), (HOST, 1)))
    assert list(run) == [DEVICE, DEVICE, HOST] == run
    assert [run[at] for at in (0, 1, 2, -1, -3)] == [DEVICE, DEVICE, HOST, HOST, DEVICE]
    assert run[1:] == [DEVICE, HOST]
    for at in (3, -4):
        with pytest.raises(IndexError):
            run[at]
    assert len(run) == 3
    assert run == MaskRun(((DEVICE, 2), (HOST, 1)))
    assert hash(run) == hash(MaskRun(((DEVICE, 2), (HOST, 1))))
    assert run != [DEVICE]
    assert run != "no run"


places = st.sampled_from([PlaceId(f"w{number}") for number in range(3)])
numbers = st.integers(0, 7)
parts = st.sampled_from(Part)
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.POOL_OBJECT])
entries = st.lists(st.builds(entry, numbers, parts, tiers), max_size=4)

Model = dict[PageKey, PartMask]


def change(held: Model, changed: list[PageEntry], *, add: bool) -> None:
    for one in changed:
        bit = part_bit(one.part, one.tier)
        old = held.get(one.key, 0)
        held[one.key] = PartMask(old | bit if add else old & ~bit)
    for empty in [k for k, mask in held.items() if not mask]:
        del held[empty]


def alike(mirror: Mirror, asked: list[PageKey]) -> dict[PlaceId, list[PartMask]]:
    """Return what `Mirror.alike` says, by place."""
    places = {lane: place for place, lane in mirror.lanes().items()}
    found = mirror.alike(asked)
    assert found is not None
    return {places[Lane(lane)]: list(run) for run, lanes in found for lane in lanes.tolist()}


class MirrorAgainstDictionaries(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.up: dict[PlaceId, tuple[int, int, Model]] = {}
        self.loads: dict[PlaceId, tuple[int, int, Model, PlaceLoad]] = {}

    @rule(place=places, epoch=st.integers(1, 3))
    def come_up(self, place: PlaceId, epoch: int) -> None:
        have = self.up.get(place)
        assert self.mirror.place_up(record(place, epoch)) == (have is None or epoch >= have[0])
        if have is None or epoch > have[0]:
            self.up[place] = (epoch, 0, {})

    @rule(place=places, epoch=st.none() | st.integers(1, 3))
    def go_down(self, place: PlaceId, epoch: int | None) -> None:
        have = self.up.get(place)
        goes = have is not None and (epoch is None or epoch >= have[0])
        assert self.mirror.place_down(place, None if epoch is None else Epoch(epoch)) == goes
        if goes:
            del self.up[place]

    @rule(place=places, entries=entries, kind=st.sampled_from("+-0"), skip=st.integers(-1, 1))
    def event(self, place: PlaceId, entries: list[PageEntry], kind: str, skip: int) -> None:
        epoch, seq, held = self.up.get(place, (1, 0, {}))
        said = self.said(place, epoch, seq + 1 + skip, entries, kind)
        applied = self.mirror.apply(said)
        if place not in self.up:
            assert applied is Applied.UNKNOWN
            return
        assert applied is {-1: Applied.OLD, 0: Applied.DONE, 1: Applied.GAP}[skip]
        if skip == 0:
            self.change(held, entries, kind)
            self.up[place] = (epoch, seq + 1, held)

    @rule(place=places, epoch=st.integers(1, 3), seq=st.integers(0, 5), entries=entries)
    def begin_load(self, place: PlaceId, epoch: int, seq: int, entries: list[PageEntry]) -> None:
        if place in self.loads:
            return
        load = self.mirror.load(record(place, epoch), seq=seq)
        load.put((one.key, part_bit(one.part, one.tier)) for one in entries)
        held: Model = {}
        change(held, entries, add=True)
        self.loads[place] = (epoch, seq, held, load)

    @rule(place=places, entries=entries, kind=st.sampled_from("+-0"))
    def event_while_loading(self, place: PlaceId, entries: list[PageEntry], kind: str) -> None:
        if place not in self.loads:
            return
        epoch, seq, held, load = self.loads[place]
        assert load.apply(self.said(place, epoch, seq + 1, entries, kind)) is Applied.DONE
        self.change(held, entries, kind)
        self.loads[place] = (epoch, seq + 1, held, load)

    @rule(place=places, commit=st.booleans())
    def end_load(self, place: PlaceId, commit: bool) -> None:
        if place not in self.loads:
            return
        epoch, seq, held, load = self.loads.pop(place)
        if not commit:
            load.discard()
            return
        counts = place not in self.up or self.up[place][0] <= epoch
        assert load.commit() == counts
        if counts:
            self.up[place] = (epoch, seq, held)

    @rule(steps=st.integers(1, 10))
    def tidy(self, steps: int) -> None:
        self.mirror.tidy(steps)

    @invariant()
    def agree(self) -> None:
        self.mirror.check()
        assert {p: r.epoch for p, r in self.mirror.places().items()} == {
            p: epoch for p, (epoch, _, _) in self.up.items()
        }
        for place, (_, _, held) in self.up.items():
            assert self.mirror.masks(place) == held
        for start in range(8):
            asked = [key(number) for number in range(start, 8)]
            assert self.mirror.matches(asked) == self.expected(asked)
            assert alike(self.mirror, asked) == self.expected(asked)

    def expected(self, asked: list[PageKey]) -> dict[PlaceId, list[PartMask]]:
        runs: dict[PlaceId, list[PartMask]] = {}
        for place, (_, _, held) in self.up.items():
            for one in asked:
                if one not in held:
                    break
                runs.setdefault(place, []).append(held[one])
        return runs

    @staticmethod
    def said(
        place: PlaceId, epoch: int, seq: int, entries: list[PageEntry], kind: str
    ) -> PageEvent:
        if kind == "0":
            return PlaceCleared(place, Epoch(epoch), seq)
        event = PageStored if kind == "+" else PageRemoved
        return event(place, Epoch(epoch), seq, tuple(entries))

    @staticmethod
    def change(held: Model, entries: list[PageEntry], kind: str) -> None:
        if kind == "0":
            held.clear()
        else:
            change(held, entries, add=kind == "+")


TestMirrorAgainstDictionaries = MirrorAgainstDictionaries.TestCase
TestMirrorAgainstDictionaries.settings = settings(max_examples=150)


@given(st.lists(st.sampled_from([0, 1, 2]), max_size=300))
def test_runs_longer_than_a_first_look_are_whole(kinds: list[int]) -> None:
    mirror = Mirror()
    mirror.place_up(record("w0"))
    mirror.place_up(record("w1"))
    load = mirror.load(record("w0"), seq=0)
    masks = [PartMask([0, DEVICE, HOST][kind]) for kind in kinds]
    load.put((key(number), mask) for number, mask in enumerate(masks) if mask)
    load.commit()
    run = masks[: masks.index(PartMask(0))] if 0 in masks else masks
    found = mirror.matches([key(number) for number in range(len(kinds))])
    assert {place: list(masks) for place, masks in found.items()} == ({W0: run} if run else {})
    assert alike(mirror, [key(number) for number in range(len(kinds))]) == found
