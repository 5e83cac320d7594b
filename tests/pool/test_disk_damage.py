"""Damage on disk is a counted miss and never a wrong page."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pie.page.events import Part
from pie.page.format import HEAD_BYTES, encode_page, page_name
from pie.page.key import RootKey
from pie.page.lookup import LookupStatus
from pie.pool.at_rest import FolderSource, TarSource
from pie.pool.conformance import put, read, sample_page
from pie.pool.disk import DiskTier
from pie.pool.sealing import Sealing
from pie.pool.tier import BadPages, id_of
from tests.pool.disk_places import (
    LARGE,
    SMALL,
    disk_usage,
    files_below,
    fill,
    flip,
    pages_of,
    where,
)

Open = Callable[..., DiskTier]
HEADER, PAYLOAD = sample_page(1, LARGE)
PAGE = id_of(HEADER)


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers on one folder, one after another; checks and closes them."""
    tiers: list[DiskTier] = []

    def open_one(**options: object) -> DiskTier:
        if tiers:
            tiers[-1].close()
        tiers.append(DiskTier([tmp_path], 16 << 20, **options))  # type: ignore[arg-type]
        tiers[-1].open()
        return tiers[-1]

    yield open_one
    tiers[-1].check()
    tiers[-1].close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_bit_that_is_flipped_anywhere_makes_no_wrong_page(
    open_tier: Open, size: int, is_restarted: bool
) -> None:
    chance = random.Random(size)
    header, payload = sample_page(1, size)
    tier = open_tier()
    for turn in range(60):
        if tier.lookup(id_of(header)) is LookupStatus.MISS:
            assert put(tier, header, payload)
        path, start, end = where(tier, id_of(header))
        # Every second time in the two or three thousand bytes that are not payload.
        at = chance.randrange(start, end) if turn % 2 else chance.randrange(start, start + 1400)
        flip(path, at)
        if is_restarted:
            tier = open_tier()
        # A byte of padding is nobody's: what comes has to be right.
        assert read(tier, id_of(header)) in {payload, LookupStatus.MISS}
        tier.check()
        tier.remove(id_of(header))
    assert sum(tier.bad_by_reason.values()) + is_restarted > 0


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_flipped_bit_in_a_packs_list_costs_pages_and_no_wrong_ones(
    open_tier: Open, is_restarted: bool
) -> None:
    chance = random.Random(7)
    tier = open_tier()
    headers = fill(tier, 40, SMALL)
    (listing,) = tier._folders[0].packs.path.glob("*.list")
    for _ in range(3):
        flip(listing, chance.randrange(listing.stat().st_size))
    if is_restarted:
        tier = open_tier()
        assert tier.bad_by_reason == {"torn_pack": 1}
    got = [read(tier, id_of(header)) for header in headers]
    assert sum(isinstance(one, bytes) for one in got) >= 37
    for number, one in enumerate(got):
        assert one in {sample_page(number, SMALL)[1], LookupStatus.MISS}


@pytest.mark.parametrize("left", [0, 3, 700, HEAD_BYTES, LARGE, LARGE + 2000])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_file_that_was_cut_off_is_a_miss(open_tier: Open, left: int, is_restarted: bool) -> None:
    tier = open_tier()
    before = tier.used_bytes
    put(tier, HEADER, PAYLOAD)
    path, _, end = where(tier, PAGE)
    assert left < end
    with path.open("r+b") as file:
        file.truncate(left)
    if is_restarted:
        tier = open_tier()
    assert read(tier, PAGE) is LookupStatus.MISS
    assert sum(tier.bad_by_reason.values()) == 1
    assert set(tier.bad_by_reason) <= {"truncated", "not_a_page", "header"}
    assert not path.exists()
    assert tier.used_bytes == before


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_pack_that_was_cut_off_loses_the_pages_behind_the_cut(
    open_tier: Open, is_restarted: bool
) -> None:
    tier = open_tier()
    headers = fill(tier, 20, SMALL)
    path, start, _ = where(tier, id_of(headers[12]))
    with path.open("r+b") as file:
        file.truncate(start + 100)
    if is_restarted:
        tier = open_tier()
        assert pages_of(tier) == {id_of(header) for header in headers[:12]}
    got = [isinstance(read(tier, id_of(header)), bytes) for header in headers]
    assert got == [True] * 12 + [False] * 8
    # And a page stored now is there after the next start.
    fill(tier, 1, SMALL, first=100)
    assert len(pages_of(open_tier())) == 13


@pytest.mark.parametrize("is_restarted", [False, True])
def test_another_page_under_this_ones_name_is_a_miss(open_tier: Open, is_restarted: bool) -> None:
    tier = open_tier()
    put(tier, HEADER, PAYLOAD)
    other, payload = sample_page(2, LARGE)
    where(tier, PAGE)[0].write_bytes(encode_page(other, payload))
    if is_restarted:
        tier = open_tier()
    assert read(tier, PAGE) is LookupStatus.MISS
    assert tier.bad_by_reason == {"wrong_page": 1}
    assert read(tier, id_of(other)) is LookupStatus.MISS


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("what", ["model", "part", "version", "secret"])
def test_a_page_of_another_kind_under_this_ones_name_is_a_miss(
    open_tier: Open, what: str, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, HEADER, PAYLOAD)
    path = where(tier, PAGE)[0]
    secret = None
    header = HEADER
    reason = "wrong_page"
    match what:
        case "model":
            header = _changed(model_root=RootKey(b"m" * 32))
        case "part":
            header = _changed(part=Part.STATE)
        case "version":
            header, reason = _changed(version=2), "version"
        case _:
            secret, reason = b"s" * 32, "foreign"
            header = sample_page(1, LARGE, secret=secret)[0]
    path.write_bytes(encode_page(header, PAYLOAD, secret=secret))
    if is_restarted:
        tier = open_tier()
    assert read(tier, PAGE) is LookupStatus.MISS
    assert tier.bad_by_reason == {reason: 1}
    assert not path.exists()


def _changed(**fields: object):  # type: ignore[no-untyped-def]
    values = {name: getattr(HEADER, name) for name in HEADER.__struct_fields__}
    return type(HEADER)(**{**values, **fields})


def test_pages_written_with_a_secret_are_read_with_it_and_with_no_other(open_tier: Open) -> None:
    secret = b"s" * 32
    pages = [sample_page(number, size, secret=secret) for number, size in enumerate([SMALL, LARGE])]
    tier = open_tier(sealing=Sealing(secret))
    assert all(put(tier, *page) for page in pages)
    tier = open_tier(sealing=Sealing(secret))
    assert all(read(tier, id_of(header)) == payload for header, payload in pages)
    tier = open_tier(sealing=Sealing(b"t" * 32))
    assert pages_of(tier) == set()
    assert sum(tier.bad_by_reason.values()) == 2


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_bad_pages_are_set_aside_where_that_is_wanted(
    open_tier: Open, tmp_path: Path, size: int
) -> None:
    tier = open_tier(keep_bad_pages=True)
    for number in range(40):
        header, payload = sample_page(number, size)
        put(tier, header, payload)
        path, start, _ = where(tier, id_of(header))
        flip(path, start + 2000)
        assert read(tier, id_of(header)) is LookupStatus.MISS
    kept = list((tmp_path / "bad").iterdir())
    assert len(kept) == 32, "the latest"
    assert all(".checksum." in path.name for path in kept)
    assert kept[0].stat().st_size > size
    assert tier.bad_pages == BadPages(at_store=0, at_load=40)
    assert disk_usage(tmp_path) <= tier.used_bytes
    tier = open_tier(keep_bad_pages=True)
    assert pages_of(tier) == set()
    assert disk_usage(tmp_path) <= tier.used_bytes


def test_a_file_that_somebody_removed_is_a_miss(open_tier: Open) -> None:
    tier = open_tier()
    before = tier.used_bytes
    put(tier, HEADER, PAYLOAD)
    where(tier, PAGE)[0].unlink()
    assert read(tier, PAGE) is LookupStatus.MISS
    assert tier.bad_by_reason == {"missing": 1}
    assert tier.bad_pages == BadPages(0, 0)
    assert tier.used_bytes == before
    assert put(tier, HEADER, PAYLOAD)


def test_what_is_not_ours_is_left_alone(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier, HEADER, PAYLOAD)
    theirs = [
        tmp_path / "README",
        tmp_path / "packs" / "notes",
        where(tier, PAGE)[0].parent / "notes",
        tmp_path / ("f" * 64) / "ff" / "notes",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    tier = open_tier()
    assert pages_of(tier) == {PAGE}
    assert tier.remove(PAGE)
    assert all(path.read_text() == "mine" for path in theirs)


def test_orphans_of_a_process_that_ended_are_swept(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    before = tier.used_bytes
    tier.close()
    name = page_name(HEADER.model_root, HEADER.key, HEADER.part)
    orphans = [
        tmp_path / "tmp" / "7",
        tmp_path / "packs" / "0000000009.pack",
        tmp_path / "packs" / "0000000008.list",
    ]
    for path in orphans:
        path.write_bytes(b"x" * 10_000)
    (tmp_path / name).parent.mkdir(parents=True)
    tier = open_tier()
    assert files_below(tmp_path) == []
    assert not (tmp_path / name).parent.exists()
    assert tier.used_bytes == before


@pytest.mark.parametrize("number", ["0000000000", "9999999999", "99999999999"])
@pytest.mark.parametrize("kind", ["pack", "list"])
def test_a_stray_file_among_packs_hides_no_page_and_is_counted(
    open_tier: Open, tmp_path: Path, number: str, kind: str
) -> None:
    open_tier()
    stray = tmp_path / "packs" / f"{number}.{kind}"
    stray.write_bytes(bytes(100_000))
    for turn in range(3):
        tier = open_tier()
        fill(tier, 40, SMALL, first=40 * turn)
        assert len(pages_of(tier)) == 40 * (turn + 1)
        assert tier.used_bytes >= disk_usage(tmp_path)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("list", Path.mkdir),
        ("list", os.mkfifo),
        ("list", lambda path: path.symlink_to(path)),
        ("pack", os.mkfifo),
    ],
)
def test_what_is_no_file_in_place_of_a_pack_costs_that_pack_alone(
    tmp_path: Path, kind: str, make: Callable[[Path], object]
) -> None:
    def opened() -> DiskTier:
        tier = DiskTier([tmp_path], 1 << 20)  # Of which a pack takes a sixteenth.
        tier.open()
        return tier

    tier = opened()
    fill(tier, 40, SMALL)
    assert len(pages_of(tier)) == 40
    tier.close()
    path = tmp_path / "packs" / f"0000000002.{kind}"
    path.unlink()
    make(path)
    tier = opened()
    left = len(pages_of(tier))
    assert 20 < left < 35
    assert tier.used_bytes >= disk_usage(tmp_path)
    fill(tier, 40, SMALL, first=40)
    tier.close()
    tier = opened()
    assert len(pages_of(tier)) == left + 40
    assert tier.folder_states()["ok"] == 1
    tier.check()
    tier.close()
    listed = list(FolderSource(tmp_path, Sealing()).pages())
    assert sum(page.header is not None for page in listed) >= 40


@pytest.mark.parametrize(
    ("make", "is_restarted"),
    [
        (os.mkfifo, False),
        (Path.mkdir, False),
        (lambda path: path.symlink_to(path), False),
        (os.mkfifo, True),
        (lambda path: path.symlink_to(path), True),
        (Path.mkdir, True),
    ],
)
def test_what_is_no_file_in_place_of_a_page_is_a_bad_page(
    open_tier: Open, tmp_path: Path, make: Callable[[Path], object], is_restarted: bool
) -> None:
    tier = open_tier()
    assert put(tier, HEADER, PAYLOAD)
    path = where(tier, PAGE)[0]
    path.unlink()
    make(path)
    listed = list(FolderSource(tmp_path, Sealing()).pages())
    assert [page.header for page in listed] == [None]
    if is_restarted:
        tier = open_tier()
    assert read(tier, PAGE) is LookupStatus.MISS
    assert tier.bad_by_reason["not_a_page"] == 1
    put(tier, HEADER, PAYLOAD)  # Where a folder is, that may be in vain.
    assert put(tier, *sample_page(2, LARGE))
    assert tier.folder_states()["ok"] == 1


def test_a_pipe_with_the_name_of_a_tar_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pages.tar")
    with pytest.raises(OSError, match="not a regular file"):
        TarSource(tmp_path / "pages.tar", Sealing())
