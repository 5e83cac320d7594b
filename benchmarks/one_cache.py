"""A cache of pages over a trace, as a worker would keep it.

Covers one tier with a manager and a policy, requests that come one after another, and what perfect
foresight would have kept. Does not cover time, queues or several workers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: its pages by number, in order, and when it comes."""

    pages: Sequence[int]
    tokens: int
    at_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a cache made of a trace."""

    tokens: int = 0
    hit_tokens: int = 0
    evicted: int = 0
    choosing_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in the cache, as a share of all."""
        return self.hit_tokens / max(1, self.tokens)


def read_trace(file: Path) -> Iterator[Prompt]:
    """Read a trace in Mooncake's format, with pages of 512 tokens (JSON lines; `hash_ids`)."""
    with file.open() as lines:
        for line in lines:
            entry = json.loads(line)
            yield Prompt(entry["hash_ids"], entry["input_length"], entry["timestamp"] / 1000)


def replay(
    policy: RetentionPolicy | None,
    prompts: Iterable[Prompt],
    *,
    pages: int,
    page_tokens: int = 512,
    check: Callable[[RetentionManager], None] | None = None,
) -> Outcome:
    """Send prompts through a cache of `pages` pages; a prompt's own are pinned until it is done."""
    manager = RetentionManager(policy, name="replay")
    keys: dict[int, PageKey] = {}
    outcome = Outcome()
    for prompt in prompts:
        now_s = prompt.at_s
        names = [_key(keys, page) for page in prompt.pages[:pages]]
        held = 0
        while held < len(names) and manager.pin(names[held], Part.FULL):
            held += 1
        outcome.tokens += prompt.tokens
        outcome.hit_tokens += min(held * page_tokens, prompt.tokens)
        for key in reversed(names[:held]):
            manager.hit(key, Part.FULL, now_s)
        # A page after a gap is computed again, and then found to be there.
        new = [at for at in range(held, len(names)) if not manager.pin(names[at], Part.FULL)]
        excess = len(manager) + len(new) - pages
        started_s = time.perf_counter()
        victims = manager.victims(excess, now_s)
        for key, part in victims:
            manager.removed(key, part)
        outcome.choosing_s += time.perf_counter() - started_s
        outcome.evicted += len(victims)
        for at in new:
            before = names[at - 1] if at else b"root"
            manager.stored(PageView(names[at], before, at, Part.FULL, Tier.DEVICE, 1), now_s)
            manager.pin(names[at], Part.FULL)
        for key in reversed(names):
            manager.unpin(key, Part.FULL)
        if check is not None:
            check(manager)
    return outcome


def foresight(prompts: Sequence[Prompt], *, pages: int, page_tokens: int = 512) -> Outcome:
    """Do the same with perfect foresight: the page that is used last, or never, leaves (Belady)."""
    uses: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for page in prompt.pages:
            uses.setdefault(page, []).append(number)
    for numbers in uses.values():
        numbers.reverse()
    outcome = Outcome()
    never = len(prompts)
    held: dict[int, int] = {}
    for prompt in prompts:
        at = 0
        while at < len(prompt.pages) and prompt.pages[at] in held:
            at += 1
        outcome.tokens += prompt.tokens
        outcome.hit_tokens += min(at * page_tokens, prompt.tokens)
        for page in prompt.pages:
            uses[page].pop()
            held[page] = uses[page][-1] if uses[page] else never
        if len(held) > pages:
            # Of a sequence's pages used next at once, the last leave first.
            order = sorted(held, key=lambda page: (held[page], page))
            for page in order[pages:]:
                del held[page]
                outcome.evicted += 1
    return outcome


def _key(keys: dict[int, PageKey], page: int) -> PageKey:
    key = keys.get(page)
    if key is None:
        digest = hashlib.blake2b(page.to_bytes(8, "big"), digest_size=32).digest()
        key = keys[page] = PageKey(digest)
    return key
