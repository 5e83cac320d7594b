"""Plans of all nodes together bring every page where it belongs, and lose none on the way."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings, strategies as st
from msgspec import structs

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.groups import GROUP_PAGES, group_keys
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.policies.replication import FixedReplication
from pie.pool.conformance import sample_page
from pie.pool.placement import Placement
from pie.pool.rebalance import plan
from pie.pool.tier import PageId, id_of

NAMES = [PlaceId(name) for name in "abcde"]


def record(place: PlaceId, *, capacity: int = 1 << 20, draining: bool = False) -> PlaceRecord:
    return PlaceRecord(
        place=place,
        epoch=Epoch(1),
        kind=PlaceKind.POOL,
        address="tcp://127.0.0.1:1",
        capacity_bytes=capacity,
        draining=draining,
    )


def headers(count: int) -> list[PageHeader]:
    made = [sample_page(number, 16)[0] for number in range(count)]
    groups = group_keys([header.key for header in made])
    return [
        structs.replace(header, group=group, index=at)
        for at, (header, group) in enumerate(zip(made, groups, strict=True))
    ]


PAGES = headers(3 * GROUP_PAGES)


class Pool:
    """Nodes as sets of pages, and what each does with its plan; a model of `pie.pool.migration`."""

    def __init__(self, records: list[PlaceRecord], copies: int) -> None:
        self.records = {one.place: one for one in records}
        self.held: dict[PlaceId, dict[PageId, PageHeader]] = defaultdict(dict)
        self.placement = Placement(self.records, FixedReplication(copies))

    def step(self, here: PlaceId, takes: st.DataObject | None = None) -> bool:
        """Carry out a node's plan, each target taking what it wants to; say whether it had one."""
        moves = plan(self.held[here].values(), here, self.placement)
        for move in moves:
            there = set(move.pages)
            for target in move.targets:
                for page in move.pages:
                    if takes is None or takes.draw(st.booleans()):
                        self.held[target][page] = self.held[here][page]
                there &= self.held[target].keys()
            if move.leaves:
                for page in there:
                    del self.held[here][page]
        return bool(moves)

    def all_held(self) -> set[PageId]:
        return {page for held in self.held.values() for page in held}


@settings(max_examples=60)
@given(st.data())
def test_no_step_of_any_node_loses_a_page_and_in_the_end_all_are_at_home(
    data: st.DataObject,
) -> None:
    up = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    records = [
        record(
            place,
            capacity=data.draw(st.sampled_from([1, 1 << 20, 5 << 20])),
            draining=data.draw(st.booleans()),
        )
        for place in up
    ]
    pool = Pool(records, data.draw(st.integers(1, 3)))
    for header in PAGES:
        pool.held[data.draw(st.sampled_from(up))][id_of(header)] = header
    before = pool.all_held()
    for _ in range(data.draw(st.integers(0, 6))):
        pool.step(data.draw(st.sampled_from(up)), data)
        assert pool.all_held() == before
    for _ in range(2):
        for place in up:
            pool.step(place)
            assert pool.all_held() == before
    if any(not one.draining for one in records):
        for header in PAGES:
            homes = set(pool.placement.homes(PageKey(header.group)))
            holders = {place for place in up if id_of(header) in pool.held[place]}
            assert holders == homes


def test_a_node_that_joins_is_handed_its_share_and_no_page_goes_anywhere_else() -> None:
    many = headers(200 * GROUP_PAGES)
    old = Pool([record(NAMES[0]), record(NAMES[1])], 1)
    for header in many:
        (home,) = old.placement.homes(PageKey(header.group))
        old.held[home][id_of(header)] = header
    new = Placement({**old.records, NAMES[2]: record(NAMES[2])}, FixedReplication())
    moves = [m for place in NAMES[:2] for m in plan(old.held[place].values(), place, new)]
    assert {m.targets for m in moves} == {(NAMES[2],)}
    assert 0.2 < sum(len(m.pages) for m in moves) / len(many) < 0.46


def test_what_came_last_goes_first_and_in_the_order_of_its_sequence() -> None:
    here, there = record(NAMES[0], draining=True), record(NAMES[1])
    placement = Placement({r.place: r for r in (here, there)}, FixedReplication())
    moves = plan([*PAGES[32:64][::-1], *PAGES[:32]], here.place, placement)
    assert [m.group for m in moves] == [PAGES[0].key, PAGES[32].key]
    assert list(moves[1].pages) == [id_of(header) for header in PAGES[32:64]]
    assert all(m.leaves for m in moves)


def test_pages_of_no_known_group_and_pages_that_nobody_takes_stay() -> None:
    here = record(NAMES[0], draining=True)
    lonely = Placement({here.place: here}, FixedReplication())
    assert plan(PAGES, here.place, lonely) == []
    two = Placement({here.place: here, NAMES[1]: record(NAMES[1])}, FixedReplication())
    assert plan([structs.replace(PAGES[0], group=b"")], here.place, two) == []
