"""Whatever the OpenAPI document allows, and whatever it forbids, is answered and never fails us."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis import GenerationMode
from starlette.routing import Route

from pie.router.service import RouterService
from tests.router.conftest import Cluster

CHECKS = list(HealthCheck)
NEEDED = {"model", "messages", "prompt", "tokens", "input", "source", "name", "text", "policies"}
PLAIN = {"messages": [{"role": "user", "content": "Why?"}], "prompt": "Why?", "input": "Why?"}


def sensible(body: dict[str, Any], some: set[int], known: Mapping[str, str]) -> dict[str, Any]:
    """Keep a few of a body's optional fields: all of them together contradict each other."""
    optional = sorted(body.keys() - NEEDED)
    kept = {optional[number % len(optional)] for number in some if optional}
    sensible = {name: body[name] for name in body if name in NEEDED | kept}
    if "model" in body:
        sensible["model"] = "mock"
    if "previous_response_id" in sensible:
        sensible["previous_response_id"] = known["response_id"]
    if len(some) != 1:
        sensible |= {name: value for name, value in PLAIN.items() if name in body}
    return sensible


async def made(http: httpx.AsyncClient, router: RouterService) -> dict[str, str]:
    """Return names of things that are there, by the parameters of paths that they are for."""
    program = {"name": "p", "source": "async def main(ctx): ..."}
    asked = {"model": "mock", "input": "Why?"}
    response = await http.post(f"{router.url}/v1/responses", json=asked)
    installed = await http.post(f"{router.url}/v1/inferlets", json=program)
    return {
        "response_id": response.json()["id"],
        "request_id": response.headers["x-pie-request-id"],
        "id": installed.json()["id"],
        "model": "mock",
        "worker": "spare",
        "run": "none",
        "version": "0",
    }


async def asked(cluster: Cluster, http: httpx.AsyncClient, examples: int, *, repeats: bool) -> None:
    """Ask a router for everything that its document names, in `examples` ways of each kind."""
    for name in ("w0", "spare"):
        cluster.mock(name, takes_programs=True)
    router = await cluster.router(2)
    url = f"{router.url}/openapi.json"
    schema = await asyncio.to_thread(schemathesis.openapi.from_url, url, wait_for_schema=10)
    known = await made(http, router)
    statuses: dict[str, set[int]] = {}

    def ask(operation: Any, mode: GenerationMode) -> None:
        @given(operation.as_strategy(generation_mode=mode), st.sets(st.integers(0, 99), max_size=2))
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=repeats,
            phases=[Phase.generate],
            suppress_health_check=CHECKS,
        )
        def never_fails(case: Any, some: set[int]) -> None:
            if isinstance(case.body, dict) and mode.is_positive:
                case.body = sensible(case.body, some, known)
            for name in case.path_parameters or {}:
                # What is deleted is there once.
                if len(some) != 1 or mode.is_negative:
                    case.path_parameters[name] = known[name]
            answer = case.call(base_url=router.url, timeout=20)
            statuses.setdefault(operation.label, set()).add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"]

        never_fails()

    found: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in found]
    # What makes others answer nothing comes last.
    for operation in sorted(
        operations, key=lambda one: (one.method == "delete", "drain" in one.path)
    ):
        modes = [GenerationMode.POSITIVE]
        if operation.body:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            await asyncio.to_thread(ask, operation, mode)
    assert statuses.keys() == {operation.label for operation in operations}
    answered = {label for label, seen in statuses.items() if 200 in seen}
    # No model has embeddings, and runs have ended by the time that they are told anything.
    silent = {
        "POST /v1/embeddings",
        "POST /v1/inferlet-runs/{run}/messages",
        "DELETE /v1/inferlet-runs/{run}",
    }
    assert answered == statuses.keys() - silent, statuses


async def test_nothing_that_the_document_names_makes_the_router_fail(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    await asked(cluster, http, 10, repeats=True)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_nothing_makes_the_router_fail_however_long_one_tries(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    await asked(cluster, http, 300, repeats=False)


async def test_the_document_names_every_path_and_method_that_there_is(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    router = await cluster.router(0)
    document = (await http.get(f"{router.url}/openapi.json")).json()
    named = {
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    routes = router._server.config.app.routes  # type: ignore[union-attr]
    there = {
        (method, route.path.replace(":path}", "}"))
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert there - named == {("GET", "/openapi.json")}
    assert named <= there
