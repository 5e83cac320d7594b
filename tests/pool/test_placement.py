"""Groups spread evenly, move little, and keep leading runs together."""

from collections import Counter

from pie.page.events import PlaceId
from pie.pool.conformance import sample_key
from pie.pool.placement import GROUP_PAGES, group_keys, rank

GROUPS = [sample_key(number) for number in range(2000)]
A, B, C = PlaceId("a"), PlaceId("b"), PlaceId("c")


def test_pages_of_a_group_share_the_key_of_its_first_page() -> None:
    chain = GROUPS[: 2 * GROUP_PAGES + 3]
    groups = group_keys(chain)
    assert groups[:GROUP_PAGES] == [chain[0]] * GROUP_PAGES
    assert groups[GROUP_PAGES] == chain[GROUP_PAGES]
    assert groups[-1] == chain[2 * GROUP_PAGES]


def test_groups_spread_evenly() -> None:
    homes = Counter(rank(group, {A: 1.0, B: 1.0})[0] for group in GROUPS)
    assert abs(homes[A] - homes[B]) < 200


def test_a_node_that_comes_takes_groups_from_all_and_moves_no_other() -> None:
    before = [rank(group, {A: 1.0, B: 1.0})[0] for group in GROUPS]
    after = [rank(group, {A: 1.0, B: 1.0, C: 1.0})[0] for group in GROUPS]
    moved = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {(A, C), (B, C)}


def test_a_node_of_twice_the_weight_keeps_twice_as_much() -> None:
    homes = Counter(rank(group, {A: 2.0, B: 1.0})[0] for group in GROUPS)
    assert 1.75 < homes[A] / homes[B] < 2.25


def test_a_node_without_weight_keeps_nothing() -> None:
    assert rank(GROUPS[0], {A: 1.0, B: 0.0}) == [A]
    assert rank(GROUPS[0], {}) == []


def test_placement_is_the_same_in_every_process() -> None:
    homes = [rank(sample_key(n), {A: 1.0, B: 1.0, C: 1.0})[0] for n in range(8)]
    assert "".join(homes) == "ccccbbca"
