"""Forks: how long one takes, and what it copies, for SmolLM2 in bfloat16."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.bench_first_token import spread
from pie.page.key import RootKey
from pie.policies.manager import RetentionManager
from pie.worker.arena import Arena
from pie.worker.model import load_model
from pie.worker.page_table import PageTable
from pie.worker.settings import ModelSettings
from pie.worker.working_set import WorkingSet

TOKENS = 2048
REPEATS = 200
MUST_MS = 1.0


@dataclass
class Counted:
    """An arena that counts the pages copied."""

    arena: Arena
    pages: int = 0

    def copy(self, source_id: int, target_id: int) -> None:
        """Copy a page."""
        self.pages += 1
        self.arena.copy(source_id, target_id)

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        """Copy a state; this model has none."""
        raise AssertionError(f"slot {source_slot} was copied to {target_slot}")


def run() -> dict[str, object]:
    """Return milliseconds of a fork at a page's end and in the middle of a page."""
    settings = ModelSettings(dtype="bfloat16")
    model = load_model(settings)
    arena = Arena(model.layout, 1024)
    return {
        "must_ms": MUST_MS,
        "at_a_pages_end": _forks(arena, settings.page_tokens, TOKENS),
        "in_the_middle_of_a_page": _forks(arena, settings.page_tokens, TOKENS + 7),
    }


def _forks(arena: Arena, page_tokens: int, tokens: int) -> dict[str, object]:
    table = PageTable(arena.num_pages, arena.page_bytes, arena.layout.parts[0], RetentionManager())
    root = RootKey(b"r" * 32)
    ids = [random.randrange(40_000) for _ in range(tokens)]
    parent = WorkingSet(table, root, ids, page_tokens=page_tokens)
    assert parent.grow(tokens, 0.0)
    parent.advance(tokens, 0.0)
    memory = Counted(arena)
    took_ms = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        fork = parent.fork(memory, 0.0)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        assert fork is not None
        fork.release()
    return {"tokens": tokens, "ms": spread(took_ms), "pages_copied": memory.pages / REPEATS}
