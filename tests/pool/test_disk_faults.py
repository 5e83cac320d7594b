"""A disk that is full, read-only or failing costs pages and nothing else."""

import contextlib
import errno
import logging
import mmap
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.page.errors import BadPageReason
from pie.page.lookup import LookupStatus
from pie.pool.conformance import put, read, sample_page
from pie.pool.disk import DiskTier
from pie.pool.files import Files
from pie.pool.health import RETRY_S
from pie.pool.set_aside import SetAside
from pie.pool.settings import Durability
from pie.pool.space import Space
from pie.pool.tier import id_of
from tests.pool.disk_places import (
    LARGE,
    SMALL,
    disk_usage,
    files_below,
    fill,
    flip,
    pages_of,
    where,
)
from tests.pool.faults import FaultyFiles


class Disk:
    """A tier on a disk that fails, with a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = FaultyFiles()
        self.now_s = 1000.0
        self.losses = 0
        self.tier = self._make()
        self.tier.open()

    def _make(self) -> DiskTier:
        def lost() -> None:
            self.losses += 1

        return DiskTier(
            [self.folder],
            16 << 20,
            files=self.files,
            clock=lambda: self.now_s,
            on_lost=lost,
            durability=Durability.NONE,
        )

    def restart(self) -> None:
        self.tier.close()
        self.files.numbers.clear()
        self.tier = self._make()
        self.tier.open()

    def put(self, number: int, size: int) -> bool:
        return put(self.tier, *sample_page(number, size))

    def reads(self, number: int, size: int) -> bool:
        header, payload = sample_page(number, size)
        got = read(self.tier, id_of(header))
        assert got in {payload, LookupStatus.MISS}
        return got == payload

    def state(self) -> str:
        (state,) = [name for name, count in self.tier.folder_states().items() if count]
        return state


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.tier.check()
    made.tier.close()


SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


@SIZES
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_read_only_says_so_once_and_recovers(
    disk: Disk, size: int, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert disk.put(1, size)
    used = disk.tier.used_bytes
    disk.files.numbers.update(dict.fromkeys(("write_new", "write_at", "append"), number))
    with caplog.at_level(logging.INFO):
        for turn in range(2, 8):
            assert not disk.put(turn, size)
            assert disk.tier.prepare_store(sample_page(9, size)[0]) is LookupStatus.MISS
            disk.now_s += RETRY_S
        disk.now_s -= RETRY_S
        assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
        assert "takes no more pages" in caplog.text
        assert disk.state() == "read_only"
        assert sum(disk.tier.errors.values()) == 6, "one try every half minute"
        assert disk.tier.bad_pages == (0, 0)
        assert disk.reads(1, size)
        disk.files.numbers.clear()
        assert not disk.put(2, size), "it is left alone for a while"
        disk.now_s += RETRY_S
        assert disk.put(2, size)
        assert disk.state() == "ok"
        assert "takes pages again" in caplog.text
    assert disk.tier.used_bytes <= used + 2 * (size + 16_384)
    disk.restart()
    assert disk.reads(1, size)
    assert disk.reads(2, size)
    assert len(pages_of(disk.tier)) == 2
    assert files_below(disk.folder / "tmp") == []


@SIZES
@pytest.mark.parametrize("call", ["rename", "append", "make_folder", "write_new", "write_at"])
def test_an_error_anywhere_in_a_store_leaves_nothing_that_can_be_read(
    disk: Disk, size: int, call: str
) -> None:
    disk.files.numbers[call] = errno.EIO
    is_stored = disk.put(1, size)
    assert is_stored == (not disk.tier.errors)
    assert disk.reads(1, size) == is_stored
    disk.tier.check()
    disk.restart()
    assert disk.reads(1, size) == is_stored


@SIZES
def test_a_disk_without_room_lets_victims_go_before_it_is_full(disk: Disk, size: int) -> None:
    headers = fill(disk.tier, 10, size)
    disk.files.free = 1000
    assert disk.tier.prepare_store(sample_page(99, size)[0]) is LookupStatus.RETRY
    assert disk.state() == "ok"
    disk.files.free = 1 << 60
    assert disk.put(99, size)
    assert len(pages_of(disk.tier)) == len(headers) + 1


@SIZES
def test_a_page_that_cannot_be_read_is_a_miss_and_a_disk_that_reads_nothing_is_off(
    disk: Disk, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    fill(disk.tier, 10, size)
    disk.files.numbers.update(read=errno.EIO, read_at=errno.EIO)
    assert not disk.reads(0, size)
    assert disk.state() == "ok"
    disk.files.numbers.clear()
    assert disk.reads(1, size)
    assert not disk.reads(0, size)
    disk.files.numbers.update(read=errno.EIO, read_at=errno.EIO)
    for number in range(2, 5):
        assert not disk.reads(number, size)
    assert disk.state() == "off"
    assert disk.losses == 1
    assert pages_of(disk.tier) == set()
    assert not disk.put(50, size)
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    disk.restart()
    # What was not asked for while the disk failed is still there.
    assert all(disk.reads(number, size) for number in range(5, 10))


@SIZES
def test_a_process_short_of_files_asks_again(disk: Disk, size: int) -> None:
    disk.put(1, size)
    disk.files.numbers.update(read=errno.EMFILE, read_at=errno.EMFILE)
    for _ in range(10):
        assert read(disk.tier, id_of(sample_page(1, size)[0])) is LookupStatus.RETRY
    disk.files.numbers.clear()
    assert disk.reads(1, size)
    assert disk.state() == "ok"


def test_a_loan_lasts_when_its_disk_goes(disk: Disk) -> None:
    fill(disk.tier, 5, LARGE)
    header, payload = sample_page(0, LARGE)
    loan = disk.tier.prepare_load(id_of(header))
    assert not isinstance(loan, LookupStatus)
    disk.files.numbers["read"] = errno.ENXIO
    assert not disk.reads(1, LARGE)
    assert disk.state() == "off"
    assert loan.payload == payload
    disk.tier.complete_load(id_of(header))


@SIZES
def test_a_page_that_a_read_only_disk_keeps_is_still_served(disk: Disk, size: int) -> None:
    headers = fill(disk.tier, 3, size)
    for call in ("unlink", "append", "rename", "write_new", "write_at"):
        disk.files.numbers[call] = errno.EROFS
    gone = disk.tier.remove(id_of(headers[0]))
    assert disk.reads(0, size) == (not gone)
    assert disk.reads(1, size)
    assert disk.state() == "read_only"


def test_clocks_that_jump_change_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, now_ns in enumerate([10**18, 0, 2 * 10**18, -(10**15)]):
        monkeypatch.setattr("time.time_ns", lambda now_ns=now_ns: now_ns)
        assert disk.put(number, SMALL)
        assert disk.put(number + 10, LARGE)
    disk.restart()
    assert len(pages_of(disk.tier)) == 8
    assert all(disk.reads(number, SMALL) and disk.reads(number + 10, LARGE) for number in range(4))


def test_many_threads_on_a_disk_that_fails_now_and_then_see_no_wrong_page(disk: Disk) -> None:
    stop = threading.Event()
    problems: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for turn in range(150):
                # A page has one size.
                number, size = first + turn % 8, (SMALL, LARGE)[turn % 2]
                disk.put(number, size)
                disk.reads(number, size)
                if turn % 5 == 0:
                    disk.tier.remove(id_of(sample_page(number, size)[0]))
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    def fail() -> None:
        while not stop.wait(0.002):
            disk.files.fill()
            stop.wait(0.001)
            disk.files.numbers.clear()
            disk.now_s += RETRY_S

    failing = threading.Thread(target=fail)
    workers = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
    for thread in (failing, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    failing.join()
    assert problems == []
    disk.files.numbers.clear()
    assert disk_usage(disk.folder) <= disk.tier.used_bytes
    held = pages_of(disk.tier)
    disk.restart()
    assert pages_of(disk.tier) >= held


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a small file system of its own, or skip the test."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@SIZES
def test_a_budget_larger_than_the_disk_fills_it_and_goes_on(tmp_path: Path, size: int) -> None:
    with mounted(tmp_path / "small", "size=12m") as folder:
        tier = DiskTier([folder], 1 << 30)
        tier.open()
        held = [id_of(header) for header in fill(tier, 10_000, size)]
        assert 4e6 < len(held) * size < 12 << 20
        turned = 0
        for number in range(10_000, 10_500):
            header, payload = sample_page(number, size)
            for _ in range(len(held)):
                if put(tier, header, payload):
                    held.append(id_of(header))
                    turned += 1
                    break
                if not tier.remove(held.pop(0)):
                    break
        assert turned == 500
        assert pages_of(tier) == set(held)
        tier.check()
        tier.close()


def test_a_folder_that_may_only_be_read_is_served_from(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=16m") as folder:
        tier = DiskTier([folder], 8 << 20)
        tier.open()
        fill(tier, 5, LARGE)
        fill(tier, 5, SMALL, first=10)
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        tier = DiskTier([folder], 8 << 20)
        tier.open()
        assert len(pages_of(tier)) == 10
        assert read(tier, id_of(sample_page(1, LARGE)[0])) == sample_page(1, LARGE)[1]
        assert read(tier, id_of(sample_page(11, SMALL)[0])) == sample_page(11, SMALL)[1]
        assert tier.prepare_store(sample_page(99, LARGE)[0]) is LookupStatus.MISS
        assert not tier.remove(id_of(sample_page(1, LARGE)[0]))
        assert tier.folder_states()["read_only"] == 1
        tier.check()
        tier.close()


def test_a_folder_that_cannot_be_made_is_off_and_the_others_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = DiskTier([tmp_path / "file" / "pages", tmp_path / "pages"], 16 << 20)
    tier.open()
    assert len(fill(tier, 10, LARGE)) == 10
    assert tier.folder_states() == {"ok": 1, "read_only": 0, "off": 1}
    assert "is off: open failed" in caplog.text
    tier.check()
    tier.close()


def test_a_tier_without_any_folder_that_works_is_one_of_misses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = DiskTier([tmp_path / "file"], 16 << 20)
    tier.open()
    assert tier.prepare_store(sample_page(1)[0]) is LookupStatus.MISS
    assert list(tier.pages()) == []
    tier.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_folder_that_somebody_removes_is_off_and_its_pages_are_gone(
    tmp_path: Path, size: int
) -> None:
    lost: list[None] = []
    tier = DiskTier([tmp_path / "kv"], 64 << 20, on_lost=lambda: lost.append(None))
    tier.open()
    fill(tier, 8, size)
    shutil.rmtree(tmp_path / "kv")
    header, payload = sample_page(100, size)
    room = tier.prepare_store(header)
    assert isinstance(room, memoryview)
    room[:] = payload
    assert not tier.complete_store(id_of(header), success=True)
    assert tier.folder_states()["off"] == 1
    assert not list(tier.pages())
    assert lost
    tier.close()


@pytest.mark.parametrize(
    ("said", "is_raised"),
    [
        (errno.EFAULT, errno.EIO),
        (133, errno.EIO),
        (errno.ENOMEM, errno.ENOMEM),
        (errno.EAGAIN, errno.EAGAIN),
        (errno.EINVAL, None),
    ],
)
def test_too_little_memory_for_a_map_is_not_the_disks_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int, is_raised: int | None
) -> None:
    class Map(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(said, "as the kernel says it")

    monkeypatch.setattr("pie.pool.files.mmap.mmap", Map)
    path = tmp_path / "page"
    path.write_bytes(b"abc")
    if is_raised is None:
        assert bytes(Files().read(path)) == b"abc"
        return
    with pytest.raises(OSError, match="page") as raised:
        Files().read(path)
    assert raised.value.errno == is_raised


def test_threads_that_find_bad_pages_at_once_give_each_files_bytes_back_once(
    tmp_path: Path,
) -> None:
    class Slow(Files):
        def unlink(self, path: Path) -> None:
            time.sleep(0.001)
            super().unlink(path)

    space = Space(1 << 20)
    aside = SetAside(tmp_path, Slow(), space, keep=True)
    for number in range(64):
        size = Files().write_new(tmp_path / f"{number}", [bytes(5000)], sync=False)
        space.found(size)
    threads = [threading.Thread(target=aside.trim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert space.used_bytes == disk_usage(tmp_path) - tmp_path.lstat().st_blocks * 512


@SIZES
def test_a_bad_page_that_the_disk_did_not_let_go_of_goes_when_it_works_again(
    disk: Disk, size: int
) -> None:
    assert disk.put(1, size)
    page = id_of(sample_page(1, size)[0])
    path, first, end = where(disk.tier, page)
    flip(path, (first + end) // 2)
    disk.files.numbers.update(dict.fromkeys(("unlink", "append"), errno.EROFS))
    assert not disk.reads(1, size)
    assert not disk.put(1, size)
    disk.files.numbers.clear()
    disk.now_s += RETRY_S
    assert disk.put(2, size)
    assert disk.put(1, size)
    assert disk.reads(1, size)


def test_a_page_that_was_not_taken_away_for_its_owner_is_counted_when_it_is(disk: Disk) -> None:
    assert disk.put(1, LARGE)
    page = id_of(sample_page(1, LARGE)[0])
    disk.files.numbers["unlink"] = errno.EROFS
    assert not disk.tier.discard(page, BadPageReason.OTHER_MODEL)
    assert disk.reads(1, LARGE)
    assert not disk.tier.bad_by_reason
    disk.files.numbers.clear()
    assert disk.tier.discard(page, BadPageReason.OTHER_MODEL)
    assert disk.tier.bad_by_reason == {"other_model": 1}
