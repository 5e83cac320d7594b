"""Plain sockets to a router, for what no HTTP client would do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

from tests.router.conftest import WAIT_S

JSON = "content-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Client:
    """A plain socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.sent_bytes = 0
        self._whole: asyncio.Task[bytes] | None = None

    async def send(self, data: bytes, times: int = 1, pause_s: float = 0.0) -> None:
        """Send the same again and again, until the other end has had enough."""
        for _ in range(times):
            if self._rest().done():
                return
            self.writer.write(data)
            try:
                await self.writer.drain()
            except OSError:
                return
            self.sent_bytes += len(data)
            await asyncio.sleep(pause_s)

    def _rest(self) -> asyncio.Task[bytes]:
        """Read, from now on, all that comes until the connection ends."""
        if self._whole is None:
            self._whole = asyncio.create_task(self._read_all())
        return self._whole

    async def _read_all(self) -> bytes:
        whole = b""
        # A reset is an end like another; what came before it has come.
        with contextlib.suppress(ConnectionResetError):
            while data := await self.reader.read(1 << 16):
                whole += data
        return whole

    async def answer(self) -> tuple[int, dict[str, str]]:
        """Return the status and the error that the connection ends with."""
        async with asyncio.timeout(WAIT_S):
            whole = await self._rest()
        head, _, content = whole.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        return int(head.split()[1]), json.loads(content)["error"]

    async def whole(self) -> bytes:
        """Return all that comes until the connection ends."""
        async with asyncio.timeout(WAIT_S):
            return await self._rest()

    async def is_closed(self) -> bool:
        """Wait until the other end has closed, whatever it says before."""
        done, _ = await asyncio.wait([self._rest()], timeout=WAIT_S)
        if done:
            # A reset is an end like another.
            self._rest().exception()
        return bool(done)

    async def get(self, request: bytes = GET) -> int:
        """Return the status of a small request on this connection, which stays open."""
        self.writer.write(request)
        return (await self.one())[0]

    async def one(self) -> tuple[int, bytes]:
        """Return status and content of the next answer that has a length."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            while head.split()[1] == b"100":
                head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            return int(head.split()[1]), await self.reader.readexactly(length)


class Clients:
    """Sockets to one router, closed at the end of a test."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._all: list[Client] = []

    async def new(self, said: bytes = b"") -> Client:
        """Return a connection on which something has been said, and heard by the router."""
        client = Client(*await asyncio.open_connection(self._url.hostname, self._url.port))
        self._all.append(client)
        client.writer.write(said)
        # The router runs on this event loop: it has heard once nothing is left to do.
        await asyncio.sleep(0.005)
        return client

    def close(self) -> None:
        for client in self._all:
            client.writer.close()
