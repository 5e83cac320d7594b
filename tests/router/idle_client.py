"""Clients that open streams and then only listen: `python -m tests.router.idle_client HOST PORT MODEL COUNT`.

Says `open` once every stream has brought something, and how many bytes came since at every line that it
reads. Ends, with all its streams, when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys

_AT_ONCE = 50


class Clients:
    """Streams to one router."""

    def __init__(self, host: str, port: int, model: str) -> None:
        body = json.dumps(
            {"model": model, "prompt": "Once", "max_tokens": 4000, "stream": True}
        ).encode()
        self._address = host, port
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        ) + body
        self._opening = asyncio.Semaphore(_AT_ONCE)
        self.came = 0
        self.ended = 0
        self.first = 0

    async def listen(self) -> None:
        """Open one stream and listen until it ends."""
        async with self._opening:
            reader, writer = await asyncio.open_connection(*self._address, limit=4096)
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0], head
            await reader.readuntil(b"data:")
        self.first += 1
        while data := await reader.read(4096):
            self.came += len(data)
        self.ended += 1


async def main(host: str, port: str, model: str, count: str) -> None:
    clients = Clients(host, int(port), model)
    tasks = [asyncio.create_task(clients.listen()) for _ in range(int(count))]
    while clients.first < len(tasks):
        await asyncio.sleep(0.05)
        for task in tasks:
            if task.done() and task.exception() is not None:
                raise SystemExit(f"a stream failed: {task.exception()}")
    sys.stdout.write("open\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        sys.stdout.write(f"{clients.came} {clients.ended}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
