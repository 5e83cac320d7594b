"""Traces: what was asked when, as lengths and what prompts have in common, never as text.

Covers the record, and reading a file of any format that is known. Does not cover the formats
(`pie.simulator.mooncake`, `.lengths`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pie.simulator.errors import TraceError

MOST_TOKENS = 10_000_000
"""A prompt or answer of more tokens is a mistake."""
MOST_S = 1e10
"""Seconds that can be simulated, which is three hundred years: clocks beyond tell no milliseconds."""
MOST_PROBLEMS = 20
"""Of so many problems the rest will be alike."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Its prompt is given by runs of equal made-up tokens: prompts that begin with the same runs have
    the same keys so far, as prompts with the same text would.
    """

    arrival_s: float
    runs: tuple[tuple[int, int], ...]
    """Token and count, in order."""
    output_tokens: int
    answer: int
    """The token that its answer is made of."""
    session: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(count for _, count in self.runs)

    def tokens(self) -> array[int]:
        """Return the prompt."""
        tokens = array("I")
        for token, count in self.runs:
            tokens.extend(array("I", (token,)) * count)
        return tokens


def read_trace(file: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Return the requests of a trace, by time of arrival; at most `limit` where that is set.

    The first one arrives at 0, and the others as long after it as the file says.

    Raises:
        TraceError: The file cannot be read, or is not a trace; lists what is wrong.
    """
    from pie.simulator.lengths import read_lengths  # noqa: PLC0415
    from pie.simulator.mooncake import read_mooncake  # noqa: PLC0415

    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TraceError(str(file), [f"cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise TraceError(str(file), [f"is not UTF-8 text: byte {error.start}"]) from None
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    read = read_mooncake if first.lstrip().startswith("{") else read_lengths
    problems: list[str] = []
    requests = read(lines, problems)
    if not requests and not problems:
        problems.append("holds no requests")
    if problems:
        raise TraceError(str(file), problems)
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    if first_s:
        requests = [replace(one, arrival_s=one.arrival_s - first_s) for one in requests[:limit]]
    return requests[:limit]


def problem_at(problems: list[str], line: int, what: str) -> None:
    """Add a problem, unless there are so many already that nobody would read it."""
    if len(problems) < MOST_PROBLEMS:
        problems.append(f"line {line}: {what}")
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
