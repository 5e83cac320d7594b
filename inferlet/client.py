"""Running programs on a cluster, from Python: `await pie.inferlet.run(fn, at=URL, …)`.

Covers sending a program to a router, its messages in both directions, and its end. Does not cover what the
router does with it (docs/inferlets.md has the HTTP interface).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pie.inferlet.errors import EndedError, NotRunError
from pie.inferlet.parameters import Value
from pie.inferlet.upload import ProgramFunction, Upload, upload_of

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 10.0
_SILENT_S = 60.0
"""A router says every ten seconds that a program still runs."""
_DATA = "data: "
_DONE = "[DONE]"
_OK, _NOT_FOUND, _TOO_MANY = 200, 404, 429
_AGAIN_S = 0.5


class RunEvent(msgspec.Struct):
    """What a router tells of a run."""

    type: str = ""
    """`started`, `said`, `printed`, `running` or `ended`."""
    run: str = ""
    worker: str = ""
    text: str = ""
    reason: str = ""
    result: str = ""
    error: str = ""


class _Installed(msgspec.Struct):
    id: str


class _ErrorDetails(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetails


@dataclass(frozen=True, slots=True)
class Where:
    """A cluster, and how to ask it.

    Attributes:
        url: A router's address, `http://HOST:PORT`.
        token: Its API token, where it has one.
    """

    url: str
    token: str = ""


async def run(
    function: ProgramFunction,
    *,
    at: str,
    token: str = "",
    model: str | None = None,
    begins_with: str | Sequence[Mapping[str, str]] | None = None,
    cache_salt: str | None = None,
    session_id: str | None = None,
    messages: AsyncIterable[str] | None = None,
    on_said: Callable[[str], None] = print,
    on_printed: Callable[[str], None] = lambda _: None,
    **arguments: Value,
) -> str:
    """Run a program on a cluster and return its result, as text.

    Args:
        function: An `async def` that takes a `Context` and then what `arguments` names. The file that it
            stands in is sent, so it may use whatever else is there.
        at: A router's address, `http://HOST:PORT`.
        token: Its API token, where it has one.
        model: On which model; by default the one that is served.
        begins_with: What the program's first working set begins with, a text or messages: it runs where
            most of that is held. By default the argument `prompt` as a user's message.
        cache_salt: Share cached pages only with requests that carry the same salt.
        session_id: The conversation that its pages are of: it runs where the latest request of that ran, all else being
            equal, and the rule `keep-session` keeps its pages for the next run or turn.
        messages: What `ctx.listen()` gets, one after another, and then None; without any, None at once.
        on_said: Called with each message of the program.
        on_printed: Called with what it prints.
        **arguments: Passed to the function.

    Raises:
        BadCallError: The function cannot be sent.
        NotRunError: The cluster did not run it, or was lost meanwhile.
        EndedError: It did not end well.
    """
    body: dict[str, object] = {"arguments": arguments}
    if model is not None:
        body["model"] = model
    if begins_with is not None:
        body["begins_with"] = begins_with if isinstance(begins_with, str) else list(begins_with)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if session_id is not None:
        body["session_id"] = session_id
    end = RunEvent()
    stream = run_upload(upload_of(function), Where(at, token), body, messages or no_messages())
    async with aclosing(stream):
        async for event in stream:
            if event.type == "said":
                on_said(event.text)
            elif event.type == "printed":
                on_printed(event.text)
            end = event
    if end.reason != "finished":
        raise EndedError(end.error or f"the program was ended: {end.reason}", end.reason)
    return end.result


async def no_messages() -> AsyncGenerator[str, None]:
    """Yield nothing: who runs a program has no more to say to it."""
    none: tuple[str, ...] = ()
    for message in none:
        yield message


async def run_upload(
    upload: Upload,
    where: Where,
    body: Mapping[str, object],
    messages: AsyncIterable[str] | None = None,
) -> AsyncGenerator[RunEvent, None]:
    """Run a program on a cluster and yield what is told of it; the last event has the type `ended`.

    Leaving early ends the program.

    Args:
        upload: The program.
        where: The cluster.
        body: What is said of the run, as its HTTP interface takes it.
        messages: What the program hears; None where the caller sends it by another way.

    Raises:
        NotRunError: The cluster did not run it, or was lost meanwhile.
    """
    async with _client(where) as client:
        kept = await _installed(client, upload)
        content = msgspec.json.encode({**body, "entry": upload.entry})
        path = f"/v1/inferlets/{kept}/runs"
        talking: asyncio.Task[None] | None = None
        try:
            async with client.stream("POST", path, content=content) as answer:
                if answer.status_code != _OK:
                    raise NotRunError(_told(answer.status_code, await answer.aread()))
                async for line in answer.aiter_lines():
                    event = _event(line)
                    if event is None:
                        continue
                    if event.type == "started" and messages is not None:
                        talking = asyncio.create_task(_talk(client, event.run, messages))
                    yield event
                    if event.type == "ended":
                        return
                    if talking is not None and talking.done():
                        talking.result()
            raise NotRunError(f"{where.url} ended the answer before the program's end")
        finally:
            if talking is not None:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)


@asynccontextmanager
async def _client(where: Where) -> AsyncGenerator[httpx.AsyncClient, None]:
    # Programs import this package too, and need no HTTP.
    import httpx  # noqa: PLC0415

    headers = {"content-type": "application/json"}
    if where.token:
        headers["authorization"] = f"Bearer {where.token}"
    try:
        timeout = httpx.Timeout(_SILENT_S, connect=_CONNECT_S)
        async with httpx.AsyncClient(
            base_url=where.url, headers=headers, timeout=timeout
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise NotRunError(f"no router answers at {where.url} ({why})") from error


async def _installed(client: httpx.AsyncClient, upload: Upload) -> str:
    content = msgspec.json.encode({"name": upload.name, "source": upload.source})
    answer = await client.post("/v1/inferlets", content=content)
    if answer.status_code != _OK:
        raise NotRunError(_told(answer.status_code, answer.content))
    try:
        return msgspec.json.decode(answer.content, type=_Installed).id
    except msgspec.DecodeError as error:
        raise NotRunError("what answers is not a Pie router") from error


async def _talk(client: httpx.AsyncClient, run: str, messages: AsyncIterable[str]) -> None:
    """Send a program its messages, and then that there are no more."""

    async def send(text: str | None) -> bool:
        """Return whether there is still somebody to send to."""
        content = msgspec.json.encode({"text": text})
        while True:
            answer = await client.post(f"/v1/inferlet-runs/{run}/messages", content=content)
            if answer.status_code == _OK:
                return True
            if answer.status_code == _NOT_FOUND:
                return False
            if answer.status_code != _TOO_MANY:
                raise NotRunError(_told(answer.status_code, answer.content))
            await asyncio.sleep(_AGAIN_S)

    async for text in messages:
        if not await send(text):
            return  # It has ended.
    await send(None)


def _event(line: str) -> RunEvent | None:
    """Return the event of a line; None where it has none.

    Raises:
        NotRunError: The router says that something went wrong.
    """
    if not line.startswith(_DATA) or line == _DATA + _DONE:
        return None
    data = line[len(_DATA) :].encode()
    event = msgspec.json.decode(data, type=RunEvent)
    if not event.type:
        raise NotRunError(_told(_OK, data))
    return event


def _told(status: int, content: bytes) -> str:
    """Return what a router said that is wrong."""
    try:
        return msgspec.json.decode(content, type=_Error).error.message
    except msgspec.DecodeError:
        return f"what answers is not a Pie router: it said {status}"
