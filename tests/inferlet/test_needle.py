"""On SmolLM2, programs that evict by attention answer what a window of as many slots has lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pydantic import ByteSize

from pie.worker.programs.local import LocalEngine
from pie.worker.settings import ProgramSettings
from tests.house.tree import ROOT
from tests.inferlet.running import Ran, run
from tests.support.models import smollm2_settings

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.asyncio(loop_scope="module"),
]

FILLING = (
    "The harbour was quiet in the morning and the boats lay still. ",
    "A gull sat on the wall and looked at the water for a long time. ",
    "In the afternoon the wind turned and small waves ran up the beach. ",
    "The baker sold his last loaf before noon and closed the shop. ",
    "Children played with a red ball between the nets. ",
    "An old man mended a sail and hummed a song. ",
)
PROMPT = (
    "Read this text and remember it. "
    + "".join(FILLING[at % 6] for at in range(7))
    + "The secret password is tangerine. "
    + "".join(FILLING[at % 6] for at in range(7, 40))
    + "\n\nWhat is the secret password in the text? Answer with the password."
)


EARLY = (
    "Read this text and remember it. The secret password is apple. "
    + "".join(FILLING[at % 6] for at in range(24))
    + "\n\nWhat is the secret password in the text? Answer with the password."
)
"""A needle that much is read after: H2O counts all the attention that a slot was paid, so that it takes to
what stands early, and finds no needle amid a text that is asked about only at its end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smollm2() -> AsyncIterator[LocalEngine]:
    local = LocalEngine(smollm2_settings(device_kv_budget=ByteSize(128 << 20)), ProgramSettings())
    await local.start()
    yield local
    await local.close()


async def ran(local: LocalEngine, name: str, **arguments: object) -> Ran:
    source = (ROOT / f"examples/inferlets/{name}.py").read_text("utf-8")
    return await run(local, source, max_tokens=16, **arguments)


async def test_snapkv_keeps_a_needle_that_truncation_loses(smollm2: LocalEngine) -> None:
    snapkv = await ran(smollm2, "snapkv-eviction", prompt=PROMPT, keep=0.25)
    sink = await ran(smollm2, "attention-sink", prompt=PROMPT, window=143)
    assert "tangerine" in snapkv.result
    assert "tangerine" not in sink.result
    assert snapkv.said == ["147 of 590 slots kept, in 10 pages"]


async def test_h2o_keeps_a_needle_that_truncation_loses(smollm2: LocalEngine) -> None:
    h2o = await ran(smollm2, "trackb-h2o", prompt=EARLY, heavy=157, recent=27)
    sink = await ran(smollm2, "attention-sink", prompt=EARLY, window=180)
    assert "apple" in h2o.result
    assert "apple" not in sink.result
    assert " 185 kept in 12 pages" in h2o.said[0]
