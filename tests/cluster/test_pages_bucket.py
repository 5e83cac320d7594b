"""`pie pages` over a bucket of a real S3 server: lists, finds what is bad, carries pages, removes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pie.cluster.cli import app
from pie.cluster.config import load_config
from pie.cluster.secret import FILE_NAME, kept_secret, secret_file
from pie.page.format import page_name
from pie.page.header import PageHeader
from pie.pool.conformance import put, sample_page
from pie.pool.object import ObjectTier
from pie.pool.sealing import Sealing
from pie.pool.settings import Compression, PoolSettings
from pie.pool.tier import id_of
from tests.pool.object_places import LARGE, SMALL, flip, objects, open_tier, pages_of, store_of

KEY = "11" * 32
Pie = Callable[..., Result]


class Bucket:
    """A bucket that nodes of a cluster have written to."""

    def __init__(self, top: Path, settings: PoolSettings) -> None:
        self.settings = settings
        self.secret = kept_secret(top / "pages" / FILE_NAME)
        self.address = f"s3://{settings.object_bucket}/{settings.object_prefix}"
        (top / "pie.toml").write_text(
            f'[pool]\ndisk_folders = ["{top}/pages"]\ndisk_budget = "32MiB"\n'
            f'object_endpoint_url = "{settings.object_endpoint_url}"\n'
            f'object_bucket = "{settings.object_bucket}"\nobject_budget = "64MiB"\n'
            f'[model]\ndisk_kv_path = "{top}/kv"\n'
        )

    def tier(self, *keys: str, compression: Compression = Compression.NONE) -> ObjectTier:
        sealing = Sealing(
            self.secret, compression=compression, keys=[bytes.fromhex(key) for key in keys]
        )
        return open_tier(self.settings, sealing=sealing)

    def fill(self, first: int, *keys: str, count: int = 2) -> list[PageHeader]:
        """Store as many small pages, which share a pack, and large ones."""
        tier = self.tier(*keys, compression=Compression.LZ4)
        made = [
            sample_page(first + at, size, parent=first + at, secret=self.secret)
            for at, size in enumerate([SMALL] * count + [LARGE] * count)
        ]
        assert all(put(tier, *page) for page in made)
        tier.close()
        return [header for header, _ in made]


@pytest.fixture
def bucket(tmp_path: Path, s3_settings: PoolSettings) -> Bucket:
    return Bucket(tmp_path, s3_settings)


@pytest.fixture
def pie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pie:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **variables: str) -> Result:
        environment = {f"PIE_{name}": value for name, value in variables.items()}
        return CliRunner().invoke(app, ["pages", *map(str, arguments)], env=environment)

    return run


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ls_and_show_tell_what_lies_in_packs_and_in_objects_of_their_own(
    bucket: Bucket, pie: Pie
) -> None:
    headers = bucket.fill(0)
    told = {str(line["key"]): line for line in lines(pie("ls", "--at", bucket.address, "--json"))}
    assert told.keys() == {header.key.hex() for header in headers}
    assert {line["source"] for line in told.values()} == {bucket.address}
    assert str(told[headers[0].key.hex()]["where"]).startswith("packs/")
    large = headers[-1]
    assert told[large.key.hex()]["where"] == page_name(large.model_root, large.key, large.part)
    shown = pie("show", headers[0].key.hex()[:16], "--at", bucket.address)
    assert shown.exit_code == 0, shown.stderr
    assert "problem     none" in shown.stdout


def test_pages_that_no_list_tells_of_yet_are_found_by_their_own_headers(
    bucket: Bucket, pie: Pie
) -> None:
    headers = bucket.fill(0)
    store_of(bucket.settings).remove([n for n in objects(bucket.settings) if "lists/" in n])
    told = lines(pie("ls", "--at", bucket.address, "--json"))
    assert {line["key"] for line in told} == {header.key.hex() for header in headers}


def test_verify_tells_every_bad_page_packed_and_encrypted_ones_too(
    bucket: Bucket, pie: Pie
) -> None:
    plain, locked = bucket.fill(0), bucket.fill(10, KEY)
    assert pie("verify", "--at", bucket.address, CLUSTER__ENCRYPTION_KEYS=KEY).exit_code == 0
    without_key = pie("verify", "--at", bucket.address)
    assert without_key.exit_code == 1
    assert "4 pages are good, 4 are not: 4 locked" in without_key.stdout
    tier = bucket.tier(KEY)
    bad = [plain[0], plain[2], locked[0], locked[2]]
    for header in bad:
        flip(tier, id_of(header))
    store = store_of(bucket.settings)
    name = page_name(plain[3].model_root, plain[3].key, plain[3].part)
    data = store.get(name)
    assert data is not None
    store.remove([name])
    store.put(name, data[: len(data) // 2])
    tier.close()
    seen = pie("verify", "--at", bucket.address, "--json", CLUSTER__ENCRYPTION_KEYS=KEY)
    assert seen.exit_code == 1
    *told, sums = lines(seen)
    assert {line["key"] for line in told if line["key"]} >= {header.key.hex() for header in bad}
    assert sums["good"] == 3
    assert len(told) == 5


def test_verify_tells_a_pack_whose_list_is_damaged(bucket: Bucket, pie: Pie) -> None:
    bucket.fill(0)
    (pack,) = [name for name in objects(bucket.settings) if name.startswith("packs/")]
    store = store_of(bucket.settings)
    data = store.get(pack)
    assert data is not None
    store.remove([pack])
    store.put(pack, data[:-40] + bytes(40))
    seen = pie("verify", "--at", bucket.address)
    assert seen.exit_code == 1
    assert f"{bucket.address}/{pack}: bad_list" in seen.stdout


def test_pages_go_from_a_bucket_to_a_file_and_into_another_bucket(
    bucket: Bucket, pie: Pie, s3_settings: PoolSettings
) -> None:
    headers = bucket.fill(0)
    out = pie("export", "pages.tar", "--at", bucket.address)
    assert out.exit_code == 0, out.stderr
    assert "4 pages were copied" in out.stdout
    other = bucket.settings.model_copy(
        update={"object_prefix": f"{bucket.settings.object_prefix}-other"}
    )
    address = f"s3://{other.object_bucket}/{other.object_prefix}"
    into = pie("import", "pages.tar", "--into", address)
    assert into.exit_code == 0, into.stderr
    assert f"4 pages were stored in {address}, 0 were there already" in into.stdout
    assert "0 pages were stored" in pie("import", bucket.address, "--into", address).stdout
    tier = open_tier(other, sealing=Sealing(bucket.secret))
    assert pages_of(tier) == {id_of(header) for header in headers}
    tier.close()


def test_rm_removes_an_object_or_writes_its_pack_anew(bucket: Bucket, pie: Pie) -> None:
    headers = bucket.fill(0)
    gone, kept = [headers[0], headers[2]], [headers[1], headers[3]]
    keys = [header.key.hex() for header in gone]
    done = pie("rm", *keys, "--yes", "--at", bucket.address)
    assert done.exit_code == 0, done.stderr
    assert "2 removed" in done.stdout
    assert pie("verify", "--at", bucket.address).stdout.startswith("2 pages are good")
    tier = bucket.tier()
    assert pages_of(tier) == {id_of(header) for header in kept}
    tier.close()
    assert pie("rm", kept[0].key.hex(), "--yes", "--at", bucket.address).exit_code == 0
    assert not [name for name in objects(bucket.settings) if name.startswith("packs/")]


def test_a_prefix_that_was_forgotten_is_named(bucket: Bucket, pie: Pie) -> None:
    bucket.fill(0)
    whole = bucket.settings.object_prefix
    above = bucket.address.removesuffix(f"/{whole}") + "".join(
        f"/{step}" for step in whole.split("/")[:-1]
    )
    result = pie("ls", "--at", above)
    assert result.exit_code == 2
    assert f"further down: name {above}/" in result.stderr


def test_an_export_to_a_bucket_is_refused_and_says_what_to_use(bucket: Bucket, pie: Pie) -> None:
    result = pie("export", bucket.address)
    assert result.exit_code == 2
    assert f"use `pie pages import SOURCE --into {bucket.address}`" in result.stderr
    assert not Path("s3:").exists()


def test_what_is_imported_before_the_first_start_has_the_secret_of_that_start(
    bucket: Bucket, pie: Pie, tmp_path: Path
) -> None:
    """Into the bucket of a cluster that never ran, with the secret of the one that they come from."""
    headers = bucket.fill(0)
    assert pie("export", "out.tar", "--at", bucket.address).exit_code == 0
    theirs = (tmp_path / "pages" / FILE_NAME).rename(tmp_path / "their.secret")
    mine = bucket.settings.model_copy(
        update={"object_prefix": f"{bucket.settings.object_prefix}-new"}
    )
    address = f"s3://{mine.object_bucket}/{mine.object_prefix}"
    into = pie("import", "out.tar", "--into", address, "--secret", theirs)
    assert into.exit_code == 0, into.stderr
    config = load_config(tmp_path / "pie.toml", {}).config
    file = secret_file(config)
    assert file is not None
    secret = kept_secret(file)
    assert secret != bucket.secret
    tier = open_tier(mine, sealing=Sealing(secret))
    assert pages_of(tier) == {id_of(header) for header in headers}
    tier.close()


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("s3://no-such-bucket/x", "the bucket no-such-bucket at http://127.0.0.1"),
        ("s3:///x", "names no bucket"),
        ("s3://UPPER/x", "is no bucket"),
    ],
)
def test_a_bucket_that_cannot_be_read_is_one_sentence(pie: Pie, where: str, said: str) -> None:
    result = pie("ls", "--at", where)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert said in line
