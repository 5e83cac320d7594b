"""Questions to a pool node that are answered by a status for each page.

Covers look-ups, offers and puts of both those who use nodes (`pie.pool.client`) and nodes among
themselves (`pie.pool.migration`), and doing several at once. Does not cover whom to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.pool.tier import Buffer, PageId
from pie.wire.client import WireClient
from pie.wire.messages import Lookup, LookupResult, PutPages, PutResult, StoreWanted

PUT_BYTES = 4 << 20
"""Payloads of one `PutPages`, unless one page alone is larger."""

T = TypeVar("T")

STATUSES: Mapping[int, LookupStatus] = {int(status): status for status in LookupStatus}


class WrongAnswerError(Exception):
    """A node answered with something that was not asked."""


def names(pages: Iterable[PageId]) -> tuple[tuple[PageKey, int], ...]:
    """Return pages as messages name them: a page is encoded as the pair that it is."""
    return tuple(pages)


async def ask_statuses(
    client: WireClient,
    message: Lookup | StoreWanted | PutPages,
    timeout_s: float | None,
    frames: Sequence[Buffer] = (),
    release: Callable[[], None] | None = None,
) -> tuple[int, ...]:
    """Ask for a status for each page of `message`; `release` says that no frame is read any more.

    Without `timeout_s` the caller ends the wait, by a limit of its own.

    Raises:
        WireError: No answer, or a refusal.
        WrongAnswerError: The answer is of another kind or length.
    """
    answer, _ = await client.request(message, frames, timeout_s=timeout_s, release=release)
    asked = len(message.headers if isinstance(message, PutPages) else message.pages)
    kind = PutResult if isinstance(message, PutPages) else LookupResult
    if not isinstance(answer, kind) or len(answer.statuses) != asked:
        raise WrongAnswerError
    if not STATUSES.keys() >= set(answer.statuses):
        raise WrongAnswerError
    return answer.statuses


def by_bytes(positions: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cut positions into runs whose payloads are sent together; `sizes` has all pages' sizes."""
    some: list[int] = []
    total = 0
    for at in positions:
        if some and total + sizes[at] > PUT_BYTES:
            yield some
            some, total = [], 0
        some.append(at)
        total += sizes[at]
    if some:
        yield some


async def at_once(do: Callable[[T], Awaitable[None]], items: Iterable[T], limit: int) -> None:
    """Do something with each item in order, up to `limit` at once.

    The first error ends all of it and is raised.
    """
    left = iter(items)

    async def work() -> None:
        for item in left:
            await do(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(limit):
                tasks.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
