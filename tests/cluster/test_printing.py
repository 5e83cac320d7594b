"""What commands print where no terminal shows it: nothing is cut or wrapped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pie.cluster import printing

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


def test_all_commands_print_so() -> None:
    package = Path(printing.__file__).resolve().parent
    made = {
        file.name
        for file in package.glob("*.py")
        if re.search(r"\b(Console|Table)\(", file.read_text())
    }
    assert made == {"printing.py"}
