"""A client of the wire that says only when a test wants that it has handled what came."""

from __future__ import annotations

from collections.abc import Callable

from pie.wire.client import WireClient


def hold_credit(client: WireClient) -> Callable[[int], None]:
    """Keep a client from giving credit; return what gives some all the same."""
    give = client._credit
    client._credit = lambda messages, size_bytes=0: None  # type: ignore[method-assign]
    return give
