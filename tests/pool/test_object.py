"""The object tier passes the suite of all tiers against a real S3 server, and keeps its pages over restarts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from pie.cluster.local_s3 import LocalS3
from pie.page.format import decode_page, page_name
from pie.pool.checksum import Checksum
from pie.pool.conformance import TierConformance, TierMachine, put, read, sample_page
from pie.pool.object import ObjectTier
from pie.pool.object_s3 import S3Store
from pie.pool.sealing import Sealing
from pie.pool.settings import Compression, PoolSettings
from pie.pool.tier import PageId, Tier, id_of
from tests.pool.object_places import (
    LARGE,
    SMALL,
    Wrapped,
    fill,
    flip,
    in_one_pack,
    objects,
    open_tier,
    pages_of,
    store_of,
    wait_until,
)
from tests.support.s3_server import settings_for

pytestmark = pytest.mark.live

__all__ = ["in_one_pack"]

Open = Callable[..., ObjectTier]


class TestObjectTier(TierConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3_settings: PoolSettings) -> None:
        self.settings = s3_settings

    def make_tier(self, budget_bytes: int) -> Tier:
        return open_tier(self.settings, budget_bytes)

    def damage(self, tier: Tier, page: PageId) -> None:
        assert isinstance(tier, ObjectTier)
        flip(tier, page)


def test_any_order_of_verbs_and_restarts_agrees_with_a_plain_dict(s3_server: LocalS3) -> None:
    class RestartMachine(TierMachine):
        """A plain dict against a tier that is closed and opened again."""

        @staticmethod
        def make_tier(budget_bytes: int) -> Tier:
            return open_tier(settings_for(s3_server), budget_bytes)

        @precondition(lambda self: not self.writing and not self.loans)
        @rule()
        def restart(self) -> None:
            assert isinstance(self.tier, ObjectTier)
            before = self.tier
            before.close()
            assert isinstance(before._store, S3Store)
            prefix = before._store._prefix.removesuffix("/")
            again = settings_for(s3_server, object_prefix=prefix)
            self.tier = open_tier(again, before.budget_bytes)
            # A page that left a pack which is still there may come back: its name is its content.
            assert pages_of(self.tier) >= set(self.held)
            for page in pages_of(self.tier) - set(self.held):
                assert self.tier.remove(page)

    run_state_machine_as_test(
        RestartMachine,
        settings=settings(
            max_examples=10,
            deadline=None,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def start(s3_settings: PoolSettings) -> Iterator[Open]:
    """Opens tiers on one prefix; checks and closes them."""
    tiers: list[ObjectTier] = []

    def open_one(budget_bytes: int = 64 << 20, **options: object) -> ObjectTier:
        tiers.append(open_tier(s3_settings, budget_bytes, **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


def lists_in(settings: PoolSettings) -> list[str]:
    return [name for name in objects(settings) if name.startswith("lists/")]


def test_pages_of_all_sizes_are_there_after_a_restart(start: Open) -> None:
    sizes = [1, 100, SMALL, 65_535, 65_536, LARGE, 1 << 20]
    pages = [sample_page(number, size) for number, size in enumerate(sizes)]
    tier = start()
    assert all(put(tier, *page) for page in pages)
    tier.close()
    again = start()
    assert set(again.pages()) == {header for header, _ in pages}
    assert all(read(again, id_of(header)) == payload for header, payload in pages)


def test_what_is_counted_is_what_the_bucket_holds(start: Open, s3_settings: PoolSettings) -> None:
    budget = 8 << 20
    tier = start(budget)
    chance = random.Random(1)
    held: list[PageId] = []
    for number in range(250):
        page, payload = sample_page(number, chance.choice([3_000, 40_000, LARGE]))
        while not put(tier, page, payload):
            assert tier.remove(held.pop(0 if chance.random() < 0.8 else -1))
        held.append(id_of(page))
    tier.flush(60)
    in_bucket = sum(objects(s3_settings).values())
    assert in_bucket == tier.used_bytes <= budget
    assert sum(header.raw_bytes for header in tier.pages()) > 0.5 * budget
    tier.close()
    again = start(budget)
    assert again.used_bytes == sum(objects(s3_settings).values()) <= budget


def test_a_page_file_has_its_name_and_its_bytes_as_written_down(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    header, payload = sample_page(1, LARGE)
    put(tier, header, payload)
    tier.flush(60)
    name = page_name(header.model_root, header.key, header.part)
    data = store_of(s3_settings).get(name)
    assert data is not None
    found, stored = decode_page(data)
    assert found == header
    assert stored == payload


def test_small_pages_share_an_object_and_are_fetched_together(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    headers = fill(tier, 100, SMALL)
    tier.flush(60)
    assert len(objects(s3_settings)) == 1
    store = Wrapped(store_of(s3_settings))
    again = start(store=store)
    store.gets.clear()
    again.expect([id_of(header) for header in headers])
    for number, header in enumerate(headers):
        assert read(again, id_of(header)) == sample_page(number, SMALL)[1]
    assert len(store.gets) <= 2


def test_a_start_takes_a_request_a_list_and_none_a_page(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    headers = fill(tier, 60, LARGE) + fill(tier, 100, SMALL, first=100)
    tier.close()
    store = Wrapped(store_of(s3_settings))
    again = start(store=store)
    assert set(again.pages()) == set(headers)
    assert len(store.gets) == 2, "one list and the end of one pack"


def test_pages_whose_list_was_never_written_are_found_by_their_headers(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    headers = fill(tier, 20, LARGE)
    tier.flush(60)
    assert set(start().pages()) == set(headers)


def test_many_lists_are_merged_into_few(
    start: Open, s3_settings: PoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.pool.object_lists.MANY_LISTS", 3)
    headers = []
    for number in range(5):
        tier = start()
        headers += fill(tier, 2, LARGE, first=10 * number)
        tier.close()
    start()
    wait_until(lambda: len(lists_in(s3_settings)) <= 2)
    assert set(start().pages()) == set(headers)


def test_a_node_that_runs_for_long_merges_its_lists_and_forgets_pages_that_are_gone(
    start: Open, s3_settings: PoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.pool.object_lists.MANY_LISTS", 3)
    monkeypatch.setattr("pie.pool.object_lists.LIST_AGE_S", 0.0)
    tier = start()
    headers = []
    for number in range(5):
        headers += fill(tier, 1, LARGE, first=number)
        tier.flush(60)
        wait_until(lambda: not tier._lists.is_due)
        if number == 1:
            assert tier.remove(id_of(headers.pop(0)))
            tier.flush(60)
    wait_until(lambda: len(lists_in(s3_settings)) <= 2)
    wait_until(lambda: tier.used_bytes == sum(objects(s3_settings).values()))
    tier.look()
    assert tier.used_bytes == sum(objects(s3_settings).values())
    assert set(start().pages()) == set(headers)


def test_removed_pages_leave_the_bucket_with_few_requests(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    headers = fill(tier, 60, LARGE)
    tier.flush(60)
    for header in headers:
        assert tier.remove(id_of(header))
    tier.flush(60)
    assert tier.used_bytes == 0
    assert not [name for name in objects(s3_settings) if not name.startswith("lists/")]
    assert tier.written.removed == 60
    assert tier.written.remove_requests <= 3


def test_a_pack_that_is_half_dead_is_sent_anew_without_what_is_dead(
    start: Open, s3_settings: PoolSettings
) -> None:
    tier = start()
    headers = fill(tier, 40, SMALL)
    tier.flush(60)
    (before,) = objects(s3_settings)
    for header in headers[:25]:
        assert tier.remove(id_of(header))
    tier.flush(60)
    after = objects(s3_settings)
    assert before not in after
    assert sum(after.values()) == tier.used_bytes < 22 * (SMALL + 4096)
    for number in range(25, 40):
        assert read(tier, id_of(headers[number])) == sample_page(number, SMALL)[1]


def test_a_smaller_budget_lets_what_is_oldest_go(start: Open, s3_settings: PoolSettings) -> None:
    tier = start()
    fill(tier, 60, LARGE)
    tier.close()
    again = start(2 << 20)
    again.flush(60)
    assert 0 < sum(objects(s3_settings).values()) <= 2 << 20
    assert len(pages_of(again)) > 10


def test_two_nodes_that_write_one_page_make_one_object(
    start: Open, s3_settings: PoolSettings
) -> None:
    one, other = start(), start()
    pages = [sample_page(number, LARGE) for number in range(10)]
    for tier in (one, other):
        assert all(put(tier, *page) for page in pages)
    for tier in (one, other):
        tier.flush(60)
    assert len(objects(s3_settings)) == 10
    assert one.written.lost_races + other.written.lost_races == 10
    for tier in (one, other):
        assert all(read(tier, id_of(header)) == payload for header, payload in pages)


def test_a_store_that_knows_no_conditions_is_written_all_the_same(
    start: Open, s3_settings: PoolSettings
) -> None:
    store = store_of(s3_settings)
    store._is_conditional = False
    tier = start(store=store)
    header, payload = sample_page(1, LARGE)
    for _ in range(2):
        assert store.put("twice", b"the same")
    assert put(tier, header, payload)
    tier.flush(60)
    assert read(tier, id_of(header)) == payload


def test_nodes_see_what_others_have_written_and_removed(start: Open) -> None:
    changes: list[str] = []
    one, other = start(), start(on_changed=lambda: changes.append("changed"))
    large, small = fill(one, 5, LARGE), fill(one, 20, SMALL, first=100)
    one.flush(60)
    other.look()
    assert set(other.pages()) == {*large, *small}
    assert changes
    used = other.used_bytes
    for header in large[:3]:
        one.remove(id_of(header))
    one.flush(60)
    other.look()
    assert set(other.pages()) == {*large[3:], *small}
    assert other.used_bytes < used


def test_what_another_node_has_removed_is_a_miss_and_no_damage(start: Open) -> None:
    one, other = start(), start()
    headers = fill(one, 3, LARGE)
    one.flush(60)
    other.look()
    page = id_of(headers[0])
    assert one.remove(page)
    one.flush(60)
    assert read(other, page) == 0
    assert other.bad_by_reason == {"missing": 1}
    assert other.bad_pages.at_load == 0
    assert page not in pages_of(other)


def test_pages_of_another_secret_are_left_alone(start: Open, s3_settings: PoolSettings) -> None:
    tier = start()
    fill(tier, 3, LARGE)
    fill(tier, 3, SMALL, first=10)
    tier.close()
    before = objects(s3_settings)
    other = start(sealing=Sealing(bytes(32)))
    assert pages_of(other) == set()
    assert objects(s3_settings) == before


def test_pages_in_the_bucket_are_packed_and_encrypted_where_that_is_wanted(
    start: Open, s3_settings: PoolSettings
) -> None:
    keys = bytes(32), bytes([1]) * 32
    payload = bytes(LARGE)
    header = msgspec.structs.replace(sample_page(1, LARGE)[0], checksum=Checksum().digest(payload))
    small, small_payload = sample_page(2, SMALL)
    tier = start(sealing=Sealing(compression=Compression.LZ4, keys=keys[:1]))
    assert put(tier, header, payload)
    assert put(tier, small, small_payload)
    tier.flush(60)
    assert sum(objects(s3_settings).values()) < LARGE // 2
    tier.close()
    before = objects(s3_settings)
    without = start()
    assert pages_of(without) == set(), "without the key they are left alone"
    assert objects(s3_settings) == before
    # Whoever has the key, beside a newer one, reads them.
    again = start(sealing=Sealing(keys=keys[::-1]))
    assert read(again, id_of(header)) == payload
    assert read(again, id_of(small)) == small_payload


def test_a_page_that_another_node_has_locked_is_replaced_by_one_that_can_be_read(
    start: Open, s3_settings: PoolSettings
) -> None:
    one, other = start(sealing=Sealing(keys=[bytes(32)])), start()
    header, payload = sample_page(1, LARGE)
    for tier in (one, other):
        assert put(tier, header, payload)
        tier.flush(60)
    assert read(other, id_of(header)) == payload
    assert read(one, id_of(header)) == payload, "what is not encrypted is read by all"
    assert one.bad_pages.at_load == other.bad_pages.at_load == 0
