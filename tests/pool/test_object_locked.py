"""Pages in a bucket that are encrypted with a key that is not here: counted, replaced, and let go first."""

import pytest

from pie.page.lookup import LookupStatus
from pie.pool.conformance import put, read, sample_page
from pie.pool.object import ObjectTier
from pie.pool.sealing import Sealing
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from tests.pool.object_places import LARGE, SMALL, fill, in_one_pack, objects, open_tier, store_of

__all__ = ["in_one_pack"]

KEY, OTHER = b"k" * 32, b"o" * 32
BUDGET_BYTES = 3 << 20


def open_with(settings: PoolSettings, *keys: bytes, budget_bytes: int = 16 << 20) -> ObjectTier:
    return open_tier(settings, budget_bytes, sealing=Sealing(keys=keys))


def test_a_page_of_a_lost_key_is_stored_anew(s3_settings: PoolSettings) -> None:
    header, payload = sample_page(1, LARGE)
    page = id_of(header)
    tier = open_with(s3_settings, KEY)
    assert put(tier, header, payload)
    tier.close()
    tier = open_with(s3_settings, OTHER)
    assert tier.lookup(page) is LookupStatus.MISS
    assert put(tier, header, payload)
    tier.flush(60)
    assert read(tier, page) == payload
    tier.look()
    tier.check()
    assert tier.used_bytes == sum(objects(s3_settings).values())
    assert tier.written.lost_races == 0
    tier.close()
    tier = open_with(s3_settings, OTHER)
    assert read(tier, page) == payload
    tier.close()


def test_a_page_of_another_cluster_stays_under_its_name(s3_settings: PoolSettings) -> None:
    header, payload = sample_page(1, LARGE, secret=b"s" * 32)
    tier = open_tier(s3_settings, sealing=Sealing(secret=b"s" * 32, keys=[KEY]))
    assert put(tier, header, payload)
    tier.close()
    name = next(name for name in objects(s3_settings) if not name.startswith("lists/"))
    before = store_of(s3_settings).get(name)
    tier = open_with(s3_settings, OTHER)
    assert put(tier, *sample_page(1, LARGE))
    tier.flush(60)
    assert read(tier, id_of(header)) is LookupStatus.MISS
    tier.close()
    assert store_of(s3_settings).get(name) == before


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_pages_of_a_lost_key_count_and_go_first(s3_settings: PoolSettings, size: int) -> None:
    tier = open_with(s3_settings, KEY, budget_bytes=BUDGET_BYTES)
    assert len(fill(tier, 600, size)) < 600, "it is full"
    tier.close()
    full = sum(objects(s3_settings).values())
    tier = open_with(s3_settings, OTHER, budget_bytes=BUDGET_BYTES)
    assert tier.used_bytes == full
    assert not list(tier.pages())
    count = BUDGET_BYTES // size // 2
    assert len(fill(tier, count, size, first=1000)) == count, "what is locked has made room"
    tier.flush(60)
    tier.look()
    tier.flush(60)
    assert sum(objects(s3_settings).values()) <= BUDGET_BYTES
    assert len(list(tier.pages())) == count
    tier.check()
    tier.close()


def test_locked_objects_go_first_from_a_bucket_that_is_too_full(s3_settings: PoolSettings) -> None:
    tier = open_with(s3_settings, KEY)
    fill(tier, 20, LARGE)
    tier.close()
    tier = open_with(s3_settings, OTHER)
    mine = fill(tier, 10, LARGE, first=1000)
    tier.close()
    tier = open_with(s3_settings, OTHER, budget_bytes=2 << 20)
    assert {id_of(header) for header in tier.pages()} == {id_of(header) for header in mine}
    tier.flush(60)
    assert sum(objects(s3_settings).values()) <= 2 << 20
    tier.close()
