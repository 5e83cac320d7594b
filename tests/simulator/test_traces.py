"""Traces that are read, and the ones that are told what is wrong with them."""

import json
from pathlib import Path

import pytest

from pie.page.key import RootKey, page_keys
from pie.simulator.errors import TraceError
from pie.simulator.trace import read_trace

ROOT = RootKey(bytes(32))


def mooncake(**fields: object) -> str:
    record = {"timestamp": 1_500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}
    return json.dumps(record | fields)


def read(tmp_path: Path, *lines: str) -> list[str]:
    """Return the problems of a trace."""
    file = tmp_path / "trace"
    file.write_text("\n".join(lines))
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
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("", "column `arrival_s` is missing"),
    ],
)
def test_a_bad_table_is_told(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in problem for problem in read(tmp_path, text))


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        read_trace(file)
