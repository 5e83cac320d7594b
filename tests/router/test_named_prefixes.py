"""Cluster policies that select by a prefix of the policy file: a router knows its pages by its own tokenizer."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from pie.page.events import Epoch, PlaceId
from pie.page.key import PageKey
from pie.policies.loader import load_policies
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from tests.router.conftest import Cluster, until

STORY = "The lamp of the lighthouse turns once in ten seconds. " * 8
DESK = "You are the desk of the harbour. " * 8
OTHER = "Nothing of that kind stands at the beginning here. " * 8
POLICIES = f"""
prefixes:
  story: {{text: "{STORY}"}}
  desk: {{system: "{DESK}"}}
cluster:
  replication: {{policy: replicate, copies: 2, prefix: story}}
  migration:
    - {{policy: replicate, copies: 2, prefix: desk}}
"""


@pytest.mark.live
async def test_prompts_that_begin_with_a_named_prefix_get_their_copies_and_no_others(
    cluster: Cluster,
) -> None:
    nodes = [
        PoolNode(
            PlaceId(f"pool-{number}"),
            PoolSettings.model_validate({"ram_budget": "1MiB"}),
            index_url=cluster.index.url,
            index_settings=cluster.index,
            epoch=Epoch(100 + number),
            address="tcp://127.0.0.1:0",
        )
        for number in range(2)
    ]
    cluster.mock("w0")
    router = RouterService(
        RouterSettings(port=0),
        index_url=cluster.index.url,
        index=cluster.index,
        policies=load_policies(POLICIES, name="p.yaml"),
    )
    cluster.routers.append(router)
    try:
        for node in nodes:
            await node.start()
        await router.start()
        await cluster.workers(router, 1)
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            short = "prefixes: {story: {text: Once}, desk: {system: Ahoy}, key: {key: %s}}" % (
                "ab" * 32
            )
            checked = await client.post("/admin/policies", json={"text": short, "check": True})
            # A system message comes with the words of the template.
            (said,) = checked.json()["warnings"]
            assert said.startswith("1:20: prefixes.story.text: no page is meant: it is ")
            assert said.endswith(f" tokens, and a page 16 of {model!r}")
            good = await client.post("/admin/policies", json={"text": POLICIES, "check": True})
            assert good.json()["warnings"] == []

            async def ask() -> None:
                for prompt, salt in (
                    (STORY, None),
                    (STORY, "mine"),
                    (OTHER, None),
                    (OTHER, "mine"),
                ):
                    body = {"model": model, "prompt": f"{prompt} And then?", "max_tokens": 1}
                    body |= {} if salt is None else {"cache_salt": salt}
                    (await client.post("/v1/completions", json=body)).raise_for_status()
                messages = [
                    {"role": "system", "content": DESK},
                    {"role": "user", "content": "Who is there?"},
                ]
                body = {"model": model, "messages": messages, "max_tokens": 1}
                (await client.post("/v1/chat/completions", json=body)).raise_for_status()

            async def raised() -> list[str]:
                events = (await client.get("/admin/policies/events")).json()["events"]
                assert not [one for one in events if one["action"] == "fail"]
                return [one["group"] for one in events if one["action"] == "raise"]

            await ask()
            conductor = router._conductor
            assert conductor is not None
            await until(lambda: conductor.leads)
            found: list[str] = []
            async with asyncio.timeout(60):
                while len(found) < 3:
                    await ask()
                    found = await raised()
            pages = conductor._prefixes.by_name()
            assert len(pages["story"].pages) > 1
            assert len(pages["desk"].pages) > 1
            both = pages["story"].pages | pages["desk"].pages
            assert len(found) == 3
            mine = {bytes.fromhex(group) for group in found} - both
            assert len(mine) == 1, "whoever's prompts begin so"
            (key,) = mine
            assert conductor._prefixes.names_of_key(PageKey(key)) == {"story"}
    finally:
        for node in nodes:
            await node.close()
