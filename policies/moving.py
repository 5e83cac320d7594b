"""What brings a conversation's pages to the worker that it has moved to.

Covers the next orders for one conversation, shared by the policies that move them. Pure. A page goes through
the pool: the worker that had it stores it there, and the one that is to have it fetches it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pie.policies.cluster_policy import ClusterView, FetchPages, Order, SessionView, StorePages


def along(session: SessionView, view: ClusterView) -> Iterator[Order]:
    """Yield orders that take a conversation's pages from the worker that had it to the one that has it."""
    before, now = session.came_from, view.place(session.place)
    if before is None or now is None:
        return
    pages, here = session.pages, session.held.get(session.place, 0)
    there = session.held.get(before, 0)
    reason = f"conversation {session.session} went from {before} to {session.place}"
    if there > max(session.pooled, here) and view.place(before) is not None:
        yield StorePages(before, pages[:there], reason)
    if session.pooled > here and now.has_host and not now.draining:
        yield FetchPages(session.place, pages[: session.pooled], reason)
