"""A pool node that holds a million small pages on disk: memory for each page, and seconds until it is announced.

The packs are files without bytes in them, as long as a million pages of 16 KiB make them, so that they fit on any
disk: a start reads their lists, which are what a node writes, and no page. A node with the same settings and an empty
folder is what its memory is compared with. Redis is a real one, and its own log says how long it worked on one command
at most. Seconds of the node's cores are counted beside those of the clock, which other work on the machine stretches.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import redis
from msgspec import structs
from pydantic import ByteSize

from pie.index.server import EmbeddedServer
from pie.page.events import Epoch, PlaceId
from pie.page.groups import GROUP_PAGES
from pie.pool.checksum import Checksum
from pie.pool.conformance import sample_key, sample_page
from pie.pool.files import Files
from pie.pool.node import PoolNode
from pie.pool.pack_index import Came, encode_record
from pie.pool.packs import PACK_BYTES
from pie.pool.settings import PoolSettings

_PAGES = 1_000_000
_PAYLOAD_BYTES = 16 << 10
_FILE_BYTES = _PAYLOAD_BYTES + 2500
"""Of a page's file in a pack."""
_PACK_PAGES = PACK_BYTES // _FILE_BYTES
_SEQUENCE_PAGES = 128
_SECRET = bytes(range(32))
_PLACE = PlaceId("pool-0")
_BUDGET_BYTES = 32 << 30
_ASKED = {"bytes_a_page": 250, "start_and_announce_s": 10, "redis_longest_ms": 5}


def run() -> dict[str, object]:
    """Return what was asked and what was reached."""
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-at-rest-", dir=Path.cwd()))
    try:
        _fill(folder / "full")
        reached = _measured(folder)
    finally:
        shutil.rmtree(folder)
    return {
        "pages": _PAGES,
        "payload_bytes": _PAYLOAD_BYTES,
        "asked": _ASKED,
        "disk": reached,
    }


def _fill(folder: Path) -> None:
    """Leave what a node leaves that has stored the pages: lists as they are, packs without bytes in them."""
    files = Files()
    sample, _ = sample_page(0)
    digest = Checksum(_SECRET).digest(b"")
    packs = folder / _PLACE / "packs"
    packs.mkdir(parents=True)
    for number, first in enumerate(range(0, _PAGES, _PACK_PAGES), 1):
        records = []
        for slot, page in enumerate(range(first, min(first + _PACK_PAGES, _PAGES))):
            at = page % _SEQUENCE_PAGES
            header = structs.replace(
                sample,
                key=sample_key(page),
                parent=sample_key(page - 1 if at else -1),
                index=at,
                raw_bytes=_PAYLOAD_BYTES,
                checksum=digest,
                group=sample_key(page - at % GROUP_PAGES),
            )
            came = Came(slot * _FILE_BYTES, _FILE_BYTES, time.time_ns(), header)
            records.append(encode_record(came, _SECRET))
        (packs / f"{number:010}.list").write_bytes(b"".join(records))
        pack = packs / f"{number:010}.pack"
        pack.touch()
        files.truncate(pack, len(records) * _FILE_BYTES)


def _measured(folder: Path) -> dict[str, object]:
    """Start a node in a process of its own over nothing, and then over the pages."""
    server = EmbeddedServer(folder / "index", persist=False)
    try:
        server.start()
        empty = _in_process(server.url, folder / "empty")
        client = redis.Redis.from_url(server.url)
        client.config_set("slowlog-log-slower-than", 100)
        client.slowlog_reset()
        full = _in_process(server.url, folder / "full")
        slow = [int(one["duration"]) for one in client.slowlog_get(10_000)]
        client.close()
    finally:
        server.stop()
    assert full["pages"] == _PAGES
    per_page = (full["resident_bytes"] - empty["resident_bytes"]) / _PAGES
    return {
        "bytes_a_page": round(per_page, 1),
        "start_and_announce_s": round(full["started_s"] + full["announced_s"], 2),
        "start_s": round(full["started_s"], 2),
        "announce_s": round(full["announced_s"], 2),
        "start_and_announce_cpu_s": round(full["cpu_s"], 2),
        "redis_longest_ms": round(max(slow, default=0) / 1e3, 2),
        "peak_bytes_a_page": round((full["peak_bytes"] - empty["peak_bytes"]) / _PAGES, 1),
        "node_without_pages_mib": round(empty["resident_bytes"] / 2**20, 1),
    }


def _in_process(url: str, folder: Path) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    node = context.Process(target=_node, args=(url, folder, theirs))
    node.start()
    said: dict[str, float] = json.loads(ours.recv())
    node.join()
    return said


def _node(url: str, folder: Path, pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(json.dumps(asyncio.run(_held(url, folder))))


async def _held(url: str, folder: Path) -> dict[str, float]:
    settings = PoolSettings(
        ram_budget=ByteSize(64 << 20), disk_budget=ByteSize(_BUDGET_BYTES), disk_folders=(folder,)
    )
    node = PoolNode(_PLACE, settings, index_url=url, epoch=Epoch(time.time_ns()), secret=_SECRET)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await node.start()
    started_s = time.monotonic()
    while node.status().index_mode != "ok":  # noqa: ASYNC110 - nothing tells a benchmark
        await asyncio.sleep(0.01)
    announced_s, cpu_s = time.monotonic(), time.process_time() - began_cpu_s
    gc.collect()
    process = psutil.Process()
    found = {
        "pages": float(node.status().pages["pool_disk"]),
        "resident_bytes": float(process.memory_info().rss),
        "peak_bytes": float(_peak_bytes()),
        "started_s": started_s - began_s,
        "announced_s": announced_s - started_s,
        "cpu_s": cpu_s,
    }
    await node.close()
    return found


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0
