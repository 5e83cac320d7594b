"""`pie key`: what it makes, lists and says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pie.cluster.cli import app
from pie.router.key_file import hashed, read_key_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pie.toml").write_text('[router]\nkeys_file = "keys.json"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pie(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["key", *arguments])


def test_keys_are_made_limited_listed_and_revoked(folder: Path) -> None:
    made = pie("create", "acme", "--admin", "--note", "Ann", "--requests-per-minute", "60")
    assert made.exit_code == 0
    told, key = made.stdout.splitlines()
    id_ = re.findall(r"key (\w+) of tenant acme", told)[0]
    content = read_key_file(folder / "keys.json")
    assert content.keys[id_].hash == hashed(key)
    salt = content.tenants["acme"].salt
    assert pie("create", "acme").exit_code == 0
    assert pie("limit", "acme", "--requests-per-minute", "0", "--concurrent", "8").exit_code == 0
    tenant = read_key_file(folder / "keys.json").tenants["acme"]
    assert (tenant.salt, tenant.requests_per_minute, tenant.concurrent) == (salt, None, 8)
    listed = pie("ls").stdout
    assert re.search(rf"{id_} +acme +admin .* - +- +8 +0 +Ann", listed)
    assert key not in listed
    assert pie("revoke", id_).exit_code == 0
    left = read_key_file(folder / "keys.json")
    assert id_ not in left.keys
    assert len(left.keys) == 1


def test_what_is_wrong_is_one_sentence(folder: Path) -> None:
    for arguments, said in (
        (("revoke", "none"), "has no key 'none'"),
        (("limit", "nobody"), "has no tenant 'nobody'"),
        (("create", "a b"), "that cannot be: "),
        (("create", "acme", "--priority", "9999999"), "that cannot be: "),
    ):
        done = pie(*arguments)
        assert done.exit_code == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (folder / "keys.json").exists()
    (folder / "pie.toml").write_text("")
    assert "router.keys_file is not set" in pie("ls").stderr
