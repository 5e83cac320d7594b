"""A pipe between two processes carries whole messages, within limits."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from pie.wire.errors import BadMessage, PeerGone
from pie.wire.pipe import MAX_FRAMES, Pipe
from pie.wire.programs import Encode, Say, decode_from_program
from tests.wire.helpers import WAIT_S


async def ends(max_bytes: int = 1 << 20) -> tuple[Pipe, Pipe]:
    left, right = socket.socketpair()
    return await Pipe.open(left), await Pipe.open(right, max_bytes=max_bytes)


async def test_messages_and_frames_come_whole_and_in_order() -> None:
    left, right = await ends()
    left.send(Say("one"), [b"", b"abc", memoryview(b"x" * 100_000)])
    left.send(Encode(7, "two"))
    header, frames = await right.read()
    assert decode_from_program(header) == Say("one")
    assert [len(frame) for frame in frames] == [0, 3, 100_000]
    header, frames = await right.read()
    assert decode_from_program(header) == Encode(7, "two")
    assert frames == []
    left.close()
    right.close()


async def test_the_other_ends_close_is_seen() -> None:
    left, right = await ends()
    left.abort()
    with pytest.raises(PeerGone):
        await right.read()
    right.send(Say("nobody"))
    right.close()


@pytest.mark.parametrize(
    "head",
    [struct.pack("<II", 10, MAX_FRAMES + 1), struct.pack("<III", 10, 1, 1 << 30), b"\xff" * 12],
)
async def test_what_is_too_large_is_refused_before_it_is_read(head: bytes) -> None:
    left, right = await ends(max_bytes=1000)
    left._writer.write(head)
    try:
        with pytest.raises(BadMessage):
            async with asyncio.timeout(WAIT_S):
                await right.read()
    finally:
        left.abort()
        right.abort()
