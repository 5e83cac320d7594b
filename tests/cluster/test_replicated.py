"""Copies in the pool come and go on a live cluster, as its API tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import LONG_S, Serving

pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(400),
]

NODES = 3
PAGE_TOKENS = 16
PROMPT = "The lamp of the lighthouse turns once in ten seconds. " * 20
POLICIES = "cluster: {replication: {policy: replicate-hot, uses: 0.3, copies: 3, after: 1s}}"


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """One worker and three pool nodes."""
    (tmp_path / "policies.yaml").write_text(POLICIES)
    one = Serving(
        tmp_path,
        {
            "PIE_CLUSTER__WORKERS": "1",
            "PIE_POOL__NODES": str(NODES),
            "PIE_POOL__RAM_BUDGET": "64MiB",
            "PIE_MODEL__HOST_KV_BUDGET": "0",
            "PIE_POLICIES__FILE": "policies.yaml",
        },
    )
    try:
        one.wait_until_said("Ctrl-C stops it")
        one.wait_until_ready()
        yield one
    finally:
        one.stop()


def ask(serving: Serving) -> int:
    """Ask for one token, and return how many pages of the prompt are full."""
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 1}
    answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=LONG_S)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens"]) // PAGE_TOKENS


def held(serving: Serving) -> list[int]:
    """Return how many pages each node holds, as the router knows."""
    nodes = httpx.get(f"{serving.url}/status", timeout=LONG_S).json()["pool"]
    return sorted(sum(node["pages"].values()) for node in nodes)


def wait_for(condition: Callable[[], bool], seen: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, seen()
        time.sleep(0.2)


def test_a_hot_prompt_gets_copies_on_all_nodes_and_loses_them_when_it_is_cold(
    serving: Serving,
) -> None:
    pages = ask(serving)
    wait_for(lambda: held(serving) == [0, 0, pages], lambda: held(serving))
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            ask(serving)

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        wait_for(lambda: held(serving) == [pages] * NODES, lambda: held(serving))
    finally:
        over.set()
        asking.join()
    wait_for(lambda: held(serving) == [0, 0, pages], lambda: held(serving))
    told = httpx.get(f"{serving.url}/admin/policies/events", timeout=LONG_S).json()["events"]
    orders = [(one["action"], one["copies"]) for one in reversed(told)]
    assert orders[0][0] == "raise"
    assert ("raise", 3) in orders
    assert orders[-2:] == [("lower", 2), ("lower", 1)]
    assert all("uses a second" in one["reason"] for one in told)
