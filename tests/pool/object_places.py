"""Helpers of the object tier's tests."""

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from typing_extensions import Buffer

from pie.page.header import PageHeader
from pie.pool import object_writer
from pie.pool.conformance import put, sample_page
from pie.pool.object import ObjectTier
from pie.pool.object_s3 import S3Store
from pie.pool.object_store import FoundObject, ObjectStart, ObjectStore
from pie.pool.settings import PoolSettings
from pie.pool.tier import PageId, id_of
from tests.support.s3_server import settings_for_url

LARGE = 100_000
SMALL = 5_000


def open_tier(settings: PoolSettings, budget_bytes: int | None = None, **options) -> ObjectTier:  # type: ignore[no-untyped-def]
    """Return an open tier over a real store."""
    store = options.pop("store", None) or store_of(settings)
    # A busy machine makes no load too late.
    options.setdefault("timeout_s", 60.0)
    tier = ObjectTier(
        store, int(settings.object_budget) if budget_bytes is None else budget_bytes, **options
    )
    tier.open()
    return tier


def store_of(settings: PoolSettings) -> S3Store:
    """Return a store of its own prefix, and of a client that others use too: one takes 0.3 s to make."""
    store = copy.copy(_client(settings.object_endpoint_url))
    store._prefix = f"{settings.object_prefix}/"
    store.close = lambda: None  # type: ignore[method-assign]
    return store


@functools.cache
def _client(url: str) -> S3Store:
    return S3Store(settings_for_url(url))


@pytest.fixture(autouse=True)
def in_one_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages wait for a flush, however long a busy machine takes to make them; import it to have it."""
    monkeypatch.setattr(object_writer, "PACK_AGE_S", 1000.0)


def objects(settings: PoolSettings) -> dict[str, int]:
    """Return names and sizes of all objects below the prefix."""
    return {one.name: one.size for one in store_of(settings).found()}


def flip(tier: ObjectTier, page: PageId, offset: int = 2000) -> None:
    """Change a bit of a page where the bucket keeps it."""
    tier.flush(60)
    entry = tier._table.entries[page]
    home = entry.home
    assert home is not None
    name = entry.name_in(home)
    store = tier._store
    data = store.get(name)
    assert data is not None
    changed = bytearray(data)
    changed[home.start + offset] ^= 1
    store.remove([name])
    assert store.put(name, changed)


def fill(tier: ObjectTier, count: int, size: int, first: int = 0) -> list[PageHeader]:
    """Store pages of one size until `count` are in or one finds no room."""
    stored = []
    for number in range(first, first + count):
        header, payload = sample_page(number, size)
        if not put(tier, header, payload):
            break
        stored.append(header)
    return stored


def pages_of(tier: ObjectTier) -> set[PageId]:
    """Return the pages that a tier lists."""
    return {id_of(header) for header in tier.pages()}


def wait_until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until something is so."""
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "it did not come to be so in time"
        time.sleep(0.02)


class Wrapped:
    """A store that does what another does. Base of those that fail."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.puts: list[str] = []
        self.gets: list[str] = []

    def put(self, name: str, data: Buffer) -> bool:
        self.puts.append(name)
        return self.inner.put(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.gets.append(name)
        return self.inner.get(name, start, length)

    def get_start(self, name: str, length: int) -> ObjectStart | None:
        return self.inner.get_start(name, length)

    def remove(self, names: Sequence[str]) -> None:
        self.inner.remove(names)

    def found(self) -> Iterator[FoundObject]:
        return self.inner.found()

    def probe(self) -> None:
        self.inner.probe()

    def close(self) -> None:
        self.inner.close()
