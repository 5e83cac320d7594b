"""`pie drain`: a worker is asked, through a router, to hand on what only it has.

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
        NotRunningError: No router answers, or the worker does not.
    """
    headers = {"content-type": "application/json"}
    if desk.token:
        headers["authorization"] = f"Bearer {desk.token}"
    say(f"{name} takes no more requests and hands its pages on, for {timeout_s:g} s at most")
    try:
        answer = httpx.post(
            f"{desk.url}/admin/workers/{quote(name, safe='')}/drain",
            content=msgspec.json.encode(DrainBody(timeout_s)),
            headers=headers,
            timeout=timeout_s + _ANSWER_S,
            verify=desk.trust,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotRunningError(f"no router answers at {desk.url} ({error})") from error
    if not answer.is_success:
        try:
            said = msgspec.json.decode(answer.content, type=ApiErrorBody).error.message
        except msgspec.DecodeError:
            said = f"{desk.url} answered {answer.status_code}"
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ConfigError([said])
        raise NotRunningError(said)
    done = msgspec.json.decode(answer.content, type=WorkerDrained)
    say(f"{name}: the pool took {done.moved} pages, {done.left} are only there")
    say(f"{name} stays up and takes no requests until it is started again.")
    return done.left
