"""The embedded server starts, keeps its data, and goes with its parent."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pie.index.errors import ServerError
from pie.index.server import EmbeddedServer

pytestmark = pytest.mark.live

_PARENT = """
import signal, sys, threading, time
from pathlib import Path
from pie.index.server import EmbeddedServer
# Ignored in what a shell started in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
server = EmbeddedServer(Path(sys.argv[1]))
# As `asyncio.to_thread` does it: the thread that called `start` is gone soon after.
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
time.sleep(0.2)
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pie"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder)
    yield server
    server.kill()


def client(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


def test_what_was_acknowledged_outlives_a_kill(server: EmbeddedServer) -> None:
    url = server.start()
    with client(server) as connection:
        connection.set("a", "1")
    server.kill()
    assert not server.running
    assert server.start() == url
    with client(server) as connection:
        assert connection.get("a") == b"1"


def test_a_stopped_server_leaves_no_socket_and_starts_again(server: EmbeddedServer) -> None:
    url = server.start()
    server.stop()
    assert not Path(url.removeprefix("unix://")).exists()
    server.stop()
    assert server.start() == url == server.start()


def test_only_its_user_can_open_the_socket(server: EmbeddedServer) -> None:
    path = Path(server.start().removeprefix("unix://"))
    assert path.stat().st_mode & 0o077 == 0


def test_a_long_folder_gets_a_short_socket(folder: Path) -> None:
    server = EmbeddedServer(folder / ("x" * 120))
    url = server.start()
    with client(server) as connection:
        assert connection.ping()
    server.stop()
    assert not Path(url.removeprefix("unix://")).parent.exists()
    assert server.start() == url
    server.kill()


def test_a_folder_serves_one_server_at_a_time(server: EmbeddedServer, folder: Path) -> None:
    server.start()
    second = EmbeddedServer(folder)
    with pytest.raises(ServerError, match="another embedded server uses the folder"):
        second.start()
    second.kill()
    with client(server) as connection:
        assert connection.ping()


def test_tcp_listens_on_loopback_with_a_password(folder: Path) -> None:
    server = EmbeddedServer(folder, port=0, password='a b"c\\n')
    server.start()
    with client(server) as connection:
        assert connection.ping()
        assert connection.config_get("bind")["bind"] == "127.0.0.1"
    port = int(server.url.rsplit(":", 1)[1][:-2])
    stranger = redis.Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 0))
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    server.stop()


def test_beyond_loopback_needs_a_password(folder: Path) -> None:
    with pytest.raises(ServerError, match="needs a password"):
        EmbeddedServer(folder, port=0, host="0.0.0.0")


def test_a_busy_port_is_named(server: EmbeddedServer, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is in use"):
            EmbeddedServer(folder, port=port).start()


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(ServerError, match=r"file/data"):
        EmbeddedServer(folder / "file" / "data").start()


def test_broken_data_are_told_with_the_log(server: EmbeddedServer, folder: Path) -> None:
    server.start()
    server.stop()
    for file in (folder / "appendonlydir").glob("*.manifest"):
        file.write_text("nonsense")
    with pytest.raises(ServerError, match="its log ends"):
        server.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_its_parent(folder: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(folder)], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert "valkey" in server.name()
        parent.send_signal(number)
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
