"""`lru`: the page unused for longest leaves first, and no page before its children.

Covers one built-in retention policy: one queue, entered again at every use. Order comes from the
order of events, not from the clock.
"""

from __future__ import annotations

from pie.policies.queued import QueuedRetention


class LruRetention(QueuedRetention):
    """Least recently used, leaves first."""

    def __init__(self) -> None:
        super().__init__(queues=1)
