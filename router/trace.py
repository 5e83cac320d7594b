"""A trace of requests for replay: keys of pages and lengths, never text or token ids.

Covers rows, Parquet files and their bound. Does not cover who says that a request is over
(`pie.router.answer`). Off unless a folder is set.

A row is one sequence. Its keys are those of the prompt's full pages, so that two requests share a
prefix in the trace exactly where they shared it here. They are hashes of the tokens under the tenant's
salt: whoever has a trace can tell that a known text was asked, and nothing of an unknown one. A file is
written under a temporary name and is complete once it has its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pie.page.key import PageKey
from pie.router.generation import Generation
from pie.router.tenant import session_tag, tenant_tag

log = logging.getLogger("pie.router.trace")

SCHEMA = pa.schema(
    [
        ("arrived_unix_ms", pa.int64()),
        ("request_id", pa.string()),
        ("choice", pa.int32()),
        ("model", pa.dictionary(pa.int32(), pa.string())),
        ("model_root", pa.binary(32)),
        ("worker", pa.dictionary(pa.int32(), pa.string())),
        ("tenant_tag", pa.dictionary(pa.int32(), pa.string())),
        ("session", pa.binary(8)),
        ("page_tokens", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("keys", pa.list_(pa.binary(32))),
    ]
)
_BATCH_KEYS = 131_072
"""Keys of one file: 4 MiB."""
_KEY_BYTES = 32
_BATCH_ROWS = 10_000
_BATCH_S = 60.0
"""The oldest row waits no longer than so."""
_MOST_WAITING = 2
"""Batches that may wait for the disk; more are dropped."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One sequence."""

    arrived_unix_ms: int
    request_id: str
    choice: int
    model: str
    model_root: bytes
    worker: str
    tenant_tag: str
    session: bytes | None
    page_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    keys: Sequence[PageKey]


class TraceRecorder:
    """Writes rows to files of a folder, on a thread of its own.

    Args:
        folder: Made where it is not there.
        budget_bytes: Bytes of all traces in the folder; the oldest file is removed beyond them.
        secret: 32 bytes that all of the cluster share; keys the tags of tenants and sessions. Without it a
            session has a tag of this recorder's alone.
        on_dropped: Told of rows that were lost, because the disk is too slow or failed.
        clock: Seconds, going forward.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget_bytes: int,
        secret: bytes | None = None,
        on_dropped: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._secret = secret
        # What a client calls a session may name a person, and who has a trace could try names.
        self._session_key = secret or secrets.token_bytes(_KEY_BYTES)
        self._on_dropped = on_dropped
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pie-trace")
        self._rows: list[TraceRow] = []
        self._keys = 0
        self._since_s = 0.0
        self._waiting = 0
        self._number = 0

    def record(self, request_id: str, generations: Sequence[Generation]) -> None:
        """Take in a request that is over: each of its sequences that began."""
        for generation in generations:
            row = self._row(request_id, generation)
            if row is not None:
                self.add(row)

    def add(self, row: TraceRow) -> None:
        """Take in a row; costs no I/O here."""
        if not self._rows:
            self._since_s = self._clock()
        self._rows.append(row)
        self._keys += len(row.keys)
        if self._keys >= _BATCH_KEYS or len(self._rows) >= _BATCH_ROWS:
            self._hand_on()

    def tick(self) -> None:
        """Write what has waited for long enough."""
        if self._rows and self._clock() - self._since_s >= _BATCH_S:
            self._hand_on()

    def close(self) -> None:
        """Write what is left; waits for the disk."""
        self._hand_on()
        self._thread.shutdown(wait=True)

    def _row(self, request_id: str, generation: Generation) -> TraceRow | None:
        order, started = generation.order, generation.started
        if started is None or not generation.history:
            return None
        record = generation.history[0].chosen.link.record
        root, salt = record.model_root, order.prefix.salt
        if root is None:
            return None
        age_s = time.monotonic() - order.arrived_s
        return TraceRow(
            arrived_unix_ms=round((time.time() - age_s) * 1e3),
            request_id=request_id,
            choice=generation.index,
            model=order.model.name,
            model_root=bytes(root),
            worker=generation.place or "",
            tenant_tag=tenant_tag(root, order.tenant_salt, self._secret),
            session=bytes.fromhex(session_tag(root, salt, order.session, self._session_key))
            or None,
            page_tokens=record.page_tokens,
            prompt_tokens=len(order.prompt.ids),
            cached_tokens=generation.cached_tokens,
            output_tokens=len(generation.output_ids),
            keys=order.prefix.keys(root, record.page_tokens),
        )

    def _hand_on(self) -> None:
        rows, self._rows, self._keys = self._rows, [], 0
        if not rows:
            return
        if self._waiting >= _MOST_WAITING:
            self._on_dropped(len(rows))
            return
        self._waiting += 1
        self._number += 1
        name = f"trace-{time.time_ns():020d}-{os.getpid()}-{self._number}.parquet"
        self._thread.submit(self._write, name, rows)

    def _write(self, name: str, rows: Sequence[TraceRow]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            columns = [
                pa.array([getattr(row, field.name) for row in rows], field.type) for field in SCHEMA
            ]
            unfinished = self._folder / f".{name}.part"
            pq.write_table(
                pa.Table.from_arrays(columns, schema=SCHEMA), unfinished, compression="zstd"
            )
            unfinished.rename(self._folder / name)
            self._make_room()
        except (OSError, pa.ArrowException):
            log.exception("a trace could not be written to %s", self._folder)
            self._on_dropped(len(rows))
        finally:
            self._waiting -= 1

    def _make_room(self) -> None:
        """Remove the oldest files beyond the budget, but for the one just written."""
        files = sorted(self._folder.glob("trace-*.parquet"))
        sizes = [file.stat().st_size for file in files]
        used = sum(sizes)
        for file, size in zip(files[:-1], sizes, strict=False):
            if used <= self._budget_bytes:
                return
            file.unlink(missing_ok=True)
            used -= size
