"""Cluster policies in virtual time: their orders are carried out, the same way each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from pie.page.events import Part, PlaceId, Tier
from pie.page.key import PageKey
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    LetGo,
    MoveSession,
    Order,
    SetCopies,
    StorePages,
)
from pie.policies.retention import PageView
from pie.router import runs
from pie.router.prefix import Prefix
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError
from pie.simulator.leave import Leave, read_leave
from pie.simulator.meant import MODEL
from pie.simulator.ordered import orders_told
from pie.simulator.report import report_of
from pie.simulator.trace import TraceRequest
from tests.simulator.parts import PAGE, ask, cluster, spec

HOT = "cluster: {replication: {policy: replicate-hot, uses: 2, copies: 3, after: 5s}}"
HOT_WORKERS = (
    "cluster: {routing: prefix-affinity, replication: {policy: replicate-hot, uses: 100, "
    "workers: 3, worker_uses: 2, after: 5s}}"
)
PROMPT = 4 * 40
"""Tokens of the hot prefix: two groups of pages."""


def pooled(
    *, nodes: int = 3, host: int = 64, workers: int = 3, leaves: tuple[Leave, ...] = ()
) -> ClusterSpec:
    of = spec(workers=workers, pages=128, pool_pages=nodes * 200)
    return replace(of, pool_nodes=nodes, host_pages=host, cost=replace_cost(of), leaves=leaves)


def replace_cost(of: ClusterSpec) -> CostModel:
    return msgspec.structs.replace(of.cost, page_bytes=1_000)


def stampede(hot_s: float = 20.0, cool_s: float = 60.0) -> list[TraceRequest]:
    """Ten requests a second with one prefix, and then one every two seconds with others."""
    hot = [ask(at / 10, (1, PROMPT), (100 + at, 8)) for at in range(int(hot_s * 10))]
    cool = [ask(hot_s + at * 2, (2 + at, 8)) for at in range(int(cool_s / 2))]
    return [*hot, *cool]


def keys_of(*runs: tuple[int, int]) -> Sequence[PageKey]:
    return Prefix(ask(0, *runs).tokens()).keys(MODEL, PAGE)


def copies(simulated: SimulatedCluster, key: PageKey) -> int:
    assert simulated.pool is not None
    return sum(node.tier.has(key) for node in simulated.pool.nodes.values())


def at(simulated: SimulatedCluster, time_s: float, seen: list[int], key: PageKey) -> None:
    simulated.clock.at(time_s, lambda: seen.append(copies(simulated, key)))


def test_replicate_hot_raises_copies_on_pool_nodes_and_lowers_them_again() -> None:
    simulated, seen = cluster(pooled(), HOT), list[int]()
    key = keys_of((1, PROMPT))[0]
    for time_s in (0.9, 15.0, 75.0):
        at(simulated, time_s, seen, key)
    simulated.run_open(stampede())
    simulated.check()
    assert seen == [1, 3, 1]
    counts = report_of("hot", simulated).orders.by_policy["replicate-hot"]
    assert counts["raise"] >= 1
    assert counts["lower"] >= 2
    assert report_of("hot", simulated).orders.bytes_moved["copied"] >= 2 * 40 * 1_000


def test_replicate_hot_brings_pages_near_workers_and_lets_go_of_them_when_they_cool() -> None:
    simulated = cluster(pooled(), HOT_WORKERS)
    simulated.run_open(stampede(cool_s=90.0))
    simulated.check()
    counts = report_of("hot", simulated).orders.by_policy["replicate-hot"]
    assert counts["fetch"] >= 2
    assert counts["let-go"] >= 1
    assert counts["done"] == counts["fetch"] + counts["let-go"]


def test_the_same_orders_come_of_the_same_seed() -> None:
    def run() -> object:
        simulated = cluster(pooled(leaves=(Leave(PlaceId("worker-1"), 8.0),)), HOT_WORKERS)
        simulated.run_open(stampede())
        return report_of("x", simulated)

    assert run() == run()


@pytest.mark.parametrize("as_made", ["true", "false"])
def test_a_worker_that_leaves_hands_on_all_its_pages_and_conversations_go_on_warm(
    as_made: str,
) -> None:
    policies = f"cluster: {{migration: [{{policy: spill-to-pool, as_made: {as_made}}}]}}"
    trace = [
        ask(turn * 6.0 + who * 0.3, (10 + who, 40 + 12 * turn), session=f"s{who}")
        for turn in range(4)
        for who in range(6)
    ]
    simulated = cluster(pooled(leaves=(Leave(PlaceId("worker-0"), 9.0),)), policies)
    simulated.run_open(trace)
    simulated.check()
    report = report_of("drain", simulated)
    assert report.pages_lost == 0
    assert "worker-0" not in simulated.mirror.places()
    assert {one.place for one in simulated.outcomes if one.arrived_s > 9.0} == {
        "worker-1",
        "worker-2",
    }
    for one, request in zip(simulated.outcomes, trace, strict=True):
        if request.arrival_s > 12.0:
            assert one.cached_tokens >= request.prompt_tokens - 12 - PAGE
    assert any(one.place == "worker-0" for one in simulated.outcomes)


def test_a_worker_that_leaves_without_a_pool_takes_its_pages_along() -> None:
    simulated = cluster(replace(spec(), leaves=(Leave(PlaceId("worker-0"), 5.0),)))
    simulated.run_open([ask(at * 0.5, (1 + at, 40)) for at in range(20)])
    lost = report_of("x", simulated).pages_lost
    assert lost > 0
    assert f"x: {lost:,} pages left with the only worker that had them" in orders_told(
        [report_of("x", simulated)]
    )


def test_a_pool_node_that_leaves_hands_its_pages_to_the_others() -> None:
    simulated = cluster(pooled(leaves=(Leave(PlaceId("pool-1"), 3.0),)))
    trace = [ask(at * 0.2, (1 + at, 40)) for at in range(24)]
    simulated.run_open(trace)
    simulated.check()
    assert simulated.pool is not None
    assert sorted(simulated.pool.nodes) == ["pool-0", "pool-2"]
    assert all(simulated.pool.run(keys_of(*request.runs)) == 10 for request in trace), (
        "no page is lost"
    )


class Script:
    """Orders what it was told to at a second."""

    orders: ClassVar[dict[int, list[Order]]] = {}

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return that second's orders."""
        return self.orders.get(round(view.now_s), [])


def scripted(of: ClusterSpec, orders: dict[int, list[Order]]) -> SimulatedCluster:
    Script.orders = orders
    text = (
        f"cluster: {{migration: ['{__name__}:Script', {{policy: spill-to-pool, as_made: false}}]}}"
    )
    return cluster(of, text)


def test_an_order_takes_as_long_as_its_bytes_and_pages_are_where_it_wanted_them() -> None:
    of = pooled(nodes=1, workers=2)
    keys, rate = keys_of((1, PROMPT)), 100.0
    cost = replace_rates(of, rate)
    simulated = scripted(
        replace(of, cost=cost),
        {
            2: [
                StorePages(PlaceId("worker-0"), keys, "test"),
                StorePages(PlaceId("worker-1"), keys, "test"),
            ],
            8: [
                FetchPages(PlaceId("worker-1"), keys, "test"),
                FetchPages(PlaceId("worker-0"), keys, "test"),
            ],
            14: [
                LetGo(PlaceId("worker-1"), keys, "test"),
                LetGo(PlaceId("worker-0"), keys, "test"),
            ],
        },
    )
    held: list[tuple[int, ...]] = []

    def look() -> None:
        assert simulated.pool is not None
        device = [worker.engine.table.matching(keys).pages for worker in simulated.workers]
        host = [0 if one.host is None else one.host.run(keys) for one in simulated.workers]
        held.append((simulated.pool.run(keys), *sorted(device), *sorted(host)))

    for time_s in (1.9, 2.2, 4.5, 8.2, 13.0, 15.0):
        simulated.clock.at(time_s, look)
    simulated.run_open([ask(0.0, (1, PROMPT)), ask(20.0, (9, 8))])
    simulated.check()
    # 160 tokens at 100 a second take 1.6 s, the first 32 pages 1.28.
    assert held == [
        (0, 0, 40, 0, 0),
        (0, 0, 40, 0, 0),
        (40, 0, 40, 0, 0),
        (40, 0, 40, 0, 0),
        (40, 0, 40, 0, 40),
        (40, 0, 0, 0, 0),
    ]
    report = report_of("x", simulated)
    assert report.orders.bytes_moved == {"fetched": 40_000, "stored": 40_000}
    mine = report.orders.by_policy[f"{__name__}:Script"]
    assert mine == {"store": 1, "fetch": 1, "let-go": 2, "done": 4, "refuse": 2}
    assert sum(report.orders.refusals.values()) == 2


def replace_rates(of: ClusterSpec, per_s: float) -> CostModel:
    tiers = dict.fromkeys(of.cost.load_tokens_per_s, per_s)
    return msgspec.structs.replace(
        of.cost, load_tokens_per_s=tiers, node_tokens_per_s=per_s, load_ms=0.0
    )


def test_how_many_workers_there_should_be_is_told_with_its_time() -> None:
    simulated = cluster(spec(), "cluster: {scale: {policy: by-load, max: 8}}")
    simulated.run_open([ask(at / 100, (1 + at, 40)) for at in range(2_000)])
    hints = report_of("x", simulated).orders.hints
    assert [one.workers for one in hints] == sorted({one.workers for one in hints})
    assert hints[-1].workers == 8


def test_what_nobody_does_here_is_told() -> None:
    def told(of: ClusterSpec, ahead: int) -> list[str]:
        policies = f"cluster: {{migration: [{{policy: prefetch, requests: {ahead}}}]}}"
        return orders_told([report_of("x", cluster(of, policies))])

    assert told(pooled(), 3) == [
        "x: not simulated: prefetch: pages of the next 3 requests in a queue are not brought near"
    ]
    assert told(pooled(), 0) == told(spec(), 3) == []


def test_a_round_looks_at_workers_that_have_a_conversations_pages_and_at_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[object] = []
    plain = runs.held_pages

    def held_pages(own: Any, pool: Any, record: Any) -> Any:
        looked.append(record.place)
        return plain(own, pool, record)

    policies = "cluster: {routing: round-robin, migration: [rebalance]}"
    simulated = cluster(spec(workers=40), policies)
    # More of them than what others tell a router.
    simulated.run_open([ask(at / 50, (at + 1, 9), session=f"s{at}") for at in range(300)])
    monkeypatch.setattr(runs, "held_pages", held_pages)
    simulated.conductor.round(simulated.clock.now_s() + 1.0)
    assert len(looked) == 300, "one of forty workers has each"


def test_a_conversation_that_was_moved_goes_on_at_the_other_worker() -> None:
    simulated = scripted(pooled(), {3: [MoveSession("s", PlaceId("worker-2"), "test")]})
    simulated.run_open([ask(at * 2.0, (at + 1, 3), session="s") for at in range(6)])
    places = [one.place for one in simulated.outcomes]
    assert places[2:] == [PlaceId("worker-2")] * 4


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 9), st.integers(0, 12)),
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_whatever_is_ordered_index_workers_and_pool_agree(
    wishes: list[tuple[int, int, int, int]], leaving: int
) -> None:
    orders: dict[int, list[Order]] = {}
    places = ["worker-0", "worker-1", "worker-2", "pool-0"]
    for kind, place, prompt, when in wishes:
        keys = keys_of((prompt, PROMPT))
        name = PlaceId(places[place])
        choices: list[Order] = [
            StorePages(name, keys, "x"),
            FetchPages(name, keys, "x"),
            LetGo(name, keys, "x", start=when, also_last=bool(place % 2)),
            SetCopies(keys[0], 1 + place % 3, "x"),
            MoveSession(f"s{prompt}", name, "x"),
        ]
        orders.setdefault(when, []).append(choices[kind])
    leaves = () if leaving == 3 else (Leave(PlaceId(places[leaving]), 5.0),)
    of = replace(pooled(host=50), engine=spec(pages=90).engine, leaves=leaves)
    simulated = scripted(of, orders)
    trace = [
        ask(n * 0.4, (1 + n % 9, PROMPT), session=f"s{1 + n % 9}" if n % 2 else None)
        for n in range(36)
    ]
    simulated.run_open(trace)
    simulated.check()
    assert all(one.ended_s is not None for one in simulated.outcomes)


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        (
            (Leave(PlaceId("worker-9"), 1.0),),
            "worker-9 cannot leave: there are worker-0 to worker-1",
        ),
        ((Leave(PlaceId("worker-0"), 1.0),) * 2, "worker-0 cannot leave twice"),
        (
            (Leave(PlaceId("worker-0"), 1.0), Leave(PlaceId("worker-1"), 2.0)),
            "all workers leave: one must stay",
        ),
    ],
)
def test_who_cannot_leave_is_told(leaves: tuple[Leave, ...], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        cluster(replace(spec(), leaves=leaves))


@pytest.mark.parametrize("text", ["worker-1", "@3", "worker-1@", "worker-1@-1", "worker-1@soon"])
def test_a_leave_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match="PLACE@SECONDS"):
        read_leave(text)


def test_a_leave_is_a_place_and_a_time() -> None:
    assert read_leave("worker-1@2.5") == Leave(PlaceId("worker-1"), 2.5)


class Shown:
    """Notes how many tokens the pages have that it is shown, by tier."""

    seen: ClassVar[set[tuple[Tier, int]]] = set()

    def stored(self, page: PageView, now_s: float) -> None:
        self.seen.add((page.tier, page.page_tokens))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        return ()


def test_pages_that_are_let_go_are_not_evicted_and_policies_see_their_size_in_each_tier() -> None:
    policies = f"{{worker: {{retention: {__name__}:Shown}}, cluster: {{migration: [{{policy: expire, after: 5s}}]}}}}"
    simulated = cluster(pooled(workers=1), policies)
    trace = [ask(at * 0.5, (1 + at, 40), session=f"s{at}") for at in range(12)]
    simulated.run_open([*trace, ask(30.0, (99, 8))])
    simulated.check()
    report = report_of("expire", simulated)
    assert report.orders.by_policy["expire"]["done"]
    assert set(report.evicted_pages.values()) == {0}
    assert len(simulated.workers[0].engine.table.frozen_pages()) < 20
    assert {tokens for _, tokens in Shown.seen} == {PAGE}
    assert {tier for tier, _ in Shown.seen} == {Tier.DEVICE, Tier.POOL_RAM}
