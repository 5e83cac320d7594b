"""`pie pages` shows what is at rest, finds what is bad, and carries pages from one place to another."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner, Result

from pie.cluster.cli import app
from pie.cluster.secret import FILE_NAME, kept_secret
from pie.index.contract import PlaceRecord
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.names import PlaceKeys
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId, PlaceKind, Tier
from pie.page.format import decode_page
from pie.page.header import PageHeader
from pie.pool.client import PoolClient
from pie.pool.conformance import put, sample_page
from pie.pool.disk import DiskTier
from pie.pool.node import PoolNode
from pie.pool.sealing import Sealing
from pie.pool.settings import Compression, PoolSettings
from pie.pool.tier import entry_of, id_of
from pie.wire.messages import PutStatus
from tests.pool.disk_places import LARGE, SMALL, flip, pages_of
from tests.pool.places import SamplePages, until

KEY, OTHER = "11" * 32, "22" * 32
Pie = Callable[..., Result]


class Cluster:
    """The folders that a stopped cluster left, with pages of two nodes and a worker."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.secret = kept_secret(top / "pages" / FILE_NAME)
        self.pages: dict[str, list[PageHeader]] = {}
        (top / "pie.toml").write_text(
            f'[pool]\ndisk_folders = ["{top}/pages"]\ndisk_budget = "32MiB"\n'
            f'[model]\ndisk_kv_path = "{top}/kv"\n'
        )

    def tier(self, place: str, *keys: str, compression: Compression = Compression.NONE) -> DiskTier:
        folder = self.top / ("kv" if place.startswith("worker") else "pages") / place
        sealing = Sealing(
            self.secret, compression=compression, keys=[bytes.fromhex(key) for key in keys]
        )
        tier = DiskTier([folder], 32 << 20, sealing=sealing)
        tier.open()
        return tier

    def fill(self, place: str, first: int, *keys: str) -> list[PageHeader]:
        tier = self.tier(place, *keys)
        made = [
            sample_page(number, size, parent=number, secret=self.secret)
            for number, size in enumerate([SMALL, SMALL, LARGE], start=first)
        ]
        assert all(put(tier, *page) for page in made)
        tier.close()
        self.pages[place] = [header for header, _ in made]
        return self.pages[place]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
def pie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pie:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **variables: str) -> Result:
        environment = {f"PIE_{name}": value for name, value in variables.items()}
        return CliRunner().invoke(app, ["pages", *map(str, arguments)], env=environment)

    return run


def objects(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ls_tells_what_lies_where_in_all_places(cluster: Cluster, pie: Pie) -> None:
    headers = [
        *cluster.fill("pool-0", 0),
        *cluster.fill("pool-1", 10),
        *cluster.fill("worker-0", 20),
    ]
    result = pie("ls")
    assert result.exit_code == 0
    assert all(header.key.hex()[:16] in result.stdout for header in headers)
    assert "9 pages;" in result.stdout.splitlines()[-1]
    told = {line["key"]: line for line in objects(pie("ls", "--json"))}
    header = cluster.pages["pool-1"][2]
    line = told[header.key.hex()]
    assert line["tokens"] == (header.index + 1) * 16
    assert line["raw_bytes"] == LARGE
    assert str(line["source"]).endswith("pages/pool-1")
    assert line["problem"] == ""


def test_ls_of_one_place_a_folder_or_the_beginning_of_a_key(cluster: Cluster, pie: Pie) -> None:
    cluster.fill("pool-0", 0)
    (header, *_) = cluster.fill("pool-1", 10)
    assert len(objects(pie("ls", "--at", "pool-1", "--json"))) == 3
    assert len(objects(pie("ls", "--at", "pages/pool-1", "--json"))) == 3
    assert len(objects(pie("ls", "--at", "pages", "--json"))) == 6
    (line,) = objects(pie("ls", header.key.hex()[:12].upper(), "--json"))
    assert line["key"] == header.key.hex()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "ffffffff"], "no page's key begins with ffffffff"),
        (["show", "xyz1"], "'xyz1' is no key"),
        (["show", "ab"], "'ab' is no key"),
        (["ls", "--at", "pool-7"], "there are: pool-0"),
        (["ls", "--secret", "nowhere"], "nowhere cannot be read"),
        (["rm"], "name keys"),
        (["rm", "abcd", "--locked"], "name keys"),
        (["import", "pages/pool-0", "--into", "pages"], "name one of"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    cluster: Cluster, pie: Pie, arguments: list[str], said: str
) -> None:
    cluster.fill("pool-0", 0)
    if "pages" in arguments:
        cluster.fill("pool-1", 10)
    result = pie(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert said in line


def test_a_beginning_of_several_keys_is_refused(cluster: Cluster, pie: Pie) -> None:
    tier = cluster.tier("pool-0")
    pages = [sample_page(number, 10, secret=cluster.secret) for number in range(2_000)]
    assert all(put(tier, *page) for page in pages)
    tier.close()
    keys = sorted(header.key.hex() for header, _ in pages)
    twins = [one[:4] for one, other in itertools.pairwise(keys) if one[:4] == other[:4]]
    result = pie("show", twins[0])
    assert result.exit_code == 2
    assert f"begin with {twins[0]}, such as {twins[0]}" in result.stderr


def test_show_tells_all_copies_and_checks_them(cluster: Cluster, pie: Pie) -> None:
    (header, *_) = cluster.fill("pool-0", 0)
    cluster.fill("worker-0", 0)
    result = pie("show", header.key.hex()[:10])
    assert result.exit_code == 0
    assert re.findall(r"^parent +(\w+)$", result.stdout, re.MULTILINE) == [header.parent.hex()] * 2
    assert "no index" in result.stdout
    (told,) = objects(pie("show", header.key.hex()[:10], "--json"))
    assert isinstance(told["copies"], list)
    assert [copy["codec"] for copy in told["copies"]] == ["none", "none"]


@pytest.mark.live
async def test_show_says_who_holds_a_page_in_a_running_cluster(
    cluster: Cluster, pie: Pie, redis_url: str, index_settings: IndexSettings
) -> None:
    (header, *_) = cluster.fill("pool-0", 0)
    record = PlaceRecord(PlaceId("worker-3"), Epoch(1), PlaceKind.WORKER, "tcp://127.0.0.1:1")
    held = [entry_of(header, Tier.DEVICE), entry_of(header, Tier.DISK)]
    publisher = Publisher(redis_url, record, lambda: held, settings=index_settings)
    await publisher.start()
    assert await publisher.flushed(10.0)
    index = {"INDEX__URL": redis_url, "INDEX__KEY_PREFIX": index_settings.key_prefix}
    result = await asyncio.to_thread(pie, "show", header.key.hex(), **index)
    (told,) = objects(await asyncio.to_thread(pie, "show", header.key.hex(), "--json", **index))
    await publisher.close()
    assert "worker-3    holds full in device and disk" in result.stdout
    assert told["holders"] == [{"place": "worker-3", "parts": {"full": ["device", "disk"]}}]


@pytest.mark.parametrize("number", [0, 2])
def test_verify_tells_a_bad_page_and_its_reason(cluster: Cluster, pie: Pie, number: int) -> None:
    headers = cluster.fill("pool-0", 0)
    good = pie("verify")
    assert good.exit_code == 0
    assert good.stdout == "3 pages are good\n"
    (before,) = objects(pie("ls", headers[number].key.hex(), "--json"))
    path, _, offset = str(before["where"]).partition("@")
    flip(cluster.top / "pages/pool-0" / path, int(offset or 0) + 3_000)
    bad = pie("verify")
    assert bad.exit_code == 1
    first, last = bad.stdout.splitlines()
    assert re.search(rf"{path}.*: checksum: ", first)
    assert last == "2 pages are good, 1 are not: 1 checksum"
    assert pie("verify").exit_code == 1, "nothing was removed"
    assert objects(pie("verify", "--json"))[-1] == {"good": 2, "bad": {"checksum": 1}}


def test_verify_tells_damaged_headers_lists_and_names(cluster: Cluster, pie: Pie) -> None:
    headers = cluster.fill("pool-0", 0)
    folder = cluster.top / "pages/pool-0"
    (line,) = objects(pie("ls", headers[2].key.hex(), "--json"))
    path = folder / str(line["where"])
    path.rename(path.with_name(path.name.replace(headers[2].key.hex()[2:], "0" * 62)))
    (listing,) = folder.glob("packs/*.list")
    flip(listing, 100)
    result = pie("verify")
    assert result.exit_code == 1
    assert "wrong_page" in result.stdout
    assert "records are damaged" in result.stdout


def test_encrypted_pages_are_listed_without_the_key_and_not_verified(
    cluster: Cluster, pie: Pie
) -> None:
    cluster.fill("pool-0", 0, KEY)
    assert "encrypted with" in pie("ls").stdout
    assert pie("verify", CLUSTER__ENCRYPTION_KEYS=KEY).exit_code == 0
    locked = pie("verify")
    assert locked.exit_code == 1
    assert "3 locked" in locked.stdout


@pytest.mark.parametrize("name", ["out.tar", "out"])
def test_pages_come_through_a_folder_or_a_tar_file(cluster: Cluster, pie: Pie, name: str) -> None:
    headers = cluster.fill("pool-0", 0)
    result = pie("export", name)
    assert result.exit_code == 0, result.stderr
    assert "3 pages were copied" in result.stdout
    assert pie("verify", "--at", name).stdout == "3 pages are good\n"
    cluster.fill("pool-1", 2)
    result = pie("import", name, "--into", "pool-1")
    assert result.exit_code == 0, result.stderr
    assert "2 pages were stored in pool-1, 1 were there already" in result.stdout
    tier = cluster.tier("pool-1")
    assert {id_of(header) for header in headers} <= pages_of(tier)
    tier.check()
    tier.close()


def test_exported_pages_are_page_files(cluster: Cluster, pie: Pie) -> None:
    headers = cluster.fill("pool-0", 0)
    pie("export", "out.tar", headers[0].key.hex())
    with tarfile.open(cluster.top / "out.tar") as tar:
        (member,) = tar.getmembers()
        file = tar.extractfile(member)
        assert file is not None
        assert decode_page(file.read(), secret=cluster.secret)[0] == headers[0]


def test_what_is_imported_is_sealed_as_the_place_seals(
    cluster: Cluster, pie: Pie, tmp_path: Path
) -> None:
    """Into another cluster: another secret, and encrypted."""
    cluster.fill("pool-0", 0)
    pie("export", "out.tar")
    other = Cluster(tmp_path / "other")
    other.fill("pool-0", 10)
    result = pie(
        "import",
        "out.tar",
        "--into",
        "pool-0",
        "--secret",
        "pages/cluster.secret",
        "--config",
        "other/pie.toml",
        CLUSTER__ENCRYPTION_KEYS=KEY,
    )
    assert result.exit_code == 0, result.stderr
    tier = other.tier("pool-0", KEY)
    assert len(pages_of(tier)) == 6
    tier.close()
    tier = other.tier("pool-0")
    assert len(pages_of(tier)) == 3, "those that came are encrypted"
    tier.close()


def test_what_is_imported_before_the_first_start_has_the_secret_of_that_start(
    cluster: Cluster, pie: Pie, tmp_path: Path
) -> None:
    headers = cluster.fill("pool-0", 0)
    pie("export", "out.tar")
    theirs = (tmp_path / "pages" / FILE_NAME).rename(tmp_path / "their.secret")
    (tmp_path / "new.toml").write_text(
        f'[pool]\ndisk_folders = ["{tmp_path}/new"]\ndisk_budget = "32MiB"\n'
    )
    new = ["--config", "new.toml"]
    into = pie("import", "out.tar", "--into", "new/pool-0", "--secret", theirs, *new)
    assert into.exit_code == 0, into.stderr
    assert pie("verify", *new).stdout == "3 pages are good\n"
    secret = kept_secret(tmp_path / "new" / FILE_NAME)
    assert secret != cluster.secret
    tier = DiskTier([tmp_path / "new/pool-0"], 32 << 20, sealing=Sealing(secret))
    tier.open()
    assert pages_of(tier) == {id_of(header) for header in headers}
    tier.close()


def test_pages_that_no_cluster_could_read_are_not_made(cluster: Cluster, pie: Pie) -> None:
    cluster.fill("pool-0", 0)
    pie("export", "out.tar")
    secret = (cluster.top / "pages" / FILE_NAME).rename(cluster.top / "their.secret")
    Path("ram.toml").write_text("")
    result = pie("import", "out.tar", "--into", "x/y", "--secret", secret, "--config", "ram.toml")
    assert result.exit_code == 2
    assert "start the cluster once, or name its cluster.secret_file" in result.stderr
    assert not Path("x").exists()


def test_a_cluster_with_a_secret_calls_pages_without_it_foreign_and_says_what_to_give(
    cluster: Cluster, pie: Pie
) -> None:
    tier = DiskTier([cluster.top / "pages/pool-0"], 32 << 20, sealing=Sealing())
    tier.open()
    pages = [sample_page(number, LARGE) for number in range(3)]
    assert all(put(tier, *page) for page in pages)
    tier.close()
    seen = pie("verify")
    assert seen.exit_code == 1
    assert "0 pages are good, 3 are not: 3 foreign\n" in seen.stdout
    assert "give --secret FILE" in seen.stdout
    assert "give --secret FILE" in pie("ls").stdout
    shown = pie("show", pages[0][0].key.hex()[:8])
    assert shown.exit_code == 2
    assert "were written with another secret: give --secret FILE" in shown.stderr
    left = pie("import", "pages/pool-0", "--into", "pages/pool-9").stderr.splitlines()
    assert len(left) == 2
    assert "pie: 3, such as " in left[0]
    assert "give --secret FILE" in left[1]


def test_a_bad_page_is_left_out_of_an_export_and_an_import(cluster: Cluster, pie: Pie) -> None:
    headers = cluster.fill("pool-0", 0)
    pie("export", "out")
    (path,) = (cluster.top / "out").rglob(f"{headers[0].key.hex()}.*")
    flip(path, 3_000)
    exported = pie("export", "again", "--at", "out")
    assert exported.exit_code == 1
    assert "2 pages were copied" in exported.stdout
    imported = pie("import", "out", "--into", "pages/pool-9")
    assert imported.exit_code == 1
    assert "left out: checksum" in imported.stderr
    assert "2 pages were stored" in imported.stdout


def test_a_place_that_has_no_room_says_how_far_it_came(cluster: Cluster, pie: Pie) -> None:
    tier = cluster.tier("pool-0")
    pages = [sample_page(number, LARGE, secret=cluster.secret) for number in range(30)]
    assert all(put(tier, *page) for page in pages)
    tier.close()
    cluster.fill("pool-1", 50)
    pie("export", "out.tar", "--at", "pool-0")
    result = pie("import", "out.tar", "--into", "pool-1", POOL__DISK_BUDGET="2MiB")
    assert result.exit_code == 2
    assert "has no room left after" in result.stderr


@pytest.mark.parametrize("number", [0, 2])
def test_rm_removes_a_page_for_good(cluster: Cluster, pie: Pie, number: int) -> None:
    headers = cluster.fill("pool-0", 0)
    refused = CliRunner().invoke(app, ["pages", "rm", headers[number].key.hex()], input="n\n")
    assert refused.exit_code == 1
    assert "Remove 1 page (" in refused.stdout
    assert len(objects(pie("ls", "--json"))) == 3
    assert pie("rm", headers[number].key.hex()[:12], "--yes").stdout.endswith("1 removed\n")
    tier = cluster.tier("pool-0")
    assert pages_of(tier) == {id_of(header) for header in headers if header != headers[number]}
    assert not tier.bad_by_reason
    tier.check()
    tier.close()


def test_rm_of_locked_pages_takes_those_alone(cluster: Cluster, pie: Pie) -> None:
    tier = cluster.tier("pool-0", OTHER)
    assert put(tier, *sample_page(7, LARGE, secret=cluster.secret))
    tier.close()
    mine = cluster.fill("pool-0", 0, KEY)
    result = pie("rm", "--locked", "--yes", CLUSTER__ENCRYPTION_KEYS=KEY)
    assert result.stdout.endswith("1 removed\n")
    tier = cluster.tier("pool-0", KEY, OTHER)
    assert pages_of(tier) == {id_of(header) for header in mine}
    tier.close()


async def test_rm_running_tells_the_nodes_of_a_running_cluster(
    pie: Pie, cluster: Cluster, index_settings: IndexSettings
) -> None:
    settings = PoolSettings.model_validate(
        {"ram_budget": "4MiB", "disk_budget": "4MiB", "disk_folders": [cluster.top / "pages"]}
    )
    node = PoolNode(
        PlaceId("pool-0"),
        settings,
        index_url=index_settings.url,
        epoch=Epoch(1),
        secret=cluster.secret,
        index_settings=index_settings,
    )
    await node.start()
    index = {
        "INDEX__URL": index_settings.url,
        "INDEX__KEY_PREFIX": index_settings.key_prefix,
    }
    mirror = Mirror()
    feed = MirrorFeed(index_settings.url, mirror, settings=index_settings, with_pages=False)
    client = PoolClient(mirror, PoolSettings(), secret=cluster.secret)
    pages = SamplePages(2, secret=cluster.secret)

    async def are_stored() -> bool:
        return set(await pages.store(client)) <= {PutStatus.STORED, PutStatus.HELD}

    try:
        await feed.start()
        await until(are_stored)
        keys = [page.key.hex() for page in pages.pages]
        done = await asyncio.to_thread(
            lambda: pie("rm", "--running", "--yes", keys[0], "0" * 64, **index)
        )
        assert done.exit_code == 0, done.stderr
        assert done.stdout.strip() == "1 removed, 1 held by no node"
        assert await pages.hits(client) == [False, True]
        # A node that is not heard of, and has not withdrawn.
        record = PlaceRecord(PlaceId("pool-1"), Epoch(1), PlaceKind.POOL, "tcp://127.0.0.1:1")
        publisher = Publisher(index_settings.url, record, list, settings=index_settings)
        await publisher.start()
        assert await publisher.flushed(10.0)
        with redis.Redis.from_url(index_settings.url) as server:
            server.delete(PlaceKeys(index_settings.key_prefix, record.place).alive)
            silent = await asyncio.to_thread(
                lambda: pie("rm", "--running", "--yes", keys[0], "0" * 64, **index)
            )
        await publisher.close()
        assert silent.exit_code == 1
        assert silent.stdout.strip() == "2 maybe still there: a node did not answer"
        short = await asyncio.to_thread(
            lambda: pie("rm", "--running", "--yes", keys[1][:8], **index)
        )
        assert short.exit_code == 2
        assert "is no whole key" in short.stderr
    finally:
        await client.close()
        await feed.close()
        await node.close()
    gone = await asyncio.to_thread(lambda: pie("rm", "--running", "--yes", keys[1], **index))
    assert gone.exit_code != 0
    assert "no pool node is up" in gone.stderr


def test_a_running_nodes_folder_is_read_and_not_changed(cluster: Cluster, pie: Pie) -> None:
    headers = cluster.fill("pool-0", 0)
    pie("export", "out.tar")
    tier = cluster.tier("pool-0")
    try:
        assert pie("verify").exit_code == 0
        for arguments in (
            ["rm", headers[0].key.hex(), "--yes"],
            ["rm", headers[2].key.hex(), "--yes"],
            ["import", "out.tar", "--into", "pool-0"],
        ):
            result = pie(*arguments)
            assert result.exit_code == 2
            assert "is running: stop it first; nothing was changed" in result.stderr
        assert len(pages_of(tier)) == 3
    finally:
        tier.close()
