"""Groups spread evenly, move little, and keep leading runs together."""

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.groups import GROUP_PAGES, group_keys
from pie.policies.replication import FixedReplication
from pie.pool.conformance import sample_key
from pie.pool.placement import Placement, rank, view_of

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


def node(place: PlaceId, *, capacity: int = 1, draining: bool = False) -> PlaceRecord:
    return PlaceRecord(
        place=place,
        epoch=Epoch(1),
        kind=PlaceKind.POOL,
        address="tcp://127.0.0.1:1",
        capacity_bytes=capacity,
        draining=draining,
    )


def placement(*nodes: PlaceRecord, copies: int = 1) -> Placement:
    return Placement({one.place: one for one in nodes}, FixedReplication(copies))


def test_copies_go_to_the_best_nodes_and_one_more_is_asked() -> None:
    three = placement(node(A), node(B), node(C), copies=2)
    for group in GROUPS[:50]:
        order = rank(group, {A: 1.0, B: 1.0, C: 1.0})
        assert three.homes(group) == order[:2]
        assert three.asked(group) == order


def settled(*nodes: PlaceRecord, among: Sequence[PlaceRecord] = ()) -> list[PlaceRecord]:
    """Return nodes that have handed on what belongs to others of `among`."""
    view = view_of({one.place: one for one in among or nodes})
    return [structs.replace(one, settled=view) for one in nodes]


def test_where_nodes_come_at_once_the_one_that_kept_a_group_is_asked_until_it_has_handed_it_on() -> (
    None
):
    old = [node(PlaceId(f"old-{n}")) for n in range(3)]
    new = [node(PlaceId(f"new-{n}")) for n in range(4)]
    before = placement(*settled(*old))
    during = placement(*settled(*old), *new)
    after = placement(*settled(*old, *new))
    for group in GROUPS[:300]:
        kept = before.homes(group)[0]
        assert len(before.asked(group)) == len(after.asked(group)) == 2
        assert kept in during.asked(group)
        assert during.asked(group)[:2] == after.asked(group)
    assert any(before.homes(group)[0] not in after.asked(group) for group in GROUPS[:300])


def test_more_copies_than_nodes_is_one_on_each() -> None:
    assert placement(node(A), copies=3).homes(GROUPS[0]) == [A]
    assert placement(copies=3).homes(GROUPS[0]) == []


def test_a_node_that_is_leaving_takes_nothing_and_is_asked_first_for_what_it_had() -> None:
    before = placement(node(A), node(B), node(C))
    after = placement(node(A), node(B, draining=True), node(C))
    for group in GROUPS[:200]:
        assert B not in after.homes(group)
        assert after.asked(group)[0] == before.homes(group)[0]
        assert after.homes(group)[0] in after.asked(group)


def test_groups_go_by_capacity() -> None:
    uneven = placement(node(A, capacity=3 << 30), node(B, capacity=1 << 30))
    homes = Counter(uneven.homes(group)[0] for group in GROUPS)
    assert 2.5 < homes[A] / homes[B] < 3.6
