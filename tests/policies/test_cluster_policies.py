"""Cluster policies: what `replicate-hot` wants, and what the manager makes of what policies want."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, strategies as st

from pie.page.key import PageKey
from pie.policies.cluster_manager import MOST_AT_ONCE, MOST_RAISED, ClusterManager
from pie.policies.cluster_policy import ClusterView, GroupView, SetCopies
from pie.policies.replicate_hot import ReplicateHot
from tests.policies.pages import Held, key


def view(
    *groups: tuple[int, float, int], nodes: int = 4, least: int = 1, now_s: float = 0.0
) -> ClusterView:
    shown = [GroupView(key(at), uses, copies) for at, uses, copies in groups]
    return ClusterView(nodes, least, shown, now_s)


def orders(policy: ReplicateHot, shown: ClusterView) -> list[tuple[int, int]]:
    return [(int.from_bytes(one.group), one.copies) for one in policy.decide(shown)]


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
    decision = manager.decide(view(least=2), table or {}, Held())
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
        *["32 groups were changed in this round (hot)"] * 2,
    ]


def test_so_many_groups_have_more_copies_and_no_more() -> None:
    table = {key(at): 3 for at in range(MOST_RAISED)}
    after, events = decided(
        SetCopies(key(9_999), 3, "hot"), SetCopies(key(1), 4, "hotter"), table=table
    )
    assert len(after) == MOST_RAISED
    assert [action for action, _ in events] == ["refuse", "raise"]


def test_a_policy_that_fails_changes_nothing_and_is_told() -> None:
    after, events = decided(ValueError("a bug"), table={key(1): 3})
    assert after == {key(1): 3}
    assert events == [("fail", "ValueError: a bug")]
    after, events = decided("nonsense", SetCopies(key(1), 3, "hot"))
    assert after == {key(1): 3}
    assert events == [("fail", "1 proposals are no orders"), ("raise", "hot")]
