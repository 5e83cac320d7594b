"""A plain table of lengths: comma-separated, with a line of names first.

    arrival_s,prompt_tokens,output_tokens,session,prefix,prefix_tokens
    0.0,900,120,alice,tools,512
    4.5,1300,80,alice,tools,512

Covers reading it. `session`, `prefix`, `prefix_tokens` and `tenant` may be left out: prompts with the same
`prefix` begin with the same `prefix_tokens` tokens, the turns of a `session` begin with all that was said
before, answers included, and what one `tenant` has is no other's.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence

from pie.simulator.trace import Trace, TraceRequest, names, problem_at, whole

_NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
_BLANKS = " \t"
"""What may stand around a cell."""
_OPTIONAL = ("session", "prefix", "prefix_tokens", "tenant")


def read_lengths(lines: Iterable[str], problems: list[str]) -> Trace:
    """Return a table's trace; adds what is wrong with it to `problems`."""
    # Strictly: what stands behind a closed quote would be one cell with what is in it.
    rows = csv.reader(lines, strict=True)
    requests: list[TraceRequest] = []
    table = _Table()
    try:
        header = _header(rows, problems)
        for row in rows if not problems else ():
            if not any(cell.strip(_BLANKS) for cell in row):
                continue
            try:
                requests.append(table.request(header, row))
            except ValueError as error:
                problem_at(problems, rows.line_num, str(error))
    except csv.Error as error:
        problem_at(problems, rows.line_num, f"is not comma-separated: {error}")
    return Trace(requests, token_of_name=table.prefixes())


def _header(rows: Iterator[list[str]], problems: list[str]) -> list[str]:
    """Return the names in the first line; adds what is wrong with them to `problems`."""
    header = [name.strip(_BLANKS) for name in next(rows, [])]
    missing = [name for name in _NEEDED if name not in header]
    unknown = [name for name in header if name not in (*_NEEDED, *_OPTIONAL)]
    if missing:
        problem_at(problems, 1, f"column `{missing[0]}` is missing; needed are {names(_NEEDED)}")
    for name in unknown:
        allowed = names((*_NEEDED, *_OPTIONAL))
        problem_at(problems, 1, f"there is no column `{name}`; allowed are {allowed}")
    if len(set(header)) < len(header):
        problem_at(problems, 1, "a column is given twice")
    return header


class _Table:
    """Made-up tokens for names, each name its own."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], int] = {}
        self._tenants: dict[str, str] = {}
        """Whose a conversation is."""

    def prefixes(self) -> dict[str, int]:
        """Return the token of each prefix."""
        return {name: token for (kind, name), token in self._tokens.items() if kind == "prefix"}

    def request(self, header: Sequence[str], row: Sequence[str]) -> TraceRequest:
        """Return one row's request; raises `ValueError` with a sentence."""
        if len(row) != len(header):
            raise ValueError(f"has {len(row)} cells, and the first line names {len(header)}")
        cells = {name: cell.strip(_BLANKS) for name, cell in zip(header, row, strict=True)}
        prompt = whole(_number(cells, "prompt_tokens"), "prompt_tokens")
        output = whole(_number(cells, "output_tokens"), "output_tokens", least=0)
        prefix, session = cells.get("prefix", ""), cells.get("session", "")
        shared = 0
        if prefix:
            shared = whole(_number(cells, "prefix_tokens"), "prefix_tokens", least=0)
            if shared > prompt:
                raise ValueError(
                    f"`prefix_tokens` is {shared}, more than the {prompt} of the prompt"
                )
        tenant = cells.get("tenant", "")
        if session and (owner := self._tenants.setdefault(session, tenant)) != tenant:
            raise ValueError(f"session {session!r} is tenant {owner!r}'s, and not {tenant!r}'s too")
        own = ("session", session) if session else ("row", str(len(self._tokens)))
        runs = [(self._token("prefix", prefix), shared)] if shared else []
        if prompt > shared:
            runs.append((self._token(*own), prompt - shared))
        return TraceRequest(
            arrival_s=_seconds(cells["arrival_s"]),
            runs=tuple(runs),
            output_tokens=max(1, output),
            answer=self._token(*own),
            session=session or None,
            tenant=tenant,
            salt=tenant or None,
        )

    def _token(self, kind: str, name: str) -> int:
        return self._tokens.setdefault((kind, name), len(self._tokens) + 1)


def _number(cells: dict[str, str], name: str) -> int:
    text = cells.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number, not {text[:40]!r}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e12:
        raise ValueError(f"`arrival_s` must be seconds, of at least 0, not {text[:40]!r}")
    return seconds
