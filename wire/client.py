"""The connecting end of the wire.

Covers requests and their answers, streams, messages that come unasked, heartbeats and
reconnecting to one server. Does not cover finding servers (`pie.index`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from pie.page.events import Epoch
from pie.wire.frames import Buffer
from pie.wire.messages import Message
from pie.wire.settings import WireSettings

OnMessage = Callable[[Message, Sequence[memoryview]], None]
"""Takes a message that answers no request. Must not block."""


class WireClient:
    """Talks to one server, and connects again whenever it goes and comes back.

    Use it on the event loop that started it only.
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: OnMessage | None = None,
        on_gone: Callable[[], None] | None = None,
        on_up: Callable[[Epoch], None] | None = None,
        auto_credit: bool = True,
        settings: WireSettings | None = None,
    ) -> None:
        """Prepare a client; it connects from `start` on.

        Args:
            address: What `WireServer.start` returned.
            on_message: Takes what answers no request: `StepTokens`, and `Refused` for messages
                that were sent with `send`.
            on_gone: Called each time that the server goes: it ended, or its host, or it answers
                no heartbeat. Requests that wait raise `PeerGone` by themselves.
            on_up: Called with the server's epoch each time that it answers after `start` or after
                it was gone; the epoch tells a restart from a broken connection.
            auto_credit: Whether `on_message` returning counts as having handled a `StepTokens`;
                else `grant` does.
            settings: Limits.

        Raises:
            AddressError: The address is malformed.
        """
        raise NotImplementedError

    @property
    def is_up(self) -> bool:
        """Whether the server answers."""
        raise NotImplementedError

    @property
    def epoch(self) -> Epoch:
        """The server's epoch, as of its last answer.

        Raises:
            PeerGone: It has not answered yet.
        """
        raise NotImplementedError

    async def start(self) -> Epoch:
        """Connect and return the server's epoch.

        Raises:
            WireTimeout: No answer within `WireSettings.connect_timeout_s`. The client is closed.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect. Requests that wait raise `PeerGone`; `on_gone` is not called."""
        raise NotImplementedError

    async def send(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        release: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message whose answers, if any, go to `on_message`.

        Returns once it is on its way. Large frames are not copied: leave them as they are until
        `release` is called, which happens once, on the event loop, also when this call raises.

        Raises:
            PeerGone: The server is gone.
            WireTimeout: The connection had no room in time. Nothing was sent.
        """
        raise NotImplementedError

    async def request(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        release: Callable[[], None] | None = None,
    ) -> tuple[Message, Sequence[memoryview]]:
        """Send a message that has a `request_id` and return its one answer.

        Request ids must be unique among what is under way; `new_request_id` makes them.

        Raises:
            RefusedError: The server refused.
            PeerGone: The server is gone, or goes while this waits.
            WireTimeout: No answer in time; the server was sent a `Cancel`.
        """
        raise NotImplementedError

    def stream(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        count: int | None = None,
    ) -> AsyncIterator[tuple[Message, Sequence[memoryview]]]:
        """Send a message that has a `request_id` and yield its answers as they come.

        An answer counts as handled, and gives credit, when the next is asked for. Leaving early
        sends a `Cancel`.

        Args:
            message: The request, such as `GetPages`.
            frames: Its payload.
            timeout_s: Longest wait for each answer.
            count: How many answers there are; None is one for each of the message's `pages`.

        Raises:
            RefusedError: The server refused.
            PeerGone: The server is gone, or goes while this waits.
            WireTimeout: An answer did not come in time.
        """
        raise NotImplementedError

    def grant(self, messages: int = 1) -> None:
        """Say that so many `StepTokens` have been handled. Only where `auto_credit` is off."""
        raise NotImplementedError
