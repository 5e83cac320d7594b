"""Which groups are asked for most, found without a look at all of them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import nlargest

from hypothesis import given, strategies as st

from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey
from pie.router.demand import Demand


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "big"))


def prompt(*groups: int) -> list[PageKey]:
    """Return the pages of a prompt, of which the first of each group names it."""
    return [page for group in groups for page in [key(group)] + [key(0)] * (GROUP_PAGES - 1)]


USES = st.lists(
    st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0.0, 20.0)),
    max_size=60,
)


@given(USES, st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(0, 60)))
def test_the_hottest_are_those_of_a_look_at_all(
    uses: list[tuple[list[int], float]], most: int, since: int, looks: set[int]
) -> None:
    demand = Demand(most_groups=12, most_hottest=most, most_since=since)
    now_s = 0.0
    for number, (groups, later_s) in enumerate(uses):
        now_s += later_s
        demand.used(prompt(*groups), now_s)
        assert len(demand._heat) <= 12
        if number in looks:
            check(demand, most)
    check(demand, most)


def check(demand: Demand, most: int) -> None:
    heat = demand._heat
    expected = sorted(heat.values(), reverse=True)[:most]
    found = demand.hottest()
    assert [heat[group] for group in found] == expected
    assert len(set(found)) == len(found)
    assert demand.hottest() == found


def test_the_latest_and_the_hottest_groups_are_remembered() -> None:
    demand = Demand(most_groups=4, most_hottest=1)
    for _ in range(3):
        demand.used(prompt(1), 0.0)
    assert demand.hottest() == [key(1)]
    for number in range(2, 10):
        demand.used(prompt(number), 0.1)
    assert {number for number in range(1, 10) if demand.uses_per_s(key(number), 0.1)} == {
        1,
        7,
        8,
        9,
    }
    demand.used(prompt(9), 60.0)
    assert demand.hottest() == [key(9)]


class Counted(OrderedDict[PageKey, float]):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, key: PageKey) -> float:
        self.looks += 1
        return super().__getitem__(key)

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("all groups are gone through")


def test_a_look_is_at_the_hottest_and_at_what_was_used_since() -> None:
    demand = Demand()
    for number in range(1, 20_000, 50):
        demand.used(prompt(*range(number, number + 50)), 0.0)
    demand.hottest()
    heat = demand._heat = Counted(demand._heat)
    demand.used(prompt(1, 2, 3), 0.0)
    assert demand.hottest()[:3] == nlargest(3, [key(1), key(2), key(3)], key=heat.__getitem__)
    assert heat.looks <= 3 + 256 + 3 + 3
    heat.looks = 0
    demand.hottest()
    assert heat.looks == 0, "nothing was used since"
