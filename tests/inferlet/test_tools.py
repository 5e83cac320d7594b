"""Programs call tools that the host runs."""

from __future__ import annotations

import json
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pie.worker.programs.local import LocalEngine
from pie.worker.programs.tools import Toolbox, load_tools
from pie.worker.settings import ProgramSettings
from tests.house.tree import ROOT
from tests.inferlet.running import run

pytestmark = pytest.mark.asyncio(loop_scope="session")

AGENT = ROOT / "examples/inferlets/agent.py"


@asynccontextmanager
async def granting(local: LocalEngine, *names: str) -> AsyncIterator[None]:
    """Grant tools to the programs that start meanwhile."""
    before = local.host._tools
    local.host._tools = Toolbox(load_tools(names), ProgramSettings())
    yield
    await local.host._tools.close()
    local.host._tools = before


async def test_a_program_calls_what_is_granted_and_sees_what_it_takes(local: LocalEngine) -> None:
    where = "tests.support.tool_functions"
    async with granting(local, f"{where}:weather", f"{where}:broken"):
        ran = await run(
            local,
            """
            import asyncio, json
            from pie.inferlet import BadCallError, Context, NotAllowedError, ToolFailedError

            async def main(ctx: Context):
                tool = ctx.tools[0]
                assert (tool.name, tool.schema["required"]) == ("weather", ["place"])
                assert ctx.new_context().tools == ctx.tools
                places = await asyncio.gather(*(ctx.tool("weather", place=p) for p in "abc"))
                told = ["".join(one["place"] for one in places)]
                for error, call in (
                    (BadCallError, ctx.tool("weather", place="a", unit="K")),
                    (ToolFailedError, ctx.tool("broken")),
                    (NotAllowedError, ctx.tool("other")),
                ):
                    try:
                        await call
                    except error as found:
                        told.append(str(found))
                return json.dumps(told)
            """,
        )
    places, bad, broken, other = json.loads(ran.result)
    assert places == "abc"
    assert bad.startswith("weather: unit: ")
    assert broken == "broken: RuntimeError: no oil"
    assert "those that are granted: weather, broken" in other or "broken, weather" in other


async def test_the_agent_uses_tools_that_are_granted(local: LocalEngine) -> None:
    async with granting(local, f"{AGENT}:calculate"):
        # Which way a model of random weights goes is chance; most of the time it acts at some step.
        said: list[str] = []
        for _ in range(30):
            ran = await run(
                local, AGENT.read_text("utf-8"), prompt="6 times 7?", steps=4, temperature=1.5
            )
            said = ran.said
            assert said[-1] == f"Answer: {ran.result}"
            if said[0].startswith("Action: calculate["):
                break
    calculate = runpy.run_path(str(AGENT))["calculate"]
    assert said[1] == f"Observation: {calculate(said[0][18:-1])}"
