"""What can go wrong on the wire.

    WireError
    ├── AddressError      the address cannot be listened on or connected to
    ├── BadMessage        what came is not a message, or its frames do not fit it
    ├── MessageTooLarge   the other side would not take it; it was not sent
    ├── PeerGone          the other side is gone; what was asked of it will not be answered
    ├── WireTimeout       a wait reached its limit; the other side may still be there
    └── RefusedError      the other side, or a handler, said no and why

Errors of zmq and msgspec are translated where they are raised and never leave this package.
"""

from __future__ import annotations

from pie.wire.messages import RefusalCode, Refused


class WireError(Exception):
    """Anything that went wrong on the wire."""


class AddressError(WireError):
    """The address cannot be listened on or connected to."""


class BadMessage(WireError):  # noqa: N818
    """What came is not a message, or its frames do not fit it."""

    def __init__(self, reason: str, request_id: str = "") -> None:
        super().__init__(reason, request_id)
        self.reason = reason
        self.request_id = request_id
        """The id of the request where it could be read in spite of everything; else empty."""

    def __str__(self) -> str:
        return self.reason


class MessageTooLarge(WireError):  # noqa: N818
    """The other side would not take a message of this size; it was not sent."""


class PeerGone(WireError):  # noqa: N818
    """The other side is gone; what was asked of it will not be answered."""


class WireTimeout(WireError):  # noqa: N818
    """A wait reached its limit; the other side may still be there."""


class RefusedError(WireError):
    """The other side said no. A handler raises it to say no."""

    def __init__(self, code: RefusalCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(code, message, retry_after_s)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"

    def refusal(self, request_id: str) -> Refused:
        """Return the message that tells the other side."""
        return Refused(request_id, self.code, self.message, self.retry_after_s)
