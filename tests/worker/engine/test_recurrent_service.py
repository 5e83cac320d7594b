"""Workers that serve recurrent and hybrid models, over the wire with a real index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pie.index.settings import IndexSettings
from pie.page.events import Part, PartMask, PlaceId, Tier, part_bit
from pie.page.key import page_keys
from pie.page.layout import usable_run
from pie.worker import offload
from pie.worker.purity import UNNAMED_CONTEXT_TOKENS
from tests.support.models import CONTEXT_TOKENS, tiny_module
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.places import PAGE, Places, model_folder, until
from tests.worker.engine.test_models import expect, prompts

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PROMPT = list(range(10, 60))
STATE = part_bit(Part.STATE, Tier.DEVICE)
FULL = part_bit(Part.FULL, Tier.DEVICE)


@pytest.fixture(params=["mamba2", "falcon_h1", "jamba"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def places(
    index_settings: IndexSettings, tmp_path: Path, tokenizer_folder: Path, kind: str
) -> AsyncIterator[Places]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder, kind))
    await places.start()
    yield places
    await places.close()


async def test_serves_and_tells_the_index_where_later_prompts_can_go_on(
    places: Places, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "state_stride_tokens": 2 * PAGE,
        "attention": "torch",
        "host_kv_budget": 0,
    }
    node = await places.pool()
    worker = await places.worker("w0", **options)
    asker = await places.asker(worker)
    asked = [(prompt, (await asker.send(prompt, 12))[1]) for prompt in prompts(6)]
    for prompt, answer in asked:
        await asker.ended(answer)
        expect(tiny_module(kind), prompt, answer)
    await asker.ask(PROMPT, 2)

    record = worker.record
    assert record.model_root is not None
    assert record.context_tokens == (UNNAMED_CONTEXT_TOKENS if kind == "mamba2" else CONTEXT_TOKENS)
    pages = PartMask(0 if kind == "mamba2" else FULL)
    both = PartMask(pages | STATE)
    keys = page_keys(record.model_root, PROMPT, PAGE)
    held = [pages, both, pages, both, pages, both]

    def is_known() -> bool:
        return list(places.mirror.matches(keys).get(PlaceId("w0"), ())) == held

    await until(is_known)
    parts = [Part(part) for part in record.parts]
    run = usable_run(held, parts=parts, window_tokens=record.window_tokens, page_tokens=PAGE)
    warm = await asker.ask(PROMPT, 2)
    assert warm.cached.device == run * PAGE == 48

    status = worker.status()
    assert status.snapshots_taken
    assert status.state_slots == status.state_slots_free + status.snapshots_idle

    await until(lambda: worker.status().store_queue_pages == 0)
    assert node.status().used_bytes
    # A load must not end because the machine is busy.
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", 20.0)
    other = await places.asker(await places.worker("w1", **options))
    fed = await other.ask(PROMPT, 12)
    assert (fed.cached.device, fed.cached.pool) == (0, 48)
    expect(tiny_module(kind), PROMPT, fed)
