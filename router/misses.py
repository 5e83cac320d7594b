"""Why prompt tokens had to be computed: a reason for every one.

Covers putting together what the worker said and what the index had said. Pure. Does not cover where
either comes from (`pie.worker.departed`, `pie.router.choice`).

What happened to a load comes first, then what the worker knows of the page, then what the index
promised: a worker may have let a page go a moment before the request came, and then the index was
behind rather than the page evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from pie.wire.messages import LoadSource, MissReason, Started

_WORKERS_WORD = frozenset({MissReason.OPAQUE, MissReason.NO_ROOM, MissReason.NO_SNAPSHOT})
"""What only the worker can know, whatever the index said."""


class Miss(msgspec.Struct, frozen=True):
    """Consecutive prompt tokens that were computed, and why."""

    at: int
    """Position of the first one."""
    tokens: int
    reason: MissReason


class Promise(msgspec.Struct, frozen=True):
    """What was known of a prompt when its worker was chosen, in leading pages."""

    own_pages: int = 0
    """That the worker could use, or fetch, as the index said."""
    other_pages: int = 0
    """The most that any other worker had."""
    tenant_pages: int = 0
    """Under another salt, or under none."""


def misses(
    prompt_tokens: int, page_tokens: int, started: Started, promise: Promise
) -> tuple[Miss, ...]:
    """Return runs of one reason that cover every prompt token which was computed."""
    cached = started.cached.total
    full = prompt_tokens // page_tokens * page_tokens
    if cached == prompt_tokens - 1 and cached >= full - 1:
        reason = MissReason.LAST_TOKEN if full == prompt_tokens else MissReason.PARTIAL_PAGE
        return (Miss(cached, 1, reason),)
    first, end = cached // page_tokens, full // page_tokens
    edges = sorted({first, end, *(at for at in _edges(started, promise) if first < at < end)})
    told: list[Miss] = []
    for at, until in pairwise(edges):
        reason, tokens = _reason(at, started, promise), (until - at) * page_tokens
        if told and told[-1].reason is reason:
            told[-1] = Miss(told[-1].at, told[-1].tokens + tokens, reason)
        else:
            told.append(Miss(at * page_tokens, tokens, reason))
    if told and cached > told[0].at:
        # A recurrent model may go on from the middle of what is a page to others.
        gone = cached - told[0].at
        told[0] = Miss(cached, told[0].tokens - gone, told[0].reason)
    if prompt_tokens > max(full, cached):
        at = max(full, cached)
        told.append(Miss(at, prompt_tokens - at, MissReason.PARTIAL_PAGE))
    return tuple(told)


def _edges(started: Started, promise: Promise) -> Iterator[int]:
    """Yield every page before which the reason may change."""
    yield from (promise.own_pages, promise.other_pages, promise.tenant_pages)
    for at, source in _placed(started):
        yield from (at, at + source.loaded_pages, at + source.pages)
    at = started.missed_from
    for run in started.missed:
        at += run.pages
        yield at


def _reason(page: int, started: Started, promise: Promise) -> MissReason:
    """Return why one full page was computed."""
    loaded = _of_load(page, started, promise)
    if loaded is not None:
        return loaded
    word = _of_worker(page, started)
    if word in _WORKERS_WORD:
        return word
    if page < promise.own_pages:
        return MissReason.STALE_INDEX
    if word is MissReason.EVICTED:
        return word
    if page < promise.other_pages:
        return MissReason.OTHER_WORKER
    return MissReason.TENANT if page < promise.tenant_pages else MissReason.NEVER_COMPUTED


def _of_load(page: int, started: Started, promise: Promise) -> MissReason | None:
    """Return why a page that could have been loaded was not; None where it could not.

    A worker that is about to ask the pool does not know how many pages are there: the index does.
    """
    if started.load is None:
        return None
    for at, source in _placed(started):
        if not at <= page < at + source.pages:
            continue
        if source.tier == "pool" and page >= promise.own_pages:
            return None
        if not source.chosen:
            return MissReason.LOAD_SLOWER
        if page < at + source.loaded_pages:
            # It came, and could not be used without one before it.
            return MissReason.LOAD_FAILED
        return MissReason.LOAD_LATE if started.load.overran else MissReason.LOAD_FAILED
    return None


def _placed(started: Started) -> Iterator[tuple[int, LoadSource]]:
    """Yield each source with its first page."""
    at = started.missed_from
    for source in () if started.load is None else started.load.sources:
        yield at, source
        at += source.pages


def _of_worker(page: int, started: Started) -> MissReason:
    at = started.missed_from
    for run in started.missed:
        at += run.pages
        if page < at:
            return run.reason
    return MissReason.NEVER_COMPUTED
