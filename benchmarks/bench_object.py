"""The object tier against plain boto3, on a real S3 server: loads by eight threads, small pages, a start.

Loads are checked. What is compared takes turns, and the middle of the rounds counts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pie.cluster.local_s3 import BUCKET, ENVIRONMENT, LocalS3
from pie.pool.conformance import put, sample_page
from pie.pool.object import ObjectTier
from pie.pool.object_s3 import S3Store
from pie.pool.settings import PoolSettings
from pie.pool.tier import PageId, StoredPage, id_of

_THREADS = 8
_ROUNDS = 3
_BUDGET_BYTES = 1 << 30
_SIZES = {"360kib": (360 << 10, 120), "1mib": (1 << 20, 60)}
_SMALL_BYTES, _SMALL_PAGES = 16 << 10, 2000


def run() -> dict[str, object]:
    """Return MB/s, pages a second, and seconds of a start."""
    os.environ.update(ENVIRONMENT)
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-s3-", dir=Path.cwd()))
    server = LocalS3(folder)
    try:
        server.start()
        loads = {name: _loads(server, name, *of) for name, of in _SIZES.items()}
        return {**loads, "16kib_packed": _small(server)}
    finally:
        server.kill()
        shutil.rmtree(folder)


def _loads(server: LocalS3, prefix: str, size: int, count: int) -> dict[str, float]:
    settings = _settings(server, prefix)
    store, tier = S3Store(settings), _tier(settings)
    samples = [sample_page(number, size) for number in range(count)]

    def stored() -> None:
        assert all(put(tier, *sample) for sample in samples)
        tier.flush(60)

    put_s = _timed(stored)
    names = sorted(one.name for one in store.found() if one.name.endswith(".full"))
    pages = [id_of(header) for header, _ in samples]
    plain: list[float] = []
    ours: list[float] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(_ROUNDS):
            plain.append(_timed(lambda: list(threads.map(store.get, names))))
            ours.append(_timed(lambda: list(threads.map(lambda page: _load(tier, page), pages))))
    ahead = _timed(lambda: _load_ahead(tier, pages))
    tier.close()
    store.close()
    megabytes = size * count / 1e6
    return {
        "put_mb_per_s": round(megabytes / put_s, 1),
        "boto3_get_mb_per_s": round(megabytes / statistics.median(plain), 1),
        "get_mb_per_s": round(megabytes / statistics.median(ours), 1),
        "get_of_boto3": round(
            statistics.median(a / b for a, b in zip(plain, ours, strict=True)), 3
        ),
        "one_reader_ahead_mb_per_s": round(megabytes / ahead, 1),
    }


def _small(server: LocalS3) -> dict[str, float]:
    settings = _settings(server, "small")
    tier = _tier(settings)
    samples = [sample_page(number, _SMALL_BYTES) for number in range(_SMALL_PAGES)]

    def stored() -> None:
        assert all(put(tier, *sample) for sample in samples)
        tier.flush(60)

    put_s = _timed(stored)
    pages = [id_of(header) for header, _ in samples]
    get_s = _timed(lambda: _load_ahead(tier, pages, run=256))
    objects = tier.written.objects
    tier.close()
    again = _tier(settings, is_open=False)
    start_s = _timed(again.open)
    assert sum(1 for _ in again.pages()) == _SMALL_PAGES
    again.close()
    return {
        "objects": objects,
        "put_pages_per_s": round(_SMALL_PAGES / put_s),
        "get_pages_per_s": round(_SMALL_PAGES / get_s),
        "start_us_per_page": round(start_s / _SMALL_PAGES * 1e6, 1),
    }


def _load(tier: ObjectTier, page: PageId) -> None:
    stored = tier.prepare_load(page)
    assert isinstance(stored, StoredPage)
    tier.complete_load(page)


def _load_ahead(tier: ObjectTier, pages: list[PageId], run: int = 12) -> None:
    """Load as a node does: the pages of a batch are named before the first is wanted."""
    for at in range(0, len(pages), run):
        tier.expect(pages[at : at + run])
        for page in pages[at : at + run]:
            _load(tier, page)


def _settings(server: LocalS3, prefix: str) -> PoolSettings:
    return PoolSettings(
        object_bucket=BUCKET, object_endpoint_url=server.url, object_prefix=f"bench/{prefix}"
    )


def _tier(settings: PoolSettings, *, is_open: bool = True) -> ObjectTier:
    tier = ObjectTier(S3Store(settings), _BUDGET_BYTES, threads=_THREADS, timeout_s=60)
    if is_open:
        tier.open()
    return tier


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
