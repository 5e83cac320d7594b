"""Tools: the operator's functions, run by the host for programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pie.wire.programs import CallTool, Trouble
from pie.worker.errors import ToolError
from pie.worker.programs.tools import Toolbox, load_tools
from pie.worker.programs.trouble import CallError
from pie.worker.settings import ProgramSettings
from tests.support import tool_functions

HERE = "tests.support.tool_functions"


@asynccontextmanager
async def box(*names: str, **fields: object) -> AsyncIterator[Toolbox]:
    tools = load_tools([f"{HERE}:{name}" for name in names])
    made = Toolbox(tools, ProgramSettings.model_validate(fields))
    yield made
    await made.close()


async def call(tools: Toolbox, name: str, **arguments: object) -> object:
    _, (data,) = await tools.call(CallTool(1, name), json.dumps(arguments).encode())
    return json.loads(bytes(data))


async def refused(tools: Toolbox, name: str, **arguments: object) -> CallError:
    with pytest.raises(CallError) as caught:
        await call(tools, name, **arguments)
    return caught.value


async def test_what_a_tool_takes_is_its_annotations() -> None:
    async with box("weather") as tools:
        (facts,) = tools.facts
    assert (facts.name, facts.description) == ("weather", "Say how the weather is at a place.")
    schema = json.loads(facts.schema)
    assert schema["required"] == ["place"]
    assert schema["properties"]["unit"]["enum"] == ["C", "F"]
    assert schema["additionalProperties"] is False


async def test_functions_run_on_threads_and_coroutines_on_the_loop() -> None:
    async with box("weather", "double") as tools:
        told = await call(tools, "weather", place="Brest")
        assert told == {"place": "Brest", "unit": "C", "thread": "pie-tool"}
        assert await call(tools, "double", numbers=[1, 2]) == [2, 4]


async def test_what_does_not_fit_is_told_by_name() -> None:
    async with box("weather") as tools:
        for arguments, said in (
            ({}, "weather: place: "),
            ({"place": "Brest", "unit": "K"}, "weather: unit: "),
            ({"place": "Brest", "wind": 1}, "weather: wind: "),
        ):
            error = await refused(tools, "weather", **arguments)
            assert error.trouble is Trouble.BAD_CALL
            assert error.message.startswith(said)
        with pytest.raises(CallError, match="weather: its arguments"):
            await tools.call(CallTool(1, "weather"), b"[")
        error = await refused(tools, "double")
        assert error.trouble is Trouble.NOT_ALLOWED
        assert error.message.endswith("those that are granted: weather ([programs] tools)")


async def test_a_tool_that_fails_hangs_or_says_too_much() -> None:
    tool_functions.GO_ON.clear()
    for name, limit_s, said in (
        ("hangs", 0.1, "has not returned within 0.1 s ([programs] tool_timeout_s)"),
        ("broken", 60, "broken: RuntimeError: no oil"),
        ("large", 60, "is larger than 4096 bytes"),
        ("not_json", 60, "not_json: TypeError"),
    ):
        async with box(name, tool_timeout_s=limit_s, http_bytes=4096) as tools:
            error = await refused(tools, name)
            tool_functions.GO_ON.set()
        assert error.trouble is Trouble.TOOL_FAILED
        assert said in error.message


def test_a_file_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "lamp.py").write_text('def light(n: int) -> int:\n    """Light."""\n    return n\n')
    (tool,) = load_tools([f"{tmp_path}/lamp.py:light"])
    assert tool.facts().description == "Light."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("weather", "is neither module:function nor FILE.py:function"),
        ("no.such.module:x", "cannot be had: ModuleNotFoundError"),
        ("/no/such.py:x", "cannot be had: FileNotFoundError"),
        (f"{HERE}:missing", "cannot be had: AttributeError"),
        (f"{HERE}:GO_ON", "is no function"),
        (f"{HERE}:unclear", "does not say of what type place is"),
        (f"{HERE}:many", "only named parameters will do"),
    ],
)
def test_what_cannot_be_a_tool_is_said_at_the_start(name: str, said: str) -> None:
    with pytest.raises(ToolError, match=r"^programs\.tools: ") as caught:
        load_tools([name])
    assert said in str(caught.value)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="two tools are called 'weather'"):
        load_tools([f"{HERE}:weather"] * 2)
