"""The programs in docs/inferlets.md run as they stand there."""

from __future__ import annotations

import re

import pytest

from pie.worker.programs.local import LocalEngine
from tests.house.tree import ROOT
from tests.inferlet.running import run

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (ROOT / "docs/inferlets.md").read_text("utf-8")
PROGRAMS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if "async def main" in block
]


@pytest.mark.parametrize("source", PROGRAMS, ids=range(len(PROGRAMS)))
async def test_a_program_of_the_guide_runs(local: LocalEngine, source: str) -> None:
    assert (await run(local, source, prompt="Tell me about the sea, please. " * 8)).result


async def test_the_guide_has_an_eviction_policy() -> None:
    assert any("ws.drop(" in source for source in PROGRAMS)
