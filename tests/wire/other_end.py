"""The other end of a connection, to be killed: `serve ADDRESS EPOCH` or `connect ADDRESS`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from pie.page.events import Epoch
from pie.wire import Peer, WireClient, WireServer, WireSettings
from pie.wire.messages import Cancel, Lookup, LookupResult, Message
from tests.support.credit import hold_credit

SECRET = bytes(range(32))
STALL = b"stall"
STALL_S = 1.2
SETTINGS = WireSettings(heartbeat_s=0.1, gone_after_s=0.5, silent_after_s=2.0)


async def answer(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    """Answer look-ups; one for no pages is never answered, and some stop everything for a while."""
    if isinstance(message, Lookup) and message.pages and message.pages[0][0] == STALL:
        time.sleep(STALL_S)  # noqa: ASYNC251 - as a step that holds the GIL
    if isinstance(message, Lookup) and message.pages:
        await peer.send(LookupResult(message.request_id, (1,) * len(message.pages)))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(mode: str, address: str, epoch: str = "7") -> None:
    if mode == "serve":
        server = WireServer(
            address, answer, epoch=Epoch(int(epoch)), settings=SETTINGS, secret=SECRET
        )
        say(await server.start())
    else:
        # It gives no credit, ever.
        client = WireClient(address, settings=SETTINGS, secret=SECRET)
        hold_credit(client)
        say(str(await client.start()))
        await client.send(Cancel("hello"))
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
