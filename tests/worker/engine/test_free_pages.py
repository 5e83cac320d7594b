from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pie.worker.free_pages import FreePages


def runs(pages: list[int]) -> int:
    """Return into how many runs of neighbours `pages` falls."""
    return sum(1 for before, page in zip([-2, *pages], pages, strict=False) if page != before + 1)


def test_takes_neighbours() -> None:
    free = FreePages(64)
    assert runs(free.take(16)) == 1


def test_goes_on_beside_the_last_page() -> None:
    free = FreePages(64)
    first = free.take(4)
    free.take(4)
    assert free.take(2, after=first[-1]) == [first[-1] + 1, first[-1] + 2]


def test_leaves_room_between_sequences() -> None:
    free = FreePages(256)
    first, second = free.take(4), free.take(4)
    assert abs(second[0] - first[-1]) > 4


def test_takes_what_there_is_where_no_run_is_long_enough() -> None:
    free = FreePages(8, gap=0)
    free.take(8)
    free.give([0, 1, 2, 5, 7])
    assert sorted(free.take(5)) == [0, 1, 2, 5, 7]
    assert len(free) == 0


def test_refuses_to_free_a_page_twice() -> None:
    free = FreePages(4)
    page = free.take(1)
    free.give(page)
    with pytest.raises(AssertionError, match="freed twice"):
        free.give(page)


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_never_gives_a_page_twice(total: int, moves: list[tuple[int, bool]]) -> None:
    free = FreePages(total, gap=2)
    held: list[list[int]] = []
    for count, beside in moves:
        if count <= len(free):
            after = held[-1][-1] if held and held[-1] and beside else None
            held.append(free.take(count, after=after))
        elif held:
            free.give(held.pop(0))
        free.check()
        taken = [page for pages in held for page in pages]
        assert len(taken) == len(set(taken)) == total - len(free)
        assert all(0 <= page < total for page in taken)
