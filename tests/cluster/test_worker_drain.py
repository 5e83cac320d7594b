"""What `pie drain` asks and says: which worker is meant first, and what becomes of its pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pie.cluster import worker_drain
from pie.cluster.asking import Answer
from pie.cluster.cli import app
from pie.cluster.errors import UnansweredError
from pie.router.api.places import WorkerDrained
from pie.router.status import ClusterStatus, PlaceLine, WorkerLine

AT = "http://127.0.0.1:9"


def worker(place: str, state: str = "ready", model: str = "m", **fields: Any) -> WorkerLine:
    return WorkerLine(place=place, address="", pages={}, state=state, model=model, **fields)


class Router:
    """What a router says and was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers = [worker("worker-0"), worker("worker-1")]
        self.pool = [PlaceLine(place="pool-0", address="", pages={}, state="ready")]
        self.asked: list[str] = []
        self.done = WorkerDrained("worker-0", 5, 0)
        monkeypatch.setattr(worker_drain, "fetch_status", lambda *_: self._status())
        monkeypatch.setattr(worker_drain, "ask_router", self._answer)

    def _status(self) -> ClusterStatus:
        return ClusterStatus(model="m", index="ok", workers=self.workers, pool=self.pool)

    def _answer(self, method: str, url: str, path: str, **_: object) -> Answer:
        self.asked.append(f"{method} {path}")
        return Answer(url, path, 200, msgspec.json.encode(self.done))


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    return Router(monkeypatch)


def drain(*arguments: str) -> tuple[int, list[str]]:
    """Return the exit code of `pie drain`, and the lines that it prints, errors too."""
    done = CliRunner().invoke(app, ["drain", *arguments, "--at", AT])
    return done.exit_code, done.output.splitlines()


@pytest.mark.parametrize("undo", [(), ("--undo",)])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "worker-9",
            (
                "There is no worker worker-9; those that are up: worker-0, worker-1, "
                "did you mean 'worker-1'?"
            ),
        ),
        ("x", "There is no worker x; those that are up: worker-0, worker-1"),
        ("pool-0", "pool-0 is a pool node and no worker: `pie pool drain pool-0` empties it"),
    ],
)
def test_a_name_that_is_no_workers_is_one_sentence_before_anything_is_asked(
    router: Router, name: str, told: str, undo: tuple[str, ...]
) -> None:
    assert drain(name, *undo) == (2, [f"pie: {told}"])
    assert router.asked == []


@pytest.mark.parametrize("undo", [(), ("--undo",)])
def test_a_router_that_breaks_off_may_have_done_what_it_was_asked(
    router: Router, undo: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> Answer:
        raise UnansweredError("it was asked and has not answered")

    monkeypatch.setattr(worker_drain, "ask_router", break_off)
    code, said = drain("worker-0", *undo)
    assert code == 1
    assert said[-1] == (
        "pie: it was asked and has not answered; whether worker-0 takes requests is not known: `pie status` says"
    )


@pytest.mark.parametrize(("left", "code"), [(0, 0), (3, 1)])
def test_what_becomes_of_its_pages_is_told(router: Router, left: int, code: int) -> None:
    router.done = WorkerDrained("worker-0", 5, left)
    assert drain("worker-0", "--timeout", "9") == (
        code,
        [
            "worker-0 takes no more requests and hands its pages on, for 9 s at most",
            f"worker-0: the pool took 5 pages, {left} are only there",
            (
                "worker-0 stays up and takes no requests until it is started again, or `pie drain worker-0 --undo` "
                "is run."
            ),
        ],
    )
    assert router.asked == ["POST /admin/workers/worker-0/drain"]


@pytest.mark.parametrize(
    ("gauges", "more"),
    [
        ({}, ""),
        (
            {"tier_budget_bytes.disk": 1 << 30},
            ", but for those that its disk has, which the next start of it finds again",
        ),
    ],
)
def test_without_a_pool_it_is_told_what_is_lost(
    router: Router, gauges: dict[str, float], more: str
) -> None:
    router.pool, router.done = [], WorkerDrained("worker-0", 0, 7)
    router.workers[0] = worker("worker-0", gauges=gauges)
    code, said = drain("worker-0")
    assert code == 1
    assert said[:2] == [
        "worker-0 takes no more requests; those that run may end, for 30 s at most",
        f"worker-0: there is no pool to hand pages to, so 7 are only there: they are lost when it stops{more}",
    ]
    router.done = WorkerDrained("worker-0", 0, 0)
    code, said = drain("worker-0")
    assert (code, len(said)) == (0, 2), "there is nothing to lose"


@pytest.mark.parametrize(
    ("others", "warns"),
    [
        ([], True),
        ([worker("worker-1", "draining"), worker("worker-2", "unreachable")], True),
        ([worker("worker-1", model="n")], True),
        ([worker("worker-1", "silent")], False),
    ],
)
def test_the_last_worker_that_takes_requests_is_drained_with_a_warning(
    router: Router, others: list[WorkerLine], warns: bool
) -> None:
    router.workers = [worker("worker-0"), *others]
    code, said = drain("worker-0")
    assert (code, len(router.asked)) == (0, 1)
    warning = (
        "warning: worker-0 is the last worker for m that takes requests: clients get 503 until another one "
        "does, or `pie drain worker-0 --undo` is run"
    )
    assert (said[0] == warning) is warns
    assert len(said) == 3 + warns
    router.workers[0] = worker("worker-0", "draining")
    assert len(drain("worker-0")[1]) == 3, "it takes none already"
