"""On a live cluster what a request will need comes near while it waits: because its conversation moved, or because it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import LONG_S, Serving

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
    "PIE_MODEL__MAX_RUNNING": "1",
    "PIE_POLICIES__FILE": "policies.yaml",
}
# Pages come to the pool, and near the other worker, only because the policy orders it.
POLICIES = """
cluster:
  migration:
    - follow-session
    - {policy: prefetch, requests: 0}
    - {policy: spill-to-pool, as_made: false}
"""
STORY = "The lamp of the lighthouse turns once in ten seconds. " * 20


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two workers that run one request each, and a pool node."""
    folder: Path = tmp_path_factory.mktemp("followed")
    (folder / "policies.yaml").write_text(POLICIES)
    one = Serving(folder, SETTINGS)
    try:
        one.wait_until_said("Ctrl-C stops it")
        one.wait_until_ready()
        yield one
    finally:
        one.stop()


def ask(serving: Serving, place: str, prompt: str) -> tuple[str, int, int]:
    """Ask at a worker; return who answered, the prompt's tokens, and how many were not computed."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "session_id": "the keeper's",
    }
    answer = httpx.post(
        f"{serving.url}/v1/completions", json=body, headers={"x-pie-place": place}, timeout=120
    )
    answer.raise_for_status()
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-pie-worker"], usage["prompt_tokens"], cached


@contextmanager
def kept_busy(serving: Serving, place: str) -> Iterator[None]:
    """Let a worker write a long answer, so that what comes later waits there."""
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 1_500,
        "ignore_eos": True,
        "stream": True,
    }
    has_begun, may_end = threading.Event(), threading.Event()

    def read() -> None:
        url, headers = f"{serving.url}/v1/completions", {"x-pie-place": place}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            for _ in answer.iter_lines():
                has_begun.set()
                if may_end.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert has_begun.wait(LONG_S)
        try:
            yield
            assert not reading.done(), "it was not busy any more"
        finally:
            may_end.set()
            reading.result(60)


def prefetched(serving: Serving, place: str) -> int:
    """Return how many pages a worker has brought near for requests that wait."""
    workers = httpx.get(f"{serving.url}/status", timeout=LONG_S).json()["workers"]
    [counters] = [one["counters"] for one in workers if one["place"] == place]
    return int(counters["pages_prefetched"])


def apply(serving: Serving, text: str) -> None:
    """Put policies in force, and wait until all places run them."""
    url = f"{serving.url}/admin/policies"
    applied = httpx.post(url, json={"text": text}, timeout=LONG_S)
    applied.raise_for_status()
    deadline_s = time.monotonic() + LONG_S
    while True:
        places = httpx.get(url, timeout=LONG_S).json()["places"]
        if {one["version"] for one in places} == {applied.json()["version"]}:
            return
        assert time.monotonic() < deadline_s, places
        time.sleep(0.1)


def did(serving: Serving, action: str, place: str) -> bool:
    """Say whether `follow-session` did something at a worker."""
    found: list[dict[str, Any]] = httpx.get(
        f"{serving.url}/admin/policies/events", timeout=30
    ).json()["events"]
    return any(
        (one["policy"], one["action"], one["place"]) == ("follow-session", action, place)
        for one in found
    )


def test_the_pages_of_a_conversation_that_moves_follow_it(serving: Serving) -> None:
    place, tokens, cached = ask(serving, "worker-0", STORY)
    assert (place, cached) == ("worker-0", 0)
    with ThreadPoolExecutor(1) as pool:
        with kept_busy(serving, "worker-1"):
            turn = pool.submit(ask, serving, "worker-1", f"{STORY} Then")
            deadline_s = time.monotonic() + LONG_S
            while not did(serving, "done", "worker-1"):
                assert time.monotonic() < deadline_s, "nothing followed"
                time.sleep(0.1)
            assert did(serving, "done", "worker-0")
            assert not turn.done(), "its turn had not come"
        place, _, cached = turn.result(120)
    assert place == "worker-1"
    assert cached >= tokens // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS


def test_what_a_waiting_request_needs_comes_from_the_pool_by_the_defaults(serving: Serving) -> None:
    # `prefetch` and `spill-to-pool` are in force where the file names no migration.
    apply(serving, "cluster: {routing: cost}")
    story = f"Of another lighthouse. {STORY}"
    _, tokens, cached = ask(serving, "worker-0", story)
    assert cached < PAGE_TOKENS
    pages, before = tokens // PAGE_TOKENS, prefetched(serving, "worker-1")
    with ThreadPoolExecutor(1) as pool:
        with kept_busy(serving, "worker-1"):
            turn = pool.submit(ask, serving, "worker-1", f"{story} Then")
            deadline_s = time.monotonic() + LONG_S
            while prefetched(serving, "worker-1") < before + pages - 1:
                assert time.monotonic() < deadline_s, "nothing came near"
                time.sleep(0.1)
            assert not turn.done(), "its turn had not come"
        place, _, cached = turn.result(120)
    assert place == "worker-1"
    assert cached >= (pages - 1) * PAGE_TOKENS
