"""Traces that are read, and the ones that are told what is wrong with them."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pie.page.key import RootKey, page_keys
from pie.policies import reading
from pie.router.trace import SCHEMA
from pie.simulator import trace_file
from pie.simulator.errors import TraceError
from pie.simulator.trace import read_trace

ROOT = RootKey(bytes(32))


def mooncake(**fields: object) -> str:
    record = {"timestamp": 1_500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}
    return json.dumps(record | fields)


def read(tmp_path: Path, *lines: str) -> list[str]:
    """Return the problems of a trace."""
    file = tmp_path / "trace"
    file.write_text("\n".join(lines), newline="")
    with pytest.raises(TraceError) as told:
        read_trace(file)
    assert str(told.value).startswith(f"{file}: ")
    return list(told.value.problems)


def test_hashes_become_prompts_that_share_the_pages_that_they_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    later = mooncake(timestamp=2_000, input_length=1_100, hash_ids=[4, 5, 6])
    file.write_text(f"{later}\n\n{mooncake()}\n")
    first, second = read_trace(file).requests
    assert (first.arrival_s, first.output_tokens, first.prompt_tokens) == (0.0, 9, 700)
    assert second.arrival_s == 0.5
    keys = [page_keys(ROOT, request.tokens(), 16) for request in (first, second)]
    assert keys[0] == keys[1][: 700 // 16]
    assert len(second.tokens()) == 1_100
    assert first.answer != second.answer


def test_turns_of_a_session_begin_with_all_that_was_said_before(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "arrival_s,prompt_tokens,output_tokens,session,prefix,prefix_tokens\n"
        "0,100,20,a,sys,40\n1,140,20,a,sys,40\n2,100,20,b,sys,40\n3,50,0,,,\n"
    )
    first, second, other, alone = (request for request in read_trace(file).requests)
    said = first.tokens().tolist() + [first.answer] * first.output_tokens
    assert second.tokens().tolist()[:120] == said
    assert other.tokens()[:40] == first.tokens()[:40]
    assert other.tokens()[40] != first.tokens()[40]
    assert alone.tokens()[0] not in said
    assert (first.session, alone.session, alone.output_tokens) == ("a", None, 1)


def test_only_the_first_requests_are_taken_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(mooncake(timestamp=at) for at in (3, 1, 2)))
    assert [r.arrival_s for r in read_trace(file, limit=2).requests] == [0.0, 0.001]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        (mooncake(hash_ids=[4]), "has 1 entries, and 700 tokens are 2 pages of 512"),
        (mooncake(hash_ids=[4, -1]), "`hash_ids` must be a list of whole numbers"),
        (mooncake(input_length=0), "`input_length` must be from 1 to 10,000,000, not 0"),
        (mooncake(input_length=7.5), "`input_length` must be a whole number, not 7.5"),
        (mooncake(output_length=None), "`output_length` must be a whole number, not None"),
        (mooncake(timestamp="now"), "`timestamp` must be milliseconds, of at least 0"),
        (mooncake(timestamp=-1), "`timestamp` must be milliseconds, of at least 0"),
        ('{"a": "\\ud800"}', "is not a JSON object: a text in it is not valid Unicode"),
        ('{"timestamp": 1}', "`input_length` is missing"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    problems = read(tmp_path, mooncake(), line, mooncake())
    assert len(problems) == 1
    assert problems[0].startswith("line 2: ")
    assert said in problems[0]


def test_every_bad_line_is_told_up_to_a_limit(tmp_path: Path) -> None:
    problems = read(tmp_path, mooncake(), *["{"] * 30)
    assert len(problems) == 21
    assert problems[-1] == "and more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2", "line 1: column `arrival_s` is missing"),
        ("arrival_s,prompt_tokens,output_tokens,color\n", "there is no column `color`"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2", "line 2: has 2 cells, and the first line"),
        ("arrival_s,prompt_tokens,output_tokens\nx,2,3", "line 2: `arrival_s` must be seconds"),
        (
            "arrival_s,prompt_tokens,output_tokens\n1,2.5,3",
            "line 2: `prompt_tokens` must be a whole",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens\n1,2,3,p,5",
            "line 2: `prefix_tokens` is 5, more than the 2 of the prompt",
        ),
        (f"{'x' * 200_000},", "line 1: is not comma-separated: field larger than"),
        ('arrival_s,prompt_tokens,output_tokens,session\n1,2,3,"a"b', "line 2: is not comma-sep"),
        (
            'arrival_s,prompt_tokens,output_tokens,session\n1,2,3,"a\n2,2,3,b',
            "line 3: is not comma",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("", "column `arrival_s` is missing"),
    ],
)
def test_a_bad_table_is_told(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in problem for problem in read(tmp_path, text))


@pytest.mark.parametrize("between", ["\n", "\r\n", "\r", "\u2028", "\x0b", "\x1c", "\x85"])
def test_what_looks_like_the_end_of_a_line_is_part_of_a_name(tmp_path: Path, between: str) -> None:
    file = tmp_path / "trace.csv"
    head = "arrival_s,prompt_tokens,output_tokens,session"
    names = (f"a{between}b", "ab", f"ab{between}", "ab")
    rows = (f'{at},20,4,"{name}"' for at, name in enumerate(names))
    file.write_text("\r\n".join([head, *rows, ""]), newline="")
    requests = read_trace(file).requests
    assert [one.session for one in requests] == list(names)
    assert len({one.answer for one in requests}) == 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line_of_json(tmp_path: Path, end: str) -> None:
    file = tmp_path / "trace.jsonl"
    line = json.dumps(json.loads(mooncake()) | {"note": "a\u2028b\x85c"}, ensure_ascii=False)
    file.write_text(f"\ufeff{end}{line}{end}{line}{end}", newline="")
    assert len(read_trace(file).requests) == 2


def _table(file: Path) -> None:
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,4\n1,20,4\n")


def _mooncake(file: Path) -> None:
    file.write_text(f"\n{mooncake()}\n{mooncake()}\n")


def _recorded(file: Path) -> None:
    columns = [name for name in SCHEMA.names if name != "request_id"]
    row = {
        **dict.fromkeys(columns),
        "arrived_unix_ms": 5,
        "model": "m",
        "model_root": bytes(32),
        "tenant_tag": "",
        "page_tokens": 16,
        "prompt_tokens": 20,
        "output_tokens": 4,
        "keys": [bytes(32)],
    }
    table = pa.Table.from_pylist([row, row], pa.schema([SCHEMA.field(name) for name in columns]))
    pq.write_table(table, file)


@pytest.mark.parametrize("write", [_table, _mooncake, _recorded])
def test_a_pipe_is_read_as_a_file_is(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "file")
    from_file = read_trace(tmp_path / "file").requests
    os.mkfifo(tmp_path / "pipe")
    data = (tmp_path / "file").read_bytes()
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(data))
    writer.start()
    from_pipe = read_trace(tmp_path / "pipe").requests
    writer.join(30)
    told = [
        [(one.arrival_s, list(one.runs), one.output_tokens) for one in requests]
        for requests in (from_file, from_pipe)
    ]
    assert told[0] == told[1]
    assert len(from_pipe) == 2


def test_what_has_no_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIPE_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"that nobody has written anything into for 0\.01 s"):
        read_trace(tmp_path / "pipe")
    (tmp_path / "trace").mkdir()
    os.mkfifo(tmp_path / "trace" / "a.parquet")
    with pytest.raises(TraceError, match=r"a\.parquet: is not a file"):
        read_trace(tmp_path / "trace")
    with pytest.raises(TraceError, match="must be a file, a pipe, or a folder that a router"):
        read_trace(Path("/dev/zero"))
    monkeypatch.setattr(trace_file, "MOST_LINE_BYTES", 1 << 20)
    file = tmp_path / "long"
    file.write_bytes(b"\n" + b" " * 3_000_000)
    with pytest.raises(TraceError, match="line 2: is longer than 1 MiB"):
        read_trace(file)


def test_a_pipe_that_holds_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "_MOST_PIPE_BYTES", 1_000)
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(end, b"x" * 2_000)
    with pytest.raises(TraceError, match=r"is a pipe with more than .*; write it to a file"):
        read_trace(tmp_path / "pipe")
    os.close(end)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(TraceError, match="line 1: is not UTF-8 text: byte 1 of it"):
        read_trace(file)
