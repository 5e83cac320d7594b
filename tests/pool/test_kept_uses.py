"""How often pages were used outlives a restart, where rules keep pages for that; nothing depends on it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.loader import load_policies
from pie.policies.manager import RetentionManager
from pie.pool.cache import Loan, TieredCache
from pie.pool.conformance import sample_key, sample_page
from pie.pool.disk import DiskTier
from pie.pool.kept_uses import MOST, MOST_BYTES, KeptUses, decoded, encoded
from pie.pool.mover import Mover
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, id_of
from tests.pool.disk_places import disk_usage
from tests.pool.faults import FaultyFiles

SIZE = 4_000
RULES = "worker: {rules: [{match: {hits: 3}, action: persist-prefix}]}"
"""Pages used three times are kept."""
SECRET = b"s" * 32

pages = st.builds(
    PageId, st.binary(min_size=32, max_size=32).map(PageKey), st.sampled_from(list(Part))
)


@given(st.dictionaries(pages, st.integers(1, 65_535), max_size=20), st.sampled_from([None, SECRET]))
def test_a_file_says_what_was_put_in_it(uses: dict[PageId, int], secret: bytes | None) -> None:
    data = encoded(uses, secret)
    assert decoded(data, secret) == uses
    assert list(decoded(data, secret)) == list(uses)
    assert decoded(data, b"o" * 32) == {}


@given(st.data(), st.sampled_from([None, SECRET]))
def test_a_damaged_file_says_nothing(data: st.DataObject, secret: bytes | None) -> None:
    whole = encoded({PageId(sample_key(n), Part.FULL): n + 1 for n in range(3)}, secret)
    if data.draw(st.booleans()):
        assert decoded(whole[: data.draw(st.integers(0, len(whole) - 1))], secret) == {}
    else:
        at, flipped = data.draw(st.integers(0, len(whole) - 1)), bytearray(whole)
        flipped[at] ^= data.draw(st.integers(1, 255))
        assert decoded(bytes(flipped), secret) == {}


def test_a_part_that_is_not_known_here_is_no_reason_to_fail() -> None:
    strange = PageId(sample_key(0), 200)  # type: ignore[arg-type]
    assert decoded(encoded({strange: 3}, None), None) == {}


def test_so_many_pages_are_remembered_and_no_more(tmp_path: Path) -> None:
    with _disk(tmp_path) as disk:
        kept = KeptUses(disk)
        for number in range(MOST + 10):
            kept.note(PageId(PageKey(number.to_bytes(32)), Part.FULL), 3)
        kept.note(PageId(PageKey((10).to_bytes(32)), Part.FULL), 4)
        kept.keep()
        assert not kept.is_new
        again = disk.kept_uses()
        assert len(again) == MOST
        assert next(iter(again)) == PageId(PageKey((11).to_bytes(32)), Part.FULL)
        assert list(again.items())[-1] == (PageId(PageKey((10).to_bytes(32)), Part.FULL), 4)
        assert (tmp_path / "uses").stat().st_size == MOST_BYTES


def test_the_file_counts_as_what_lies_on_the_disk_and_is_replaced_as_a_whole(
    tmp_path: Path,
) -> None:
    uses = {PageId(sample_key(number), Part.FULL): 3 for number in range(400)}
    with _disk(tmp_path) as disk:
        for _ in range(20):
            disk.keep_uses(uses)
        used = disk.used_bytes
        assert used >= disk_usage(tmp_path)
        assert list((tmp_path / "tmp").iterdir()) == []
    with _disk(tmp_path) as disk:
        assert disk.kept_uses() == uses
        assert disk.used_bytes == used
        disk.keep_uses({})
        assert disk.used_bytes < used
        assert disk.kept_uses() == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write_new", "rename", "allocated"])
def test_a_disk_that_does_not_take_it_keeps_what_was_there(
    tmp_path: Path, call: str, number: int
) -> None:
    files = FaultyFiles()
    page = PageId(sample_key(0), Part.FULL)
    with _disk(tmp_path, files=files) as disk:
        disk.keep_uses({page: 3})
        used = disk.used_bytes
        files.numbers[call] = number
        disk.keep_uses({page: 4})
        files.numbers.clear()
        assert disk.kept_uses() == {page: 3}
        assert disk.used_bytes == used
        assert list((tmp_path / "tmp").iterdir()) == []


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    uses = {PageId(sample_key(number), Part.FULL): 3 for number in range(MOST)}
    with _disk(tmp_path, size=256 << 10) as disk:
        disk.keep_uses(uses)
        assert disk.kept_uses() == {}
        disk.check()


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "uses").mkdir()
    with _disk(tmp_path) as disk:
        assert disk.kept_uses() == {}
        disk.keep_uses({PageId(sample_key(0), Part.FULL): 3})
        assert disk.kept_uses() == {}
        assert disk.folder_states()["ok"] == 1


class Stack:
    """RAM over disk, by rules."""

    def __init__(self, folder: Path, rules: str = RULES) -> None:
        self.disk = DiskTier([folder], 16 << 20)
        self.disk.open()
        levels = [
            Level(tier, RetentionManager(load_policies(rules, name="p.yaml").new_retention()))
            for tier in (RamTier(1 << 20), self.disk)
        ]
        self.cache = TieredCache(levels)
        self.cache.adopt()
        self.mover = Mover(self.cache)
        self.mover.start()

    def put(self, number: int) -> None:
        header, payload = sample_page(number, SIZE)
        room = self.cache.prepare_store(header)
        assert isinstance(room, memoryview)
        room[:] = payload
        assert self.cache.complete_store(id_of(header), success=True)

    def use(self, number: int) -> None:
        loan = self.cache.prepare_load(_page(number))
        assert isinstance(loan, Loan)
        self.cache.complete_load(loan)

    def in_ram(self) -> int:
        return self.cache.pages_by_tier()["pool_ram"]

    def close(self) -> None:
        assert self.mover.close()
        self.cache.check()
        self.cache.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    for number in range(20):
        stack.put(number)
    for _ in range(3):
        for number in range(8):
            stack.use(number)
    until(lambda: stack.cache.pages_by_tier()["pool_disk"] == 8)
    yield stack
    stack.close()


def test_what_was_used_often_is_near_after_a_restart_and_known_to_be(
    stack: Stack, tmp_path: Path
) -> None:
    stack.cache.save(float("inf"))
    stack.close()
    stack.__init__(tmp_path)  # type: ignore[misc]
    until(lambda: stack.in_ram() == 8)
    manager = stack.cache._shelves[0].manager
    assert all(manager.uses_to_keep(*_page(number)) == 3 for number in range(8))
    assert len(stack.cache._shelves[1].manager.persistent()) == 8
    # One use is one more, not the first.
    stack.use(0)
    assert manager.uses_to_keep(*_page(0)) == 4


def test_a_mover_has_it_on_disk_long_before_the_end(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.pool.mover._KEEP_USES_S", 0.01)
    # The pause that began with the first use ends, and with it what no kill would have kept.
    stack.mover._keep_uses_at_s = 0.0
    stack.use(9)
    for _ in range(3):
        stack.use(9)
    until(lambda: stack.disk.kept_uses().get(_page(9), 0) == 4)


def test_rules_that_come_after_the_start_know_it_too(stack: Stack, tmp_path: Path) -> None:
    stack.close()
    stack.__init__(tmp_path, "{}")  # type: ignore[misc]
    assert stack.in_ram() == 0
    stack.cache.replace_policies(load_policies(RULES, name="p.yaml").new_retention)
    stack.mover.preload()
    until(lambda: stack.in_ram() == 8)


def test_where_no_rule_goes_by_uses_nothing_is_written(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "worker: {rules: [{match: {hits: 3}, action: pin}]}")
    stack.put(0)
    for _ in range(5):
        stack.use(0)
    stack.close()
    assert not (tmp_path / "uses").exists()


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.002)


@contextmanager
def _disk(
    folder: Path, *, size: int = 16 << 20, files: FaultyFiles | None = None
) -> Iterator[DiskTier]:
    disk = DiskTier([folder], size, files=files)
    disk.open()
    yield disk
    disk.check()
    disk.close()


def _page(number: int) -> PageId:
    return PageId(sample_key(number), Part.FULL)
