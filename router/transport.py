"""A client's transport that sends the head of an answer together with what follows it.

Covers holding a head back for a moment. Does not cover what is sent (`pie.router.exchange`) or when the
connection ends (`pie.router.connection`).

uvicorn writes a head and a body one after the other, and an event loop sends each write at once: two
system calls, two packets, and a client that is woken by the first and then waits for the second.
"""

from __future__ import annotations

import asyncio
from typing import Any

_HEAD = b"HTTP/1.1 "
"""How heads begin. A body that begins so is held back too, which does no harm."""


class AnswerTransport(asyncio.Transport):
    """Passes everything on to a transport, and heads with the next write.

    A head that nothing follows goes out in the loop's next turn.

    Args:
        transport: The one that it stands for.
        loop: Its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, with the head that waits; where this is a head, it waits."""
        head, self._head = self._head, b""
        if isinstance(data, bytes) and data.startswith(_HEAD):
            if not head:
                self._loop.call_soon(self._send_head)
            self._head = head + data
        elif head:
            self._transport.write(head + bytes(data))
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        """Send no more after what waits."""
        self._send_head()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what waits, and close."""
        self._send_head()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._head = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """Whether one direction can be closed by itself."""
        return self._transport.can_write_eof()

    def pause_reading(self) -> None:
        """Take nothing more in for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take in again."""
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait to be sent."""
        return self._transport.get_write_buffer_size() + len(self._head)

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return what is known of the connection."""
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol be told of what comes."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that is told."""
        return self._transport.get_protocol()

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
