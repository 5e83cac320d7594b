from __future__ import annotations

from pie.worker.page_copies import PageNames
from pie.worker.suspended import SuspendedPages, suspended_budget
from tests.worker.engine.test_tier_machine import LAYOUT, TieredWorld
from tests.worker.engine.world import PAGE, ROOT


def world(tails: int = 2) -> TieredWorld:
    made = TieredWorld(pages=12, max_running=4, step_tokens=64)
    made.suspended = SuspendedPages(made, PageNames(ROOT, LAYOUT), tails * LAYOUT.page_bytes)
    made.scheduler.suspender = made.suspended
    return made


def test_a_tail_is_kept_and_given_back() -> None:
    one = world()
    sequence = one.submit(range(6), outputs=3)
    one.step()
    one.scheduler._preempt(sequence)
    assert one.suspended.used_bytes == LAYOUT.page_bytes
    assert [chunk.tokens for chunk in one.step().chunks] == [1]
    assert (one.suspended.resumed, one.suspended.used_bytes) == (1, 0)
    one.run()


def test_at_a_pages_end_there_is_nothing_to_keep() -> None:
    one = world()
    sequence = one.submit(range(2 * PAGE), outputs=3)
    one.step()
    one.scheduler._preempt(sequence)
    assert (one.suspended.suspended, one.suspended.used_bytes) == (1, 0)
    one.step()
    assert one.suspended.resumed == 1


def test_tails_keep_to_their_cap() -> None:
    one = world(tails=1)
    sequences = [one.submit([number] * 6, outputs=3) for number in range(3)]
    one.step()
    for sequence in sequences:
        one.scheduler._preempt(sequence)
    assert (one.suspended.suspended, one.suspended.used_bytes) == (1, LAYOUT.page_bytes)
    one.run()
    assert one.suspended.resumed == 1


def test_a_sequence_that_ends_takes_its_tail_along() -> None:
    one = world()
    sequence = one.submit(range(6), outputs=3)
    one.step()
    one.scheduler._preempt(sequence)
    one.scheduler.finish(sequence)
    assert one.suspended.used_bytes == 0


def test_a_tail_waits_until_the_pages_before_it_are_there() -> None:
    one = world()
    one.table.below = None
    sequence = one.submit(range(2 * PAGE + 2), outputs=3)
    one.step()
    one.scheduler._preempt(sequence)
    assert one.table.allocate(12, 99) is not None
    one.table.release(list(range(12)))
    one.scheduler._limits = one.scheduler._limits.__class__(4, 100, 2 * PAGE)
    assert [chunk.tokens for chunk in one.step().chunks] == [2 * PAGE]
    assert [chunk.tokens for chunk in one.step().chunks] == [1]
    assert one.suspended.resumed == 1
    one.run()


def test_the_budget_is_a_small_part_of_host_memory() -> None:
    assert suspended_budget(1600, LAYOUT) == 100
    assert suspended_budget(1 << 30, LAYOUT) == 64 * LAYOUT.page_bytes
    assert suspended_budget(0, LAYOUT) == 0


def test_one_that_yields_again_before_it_has_its_tail_keeps_what_reaches_further() -> None:
    one = world()
    one.table.below = None
    sequence = one.submit(range(2 * PAGE + 2), outputs=3)
    one.step()
    one.scheduler._preempt(sequence)
    # Its pages are gone, so that it begins anew, and yields in the middle of a page.
    assert one.table.allocate(12, 99) is not None
    one.table.release(list(range(12)))
    one.scheduler._limits = one.scheduler._limits.__class__(4, 100, PAGE + 2)
    one.step()
    one.scheduler._preempt(sequence)
    one.suspended.check()
    assert one.suspended.used_bytes == LAYOUT.page_bytes
    one.run()
    assert one.suspended.used_bytes == 0
