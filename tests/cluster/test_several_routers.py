"""`pie serve --routers 2`: they answer as one, and one dies, and nobody notices."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from pie.cluster.explain import fetch_explained
from tests.support.serving import LONG_S, Serving


def _converse(url: str, turns: int, last: str | None = None) -> str:
    """Go on with a conversation, each turn over a connection of its own, and explain each; return the last's id."""
    for _ in range(turns):
        body = {
            "model": "smollm2",
            "input": "Go on.",
            "max_output_tokens": 2,
            "previous_response_id": last,
        }
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=LONG_S)
        assert answer.status_code == 200, answer.text
        last = str(answer.json()["id"])
        assert httpx.get(f"{url}/v1/responses/{last}", timeout=LONG_S).json() == answer.json()
        told = fetch_explained(url, "", last)
        assert told.path == "/v1/responses"
    assert last is not None
    return last


@pytest.mark.soak
@pytest.mark.live
@pytest.mark.timeout(400)
def test_one_of_two_routers_dies_and_the_other_goes_on(temporary: Path) -> None:
    serving = Serving(
        temporary, settings={"PIE_CLUSTER__ROUTERS": "2", "PIE_CLUSTER__WORKERS": "1"}
    )
    try:
        serving.wait_until_said("Ctrl-C stops it")
        ask = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 2}
        last = ""
        for round_ in range(3):
            for _ in range(8):
                answer = httpx.post(f"{serving.url}/v1/completions", json=ask, timeout=LONG_S)
                assert answer.status_code == 200, (round_, answer.text)
            routers = serving.pids("RouterActor")
            if round_ == 0:
                assert len(routers) == 2
                last = _converse(serving.url, 8)
                psutil.Process(routers[0]).kill()
                psutil.Process(routers[0]).wait(LONG_S)
            # Whichever of the two is gone: what it said last is known.
            last = _converse(serving.url, 2, last)
        serving.wait_until_said("router-0")
    finally:
        assert serving.stop() == 0


@pytest.mark.soak
@pytest.mark.live
@pytest.mark.timeout(400)
def test_a_router_that_hangs_is_replaced(temporary: Path) -> None:
    serving = Serving(
        temporary, settings={"PIE_CLUSTER__ROUTERS": "2", "PIE_CLUSTER__WORKERS": "1"}
    )
    try:
        serving.wait_until_said("Ctrl-C stops it")
        hanging, well = serving.pids("RouterActor")
        os.kill(hanging, signal.SIGSTOP)
        serving.wait_until_said("it has not answered for")
        deadline_s = time.monotonic() + 120
        while len(routers := set(serving.pids("RouterActor")) - {hanging}) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
        assert well in routers
        assert not psutil.pid_exists(hanging)
        serving.wait_until_ready(workers=1, timeout_s=120)
        for _ in range(20):
            assert httpx.get(f"{serving.url}/health", timeout=20).status_code == 200
    finally:
        assert serving.stop() == 0
