"""The disk tier passes the suite of all tiers, and keeps its pages over restarts."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from pie.pool.conformance import TierConformance, TierMachine
from pie.pool.disk import DiskTier
from pie.pool.settings import Durability
from pie.pool.tier import PageId, Tier


def flip(tier: DiskTier, page: PageId) -> None:
    """Change a byte of a page where it lies."""
    entry = tier._entries[page]
    home = entry.home
    assert home is not None
    if home.slot is None:
        path, offset = home.folder._path(entry.header), 2000
    else:
        path, offset = home.folder.packs.paths(home.slot.pack)[0], home.slot.offset + 1400
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


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
        flip(tier, page)


class TestTwoFolders(TestDiskTier):
    folders = 2


_scratch = Path(tempfile.mkdtemp(prefix="pie-disk"))
_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _no_scratch_left() -> Iterator[None]:
    yield
    shutil.rmtree(_scratch)


def _open_tier(budget_bytes: int, folder: Path | None = None) -> DiskTier:
    folder = folder or _scratch / str(next(_numbers))
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
        assert {(h.key, h.part) for h in self.tier.pages()} == set(self.held)
        assert self.tier.used_bytes <= before

    @precondition(lambda self: bool(self.held))
    @rule()
    def physical_bytes_are_counted(self) -> None:
        assert isinstance(self.tier, DiskTier)
        if not self.writing:
            assert disk_usage(self.tier._folders[0].path) <= self.tier.used_bytes


def disk_usage(folder: Path) -> int:
    """Return what `du` says of a folder."""
    total = folder.lstat().st_blocks
    for top, folders, files in os.walk(folder):
        total += sum((Path(top) / name).lstat().st_blocks for name in (*folders, *files))
    return total * 512


TestDiskTierAgainstADict = RestartMachine.TestCase
TestDiskTierAgainstADict.settings = settings(max_examples=60, deadline=None, stateful_step_count=40)
