"""`pie pool`: a node in a process of its own, its name, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis

from pie.cluster import pool_process
from pie.cluster.config import PieConfig, load_config
from pie.cluster.errors import StartError
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.errors import PolicyError
from pie.pool.client import PoolClient
from pie.pool.files import Files
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.wire.messages import PutStatus
from tests.pool.places import SamplePages, until
from tests.support.pool_process import SECRET, PoolProcess
from tests.support.serving import PIE

pytestmark = pytest.mark.live

Start = Callable[..., PoolProcess]


@pytest.fixture
def start(tmp_path: Path, index_settings: IndexSettings) -> Iterator[Start]:
    """Starts nodes, and kills those that still run."""
    nodes: list[PoolProcess] = []

    def one(name: str, **settings: object) -> PoolProcess:
        nodes.append(PoolProcess(tmp_path, index_settings, name, **settings))  # type: ignore[arg-type]
        return nodes[-1]

    yield one
    for node in nodes:
        node.close()


@pytest.fixture
async def mirror(index_settings: IndexSettings) -> AsyncIterator[Mirror]:
    mirror = Mirror()
    feed = MirrorFeed(index_settings.url, mirror, settings=index_settings, with_pages=False)
    await feed.start()
    yield mirror
    await feed.close()


@pytest.fixture
async def client(mirror: Mirror) -> AsyncIterator[PoolClient]:
    client = PoolClient(mirror, PoolSettings(), secret=SECRET)
    yield client
    await client.close()


async def stored(client: PoolClient, pages: SamplePages) -> None:
    async def are() -> bool:
        return set(await pages.store(client)) <= {PutStatus.STORED, PutStatus.HELD}

    await until(are)


async def test_a_node_of_its_own_keeps_pages_and_ends_with_0(
    start: Start, client: PoolClient, mirror: Mirror
) -> None:
    node = start("outside")
    assert node.wait_until_up().startswith("curve://127.0.0.1:")
    pages = SamplePages(8, secret=SECRET)
    await stored(client, pages)
    assert await pages.hits(client) == [True] * 8
    node.signal(signal.SIGTERM)
    assert node.wait() == 0

    async def is_gone() -> bool:
        return not mirror.places()

    await until(is_gone)


async def test_a_second_node_of_a_name_refuses_and_the_first_serves_on(
    start: Start, client: PoolClient
) -> None:
    first = start("twin")
    address = first.wait_until_up()
    pages = SamplePages(4, secret=SECRET)
    await stored(client, pages)
    second = start("twin")
    assert second.wait() == 2
    assert f"pie: twin is up at {address}: give this node another --name" in second.text
    assert "Traceback" not in second.text
    assert await pages.hits(client) == [True] * 4


async def test_a_node_that_starts_while_redis_is_away_does_not_take_the_name_of_one_that_is_up(
    own_redis_server: EmbeddedServer, tmp_path: Path, index_settings: IndexSettings
) -> None:
    index = index_settings.model_copy(update={"url": own_redis_server.url})
    nodes = [PoolProcess(tmp_path, index, "here")]
    try:
        address = nodes[0].wait_until_up()
        own_redis_server.kill()
        nodes.append(PoolProcess(tmp_path, index, "here"))
        nodes[1].wait_until_up()
        own_redis_server.start()
        assert nodes[1].wait() == 2
        assert f"pie: here is up at {address}: give this node another --name" in nodes[1].text
        assert "Traceback" not in nodes[1].text
        nodes[0].signal(signal.SIGTERM)
        assert nodes[0].wait() == 0
    finally:
        for node in nodes:
            node.close()


def test_a_node_whose_password_redis_does_not_take_says_so_and_ends(
    own_redis_server: EmbeddedServer, tmp_path: Path, index_settings: IndexSettings
) -> None:
    own = own_redis_server.url
    with redis.Redis.from_url(own) as client:
        client.config_set("requirepass", "open")
    for url, words in (
        (own, "a password is needed"),
        (own.replace("unix://", "unix://:hush@"), "user or password is wrong"),
    ):
        index = index_settings.model_copy(update={"url": url})
        node = PoolProcess(tmp_path, index, "denied")
        try:
            assert node.wait() == 2
        finally:
            node.close()
        assert f"pie: denied: Redis: {words}" in node.text
        assert "Traceback" not in node.text
        assert "hush" not in node.text


async def test_the_name_of_a_node_that_was_killed_is_free_at_once(start: Start) -> None:
    first = start("killed")
    first.wait_until_up()
    first.signal(signal.SIGKILL)
    first.wait()
    start("killed").wait_until_up()


async def test_a_node_that_answered_nothing_is_fenced_by_the_next_one_of_its_name(
    start: Start, client: PoolClient, mirror: Mirror
) -> None:
    first = start("halted")
    first.wait_until_up()
    first.signal(signal.SIGSTOP)
    second = start("halted")
    address = second.wait_until_up()
    first.signal(signal.SIGCONT)
    assert first.wait() == 2
    assert "every node needs a name of its own" in first.text
    assert "Traceback" not in first.text
    pages = SamplePages(4, secret=SECRET)
    await stored(client, pages)
    assert [record.address for record in mirror.places().values()] == [address]
    assert await pages.hits(client) == [True] * 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PIE_POOL__LISTEN": "tcp://10.0.0.1:7"}, "not encrypted: write curve://10.0.0.1:7"),
        ({"PIE_POOL__LISTEN": "curve://0.0.0.0:7"}, "names no host"),
        ({}, "cluster.secret_file is not set"),
        ({}, "index.url is not set"),
        ({"PIE_POOL__NAME": "a/b"}, "pool.name"),
        ({"PIE_POOL__NAME": ".."}, "pool.name"),
        ({"PIE_POOL__NAME": ".lock"}, "pool.name"),
        ({"PIE_POOL__NAME": "cluster.secret"}, "pool.name"),
    ],
)
def test_what_keeps_a_node_from_starting_is_said_in_a_sentence(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIE_")}
    done = subprocess.run(
        [*PIE, "pool"],
        cwd=tmp_path,
        env=clean | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_does_not_make_the_secret_of_a_cluster_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "pie.toml").write_text(
        '[index]\nurl = "redis://127.0.0.1:1/0"\n[cluster]\nsecret_file = "nowhere"\n'
    )
    config = load_config(tmp_path / "pie.toml", {}).config
    with pytest.raises(StartError, match="copy it here from the cluster"):
        pool_process.run_node(config, print)
    assert not Path("nowhere").exists()


def test_a_class_that_cannot_be_made_again_keeps_a_node_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pie.toml").write_text(
        '[index]\nurl = "redis://127.0.0.1:1/0"\n[cluster]\nsecret_file = "secret"\n'
    )
    config = load_config(tmp_path / "pie.toml", {}).config
    monkeypatch.setattr(pool_process, "joined_secret", lambda _: SECRET)

    async def run(_: object) -> None:
        raise PolicyError("a new mine:Once cannot be made")

    monkeypatch.setattr(pool_process._Process, "run", run)
    # As in a process of its own it logs to its standard error, which is another's here.
    log = logging.getLogger("pie")
    handlers, level = list(log.handlers), log.level
    try:
        with pytest.raises(StartError, match="a new mine:Once cannot be made"):
            pool_process.run_node(config, print)
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


def test_a_signal_to_a_node_that_ends_already_does_not_end_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(pool_process, "_end_now", ended.append)
    process = pool_process._Process(PieConfig(), SECRET, print)
    process._end.set()  # As it is once somebody has emptied it.
    process._signalled(signal.SIGTERM)
    assert ended == []
    process._signalled(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


async def test_a_node_whose_disk_hangs_at_the_start_ends_at_one_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, over = threading.Event(), threading.Event()

    def hang(_files: Files, _path: Path) -> None:
        began.set()
        assert over.wait(60)

    monkeypatch.setattr(Files, "make_folder", hang)
    settings = PoolSettings.model_validate(
        {"ram_budget": "1MiB", "disk_budget": "32MiB", "disk_folders": [str(tmp_path)]}
    )
    node = PoolNode(PlaceId("slow"), settings, index_url=None, epoch=Epoch(1))
    process = pool_process._Process(PieConfig(), SECRET, print)
    starting = asyncio.create_task(process._start(node))
    assert await asyncio.to_thread(began.wait, 60)
    process._signalled(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await starting is None
        await node.close()
    over.set()
