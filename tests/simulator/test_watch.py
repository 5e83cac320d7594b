"""Users' policies that do not come back: they end the simulation, and are named."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from pie.page.events import Part, PlaceId
from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterView, Order, StorePages
from pie.policies.loader import load_policies
from pie.policies.retention import PageView
from pie.policies.routing import Choice, RequestView, WorkerView
from pie.simulator.cluster import SimulatedCluster
from pie.simulator.errors import StalledError
from pie.simulator.ordered import orders_told
from pie.simulator.report import Report, report_of
from tests.simulator.parts import ask, spec

TRACE = [ask(at * 0.5, (at + 1, 40), output=2) for at in range(30)]


def for_ever() -> None:
    while True:
        pass


class Retention:
    """Does nothing; the base of those that hang."""

    def stored(self, page: PageView, now_s: float) -> None:
        """Do nothing."""

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Do nothing."""

    def removed(self, key: PageKey, part: Part) -> None:
        """Do nothing."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        """Propose nothing."""
        return ()


class VictimsLoop(Retention):
    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        for_ever()
        return ()


class VictimsLoopLate(Retention):
    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        yield PageKey(bytes(32)), Part.FULL
        for_ever()


class StoredLoops(Retention):
    def stored(self, page: PageView, now_s: float) -> None:
        for_ever()


class VictimsSleep(Retention):
    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        time.sleep(3_600)
        return ()


class VictimsCatch(Retention):
    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        with contextlib.suppress(BaseException):
            for_ever()
        return ()


class RoutingLoops:
    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        for_ever()
        return Choice(workers[0].place)


class DecideLoops:
    def decide(self, view: ClusterView) -> Iterable[Order]:
        for_ever()
        return ()


class LoopsOnce:
    """Takes five seconds at the first time, so that a test that fails ends."""

    def __init__(self) -> None:
        self._has_looped = False

    def __call__(self) -> None:
        until_s = time.monotonic() + (0.0 if self._has_looped else 5.0)
        self._has_looped = True
        while time.monotonic() < until_s:
            pass


class CloseLoops(Retention):
    """Proposes without end, and hangs where its answer is not read to the end."""

    def __init__(self) -> None:
        self._held: dict[tuple[PageKey, Part], None] = {}
        self._loop = LoopsOnce()

    def stored(self, page: PageView, now_s: float) -> None:
        self._held[page.key, page.part] = None

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        try:
            yield from reversed(list(self._held))
            while True:
                yield PageKey(bytes(32)), Part.FULL
        finally:
            self._loop()


class PagesLoop(Sequence[PageKey]):
    """Pages that hang where they are looked at."""

    def __init__(self) -> None:
        self._loop = LoopsOnce()

    def __len__(self) -> int:
        self._loop()
        return 0

    def __getitem__(self, at: object) -> Any:
        self._loop()
        raise IndexError


class OrdersLoop:
    def __init__(self) -> None:
        self._pages = PagesLoop()

    def decide(self, view: ClusterView) -> Iterable[Order]:
        return [StorePages(PlaceId("worker-0"), self._pages, "r")]


class RoutingFirst:
    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        return Choice(workers[0].place)


def simulated(text: str, *, limit_s: float = 0.3) -> SimulatedCluster:
    policies = load_policies(text.replace("MY", __name__), name="test")
    return SimulatedCluster(spec(pages=16), policies, limit_s=limit_s)


class Slow(Retention):
    """Takes longer than a worker waits, whatever it is asked."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        time.sleep(0.003)
        return ()

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        time.sleep(0.021)
        return Choice(workers[0].place)


def timeless(cluster: SimulatedCluster) -> Report:
    """Return what is the same in each run."""
    return msgspec.structs.replace(report_of("x", cluster), late_answers={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker: {retention: 'MY:VictimsLoop'}", "retention policy MY:VictimsLoop"),
        ("worker: {retention: 'MY:VictimsLoopLate'}", "retention policy MY:VictimsLoopLate"),
        ("worker: {retention: 'MY:VictimsCatch'}", "retention policy MY:VictimsCatch"),
        ("worker: {retention: 'MY:VictimsSleep'}", "retention policy MY:VictimsSleep"),
        ("worker: {retention: 'MY:StoredLoops'}", "retention policy MY:StoredLoops"),
        ("cluster: {routing: 'MY:RoutingLoops'}", "routing policy MY:RoutingLoops"),
        ("cluster: {migration: ['MY:DecideLoops']}", "cluster policy MY:DecideLoops"),
        ("cluster: {migration: ['MY:OrdersLoop']}", "cluster policy MY:OrdersLoop"),
        ("worker: {retention: 'MY:CloseLoops'}", "retention policy MY:CloseLoops"),
    ],
)
def test_a_policy_that_does_not_come_back_ends_the_simulation(text: str, said: str) -> None:
    with pytest.raises(StalledError) as told:
        simulated(text).run_open(TRACE)
    said = said.replace("MY", __name__)
    assert str(told.value) == (f"the {said} has not come back in 0.3 s, which ends the simulation")
    assert not [one for one in threading.enumerate() if one.name == "pie-policy-watch"]


def test_it_ends_one_that_sleeps_in_a_job_of_the_background_too() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken = signal.getsignal(signal.SIGURG)
    try:
        with pytest.raises(StalledError):
            simulated("worker: {retention: 'MY:VictimsSleep'}").run_open(TRACE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGURG) == woken


def test_it_ends_one_that_runs_beside_the_main_thread_too() -> None:
    told: list[Exception] = []

    def run() -> None:
        try:
            simulated("worker: {retention: 'MY:VictimsLoop'}").run_open(TRACE)
        except StalledError as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(told) == 1


def test_policies_that_come_back_decide_as_before() -> None:
    users = simulated(
        "{worker: {retention: 'MY:Retention'}, cluster: {routing: 'MY:RoutingFirst'}}", limit_s=60.0
    )
    users.run_open(TRACE)
    assert {one.place for one in users.outcomes} == {"worker-0"}
    # One that proposes nothing is helped out by `lru`.
    builtin = simulated(
        "{worker: {retention: lru}, cluster: {routing: 'MY:RoutingFirst'}}", limit_s=60.0
    )
    builtin.run_open(TRACE)
    assert timeless(users) == timeless(builtin)
    assert users.workers[0].engine.table.counts().idle > 0


class Fails(Retention):
    """Raises, or chooses what is no choice, whenever it is asked."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        raise ValueError("no")

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        return workers[0].place  # type: ignore[return-value]


def test_how_often_a_policy_failed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    own = f"'{__name__}:Fails'"
    policies = load_policies(f"worker: {{retention: {own}}}\ncluster: {{routing: {own}}}", name="f")
    cluster = SimulatedCluster(spec(pages=16), policies)
    cluster.run_open(TRACE)
    report = report_of("mine", cluster)
    name = f"{__name__}:Fails"
    assert report.policy_failures[f"the routing policy {name}"] == len(TRACE)
    failed = report.policy_failures[f"the retention policy {name}"]
    assert failed > 2
    # The workers' are told together.
    said = [one for one in caplog.records if "victims()" in one.getMessage()]
    assert len(said) == 1, "the rest is told after the table"
    assert said[0].getMessage().startswith(f"device: {name} failed in victims(): ValueError: no (")
    line = f"mine: the routing policy {name} failed 30 times, and what is built in decided then"
    assert line in orders_told([report])


def test_answers_that_a_router_or_a_worker_would_not_have_waited_for_are_told() -> None:
    text = "{worker: {retention: 'MY:Slow'}, cluster: {routing: 'MY:Slow'}}"
    runs = [simulated(text, limit_s=60.0) for _ in range(2)]
    for cluster in runs:
        cluster.run_open(TRACE)
    report, again = (report_of("mine", cluster) for cluster in runs)
    told = report.late_answers[f"the retention policy {__name__}:Slow"]
    assert told.late == told.answers > 0
    assert (
        f"mine: {told.late} of {told.late} answers of the retention policy {__name__}:Slow took over 1 ms of real "
        "time; a worker would have used `lru`"
    ) in orders_told([report])
    assert (
        f"mine: 30 of 30 answers of the routing policy {__name__}:Slow took over 20 ms of real time; a router would "
        "have used `cost`"
    ) in orders_told([report])
    assert timeless(runs[0]) == timeless(runs[1])
    assert report.late_answers.keys() == again.late_answers.keys()
