"""Traces that a router recorded, replayed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pie.page.key import PageKey, RootKey, page_keys
from pie.router.trace import SCHEMA, TraceRecorder, TraceRow
from pie.simulator.command import SimulateOptions, simulate
from pie.simulator.errors import TraceError
from pie.simulator.trace import Trace, read_trace
from tests.simulator.parts import spec

ROOT = RootKey(b"r" * 32)
OTHER = RootKey(b"o" * 32)
PAGE = 16


def row(
    number: int,
    tokens: list[int],
    *,
    root: RootKey = ROOT,
    tenant: str = "",
    session: bytes | None = None,
    model: str = "m",
) -> TraceRow:
    return TraceRow(
        arrived_unix_ms=1_700_000_000_000 + 500 * number,
        request_id=f"r{number}",
        choice=0,
        model=model,
        model_root=bytes(ROOT),
        worker="w",
        tenant_tag=tenant,
        session=session,
        page_tokens=PAGE,
        prompt_tokens=len(tokens),
        cached_tokens=0,
        output_tokens=7,
        keys=page_keys(root, tokens, PAGE),
    )


def recorded(folder: Path, *rows: TraceRow, files: int = 1) -> Trace:
    recorder = TraceRecorder(folder, budget_bytes=1 << 30)
    for at, one in enumerate(rows):
        recorder.add(one)
        if files > 1 and at % files == 0:
            recorder._hand_on()
            # One at a time, so that none is dropped.
            recorder._thread.submit(lambda: None).result()
    recorder.close()
    return read_trace(folder)


SHARED = list(range(3 * PAGE))


def test_pages_are_as_large_as_they_were_unless_that_is_said(tmp_path: Path) -> None:
    recorded(tmp_path / "trace", row(0, SHARED), row(1, SHARED))
    for own, rate in ((True, (3 * PAGE - 1) / (6 * PAGE)), (False, 0.0)):
        of = spec(page_tokens=8 * PAGE)
        (report,) = simulate(
            SimulateOptions(tmp_path / "trace", [None], of, own_page_tokens=own), lambda _: None
        )
        assert report.hit_rate == pytest.approx(rate)


def test_what_shared_pages_shares_them_and_nothing_else(tmp_path: Path) -> None:
    trace = recorded(
        tmp_path / "trace",
        row(1, [*SHARED, *range(90, 109)], session=b"12345678"),
        row(0, [*SHARED, *range(200, 220)]),
        row(3, [*SHARED, *range(200, 220)], root=OTHER, tenant="ab" * 8),
        files=2,
    )
    first, second, salted = trace.requests
    assert [one.arrival_s for one in trace.requests] == [0.0, 0.5, 1.5]
    assert [one.prompt_tokens for one in trace.requests] == [68, 67, 68]
    assert [len(one.runs) for one in trace.requests] == [5, 5, 5]
    assert second.session == b"12345678".hex()
    assert (first.session, first.tenant, salted.tenant) == (None, "", "ab" * 8)
    keys = [page_keys(ROOT, one.tokens(), PAGE) for one in trace.requests]
    assert keys[0][:3] == keys[1][:3]
    assert keys[0][3] != keys[1][3]
    assert not set(keys[2]) & set(keys[0])
    assert (trace.model_root, trace.page_tokens, trace.warnings) == (ROOT, PAGE, [])
    token = trace.token_of_key(page_keys(ROOT, SHARED, PAGE)[2])
    assert token is not None
    assert trace.leading(token) == first.tokens()[: 3 * PAGE]
    assert trace.token_of_key(PageKey(bytes(32))) is None


def test_one_file_of_an_older_router_is_read_too(tmp_path: Path) -> None:
    recorded(tmp_path / "trace", row(0, SHARED))
    [file] = (tmp_path / "trace").iterdir()
    pq.write_table(pq.read_table(file).drop(["model_root", "request_id"]), tmp_path / "old")
    trace = read_trace(tmp_path / "old", limit=1)
    assert trace.model_root is None
    assert trace.requests[0].prompt_tokens == len(SHARED)


def test_requests_of_several_models_are_told(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", row(0, SHARED), row(1, SHARED, model="n"))
    assert trace.warnings == ["requests of `m`, `n` are taken for those of one model"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_tokens": 40}, r"row 1: `keys` has 3 pages of 16 tokens, more than the 40"),
        ({"page_tokens": 0}, r"row 1: `page_tokens` must be from 1 to 10,000,000, not 0"),
        ({"arrived_unix_ms": -1}, r"row 1: `arrived_unix_ms` must be milliseconds"),
        ({"tenant_tag": None}, r"row 1: `tenant_tag` is empty"),
        ({"keys": "drop"}, r"column `keys` is missing"),
        ({"output_tokens": "x"}, r"column `output_tokens` is string, not int32"),
    ],
)
def test_what_is_wrong_is_told_with_its_file_and_row(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    recorded(tmp_path / "trace", row(0, SHARED))
    [file] = (tmp_path / "trace").iterdir()
    table = pq.read_table(file)
    [(name, value)] = change.items()
    at = table.schema.get_field_index(name)
    if value == "drop":
        table = table.drop([name])
    else:
        kind = pa.string() if isinstance(value, str) else SCHEMA.field(name).type
        table = table.set_column(at, pa.field(name, kind), pa.array([value], kind))
    pq.write_table(table, file)
    with pytest.raises(TraceError, match=rf"{file.name}: {said}"):
        read_trace(tmp_path / "trace")


def test_a_folder_without_files_and_a_file_that_is_cut_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a folder without files of Parquet"):
        read_trace(tmp_path)
    (tmp_path / "cut").write_bytes(b"PAR1 and no more")
    with pytest.raises(TraceError, match="is no whole file of Parquet"):
        read_trace(tmp_path / "cut")
