"""Prefixes that a policy file names, at workers with real tiers, a real pool node and a real index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pie.index.settings import IndexSettings
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySet
from pie.worker.service import WorkerService
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.places import PAGE, Places, model_folder, until

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PREFIX = list(range(10, 50))
PAGES = len(PREFIX) // PAGE
HOT = list(range(60, 100))
SALTS = (None, "one", "two")


def policies() -> PolicySet:
    """Return them as a new process would."""
    return load_policies(
        f"""
        prefixes:
          lamp: {{tokens: {PREFIX}}}
        worker:
          rules:
            - match: {{prefix: lamp}}
              action: persist-prefix
            - match: {{hits: 2}}
              action: persist-prefix
        """,
        name="policies.yaml",
    )


@pytest.fixture
async def places(
    index_settings: IndexSettings, tmp_path: Path, tokenizer_folder: Path
) -> AsyncIterator[Places]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder))
    await places.start()
    yield places
    await places.close()


def pages_in(worker: WorkerService, tier: str) -> int:
    return worker.status().tier_pages.get(tier, 0)


async def test_a_named_prefix_is_on_disk_at_once_and_near_after_a_restart(
    places: Places, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"disk_kv_budget": "8MiB", "disk_kv_path": str(tmp_path / "kv")}
    first = await places.worker("w0", pool=False, policies=policies(), **disk)
    asker = await places.asker(first)
    for salt in SALTS:
        await asker.ask([*PREFIX, 1, 2], max_tokens=1, salt=salt)
        await asker.ask([*HOT, 1, 2], max_tokens=1, salt=salt)
    await until(lambda: pages_in(first, "disk") >= PAGES * len(SALTS))
    await until(lambda: pages_in(first, "host") >= 2 * PAGES * len(SALTS))
    assert pages_in(first, "disk") == PAGES * len(SALTS), (
        "others stay in host memory while there is room"
    )
    # Those that are used often are written too, though all their uses are in device memory.
    for _ in range(2):
        await asker.ask([*HOT, 1, 2], max_tokens=1)
    await until(lambda: pages_in(first, "disk") >= PAGES * len(SALTS) + len(HOT) // PAGE)
    assert first.status().pages_loaded == {} or not sum(first.status().pages_loaded.values())
    # As if it were killed: no page is saved.
    await first.close()
    again = await places.worker("w0", pool=False, policies=policies(), **disk)
    # What was used often is known to have been.
    await until(lambda: pages_in(again, "host") == PAGES * len(SALTS) + len(HOT) // PAGE)
    asker = await places.asker(again)
    for salt, cached in [*((salt, len(PREFIX)) for salt in SALTS), ("another", 0)]:
        answer = await asker.ask([*PREFIX, 3, 4], max_tokens=1, salt=salt)
        assert answer.started is not None
        assert answer.started.cached.host == cached


async def test_a_named_prefix_comes_from_the_pool_before_anybody_asks(places: Places) -> None:
    node = await places.pool()
    first = await places.worker("w0", policies=policies())
    await (await places.asker(first)).ask([*PREFIX, 1, 2], max_tokens=1)
    await until(lambda: node.status().stored >= PAGES)
    other = await places.worker("w1", policies=policies())
    await until(lambda: pages_in(other, "host") == PAGES)
    answer = await (await places.asker(other)).ask([*PREFIX, 3, 4], max_tokens=1)
    assert answer.started is not None
    assert answer.started.cached.host == len(PREFIX)
