"""Clients that ask one thing after another: `python -m tests.router.many_client HOST PORT MODEL CLIENTS`.

Reads a number of requests from each line of its standard input, makes so many, no two alike, and says
`done`. One in four is a stream, one in four a chat.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator


def bodies(model: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield paths and bodies for ever."""
    for number in itertools.count():
        text = (
            f"Request {number} asks what {number * 7919 % 100_003} has to do with rain in spring."
        )
        body: dict[str, object] = {"model": model, "max_tokens": 2, "user": f"user-{number}"}
        if number % 4 == 1:
            yield "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
        else:
            yield "completions", {**body, "prompt": text, "stream": number % 4 == 3}


class Clients:
    """Connections to one router, kept open."""

    def __init__(self, host: str, port: int, model: str, count: int) -> None:
        self._address = host, port
        self._bodies = bodies(model)
        self._count = count
        self._left = 0

    async def make(self, requests: int) -> None:
        """Make so many requests."""
        self._left = requests
        await asyncio.gather(*(self._one() for _ in range(self._count)))

    async def _one(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        while self._left > 0:
            self._left -= 1
            path, body = next(self._bodies)
            data = json.dumps(body).encode()
            writer.write(
                b"POST /v1/%s HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % (path.encode(), len(data)) + data
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in head.partition(b"\r\n")[0], head
            if b"transfer-encoding: chunked" in head:
                await reader.readuntil(b"0\r\n\r\n")
            else:
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
        writer.close()


async def main(host: str, port: str, model: str, count: str) -> None:
    clients = Clients(host, int(port), model, int(count))
    while line := await asyncio.to_thread(sys.stdin.readline):
        await clients.make(int(line))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
