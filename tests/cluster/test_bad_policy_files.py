"""Every kind of bad policy file, through `pie policy check` and `apply` and a watched file: exit code 2, and nothing is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pie.cluster import policy_watch
from pie.cluster.cli import app
from pie.cluster.errors import NotRunningError
from pie.cluster.policy_watch import PolicyWatch
from tests.policies.bad_files import BAD_FILES, BadFile, write_modules


@pytest.fixture(params=BAD_FILES, ids=lambda bad: bad.name)
def bad(request: pytest.FixtureRequest) -> BadFile:
    found: BadFile = request.param
    return found


@pytest.fixture
def file(bad: BadFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_modules(tmp_path)
    text = bad.text
    (tmp_path / "p.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return Path("p.yaml")


def assert_told(lines: Sequence[str], bad: BadFile) -> None:
    assert len(lines) == len(bad.said)
    for line, said in zip(lines, bad.said, strict=True):
        assert "p.yaml:" in line
        assert said in line


@pytest.mark.parametrize("command", ["check", "apply"])
def test_a_command_lists_all_that_is_wrong_and_ends_with_2(
    command: str, bad: BadFile, file: Path
) -> None:
    # Nobody listens there: had it asked, it would say so.
    at = ["--at", "http://127.0.0.1:9"]
    done = CliRunner().invoke(app, ["policy", command, str(file), *at])
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(line.startswith("pie: ") for line in lines)
    assert_told(lines, bad)


def test_a_watched_file_is_refused_once_and_nothing_is_taken(
    bad: BadFile, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_watch, "_SETTLES_S", 0.0)
    refused: list[Sequence[str]] = []
    said: list[str] = []

    def take(text: str) -> None:
        raise AssertionError(f"it was taken: {text}")

    watch = PolicyWatch(
        file,
        take=take,
        refuse=refused.append,
        restored=lambda: said.append("restored"),
        say=said.append,
        away=NotRunningError,
    )
    for _ in range(3):
        watch.look()
    (told,) = refused
    assert_told(told, bad)
    assert not said
