"""A stream of messages between two processes that share a pair of sockets.

Covers cutting a byte stream into messages, each a header and raw frames, and limits on both sides.
Does not cover what the messages say (`pie.wire.programs`).

An end is inherited and has no name, so nobody else can speak on it; that one process ended, the
other one sees at once. A message is: the header's size, the number of frames, each frame's size
(all u32, little-endian), then the header and the frames.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

import msgspec

from pie.wire.errors import BadMessage, MessageTooLarge, PeerGone
from pie.wire.frames import Buffer

MAX_FRAMES = 1 << 15
"""More than a pass of as many sequences as a program may have working sets, each asking for all that it can."""
MAX_MESSAGE_BYTES = 160 << 20
"""More than the results and the scores of a pass, which are 64 MiB at most, each."""
MAX_FROM_PROGRAM_BYTES = 64 << 20
"""Of one message of a program, masks above all."""
_UNSENT_BYTES = 8 << 20
"""A sender that drains waits while more than this is unsent."""
_HEAD = struct.Struct("<II")

encode = msgspec.msgpack.Encoder().encode


class Pipe:
    """One end. For one event loop; use `Pipe.open`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_bytes: int,
        max_sent: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._max_bytes = max_bytes
        self._max_sent = max_sent
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes | memoryview] = []

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        max_sent: int = MAX_MESSAGE_BYTES,
    ) -> Pipe:
        """Take over one end of a `socket.socketpair()`.

        Args:
            end: A stream socket.
            max_bytes: Largest message to read.
            max_sent: Largest message that the other end reads.
        """
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=1 << 20)
        writer.transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        return cls(reader, writer, max_bytes, max_sent)

    async def read(self) -> tuple[bytes, list[bytes]]:
        """Return the next message's header and frames.

        Raises:
            PeerGone: The other end is closed.
            BadMessage: It is too large, or no message.
        """
        try:
            header_bytes, count = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if count > MAX_FRAMES:
                raise BadMessage(f"A message of {count} frames is too large.")
            sizes = struct.unpack(f"<{count}I", await self._reader.readexactly(4 * count))
            if header_bytes + sum(sizes) > self._max_bytes:
                raise BadMessage(f"A message is larger than {self._max_bytes} bytes.")
            header = await self._reader.readexactly(header_bytes)
            return header, [await self._reader.readexactly(size) for size in sizes]
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerGone("The other end of the pipe is closed.") from error

    def send(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        """Send a message as soon as can be; dropped where the other end is closed.

        What is sent in one turn of the event loop goes in one write: the other end wakes up once.

        Raises:
            MessageTooLarge: The other end would not take it.
        """
        header = encode(message)
        views = [memoryview(frame).cast("B") for frame in frames]
        size = len(header) + sum(view.nbytes for view in views)
        if len(views) > MAX_FRAMES or size > self._max_sent:
            raise MessageTooLarge(
                f"{len(views)} arrays of {size} bytes: at most {MAX_FRAMES} of {self._max_sent} bytes"
            )
        sizes = struct.pack(f"<{len(views)}I", *(view.nbytes for view in views))
        head = _HEAD.pack(len(header), len(views)) + sizes + header
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (head, *views)

    async def drain(self) -> None:
        """Wait until little is unsent.

        Raises:
            PeerGone: The other end is closed.
        """
        self._flush()
        try:
            await self._writer.drain()
        except OSError as error:
            raise PeerGone("The other end of the pipe is closed.") from error

    def close(self) -> None:
        """Close this end; what is unsent is sent first, where the other end takes it."""
        self._flush()
        self._writer.close()

    def abort(self) -> None:
        """Close this end at once."""
        self._writer.transport.abort()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._writer.is_closing():
            self._writer.writelines(unsent)
