"""A worker process that is killed in the middle of an answer, or whose engine ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from pie.index.contract import PlaceRecord
from pie.index.errors import PlaceFencedError
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from tests.support.models import tiny_module
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.asking import Asker
from tests.worker.engine.places import Brake, Places, model_folder, until, worker_settings
from tests.worker.engine.test_models import expect

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[3]
PLACE = PlaceId("w0")
PROMPT = list(range(10, 60))

StartProcess = Callable[..., Awaitable[tuple[subprocess.Popen[bytes], PlaceRecord]]]


@pytest.fixture
async def places(
    index_settings: IndexSettings, tmp_path: Path, tokenizer_folder: Path
) -> AsyncIterator[Places]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder))
    await places.start()
    yield places
    await places.close()


@pytest.fixture
async def start_process(places: Places) -> AsyncIterator[StartProcess]:
    processes: list[subprocess.Popen[bytes]] = []

    async def start(*, steps: int = 0) -> tuple[subprocess.Popen[bytes], PlaceRecord]:
        process = subprocess.Popen(  # noqa: ASYNC220 – it returns at once
            [
                sys.executable,
                "-m",
                "tests.worker.engine.worker_process",
                PLACE,
                f"ipc://{places.sockets}/{PLACE}",
                worker_settings(places.folder).model_dump_json(),
                places.index.model_dump_json(),
                str(steps),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        return process, msgspec.json.decode(line, type=PlaceRecord)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


async def connect(record: PlaceRecord) -> Asker:
    asker = Asker(record.address)
    await asker.client.start()
    return asker


COUNT = 120
"""Tokens of an answer that is not over when its worker is killed: it stands still before."""


async def test_a_killed_worker_is_noticed_and_its_answer_goes_on_at_the_next_start(
    places: Places, start_process: StartProcess
) -> None:
    node = await places.pool()
    process, record = await start_process(steps=60)
    asker = await connect(record)
    _, answer = await asker.send(PROMPT, COUNT, ignore_eos=True)
    await asker.until_told(lambda: len(answer.token_ids) >= 20)
    await until(lambda: sum(node.status().pages.values()) > 0)
    process.kill()
    await asyncio.wait_for(asker.gone.wait(), 60)
    await asker.client.close()
    await until(lambda: PLACE not in places.mirror.places())

    _, again = await start_process()
    assert again.epoch > record.epoch
    await until(lambda: PLACE in places.mirror.places())
    asker = await connect(again)
    rest = await asker.ask([*PROMPT, *answer.token_ids], COUNT, output_start=50, ignore_eos=True)
    await asker.client.close()
    assert rest.cached.pool > 0, "the pool kept what the killed one made"
    answer.token_ids += rest.token_ids
    assert len(answer.token_ids) == COUNT
    answer.finish_reason = rest.finish_reason
    expect(tiny_module("llama"), PROMPT, answer, ignore_eos=True)


async def test_a_worker_whose_engine_ends_says_so_and_takes_nothing_more(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[BaseException] = []
    worker = await places.worker("w0", pool=False, on_dead=deaths.append)
    asker = await connect(worker.record)
    Brake(worker, pause_s=0.05)
    _, answer = await asker.send(PROMPT, 400, ignore_eos=True)
    await asker.until_told(lambda: answer.deltas > 2)

    def broken() -> bool:
        raise AssertionError("a bug")

    monkeypatch.setattr(worker._engine, "step", broken)
    await until(lambda: bool(deaths))
    assert [str(death) for death in deaths] == ["a bug"]
    assert worker.status().state == "failed"
    late = await asker.ask([5], 2)
    assert late.refused is not None
    await asker.client.close()
    places.workers.clear()  # what a bug left behind need not fit together


async def test_a_worker_that_a_later_start_has_replaced_is_dead(places: Places) -> None:
    deaths: list[BaseException] = []
    earlier = await places.worker("w0", pool=False, on_dead=deaths.append)
    later = await places.worker("w0", pool=False, address="later")
    await until(lambda: bool(deaths))
    (death,) = deaths
    assert isinstance(death, PlaceFencedError)
    assert (earlier.status().state, later.status().state) == ("failed", "serving")
