"""A working set of a program, against a plain list of which slot is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pie.page.events import Part
from pie.page.key import RootKey
from pie.policies.manager import RetentionManager
from pie.wire.programs import Trouble
from pie.worker.page_table import PageTable
from pie.worker.programs.attempt import Attempt
from pie.worker.programs.ledger import PageLedger
from pie.worker.programs.slots import SlotSet
from pie.worker.programs.trouble import CallError

PAGE = 4
ROOT = RootKey(b"r" * 32)


@dataclass
class Memory:
    """What lies in each slot of the arena."""

    cells: dict[int, int] = field(default_factory=dict)
    copied: int = 0

    def copy(self, source_id: int, target_id: int) -> None:
        self.copied += 1
        for at in range(PAGE):
            self.cells[target_id * PAGE + at] = self.cells.get(source_id * PAGE + at, -1)

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        raise AssertionError

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not set(sources) & set(targets)
        found = [self.cells[at] for at in sources]
        self.cells.update(zip(targets, found, strict=True))


class World:
    def __init__(self, pages: int = 40, cap: int | None = None) -> None:
        self.table = PageTable(pages, page_bytes=1, part=Part.FULL, retention=RetentionManager())
        self.ledger = PageLedger(self.table, cap or pages)
        self.memory = Memory()

    def make(self) -> SlotSet:
        return SlotSet(self.ledger, ROOT, page_tokens=PAGE)

    def write_again(self, one: SlotSet, slot: int) -> None:
        attempt = Attempt(one, self.ledger, self.memory)
        attempt.write_again(slot, 0.0)
        attempt.keep()

    def write(self, one: SlotSet, tokens: Sequence[int], *, is_pure: bool = True) -> None:
        assert one.reserve(len(tokens), 0.0)
        for at, token in enumerate(tokens, start=one.used):
            self.memory.cells[one.pages[at // PAGE] * PAGE + at % PAGE] = token
        first = one.next_position
        one.advance(tokens, np.arange(first, first + len(tokens)), 0.0, is_pure=is_pure)

    def held(self, one: SlotSet) -> dict[int, int]:
        """Return the token that lies where each live slot is."""
        alive = np.flatnonzero(one.cells >= 0)
        return {
            int(one.cells[at]): self.memory.cells[one.pages[at // PAGE] * PAGE + at % PAGE]
            for at in alive.tolist()
        }


class Machine(RuleBasedStateMachine):
    """Sets are written, forked, dropped from, compacted, sealed and closed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(pages=200)
        self.sets: list[tuple[SlotSet, dict[int, int]]] = [(self.world.make(), {})]
        self.token = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.sets) - 1))

    @rule(data=st.data(), count=st.integers(1, 11), shared=st.booleans())
    def write(self, data: st.DataObject, count: int, shared: bool) -> None:
        one, model = self.sets[self.pick(data)]
        tokens = list(range(count)) if shared else list(range(self.token, self.token + count))
        self.token += count
        model.update(zip(range(one.next_slot, one.next_slot + count), tokens, strict=True))
        self.world.write(one, tokens)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        one, model = self.sets[self.pick(data)]
        slots = data.draw(st.sets(st.sampled_from(sorted(model)), max_size=12)) if model else set()
        one.drop(np.array(sorted(slots), np.int64))
        for slot in slots:
            del model[slot]

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        one, model = self.sets[self.pick(data)]
        one.compact(self.world.memory, 0.0)
        assert one.is_whole
        assert len(one.pages) == -(-len(model) // PAGE)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        self.sets[self.pick(data)][0].seal()

    @precondition(lambda self: len(self.sets) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one, model = self.sets[self.pick(data)]
        before = self.world.memory.copied
        count = data.draw(st.integers(1, 3))
        for twin in one.fork(count, self.world.memory, 0.0):
            self.sets.append((twin, dict(model)))
        assert self.world.memory.copied - before <= count

    @precondition(lambda self: len(self.sets) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.sets.pop(self.pick(data))[0].release()

    @invariant()
    def every_live_slot_holds_what_was_written_there(self) -> None:
        for one, model in self.sets:
            one.check()
            assert self.world.held(one) == model
        users = [page for one, _ in self.sets for page in one.pages]
        assert sorted(users) == sorted(self.world.ledger.users())
        self.world.table.check([users])

    def teardown(self) -> None:
        for one, _ in self.sets:
            one.release()
        assert not len(self.world.ledger)
        self.world.table.check([[]])


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30)


def ints(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(slots, np.int64)


def test_a_page_whose_slots_are_all_dropped_is_free_at_once() -> None:
    world = World()
    one = world.make()
    world.write(one, range(12))
    one.drop(ints(4, 5, 6))
    assert len(one.pages) == 3
    one.drop(ints(7))
    assert len(one.pages) == 2
    assert one.live.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert one.positions.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_compacting_keeps_slots_and_positions_and_gives_pages_back() -> None:
    world = World()
    one = world.make()
    world.write(one, range(16))
    one.drop(ints(1, 2, 3, 5, 6, 7, 9, 10, 11))
    one.compact(world.memory, 0.0)
    assert len(one.pages) == 2
    assert one.live.tolist() == [0, 4, 8, 12, 13, 14, 15]
    assert one.positions.tolist() == [0, 4, 8, 12, 13, 14, 15]
    assert one.next_position == 16
    assert world.table.available == 38


def test_a_set_that_was_only_written_shares_its_pages_by_key() -> None:
    world = World()
    first, second = world.make(), world.make()
    world.write(first, range(10))
    tokens = list(range(10))
    assert second.match(tokens, second.upcoming(tokens), 0.0) == 8
    assert second.cached_tokens == 8
    assert second.pages == first.pages[:2]


@pytest.mark.parametrize("spoil", ["drop", "mask", "seal"])
def test_what_is_written_after_something_that_is_not_pure_has_no_key(spoil: str) -> None:
    world = World()
    one = world.make()
    world.write(one, range(6))
    if spoil == "drop":
        one.drop(ints(1))
    elif spoil == "seal":
        one.seal()
    world.write(one, range(6, 12), is_pure=spoil != "mask")
    other = world.make()
    tokens = list(range(13))
    assert other.match(tokens, other.upcoming(tokens), 0.0) == 4
    assert not one.is_pure


def test_dropping_the_newest_slots_takes_no_position_back() -> None:
    world = World()
    one = world.make()
    world.write(one, range(7))
    one.drop(ints(5, 6))
    assert one.next_position == 7
    world.write_again(one, 4)
    assert one.next_position == 4


def test_a_slot_in_the_writable_buffer_can_be_written_again_and_one_in_a_frozen_page_cannot() -> (
    None
):
    world = World()
    one = world.make()
    world.write(one, range(7))
    world.write_again(one, 5)
    world.write(one, [50, 51])
    assert world.held(one) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 50, 6: 51}
    with pytest.raises(CallError, match="slot 3 lies in a frozen page") as raised:
        world.write_again(one, 3)
    assert (raised.value.trouble, raised.value.slot) == (Trouble.FROZEN_PAGE, 3)
    with pytest.raises(CallError, match="slot 7 was never written") as raised:
        world.write_again(one, 9)
    assert (raised.value.trouble, raised.value.slot) == (Trouble.NEVER_WRITTEN, 7)


def test_a_slot_that_was_never_written_cannot_be_dropped() -> None:
    world = World()
    one = world.make()
    world.write(one, range(3))
    with pytest.raises(CallError, match="slot 3 was never written") as raised:
        one.drop(ints(1, 3))
    assert raised.value.slot == 3
    assert one.live.tolist() == [0, 1, 2]


def test_programs_hold_no_more_pages_than_their_share() -> None:
    world = World(pages=10, cap=3)
    one = world.make()
    world.write(one, range(12))
    assert not one.reserve(1, 0.0)
    assert world.table.counts().free == 7


def test_compacting_without_room_for_the_copies_says_so_and_changes_nothing() -> None:
    world = World(pages=10, cap=3)
    one = world.make()
    world.write(one, range(12))
    one.drop(ints(0, 4, 8))
    before = world.held(one)
    with pytest.raises(CallError, match="programs hold 3 of at most 3 pages"):
        one.compact(world.memory, 0.0)
    assert world.held(one) == before
    one.check()


@given(st.sets(st.integers(0, 39), max_size=40))
@settings(max_examples=30)
def test_a_hole_never_costs_a_page_more_than_its_live_slots_need(gone: set[int]) -> None:
    world = World()
    one = world.make()
    world.write(one, range(40))
    one.drop(np.array(sorted(gone), np.int64))
    alive = {slot // PAGE for slot in range(40) if slot not in gone}
    assert len(one.pages) == len(alive)
