"""One connected client, seen from the server.

Covers sending to it, its credit and the moment it goes. Does not cover how its messages come in
(`pie.wire.server`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie.wire.frames import Buffer
from pie.wire.messages import Message


class Peer:
    """One connected client. Use it on the server's event loop only.

    A client that reconnects is another peer: what was under way for the old one is lost.
    """

    id: bytes
    """Unique among the peers of one server."""

    @property
    def is_gone(self) -> bool:
        """Whether the client is known to be gone."""
        raise NotImplementedError

    @property
    def has_credit(self) -> bool:
        """Whether a `StepTokens` or `PageData` could be sent now without waiting."""
        raise NotImplementedError

    async def send(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        release: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message; return once it is on its way.

        `StepTokens` and `PageData` wait for credit, in order among themselves; all else may
        overtake them. Large frames are not copied: leave them as they are until `release` is called.

        Args:
            message: The header.
            frames: The payload.
            release: Called once, on the event loop, when no frame is read any more; also when
                this call raises.
            timeout_s: Longest wait for credit or room; None is `WireSettings.send_timeout_s`.

        Raises:
            PeerGone: The client is gone, or goes while this waits.
            WireTimeout: No credit or room came in time. Nothing was sent.
        """
        raise NotImplementedError

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once on the event loop when the client goes; soon, if it has gone."""
        raise NotImplementedError
