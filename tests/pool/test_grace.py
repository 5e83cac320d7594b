"""Pages that may leave stay for a while, and no more of them are remembered than the cap says."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pie.page.events import Part
from pie.page.key import PageKey
from pie.pool.grace import Grace
from pie.pool.tier import PageId

PAGES = [PageId(PageKey(bytes([number]) * 32), Part(0)) for number in range(6)]


def test_a_page_leaves_only_when_others_have_had_it_for_the_whole_time() -> None:
    grace = Grace(2.0)
    for now_s, may in ((10.0, False), (11.0, False), (11.9, False), (12.0, True), (12.5, True)):
        grace.begin("view")
        assert grace.may_leave(PAGES[0], now_s) is may


def test_another_view_of_the_nodes_begins_the_time_again() -> None:
    grace = Grace(2.0)
    grace.begin("a and b")
    grace.may_leave(PAGES[0], 0.0)
    grace.begin("a and c")
    assert PAGES[0] not in grace
    assert not grace.may_leave(PAGES[0], 5.0)
    grace.begin("a and c")
    assert grace.may_leave(PAGES[0], 7.0)


def test_a_page_that_a_round_does_not_see_begins_again() -> None:
    grace = Grace(2.0)
    grace.begin("view")
    grace.may_leave(PAGES[0], 0.0)
    grace.begin("view")
    grace.begin("view")
    assert not grace.may_leave(PAGES[0], 5.0)


@given(st.integers(1, 4), st.lists(st.lists(st.sampled_from(PAGES), unique=True), max_size=12))
def test_no_more_are_remembered_than_the_cap_none_leaves_early_and_in_the_end_all_do(
    most: int, rounds: list[list[PageId]]
) -> None:
    grace = Grace(2.0, most)
    held = set(PAGES)
    since: dict[PageId, int] = {}
    # A cap of one lets one page leave every three rounds.
    for now, asked in enumerate([*rounds, *[PAGES] * (4 * len(PAGES))]):
        grace.begin("view")
        since = {page: at for page, at in since.items() if page in asked}
        for page in asked:
            if page not in held:
                continue
            if grace.may_leave(page, float(now)):
                assert now - since.pop(page) >= 2
                grace.left(page)
                held.remove(page)
            elif page in grace:
                since.setdefault(page, now)
            assert len(grace) <= most
    assert not held
