"""A conversation outlives a whole cluster of several Ray nodes, because its pages lie in S3."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest
from openai import OpenAI

from pie.cluster.local_s3 import BUCKET, LocalS3
from pie.index.server import EmbeddedServer
from tests.support.ray_nodes import RayNodes
from tests.support.s3_server import settings_for
from tests.support.serving import LONG_S, Serving

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    Conversation = list[ChatCompletionMessageParam]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(600),
]

NODES = 3
PAGE_TOKENS = 16
SYSTEM = "You look after a lighthouse. " + "The lamp turns once in ten seconds. " * 200
TURNS = ("What turns?", "How often does it turn?")


class Answered(NamedTuple):
    """An answer, and where its prompt came from."""

    text: str
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Those that came from pages."""
    sources: str
    load: str


class Cluster:
    """Two workers and two pool nodes, spread over a Ray of three nodes, and a client."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.computed = 0
        """Full pages of prompts that no worker had: all of them go to the pool."""
        self.ray = RayNodes(NODES, folder / "ray.log")
        spread = {"PIE_CLUSTER__RAY_ADDRESS": self.ray.address, "PIE_CLUSTER__SPREAD": "true"}
        self.serving = Serving(folder, settings | spread)

    def wait_until_up(self) -> None:
        self.serving.wait_until_said("Ctrl-C stops it")
        self.serving.wait_until_ready(workers=2)

    def ask(self, conversation: Conversation, worker: str) -> Answered:
        with OpenAI(base_url=f"{self.serving.url}/v1", api_key="none", timeout=LONG_S) as client:
            got = client.chat.completions.with_raw_response.create(
                model="smollm2",
                messages=conversation,
                max_tokens=24,
                temperature=0,
                extra_headers={"x-pie-place": worker},
            )
        answer = got.parse()
        text, usage = answer.choices[0].message.content, answer.usage
        assert text is not None
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        self.computed += usage.prompt_tokens // PAGE_TOKENS - (cached + 1) // PAGE_TOKENS
        return Answered(
            text,
            usage.prompt_tokens,
            cached,
            got.headers["x-pie-cached-from"],
            got.headers["x-pie-load"],
        )

    def gauges(self) -> list[dict[str, float]]:
        """Return what each pool node counts."""
        nodes = httpx.get(f"{self.serving.url}/status", timeout=LONG_S).json()["pool"]
        return [node["gauges"] | node["counters"] for node in nodes]

    def wait_until_kept(self) -> None:
        """Wait until all that was computed came to the nodes and is in the bucket."""
        until_s = time.monotonic() + LONG_S
        while True:
            nodes = self.gauges()
            came = sum(node.get("stored", 0) for node in nodes)
            kept = [node.get("pages.pool_object", 0) for node in nodes]
            # Each node knows its own pages at once.
            is_sent = all(
                node.get("pages.pool_ram", 0) <= node.get("pages.pool_object", 0)
                and not node.get("object_buffered_bytes", 0)
                for node in nodes
            )
            if len(nodes) == 2 and is_sent and min(came, sum(kept)) >= self.computed:
                return
            assert time.monotonic() < until_s, f"{self.computed} pages are not kept: {nodes}"
            time.sleep(0.3)

    def close(self) -> None:
        try:
            self.serving.stop(signal.SIGTERM)
        finally:
            self.ray.stop()


@contextmanager
def running(folder: Path, settings: dict[str, str]) -> Iterator[Cluster]:
    cluster = Cluster(folder, settings)
    try:
        cluster.wait_until_up()
        yield cluster
    finally:
        cluster.close()


def test_after_every_process_of_ray_was_killed_a_conversation_goes_on_from_s3(
    tmp_path: Path, s3_server: LocalS3, redis_server: EmbeddedServer
) -> None:
    settings = {
        "PIE_INDEX__URL": redis_server.url,
        "PIE_INDEX__KEY_PREFIX": "killed",
        "PIE_POOL__NODES": "2",
        "PIE_POOL__OBJECT_BUCKET": BUCKET,
        "PIE_POOL__OBJECT_ENDPOINT_URL": s3_server.url,
        "PIE_POOL__OBJECT_PREFIX": settings_for(s3_server).object_prefix,
        # In bfloat16 other batches round otherwise, and then the same answer may differ by a word.
        "PIE_MODEL__DTYPE": "float32",
        "PIE_MODEL__THREADS": "1",
        "PIE_MODEL__DEVICE_KV_BUDGET": "320MiB",
        "PIE_POOL__RAM_BUDGET": "512MiB",
        "PIE_MODEL__HOST_KV_BUDGET": "0",
    }
    conversation: Conversation = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TURNS[0]},
    ]
    with running(tmp_path, settings) as cluster:
        first = cluster.ask(conversation, "worker-0")
        assert first.cached == 0
        cluster.wait_until_kept()
        # The other worker has the same pages of both nodes.
        shared = cluster.ask(conversation, "worker-1")
        assert shared.text == first.text
        assert shared.cached == full_pages(shared), shared
        assert "pool" in shared.sources
        stored = [node["stored"] for node in cluster.gauges()]
        assert all(stored), f"both nodes keep some: {stored}"
        conversation.append({"role": "assistant", "content": first.text})
        conversation.append({"role": "user", "content": TURNS[1]})
        before = cluster.ask(conversation, "worker-0")
        cluster.wait_until_kept()
        cluster.ray.kill()
        cluster.serving.stop(signal.SIGKILL)
    time.sleep(11)  # For ten seconds the index is the killed cluster's.
    with running(tmp_path, settings) as cluster:
        nodes = cluster.gauges()
        assert all(node.get("stored", 0) == 0 for node in nodes), "they had nothing but the bucket"
        after = cluster.ask(conversation, "worker-1")
        assert after.text == before.text
        assert after.cached == full_pages(after), after
        assert after.sources == f"pool={after.cached}"


def full_pages(answer: Answered) -> int:
    """Return the tokens of a prompt's full pages, the last token aside: it is always computed."""
    return (answer.prompt - 1) // PAGE_TOKENS * PAGE_TOKENS
