"""A node process that is killed in the middle of a transfer costs misses, not time and not errors."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pie.index.contract import PlaceRecord
from pie.pool import links
from pie.pool.client import Reason
from pie.wire.messages import PutStatus
from tests.pool.conftest import MakeClient
from tests.pool.places import Places, SamplePages, until, without_waits

pytestmark = pytest.mark.live

Process = subprocess.Popen[bytes]
StartProcess = Callable[[], Process]


@pytest.fixture
def start_process(places: Places) -> Iterator[StartProcess]:
    """Starts node processes and kills those that still run."""
    processes: list[Process] = []

    def start() -> Process:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("node_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        places.up(msgspec.json.decode(process.stdout.readline(), type=PlaceRecord))
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


async def test_a_node_killed_in_mid_get_is_a_miss_soon_and_the_next_one_works(
    start_process: StartProcess, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_process()
    client = make_client()
    pages = SamplePages(64, size=1 << 20)
    assert set(await pages.store(client)) == {PutStatus.STORED}
    load = asyncio.create_task(pages.hits(client, deadline_s=240))
    (link,) = client._links._links.values()

    async def some_came() -> bool:
        return link.client.counters.payload_bytes_in > 4 << 20

    await until(some_came)
    process.kill()
    hits = await load
    assert 0 < sum(hits) < 64
    assert hits == sorted(hits, reverse=True), "what came is a leading run"
    # Not at its deadline.
    assert client.counters.missed == {Reason.GONE: 64 - sum(hits)}

    with monkeypatch.context() as patch:
        patch.setattr(links, "asyncio", without_waits())
        assert await pages.hits(client) == [False] * 64

    start_process()

    async def stores() -> bool:
        return set(await pages.store(client)) == {PutStatus.STORED}

    await until(stores)
    assert await SamplePages(4, size=1 << 20).hits(client) == [True] * 4


async def test_a_node_killed_in_mid_put_loses_pages_and_nothing_else(
    start_process: StartProcess, make_client: MakeClient
) -> None:
    process = start_process()
    client = make_client()
    pages = SamplePages(200, size=1 << 20)
    store = asyncio.create_task(pages.store(client, deadline_s=240))
    await asyncio.sleep(0.02)
    process.kill()
    became = await store
    assert PutStatus.REFUSED in became
    assert client.counters.dropped.keys() == {Reason.GONE}, "not at its deadline"
    assert client._budget.used_bytes == 0


def test_a_node_that_is_asked_to_stop_leaves_with_code_0(start_process: StartProcess) -> None:
    process = start_process()
    process.communicate(timeout=100)
    assert process.returncode == 0
