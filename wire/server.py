"""The listening end of the wire.

Covers accepting clients, taking their messages and handing them to a handler, and noticing that
they go. Does not cover what the messages ask for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pie.page.events import Epoch
from pie.wire.messages import Message
from pie.wire.peer import Peer
from pie.wire.settings import WireSettings

Handler = Callable[[Peer, Message, Sequence[memoryview]], Awaitable[None]]
"""Carries out one message of a peer; the frames stay readable as long as they are referred to.

Runs as a task of its own, started in the order of the peer's messages. Raise `RefusedError` to
refuse; any other exception is logged and becomes `Refused(FAILED)`. `Ping`, `Pong`, `Credit` and
messages for another epoch never reach it. A `Cancel` first cancels the task of the request that
it names, if that still runs, and then comes to the handler like any message.
"""


class WireServer:
    """Listens at one address and hands every message to one handler."""

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        epoch: Epoch,
        on_peer: Callable[[Peer], None] | None = None,
        allow_remote: bool = False,
        settings: WireSettings | None = None,
    ) -> None:
        """Prepare a server; it listens from `start` on.

        Args:
            address: `tcp://127.0.0.1:0` (0 takes a free port) or `ipc:///path`.
            handler: Carries out messages.
            epoch: This start of the place; messages for any other are refused.
            on_peer: Called with each client that says hello.
            allow_remote: Whether the address may be reachable from other hosts.
            settings: Limits.

        Raises:
            AddressError: The address is malformed, or is beyond loopback without `allow_remote`.
        """
        raise NotImplementedError

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The clients that are connected."""
        raise NotImplementedError

    async def start(self) -> str:
        """Listen; return the real address.

        Raises:
            AddressError: Somebody else listens there, or the address cannot be had.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stop: cancel handlers, tell peers that they are gone, free the address."""
        raise NotImplementedError
