"""Made-up traces, each with one habit that real ones mix.

Covers prompts as lists of pages, made from a seed. Does not cover time: prompts come one by one.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Iterable

from benchmarks.one_cache import Prompt

_PAGE_TOKENS = 512


class _Pages:
    """Numbers pages by the names of all pages up to them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def prompt(self, names: Iterable[Hashable]) -> Prompt:
        pages = []
        before = -1
        for name in names:
            before = self._numbers.setdefault((before, name), len(self._numbers))
            pages.append(before)
        return Prompt(pages, len(pages) * _PAGE_TOKENS)


def _popular(draw: random.Random, documents: int, skew: float, count: int) -> list[int]:
    weights = [1 / (rank + 1) ** skew for rank in range(documents)]
    return draw.choices(range(documents), weights, k=count)


def documents(count: int, seed: int = 1) -> list[Prompt]:
    """Documents of 8 pages, some asked about far more often than others."""
    draw, pages = random.Random(seed), _Pages()
    chosen = _popular(draw, 4000, 1.0, count)
    return [pages.prompt((document, at) for at in range(8)) for document in chosen]


def trunks(count: int, seed: int = 2) -> list[Prompt]:
    """200 long system prompts, each followed by a question that nobody asks again."""
    draw, pages = random.Random(seed), _Pages()
    return [
        pages.prompt(
            [
                *((trunk, at) for at in range(20)),
                *(("question", number, at) for at in range(draw.randint(1, 10))),
            ]
        )
        for number, trunk in enumerate(_popular(draw, 200, 0.9, count))
    ]


def scans(count: int, seed: int = 3) -> list[Prompt]:
    """Popular documents, and among them long prompts that come once."""
    draw, pages = random.Random(seed), _Pages()
    prompts = []
    for number, document in enumerate(_popular(draw, 400, 0.7, count)):
        if draw.random() < 0.3:
            prompts.append(pages.prompt(("scan", number, at) for at in range(40)))
        else:
            names = [(document, at) for at in range(10)]
            prompts.append(pages.prompt([*names, ("question", number)]))
    return prompts


def loop(count: int, seed: int = 0) -> list[Prompt]:  # noqa: ARG001
    """600 documents, one after another, again and again: the worst for `lru`."""
    pages = _Pages()
    return [pages.prompt((number % 600, at) for at in range(10)) for number in range(count)]


def sessions(count: int, seed: int = 4, *, think: float = 60.0) -> list[Prompt]:
    """Conversations under three system prompts, each back after about `think` other prompts."""
    draw, pages = random.Random(seed), _Pages()
    waiting: list[tuple[int, int, int, list[Hashable], int]] = []
    prompts: list[Prompt] = []
    started = 0
    while len(prompts) < count:
        now = len(prompts)
        if waiting and waiting[0][0] <= now:
            _, session, turn, names, turns = heapq.heappop(waiting)
        else:
            session, turn, trunk = started, 0, draw.randrange(3)
            names = [("trunk", trunk, at) for at in range(4)]
            turns = 1 if draw.random() < 0.3 else draw.randint(2, 12)
            started += 1
        names = [*names, *((session, turn, at) for at in range(draw.randint(1, 6)))]
        prompts.append(pages.prompt(names))
        if turn + 1 < turns:
            due = now + int(draw.expovariate(1 / think)) + 1
            heapq.heappush(waiting, (due, session, turn + 1, names, turns))
    return prompts


def slow_sessions(count: int, seed: int = 5) -> list[Prompt]:
    """Conversations whose turns are far apart."""
    return sessions(count, seed, think=800.0)


def again_soon(count: int, seed: int = 6) -> list[Prompt]:
    """What was asked last is asked again, ever more seldom: the best for `lru`."""
    draw, pages = random.Random(seed), _Pages()
    recent: list[int] = []
    fresh = 0
    prompts = []
    for _ in range(count):
        if recent and draw.random() < 0.7:
            document = recent.pop(-1 - min(len(recent) - 1, int(draw.expovariate(1 / 60))))
        else:
            document = fresh
            fresh += 1
        recent.append(document)
        prompts.append(pages.prompt((document, at) for at in range(12)))
    return prompts


def uniform(count: int, seed: int = 7) -> list[Prompt]:
    """1,000 documents, all as likely."""
    draw, pages = random.Random(seed), _Pages()
    return [
        pages.prompt((document, at) for at in range(8))
        for document in draw.choices(range(1000), k=count)
    ]


def shifting(count: int, seed: int = 8) -> list[Prompt]:
    """Popular documents, all replaced by others eight times."""
    draw, pages = random.Random(seed), _Pages()
    return [
        pages.prompt([*((number * 8 // count, document, at) for at in range(8)), ("q", number)])
        for number, document in enumerate(_popular(draw, 300, 0.8, count))
    ]


def mixed(count: int, seed: int = 9) -> list[Prompt]:
    """Documents, conversations, scans and trunks, in turns drawn at random."""
    draw = random.Random(seed)
    makers = (documents, sessions, scans, trunks)
    parts = [_apart(make(count // 4, seed), number) for number, make in enumerate(makers)]
    left = [iter(part) for part in parts]
    order = [number for number in range(len(parts)) for _ in range(count // 4)]
    draw.shuffle(order)
    return [next(left[number]) for number in order]


def changing(count: int, seed: int = 10) -> list[Prompt]:
    """Conversations, then a loop, then documents, then slow conversations."""
    makers = (sessions, loop, documents, slow_sessions)
    parts = [_apart(make(count // 4, seed), number) for number, make in enumerate(makers)]
    return [prompt for part in parts for prompt in part]


def _apart(prompts: list[Prompt], number: int) -> list[Prompt]:
    """Return prompts whose pages are no other trace's."""
    return [Prompt([page * 8 + number for page in p.pages], p.tokens, p.at_s) for p in prompts]


WORKLOADS: dict[str, Callable[[int], list[Prompt]]] = {
    "documents": documents,
    "trunks": trunks,
    "scans": scans,
    "loop": loop,
    "sessions": sessions,
    "slow_sessions": slow_sessions,
    "again_soon": again_soon,
    "uniform": uniform,
    "shifting": shifting,
    "mixed": mixed,
    "changing": changing,
}
