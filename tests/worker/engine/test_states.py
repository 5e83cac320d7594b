"""Snapshots of recurrent state: where they are made, who goes on from them, who makes room."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many

import pytest
from hypothesis import given, settings, strategies as st

from pie.policies.manager import RetentionManager
from pie.worker.page_table import FrozenPage
from pie.worker.sequence import SequenceState
from pie.worker.state_table import StateTable
from pie.worker.working_set import WorkingSet
from pie.worker.working_state import WorkingState
from tests.worker.engine.test_page_table import frozen, key
from tests.worker.engine.world import PAGE, ROOT, World, chunks


@pytest.fixture
def table() -> StateTable:
    return StateTable(4, state_bytes=10, stride_pages=3, retention=RetentionManager())


def recurrent(
    pages: int = 40, slots: int = 12, *, step_tokens: int = 64, max_running: int = 4
) -> World:
    return World(
        pages=pages,
        slots=slots,
        step_tokens=step_tokens,
        prefill_tokens=64,
        max_running=max_running,
    )


def snapshots(world: World) -> list[int]:
    """Return where snapshots were made, in pages, in the order of making."""
    assert world.states is not None
    return [change.page.index + 1 for change in world.states.take_changes() if change.stored]


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 5))
def test_snapshots_are_due_at_the_stride_and_before_the_last_token(
    computed: int, missing: int, stride: int
) -> None:
    table = StateTable(2, state_bytes=1, stride_pages=stride, retention=RetentionManager())
    length = computed + missing
    last = (length - 1) // PAGE
    ahead = [pages for pages in range(1, length // PAGE + 1) if pages * PAGE > computed]
    due = [pages for pages in ahead if pages % stride == 0 or pages == last]
    assert list(table.due(computed, length, PAGE)) == due


@pytest.mark.parametrize("pages", [40, 0])
def test_a_chunk_ends_where_a_snapshot_is_due(pages: int) -> None:
    world = recurrent(pages)
    world.submit(range(30), outputs=8)
    assert [chunks(world.step()) for _ in range(4)] == [{0: 12}, {0: 12}, {0: 4}, {0: 2}]
    assert snapshots(world) == [3, 6, 7]
    world.run()
    assert snapshots(world) == [9], "the stride goes on while it decodes"


@pytest.mark.parametrize("pages", [40, 0])
def test_the_same_prompt_computes_no_more_than_a_page(pages: int) -> None:
    world = recurrent(pages)
    prompt = range(28)
    world.submit(prompt)
    world.run()
    second = world.submit(prompt)
    assert second.expected_tokens == 4
    assert chunks(world.step()) == {1: 4}
    assert second.cached_device == 24


def test_a_prompt_goes_on_from_the_last_snapshot_before_the_ways_part() -> None:
    world = recurrent()
    world.submit(range(40))
    world.run()
    other = world.submit([*range(22), 90, 91, 92])
    world.step()
    assert other.cached_device == 12
    world.run()


def test_a_snapshot_is_of_no_use_without_all_pages_before_it() -> None:
    world = recurrent(pages=8)
    world.submit(range(25))
    world.run()
    world.submit(range(100, 110))
    world.run()
    assert world.states is not None
    third = world.submit(range(25))
    assert world.states.holds(third.working_set.keys[5]), "the snapshot is there"
    world.run()
    assert third.cached_device < 24


def test_a_waiter_waits_for_a_snapshot_and_shares_it() -> None:
    world = recurrent(step_tokens=16)
    for _ in range(3):
        world.submit(range(18))
    assert [chunks(world.step()) for _ in range(3)] == [{0: 12}, {0: 4}, {0: 2, 1: 2, 2: 2}]
    assert world.scheduler.shared_in_flight == 2 * 16


def test_a_waiter_goes_its_own_way_after_the_last_snapshot_that_both_need() -> None:
    world = recurrent()
    world.submit([*range(14), 50, 51, 52, 53])
    world.submit([*range(14), 60, 61, 62, 63])
    assert [chunks(world.step()) for _ in range(2)] == [{0: 12}, {0: 4, 1: 4}]


def test_a_waiter_takes_over_where_the_first_was_cancelled() -> None:
    world = recurrent()
    first, second = world.submit(range(30)), world.submit(range(30))
    world.step()
    world.scheduler.finish(first)
    assert chunks(world.step()) == {1: 12}
    assert second.cached_device == 12
    world.run()


def test_a_waiter_computes_where_no_snapshot_could_be_made() -> None:
    """Two slots are both written, so the snapshots that were waited for are skipped."""
    world = recurrent(slots=2, step_tokens=16)
    world.submit([9], outputs=100)
    world.step()
    world.submit(range(30))
    world.submit(range(30))
    world.run()
    assert world.states is not None
    assert world.states.skipped


def test_no_more_are_admitted_than_there_are_slots() -> None:
    world = recurrent(slots=3, max_running=8)
    for number in range(5):
        world.submit([number], outputs=4)
    world.step()
    assert world.scheduler.running == 3
    world.run()


def test_the_younger_gives_its_slot_up() -> None:
    world = recurrent(slots=2, max_running=4)
    older = world.submit(range(30), outputs=2)
    younger = world.submit(range(50, 80), outputs=2)
    world.run()
    assert older.state is younger.state is SequenceState.FINISHED


def test_finishing_frees_every_slot() -> None:
    world = recurrent(slots=6)
    sequence = world.submit(range(30), outputs=50)
    for _ in range(3):
        world.step()
    assert len(sequence.working_set.state_slots) == 2, "it goes on from a snapshot"
    world.scheduler.finish(sequence)
    world.check()
    assert world.states is not None
    assert world.states.available == 6


def test_a_snapshot_is_the_slot_itself(table: StateTable) -> None:
    state = WorkingState(table)
    assert state.grow(0)
    written = state.target
    state.advance(frozen(1), 0)
    assert state.source == written
    assert state.target != written
    table.check([state.slots])
    state.advance(None, 0)
    assert state.source == state.target
    assert table.is_idle(key(1))


def test_without_a_slot_a_snapshot_is_skipped_and_counted(table: StateTable) -> None:
    states = [WorkingState(table) for _ in range(4)]
    assert all(state.grow(0) for state in states)
    states[0].advance(frozen(1), 0)
    assert (table.taken, table.skipped) == (0, 1)
    assert states[0].source == states[0].target
    assert not WorkingState(table).grow(0)


def test_the_oldest_idle_snapshot_makes_room(table: StateTable) -> None:
    state = WorkingState(table)
    assert state.grow(0)
    for number in (1, 2, 3):
        state.advance(FrozenPage(key(number), b"root", number), number)
    assert [WorkingState(table).grow(4), table.holds(key(1)), table.holds(key(2))] == [
        True,
        False,
        True,
    ]


def test_a_fork_shares_a_snapshot_and_copies_anything_else(table: StateTable) -> None:
    state = WorkingState(table)
    assert state.fork(0) is not None, "there is nothing to copy yet"
    assert state.grow(0)
    state.advance(None, 0)
    forked = state.fork(0)
    assert forked is not None
    copied, copies = forked
    assert copies == (state.source, copied.source)
    copied.release()
    state.advance(frozen(1), 0)
    forked = state.fork(0)
    assert forked is not None
    shared, copies = forked
    assert copies is None
    assert shared.source == state.source
    table.check([state.slots, shared.slots])
    shared.release()
    state.release()
    table.check([[]])


def test_a_fork_without_a_slot_is_refused(table: StateTable) -> None:
    states = [WorkingState(table) for _ in range(4)]
    for state in states:
        assert state.grow(0)
        state.advance(None, 0)
    assert states[0].fork(0) is None


def test_a_working_sets_tenant_goes_with_its_snapshots(table: StateTable) -> None:
    world = World(pages=8)
    working_set = WorkingSet(
        world.table, ROOT, range(13), page_tokens=PAGE, tenant_tag="t", states=table
    )
    assert working_set.grow(12, 0)
    working_set.advance(12, 0)
    (change,) = table.take_changes()
    assert (change.page.key, change.page.index) == (working_set.keys[2], 2)
    assert (change.page.tenant_tag, change.is_state) == ("t", True)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 25), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0, 20, 60]),
    st.integers(2, 12),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(6, 40),
    st.floats(0, 0.15),
    st.randoms(use_true_random=False),
)
def test_no_sequence_ever_goes_on_from_a_wrong_state_or_waits_for_ever(
    asked: Many[tuple[int, int, int, int]],
    pages: int,
    slots: int,
    stride: int,
    max_running: int,
    step_tokens: int,
    cancel_share: float,
    chance: random.Random,
) -> None:
    world = World(
        pages=pages,
        slots=slots,
        stride_pages=stride,
        max_running=max_running,
        step_tokens=step_tokens,
    )
    for number, (prefix, shared, own, outputs) in enumerate(asked):
        world.submit([*[prefix] * shared, *[10 + number] * own][:60], outputs)
        for _ in range(chance.randint(0, 3)):
            world.step()
            alive = [one for one in world.sequences if one.state is not SequenceState.FINISHED]
            if alive and chance.random() < cancel_share:
                world.scheduler.finish(chance.choice(alive))
                world.check()
    world.run(limit=3000)
    assert world.states is not None
    assert world.states.available == slots
