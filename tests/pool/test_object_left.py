"""Small pages that have left packs in a bucket: they stay gone, for this node, the next start and others."""

from collections.abc import Callable

import pytest

from pie.page.lookup import LookupStatus
from pie.pool.bucket_source import BucketSource
from pie.pool.conformance import put, read, sample_page
from pie.pool.object import ObjectTier
from pie.pool.sealing import Sealing
from pie.pool.settings import PoolSettings
from pie.pool.tier import id_of
from tests.pool.object_places import (
    SMALL,
    fill,
    flip,
    in_one_pack,
    objects,
    open_tier,
    pages_of,
    store_of,
)

__all__ = ["in_one_pack"]

PAGE = id_of(sample_page(0, SMALL)[0])
PAYLOAD = sample_page(0, SMALL)[1]


def packs(settings: PoolSettings) -> list[str]:
    return [name for name in objects(settings) if name.startswith("packs/")]


def test_a_small_page_that_was_removed_is_gone_after_a_restart(s3_settings: PoolSettings) -> None:
    tier = open_tier(s3_settings)
    fill(tier, 12, SMALL)
    tier.flush(60)
    assert tier.remove(PAGE)
    tier.close()
    for _ in range(2):
        tier = open_tier(s3_settings)
        assert tier.lookup(PAGE) is LookupStatus.MISS
        assert len(pages_of(tier)) == 11
        tier.check()
        tier.close()
    tier = open_tier(s3_settings)
    assert put(tier, *sample_page(0, SMALL))
    tier.close()
    tier = open_tier(s3_settings)
    assert read(tier, PAGE) == PAYLOAD, "it may be stored again"
    tier.close()


@pytest.mark.parametrize("wait", [ObjectTier.flush, ObjectTier.keep_removed])
def test_what_was_waited_for_stays_gone_where_the_node_is_killed_afterwards(
    s3_settings: PoolSettings, wait: Callable[[ObjectTier, float], object]
) -> None:
    tier = open_tier(s3_settings)
    fill(tier, 12, SMALL)
    tier.flush(60)
    assert tier.remove(PAGE)
    wait(tier, 60)
    other = open_tier(s3_settings)
    assert other.lookup(PAGE) is LookupStatus.MISS
    other.close()
    tier.close()


def test_a_page_that_was_removed_before_its_pack_was_written_is_gone(
    s3_settings: PoolSettings,
) -> None:
    tier = open_tier(s3_settings)
    fill(tier, 12, SMALL)
    tier.remove(PAGE)
    tier.close()
    tier = open_tier(s3_settings)
    assert tier.lookup(PAGE) is LookupStatus.MISS
    tier.close()


def test_another_node_lets_go_of_a_page_that_one_has_removed(s3_settings: PoolSettings) -> None:
    one = open_tier(s3_settings)
    fill(one, 12, SMALL)
    one.flush(60)
    other = open_tier(s3_settings)
    assert read(other, PAGE) == PAYLOAD
    assert one.remove(PAGE)
    one.flush(60)
    other.look()
    assert other.lookup(PAGE) is LookupStatus.MISS
    other.check()
    assert other.used_bytes == sum(objects(s3_settings).values())
    for tier in (one, other):
        tier.close()


def test_a_copy_in_another_nodes_pack_goes_too(s3_settings: PoolSettings) -> None:
    one, other = open_tier(s3_settings), open_tier(s3_settings)
    for tier in (one, other):
        fill(tier, 12, SMALL)
        tier.flush(60)
    for tier in (one, other):
        tier.look()
    assert len(packs(s3_settings)) == 2
    assert one.remove(PAGE)
    for tier in (one, other):
        tier.close()
    again = open_tier(s3_settings)
    assert again.lookup(PAGE) is LookupStatus.MISS
    assert len(pages_of(again)) == 11
    again.close()


def test_a_bad_small_page_heals_and_costs_one_pack(s3_settings: PoolSettings) -> None:
    tier = open_tier(s3_settings)
    fill(tier, 12, SMALL)
    flip(tier, PAGE)
    tier.close()
    tier = open_tier(s3_settings)
    assert read(tier, PAGE) is LookupStatus.MISS
    assert put(tier, *sample_page(0, SMALL))
    tier.close()
    count = len(packs(s3_settings))
    for _ in range(2):
        tier = open_tier(s3_settings)
        assert read(tier, PAGE) == PAYLOAD
        assert not put(tier, *sample_page(0, SMALL)), "it is there"
        tier.check()
        tier.close()
        assert len(packs(s3_settings)) == count


def test_a_good_copy_counts_where_the_first_is_bad(s3_settings: PoolSettings) -> None:
    one, other = open_tier(s3_settings), open_tier(s3_settings)
    for tier in (one, other):
        fill(tier, 12, SMALL)
        tier.flush(60)
    for tier in (one, other):
        tier.look()
    flip(one, PAGE)
    assert read(one, PAGE) is LookupStatus.MISS
    for tier in (one, other):
        tier.close()
    again = open_tier(s3_settings)
    assert read(again, PAGE) == PAYLOAD
    again.close()


def test_a_pack_that_all_pages_have_left_goes_at_a_start(s3_settings: PoolSettings) -> None:
    one = open_tier(s3_settings)
    fill(one, 12, SMALL)
    one.flush(60)
    other = open_tier(s3_settings)
    pages = sorted(pages_of(one))
    for tier, some in ((one, pages[:6]), (other, pages[6:])):
        # Each removes less than half: neither empties the pack.
        for page in some[:5]:
            assert tier.remove(page)
        tier.flush(60)
    one.close()
    other.close()
    again = open_tier(s3_settings)
    assert len(pages_of(again)) == 2
    again.flush(60)
    assert again.used_bytes == sum(objects(s3_settings).values())
    again.check()
    again.close()


def test_tools_do_not_see_it_and_do_not_bring_it_back(s3_settings: PoolSettings) -> None:
    tier = open_tier(s3_settings)
    fill(tier, 12, SMALL)
    tier.flush(60)
    assert tier.remove(PAGE)
    tier.close()
    source = BucketSource(store_of(s3_settings), "s3://pages", Sealing())
    listed = list(source.pages())
    assert len(listed) == 11
    source.remove(listed[:1])
    source.close()
    tier = open_tier(s3_settings)
    assert len(pages_of(tier)) == 10
    assert tier.lookup(PAGE) is LookupStatus.MISS
    tier.close()
