"""A prefix that policies name is warm after every process was killed and started again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.support.serving import LONG_S, Serving

pytestmark = [
    pytest.mark.soak,
    pytest.mark.live,
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(600),
]

PAGE_TOKENS = 16
SYSTEM = "You keep the log of a lighthouse. " * 12
POLICIES = f"""
prefixes:
  keeper: {{system: "{SYSTEM}"}}
worker:
  rules:
    - match: {{prefix: keeper}}
      action: persist-prefix
"""


def ask(serving: Serving, system: str, text: str, salt: str | None) -> int:
    body: dict[str, object] = {} if salt is None else {"cache_salt": salt}
    body |= {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "model": "smollm2",
        "max_tokens": 1,
    }
    answer = httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=LONG_S)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_named_prefix_is_warm_after_every_process_was_killed(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text(POLICIES)
    settings = {
        "PIE_CLUSTER__WORKERS": "1",
        "PIE_POOL__NODES": "0",
        "PIE_MODEL__DEVICE_KV_BUDGET": "32MiB",
        "PIE_MODEL__HOST_KV_BUDGET": "32MiB",
        "PIE_MODEL__DISK_KV_BUDGET": "64MiB",
        "PIE_MODEL__DISK_KV_PATH": str(tmp_path / "kv"),
        "PIE_POLICIES__FILE": "policies.yaml",
    }
    other = SYSTEM.replace("lighthouse", "harbour")
    found: list[list[int]] = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        # An index of its own each: what was killed holds its lease for ten seconds more.
        index = {"PIE_INDEX__DATA_DIR": f"{tmp_path}/index-{number}"}
        serving = Serving(tmp_path, settings | index)
        try:
            serving.wait_until_said("Ctrl-C stops it")
            serving.wait_until_ready()
            if found:
                wait_until_in(serving, "host", 10)
            found.append(
                [
                    ask(serving, system, "Which ships passed?", salt)
                    for salt in (None, "a tenant's")
                    for system in (SYSTEM, other)
                ]
            )
            wait_until_in(serving, "disk", 10)
        finally:
            serving.stop(number)
    both = list(zip(*found, strict=True))
    for (cold, warm), (other_cold, other_lost) in zip(both[::2], both[1::2], strict=True):
        assert cold < PAGE_TOKENS
        assert other_cold < 2 * PAGE_TOKENS
        assert warm >= 5 * PAGE_TOKENS, "whichever tenant's"
        assert other_lost < 2 * PAGE_TOKENS, "nobody wanted this one to persist"


def wait_until_in(serving: Serving, tier: str, pages: int) -> None:
    deadline_s = time.monotonic() + LONG_S
    while True:
        (worker,) = httpx.get(f"{serving.url}/status", timeout=LONG_S).json()["workers"]
        if worker["gauges"].get(f"tier_pages.{tier}", 0) >= pages:
            return
        assert time.monotonic() < deadline_s, worker
        time.sleep(0.2)
