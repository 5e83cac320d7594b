"""What `pie pages` is asked in vain ends with a sentence, and leaves nothing behind."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pie.cluster.cli import app
from pie.cluster.secret import FILE_NAME, kept_secret
from pie.pool.conformance import put, sample_page
from pie.pool.disk import DiskTier
from pie.pool.sealing import Sealing
from tests.pool.disk_places import LARGE, SMALL

Pie = Callable[..., Result]


def fill(top: Path) -> None:
    """Leave what a stopped node leaves: a folder with a page in a pack and one in a file of its own."""
    secret = kept_secret(top / "pages" / FILE_NAME)
    (top / "pie.toml").write_text('[pool]\ndisk_folders = ["pages"]\ndisk_budget = "32MiB"\n')
    tier = DiskTier([top / "pages" / "pool-0"], 32 << 20, sealing=Sealing(secret))
    tier.open()
    assert put(tier, *sample_page(0, SMALL, secret=secret))
    assert put(tier, *sample_page(1, LARGE, secret=secret))
    tier.close()


@pytest.fixture
def pie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pie:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["pages", *arguments])

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", ""], "'' is no key"),
        (["show", ""], "'' is no key"),
        (["rm", "", "--yes"], "'' is no key"),
        (["rm", "", "--yes", "--running"], "'' is no whole key"),
        (["ls", "--at", ""], "an empty name"),
        (["export", ""], "an empty name"),
        (["import", "out.tar", "--into", ""], "an empty name"),
        (["import", "", "--into", "pool-0"], "an empty name"),
        (["import", "out.tar", "--into", "out.tar"], "out.tar is a file"),
        (["export", "pages/pool-0"], "is a node's folder"),
        (["export", "pages/pool-0/packs/more.tar"], "is a node's folder"),
    ],
)
def test_what_is_no_name_of_a_place_or_a_page_is_said_in_a_sentence(
    tmp_path: Path, pie: Pie, arguments: list[str], words: str
) -> None:
    fill(tmp_path)
    assert pie("export", "out.tar").exit_code == 0
    result = pie(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("pie: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_export_that_the_disk_does_not_take_leaves_nothing(
    tmp_path: Path, pie: Pie, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)

    def full(path: Path, _data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = pie("export", "some/where")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert not (tmp_path / "some").exists()
