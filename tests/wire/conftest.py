"""Servers and clients that are closed at the end, on both event loops and both transports."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from pie.page.events import Epoch
from pie.wire import Handler, WireClient, WireServer, WireSettings
from tests.wire.helpers import WAIT_S

EPOCH = Epoch(7)
SECRET = bytes(range(32))

Serve = Callable[..., Awaitable[WireServer]]
Connect = Callable[..., Awaitable[WireClient]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def folder() -> Iterator[Path]:
    # A socket's path may have 107 bytes, and pytest's own folders are long.
    path = Path(tempfile.mkdtemp(prefix="pie"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["tcp", "ipc", "curve"])
def address(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "ipc":
        return f"ipc://{folder}/wire"
    return f"{request.param}://127.0.0.1:0"


@pytest.fixture
def settings() -> WireSettings:
    # So long that on no machine, however busy, anything is taken for silent or late that is not.
    return WireSettings(
        heartbeat_s=0.1, gone_after_s=WAIT_S, silent_after_s=10 * WAIT_S, connect_timeout_s=WAIT_S
    )


@pytest.fixture
async def serve(address: str, settings: WireSettings) -> AsyncIterator[Serve]:
    servers: list[WireServer] = []

    async def start(handler: Handler, **options: object) -> WireServer:
        options = {"epoch": EPOCH, "settings": settings, "secret": SECRET} | options
        server = WireServer(str(options.pop("address", address)), handler, **options)  # type: ignore[arg-type]
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def connect(settings: WireSettings) -> AsyncIterator[Connect]:
    clients: list[WireClient] = []

    async def start(server: WireServer, **options: object) -> WireClient:
        options = {"settings": settings, "secret": SECRET} | options
        client = WireClient(server.address, **options)  # type: ignore[arg-type]
        clients.append(client)
        await client.start()
        return client

    yield start
    for client in clients:
        await client.close()


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """No task of the wire survives its end, and no thread but pyzmq's one collector."""
    yield
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in tasks if name.startswith("wire-")}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pie-wire")]
