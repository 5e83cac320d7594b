"""A tenant cannot tell by what its requests cost whether another one has asked the same."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import httpx
import pytest
from openai import OpenAI

from tests.support.serving import LONG_S, Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

PROMPT = "A prompt that nobody has asked before this test did, at some length. " * 8


@dataclass(frozen=True)
class Cost:
    """What a request took."""

    cached_tokens: int
    """As its answer says."""
    computed_tokens: int
    """As both workers counted, the answer's included: the time of a request in tokens."""


def computed_tokens(cluster: Serving, least: int = 0) -> int:
    """Return what both workers have computed, once that is so much and they say the same twice."""
    deadline_s, seen = time.monotonic() + LONG_S, -1
    while True:
        time.sleep(1.05)  # What workers count is asked once a second.
        workers = httpx.get(f"{cluster.url}/status", timeout=LONG_S).json()["workers"]
        counts = [int(worker["counters"].get("prefill_tokens", -1)) for worker in workers]
        # One that has not answered in time counts nothing.
        if min(counts) >= 0:
            if sum(counts) == seen >= least:
                return seen
            seen = sum(counts)
        assert time.monotonic() < deadline_s, f"{workers} have not computed {least}"


def test_a_second_tenants_first_request_is_computed_as_a_whole(
    cluster: Serving, client: OpenAI
) -> None:
    one, two = (uuid.uuid4().hex for _ in range(2))
    model = client.models.list().data[0].id
    computed = computed_tokens(cluster)

    def cost(salt: str) -> Cost:
        nonlocal computed
        answer = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=1,
            extra_body={"cache_salt": salt},
            extra_headers={"x-pie-place": "worker-0"},
        )
        assert answer.usage
        details = answer.usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or 0
        before = computed
        computed = computed_tokens(cluster, before + answer.usage.prompt_tokens - cached)
        return Cost(cached, computed - before)

    first = cost(one)
    assert first.cached_tokens == 0
    # Both halves of the claim: the second tenant pays what the first one paid, and it is not so
    # that nobody is ever spared anything.
    assert cost(two) == first
    again = cost(one)
    assert again.cached_tokens > 0
    assert again.computed_tokens < first.computed_tokens / 4
