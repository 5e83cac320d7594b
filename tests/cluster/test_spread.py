"""Workers and pool nodes on a Ray cluster of several nodes share pages, and outlive one that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from openai import OpenAI

from pie.index.server import EmbeddedServer
from tests.support.ray_nodes import RayNodes, ray_nodes
from tests.support.serving import LONG_S, Serving

# Ray gives each of its nodes 30 s to start, which three at once beside other tests may not make.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(400),
]

NODES = 3
PAGE_TOKENS = 16
LONG = "The lamp of the lighthouse turns once in ten seconds. " * 30


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with ray_nodes(NODES, tmp_path_factory.mktemp("ray")) as ray:
        yield ray


@pytest.fixture(scope="module")
def serving(
    ray: RayNodes, redis_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Two workers and two pool nodes, spread over that Ray."""
    one = Serving(
        tmp_path_factory.mktemp("spread"),
        {
            "PIE_CLUSTER__RAY_ADDRESS": ray.address,
            "PIE_CLUSTER__SPREAD": "true",
            "PIE_INDEX__URL": redis_server.url,
            "PIE_INDEX__KEY_PREFIX": "spread",
            "PIE_POOL__NODES": "2",
            "PIE_POOL__COPIES": "2",
            "PIE_MODEL__THREADS": "1",
            "PIE_MODEL__HOST_KV_BUDGET": "0",
        },
    )
    try:
        one.wait_until_said("Ctrl-C stops it")
        one.wait_until_ready(workers=2)
        yield one
    finally:
        one.stop()


@pytest.fixture
def client(serving: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


class Answered(NamedTuple):
    """An answer, and where its prompt came from."""

    text: str
    prompt_pages: int
    """Full pages of the prompt."""
    cached: int
    """Tokens of the prompt that came from pages."""
    load: str
    """Why pages were loaded or computed."""


def ask(client: Any, question: str, worker: str) -> Answered:
    """Return what one worker answers."""
    got = client.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        temperature=0,
        extra_headers={"x-pie-place": worker},
    )
    answer = got.parse()
    return Answered(
        answer.choices[0].message.content,
        answer.usage.prompt_tokens // PAGE_TOKENS,
        answer.usage.prompt_tokens_details.cached_tokens,
        got.headers.get("x-pie-load", ""),
    )


def pool_counters(serving: Serving) -> dict[str, dict[str, float]]:
    status = httpx.get(f"{serving.url}/status", timeout=LONG_S).json()
    return {node["place"]: node["counters"] for node in status["pool"]}


def least_stored(serving: Serving) -> int:
    """Return how many pages the node has taken that has taken least; 0 while one is missing."""
    stored = [int(counters.get("stored", 0)) for counters in pool_counters(serving).values()]
    return min(stored) if len(stored) == 2 else 0


def wait_for(what: str, holds: Any, limit_s: float = LONG_S) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.1)


def ask_first(serving: Serving, client: Any, question: str) -> Answered:
    """Ask worker-0 what nobody has asked, and wait until both nodes have every page of it."""
    before = least_stored(serving)
    cold = ask(client, question, "worker-0")
    new = cold.prompt_pages - cold.cached // PAGE_TOKENS
    wait_for("pages are in both nodes", lambda: least_stored(serving) >= before + new)
    return cold


def test_what_one_worker_computed_another_loads_from_nodes_elsewhere(
    serving: Serving, client: Any
) -> None:
    addresses = [line.split()[-1] for line in serving.text.splitlines() if "curve://" in line]
    assert len(set(addresses)) >= 4, "workers and nodes talk encrypted"
    cold = ask_first(serving, client, LONG + "one")
    assert cold.cached == 0
    warm = ask(client, LONG + "one", "worker-1")
    assert warm.text == cold.text
    assert warm.cached > 300, warm


def test_a_pool_node_that_is_killed_costs_no_page_that_has_a_copy(
    ray: RayNodes, serving: Serving, client: Any
) -> None:
    question = LONG + "two, and then some. " + LONG
    cold = ask_first(serving, client, question)
    family = set(ray.pids("PoolActor"))
    os.kill(min(family), signal.SIGKILL)
    warm = ask(client, question, "worker-1")
    assert warm.text == cold.text
    assert warm.cached > 600, f"the other node has them: {warm}"

    def is_back() -> bool:
        return len(pool_counters(serving)) == 2 and len(set(ray.pids("PoolActor")) - family) == 1

    wait_for("Ray starts it again", is_back)
    assert ask(client, question, "worker-0").text == cold.text


def test_without_any_pool_node_everything_is_computed(
    ray: RayNodes, serving: Serving, client: Any
) -> None:
    cold = ask(client, LONG + "three", "worker-0")
    for pid in ray.pids("PoolActor"):
        os.kill(pid, signal.SIGKILL)
    assert ask(client, LONG + "three", "worker-1").text == cold.text
