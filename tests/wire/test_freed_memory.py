"""Memory that frames have left serves the next ones."""

from __future__ import annotations

import platform
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pie.page.key import PageKey
from pie.wire import Peer, new_request_id
from pie.wire.freed_memory import given_back, keep
from pie.wire.messages import GetPages, Message, PageData

from .conftest import EPOCH, Connect, Serve
from .helpers import WAIT_S, header_of

PAGE = bytes(1 << 20)
COUNT = 32


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0"])
async def test_frames_that_come_again_and_again_are_not_faulted_in_each_time(
    serve: Serve, connect: Connect
) -> None:
    async def handler(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        assert isinstance(message, GetPages)
        for i in range(len(message.pages)):
            await peer.send(PageData(message.request_id, i, 1, header_of(b"")), [PAGE])

    client = await connect(await serve(handler))

    async def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        message = GetPages(new_request_id(), EPOCH, ((PageKey(b"k"), 0),) * COUNT)
        kept = [frames async for _, frames in client.stream(message, timeout_s=WAIT_S)]
        assert len(kept) == COUNT
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    await faults()
    pages = COUNT * len(PAGE) // resource.getpagesize()
    assert min([await faults() for _ in range(3)]) < pages // 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
def test_what_a_thread_has_taken_once_is_given_back() -> None:
    keep()

    def take() -> None:
        with given_back():
            kept = [bytes(1 << 20) for _ in range(COUNT)]
            del kept

    before = _resident_bytes()
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert _resident_bytes() - before < COUNT * len(PAGE) // 4


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
