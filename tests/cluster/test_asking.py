"""What a command says where a router does not let it ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pie.cluster.asking import ask_router, check_key
from pie.cluster.errors import NotRunningError
from pie.cluster.policy_edit import Desk
from pie.cluster.status import fetch_status

URL = "http://127.0.0.1:9"
HOW = "set PIE_ROUTER__API_TOKEN, or router.api_token in pie.toml, to the router's own token"
ADMINS = f"{HOW} or to a key of `pie key create NAME --admin` (docs/tenants.md)"


def error(code: str, message: str = "It is so.") -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": None, "code": code}}


def answers(monkeypatch: pytest.MonkeyPatch, status: int, body: object) -> None:
    """Let a router answer so."""
    answer = httpx.Response(status, json=body)
    monkeypatch.setattr(httpx, "request", lambda *_, **__: answer)


@pytest.mark.parametrize(
    ("token", "status", "body", "told"),
    [
        ("", 401, error("invalid_api_key"), f"{URL} asks for a key: {ADMINS}"),
        ("no", 401, "?", f"{URL} does not know the key that it was sent: {ADMINS}"),
        (
            "pie-a",
            403,
            error("insufficient_scope"),
            f"{URL} wants an admin's key for this: {ADMINS}",
        ),
        ("", 403, error("host_not_allowed"), f"{URL}: It is so."),
        ("", 500, "?", f"{URL}: it answered 500 to /status"),
        ("", 200, "?", f"what answers at {URL} is not a Pie router"),
    ],
)
def test_why_a_router_does_not_answer_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, token: str, status: int, body: object, told: str
) -> None:
    answers(monkeypatch, status, body)
    with pytest.raises(NotRunningError) as refused:
        fetch_status(URL, token)
    assert str(refused.value) == told


@pytest.mark.parametrize(
    "ask",
    [
        Desk.report,
        Desk.events,
        lambda desk: desk.text(1),
        lambda desk: desk.apply("", "a note"),
        lambda desk: desk.apply("", "a note", check=True),
    ],
)
@pytest.mark.parametrize("body", ["?", {}])
def test_what_is_no_router_is_told_by_all_that_asks_for_policies(
    monkeypatch: pytest.MonkeyPatch, body: object, ask: Callable[[Desk], object]
) -> None:
    answers(monkeypatch, 200, body)
    with pytest.raises(NotRunningError, match=f"what answers at {URL} is not a Pie router"):
        ask(Desk(URL, ""))


def test_who_generates_needs_no_admins_key(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 401, error("invalid_api_key"))
    with pytest.raises(NotRunningError, match=r"of `pie key create NAME` \(docs"):
        check_key(URL, "")
    answers(monkeypatch, 503, error("unavailable"))
    check_key(URL, "")


def test_a_router_that_is_not_there_is_told_with_the_way_to_name_it() -> None:
    with pytest.raises(NotRunningError, match=f"no router answers at {URL} .*--at"):
        ask_router("GET", URL, "/status", token="", timeout_s=10.0)
