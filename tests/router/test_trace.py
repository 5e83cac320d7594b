"""The trace of requests: what shares a prefix here shares it there, and no text is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pie.page.key import PageKey
from pie.router.tenant import session_tag
from pie.router.trace import TraceRecorder, TraceRow
from tests.router.conftest import Cluster

LONG = "marzipan and again " * 30


def row(number: int, keys: int) -> TraceRow:
    names = [
        PageKey(number.to_bytes(16, "little") + at.to_bytes(16, "little")) for at in range(keys)
    ]
    return TraceRow(
        number, f"r{number}", 0, "m", bytes(32), "w", "", None, 16, keys * 16, 0, 1, names
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        one for file in sorted(folder.glob("*.parquet")) for one in pq.read_table(file).to_pylist()
    ]


@pytest.mark.live
async def test_requests_are_recorded_with_their_keys_and_lengths(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.mock("w0")
    router = await cluster.router(1, trace_dir=str(tmp_path / "trace"))
    client = cluster.openai(router)
    usages = []
    for more in ("", "and more, and more, and more, and more, and more, and more"):
        answer = await client.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": LONG + more}],
            extra_body={"session_id": "alice@example.org"},
        )
        assert answer.usage is not None
        usages.append(answer.usage)
    [link] = router._workers.links.values()
    assert link.record.model_root is not None
    unkeyed = session_tag(link.record.model_root, None, "alice@example.org")
    await router.close()
    first, second = rows(tmp_path / "trace")
    for recorded, usage in zip((first, second), usages, strict=True):
        assert recorded["prompt_tokens"] == usage.prompt_tokens
        assert recorded["output_tokens"] == usage.completion_tokens
        assert usage.prompt_tokens_details is not None
        assert recorded["cached_tokens"] == usage.prompt_tokens_details.cached_tokens
        assert len(recorded["keys"]) == usage.prompt_tokens // 16
        assert recorded["worker"] == "w0"
        assert recorded["model_root"] == link.record.model_root
    shared = second["cached_tokens"] // 16
    assert shared > 10
    assert first["keys"][:shared] == second["keys"][:shared]
    assert first["session"] == second["session"] is not None
    # Whoever has the file cannot try names.
    assert first["session"].hex() != unkeyed
    [file] = (tmp_path / "trace").glob("*.parquet")
    content = file.read_bytes()
    assert b"marzipan" not in content
    assert b"alice" not in content


def test_rows_are_written_when_there_are_many_and_when_they_are_old(tmp_path: Path) -> None:
    now_s = 0.0
    recorder = TraceRecorder(tmp_path, budget_bytes=1 << 30, clock=lambda: now_s)
    recorder.add(row(1, 10))
    recorder.tick()
    now_s = 61.0
    recorder.tick()
    recorder.add(row(2, 200_000))
    # While it is being written, what comes is dropped.
    recorder._thread.submit(lambda: None).result()
    recorder.add(row(3, 1))
    recorder.close()
    assert [one["request_id"] for one in rows(tmp_path)] == ["r1", "r2", "r3"]
    assert len(list(tmp_path.iterdir())) == 3


def test_the_oldest_files_leave_beyond_the_budget(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, budget_bytes=20_000)
    for number in range(20):
        recorder.add(row(number, 200))
        recorder._hand_on()
        # One at a time, so that none is dropped.
        recorder._thread.submit(lambda: None).result()
    recorder.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    assert rows(tmp_path)[-1]["request_id"] == "r19"


def test_a_disk_that_fails_loses_rows_and_nothing_else(tmp_path: Path) -> None:
    lost: list[int] = []
    (tmp_path / "file").write_text("no folder")
    recorder = TraceRecorder(tmp_path / "file", budget_bytes=1, on_dropped=lost.append)
    recorder.add(row(1, 1))
    recorder.close()
    assert lost == [1]
