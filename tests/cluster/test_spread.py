"""Workers and pool nodes on a Ray cluster of several nodes share pages, and outlive one that dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from openai import OpenAI

from pie.index.server import EmbeddedServer
from tests.support.serving import Serving

# Ray gives each of its nodes 30 s to start, which three at once beside other tests may not make.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(400),
]

NODES = 3
LONG = "The lamp of the lighthouse turns once in ten seconds. " * 30
_RAY = """
import sys
from ray.cluster_utils import Cluster
port, nodes = sys.argv[1:]
small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
head = small | {"gcs_server_port": int(port)}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(int(nodes) - 1):
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class Ray(NamedTuple):
    """A Ray of three nodes on this machine."""

    address: str
    process: psutil.Process

    def pids(self, kind: str) -> list[int]:
        """Return the processes of an actor class."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Where Ray says which cluster is the current one, among others; short, because sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="pie", dir="/tmp"))
    (folder / "ray").mkdir()
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _RAY, str(port), str(NODES)],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        assert address, log.read_text()
        yield Ray(address, psutil.Process(process.pid))
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(family, timeout=10)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def serving(
    ray: Ray, redis_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
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


def ask(client: Any, question: str, worker: str) -> tuple[str, int]:
    """Return an answer of one worker, and how many prompt tokens came from pages."""
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        temperature=0,
        extra_headers={"x-pie-place": worker},
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def pool_counters(serving: Serving) -> dict[str, dict[str, float]]:
    status = httpx.get(f"{serving.url}/status", timeout=10).json()
    return {node["place"]: node["counters"] for node in status["pool"]}


def stored_in_pool(serving: Serving, pages: int) -> bool:
    counters = pool_counters(serving)
    return len(counters) == 2 and all(c.get("stored", 0) >= pages for c in counters.values())


def wait_for(what: str, holds: Any, limit_s: float = 30) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.1)


def test_what_one_worker_computed_another_loads_from_nodes_elsewhere(
    serving: Serving, client: Any
) -> None:
    addresses = [line.split()[-1] for line in serving.text.splitlines() if "curve://" in line]
    assert len(set(addresses)) >= 4, "workers and nodes talk encrypted"
    cold, cached = ask(client, LONG + "one", "worker-0")
    assert cached == 0
    wait_for("pages are in both nodes", lambda: stored_in_pool(serving, 10))
    warm, cached = ask(client, LONG + "one", "worker-1")
    assert warm == cold
    assert cached > 300


def test_a_pool_node_that_is_killed_costs_no_page_that_has_a_copy(
    ray: Ray, serving: Serving, client: Any
) -> None:
    before = min(counters.get("stored", 0) for counters in pool_counters(serving).values())
    cold, _ = ask(client, LONG + "two, and then some. " + LONG, "worker-0")
    wait_for("pages are in both nodes", lambda: stored_in_pool(serving, int(before) + 10))
    family = set(ray.pids("PoolActor"))
    os.kill(min(family), signal.SIGKILL)
    warm, cached = ask(client, LONG + "two, and then some. " + LONG, "worker-1")
    assert warm == cold
    assert cached > 600, "the other node has them"

    def is_back() -> bool:
        return len(pool_counters(serving)) == 2 and len(set(ray.pids("PoolActor")) - family) == 1

    wait_for("Ray starts it again", is_back, 60)
    assert ask(client, LONG + "two, and then some. " + LONG, "worker-0")[0] == cold


def test_without_any_pool_node_everything_is_computed(
    ray: Ray, serving: Serving, client: Any
) -> None:
    cold, _ = ask(client, LONG + "three", "worker-0")
    for pid in ray.pids("PoolActor"):
        os.kill(pid, signal.SIGKILL)
    warm, _ = ask(client, LONG + "three", "worker-1")
    assert warm == cold
