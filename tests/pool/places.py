"""Places that a test names itself, and pages to store there."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace

from msgspec import structs

from pie.index.contract import IndexMode, PlaceRecord
from pie.page.events import PartMask, PlaceId
from pie.page.groups import group_keys
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.pool.client import PoolClient
from pie.pool.conformance import sample_page
from pie.pool.tier import PageId, StoredPage, id_of
from pie.wire.messages import PutStatus


class Places:
    """An index reader that knows what a test tells it."""

    mode = IndexMode.OK

    def __init__(self, *records: PlaceRecord) -> None:
        self.known = {record.place: record for record in records}

    def up(self, record: PlaceRecord) -> None:
        self.known[record.place] = record

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        return self.known

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, Sequence[PartMask]]:
        return {}


class SamplePages:
    """A sequence of sample pages, numbered from `first`."""

    def __init__(
        self, count: int, *, first: int = 0, size: int = 4096, secret: bytes | None = None
    ):
        self.take([sample_page(first + n, size, secret=secret) for n in range(count)])

    def take(self, made: Sequence[tuple[PageHeader, bytes]]) -> None:
        """Be other pages, one after another in a sequence."""
        self.payloads: list[bytes] = [payload for _, payload in made]
        self.pages: list[PageId] = [id_of(header) for header, _ in made]
        self.groups = group_keys([page.key for page in self.pages])
        self.headers: list[PageHeader] = [
            structs.replace(header, group=group)
            for (header, _), group in zip(made, self.groups, strict=True)
        ]

    async def store(self, client: PoolClient, deadline_s: float = 60) -> list[PutStatus]:
        return await client.store(
            self.headers, self.payloads, groups=self.groups, deadline_s=deadline_s
        )

    async def load(self, client: PoolClient, deadline_s: float = 60) -> list[StoredPage | None]:
        return await client.load(self.pages, groups=self.groups, deadline_s=deadline_s)

    async def hits(self, client: PoolClient, deadline_s: float = 60) -> list[bool]:
        """Load all, and say which came; what comes has to be right."""
        loaded = await self.load(client, deadline_s)
        for page, header, payload in zip(loaded, self.headers, self.payloads, strict=True):
            if page is not None:
                # A page may have been stored as one of another run of pages.
                assert structs.replace(page.header, group=header.group) == header
                assert page.payload == payload
        return [page is not None for page in loaded]


def without_waits() -> SimpleNamespace:
    """Return an `asyncio` in which who waits for a connection fails: to show that nobody does."""
    return SimpleNamespace(**{**vars(asyncio), "wait": None})


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float = 60) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(limit_s):
        while not await holds():  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(0.01)
