"""The disk tier with compression and encryption: counted exactly, and never lost to a wrong key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pie.page.lookup import LookupStatus
from pie.pool.conformance import TierConformance, put, read, sample_page
from pie.pool.disk import DiskTier
from pie.pool.sealing import Sealing
from pie.pool.settings import Compression, Durability
from pie.pool.tier import PageId, Tier, id_of
from tests.pool.disk_places import LARGE, SMALL, disk_usage, fill, flip, pages_of, where
from tests.pool.test_sealing import smooth_page, with_payload

KEY, OTHER = b"k" * 32, b"o" * 32
Open = Callable[..., DiskTier]


class TestSealedDiskTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_tier(self, budget_bytes: int) -> Tier:
        sealing = Sealing(compression=Compression.AUTO, keys=[KEY])
        tier = DiskTier([self.path], budget_bytes, sealing=sealing)
        tier.open()
        return tier

    def damage(self, tier: Tier, page: PageId) -> None:
        assert isinstance(tier, DiskTier)
        path, start, _ = where(tier, page)
        flip(path, start + 2600)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers on one folder, one after another, with keys; checks and closes them."""
    tiers: list[DiskTier] = []

    def open_one(*keys: bytes, budget: int = 16 << 20, **options: object) -> DiskTier:
        if tiers:
            tiers[-1].check()
            tiers[-1].close()
        options = {"sealing": Sealing(keys=keys), "durability": Durability.NONE} | options
        tiers.append(DiskTier([tmp_path], budget, **options))  # type: ignore[arg-type]
        tiers[-1].open()
        return tiers[-1]

    yield open_one
    tiers[-1].check()
    tiers[-1].close()


def test_packed_pages_take_less_room_and_all_of_it_is_counted(
    open_tier: Open, tmp_path: Path
) -> None:
    tier = open_tier(sealing=Sealing(compression=Compression.AUTO))
    before = tier.used_bytes
    pages = [smooth_page(number, 400_000) for number in range(20)]
    assert all(put(tier, *page) for page in pages)
    assert tier.used_bytes - before < 0.9 * 20 * 400_000
    du = disk_usage(tmp_path)
    assert abs(du - tier.used_bytes) <= 0.02 * du
    assert all(read(tier, id_of(header)) == payload for header, payload in pages)
    for header, _ in pages:
        assert tier.remove(id_of(header))
    assert tier.used_bytes == before


def test_a_payload_that_is_small_once_it_is_packed_goes_into_a_pack(open_tier: Open) -> None:
    tier = open_tier(sealing=Sealing(compression=Compression.LZ4))
    zeros = bytes(80_000)
    header = with_payload(sample_page(1, 80_000)[0], zeros)
    assert put(tier, header, zeros)
    assert where(tier, id_of(header))[0].suffix == ".pack"
    assert read(open_tier(), id_of(header)) == zeros, "what is packed is read in any case"


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_pages_of_another_key_are_misses_and_stay(
    open_tier: Open, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    headers = fill(open_tier(KEY), 10, size)
    used = open_tier(KEY).used_bytes
    for keys in ((OTHER,), ()):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            tier = open_tier(*keys)
        assert len(caplog.messages) == 1, "one line, and not one for each page"
        assert pages_of(tier) == set()
        assert read(tier, id_of(headers[0])) is LookupStatus.MISS
        assert tier.lookup(id_of(headers[0])) is LookupStatus.MISS
        assert tier.sealing.counters.locked == 10
        assert tier.used_bytes == used
        assert not tier.bad_by_reason
    tier = open_tier(KEY)
    assert [read(tier, id_of(header)) for header in headers] == [
        sample_page(number, size)[1] for number in range(10)
    ]


def test_a_new_key_writes_and_the_one_before_reads(open_tier: Open) -> None:
    old = fill(open_tier(KEY), 4, LARGE)
    tier = open_tier(OTHER, KEY)
    new = fill(tier, 4, LARGE, first=4)
    assert pages_of(tier) == {id_of(header) for header in old + new}
    assert pages_of(open_tier(OTHER)) == {id_of(header) for header in new}


def test_pages_from_before_encryption_was_switched_on_are_read(open_tier: Open) -> None:
    plain = fill(open_tier(), 3, LARGE)
    tier = open_tier(KEY)
    assert pages_of(tier) == {id_of(header) for header in plain}
    assert read(tier, id_of(plain[0])) == sample_page(0, LARGE)[1]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_page_is_stored_over_one_that_is_locked(
    open_tier: Open, tmp_path: Path, size: int
) -> None:
    headers = fill(open_tier(KEY), 5, size)
    tier = open_tier(OTHER)
    assert len(fill(tier, 5, size)) == 5
    assert pages_of(tier) == {id_of(header) for header in headers}
    assert disk_usage(tmp_path) <= tier.used_bytes
    tier.check()
    assert pages_of(open_tier(KEY)) == set()
    assert pages_of(open_tier(OTHER)) == {id_of(header) for header in headers}


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_locked_pages_make_room_for_new_ones(open_tier: Open, tmp_path: Path, size: int) -> None:
    budget = 4 << 20
    held = fill(open_tier(KEY, budget=budget), 10_000, size)
    tier = open_tier(OTHER, budget=budget)
    count = len(held) // 2
    assert len(fill(tier, count, size, first=20_000)) == count
    assert tier.used_bytes <= budget
    assert disk_usage(tmp_path) <= tier.used_bytes
    left = pages_of(open_tier(KEY, OTHER, budget=budget))
    assert len(left) > count, "some of those with the other key are still there"
    oldest = [id_of(header) in left for header in held]
    assert oldest == sorted(oldest), "the oldest went first"


def test_locked_pages_move_when_their_pack_is_compacted(open_tier: Open) -> None:
    tier = open_tier(KEY)
    mine = fill(tier, 20, SMALL)
    tier = open_tier(OTHER, KEY)
    others = fill(tier, 300, SMALL, first=100)
    tier = open_tier(KEY)
    for header in mine:
        assert tier.remove(id_of(header))
    tier = open_tier(OTHER)
    for header in others[::2]:
        assert tier.remove(id_of(header))
    tier.check()
    assert pages_of(open_tier(OTHER)) == {id_of(header) for header in others[1::2]}


def test_a_file_of_another_key_that_appears_under_a_running_node_is_left_alone(
    open_tier: Open,
) -> None:
    tier = open_tier(KEY)
    (header,) = fill(tier, 1, LARGE)
    path = where(tier, id_of(header))[0]
    payload = sample_page(0, LARGE)[1]
    theirs = b"".join(Sealing(keys=[OTHER]).seal(header, payload).chunks)
    path.write_bytes(theirs)
    assert read(tier, id_of(header)) is LookupStatus.MISS
    assert path.read_bytes() == theirs
    assert not tier.bad_by_reason
    assert put(tier, header, payload), "and can be written over"
    assert read(tier, id_of(header)) == payload
