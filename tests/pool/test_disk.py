"""The disk tier passes the suite of all tiers, keeps its pages over restarts and keeps to its cap."""

import functools
import itertools
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from pie.page.format import decode_page, page_name
from pie.page.lookup import LookupStatus
from pie.pool.conformance import TierConformance, TierMachine, put, read, sample_page
from pie.pool.disk import DiskTier
from pie.pool.errors import FolderInUseError
from pie.pool.settings import Durability
from pie.pool.tier import PageId, Tier, id_of
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

Open = Callable[..., DiskTier]


class TestDiskTier(TierConformance):
    folders = 1

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_tier(self, budget_bytes: int) -> Tier:
        tier = DiskTier([self.path / str(n) for n in range(self.folders)], budget_bytes)
        tier.open()
        return tier

    def damage(self, tier: Tier, page: PageId) -> None:
        assert isinstance(tier, DiskTier)
        path, start, _ = where(tier, page)
        flip(path, start + 2000)


class TestDiskTierOfTwoFolders(TestDiskTier):
    folders = 2


_numbers = itertools.count()


@functools.cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="pie-disk"))


@pytest.fixture(scope="module", autouse=True)
def _no_scratch_left() -> Iterator[None]:
    yield
    if _scratch.cache_info().currsize:
        shutil.rmtree(_scratch())


def _open_tier(budget_bytes: int, folder: Path | None = None) -> DiskTier:
    folder = folder or _scratch() / str(next(_numbers))
    tier = DiskTier([folder], budget_bytes, durability=Durability.NONE)
    tier.open()
    return tier


class RestartMachine(TierMachine):
    """A plain dict against a tier that is closed and opened again."""

    make_tier = staticmethod(_open_tier)

    @precondition(lambda self: not self.writing and not self.loans)
    @rule()
    def restart(self) -> None:
        assert isinstance(self.tier, DiskTier)
        before = self.tier.used_bytes
        folder = self.tier._folders[0].path
        self.tier.close()
        self.tier = _open_tier(self.tier.budget_bytes, folder)
        assert pages_of(self.tier) == set(self.held)
        assert self.tier.used_bytes <= before
        assert not self.tier.bad_by_reason

    @precondition(lambda self: bool(self.held) and not self.writing)
    @rule()
    def what_is_counted_is_no_less_than_what_du_says(self) -> None:
        assert isinstance(self.tier, DiskTier)
        assert disk_usage(self.tier._folders[0].path) <= self.tier.used_bytes


TestDiskTierAgainstADict = RestartMachine.TestCase
TestDiskTierAgainstADict.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers, by default on one folder; checks and closes them."""
    tiers: list[DiskTier] = []

    def open_one(budget_bytes: int = 64 << 20, *folders: Path, **options: object) -> DiskTier:
        made = DiskTier(folders or (tmp_path / "pages",), budget_bytes, **options)  # type: ignore[arg-type]
        tiers.append(made)
        made.open()
        return made

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


def test_pages_of_all_sizes_are_there_after_a_restart(open_tier: Open) -> None:
    sizes = [1, 100, SMALL, 65_535, 65_536, LARGE, 1 << 20]
    pages = [sample_page(number, size) for number, size in enumerate(sizes)]
    tier = open_tier()
    assert all(put(tier, *page) for page in pages)
    used = tier.used_bytes
    tier.close()
    again = open_tier()
    assert pages_of(again) == {id_of(header) for header, _ in pages}
    assert all(read(again, id_of(header)) == payload for header, payload in pages)
    assert again.used_bytes == used


def test_what_a_start_finds_is_listed_from_the_oldest_to_the_newest(open_tier: Open) -> None:
    tier = open_tier()
    order = []
    for number, size in enumerate([LARGE, SMALL, LARGE, SMALL]):
        order += fill(tier, 1, size, first=number)
        time.sleep(0.02)  # A file's time is only as fine as the system's clock ticks.
    tier.close()
    assert list(open_tier().pages()) == order


def test_removed_pages_stay_away_after_a_restart(open_tier: Open) -> None:
    tier = open_tier()
    headers = fill(tier, 6, SMALL) + fill(tier, 6, LARGE, first=10)
    for header in headers[::2]:
        assert tier.remove(id_of(header))
    tier.close()
    assert pages_of(open_tier()) == {id_of(header) for header in headers[1::2]}


def test_a_start_reads_headers_and_not_payloads(open_tier: Open) -> None:
    tier = open_tier()
    fill(tier, 20, 1 << 20)
    fill(tier, 50, SMALL, first=100)
    tier.close()

    class Metered(FaultyFiles):
        read_bytes = 0

        def read_at(self, path: Path, offset: int, size: int) -> bytes:
            data = super().read_at(path, offset, size)
            self.read_bytes += len(data)
            return data

    files = Metered()
    again = open_tier(files=files)
    assert len(pages_of(again)) == 70
    assert files.read_bytes <= 20 * 4096 + 50 * 512
    assert files.calls["read"] == 0


@pytest.mark.parametrize("size", [3_000, 40_000, LARGE])
def test_what_is_counted_is_what_du_says_within_two_percent(open_tier: Open, size: int) -> None:
    budget = 24 << 20
    tier = open_tier(budget, durability=Durability.NONE)
    chance = random.Random(1)
    held = [id_of(header) for header in fill(tier, 100_000, size)]
    for number in range(len(held), len(held) + 300):
        page, payload = sample_page(number, size)
        while not put(tier, page, payload):
            # A policy lets what is old go; here and there a page in the middle.
            at = 0 if chance.random() < 0.8 else chance.randrange(len(held))
            assert tier.remove(held.pop(at))
        held.append(id_of(page))
    du = int(
        subprocess.run(
            ["du", "-s", "-B1", tier._folders[0].path], capture_output=True, text=True, check=True
        ).stdout.split()[0]
    )
    assert abs(du - tier.used_bytes) <= 0.02 * du
    assert du <= budget
    assert sum(header.raw_bytes for header in tier.pages()) > 0.4 * budget


def test_a_pack_that_is_half_dead_is_emptied_and_goes(open_tier: Open) -> None:
    tier = open_tier(1 << 20, durability=Durability.NONE)
    headers = fill(tier, 30, SMALL)
    packs = tier._folders[0].packs.path
    first = [path for path in packs.iterdir() if path.name.startswith("0000000001")]
    assert len(first) == 2
    in_first = [h for h in headers if where(tier, id_of(h))[0] in first]
    for header in in_first[::2] + in_first[1:2]:
        assert tier.remove(id_of(header))
    assert not any(path.exists() for path in first)
    for header in in_first[3::2]:
        assert read(tier, id_of(header)) == sample_page(headers.index(header), SMALL)[1]
    held = pages_of(tier)
    tier.close()
    assert pages_of(open_tier(1 << 20)) == held


def test_removal_of_the_last_page_leaves_no_file(open_tier: Open) -> None:
    tier = open_tier()
    before = tier.used_bytes
    headers = fill(tier, 10, SMALL) + fill(tier, 10, LARGE, first=10)
    for header in headers:
        assert tier.remove(id_of(header))
    folder = tier._folders[0].path
    assert files_below(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "packs", "tmp"]
    assert tier.used_bytes == before


def test_a_smaller_budget_lets_what_is_oldest_go(open_tier: Open) -> None:
    tier = open_tier(8 << 20)
    old = fill(tier, 100, SMALL)
    new = fill(tier, 30, LARGE, first=200)
    tier.close()
    small = open_tier(3 << 20)
    held = pages_of(small)
    assert small.used_bytes <= 3 << 20
    assert not held & {id_of(header) for header in old}
    assert held >= {id_of(header) for header in new[8:]}


def test_two_processes_never_share_a_folder(open_tier: Open, tmp_path: Path) -> None:
    open_tier()
    with pytest.raises(FolderInUseError, match="in use by another process: every pool node"):
        DiskTier([tmp_path / "other", tmp_path / "pages"], 64 << 20).open()
    # The folder that was free is free again.
    open_tier(64 << 20, tmp_path / "other")


def test_a_start_waits_a_moment_for_the_process_before_it(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    held = fill(tier, 1, LARGE)
    threading.Timer(0.2, tier.close).start()
    again = DiskTier([tmp_path / "pages"], 64 << 20)
    again.open(lock_timeout_s=60)
    assert pages_of(again) == {id_of(held[0])}
    again.close()


def test_several_folders_share_pages_and_one_that_is_gone_takes_only_its_own(
    open_tier: Open, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    tier = open_tier(64 << 20, *folders)
    headers = fill(tier, 60, LARGE)
    per_folder = [len(files_below(folder)) for folder in folders]
    assert sum(per_folder) == 60
    assert min(per_folder) >= 8
    tier.close()
    shutil.rmtree(folders[1])
    again = open_tier(64 << 20, *folders)
    assert len(pages_of(again)) == 60 - per_folder[1]
    # A page is found in whichever folder it is.
    assert pages_of(again) <= {id_of(header) for header in headers}


def test_a_page_in_two_folders_is_kept_once(open_tier: Open, tmp_path: Path) -> None:
    header, payload = sample_page(1, LARGE)
    for name in ("a", "b"):
        tier = open_tier(64 << 20, tmp_path / name)
        put(tier, header, payload)
        tier.close()
    both = open_tier(64 << 20, tmp_path / "a", tmp_path / "b")
    assert list(both.pages()) == [header]
    assert len(files_below(tmp_path / "a")) + len(files_below(tmp_path / "b")) == 1


def test_a_page_file_has_its_name_and_its_bytes_as_written_down(open_tier: Open) -> None:
    tier = open_tier()
    header, payload = sample_page(1, LARGE)
    put(tier, header, payload)
    path = tier._folders[0].path / page_name(header.model_root, header.key, header.part)
    found, stored = decode_page(path.read_bytes())
    assert found == header
    assert stored == payload


def test_a_store_that_is_closed_over_is_whole_or_not_there(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    pages = [sample_page(number, LARGE) for number in range(200)]
    readable: list[int] = []

    def store() -> None:
        for number, (header, payload) in enumerate(pages):
            if put(tier, header, payload):
                readable.append(number)

    thread = threading.Thread(target=store)
    thread.start()
    while len(readable) < 5:
        time.sleep(0.001)
    tier.close()
    thread.join()
    again = open_tier()
    assert pages_of(again) >= {id_of(pages[number][0]) for number in readable}
    for header, payload in pages:
        assert read(again, id_of(header)) in {payload, LookupStatus.MISS}


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("durability", "with_the_write", "by_close"),
    [
        (Durability.NONE, False, False),
        (Durability.BATCH, False, True),
        (Durability.ALWAYS, True, True),
    ],
)
def test_durability_says_when_files_are_synced(
    open_tier: Open, size: int, durability: Durability, with_the_write: bool, by_close: bool
) -> None:
    files = FaultyFiles()
    tier = open_tier(durability=durability, files=files)
    fill(tier, 1, size)
    assert bool(files.calls["synced write"]) == with_the_write
    tier.close()
    assert bool(files.calls["sync"]) == by_close


def test_what_is_on_its_way_out_takes_a_new_store_afterwards(open_tier: Open) -> None:
    tier = open_tier()
    header, payload = sample_page(1, LARGE)
    for _ in range(50):
        assert put(tier, header, payload)
        assert tier.remove(id_of(header))
    assert tier.lookup(id_of(header)) is LookupStatus.MISS
