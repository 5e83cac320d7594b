"""The head of an answer goes out together with what follows it, and never later than a moment."""

from __future__ import annotations

import asyncio

from pie.router.transport import AnswerTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Recorder(asyncio.Transport):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = "closed"

    def abort(self) -> None:
        self.closed = "aborted"

    def is_closing(self) -> bool:
        return bool(self.closed)


def made() -> tuple[AnswerTransport, Recorder]:
    recorder = Recorder()
    return AnswerTransport(recorder, asyncio.get_running_loop()), recorder


async def test_a_head_and_its_body_are_one_write() -> None:
    transport, recorder = made()
    transport.write(HEAD)
    transport.write(b"{}")
    transport.write(b"more")
    assert recorder.written == [HEAD + b"{}", b"more"]
    await asyncio.sleep(0)
    assert len(recorder.written) == 2


async def test_a_head_alone_goes_out_in_the_next_turn() -> None:
    transport, recorder = made()
    transport.write(HEAD)
    assert recorder.written == []
    assert transport.is_closing() is False
    await asyncio.sleep(0)
    assert recorder.written == [HEAD]


async def test_two_heads_keep_their_order() -> None:
    transport, recorder = made()
    transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    transport.write(HEAD)
    await asyncio.sleep(0)
    assert b"".join(recorder.written) == b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD


async def test_closing_sends_what_waits_and_aborting_drops_it() -> None:
    transport, recorder = made()
    transport.write(HEAD)
    transport.close()
    assert (recorder.written, recorder.closed) == ([HEAD], "closed")
    transport, recorder = made()
    transport.write(HEAD)
    transport.abort()
    await asyncio.sleep(0)
    assert (recorder.written, recorder.closed) == ([], "aborted")
