"""Nodes share a bucket: none takes away what another one serves, whatever they do at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from typing_extensions import Buffer

from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.checksum import Checksum
from pie.pool.conformance import put, read, sample_page
from pie.pool.object import ObjectTier
from pie.pool.object_store import ObjectStore
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from tests.pool.object_places import (
    LARGE,
    SMALL,
    Wrapped,
    fill,
    objects,
    open_tier,
    store_of,
)

pytestmark = pytest.mark.live

Open = Callable[..., ObjectTier]

LONG_S = 10_000.0


@pytest.fixture
def now() -> list[float]:
    """The clock of all nodes."""
    return [0.0]


@pytest.fixture
def start(s3_settings: PoolSettings, now: list[float]) -> Iterator[Open]:
    """Opens tiers on one prefix; checks and closes them."""
    tiers: list[ObjectTier] = []

    def open_one(**options: Any) -> ObjectTier:
        tiers.append(open_tier(s3_settings, 64 << 20, clock=lambda: now[0], **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


def packs(settings: PoolSettings) -> list[str]:
    return [name for name in objects(settings) if name.startswith("packs/")]


def with_other_bits(number: int, size: int) -> tuple[PageHeader, bytes]:
    """Return the same page as another worker computes it: its name is the same, and some bits are not."""
    header, payload = sample_page(number, size)
    payload = bytes([payload[0] ^ 1]) + payload[1:]
    return msgspec.structs.replace(header, checksum=Checksum().digest(payload)), payload


def assert_has_all(tier: ObjectTier, numbers: range, size: int = SMALL) -> None:
    for number in numbers:
        header, payload = sample_page(number, size)
        assert read(tier, id_of(header)) == payload


class Interrupted(Wrapped):
    """Does something when an object is there and its writer does not know it yet."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.meanwhile: Callable[[], object] = lambda: None
        self.is_done = False

    def put(self, name: str, data: Buffer) -> bool:
        made = super().put(name, data)
        if not name.startswith("lists/") and not self.is_done:
            self.is_done = True
            self.meanwhile()
        return made


def test_nodes_that_packed_the_same_pages_leave_one_of_the_packs(
    start: Open, s3_settings: PoolSettings, now: list[float]
) -> None:
    one, other = start(), start()
    for tier in (one, other):
        fill(tier, 20, SMALL)
        tier.flush(60)
    for _ in range(2):
        for tier in (one, other):
            tier.look()
            tier.flush(60)
            assert packs(s3_settings)
    for tier in (one, other, start()):
        assert_has_all(tier, range(20))
    now[0] += LONG_S
    for tier in (one, other):
        tier.look()
        tier.flush(60)
        tier.look()
    assert len(packs(s3_settings)) == 1
    for tier in (one, other):
        assert_has_all(tier, range(20))
        assert tier.used_bytes == sum(objects(s3_settings).values())


def test_packs_that_have_some_pages_in_common_lose_none(
    start: Open, s3_settings: PoolSettings, now: list[float]
) -> None:
    one, other = start(), start()
    fill(one, 20, SMALL)
    fill(other, 20, SMALL, first=10)
    for tier in (one, other):
        tier.flush(60)
    for _ in range(4):
        for tier in (one, other):
            tier.look()
            tier.flush(60)
        now[0] += LONG_S
    for tier in (one, other, start()):
        assert_has_all(tier, range(30))


def test_a_pack_that_is_being_sent_is_not_taken_for_somebody_elses(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Interrupted(store_of(s3_settings))
    tier = start(store=store)
    store.meanwhile = tier.look
    fill(tier, 20, SMALL)
    tier.flush(60)
    assert len(packs(s3_settings)) == 1
    tier.look()
    tier.flush(60)
    assert tier.used_bytes == sum(objects(s3_settings).values())
    assert_has_all(tier, range(20))


def test_a_pack_that_takes_the_place_of_another_is_not_taken_for_somebody_elses(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Interrupted(store_of(s3_settings))
    tier = start(store=store)
    headers = fill(tier, 40, SMALL)
    tier.flush(60)
    store.meanwhile, store.is_done = tier.look, False
    for header in headers[:25]:
        assert tier.remove(id_of(header))
    tier.flush(60)
    assert store.is_done, "a pack was sent anew"
    tier.look()
    tier.flush(60)
    assert tier.used_bytes == sum(objects(s3_settings).values())
    assert_has_all(tier, range(25, 40))


def test_a_page_file_whose_page_leaves_while_it_is_sent_leaves_too(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Interrupted(store_of(s3_settings))
    tier = start(store=store)
    header, _ = sample_page(1, LARGE)

    def leave() -> None:
        assert tier.remove(id_of(header))
        tier.look()

    store.meanwhile = leave
    fill(tier, 1, LARGE, first=1)
    tier.flush(60)
    assert tier.lookup(id_of(header)) is LookupStatus.MISS
    assert objects(s3_settings) == {}
    assert tier.used_bytes == 0


def test_a_pack_whose_pages_all_leave_while_it_is_sent_gives_its_bytes_back_once(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Interrupted(store_of(s3_settings))
    tier = start(store=store)
    fill(tier, 5, LARGE, first=100)
    tier.flush(60)
    store.is_done = False
    headers = [sample_page(number, SMALL)[0] for number in range(20)]

    def leave() -> None:
        for header in headers:
            assert tier.remove(id_of(header))

    store.meanwhile = leave
    fill(tier, 20, SMALL)
    tier.flush(60)
    for _ in range(2):
        tier.look()
        assert tier.used_bytes == sum(objects(s3_settings).values())
        tier.check()
    assert_has_all(tier, range(100, 105), LARGE)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_page_that_two_workers_computed_with_other_bits_stays_and_is_served_by_both(
    start: Open, s3_settings: PoolSettings, now: list[float], size: int
) -> None:
    one, other = start(), start()
    mine, theirs = sample_page(1, size), with_other_bits(1, size)
    assert put(one, *mine)
    one.flush(60)
    assert put(other, *theirs)
    other.flush(60)
    page = id_of(mine[0])
    for _ in range(3):
        for tier in (one, other):
            got = tier.prepare_load(page)
            assert not isinstance(got, LookupStatus)
            assert (got.header, bytes(got.payload)) in [mine, theirs], "what it says is what it is"
            tier.complete_load(page)
            assert tier.bad_pages.at_load == 0
        now[0] += LONG_S
        for tier in (one, other):
            tier.look()
            tier.flush(60)
    assert len([name for name in objects(s3_settings) if not name.startswith("lists/")]) == 1


def test_a_name_that_something_strange_has_is_left_to_it(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    header, payload = sample_page(1, LARGE)
    assert put(tier, header, payload)
    tier.flush(60)
    (name,) = objects(s3_settings)
    store = store_of(s3_settings)
    store.remove([name])
    assert store.put(name, b"what no page begins like")
    other = start()
    assert put(other, header, payload)
    other.flush(60)
    assert read(other, id_of(header)) is LookupStatus.MISS
    assert other.written.dropped == 1
    other.flush(60)
    assert store.get(name) == b"what no page begins like"


def test_what_is_found_to_be_missing_is_not_removed_where_another_node_has_made_it_anew(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = Wrapped(store_of(s3_settings))
    one, other = start(), start(store=store)
    header, payload = sample_page(1, LARGE)
    page = id_of(header)
    assert put(one, header, payload)
    one.flush(60)
    other.look()
    assert one.remove(page)
    one.flush(60)
    # Pinned once more, so that the page leaves later than it was found to be missing.
    first = other._table.entries[page]
    first.pins += 1
    assert read(other, page) is LookupStatus.MISS
    assert put(one, header, payload)
    one.flush(60)
    other._unpin(page, first)
    other.flush(60)
    assert read(one, page) == payload
