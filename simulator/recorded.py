"""Traces that routers record (`router.trace_dir`): Parquet files of page keys and lengths.

Covers reading them, one file or a folder of them. Does not cover writing (`pie.router.trace`).

Two prompts share a prefix just where they shared it while serving: a page is made of a token of its own. Tags
of tenants and conversations are those of the cluster, where all its routers share a secret. An answer matches
nothing: a row tells the pages of its prompt alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import pyarrow as pa
import pyarrow.parquet as pq

from pie.page.key import RootKey
from pie.router.trace import SCHEMA
from pie.simulator.trace import Trace, TraceRequest, names, problem_at, whole

_MAGIC = b"PAR1"
_NEEDED = (
    *("arrived_unix_ms", "model", "tenant_tag", "session", "page_tokens", "prompt_tokens"),
    *("output_tokens", "keys"),
)
_OPTIONAL = ("model_root",)
"""Files of routers before it do not have it."""
_ANSWERS = 1 << 31
_ROWS = 1_000
_MOST_MS = 10**15


class PageRuns(Sequence[tuple[int, int]]):
    """A prompt by its pages, of one token each, and the tokens after the last of them: some bytes a page.

    Args:
        pages: The token of each page.
        page_tokens: Tokens in one.
        rest: How many come after them.
        own: The token of those.
    """

    def __init__(self, pages: array[int], page_tokens: int, rest: int, own: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._rest = rest
        self._own = own

    def __len__(self) -> int:
        return len(self._pages) + bool(self._rest)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for token in self._pages:
            yield token, self._page_tokens
        if self._rest:
            yield self._own, self._rest

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[int, int]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        return list(self)[at]


def is_recorded(stream: BinaryIO) -> bool:
    """Say whether a file at its beginning is one of Parquet; it is there again afterwards.

    Raises:
        OSError: It cannot be read.
    """
    begins = stream.read(len(_MAGIC))
    stream.seek(0)
    return begins == _MAGIC


def read_recorded(stream: BinaryIO, problems: list[str]) -> Trace:
    """Return the trace in a file; adds what is wrong with it to `problems`.

    Raises:
        OSError: It cannot be read.
    """
    found = _Recorded()
    found.read(stream, problems)
    return found.trace()


def read_recorded_in(folder: Path, problems: list[str]) -> Trace:
    """Return the trace in all files of a folder; adds what is wrong with them to `problems`.

    Raises:
        OSError: One cannot be read.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        problems.append(
            "is a folder without files of Parquet, as routers write them to `trace_dir`"
        )
    found = _Recorded()
    for file in files:
        told: list[str] = []
        if file.is_file():
            with file.open("rb") as stream:
                found.read(stream, told)
        else:
            told.append("is not a file")
        problems += [f"{file.name}: {one}" for one in told]
    return found.trace()


class _Recorded:
    """What the files hold so far."""

    def __init__(self) -> None:
        self._requests: list[TraceRequest] = []
        self._tokens: dict[bytes, int] = {}
        self._roots: set[bytes | None] = set()
        self._models: set[str] = set()
        self._page_tokens: set[int] = set()

    def trace(self) -> Trace:
        """Return all of it."""
        root = next(iter(self._roots)) if len(self._roots) == 1 else None
        warnings = []
        if len(self._models) > 1:
            told = names(sorted(self._models))
            warnings.append(f"requests of {told} are taken for those of one model")
        return Trace(
            self._requests,
            self._tokens.get,
            model_root=None if root is None else RootKey(root),
            page_tokens=self._page_tokens.pop() if len(self._page_tokens) == 1 else 0,
            warnings=warnings,
        )

    def read(self, stream: BinaryIO, problems: list[str]) -> None:
        """Take in a file; adds what is wrong with it to `problems`."""
        try:
            self._read(stream, problems)
        except pa.ArrowException as error:
            problems.append(f"is no whole file of Parquet: {str(error).splitlines()[0]}")

    def _read(self, stream: BinaryIO, problems: list[str]) -> None:
        """Take in so many rows at a time."""
        with pq.ParquetFile(stream) as opened:
            schema = opened.schema_arrow
            columns = [name for name in (*_NEEDED, *_OPTIONAL) if name in schema.names]
            if missing := [name for name in _NEEDED if name not in columns]:
                problems.append(f"column `{missing[0]}` is missing; needed are {names(_NEEDED)}")
            for name in columns:
                if schema.field(name).type != SCHEMA.field(name).type:
                    kind = SCHEMA.field(name).type
                    problems.append(f"column `{name}` is {schema.field(name).type}, not {kind}")
            if problems:
                return
            number = 0
            for batch in opened.iter_batches(_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    try:
                        self._requests.append(self._request(row))
                    except ValueError as error:
                        problem_at(problems, number, str(error), what="row")

    def _request(self, row: dict[str, Any]) -> TraceRequest:
        if empty := [name for name in _NEEDED if row[name] is None and name != "session"]:
            raise ValueError(f"`{empty[0]}` is empty")
        arrived_ms = row["arrived_unix_ms"]
        if not 0 <= arrived_ms <= _MOST_MS:
            raise ValueError("`arrived_unix_ms` must be milliseconds, of at least 0")
        page_tokens = whole(row["page_tokens"], "page_tokens")
        prompt = whole(row["prompt_tokens"], "prompt_tokens")
        output = whole(row["output_tokens"], "output_tokens", least=0)
        keys = row["keys"]
        rest = prompt - len(keys) * page_tokens
        if rest < 0:
            raise ValueError(
                f"`keys` has {len(keys)} pages of {page_tokens} tokens, more than the {prompt} of the prompt"
            )
        self._models.add(row["model"])
        self._roots.add(row.get("model_root"))
        self._page_tokens.add(page_tokens)
        tokens, number = self._tokens, len(self._requests)
        # What comes after the pages has no key, so that it is no other prompt's.
        own = _ANSWERS + number % _ANSWERS
        session = row["session"]
        return TraceRequest(
            arrival_s=arrived_ms / 1e3,
            runs=PageRuns(
                array("I", [tokens.setdefault(key, len(tokens)) for key in keys]),
                page_tokens,
                rest,
                own,
            ),
            # Every answer has a token at least.
            output_tokens=max(1, output),
            answer=own,
            session=None if session is None else session.hex(),
            tenant=row["tenant_tag"],
        )
