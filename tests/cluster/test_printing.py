"""What commands print where no terminal shows it: nothing is cut or wrapped."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pie.cluster import printing
from pie.cluster.command_parts import say
from pie.cluster.errors import UncertainError
from pie.cluster.explain import chosen_by
from pie.router.api.explained import Attempt

LONG = "a-worker-whose-name-" + "is-long-" * 20


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_a_table_and_text_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console = printing.printer()
    table = printing.new_table("place", "why", "pages", left=("why",), no_wrap=True)
    table.add_row(LONG, f"[red] {LONG}", "1")
    console.print(table)
    console.print(f"{LONG} {LONG}")
    heading, row, text = capsys.readouterr().out.splitlines()
    assert heading.split() == ["place", "why", "pages"]
    assert row.split() == [LONG, "[red]", LONG, "1"]
    assert text == f"{LONG} {LONG}"


def test_what_a_terminal_shows_is_as_wide_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert printing.printer().width <= 80
    printing.printer().print("word " * 40)
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_what_cannot_be_written_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(UncertainError, match="cannot be written: No space left on device"):
            say("version 1 is in force")


def test_all_commands_print_so() -> None:
    package = Path(printing.__file__).resolve().parent
    made = {
        file.name
        for file in package.glob("*.py")
        if re.search(r"\b(Console|Table)\(", file.read_text())
    }
    assert made == {"printing.py"}


def test_who_chose_in_place_of_whom_is_told() -> None:
    attempt = Attempt("w0", 0, 0, "done", False, [], policy="lanes:ShortLane")
    assert chosen_by(attempt) == "chosen by `lanes:ShortLane`"
    failed = msgspec.structs.replace(attempt, policy_failure="KeyError at lanes.py:7\x1b[2J")
    assert chosen_by(failed) == (
        "chosen by `cost`, in place of `lanes:ShortLane`, which failed: KeyError at lanes.py:7\\x1b[2J"
    )
