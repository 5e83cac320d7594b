"""A simulated cluster: the router's choice over mock engines."""

import gc
from dataclasses import replace

import pytest

from pie.policies.routing import Choice, WorkerView
from pie.router.prefix import Prefix
from pie.simulator.errors import SetupError
from pie.simulator.report import report_of
from pie.simulator.worker import PoolStores
from tests.simulator.parts import ask, cluster, spec

PEERS = [
    "SglangThreshold",
    "RayPrefixAffinity",
    "LlmdWeighted",
    "ProductionStackLoadAware",
    "DynamoCost",
]
MIXED = [ask(at * 0.02, (1 + at % 7, 24), (100 + at, 8), output=1 + at % 9) for at in range(120)]


def test_the_same_seed_gives_the_same_answer_and_another_one_another() -> None:
    def run(seed: int) -> object:
        of = spec(workers=3, pages=32)
        simulated = cluster(type(of)(workers=3, engine=of.engine, cost=of.cost, seed=seed))
        simulated.run_open(MIXED)
        return report_of("x", simulated)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_requests_with_one_prefix_go_where_it_is() -> None:
    simulated = cluster()
    simulated.run_open([ask(at * 0.5, (1, 40), (10 + at, 4)) for at in range(6)])
    assert len({one.place for one in simulated.outcomes}) == 1
    assert [one.cached_tokens for one in simulated.outcomes] == [0] + [40] * 5
    assert [one.predicted_tokens for one in simulated.outcomes] == [0] + [40] * 5


def test_the_index_agrees_with_the_workers_and_the_pool_at_the_end() -> None:
    simulated = cluster(spec(workers=3, pages=24, pool_pages=40))
    simulated.run_open(MIXED)
    simulated.check()
    assert simulated.pool is not None
    assert len(simulated.pool) == 40


def test_clients_of_a_closed_loop_ask_one_request_after_the_other() -> None:
    simulated = cluster()
    simulated.run_closed(MIXED, clients=3)
    assert len(simulated.outcomes) == len(MIXED)
    for at, one in enumerate(simulated.outcomes[3:], start=3):
        earlier = [e.ended_s for e in simulated.outcomes[:at] if e.ended_s is not None]
        assert sum(ended_s > one.arrived_s for ended_s in earlier) < 3


def test_arrivals_come_as_many_times_as_fast_as_asked() -> None:
    simulated = cluster()
    simulated.run_open(MIXED, speed=4.0)
    assert [one.arrived_s for one in simulated.outcomes] == [r.arrival_s / 4 for r in MIXED]


@pytest.mark.parametrize("stores", PoolStores)
def test_what_left_a_worker_is_loaded_from_the_pool(stores: PoolStores) -> None:
    of = spec(workers=1, pages=16, pool_pages=32)
    simulated = cluster(
        type(of)(workers=1, engine=of.engine, cost=of.cost, pool_pages=32, pool_stores=stores)
    )
    simulated.run_open([ask(0.0, (1, 40)), ask(1.0, (2, 56)), ask(2.0, (1, 40), (3, 4))])
    last = simulated.outcomes[-1]
    assert last.cached.get("pool", 0) + last.cached.get("device", 0) == 40
    assert last.cached.get("pool", 0) > 0
    assert last.predicted_tokens == 40
    simulated.check()


def test_a_pool_that_holds_what_leaves_holds_no_page_twice() -> None:
    of = spec(workers=1, pages=16, pool_pages=64)
    of = type(of)(
        workers=1, engine=of.engine, cost=of.cost, pool_pages=64, pool_stores=PoolStores.SPILL
    )
    simulated = cluster(of)
    simulated.run_open(MIXED[:40])
    assert simulated.pool is not None
    masks = [set(simulated.mirror.masks(place)) for place in simulated.mirror.places()]
    assert not masks[0] & masks[1]


@pytest.mark.parametrize("peer", PEERS)
def test_rules_of_other_routers_can_be_named_in_a_policy_file(peer: str) -> None:
    simulated = cluster(policies=f"cluster: {{routing: 'pie.simulator.peers:{peer}'}}")
    simulated.run_open(MIXED)
    assert all(one.ended_s is not None for one in simulated.outcomes)
    assert simulated._chooser._metrics.policy_failures._value.get() == 0


class Clears:
    """A user's routing policy that empties what it is shown."""

    def choose(self, _request: object, workers: list[WorkerView]) -> Choice:
        place = workers[0].place
        workers.clear()
        return Choice(place)


def test_a_routing_policy_that_changes_what_it_is_shown_is_contained() -> None:
    simulated = cluster(policies=f"cluster: {{routing: '{__name__}:Clears'}}")
    simulated.run_open(MIXED)
    assert all(one.ended_s is not None for one in simulated.outcomes)
    assert simulated._chooser._metrics.policy_failures._value.get() == len(simulated.outcomes)


def test_a_conversation_stays_at_its_worker_all_else_being_equal() -> None:
    trace = [ask(at * 0.5, (at, 3), session="s") for at in range(1, 9)]
    simulated = cluster(spec(workers=4))
    simulated.run_open(trace)
    assert len({one.place for one in simulated.outcomes}) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cluster(spec(workers=0)), "workers must be from 1 to 10,000, not 0"),
        (
            lambda: cluster(spec(pool_pages=-1)),
            "pool_pages must be from 0 to 1,000,000,000, not -1",
        ),
        (
            lambda: cluster(spec(workers=4_000, pages=5_000)),
            "4,000 workers of 5,000 pages have 20,000,000, and there is memory here for 10,000,000",
        ),
        (
            lambda: cluster(replace(spec(), host_pages=10**10)),
            "host_pages must be from 0 to 1,000,000,000, not 10,000,000,000",
        ),
        (
            lambda: cluster().run_closed(MIXED, clients=10**9),
            "clients must be from 1 to 1,000,000, not 1,000,000,000",
        ),
        (
            lambda: cluster().run_closed(MIXED, clients=0),
            "clients must be from 1 to 1,000,000, not 0",
        ),
        (
            lambda: cluster().run_open(MIXED, speed=0.0),
            "speed must be from 0.01 to 1,000,000, not 0.0",
        ),
    ],
)
def test_a_cluster_that_cannot_be_simulated_is_told(call: object, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        call()  # type: ignore[operator]


def test_a_named_policy_decides_here_as_it_does_in_a_router() -> None:
    simulated = cluster(spec(workers=3), "cluster: {routing: round-robin}")
    simulated.run_open(MIXED[:9])
    assert [one.place[-1] for one in simulated.outcomes] == list("012012012")


def test_requests_that_wait_hold_their_tokens_once() -> None:
    simulated = cluster(spec(workers=1, max_running=1))
    alive: list[int] = []

    def look() -> None:
        gc.collect()
        alive.append(sum(type(one) is Prefix for one in gc.get_objects()))
        jobs = simulated.workers[0].engine._jobs.values()
        alive.append(sum(len(job.tokens) for job in jobs))
        assert len(jobs) == 20

    before = sum(type(one) is Prefix for one in gc.get_objects())
    simulated.clock.at(0.001, look)
    simulated.run_open([ask(0.0, (at, 50), session=f"s{at}") for at in range(20)])
    assert alive == [before, 0]
