"""On SmolLM2, `snapkv-eviction` answers from a quarter of the slots what a window of the newest ones has lost."""

from __future__ import annotations

import pytest
from pydantic import ByteSize

from pie.worker.programs.local import LocalEngine
from pie.worker.settings import ProgramSettings
from tests.house.tree import ROOT
from tests.inferlet.running import run
from tests.support.models import smollm2_settings

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("smollm2")]

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


async def test_snapkv_keeps_a_needle_that_truncation_loses() -> None:
    settings = smollm2_settings(device_kv_budget=ByteSize(128 << 20))
    local = LocalEngine(settings, ProgramSettings())
    await local.start()
    try:
        programs = ROOT / "examples/inferlets"
        snapkv = await run(
            local,
            (programs / "snapkv-eviction.py").read_text("utf-8"),
            prompt=PROMPT,
            keep=0.25,
            max_tokens=16,
        )
        sink = await run(
            local,
            (programs / "attention-sink.py").read_text("utf-8"),
            prompt=PROMPT,
            window=143,
            max_tokens=16,
        )
    finally:
        await local.close()
    assert "tangerine" in snapkv.result
    assert "tangerine" not in sink.result
    assert snapkv.said == ["147 of 590 slots kept, in 10 pages"]
