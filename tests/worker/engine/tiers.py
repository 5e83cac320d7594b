"""Workers with tiers below device memory, over a toy model, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pie.page.events import Part, PlaceId, Tier as TierKind
from pie.page.key import RootKey
from pie.page.layout import LayerSpec, PageLayout
from pie.policies.manager import RetentionManager
from pie.pool.disk import DiskTier
from pie.pool.files import Files
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import Tier
from pie.tokens.tokenizer import Tokenizer
from pie.worker.load_choice import LoadTier
from pie.worker.lower_tiers import LowerTiers, open_tiers
from pie.worker.page_copies import PageCopies, PageNames
from pie.worker.rates import Rate
from tests.worker.engine.driver import Answer
from tests.worker.engine.threaded import DictPool, Threaded, Untimed
from tests.worker.engine.toys import ToyRunner, toy_layout

PAGE = 4
ROOT = RootKey(b"r" * 32)
MIB = 1 << 20
VOCAB_USED = 190
PROMPT = list(range(3, 43))
FULL = len(PROMPT) // PAGE

MakeTiers = Callable[[PageCopies], LowerTiers | None]


@dataclass
class Worker:
    """An engine on a thread, its model, and its tiers."""

    engine: Threaded
    runner: ToyRunner

    async def ask(self, prompt: Iterable[int], tokens: int = 1) -> Answer:
        return await self.engine.ask(list(prompt), tokens)

    @property
    def tiers(self) -> LowerTiers:
        assert self.engine.tiers is not None
        return self.engine.tiers

    def figure(self, name: str) -> Any:
        return self.tiers.figures()[name]

    async def settled(self) -> None:
        """Wait until nothing is on its way down any more."""
        await self.engine.until(lambda: self.engine.engine.status.store_queue_pages == 0)
        await self.engine.until(lambda: self.engine.engine.is_idle)

    async def forget(self, seed: int = 0) -> None:
        """Fill device memory with other pages, so that all that was idle leaves it."""
        total = self.engine.table.total
        for number in range(2):
            first = 100 + 2 * seed + number
            await self.ask([first % VOCAB_USED] * ((total - 1) * PAGE))
        await self.settled()


class Unmeasured(Rate):
    """Learns nothing."""

    def saw(self, tokens: int, seconds: float) -> None:
        pass


class WideToyRunner(ToyRunner):
    """Pages so large that each has a file of its own."""

    def export(self, page_id: int, part: Part) -> memoryview:
        return memoryview(bytes(super().export(page_id, part)) + b"w" * (64 << 10))

    def load(self, page_id: int, part: Part, payload: memoryview) -> None:
        assert payload[8 * self.page_tokens :] == b"w" * (64 << 10)
        super().load(page_id, part, payload[: 8 * self.page_tokens])


def wide_layout() -> PageLayout:
    spec = LayerSpec(Part.FULL, kv_heads=1, key_dim=2, value_dim=4096)
    return PageLayout((spec,), PAGE, "float32")


class Workers:
    """Starts workers and stops them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.started: list[Worker] = []

    async def start(
        self,
        tiers: MakeTiers,
        *,
        pages: int = 16,
        wide: bool = False,
        pool: DictPool | None = None,
        limit_s: float = 30.0,
        suspended_bytes: int = MIB,
        root: RootKey = ROOT,
        **options: Any,
    ) -> Worker:
        runner = (WideToyRunner if wide else ToyRunner)(pages, PAGE)
        layout = wide_layout() if wide else toy_layout(PAGE)
        engine = Threaded(
            runner,
            self.tokenizer,
            pages=pages,
            page_tokens=PAGE,
            page_bytes=layout.page_bytes,
            root=root,
            **({"eos": 999} | options),
        )
        engine.attach(
            pool,
            runner,
            PageNames(root, layout),
            tiers=tiers,
            suspended_bytes=suspended_bytes,
            limit_s=limit_s,
        ).choice.times = {tier: Untimed() for tier in LoadTier}
        engine.start()
        self.started.append(Worker(engine, runner))
        return self.started[-1]

    async def stop(self, worker: Worker) -> None:
        self.started.remove(worker)
        await worker.engine.stop()

    async def close(self) -> None:
        for worker in list(self.started):
            await self.stop(worker)


def opened(
    folder: Path | None = None,
    *,
    host: int = 0,
    disk: int = 0,
    files: Files | None = None,
    keep_bad_pages: bool = False,
    secret: bytes | None = None,
) -> MakeTiers:
    """Return how a worker opens its tiers."""
    return lambda copies: open_tiers(
        PlaceId("worker/0"),
        copies,
        host_bytes=host,
        disk_bytes=disk,
        disk_path=folder or Path("/nowhere"),
        files=files,
        keep_bad_pages=keep_bad_pages,
        secret=secret,
        lock_timeout_s=0.0,
    )


def stacked(*tiers: Tier) -> MakeTiers:
    """Return how a worker takes tiers that a test made."""

    def make(copies: PageCopies) -> LowerTiers:
        lower = LowerTiers([Level(tier, RetentionManager()) for tier in tiers], copies)
        lower.start()
        return lower

    return make


def host_tier(size: int = MIB) -> RamTier:
    return RamTier(size, kind=TierKind.HOST)


def disk_tier(folder: Path, size: int = 4 * MIB) -> DiskTier:
    tier = DiskTier([folder], size, kind=TierKind.DISK)
    tier.open()
    return tier


def page_files(folder: Path) -> Sequence[Path]:
    """Return the page files of a worker's folder."""
    return sorted(folder.glob("worker%2F0/*/*/*"))


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = np.fromfile(path, np.uint8)
    data[at] ^= 4
    data.tofile(path)
