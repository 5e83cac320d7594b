"""A drained worker of a live cluster hands on what only it has: its conversations are warm elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import PIE, Serving, environment

pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(400),
]

PAGE_TOKENS = 16
SETTINGS = {
    "PIE_CLUSTER__WORKERS": "2",
    "PIE_POOL__NODES": "1",
    "PIE_POOL__RAM_BUDGET": "64MiB",
    # What is not asked for again stays where it was computed until somebody is drained.
    "PIE_POLICIES__FILE": "policies.yaml",
}
POLICIES = "cluster: {migration: [{policy: spill-to-pool, as_made: false}]}"
STORY = "The lamp of the lighthouse turns once in ten seconds. " * 20


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Two workers and a pool node."""
    (tmp_path / "policies.yaml").write_text(POLICIES)
    one = Serving(tmp_path, SETTINGS)
    try:
        one.wait_until_said("Ctrl-C stops it")
        one.wait_until_ready()
        yield one
    finally:
        one.stop()


def ask(serving: Serving, prompt: str) -> tuple[str, int, int, str]:
    """Return who answered, the prompt's tokens, how many of them were not computed, and the answer."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    told = answer.json()
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return (
        answer.headers["x-pie-worker"],
        usage["prompt_tokens"],
        cached,
        told["choices"][0]["text"],
    )


def drain(serving: Serving, folder: Path, *arguments: str) -> str:
    """Run `pie drain`, and return what it said."""
    drained = subprocess.run(
        [*PIE, "drain", *arguments, "--at", serving.url],
        cwd=folder,
        env=environment(folder, SETTINGS),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert drained.returncode == 0, drained.stderr
    return drained.stdout + drained.stderr


def state_of(serving: Serving, name: str) -> str:
    """Return what the router's status says of a worker."""
    workers = httpx.get(f"{serving.url}/status", timeout=30).json()["workers"]
    (told,) = [one["state"] for one in workers if one["place"] == name]
    return str(told)


def test_a_conversation_of_a_drained_worker_goes_on_warm_at_another(
    serving: Serving, tmp_path: Path
) -> None:
    first, tokens, cached, text = ask(serving, STORY)
    assert cached == 0
    assert ", 0 are only there" in drain(serving, tmp_path, first)
    second, _, cached, again = ask(serving, STORY)
    assert second != first
    assert cached >= tokens // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
    assert again == text
    assert state_of(serving, first) == "draining"
    assert f"{first} takes requests" in drain(serving, tmp_path, first, "--undo")
    drain(serving, tmp_path, second)
    third, _, _, again = ask(serving, STORY)
    assert third == first
    assert again == text
