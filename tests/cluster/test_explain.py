"""`pie explain` against a live cluster, and what it says when it cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import PIE, Serving, environment

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

STORY = "The ferryman counted the bells of the far shore every evening at dusk. " * 20


def explain(cluster: Serving, folder: Path, request_id: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PIE, "explain", request_id, "--at", cluster.url],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_tells_why_tokens_were_computed_and_which_were_not(
    cluster: Serving, client: Any, tmp_path: Path
) -> None:
    arguments = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 2,
    }
    cold, warm = (
        client.chat.completions.with_raw_response.create(**arguments).headers for _ in range(2)
    )
    told = explain(cluster, tmp_path, cold["x-pie-request-id"]).stdout
    assert ": never-computed" in told
    assert ": partial-page" in told
    assert "chosen by `cost`\n" in told
    assert "worker-0" in told
    assert "worker-1" in told
    assert "ferryman" not in told
    told = explain(cluster, tmp_path, warm["x-pie-request-id"]).stdout
    assert f"delivered device {warm['x-pie-cached-tokens']}" in told
    assert "never-computed" not in told


def test_a_request_that_it_does_not_know_is_one_sentence(cluster: Serving, tmp_path: Path) -> None:
    done = explain(cluster, tmp_path, "no/such request")
    assert done.returncode == 2
    [sentence] = done.stderr.strip().splitlines()
    assert sentence.startswith("pie: Nothing is known of request")
