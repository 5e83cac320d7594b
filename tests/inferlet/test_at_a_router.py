"""Programs on a cluster: installed and run over HTTP, from Python, at the worker that has their prefix."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.inferlet import BadCallError, EndedError, NotRunError, run
from pie.inferlet.client import RunEvent, Where, run_upload
from pie.inferlet.upload import upload_of
from pie.router.key_file import editing
from pie.worker.service import WorkerService
from tests.inferlet import programs_to_send as programs
from tests.inferlet.places import WAIT_S, Places
from tests.support.redis_server import redis_server

__all__ = ["redis_server"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("at a router")]

LONG = (
    "The keeper of the light wrote down the weather of every day, and the ships that came by. " * 3
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedServer
) -> AsyncIterator[Places]:
    """Two workers and a router."""
    before = torch.get_num_threads()
    index = IndexSettings(
        url=redis_server.url, key_prefix="programs", ttl_s=10.0, poll_s=0.05, request_timeout_s=20.0
    )
    places = Places(index, model_folder, tmp_path_factory.mktemp("cache"))
    await places.worker("worker-0")
    await places.worker("worker-1")
    await places.start_router(2, max_body_bytes=16 << 20)
    yield places
    await places.close()
    torch.set_num_threads(before)


@pytest_asyncio.fixture(loop_scope="module")
async def http(places: Places) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=places.url, timeout=WAIT_S) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not become so in time"
        await asyncio.sleep(0.02)


def is_empty(worker: WorkerService) -> bool:
    status = worker.status()
    return not status.pages_in_use and not status.pages_writable


async def events(places: Places, function: object, **arguments: object) -> list[RunEvent]:
    stream = run_upload(upload_of(function), Where(places.url), {"arguments": arguments})  # type: ignore[arg-type]
    return [event async for event in stream]


async def test_a_function_runs_on_the_cluster_and_its_result_comes_back(places: Places) -> None:
    said: list[str] = []
    printed: list[str] = []
    result = await run(
        programs.answer,
        at=places.url,
        on_said=said.append,
        on_printed=printed.append,
        prompt="What is a light?",
        max_tokens=6,
    )
    assert result
    assert said == ["0"]
    assert "".join(printed) == "printed\n"


async def test_a_program_runs_where_its_prefix_is(places: Places, http: httpx.AsyncClient) -> None:
    """Each of two conversations stays at its worker, whoever is asked in between."""
    homes: dict[str, str] = {}
    for turn in range(2):
        for name in ("one", "two"):
            told = await events(places, programs.answer, prompt=f"{name}: {LONG}")
            cached = int(next(event.text for event in told if event.type == "said"))
            worker = told[0].worker
            if turn:
                assert worker == homes[name]
                assert cached >= 64
            homes[name] = worker
            await places.all_told()
    answer = await http.post(
        "/v1/chat/completions",
        json={
            "model": "model",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": f"one: {LONG}"}],
        },
    )
    assert answer.headers["x-pie-worker"] == homes["one"]
    assert int(answer.headers["x-pie-cached-tokens"]) >= 64


async def test_what_it_begins_with_can_be_said(places: Places) -> None:
    turns = [{"role": "user", "content": f"three: {LONG}"}]
    first = await events(places, programs.answer, prompt=turns[0]["content"])
    await places.all_told()
    upload = upload_of(programs.wait)
    stream = run_upload(upload, Where(places.url), {"begins_with": turns})
    async with aclosing(stream):
        assert (await anext(stream)).worker == first[0].worker


async def test_a_salt_keeps_programs_of_tenants_apart(places: Places) -> None:
    for salt, least, most in (("a", 0, 0), ("b", 0, 0), ("a", 64, 1000)):
        said: list[str] = []
        await run(
            programs.answer,
            at=places.url,
            cache_salt=salt,
            on_said=said.append,
            prompt=f"salted: {LONG}",
        )
        assert least <= int(said[0]) <= most
        await places.all_told()


async def test_pages_of_a_run_are_those_of_its_conversation(places: Places) -> None:
    """So that rules which keep conversations keep them."""

    def tags() -> set[str]:
        engines = [one._engine for one in places.workers if one._engine is not None]
        pages = [page for engine in engines for page in engine.tables[0].frozen_pages()]
        return {page.session_tag for page in pages}

    runs = upload_of(programs.answer)
    before = tags()
    for count, name in enumerate(("a", "b", "a")):
        body = {"arguments": {"prompt": f"{count} of a talk: {LONG}"}, "session_id": name}
        told = [event async for event in run_upload(runs, Where(places.url), body)]
        assert told[-1].reason == "finished"
        assert len(tags() - before) == min(count + 1, 2)


async def test_a_program_and_its_client_talk(places: Places) -> None:
    said: list[str] = []

    async def messages() -> AsyncGenerator[str, None]:
        yield "a"
        while said != ["A"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield "bc"

    result = await run(programs.echo, at=places.url, on_said=said.append, messages=messages())
    assert (result, said) == ("2", ["A", "BC"])
    # Where there is nothing to hear, that is told at once.
    assert await run(programs.echo, at=places.url) == "0"


async def test_what_a_program_raises_comes_back_with_its_lines(places: Places) -> None:
    with pytest.raises(EndedError) as raised:
        await run(programs.fail, at=places.url)
    assert raised.value.reason == "raised"
    assert "programs_to_send.py" in str(raised.value)
    assert "ValueError: as it should" in str(raised.value)


async def test_a_client_that_hangs_up_ends_its_program(places: Places) -> None:
    stream = run_upload(upload_of(programs.wait), Where(places.url), {})
    async with aclosing(stream):
        async for event in stream:
            if event.text == "holding":
                break
        assert not all(map(is_empty, places.workers))
    await until(lambda: all(map(is_empty, places.workers)))


async def test_a_run_is_cancelled_by_its_name(places: Places, http: httpx.AsyncClient) -> None:
    stream, name = run_upload(upload_of(programs.wait), Where(places.url), {}), ""
    async for event in stream:
        name = name or event.run
        if event.text == "holding":
            assert (await http.delete(f"/v1/inferlet-runs/{name}")).status_code == 200
    assert (event.type, event.reason) == ("ended", "cancelled")
    await until(lambda: all(map(is_empty, places.workers)))
    again = await http.delete(f"/v1/inferlet-runs/{name}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("size", [2 << 20, 12 << 20])
async def test_a_message_or_argument_too_large_is_its_senders_alone(
    places: Places, http: httpx.AsyncClient, size: int
) -> None:
    """No worker is asked, and the programs of others go on."""
    async with aclosing(run_upload(upload_of(programs.echo), Where(places.url), {})) as running:
        name = (await anext(running)).run
        path = f"/v1/inferlet-runs/{name}/messages"
        told = await http.post(path, json={"text": "x" * size})
        assert (told.status_code, "1048576" in told.text) == (413, True)
        kept = await http.post("/v1/inferlets", json={"source": "async def main(ctx, a): pass"})
        run_path = f"/v1/inferlets/{kept.json()['id']}/runs"
        begun = await http.post(run_path, json={"arguments": {"a": "x" * size}})
        assert (begun.status_code, "1048576" in begun.text) == (413, True)
        await http.post(path, json={"text": "loud"})
        assert (await anext(running)).text == "LOUD"


async def test_messages_that_nobody_hears_are_bounded_in_bytes(
    places: Places, http: httpx.AsyncClient
) -> None:
    async with aclosing(run_upload(upload_of(programs.wait), Where(places.url), {})) as running:
        path = f"/v1/inferlet-runs/{(await anext(running)).run}/messages"
        answers = [await http.post(path, json={"text": "x" * 1_000_000}) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429]


async def test_a_long_result_and_all_that_was_said_and_printed_before_it_come_in_parts(
    places: Places,
) -> None:
    told = await events(places, programs.much, size=900_000)
    assert [event.text for event in told if event.type == "said"] == ["s" * 900_000]
    assert sum(len(event.text) for event in told if event.type == "printed") == 900_000
    assert len(told[-1].result) == 900_000


async def test_programs_are_installed_listed_and_removed(http: httpx.AsyncClient) -> None:
    body = {"name": "one.py", "source": "async def main(ctx):\n    return 7\n"}
    one = (await http.post("/v1/inferlets", json=body)).json()
    assert (await http.post("/v1/inferlets", json=body)).json() == one
    other = (await http.post("/v1/inferlets", json=body | {"name": "other.py"})).json()
    assert other["id"] != one["id"]
    listed = (await http.get("/v1/inferlets")).json()["data"]
    assert {one["id"], other["id"]} <= {entry["id"] for entry in listed}
    answer = await http.post(f"/v1/inferlets/{one['id']}/runs", json={})
    told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert told[-1] == {"type": "ended", "reason": "finished", "result": "7"}
    assert (await http.delete(f"/v1/inferlets/{one['id']}")).status_code == 200
    gone = await http.post(f"/v1/inferlets/{one['id']}/runs", json={})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_installed")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/inferlets", {"name": "x.py"}, "source"),
        ("/v1/inferlets", {"source": "x", "nome": "x"}, "nome"),
        ("/v1/inferlets", {"source": "x" * (1 << 20) + "x"}, "source"),
        ("runs", {"arguments": {"n": [1]}}, "arguments.n"),
        ("runs", {"entry": "not a name"}, "entry"),
        ("runs", {"model": "another"}, "model"),
    ],
)
async def test_a_bad_body_is_refused_by_the_field(
    http: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    if path == "runs":
        kept = await http.post("/v1/inferlets", json={"source": "async def main(ctx): pass"})
        path = f"/v1/inferlets/{kept.json()['id']}/runs"
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param)


async def test_arguments_that_do_not_fit_end_the_run_with_a_sentence(places: Places) -> None:
    (*_, last) = await events(places, programs.answer, prompt="x", tokens=3)
    assert (last.type, last.reason) == ("ended", "raised")
    assert last.error == "there is no parameter tokens: the program takes prompt, max_tokens"


async def test_only_functions_of_a_file_can_be_sent(places: Places) -> None:
    async def inner(ctx: object) -> None:
        del ctx

    with pytest.raises(BadCallError):
        await run(inner, at=places.url)


async def test_nobody_there_is_a_sentence() -> None:
    with pytest.raises(NotRunError, match=r"no router answers at http://127\.0\.0\.1:9"):
        await run(programs.fail, at="http://127.0.0.1:9")


async def test_programs_are_off_unless_they_are_allowed(
    model_folder: Path, tmp_path: Path, redis_server: EmbeddedServer
) -> None:
    index = IndexSettings(
        url=redis_server.url, key_prefix="off", ttl_s=10.0, poll_s=0.05, request_timeout_s=20.0
    )
    places = Places(index, model_folder, tmp_path)
    try:
        await places.worker("worker-0", allow=False)
        await places.start_router(1)
        with pytest.raises(NotRunError, match=r"\[programs\] allow = true"):
            await run(programs.fail, at=places.url)
    finally:
        await places.close()


async def test_when_its_worker_goes_the_program_ends_and_says_so(
    model_folder: Path, tmp_path: Path, redis_server: EmbeddedServer
) -> None:
    index = IndexSettings(
        url=redis_server.url, key_prefix="goes", ttl_s=10.0, poll_s=0.05, request_timeout_s=20.0
    )
    places = Places(index, model_folder, tmp_path)
    try:
        worker = await places.worker("worker-0", most=1)
        await places.start_router(1)
        stream = run_upload(upload_of(programs.wait), Where(places.url), {})
        async for event in stream:
            if event.text == "holding":
                with pytest.raises(NotRunError, match="which is all that"):
                    await run(programs.fail, at=places.url)
                await worker.close()
        assert event.type == "ended"
        assert event.reason in ("worker_lost", "cancelled")
    finally:
        await places.close()


async def test_tenants_do_not_see_each_others_programs(
    model_folder: Path, tmp_path: Path, redis_server: EmbeddedServer
) -> None:
    index = IndexSettings(
        url=redis_server.url, key_prefix="tenants", ttl_s=10.0, poll_s=0.05, request_timeout_s=20.0
    )
    places, keys = Places(index, model_folder, tmp_path), []
    for tenant, tokens in (("one", None), ("two", None), ("three", 1000)):
        with editing(tmp_path / "keys.json") as edited:
            content = edited.content.with_tenant(tenant, tokens_per_minute=tokens)
            edited.content, _, key = content.with_key(tenant, is_admin=False, note="")
        keys.append(key)
    try:
        await places.worker("worker-0")
        await places.start_router(1, keys_file=tmp_path / "keys.json")
        said: list[str] = []
        for key in (*keys[:2], *keys[:2]):
            await run(programs.answer, at=places.url, token=key, on_said=said.append, prompt=LONG)
        assert said[:2] == ["0", "0"]
        assert min(map(int, said[2:])) >= 64
        with pytest.raises(NotRunError, match="a quota of tokens"):
            await run(programs.answer, at=places.url, token=keys[2], prompt=LONG)
        async with httpx.AsyncClient(base_url=places.url) as http:
            one, two = ({"authorization": f"Bearer {key}"} for key in keys[:2])
            (kept,) = (await http.get("/v1/inferlets", headers=one)).json()["data"]
            path = f"/v1/inferlets/{kept['id']}"
            assert (await http.post(f"{path}/runs", headers=two, json={})).status_code == 404
            assert (await http.delete(path, headers=two)).status_code == 404
            assert (await http.delete(path, headers=one)).status_code == 200
            assert (await http.get("/v1/inferlets")).status_code == 401
    finally:
        await places.close()
