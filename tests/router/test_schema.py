"""Whatever the OpenAPI document allows, and whatever it forbids, is answered and never fails us."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis import GenerationMode

from tests.router.conftest import Cluster

EXAMPLES = 10
CHECKS = list(HealthCheck)
NEEDED = {"model", "messages", "prompt", "tokens", "input"}
PLAIN = {"messages": [{"role": "user", "content": "Why?"}], "prompt": "Why?", "input": "Why?"}


def sensible(body: dict[str, Any], some: set[int]) -> dict[str, Any]:
    """Keep a few of a body's optional fields: all of them together contradict each other."""
    optional = sorted(body.keys() - NEEDED)
    kept = {optional[number % len(optional)] for number in some if optional}
    sensible = {name: body[name] for name in body if name in NEEDED | kept} | {"model": "mock"}
    if len(some) != 1:
        sensible |= {name: value for name, value in PLAIN.items() if name in body}
    return sensible


@pytest.mark.timeout(120)
async def test_nothing_that_the_document_names_makes_the_router_fail(cluster: Cluster) -> None:
    cluster.mock("w0")
    router = await cluster.router(1)
    schema = await asyncio.to_thread(
        schemathesis.openapi.from_url, f"{router.url}/openapi.json", wait_for_schema=10
    )
    statuses: dict[str, set[int]] = {}

    def ask(operation: Any, mode: GenerationMode) -> None:
        @given(operation.as_strategy(generation_mode=mode), st.sets(st.integers(0, 99), max_size=2))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=CHECKS,
        )
        def never_fails(case: Any, some: set[int]) -> None:
            if isinstance(case.body, dict) and "model" in case.body and mode.is_positive:
                case.body = sensible(case.body, some)
            answer = case.call(base_url=router.url, timeout=20)
            statuses.setdefault(operation.label, set()).add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]

        never_fails()

    found: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in found]
    for operation in operations:
        modes = [GenerationMode.POSITIVE]
        if operation.body:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            await asyncio.to_thread(ask, operation, mode)
    assert len(statuses) == len(operations) > 10
    for label in (
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "GET /status",
        "POST /tokenize",
        "POST /detokenize",
    ):
        assert 200 in statuses[label], statuses
