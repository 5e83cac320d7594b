"""Parts that are killed: what a client sees, and that the cluster mends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from pie.inferlet.client import Where, run_upload
from pie.inferlet.upload import Upload
from tests.support.serving import LONG_S, Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("faults"), pytest.mark.timeout(400)]

LONG = "The archive keeps every letter that the expedition sent home by boat. " * 40


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    port = _free_port()
    # float32 is repeatable between prefill and decode, so answers can be compared to the end.
    settings = {
        "PIE_ROUTER__PORT": str(port),
        "PIE_MODEL__DTYPE": "float32",
        "PIE_PROGRAMS__ALLOW": "true",
    }
    one = Serving(tmp_path_factory.mktemp("faults"), settings)
    try:
        one.wait_until_said("Ctrl-C stops it")
        one.wait_until_ready(workers=2)
        yield one
    finally:
        one.stop()


@pytest.fixture
def client(serving: Serving) -> Iterator[OpenAI]:
    serving.wait_until_ready(workers=2)
    with OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=90) as one:
        yield one


def _free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def kill(serving: Serving, kind: str, which: int = 0) -> None:
    os.kill(serving.pids(kind)[which], signal.SIGKILL)


def worker_pid(serving: Serving, place: str) -> int:
    """Return the process that listens at a worker's address."""
    workers = httpx.get(f"{serving.url}/status").json()["workers"]
    path = next(w["address"].removeprefix("ipc://") for w in workers if w["place"] == place)
    for pid in serving.pids("WorkerActor"):
        if any(c.laddr == path for c in psutil.Process(pid).net_connections(kind="unix")):
            return pid
    raise AssertionError(f"nobody listens for {place}")


def wait_until_back(serving: Serving, place: str, before: int) -> None:
    """Wait until a worker whose process was killed is up again, and the router knows both."""
    deadline_s = time.monotonic() + LONG_S
    while True:
        # Nobody may listen there meanwhile, and who listened may not be there any more.
        with contextlib.suppress(AssertionError, psutil.Error, httpx.HTTPError, StopIteration):
            if worker_pid(serving, place) != before:
                break
        assert time.monotonic() < deadline_s, f"{place} is not back: {serving.text}{serving.logs()}"
        time.sleep(0.2)
    serving.wait_until_ready(workers=2)


def ask(client: Any, text: str, **more: object) -> tuple[str, int]:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=8,
        **more,
    )
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, details.cached_tokens


PROGRAM = """
from pie.inferlet import Context, greedy

async def main(ctx: Context):
    await ctx.user("Count to a hundred.").generate(greedy(), 4)
    await ctx.say("there")
    while await ctx.listen() is not None:
        await ctx.user("Go on.").generate(greedy(), 4)
        await ctx.say("still there")
"""


async def test_a_program_ends_with_its_worker_and_others_go_on(serving: Serving) -> None:
    serving.wait_until_ready(workers=2)
    upload, where = Upload("program.py", PROGRAM, "main"), Where(serving.url)
    streams = [run_upload(upload, where, {}) for _ in range(2)]
    began = [[await anext(stream) for _ in range(2)] for stream in streams]
    assert {first.worker for first, _ in began} == {"worker-0", "worker-1"}
    assert [there.text for _, there in began] == ["there", "there"]
    pid = worker_pid(serving, began[0][0].worker)
    programs = psutil.Process(pid).children()
    assert len(programs) == 1
    os.kill(pid, signal.SIGKILL)
    async for last in streams[0]:
        assert last.type in ("running", "ended")
    assert (last.type, last.reason) == ("ended", "worker_lost")
    _, left = psutil.wait_procs(programs, timeout=LONG_S)
    assert left == []
    path = f"{serving.url}/v1/inferlet-runs/{began[1][0].run}/messages"
    async with httpx.AsyncClient(timeout=LONG_S) as http:
        assert (await http.post(path, json={"text": "more"})).status_code == 200
        assert (await anext(streams[1])).text == "still there"
        assert (await http.post(path, json={"text": None})).status_code == 200
    (last,) = [event async for event in streams[1]]
    assert (last.type, last.reason) == ("ended", "finished")


def resumes(serving: Serving) -> int:
    """Return how many answers the router resumed on another worker."""
    lines = httpx.get(f"{serving.url}/metrics").text.splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith("pie_router_resumes_total")]
    return int(sum(map(float, counts)))


def test_a_router_that_was_killed_knows_the_hits_again(serving: Serving, client: Any) -> None:
    cold, cached = ask(client, LONG + "one")
    assert cached <= 32, "only what the template puts before every conversation"
    kill(serving, "RouterActor")
    time.sleep(1)
    serving.wait_until_ready(workers=2)
    warm, cached = ask(client, LONG + "one")
    assert cached > 300
    assert warm == cold


def test_a_stream_goes_on_when_its_worker_is_killed(serving: Serving, client: Any) -> None:
    arguments = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Write a long story about a boat."}],
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": 60,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**arguments)
    before = resumes(serving)
    raw = client.chat.completions.with_raw_response.create(**arguments, stream=True)
    pid = worker_pid(serving, raw.headers["x-pie-worker"])
    pieces = []
    for event in raw.parse():
        if event.choices and event.choices[0].delta.content:
            pieces.append(event.choices[0].delta.content)
            if len(pieces) == 5:
                os.kill(pid, signal.SIGKILL)
    assert "".join(pieces) == whole.choices[0].message.content
    assert resumes(serving) == before + 1


def test_a_killed_worker_comes_back_by_itself_and_others_go_on(
    serving: Serving, client: Any
) -> None:
    place = httpx.get(f"{serving.url}/status").json()["workers"][0]["place"]
    before = worker_pid(serving, place)
    answers: list[str] = []
    lost: list[Exception] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                answers.append(ask(client, f"{len(answers)} is a number.")[0])
            except openai.APIError as error:
                lost.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        while not answers:
            time.sleep(0.1)
        os.kill(before, signal.SIGKILL)
        wait_until_back(serving, place, before)
    finally:
        stop.set()
        thread.join(LONG_S)
    assert len(answers) > 2
    assert not lost
    assert worker_pid(serving, place) != before
    text, _ = ask(client, "Hello.", extra_headers={"x-pie-place": place})
    assert text


def test_pages_of_a_killed_worker_come_back_from_the_pool(serving: Serving, client: Any) -> None:
    place = httpx.get(f"{serving.url}/status").json()["workers"][0]["place"]
    here = {"extra_headers": {"x-pie-place": place}}
    stored = serving.stored()
    # No other test has asked so, and stored its pages.
    text = f"To the pool. {LONG}"
    cold, _ = ask(client, text, **here)
    serving.wait_until_stored(stored + 20)
    before = worker_pid(serving, place)
    os.kill(before, signal.SIGKILL)
    wait_until_back(serving, place, before)
    warm, cached = ask(client, text, **here)
    assert cached > 300
    assert warm == cold


def test_a_killed_pool_node_costs_a_recompute_and_comes_back(serving: Serving, client: Any) -> None:
    kill(serving, "PoolActor")
    text, _ = ask(client, "Is anybody there?")
    assert text
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        if httpx.get(f"{serving.url}/status").json()["pool"]:
            return
        time.sleep(0.2)
    pytest.fail(f"the pool did not come back: {serving.text}{serving.logs()}")


def test_an_index_server_that_was_killed_is_started_again_and_nothing_is_lost(
    serving: Serving, client: Any
) -> None:
    cold, _ = ask(client, LONG + "index")
    os.kill(serving.index_pid(), signal.SIGKILL)
    while_down, cached = ask(client, LONG + "index")
    assert cached > 300
    assert while_down == cold
    serving.wait_until_status("index", "ok")
    assert ask(client, LONG + "index")[1] > 300


def test_all_workers_down_is_503_with_retry_after_and_then_mended(
    serving: Serving, client: Any
) -> None:
    for pid in serving.pids("WorkerActor"):
        os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + LONG_S
    while httpx.get(f"{serving.url}/ready").status_code != 503:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    answer = httpx.post(
        f"{serving.url}/v1/chat/completions",
        json={"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        timeout=LONG_S,
    )
    assert answer.status_code == 503
    assert float(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["message"]
    serving.wait_until_ready(workers=2)
    assert ask(client, "Back again?")[0]
