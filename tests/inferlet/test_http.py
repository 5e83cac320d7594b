"""Programs ask servers that are granted, through their host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pie.worker.programs.local import LocalEngine
from pie.worker.programs.web import Web
from pie.worker.settings import ProgramSettings
from tests.inferlet.running import ENDS_S, run, start
from tests.support.web_server import web_server

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def granting(local: LocalEngine, *origins: str, **fields: object) -> AsyncIterator[None]:
    """Grant servers to the programs that start meanwhile."""
    before = local.host._settings, local.host._web
    grants = [{"origin": origin, "methods": ["GET", "POST"]} for origin in origins]
    settings = ProgramSettings.model_validate(before[0].model_dump() | {"http": grants} | fields)
    local.host._settings, local.host._web = settings, Web(settings)
    yield
    await local.host._web.close()
    local.host._settings, local.host._web = before


async def test_a_program_asks_what_is_granted_and_is_told_what_is_not(local: LocalEngine) -> None:
    with web_server() as server:
        async with granting(local, server.origin()):
            ran = await run(
                local,
                """
                import json
                from pie.inferlet import Context, HttpFailedError, NotAllowedError

                async def main(ctx: Context, origin: str):
                    answer = await ctx.http("get", origin + "/echo", headers={"x-lamp": "oil"})
                    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
                    assert answer.json()["headers"]["x-lamp"] == "oil", answer.text
                    posted = await ctx.http("POST", origin + "/echo", json={"lamp": 1})
                    told = [posted.json()["body"]]
                    for method, url in (("GET", "http://127.0.0.1:1/"), ("DELETE", origin)):
                        try:
                            await ctx.http(method, url)
                        except NotAllowedError as error:
                            told.append(str(error))
                    try:
                        await ctx.http("GET", origin + "/big")
                    except HttpFailedError as error:
                        told.append(str(error))
                    return json.dumps(told)
                """,
                origin=server.origin(),
            )
        assert server.asked == ["GET /echo", "POST /echo", "GET /big"]
    posted, origin, method, large = json.loads(ran.result)
    assert json.loads(posted) == {"lamp": 1}
    assert "no grant names it" in origin
    assert "by GET, POST and not by DELETE" in method
    assert "http_bytes" in large


async def test_so_many_at_once_and_the_others_wait_their_turn(local: LocalEngine) -> None:
    with web_server() as server:
        async with granting(local, server.origin(), http_at_once=2):
            ran = await run(
                local,
                """
                import asyncio
                from pie.inferlet import BadCallError, Context

                async def main(ctx: Context, origin: str):
                    many = (ctx.http("GET", origin + "/echo") for _ in range(18))
                    first = await asyncio.gather(*many)
                    more = (ctx.http("GET", origin + "/echo") for _ in range(40))
                    got = await asyncio.gather(*more, return_exceptions=True)
                    refused = sum(isinstance(one, BadCallError) for one in got)
                    return f"{len(first)} {refused > 0} {all(one.status == 200 for one in first)}"
                """,
                origin=server.origin(),
            )
        assert ran.result == "18 True True"
        assert server.most_at_once <= 2


async def test_a_program_that_ends_gives_up_what_it_asked(local: LocalEngine) -> None:
    with web_server() as server:
        async with granting(local, server.origin()):
            running = await start(
                local,
                """
                from pie.inferlet import Context

                async def main(ctx: Context, origin: str):
                    await ctx.http("GET", origin + "/slow")
                """,
                origin=server.origin(),
            )
            async with asyncio.timeout(ENDS_S):
                while not server.asked:  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(0.02)
            running.cancel()
            async with asyncio.timeout(ENDS_S):
                await running.ended
            assert not running.errands._tasks
