"""Cluster policies: what `replicate-hot` wants, and what the manager makes of what policies want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import given, strategies as st

from pie.page.events import Part, PlaceId, PlaceKind
from pie.page.key import PageKey, RootKey, page_keys
from pie.policies.cluster_manager import MOST_AT_ONCE, MOST_RAISED, ClusterManager
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    FixedCopies,
    GroupView,
    LetGo,
    MoveSession,
    Order,
    PlaceView,
    SetCopies,
)
from pie.policies.prefixes import NamedPrefix, Prefixes
from pie.policies.replicate import Replicate
from pie.policies.replicate_hot import ReplicateHot
from tests.policies.pages import Held, key, number, round_of


def view(
    *groups: tuple[int, float, int], nodes: int = 4, least: int = 1, now_s: float = 0.0
) -> ClusterView:
    shown = [GroupView(key(at), uses, copies) for at, uses, copies in groups]
    return ClusterView(nodes, least, shown, now_s)


def orders(policy: ReplicateHot, shown: ClusterView) -> list[tuple[int, int]]:
    return [
        (number((one.group, Part.FULL)), one.copies)
        for one in policy.decide(shown)
        if isinstance(one, SetCopies)
    ]


def test_a_hot_group_gets_as_many_copies_as_it_takes_at_once() -> None:
    policy = ReplicateHot(uses=5.0, copies=3)
    assert orders(policy, view((1, 4.9, 1), (2, 5.1, 1), (3, 99.0, 1))) == [(2, 2), (3, 3)]
    assert orders(policy, view((3, 99.0, 1), nodes=2)) == [(3, 2)]
    assert orders(policy, view((3, 99.0, 1), nodes=1)) == []


def test_a_group_gives_a_copy_back_once_it_has_been_cool_for_long_enough() -> None:
    policy = ReplicateHot(uses=4.0, copies=3, cool=0.5, after=10.0)
    assert orders(policy, view((1, 3.9, 3), now_s=0.0)) == []
    assert orders(policy, view((1, 4.1, 3), now_s=9.0)) == []
    assert orders(policy, view((1, 3.9, 3), now_s=10.0)) == []
    assert orders(policy, view((1, 3.9, 3), now_s=20.0)) == [(1, 2)]
    assert orders(policy, view((1, 0.0, 2), now_s=25.0)) == []
    assert orders(policy, view((1, 0.0, 2), now_s=30.0)) == [(1, 1)]
    assert orders(policy, view((1, 0.0, 1), now_s=60.0)) == []


@given(uses=st.lists(st.floats(0, 40), min_size=30, max_size=60))
def test_at_one_rate_copies_come_to_rest(uses: list[float]) -> None:
    policy, copies, settled = ReplicateHot(uses=3.0, copies=4, after=1.0), 1, 1
    for second, rate in enumerate([*uses, *[uses[-1]] * 20]):
        for order in policy.decide(view((1, rate, copies), now_s=float(second))):
            assert isinstance(order, SetCopies)
            assert isinstance(order, SetCopies)
            assert order.copies != copies
            copies = order.copies
        assert 1 <= copies <= 4
        if second >= len(uses) + 10:
            assert copies == settled
        settled = copies


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *said: object) -> None:
        self.said = said

    def decide(self, shown: ClusterView) -> Iterable[SetCopies]:
        for one in self.said:
            if isinstance(one, BaseException):
                raise one
            yield one  # type: ignore[misc]


def decided(
    *said: object, table: dict[PageKey, int] | None = None
) -> tuple[dict[PageKey, int], list[tuple[str, str]]]:
    manager = ClusterManager([("says", Says(*said))])
    decision = round_of(manager, view(least=2), table or {}, Held())
    return decision.table, [(event.action, event.reason) for event in decision.events]


def test_what_is_ordered_is_carried_out_and_told_with_its_reason() -> None:
    after, events = decided(
        SetCopies(key(1), 3, "hot"),
        SetCopies(key(2), 2, "cool"),
        SetCopies(key(3), 4, "the same"),
        table={key(2): 4, key(3): 4},
    )
    assert after == {key(1): 3, key(3): 4}
    assert events == [("raise", "hot"), ("lower", "cool")]


def test_no_group_has_fewer_copies_than_usual_or_more_than_there_are_nodes() -> None:
    after, events = decided(SetCopies(key(1), 1, "why not"), SetCopies(key(2), 5, "more"))
    assert after == {}
    assert events == [
        ("refuse", "every page has 2 copies at least (why not)"),
        ("refuse", "there are 4 nodes (more)"),
    ]


def test_a_round_changes_so_many_groups_and_each_once() -> None:
    said = [SetCopies(key(at), 3, "hot") for at in range(MOST_AT_ONCE + 2)]
    after, events = decided(SetCopies(key(0), 4, "first"), *said)
    assert len(after) == MOST_AT_ONCE
    assert after[key(0)] == 4
    refused = [reason for action, reason in events if action == "refuse"]
    assert refused == [
        "the group was changed in this round already (hot)",
        "32 groups were changed in this round; 1 more likewise (hot)",
    ]


def test_so_many_groups_have_more_copies_and_no_more() -> None:
    table = {key(at): 3 for at in range(MOST_RAISED)}
    after, events = decided(
        SetCopies(key(9_999), 3, "hot"), SetCopies(key(1), 4, "hotter"), table=table
    )
    assert len(after) == MOST_RAISED
    assert [action for action, _ in events] == ["raise", "refuse"]


def test_a_policy_that_fails_changes_nothing_and_is_told() -> None:
    after, events = decided(ValueError("a bug"), table={key(1): 3})
    assert after == {key(1): 3}
    ((action, reason),) = events
    assert action == "fail"
    assert reason.startswith(f"ValueError: a bug ({__file__}:")
    after, events = decided("nonsense", SetCopies(key(1), 3, "hot"))
    assert after == {key(1): 3}
    assert events == [("fail", "1 proposals are no orders"), ("raise", "hot")]


A, B = PlaceId("a"), PlaceId("b")
CHAIN = tuple(key(at) for at in range(40))


def workers_view(uses: float, *has: PlaceId, now_s: float = 0.0) -> ClusterView:
    hot = GroupView(key(32), uses, 1, CHAIN, has, b"m")
    places = [PlaceView(one, PlaceKind.WORKER, model_root=b"m", has_host=True) for one in (A, B)]
    return ClusterView(1, 1, [hot], now_s, places)


def test_a_hot_prompts_pages_are_brought_near_another_worker_and_let_go_of_when_it_cools() -> None:
    policy = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)
    assert list(policy.decide(workers_view(9.0, A))) == []
    (order,) = policy.decide(workers_view(12.0, A, now_s=1.0))
    assert isinstance(order, FetchPages)
    assert (order.place, order.pages) == (B, CHAIN)
    assert list(policy.decide(workers_view(12.0, A, now_s=2.0))) == [order], "until it is there"
    assert list(policy.decide(workers_view(99.0, A, B, now_s=10.0))) == [], "2 is the most"
    assert list(policy.decide(workers_view(4.0, A, B, now_s=20.0))) == []
    (order,) = policy.decide(workers_view(4.0, A, B, now_s=25.0))
    assert isinstance(order, LetGo)
    assert (order.place, order.start, order.also_last) == (B, 0, False)
    assert list(policy.decide(workers_view(4.0, A, B, now_s=50.0))) == [order], "until it has"
    assert list(policy.decide(workers_view(4.0, A, now_s=51.0))) == []
    assert list(policy.decide(workers_view(4.0, A, now_s=99.0))) == [], "A was never told to fetch"
    assert list(ReplicateHot().decide(workers_view(99.0, A))) == [], "1 leaves it to routing"


def test_what_was_brought_is_let_go_of_from_the_first_group_on_that_is_not_needed() -> None:
    chain = tuple(key(n) for n in range(100, 164))
    other = (*CHAIN[:32], *chain)
    policy = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)

    def orders(uses: Sequence[float], now_s: float) -> list[tuple[PageKey, int]]:
        """Groups of a trunk, of two prompts that go on after it, and the last group of one of them."""
        chains = (CHAIN[:32], CHAIN, other[:64], other)
        groups = [
            GroupView(one[(len(one) - 1) // 32 * 32], rate, 1, one, (A, B) if now_s else (A,), b"m")
            for one, rate in zip(chains, uses, strict=True)
        ]
        seen = replace(workers_view(0.0), groups=groups, now_s=now_s)
        return [(one.pages[-1], one.start) for one in policy.decide(seen) if isinstance(one, LetGo)]

    assert orders((30.0, 12.0, 12.0, 12.0), 0.0) == []
    assert orders((12.0, 4.0, 8.0, 4.0), 1.0) == []
    assert orders((12.0, 4.0, 8.0, 4.0), 6.0) == [(CHAIN[-1], 32), (other[-1], 64)]
    assert orders((12.0, 4.0, 4.0, 4.0), 7.0) == [(CHAIN[-1], 32), (other[-1], 32)]
    assert orders((4.0, 4.0, 4.0, 4.0), 8.0) == [(CHAIN[-1], 0), (other[-1], 0)]
    assert orders((4.0, 12.0, 4.0, 4.0), 9.0) == [(other[-1], 32)], "the other one is hot again"


def test_all_that_was_brought_leaves_however_many_orders_a_round_gives() -> None:
    chains = [tuple(key(1_000 * of + at) for at in range(96)) for of in range(1, 13)]
    policy = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)
    manager = ClusterManager([("hot", policy)])
    has = {chain: {A} for chain in chains}

    def round_at(now_s: float, uses: float, *, known: bool = True) -> list[Order]:
        groups = [
            GroupView(one[64], uses, 1, one, tuple(has[one]) if known else None, b"m")
            for one in chains
        ]
        seen = replace(workers_view(0.0), groups=groups, now_s=now_s)
        decision = round_of(manager, seen, {}, Held({"a": 96}, pooled=96))
        return [one.order for one in decision.given if not isinstance(one.order, MoveSession)]

    assert round_at(0.0, 99.0, known=False) == [], "who has them is not known"
    brought = [one for now_s in (1.0, 2.0) for one in round_at(now_s, 15.0)]
    assert len(brought) == 12
    for chain in chains:
        has[chain].add(B)
    assert round_at(20.0, 0.0) == []
    gone: list[PageKey] = []
    for now_s in (25.0, 26.0, 27.0):
        for one in round_at(now_s, 0.0):
            assert isinstance(one, LetGo)
            gone += one.pages[one.start :]
            has[tuple(one.pages)].discard(B)
    assert len(gone) == 12 * 96
    assert policy._brought == {}


def test_what_nobody_shows_any_more_is_told_to_leave_for_so_long_and_is_forgotten() -> None:
    policy = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)
    ordered = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)
    for one in (policy, ordered):
        assert list(one.decide(workers_view(12.0, A)))
    nothing = replace(workers_view(0.0), groups=())
    cold = [len(list(ordered.decide(workers_view(1.0, A, B, now_s=at)))) for at in (1.0, 9.0, 39.0)]
    assert (cold, ordered._brought) == ([0, 1, 0], {}), "requests have brought them there again"
    told = [
        len(list(policy.decide(replace(nothing, now_s=float(second))))) for second in range(1, 60)
    ]
    assert sum(told) == 30
    assert policy._brought == {}
    policy = ReplicateHot(workers=3, worker_uses=10.0, after=5.0)
    three = [
        *nothing.places,
        PlaceView(PlaceId("c"), PlaceKind.WORKER, model_root=b"m", has_host=True),
    ]
    assert len(list(policy.decide(replace(workers_view(25.0, A), places=three)))) == 2
    unknown = replace(workers_view(0.0).groups[0], workers=None, uses_per_s=8.0)
    cooled = replace(nothing, groups=[unknown], places=three)
    told = [len(list(policy.decide(replace(cooled, now_s=at)))) for at in (1.0, 6.0)]
    assert told == [0, 1], "two workers bear that"
    policy = ReplicateHot(workers=2, worker_uses=10.0, after=5.0)
    assert list(policy.decide(workers_view(12.0, A, now_s=60.0)))
    gone = replace(nothing, places=[one for one in nothing.places if one.place != B], now_s=61.0)
    assert list(policy.decide(gone)) == []
    assert policy._brought == {}, "the worker is gone"


def test_a_stampede_is_brought_near_as_many_workers_as_it_takes_at_once_and_whole() -> None:
    policy = ReplicateHot(workers=4, worker_uses=10.0)
    places = [PlaceView(PlaceId(f"w{n}"), PlaceKind.WORKER, has_host=True) for n in range(5)]
    chain = tuple(key(n) for n in range(1, 65))
    trunk = GroupView(chain[0], 35.0, 1, chain[:32], (places[0].place,))
    whole = GroupView(chain[32], 35.0, 1, chain, (places[0].place,))
    seen = ClusterView(1, 1, [trunk, whole], 0.0, places)
    found = [one for one in policy.decide(seen) if isinstance(one, FetchPages)]
    assert [one.place for one in found] == ["w1", "w2", "w3"]
    assert all(one.pages == chain for one in found)
    busy = [replace(one, waiting=9 * (one.place == "w1")) for one in places]
    again = [o for o in policy.decide(replace(seen, places=busy)) if isinstance(o, FetchPages)]
    assert {one.place for one in again} == {"w1", "w2", "w3"}, "pages are on their way there"


def meant(policy: Replicate, *groups: GroupView) -> list[tuple[int, int]]:
    return [
        (number((one.group, Part.FULL)), one.copies)
        for one in policy.decide(ClusterView(4, 1, groups, 0.0))
        if isinstance(one, SetCopies)
    ]


def test_replicate_sets_copies_by_what_its_selector_means() -> None:
    mine = GroupView(key(1), 0.1, 1, tenant_tag="8f2c", session_tag="s", model_root=b"m")
    other = GroupView(key(2), 9.0, 1, tenant_tag="77", model_root=b"m")
    assert meant(Replicate(copies=3, tenant="8f*"), mine, other) == [(1, 3)]
    assert meant(Replicate(copies=9, session="?*"), mine, other) == [(1, 4)]
    assert meant(Replicate(copies=2, model="6d"), mine, other) == [(1, 2), (2, 2)]
    assert meant(Replicate(copies=2, uses=5), mine, other) == [(2, 2)]
    no_longer = GroupView(key(2), 3.0, 2)
    assert meant(Replicate(copies=2, uses=5), no_longer) == [], "it is at the edge"
    assert meant(Replicate(copies=2, uses=7), no_longer) == [(2, 1)]
    assert meant(Replicate(copies=2, tenant="x"), no_longer) == [(2, 1)]


def test_replicate_means_a_prefix_and_what_comes_before_it() -> None:
    long_key = PageKey(bytes([7]) * 32)
    first = GroupView(key(0), 1.0, 1, CHAIN[:32])
    second = GroupView(CHAIN[32], 1.0, 1, [*CHAIN[:32], CHAIN[32], long_key])
    third = GroupView(key(99), 1.0, 1, [*CHAIN[:32], CHAIN[32], long_key, key(99)])
    policy = Replicate(copies=2, prefix=long_key.hex())
    assert meant(policy, first, second, third) == [(0, 2), (32, 2)]


def test_replicate_means_a_prefix_by_its_name_as_rules_do() -> None:
    root, tokens = RootKey(bytes([1]) * 32), list(range(80))
    prefixes = Prefixes(
        {
            "tools": NamedPrefix(tokens=tokens),
            "last": NamedPrefix(key="07" * 32),
            "story": NamedPrefix(text="Once upon a time"),
        }
    )
    assert not prefixes.knows(root)
    prefixes.resolve(root, 2, lambda prefix: prefix.tokens)
    assert prefixes.knows(root)
    pages = page_keys(root, tokens, 2)
    assert len(pages) == 40
    groups = [GroupView(PageKey(one), 1.0, 1) for one in (pages[0], pages[32], bytes(32))]
    long_key = PageKey(bytes([7]) * 32)
    groups.append(GroupView(key(5), 1.0, 1, [key(5), long_key]))
    shown = ClusterView(4, 1, groups, 0.0, prefixes=prefixes.by_name())

    def meant_by(name: str) -> list[PageKey]:
        orders = Replicate(copies=2, prefix=name).decide(shown)
        return [one.group for one in orders if isinstance(one, SetCopies)]

    assert meant_by("tools") == [pages[0], pages[32]]
    assert meant_by("last") == [key(5)]
    assert meant_by("story") == [], "nobody has said what its tokens are"
    assert list(Replicate(copies=2).decide(shown))
    prefixes.resolve(RootKey(bytes([2]) * 32), 2, lambda _: [1, 2, 3, 4])
    assert len(prefixes.by_name()["story"].pages) == 2


def test_of_several_policies_the_largest_number_of_copies_counts() -> None:
    one, other = Says(SetCopies(key(1), 2, "one")), Says(SetCopies(key(1), 3, "other"))
    manager = ClusterManager([("one", one), ("other", other)])
    first = round_of(manager, view(), {}, Held())
    assert first.table == {key(1): 3}
    other.said = (SetCopies(key(1), 1, "no more"),)
    second = round_of(manager, view(), first.table, Held())
    assert second.table == {key(1): 2}
    assert [(e.policy, e.action, e.copies) for e in second.events] == [("other", "lower", 2)]
    shown = manager.shown(0, view((1, 1.0, 2))), manager.shown(1, view((1, 1.0, 2)))
    assert [one.groups[0].copies for one in shown] == [2, 1]


def test_copies_that_no_policy_wants_any_more_go() -> None:
    manager = ClusterManager([("fixed", FixedCopies())])
    decision = round_of(manager, view(), {key(1): 3}, Held())
    assert decision.table == {}
    assert [(e.action, e.reason) for e in decision.events] == [
        ("lower", "no policy wants 3 any more")
    ]
