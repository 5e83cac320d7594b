"""What one end of the wire has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WireCounters:
    """Counts since the start."""

    messages_in: int = 0
    messages_out: int = 0
    payload_bytes_in: int = 0
    payload_bytes_out: int = 0
    bad_messages: int = 0
    stale_epochs: int = 0
    overloads: int = 0
    """Messages refused because too many were being handled."""
    failures: int = 0
    """Handlers and callbacks that raised."""
    late_answers: int = 0
    """Answers that nobody waited for any more."""
    gone: int = 0
    """Times that the other side went."""
