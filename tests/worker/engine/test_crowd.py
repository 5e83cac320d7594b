"""Many sequences over few pages, with loads that fail and cancellations: the scheduler's promises."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from pie.worker.scheduler import StepPlan
from pie.worker.sequence import Sequence, SequenceState
from tests.worker.engine.world import PAGE, World, chunks


@dataclass(frozen=True)
class Arrival:
    prefix: int
    shared: int
    """Tokens of the prefix."""
    own: tuple[int, ...]
    outputs: int
    pause: int
    """Steps before the next one."""


arrivals_ = st.lists(
    st.builds(
        Arrival,
        prefix=st.integers(0, 3),
        shared=st.integers(0, 12),
        own=st.tuples(st.integers(10, 12), st.integers(10, 12)),
        outputs=st.integers(1, 40),
        pause=st.integers(0, 4),
    ),
    min_size=1,
    max_size=16,
)


@dataclass
class Crowd:
    """A world with loads that end whenever they like."""

    world: World
    chance: random.Random
    cancel_share: float = 0.02
    loads: list[Sequence] = field(default_factory=list)
    loaded: int = 0
    cancelled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world.load_wish = self._wish

    def serve(self, arrivals: list[Arrival]) -> None:
        for one in arrivals:
            self.world.submit([one.prefix] * one.shared + list(one.own), one.outputs)
            for _ in range(one.pause):
                self.step()
        # As if done one after another, with slack for loads.
        limit = 200 + 4 * sum(one.length + self.world.left[one.number] for one in self.alive())
        for _ in range(limit):
            if self.world.scheduler.is_empty:
                break
            self.step()
        assert self.world.scheduler.is_empty, "not all finished"
        for sequence in self.world.sequences:
            assert sequence.number in self.cancelled or not self.world.left[sequence.number]
        counts = self.world.table.counts()
        assert counts.in_use == counts.writable == counts.loading == 0

    def alive(self) -> list[Sequence]:
        return [one for one in self.world.sequences if one.state is not SequenceState.FINISHED]

    def step(self) -> None:
        world = self.world
        alive = self.alive()
        decodes = {
            one.number for one in alive if one.state is SequenceState.RUNNING and one.missing == 1
        }
        preempted = world.scheduler.preemptions
        plan = world.step()
        assert plan.tokens <= world.step_tokens
        planned = chunks(plan)
        if decodes & planned.keys():
            assert sum(tokens for tokens in planned.values() if tokens > 1) <= world.prefill_tokens
        if world.scheduler.preemptions == preempted:
            assert decodes <= planned.keys(), "a decode was left out"
        if alive and not self.loads and not plan.loads:
            assert planned, "nobody got on"
            if math.isinf(world.tokens_per_s):
                assert alive[0].number in planned, "the oldest did not get on"
        self._end_loads(plan)
        self._cancel()
        world.check()

    def _wish(self, sequence: Sequence) -> int:
        working_set = sequence.working_set
        return self.chance.choice([0, 0, len(working_set.keys) - working_set.frozen])

    def _end_loads(self, plan: StepPlan) -> None:
        self.loads.extend(plan.loads)
        for sequence in [one for one in self.loads if self.chance.random() < 0.5]:
            self.loads.remove(sequence)
            working_set = sequence.working_set
            came = self.chance.randint(0, len(working_set.pages) - working_set.frozen)
            start = working_set.frozen * PAGE
            self.world.write(sequence, range(start, start + came * PAGE))
            self.world.scheduler.loaded(sequence, came, self.world.now_s)
            self.loaded += came

    def _cancel(self) -> None:
        alive = self.alive()
        if alive and self.chance.random() < self.cancel_share:
            victim = self.chance.choice(alive)
            self.world.scheduler.finish(victim)
            self.cancelled.add(victim.number)


@settings(max_examples=150)
@given(
    arrivals_,
    st.integers(14, 20),
    st.integers(1, 5),
    st.integers(5, 30),
    st.integers(1, 30),
    st.sampled_from([math.inf, 1.0, 20.0]),
    st.randoms(use_true_random=False),
)
def test_all_finish_and_no_step_exceeds_its_budget(
    arrivals: list[Arrival],
    pages: int,
    max_running: int,
    step_tokens: int,
    prefill_tokens: int,
    tokens_per_s: float,
    chance: random.Random,
) -> None:
    world = World(
        pages=pages,
        max_running=max_running,
        step_tokens=step_tokens,
        prefill_tokens=prefill_tokens,
        tokens_per_s=tokens_per_s,
    )
    Crowd(world, chance).serve(arrivals)


@pytest.mark.parametrize("seed", range(20))
def test_a_crowd_on_few_pages_all_finishes(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = [
        Arrival(
            prefix=chance.randrange(4),
            shared=chance.randrange(13),
            own=(chance.randrange(10, 13), chance.randrange(10, 13)),
            outputs=chance.randrange(1, 41),
            pause=chance.randrange(5),
        )
        for _ in range(40)
    ]
    world = World(pages=15, max_running=5, step_tokens=24, prefill_tokens=8, tokens_per_s=12.0)
    crowd = Crowd(world, chance)
    crowd.serve(arrivals)
    assert crowd.world.scheduler.preemptions
    assert crowd.loaded


@pytest.mark.parametrize("slots", [0, 12])
def test_two_hundred_at_once_on_few_pages_all_finish_and_begin_in_the_order_they_came(
    slots: int,
) -> None:
    chance = random.Random(7)
    world = World(
        pages=40,
        max_running=8,
        max_waiting=200,
        step_tokens=64,
        prefill_tokens=16,
        slots=slots,
    )
    for _ in range(200):
        shared = [chance.randrange(4)] * chance.randrange(60)
        world.submit([*shared, *range(10, 11 + chance.randrange(30))], chance.randrange(1, 40))
    world.run(limit=20_000)
    assert not any(world.left.values())
    began = [one.admitted_s for one in world.sequences]
    assert began == sorted(began, key=lambda at: at or 0.0)
    assert world.scheduler.preemptions
