"""The disk tier: loads against plain reads with O_DIRECT of the same files, stores by durability.

Cold means that the system's cache was told to forget the files. Payloads are checked at each load.
Medians of rounds that take turns, because the neighbours of a virtual disk change by the second.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pie.page.header import PageHeader
from pie.pool.conformance import sample_page
from pie.pool.disk import DiskTier
from pie.pool.settings import Durability
from pie.pool.tier import PageId, StoredPage, id_of

_MIB = 1 << 20
_ROUNDS = 5
_BYTES = 256 * _MIB
_AHEAD = 8
"""Pages named ahead, as a node does with the pages of a request."""
_SMALL_BYTES = 16 << 10
_START_PAGES = 5_000


def run() -> dict[str, object]:
    """Return GB/s, and seconds of a start."""
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-disk-", dir=Path.cwd()))
    try:
        return {
            "load_1mib": _loads(folder / "load", _MIB),
            "load_360kib": _loads(folder / "load360", 360 << 10),
            "store_gb_per_s": {
                durability.value: {
                    "1mib": _stores(folder / durability, _MIB, 128, durability),
                    "16kib_packed": _stores(
                        folder / f"{durability}-small", _SMALL_BYTES, 1000, durability
                    ),
                }
                for durability in Durability
            },
            "start": _start(folder / "start"),
        }
    finally:
        shutil.rmtree(folder)


def _loads(folder: Path, size: int) -> dict[str, float]:
    count = _BYTES // size
    headers, tier = _filled(folder, size, count, Durability.NONE)
    os.sync()
    pages = [id_of(header) for header in headers]
    paths = sorted(folder.rglob("*.full"))
    total = count * size
    rates: dict[str, list[float]] = {"direct": [], "cold": [], "warm": []}
    for _ in range(_ROUNDS):
        _forget(paths)
        rates["direct"].append(total / _timed(lambda: _read_direct(paths)) / 1e9)
        _forget(paths)
        rates["cold"].append(total / _timed(lambda: _load(tier, pages)) / 1e9)
        rates["warm"].append(total / _timed(lambda: _load(tier, pages)) / 1e9)
    tier.close()
    shutil.rmtree(folder)
    middle = {name: round(statistics.median(each), 3) for name, each in rates.items()}
    return {
        "o_direct_gb_per_s": middle["direct"],
        "cold_gb_per_s": middle["cold"],
        "warm_gb_per_s": middle["warm"],
        "cold_of_o_direct": round(
            statistics.median(
                cold / direct for cold, direct in zip(rates["cold"], rates["direct"], strict=True)
            ),
            3,
        ),
    }


def _load(tier: DiskTier, pages: list[PageId]) -> None:
    for at, page in enumerate(pages):
        if at % _AHEAD == 0:
            tier.expect(pages[at + _AHEAD : at + 2 * _AHEAD] if at else pages[: 2 * _AHEAD])
        stored = tier.prepare_load(page)
        assert isinstance(stored, StoredPage)
        tier.complete_load(page)


def _read_direct(paths: list[Path]) -> None:
    """Read files one after another past the system's cache, as `dd iflag=direct bs=1M` does."""
    room = mmap.mmap(-1, 2 * _MIB)
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        offset = 0
        while (got := os.preadv(handle, [memoryview(room)[:_MIB]], offset)) == _MIB:
            offset += got
        os.close(handle)


def _forget(paths: list[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _stores(folder: Path, size: int, count: int, durability: Durability) -> float:
    samples = [sample_page(number, size) for number in range(count)]
    rates = []
    for turn in range(3):
        tier = DiskTier([folder / str(turn)], 4 << 30, durability=durability)
        tier.open()

        def store(tier: DiskTier = tier) -> None:
            for header, payload in samples:
                room = tier.prepare_store(header)
                assert isinstance(room, memoryview)
                room[:] = payload
                assert tier.complete_store(id_of(header), success=True)

        rates.append(count * size / _timed(store) / 1e9)
        tier.close()
        shutil.rmtree(folder / str(turn))
    return round(statistics.median(rates), 3)


def _start(folder: Path) -> dict[str, float]:
    """Time the finding of pages: packed ones, and files."""
    figures: dict[str, float] = {}
    for name, size, count in (("packed", 1000, _START_PAGES), ("files", 64 << 10, 2000)):
        _, tier = _filled(folder / name, size, count, Durability.NONE)
        tier.close()
        again = DiskTier([folder / name], 4 << 30)
        seconds = _timed(again.open)
        assert sum(1 for _ in again.pages()) == count
        again.close()
        figures[f"{name}_us_per_page"] = round(seconds / count * 1e6, 1)
    return figures


def _filled(
    folder: Path, size: int, count: int, durability: Durability
) -> tuple[list[PageHeader], DiskTier]:
    tier = DiskTier([folder], 4 << 30, durability=durability)
    tier.open()
    headers = []
    for number in range(count):
        header, payload = sample_page(number, size)
        room = tier.prepare_store(header)
        assert isinstance(room, memoryview)
        room[:] = payload
        assert tier.complete_store(id_of(header), success=True)
        headers.append(header)
    return headers, tier


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
