"""Time in which nothing happens: passed over, and with the same outcome."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from pie.page.events import PlaceId
from pie.policies.cluster_policy import ClusterView, Order, SetCopies
from pie.simulator import rounds
from pie.simulator.command import SimulateOptions, simulate
from pie.simulator.errors import SetupError
from pie.simulator.leave import Leave, read_leave
from pie.simulator.report import report_of
from pie.simulator.rounds import Rounds
from tests.simulator.parts import ask, cluster, spec

HEAD = "arrival_s,prompt_tokens,output_tokens,session\n"
MONTH_S = 30 * 86_400.0
ALL = """
cluster:
  routing: cost
  replication: {policy: replicate-hot, uses: 0.01, copies: 3, workers: 3, worker_uses: 0.01, after: 1s}
  migration:
    - {policy: rebalance, idle: 1s, full: 0.1, difference: 0.05, waiting: 1}
    - follow-session
    - {policy: drain, share: 0.8}
    - {policy: expire, after: EXPIRES}
    - {policy: replicate, tenant: "*", copies: 2}
  scale: {policy: by-load, min: 1, max: 8}
"""


class Asked:
    """Counts how often it is asked, and swings a number of copies where it is told to."""

    times: ClassVar[list[float]] = []
    swings: ClassVar[bool] = False

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return no order, or one that changes something each time."""
        self.times.append(view.now_s)
        if self.swings:
            for group in view.groups[:1]:
                yield SetCopies(group.group, 3 - group.copies, "swing")


def asked(*, swings: bool = False) -> str:
    Asked.times.clear()
    Asked.swings = swings
    return f"cluster: {{migration: ['{__name__}:Asked']}}"


def test_a_month_without_requests_is_passed_over() -> None:
    of = replace(spec(workers=3, pool_pages=90), host_pages=64, pool_nodes=2)
    simulated = cluster(of, ALL.replace("EXPIRES", "20s"))
    trace = [ask(at * MONTH_S, (1, 40), (2 + at, 8), session="s") for at in range(3)]
    simulated.run_open(trace)
    simulated.check()
    assert [one.arrived_s for one in simulated.outcomes] == [0.0, MONTH_S, 2 * MONTH_S]
    assert all(one.ended_s is not None for one in simulated.outcomes)


def test_what_expires_late_in_a_gap_has_left_when_the_next_request_comes() -> None:
    for gap_s, held in ((3_000.0, True), (3_900.0, False)):
        simulated = cluster(spec(), ALL.replace("EXPIRES", "1h"))
        simulated.run_open([ask(at * gap_s, (1, 40), session="s") for at in range(2)])
        assert (simulated.outcomes[1].cached_tokens > 0) is held, gap_s


@pytest.mark.parametrize("swings", [False, True])
def test_policies_are_asked_more_seldom_in_a_gap_whatever_they_order(swings: bool) -> None:
    simulated = cluster(replace(spec(pool_pages=64), pool_nodes=2), asked(swings=swings))
    simulated.run_open([ask(at * MONTH_S, (1, 160)) for at in range(2)])
    assert Asked.times[:100] == [float(at) for at in range(1, 101)]
    assert MONTH_S - 1 in Asked.times
    assert Asked.times == sorted(set(Asked.times))
    assert len(Asked.times) < (6_000 if swings else 600)


def test_short_gaps_come_out_as_with_a_round_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> object:
        of = replace(spec(workers=3, pool_pages=90), host_pages=64, pool_nodes=2)
        simulated = cluster(of, ALL.replace("EXPIRES", "20s"))
        simulated.run_open(
            [ask(at * 70.0, (1, 40), (2 + at, 8), session=f"s{at % 3}") for at in range(6)]
        )
        return report_of("x", simulated)

    passed = run()
    monkeypatch.setattr(rounds, "QUIET_S", math.inf)
    assert run() == passed


def test_a_place_that_leaves_late_is_waited_for() -> None:
    simulated = cluster(replace(spec(), leaves=(Leave(PlaceId("worker-1"), 1e9),)))
    simulated.run_open([ask(0.0, (1, 40))])
    assert PlaceId("worker-1") not in simulated.mirror.places()
    assert simulated.clock.now_s() >= 1e9


def test_a_trace_in_unix_time_begins_at_its_first_request(tmp_path: Path) -> None:
    reports = []
    for name, first_s in (("zero", 0), ("epoch", 1_790_000_000)):
        file = tmp_path / f"{name}.csv"
        file.write_text(f"{HEAD}{first_s + 4},50,10,a\n{first_s},40,10,a\n")
        reports += simulate(SimulateOptions(file, cluster=spec()), lambda _: None)
    assert reports[0] == reports[1]
    assert reports[0].simulated_s < 60


@pytest.mark.parametrize("speed", [1e-300, 0.0, -1.0, 1e300, math.inf, math.nan])
def test_a_speed_that_makes_no_sense_is_refused(speed: float) -> None:
    with pytest.raises(SetupError, match=r"speed must be from 0\.01 to 1,000,000, not"):
        cluster().run_open([ask(0.0, (1, 8)), ask(1.0, (1, 8))], speed=speed)


def test_times_beyond_what_can_be_simulated_are_refused() -> None:
    with pytest.raises(SetupError, match="no more than 10,000,000,000 can be simulated"):
        cluster().run_open([ask(0.0, (1, 8)), ask(1e11, (1, 8))])
    with pytest.raises(SetupError, match="seconds from 0 to 10,000,000,000"):
        read_leave("worker-1@1e300")


def test_a_round_comes_each_second_as_long_as_there_are_requests() -> None:
    times, now_s = Rounds(), 0.0
    for _ in range(5_000):
        now_s = times.next_s(now_s, is_busy=True, changed=False, event_s=math.inf)
    assert now_s == 5_000.0
