"""How `pie` commands ask a router.

Covers one request and, in one sentence each, why a router does not take it. Does not cover what is asked for
(`pie.cluster.status`, `pie.cluster.explain`, `pie.cluster.policy_edit`, `pie.cluster.worker_drain`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from pie.cluster.errors import NotRunningError, UnansweredError
from pie.router.api.listing import ApiErrorBody

_HOW = (
    "set PIE_ROUTER__API_TOKEN, or router.api_token in pie.toml, to the router's own token or to a key "
    "of `pie key create NAME{}` (docs/tenants.md)"
)

_UNASKED = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.InvalidURL,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""What fails before a request is on its way."""
_CHECKED_S = 10.0
T = TypeVar("T")
Trust = ssl.SSLContext | bool
"""Which certificates are believed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a router answered, good or not."""

    url: str
    path: str
    status: int
    content: bytes

    @property
    def is_good(self) -> bool:
        """Whether it is what was asked for."""
        return httpx.codes.is_success(self.status)

    @property
    def said(self) -> str:
        """What it says that is wrong."""
        try:
            return msgspec.json.decode(self.content, type=ApiErrorBody).error.message
        except msgspec.DecodeError:
            return f"it answered {self.status} to {self.path}"

    def read(self, kind: type[T]) -> T:
        """Return what was asked for.

        Raises:
            NotRunningError: It was not answered, or not as a router does.
        """
        if not self.is_good:
            raise NotRunningError(f"{self.url}: {self.said}")
        try:
            return msgspec.json.decode(self.content, type=kind)
        except msgspec.DecodeError as error:
            raise NotRunningError(f"what answers at {self.url} is not a Pie router") from error


def ask_router(
    method: str,
    url: str,
    path: str,
    *,
    token: str,
    trust: Trust = True,
    body: bytes | None = None,
    timeout_s: float,
    of_admins: bool = True,
) -> Answer:
    """Ask the router at `url`, such as `http://127.0.0.1:8000`.

    Args:
        method: HTTP's.
        url: Where it is.
        path: What is asked for.
        token: Its token, or a key that may ask.
        trust: Which certificates are believed.
        body: JSON.
        timeout_s: How long it may say nothing.
        of_admins: Whether any tenant's key is not enough.

    Raises:
        NotRunningError: No router answers there, or it does not let this key ask.
        UnansweredError: It was asked, and has not answered.
    """
    headers = {"authorization": f"Bearer {token}"} if token else {}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        answer = httpx.request(
            method, url + path, content=body, headers=headers, timeout=timeout_s, verify=trust
        )
    except _UNASKED as error:
        raise NotRunningError(
            f"no router answers at {url} ({_why(error)}): start one with `pie serve`, or name it with --at"
        ) from error
    except httpx.HTTPError as error:
        raise UnansweredError(f"{url} was asked and has not answered ({_why(error)})") from error
    how = _HOW.format(" --admin" if of_admins else "")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        why = "does not know the key that it was sent" if token else "asks for a key"
        raise NotRunningError(f"{url} {why}: {how}")
    if _is_no_admins(answer):
        raise NotRunningError(f"{url} wants an admin's key for this: {how}")
    return Answer(url, path, answer.status_code, answer.content)


def check_key(url: str, token: str, trust: Trust = True) -> None:
    """See to it that a router is there that lets this key generate.

    Raises:
        NotRunningError: No router answers there, or it does not know the key.
    """
    ask_router(
        "GET",
        url,
        "/v1/models",
        token=token,
        trust=trust,
        timeout_s=_CHECKED_S,
        of_admins=False,
    )


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_no_admins(answer: httpx.Response) -> bool:
    """Return whether a key was refused that may ask for other things."""
    if answer.status_code != httpx.codes.FORBIDDEN:
        return False
    try:
        told = msgspec.json.decode(answer.content, type=ApiErrorBody)
    except msgspec.DecodeError:
        return False
    return told.error.code == "insufficient_scope"
