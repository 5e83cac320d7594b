"""Page table, scheduler and lower tiers together, against what each page must hold."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pie.page.events import Part, Tier as TierKind
from pie.page.key import PageKey
from pie.policies.manager import RetentionManager
from pie.pool.disk import DiskTier
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, StoredPage
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import PageCopies, PageNames, Piece
from pie.worker.sequence import Sequence, SequenceState
from pie.worker.stores import PageToStore, StoreQueue, WriteBehind
from pie.worker.suspended import SuspendedPages
from tests.worker.engine.toys import toy_layout
from tests.worker.engine.world import PAGE, ROOT, World

LAYOUT = toy_layout(PAGE)
HOST_BYTES = 9 * 4096
"""17 pages with their bookkeeping."""


@dataclass
class TieredWorld(World):
    """A world whose pages leave for host memory and disk, all of it on one thread."""

    folder: Path | None = None
    host_bytes: int = HOST_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        names = PageNames(ROOT, LAYOUT)
        self.copies = PageCopies(self, names)
        levels: list[Level] = []
        if self.host_bytes:
            levels.append(Level(RamTier(self.host_bytes, kind=TierKind.HOST), RetentionManager()))
        if self.folder is not None:
            disk = DiskTier([self.folder], 1 << 20, kind=TierKind.DISK)
            disk.open()
            levels.append(Level(disk, RetentionManager()))
        self.tiers = LowerTiers(levels, self.copies)
        self.found = self.tiers._cache.adopt()
        self.suspended = SuspendedPages(self, names, 2 * LAYOUT.page_bytes)
        self.scheduler.suspender = self.suspended
        self.stores = StoreQueue(self.table, limit_pages=8, batch_pages=4)
        self.table.below = WriteBehind(self.stores, self.tiers, LAYOUT.parts)
        self.batch: list[PageToStore] = []
        self.loading: list[Sequence] = []

    def export(self, page_id: int, part: Part) -> memoryview:
        assert part is Part.FULL
        slots = [self.memory.get((page_id, slot), -1) for slot in range(PAGE)]
        return memoryview(np.asarray(slots, np.int64).tobytes())

    def load(self, page_id: int, part: Part, payload: memoryview) -> None:
        assert part is Part.FULL
        for slot, token in enumerate(np.frombuffer(payload, np.int64).tolist()):
            self.memory[page_id, slot] = token

    def check(self) -> None:
        self.scheduler.check()
        self.suspended.check()
        users = [one.working_set.pages for one in self.scheduler.sequences()]
        self.table.check([*users, self.stores.in_flight])

    def end_store(self) -> None:
        kept = sum(
            self.tiers.put(self.copies.copy(one.slot, one.page, LAYOUT.parts)) for one in self.batch
        )
        self.stores.ended(0, kept)
        self.batch = []

    def end_load(self, sequence: Sequence, most: int) -> None:
        """Load up to `most` of a sequence's pages for real, and end its load."""
        self.loading.remove(sequence)
        working_set = sequence.working_set
        came = 0
        for at in range(working_set.frozen, min(len(working_set.pages), working_set.frozen + most)):
            slot = working_set.pages[at]

            def write(parts: Many[StoredPage], slot: int = slot) -> bool:
                self.copies.write(slot, parts)
                return True

            if not self.tiers.load([Piece(PageId(working_set.keys[at], Part.FULL), slot)], write):
                break
            came += 1
        self.scheduler.loaded(sequence, came, self.now_s)

    def close(self) -> None:
        self.tiers._cache.close()

    def _froze(self, sequence: Sequence, indices: object) -> None:
        assert isinstance(indices, list)
        working_set = sequence.working_set
        for index in indices:
            page = PageToStore(
                working_set.pages[index], working_set.page(index), working_set.keys[0]
            )
            self.stores.put(page)


class TierMachine(RuleBasedStateMachine):
    """Conversations under pressure, with forks, cancels, lost pages and restarts.

    The world asserts at every step that each slot that a sequence reads holds its token.
    """

    host_bytes = HOST_BYTES
    has_disk = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) if self.has_disk else None
        self.share = 1.0
        self.world = self._new_world()

    def teardown(self) -> None:
        world = self.world
        for _ in range(2000):
            if world.scheduler.is_empty:
                break
            self._step()
            self._end_store()
            for sequence in list(world.loading):
                world.end_load(sequence, 1000)
        assert world.scheduler.is_empty, "not all finished"
        assert not world.suspended.used_bytes
        for sequence in world.sequences:
            cancelled = sequence.number in self.cancelled
            assert cancelled or not world.left[sequence.number]
        world.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def _new_world(self) -> TieredWorld:
        self.cancelled: set[int] = set()
        return TieredWorld(
            pages=12,
            max_running=3,
            folder=self.folder,
            host_bytes=self.host_bytes,
            load_wish=self._wish,
        )

    def _wish(self, sequence: Sequence) -> int:
        working_set = sequence.working_set
        runs = self.world.tiers.runs(working_set.next_keys, held=working_set.frozen)
        return int(self.share * sum(run.pages for run in runs))

    def _step(self) -> None:
        plan = self.world.step()
        self.world.loading.extend(plan.loads)
        if not self.world.batch:
            self.world.batch = self.world.stores.next_batch()

    def _end_store(self) -> None:
        if self.world.batch:
            self.world.end_store()

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        outputs=st.integers(1, 14),
    )
    def submit(self, prefix: int, shared: int, own: list[int], outputs: int) -> None:
        self.world.submit([*([50 + prefix] * shared), *own], outputs)

    @rule(steps=st.integers(1, 4), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def step(self, steps: int, share: float) -> None:
        self.share = share
        for _ in range(steps):
            self._step()

    @rule()
    def end_store(self) -> None:
        self._end_store()

    @precondition(lambda self: self.world.loading)
    @rule(data=st.data(), most=st.sampled_from([0, 1, 2, 1000, 1000]))
    def end_load(self, data: st.DataObject, most: int) -> None:
        at = data.draw(st.integers(0, len(self.world.loading) - 1))
        self.world.end_load(self.world.loading[at], most)

    @rule(data=st.data(), outputs=st.integers(1, 14))
    def fork(self, data: st.DataObject, outputs: int) -> None:
        running = [one for one in self.world.sequences if one.state is SequenceState.RUNNING]
        if running:
            parent = running[data.draw(st.integers(0, len(running) - 1))]
            self.world.fork(parent, outputs)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        alive = [one for one in self.world.sequences if one.state is not SequenceState.FINISHED]
        if alive:
            victim = alive[data.draw(st.integers(0, len(alive) - 1))]
            self.world.scheduler.finish(victim)
            self.cancelled.add(victim.number)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        held = sorted({entry.key for entry in self.world.tiers.entries()})
        if held:
            key = held[data.draw(st.integers(0, len(held) - 1))]
            self.world.tiers._cache.remove(PageId(PageKey(key), Part.FULL))

    @rule()
    def demote(self) -> None:
        self.world.tiers._cache.relieve(0.5, 0.25)

    @rule(in_good_order=st.booleans())
    def restart(self, in_good_order: bool) -> None:
        if in_good_order:
            self.world.tiers.save(float("inf"))
        left = {entry.key for entry in self.world.tiers.entries() if entry.tier is TierKind.DISK}
        self.world.close()
        self.world = self._new_world()
        assert {entry.key for entry in self.world.tiers.entries()} == left
        assert self.world.found == len(left)

    @invariant()
    def all_agree(self) -> None:
        self.world.check()
        self.world.tiers.check()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=100, stateful_step_count=50)


class HostMachine(TierMachine):
    """Without a disk."""

    has_disk = False


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=60, stateful_step_count=50)


class DiskMachine(TierMachine):
    """Without host memory."""

    host_bytes = 0


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=50, stateful_step_count=40)


def test_a_wrong_page_would_show() -> None:
    world = TieredWorld(pages=12)
    world.submit(range(8))
    world.step()
    world.batch = world.stores.next_batch()
    for one in world.batch:
        world.memory[one.slot, 1] = 99
    world.end_store()
    world.submit([60] * 44)
    world.run()
    world.load_wish = lambda one: len(one.working_set.next_keys)
    sequence = world.submit([*range(8), 9])
    assert world.step().loads == [sequence]
    world.loading.append(sequence)
    world.end_load(sequence, 1000)
    with pytest.raises(AssertionError, match="a wrong page"):
        world.step()
    world.close()
