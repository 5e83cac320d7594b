"""`pie drain`: a worker is asked, through a router, to hand on what only it has, or to take requests again.

Covers asking and what a person is told. Does not cover what the worker does (`pie.worker.leaving`) or pool
nodes (`pie.cluster.pool_drain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import quote

import httpx
import msgspec

from pie.cluster.asking import Answer, ask_router
from pie.cluster.errors import ConfigError, NotRunningError, UnansweredError, UncertainError
from pie.cluster.policy_edit import Desk
from pie.cluster.status import fetch_status
from pie.policies.registry import did_you_mean
from pie.router.api.places import DrainBody, WorkerDrained
from pie.router.status import ClusterStatus, WorkerLine

_ANSWER_S = 30.0
"""How much longer than the worker may take its answer is waited for."""
_TAKES_NONE = ("draining", "unreachable")


def drain_worker(desk: Desk, name: str, timeout_s: float, say: Callable[[str], None]) -> int:
    """Let a worker leave, and return how many pages only it has then.

    Raises:
        ConfigError: There is no such worker.
        NotRunningError: No router answers, or the worker does not, or it takes requests again meanwhile.
        UncertainError: The router has not said what became of it.
    """
    status = fetch_status(desk.url, desk.token, desk.trust)
    worker = _found(status, name)
    undo = f"`pie drain {name} --undo`"
    if _is_last(worker, status.workers):
        say(
            f"warning: {name} is the last worker for {worker.model} that takes requests: clients get 503 until "
            f"another one does, or {undo} is run"
        )
    begun = f"{name} takes no more requests"
    if status.pool:
        say(f"{begun} and hands its pages on, for {timeout_s:g} s at most")
    else:
        say(f"{begun}; those that run may end, for {timeout_s:g} s at most")
    answer = _asked(desk, "POST", name, DrainBody(timeout_s), timeout_s + _ANSWER_S)
    done = answer.read(WorkerDrained)
    if status.pool:
        say(f"{name}: the pool took {done.moved} pages, {done.left} are only there")
    elif done.left:
        say(
            f"{name}: there is no pool to hand pages to, so {done.left} are only there: they are lost when it "
            f"stops{_but_for_disk(worker)}"
        )
    say(f"{name} stays up and takes no requests until it is started again, or {undo} is run.")
    return done.left


def take_again(desk: Desk, name: str, say: Callable[[str], None]) -> int:
    """Let a worker that was drained, or is, take requests again; return 0.

    Raises:
        ConfigError: There is no such worker.
        NotRunningError: No router answers, or the worker does not, or it is stopping.
        UncertainError: The router has not said what became of it.
    """
    _found(fetch_status(desk.url, desk.token, desk.trust), name)
    _asked(desk, "DELETE", name, None, _ANSWER_S)
    say(f"{name} takes requests")
    return 0


def _found(status: ClusterStatus, name: str) -> WorkerLine:
    """Return the worker that is meant.

    Raises:
        ConfigError: There is none of that name.
    """
    workers = {one.place: one for one in status.workers}
    if name in workers:
        return workers[name]
    if name in {one.place for one in status.pool}:
        raise ConfigError(
            [f"{name} is a pool node and no worker: `pie pool drain {name}` empties it"]
        )
    known = ", ".join(sorted(workers)) or "none"
    hint = did_you_mean(name, workers)
    raise ConfigError([f"There is no worker {name}; those that are up: {known}{hint}"])


def _is_last(worker: WorkerLine, workers: Sequence[WorkerLine]) -> bool:
    """Return whether a worker takes requests and no other one of its model does."""
    taking = [one for one in workers if one.model == worker.model and one.state not in _TAKES_NONE]
    return taking == [worker]


def _but_for_disk(worker: WorkerLine) -> str:
    """Return what is not lost with a worker."""
    if not worker.gauges.get("tier_budget_bytes.disk"):
        return ""
    return ", but for those that its disk has, which the next start of it finds again"


def _asked(desk: Desk, method: str, name: str, body: DrainBody | None, limit_s: float) -> Answer:
    try:
        answer = ask_router(
            method,
            desk.url,
            f"/admin/workers/{quote(name, safe='')}/drain",
            token=desk.token,
            trust=desk.trust,
            body=None if body is None else msgspec.json.encode(body),
            timeout_s=limit_s,
        )
    except UnansweredError as error:
        raise UncertainError(
            f"{error}; whether {name} takes requests is not known: `pie status` says"
        ) from error
    if answer.status == httpx.codes.NOT_FOUND:
        raise ConfigError([answer.said])
    if not answer.is_good:
        raise NotRunningError(answer.said)
    return answer
