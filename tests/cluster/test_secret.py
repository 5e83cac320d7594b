"""The secret that pages on disk are keyed with outlives the cluster."""

from pathlib import Path

import pytest

from pie.cluster.errors import StartError
from pie.cluster.secret import FILE_NAME, kept_secret, new_secret


def test_the_next_start_finds_the_secret_of_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "pages"
    secret = kept_secret(folder / FILE_NAME)
    assert len(secret) == 32
    assert kept_secret(folder / FILE_NAME) == secret
    assert kept_secret(tmp_path / "b" / FILE_NAME) != secret
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o077 == 0, "nobody else may read it"


def test_runs_that_keep_no_pages_have_a_secret_each() -> None:
    assert new_secret() != new_secret()


def test_a_damaged_secret_stops_the_start_with_what_to_do(tmp_path: Path) -> None:
    kept_secret(tmp_path / FILE_NAME)
    (tmp_path / "cluster.secret").write_bytes(b"short")
    with pytest.raises(StartError, match="is damaged: put back its 32 bytes, or remove it"):
        kept_secret(tmp_path / FILE_NAME)


def test_a_disk_that_takes_nothing_does_not_keep_a_cluster_from_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert len(kept_secret(tmp_path / "file" / "pages" / FILE_NAME)) == 32
    assert "pages on disk and in a bucket are of this run alone" in caplog.text
