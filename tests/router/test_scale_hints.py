"""How many workers a model wants, as clients and autoscalers read it: with the load it rises, and falls."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx

from tests.router.conftest import WAIT_S, Cluster, until

POLICIES = """
cluster:
  scale: {policy: by-load, max: 4, waiting: 2, rise_after: 100ms, fall_after: 1s}
"""
ASK: Any = {
    "model": "mock",
    "messages": [{"role": "user", "content": "How many are we?"}],
    "max_tokens": 8,
}


async def test_the_hint_rises_with_the_load_and_falls_after_it_at_every_router(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.mock("w0", answers_at_once=1, token_delay_s=0.03)
    one, other = [await cluster.router(1) for _ in range(2)]
    applied = await http.post(f"{one.url}/admin/policies", json={"text": POLICIES})
    assert applied.status_code == 200, applied.text

    def wanted() -> list[int]:
        """Return what each router says; -1 where it says nothing."""
        return [next((w.wanted for w in r.status().wanted), -1) for r in (one, other)]

    await until(lambda: wanted() == [1, 1])
    asks = [
        asyncio.create_task(http.post(f"{one.url}/v1/chat/completions", json=ASK, timeout=WAIT_S))
        for _ in range(16)
    ]
    await until(lambda: wanted() == [4, 4])
    for router in (one, other):
        metrics = (await http.get(f"{router.url}/metrics")).text
        assert re.search(r'^pie_router_wanted_workers\{model="mock"\} 4.0$', metrics, re.MULTILINE)
        (line,) = (await http.get(f"{router.url}/status")).json()["wanted"]
        assert (line["model"], line["workers"], line["policy"]) == ("mock", 1, "by-load")
        assert "wait" in line["reason"]
    for answer in await asyncio.gather(*asks):
        assert answer.status_code == 200
    await until(lambda: wanted() == [1, 1])
    events = (await http.get(f"{other.url}/admin/policies/events")).json()["events"]
    hints = [(e["model"], e["workers"]) for e in reversed(events) if e["action"] == "hint"]
    assert hints[0] == ("mock", 1)
    assert hints[-1] == ("mock", 1)
    assert ("mock", 4) in hints
