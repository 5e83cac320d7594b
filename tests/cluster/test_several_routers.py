"""`pie serve --routers 2`: one dies, and nobody notices."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import Serving


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
        for round_ in range(3):
            for _ in range(8):
                answer = httpx.post(f"{serving.url}/v1/completions", json=ask, timeout=60)
                assert answer.status_code == 200
            routers = serving.pids("RouterActor")
            if round_ == 0:
                assert len(routers) == 2
                psutil.Process(routers[0]).kill()
                psutil.Process(routers[0]).wait(10)
        serving.wait_until_said("router-0")
    finally:
        assert serving.stop() == 0
