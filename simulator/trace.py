"""Traces: what was asked when, as lengths and what prompts have in common, never as text.

Covers the record, and reading files of any format that is known. Does not cover the formats
(`pie.simulator.mooncake`, `.lengths`, `.recorded`) or what a policy file's selectors mean in a trace
(`pie.simulator.meant`).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from pie.page.key import RootKey
from pie.simulator.errors import TraceError

MOST_TOKENS = 10_000_000
"""A prompt or answer of more tokens is a mistake."""
MOST_S = 1e10
"""Seconds that can be simulated, which is three hundred years: clocks beyond tell no milliseconds."""
MOST_PROBLEMS = 20
"""Of so many problems the rest will be alike."""


class PageRuns(Sequence[tuple[int, int]]):
    """Runs that all have the same length but for the last one: of a million requests, pairs would take gigabytes.

    Args:
        tokens: The token of each, in order.
        count: The length of each.
        last: That of the last one.
    """

    __slots__ = ("_count", "_last", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int, last: int) -> None:
        self._tokens = array("I", tokens)
        self._count, self._last = count, last

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(at, slice):
            return list(self)[at]
        token = self._tokens[at]
        return token, self._last if at in (-1, len(self._tokens) - 1) else self._count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from zip(self._tokens[:-1], itertools.repeat(self._count))
        if self._tokens:
            yield self._tokens[-1], self._last


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Its prompt is given by runs of equal made-up tokens: prompts that begin with the same runs have
    the same keys so far, as prompts with the same text would.
    """

    arrival_s: float
    runs: Sequence[tuple[int, int]]
    """Token and count, in order."""
    output_tokens: int
    answer: int
    """The token that its answer is made of."""
    session: str | None = None
    """What its pages have as the tag of their conversation; None for none."""
    tenant: str = ""
    """What its pages have as the tag of their tenant; empty for none."""
    salt: str | None = None
    """What keeps its pages apart from others' with the same tokens; None where the tokens do."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(count for _, count in self.runs)

    def tokens(self) -> array[int]:
        """Return the prompt."""
        return tokens_of(self.runs)


def _nothing(_: bytes) -> None:
    return None


@dataclass(slots=True)
class Trace:
    """What was asked, by time of arrival, and what is known of it."""

    requests: list[TraceRequest]
    token_of_key: Callable[[bytes], int | None] = _nothing
    """Returns the token that the page with a key is made of; None where no request has it."""
    token_of_name: Mapping[str, int] = field(default_factory=dict)
    """The token that a prefix is made of, by what the trace calls it."""
    model_root: RootKey | None = None
    """Of the one model that all requests were for; None where that is not known."""
    page_tokens: int = 0
    """Tokens of a page with a key; 0 where there are none, or of several sizes."""
    warnings: list[str] = field(default_factory=list)

    def leading(self, token: int) -> array[int]:
        """Return the tokens of a prompt up to the last that is `token`, as many as any has; none where none has it."""
        longest: tuple[Sequence[tuple[int, int]], int] = (), 0
        most = 0
        for request in self.requests:
            tokens = 0
            for at, (one, count) in enumerate(request.runs, start=1):
                tokens += count
                if one == token and tokens > most:
                    longest, most = (request.runs, at), tokens
        runs, ends = longest
        return tokens_of(list(runs)[:ends])


def tokens_of(runs: Sequence[tuple[int, int]]) -> array[int]:
    """Return runs of equal tokens one after another."""
    tokens = array("I")
    for token, count in runs:
        tokens.extend(array("I", (token,)) * count)
    return tokens


def read_trace(file: Path, *, limit: int | None = None) -> Trace:
    """Return what a trace holds; at most `limit` requests where that is set.

    The first one arrives at 0, and the others as long after it as the file says.

    Args:
        file: A file of any format that is known, or the folder that a router records to.
        limit: Most requests.

    Raises:
        TraceError: The file cannot be read, or is not a trace; lists what is wrong.
    """
    problems: list[str] = []
    try:
        trace = _read(file, problems)
    except OSError as error:
        raise TraceError(str(file), [f"cannot be read: {error.strerror or error}"]) from None
    if not trace.requests and not problems:
        problems.append("holds no requests")
    if problems:
        raise TraceError(str(file), problems)
    trace.requests.sort(key=lambda request: request.arrival_s)
    trace.requests = trace.requests[:limit]
    first_s = trace.requests[0].arrival_s
    if first_s:
        trace.requests = [replace(one, arrival_s=one.arrival_s - first_s) for one in trace.requests]
    return trace


def _read(file: Path, problems: list[str]) -> Trace:
    from pie.simulator.lengths import read_lengths  # noqa: PLC0415
    from pie.simulator.mooncake import read_mooncake  # noqa: PLC0415
    from pie.simulator.recorded import is_recorded, read_recorded, read_recorded_in  # noqa: PLC0415
    from pie.simulator.trace_file import lines_of, opened  # noqa: PLC0415

    if file.is_dir():
        return read_recorded_in(file, problems)
    with opened(file) as stream:
        if is_recorded(stream):
            return read_recorded(stream, problems)
        lines = lines_of(stream, str(file))
        # What stands before the first line that says anything goes to who reads, for lines' numbers.
        before: list[str] = []
        for line in lines:
            before.append(line)
            if line.strip():
                break
        is_mooncake = bool(before) and before[-1].lstrip().startswith("{")
        read = read_mooncake if is_mooncake else read_lengths
        return read(itertools.chain(before, lines), problems)


def problem_at(problems: list[str], line: int, told: str, *, what: str = "line") -> None:
    """Add a problem, unless there are so many already that nobody would read it."""
    if len(problems) < MOST_PROBLEMS:
        problems.append(f"{what} {line}: {told}")
    elif len(problems) == MOST_PROBLEMS:
        problems.append("and more")


def whole(value: object, name: str, *, least: int = 1) -> int:
    """Return a count of tokens.

    Raises:
        ValueError: It is none; the message is a sentence.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be a whole number, not {_short(value)}")  # noqa: TRY004
    if not least <= value <= MOST_TOKENS:
        raise ValueError(f"`{name}` must be from {least} to {MOST_TOKENS:,}, not {value}")
    return value


def names(values: Sequence[str]) -> str:
    """Return names as a list to read."""
    return ", ".join(f"`{value}`" for value in values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
