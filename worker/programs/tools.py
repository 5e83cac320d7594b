"""Python functions of the operator's that programs may call: the host runs them, not the program.

Covers finding them, what they take as JSON Schema, and calling them. Does not cover how many a program may
have under way (`pie.worker.programs.errands`). For one event loop; plain functions run on threads.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from pie.pool.side_threads import SideThreads
from pie.wire.frames import Buffer
from pie.wire.programs import CallTool, ToolAnswer, ToolFacts, Trouble
from pie.worker.errors import ToolError
from pie.worker.programs.trouble import CallError
from pie.worker.settings import ProgramSettings

_THREADS = 16
"""Of plain functions, for all programs. One that hangs keeps its thread."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that programs may call."""

    name: str
    function: Callable[..., object]
    takes: type[BaseModel]

    def facts(self) -> ToolFacts:
        """Return what programs are told of it."""
        schema = self.takes.model_json_schema()
        schema.pop("title", None)
        return ToolFacts(self.name, inspect.getdoc(self.function) or "", json.dumps(schema))


class Toolbox:
    """The tools of one host. Use `close`.

    Args:
        tools: By what a program calls them.
        settings: Limits.
    """

    def __init__(self, tools: Sequence[Tool], settings: ProgramSettings) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._settings = settings
        self._threads = SideThreads("pie-tool", _THREADS)
        self.facts = tuple(tool.facts() for tool in tools)

    async def call(self, call: CallTool, arguments: bytes) -> tuple[ToolAnswer, Sequence[Buffer]]:
        """Call a tool; its result goes back as JSON.

        Raises:
            CallError: There is no such tool, the arguments do not fit, or it failed.
        """
        tool, limit_s = self._tools.get(call.name), self._settings.tool_timeout_s
        if tool is None:
            there = ", ".join(sorted(self._tools)) or "none"
            raise CallError(
                Trouble.NOT_ALLOWED,
                f"there is no tool {call.name!r}; those that are granted: {there} ([programs] tools)",
            )
        given = _given(tool, arguments, int(self._settings.http_bytes))
        try:
            async with asyncio.timeout(limit_s):
                result = await self._run(tool.function, given)
            data = msgspec.json.encode(result)
        except TimeoutError as error:
            late = f"{call.name} has not returned within {limit_s:g} s ([programs] tool_timeout_s)"
            raise _failed(late) from error
        except Exception as error:
            raise _failed(f"{call.name}: {type(error).__name__}: {error}") from error
        if len(data) > int(self._settings.http_bytes):
            large = f"what {call.name} returned is larger than {self._settings.http_bytes} bytes"
            raise _failed(f"{large} ([programs] http_bytes)")
        return ToolAnswer(call.call), [data]

    async def close(self) -> None:
        """End the threads; one that hangs is left behind."""
        await asyncio.to_thread(self._threads.close)

    async def _run(self, function: Callable[..., object], given: dict[str, object]) -> object:
        if inspect.iscoroutinefunction(function):
            return await function(**given)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, **given))


def load_tools(names: Sequence[str]) -> list[Tool]:
    """Return the functions that are named as `module:function` or `FILE.py:function`.

    Raises:
        ToolError: One cannot be had, or does not say what it takes.
    """
    tools = [tool_of(_function(name), name) for name in names]
    twice = {one.name for one in tools if sum(one.name == other.name for other in tools) > 1}
    if twice:
        raise ToolError(f"programs.tools: two tools are called {min(twice)!r}")
    return tools


def tool_of(function: object, where: str) -> Tool:
    """Return a function as a tool; `where` is what an error calls it.

    Raises:
        ToolError: It does not say what it takes.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise ToolError(f"programs.tools: {where} is no function")
    fields: dict[str, tuple[object, object]] = {}
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        for one in inspect.signature(function).parameters.values():
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                raise ToolError(
                    f"programs.tools: {where} takes {one}: only named parameters will do"
                )
            if one.name not in hints:
                raise ToolError(f"programs.tools: {where} does not say of what type {one.name} is")
            default = ... if one.default is one.empty else one.default
            fields[one.name] = (hints[one.name], default)
        made = typing.cast(
            type[BaseModel],
            create_model(  # type: ignore[call-overload]
                function.__name__, __config__=ConfigDict(extra="forbid"), **fields
            ),
        )
        tool = Tool(function.__name__, function, made)
        tool.facts()
    except (NameError, TypeError, ValueError, PydanticUserError) as error:
        raise ToolError(f"programs.tools: {where} does not say what it takes: {error}") from error
    return tool


def _given(tool: Tool, arguments: bytes, limit: int) -> dict[str, object]:
    """Return the arguments as the function's annotations want them."""
    if len(arguments) > limit:
        raise CallError(
            Trouble.BAD_CALL,
            f"arguments of more than {limit} bytes ([programs] http_bytes)",
        )
    try:
        taken = tool.takes.model_validate_json(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its arguments"
        raise CallError(Trouble.BAD_CALL, f"{tool.name}: {place}: {first['msg']}") from error
    return {name: getattr(taken, name) for name in type(taken).model_fields}


def _function(name: str) -> object:
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ToolError(f"programs.tools: {name!r} is neither module:function nor FILE.py:function")
    try:
        module = (
            _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        )
        return getattr(module, function)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ToolError(f"programs.tools: {name} cannot be had: {why}") from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"pie_user_tools.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _failed(message: str) -> CallError:
    return CallError(Trouble.TOOL_FAILED, message)
