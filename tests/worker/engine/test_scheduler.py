from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from pie.worker.sequence import Sequence, SequenceState
from pie.worker.working_set import WorkingSet
from tests.worker.engine.world import PAGE, ROOT, World, chunks


def test_a_prompt_is_cut_into_chunks_that_end_with_pages() -> None:
    world = World(step_tokens=10)
    world.submit(range(21))
    assert [world.step().tokens for _ in range(3)] == [8, 8, 5]


def test_the_last_chunk_draws() -> None:
    world = World(step_tokens=10)
    world.submit(range(12), outputs=3)
    assert [world.step().chunks[0].draws for _ in range(4)] == [False, True, True, True]
    assert world.scheduler.is_empty


def test_decode_goes_first_and_bounds_the_prefill_beside_it() -> None:
    world = World(step_tokens=16, prefill_tokens=8)
    world.submit([1, 2, 3], outputs=20)
    world.step()
    world.submit(range(30))
    assert chunks(world.step()) == {0: 1, 1: 8}
    assert chunks(world.step()) == {0: 1, 1: 8}


def test_prefill_alone_takes_the_whole_step() -> None:
    world = World(step_tokens=16, prefill_tokens=4)
    world.submit(range(30))
    assert world.step().tokens == 16


def test_prompts_run_in_order_of_arrival() -> None:
    world = World(step_tokens=8)
    world.submit(range(8))
    world.submit(range(100, 108))
    assert chunks(world.step()) == {0: 8}
    assert chunks(world.step()) == {1: 8}


def test_a_short_prompt_passes_a_long_one_that_came_just_before() -> None:
    world = World(pages=40, step_tokens=8, tokens_per_s=8.0)
    world.submit(range(64))
    assert chunks(world.step()) == {0: 8}
    world.submit(range(100, 108))
    assert chunks(world.step()) == {1: 8}
    assert chunks(world.step()) == {0: 8}


@given(st.integers(2, 12), st.integers(1, 8))
def test_short_prompts_that_keep_coming_hold_up_a_long_one_for_its_own_time(
    long_steps: int, short_tokens: int
) -> None:
    # As much comes every second as can be computed, which in order of length would be for ever.
    world = World(pages=400, max_running=8, step_tokens=8, tokens_per_s=8.0)
    long = world.submit(range(8 * long_steps))
    for step in range(2 * long_steps + 2):
        if world.made[long.number]:
            break
        world.submit([1_000 + 10 * step + at for at in range(short_tokens)])
        world.step()
    assert world.made[long.number], "those that come after its own time wait for it"
    world.run()


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    world = World()
    world.submit([*range(8), 50])
    world.run()
    sequence = world.submit([*range(8), 60, 61])
    assert world.step().tokens == 2
    assert sequence.cached_device == 8


def test_a_fully_cached_prompt_computes_its_last_token_and_writes_nothing() -> None:
    world = World()
    world.submit(range(8))
    world.run()
    sequence = world.submit(range(8))
    plan = world.plan()
    assert chunks(plan) == {1: 1}
    assert plan.chunks[0].draws
    assert not sequence.working_set.writes
    assert sequence.working_set.pages == list(world.table.match(sequence.working_set.keys, 0))
    assert sequence.cached_device == 7


def test_a_prefill_takes_over_pages_that_another_made_meanwhile() -> None:
    world = World(step_tokens=8)
    world.submit([*range(16), 90])
    world.submit([*range(16), 91])
    steps = [chunks(world.step()) for _ in range(3)]
    assert steps == [{0: 8}, {0: 8}, {0: 1, 1: 1}]
    assert world.sequences[1].cached_device == 16


def test_the_youngest_gives_way_and_goes_on_from_its_cached_pages() -> None:
    world = World(pages=6, max_running=2, step_tokens=16)
    old, young = world.submit(range(8), outputs=10), world.submit(range(50, 54), outputs=10)
    while young.state is not SequenceState.WAITING or not world.scheduler.preemptions:
        world.step()
    made = world.made[young.number]
    assert made
    assert old.state is SequenceState.RUNNING
    world.run()
    assert world.made == {0: 10, 1: 10}


def test_winning_back_ones_own_pages_is_no_hit() -> None:
    world = World(pages=6, max_running=2, step_tokens=16)
    world.submit(range(8), outputs=10)
    world.submit(range(50, 54), outputs=10)
    world.run()
    assert world.scheduler.preemptions
    assert [one.cached_device for one in world.sequences] == [0, 0]


def test_a_prompt_waits_for_room_and_nobody_overtakes_it() -> None:
    world = World(pages=6, step_tokens=16)
    world.submit(range(12), outputs=8)
    world.step()
    world.submit(range(20, 32))
    world.submit([99])
    assert chunks(world.step()) == {0: 1}
    world.run()


def test_a_full_queue_refuses() -> None:
    world = World(max_running=1, max_waiting=2)
    for number in range(3):
        world.submit([number])
    assert not submitted(world, [9])
    assert world.scheduler.waiting == 2
    world.run()


@pytest.mark.parametrize("max_running", [1, 3])
def test_without_a_queue_what_fits_runs_and_the_rest_is_refused(max_running: int) -> None:
    world = World(max_running=max_running, max_waiting=0)
    for number in range(max_running):
        world.submit([number])
    assert not submitted(world, [9])
    world.run()
    assert submitted(world, [9])


def test_without_a_queue_a_prompt_that_has_no_room_is_refused() -> None:
    world = World(pages=6, max_waiting=0)
    world.submit(range(12), outputs=8)
    assert not submitted(world, range(20, 32))
    assert submitted(world, [99])
    world.check()


def submitted(world: World, tokens: Iterable[int]) -> bool:
    working_set = WorkingSet(world.table, ROOT, tokens, page_tokens=PAGE)
    return world.scheduler.submit(Sequence(99, working_set, world.now_s))


def test_waiting_tokens_leave_out_what_is_cached() -> None:
    world = World()
    world.submit([*range(8), 50])
    world.run()
    world.submit([*range(8), 60, 61])
    assert world.scheduler.waiting_tokens == 2


def test_others_go_on_while_a_sequence_loads() -> None:
    world = World(load_wish=lambda sequence: 2 if sequence.number == 0 else 0)
    loading = world.submit(range(9), outputs=2)
    world.submit([50], outputs=2)
    plan = world.step()
    assert plan.loads == [loading]
    assert chunks(plan) == {1: 1}
    world.write(loading, range(8))
    world.scheduler.loaded(loading, 2, world.now_s)
    assert chunks(world.step()) == {0: 1, 1: 1}
    assert loading.cached_pool == 8


def test_what_a_load_did_not_bring_is_computed() -> None:
    world = World(load_wish=lambda _: 3)
    sequence = world.submit(range(14))
    world.step()
    world.write(sequence, range(4))
    world.scheduler.loaded(sequence, 1, world.now_s)
    assert chunks(world.step()) == {0: 10}
    assert sequence.cached_pool == 4


def test_a_sequence_that_is_cancelled_while_it_loads_keeps_its_pages_until_the_load_ends() -> None:
    world = World(load_wish=lambda _: 2)
    sequence = world.submit(range(9))
    world.step()
    world.scheduler.finish(sequence)
    world.check()
    assert world.table.counts().loading == 2
    world.write(sequence, range(8))
    world.scheduler.loaded(sequence, 2, world.now_s)
    assert world.scheduler.is_empty
    assert world.table.counts().idle == 2, "what was loaded stays for others"


@pytest.mark.parametrize("state", list(SequenceState)[:3])
def test_finishing_frees_everything(state: SequenceState) -> None:
    world = World(max_running=1, load_wish=lambda _: 2 if state is SequenceState.LOADING else 0)
    running = world.submit(range(9), outputs=5)
    waiting = world.submit(range(20, 29))
    world.step()
    sequence = waiting if state is SequenceState.WAITING else running
    assert sequence.state is state
    world.scheduler.finish(sequence)
    if state is SequenceState.LOADING:
        world.scheduler.loaded(sequence, 0, world.now_s)
    world.check()
    assert not sequence.working_set.pages


def test_a_smaller_priority_is_admitted_and_computed_first() -> None:
    world = World(step_tokens=8)
    world.submit(range(8), priority=1)
    world.submit(range(100, 108))
    world.submit(range(200, 208), priority=-1)
    assert [chunks(world.step()) for _ in range(3)] == [{2: 8}, {1: 8}, {0: 8}]


def test_the_least_important_gives_way_even_where_it_is_the_oldest() -> None:
    world = World(pages=6, max_running=2, step_tokens=16)
    low = world.submit(range(8), outputs=10, priority=1)
    high = world.submit(range(50, 54), outputs=10)
    while not world.scheduler.preemptions:
        world.step()
    assert low.state is SequenceState.WAITING
    assert high.state is SequenceState.RUNNING
    world.run()
    assert world.made == {0: 10, 1: 10}
