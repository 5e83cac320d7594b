"""`pie drain`: a worker is asked, through a router, to hand on what only it has, or to take requests again.

Covers asking and what a person is told. Does not cover what the worker does (`pie.worker.leaving`) or pool
nodes (`pie.cluster.pool_drain`).
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import httpx
import msgspec

from pie.cluster.errors import ConfigError, NotRunningError
from pie.cluster.policy_edit import Desk
from pie.router.api.listing import ApiErrorBody
from pie.router.api.places import DrainBody, WorkerDrained

_ANSWER_S = 30.0
"""How much longer than the worker may take its answer is waited for."""


def drain_worker(desk: Desk, name: str, timeout_s: float, say: Callable[[str], None]) -> int:
    """Let a worker leave, and return how many pages only it has then.

    Raises:
        ConfigError: There is no such worker.
        NotRunningError: No router answers, or the worker does not, or it takes requests again meanwhile.
    """
    say(f"{name} takes no more requests and hands its pages on, for {timeout_s:g} s at most")
    answer = _asked(desk, "POST", name, DrainBody(timeout_s), timeout_s + _ANSWER_S)
    done = msgspec.json.decode(answer, type=WorkerDrained)
    say(f"{name}: the pool took {done.moved} pages, {done.left} are only there")
    say(
        f"{name} stays up and takes no requests until it is started again, or `pie drain {name} --undo` is run."
    )
    return done.left


def take_again(desk: Desk, name: str, say: Callable[[str], None]) -> int:
    """Let a worker that was drained, or is, take requests again; return 0.

    Raises:
        ConfigError: There is no such worker.
        NotRunningError: No router answers, or the worker does not, or it is stopping.
    """
    _asked(desk, "DELETE", name, None, _ANSWER_S)
    say(f"{name} takes requests")
    return 0


def _asked(desk: Desk, method: str, name: str, body: DrainBody | None, limit_s: float) -> bytes:
    headers = {"authorization": f"Bearer {desk.token}"} if desk.token else {}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        answer = httpx.request(
            method,
            f"{desk.url}/admin/workers/{quote(name, safe='')}/drain",
            content=None if body is None else msgspec.json.encode(body),
            headers=headers,
            timeout=limit_s,
            verify=desk.trust,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotRunningError(f"no router answers at {desk.url} ({error})") from error
    if answer.is_success:
        return answer.content
    try:
        said = msgspec.json.decode(answer.content, type=ApiErrorBody).error.message
    except msgspec.DecodeError:
        said = f"{desk.url} answered {answer.status_code}"
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise ConfigError([said])
    raise NotRunningError(said)
