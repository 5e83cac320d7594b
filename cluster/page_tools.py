"""What `pie pages` does with pages at rest.

Covers finding pages by a key's beginning, checking, copying out and in, and removing them. Does not cover
where they lie (`pie.cluster.page_places`) or how it is told (`pie.cluster.pages`).
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pie.cluster.config import PieConfig
from pie.cluster.page_places import Opened, PagesError, Place, index_url, sealing_of, store_of
from pie.index.errors import IndexUnavailableError
from pie.index.lookup import DirectLookup
from pie.page.errors import BadPage
from pie.page.events import Part, PartMask, Tier, part_tiers
from pie.page.format import page_name
from pie.page.header import PageHeader, checksum
from pie.page.key import KEY_BYTES, PageKey
from pie.page.lookup import LookupStatus
from pie.pool.at_rest import PageAtRest, Source, may_be_of_another_secret, problem_of
from pie.pool.copying import copy_payload
from pie.pool.disk import DiskTier
from pie.pool.errors import PoolError
from pie.pool.object import ObjectTier
from pie.pool.sealing import Sealing
from pie.pool.settings import Durability, PoolSettings
from pie.pool.tier import Tier as PageTier, id_of

_LEAST_DIGITS = 4
_SHOWN = 5
_SEND_S = 300.0
"""How long the last pages of an import may take into a bucket."""


class Found(NamedTuple):
    """A page and where it was found."""

    at: Opened
    page: PageAtRest


class Holder(msgspec.Struct, frozen=True):
    """Who says in the index that it holds a page."""

    place: str
    parts: dict[str, list[str]]
    """The tiers, by part."""


class Imported(NamedTuple):
    """What an import has done."""

    stored: int
    held: int
    """Were there already."""
    bad: list[tuple[str, str]]
    """Names that were not taken, and why."""


def everything(sources: Iterable[Opened]) -> Iterator[Found]:
    """List all pages of some sources.

    Raises:
        PagesError: One cannot be read.
    """
    for at in sources:
        try:
            for page in at.source.pages():
                yield Found(at, page)
        except OSError as error:
            raise PagesError(
                f"{at.source.name} cannot be read: {error.strerror or error}"
            ) from error


def selected(found: Iterable[Found], beginnings: Sequence[str]) -> list[Found]:
    """Return all copies and parts of the pages whose keys begin so.

    Raises:
        PagesError: A beginning is no key's, or of several keys.
    """
    for digits in beginnings:
        try:
            good = _LEAST_DIGITS <= len(digits) <= 2 * KEY_BYTES
            bytes.fromhex(digits + digits[-1:] * (len(digits) % 2))
        except ValueError:
            good = False
        if not good:
            raise PagesError(
                f"{digits!r} is no key: {_LEAST_DIGITS} to {2 * KEY_BYTES} hexadecimal digits are"
            )
    matches: dict[str, dict[PageKey, list[Found]]] = {digits: {} for digits in beginnings}
    unread = 0
    for one in found:
        header = one.page.header
        if header is None:
            unread += may_be_of_another_secret(one.page.problem)
        else:
            for digits, keys in matches.items():
                if header.key.hex().startswith(digits.lower()):
                    keys.setdefault(header.key, []).append(one)
    for digits, keys in matches.items():
        if not keys:
            raise PagesError(
                f"no page's key begins with {digits}"
                if not unread
                else f"no page that can be read has a key that begins with {digits}; {unread} pages or "
                "lists are damaged, or were written with another secret: give --secret FILE"
            )
        if len(keys) > 1:
            some = ", ".join(key.hex() for key in list(keys)[:_SHOWN])
            raise PagesError(f"the keys of {len(keys)} pages begin with {digits}, such as {some}")
    return [one for keys in matches.values() for copies in keys.values() for one in copies]


def checked(found: Iterable[Found]) -> Iterator[tuple[Found, str]]:
    """Read each page as a whole, and give what is wrong with it; nothing where it is good."""
    for one in found:
        yield one, problem_of(one.at.source, one.page, one.at.sealing)


def export(found: Iterable[Found], target: Path) -> tuple[int, list[tuple[str, str]]]:
    """Copy page files, as they are, to a folder or a tar file, which gets its name when it is whole.

    Pages that are bad are left out, and so are second copies. Those whose key is not here are copied
    as they are.

    Returns:
        How many were copied, and the names of bad ones with what is wrong.

    Raises:
        PagesError: The target is there already (a tar file), is in a node's folder or cannot be written.
    """
    for folder in (target, *target.absolute().parents):
        if (folder / ".lock").exists() and (folder / "packs").is_dir():
            raise PagesError(
                f"{folder} is a node's folder: export to another, or `pie pages import`"
            )
    is_tar = target.suffix == ".tar"
    if is_tar and target.exists():
        raise PagesError(f"{target} is there already")
    bad = []
    copied = 0
    done: set[str] = set()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with contextlib.ExitStack() as exits:
            tar = exits.enter_context(tarfile.open(temporary, "x")) if is_tar else None
            for one, problem in checked(found):
                if problem and not problem.startswith("locked"):
                    bad.append((f"{one.at.source.name}/{one.page.where}", problem))
                    continue
                header = one.page.header
                assert header is not None
                name = page_name(header.model_root, header.key, header.part)
                if name not in done:
                    done.add(name)
                    data = one.at.source.read(one.page)
                    copied += _write(tar, target, name, data, one.page.stored_ns)
        if is_tar:
            os.link(temporary, target)
    except OSError as error:
        raise PagesError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return copied, bad


def import_pages(found: Iterable[Found], place: Place, config: PieConfig) -> Imported:
    """Check pages, and store them in a place's folders or bucket, sealed as its own are.

    Raises:
        PagesError: A running node owns the folders, they have no room for a page, or the bucket did not
            take all.
    """
    sealing = sealing_of(place, config)
    tier = _bucket_tier(place.bucket, sealing) if place.bucket else _disk_tier(place, sealing)
    stored = held = 0
    bad = []
    try:
        for one in found:
            try:
                status = _store(tier, one, sealing)
            except (BadPage, OSError) as error:
                bad.append((f"{one.at.source.name}/{one.page.where}", str(error)))
                continue
            if status is LookupStatus.HIT:
                held += 1
            elif status is None:
                stored += 1
            elif place.bucket:
                raise PagesError(
                    f"{place.name} takes no more after {stored} pages: its budget is "
                    f"{place.budget_bytes} bytes, or it does not answer"
                )
            else:
                raise PagesError(
                    f"{place.name} has no room left after {stored} pages: its budget is "
                    f"{place.budget_bytes} bytes, or its disk is full"
                )
        if isinstance(tier, ObjectTier):
            tier.flush(_SEND_S)
            if tier.buffered_bytes or tier.written.dropped:
                raise PagesError(f"{place.name} did not take all pages: import them once more")
    finally:
        tier.close()
    return Imported(stored, held, bad)


def remove(found: Iterable[Found]) -> int:
    """Remove pages and return how many.

    Raises:
        PagesError: A running node owns the folder, or the disk or the bucket does not let one go.
    """
    by_source: dict[Source, list[PageAtRest]] = {}
    for one in found:
        by_source.setdefault(one.at.source, []).append(one.page)
    count = 0
    for source, pages in by_source.items():
        try:
            source.remove(pages)
        except (PoolError, OSError) as error:
            raise PagesError(f"{error}" + (f" ({count} are gone)" if count else "")) from error
        count += len(pages)
    return count


def is_locked(one: Found) -> bool:
    """Say whether a page is encrypted with a key that is not given."""
    return one.at.sealing.is_locked(one.page.key_id)


def holders(key: str, config: PieConfig) -> list[Holder] | None:
    """Return who holds a page as the index of a running cluster says; None where there is none."""
    url = index_url(config)
    if url is None:
        return None
    lookup = DirectLookup(url, settings=config.index)
    try:
        return [
            Holder(place, parts)
            for place, masks in sorted(lookup.matches([PageKey(bytes.fromhex(key))]).items())
            if masks and (parts := _parts(masks[0]))
        ]
    except IndexUnavailableError:
        return None
    finally:
        lookup.close()


def _parts(mask: PartMask) -> dict[str, list[str]]:
    found = {}
    for part in Part:
        held = part_tiers(mask, part)
        tiers = [tier.name.lower() for tier in Tier if held >> tier & 1]
        if tiers:
            found[part.name.lower()] = tiers
    return found


def _disk_tier(place: Place, sealing: Sealing) -> DiskTier:
    tier = DiskTier(
        place.folders,
        place.budget_bytes,
        sealing=sealing,
        durability=Durability.NONE,
        keep_bad_pages=place.keep_bad_pages,
    )
    try:
        tier.open()
    except PoolError as error:
        raise PagesError(
            f"{place.name} belongs to a node that is running: stop it first; nothing was changed"
        ) from error
    return tier


def _bucket_tier(settings: PoolSettings, sealing: Sealing) -> ObjectTier:
    tier = ObjectTier(
        store_of(settings),
        int(settings.object_budget),
        sealing=sealing,
        threads=settings.object_threads,
        timeout_s=settings.object_timeout_s,
    )
    tier.open()
    return tier


def _store(tier: PageTier, one: Found, sealing: Sealing) -> LookupStatus | None:
    """Store one page; return None where it is there now, or what kept it from being stored."""
    if one.page.header is None:
        raise OSError(one.page.problem)
    header, payload = one.at.sealing.open(one.at.source.read(one.page), key=one.page.header.key)
    header = _keyed(header, payload, sealing)
    room = tier.prepare_store(header)
    if not isinstance(room, memoryview):
        return room
    copied = False
    try:
        copy_payload(room, payload)
        copied = True
    finally:
        good = tier.complete_store(id_of(header), success=copied)
    return None if good else LookupStatus.RETRY


def _keyed(header: PageHeader, payload: memoryview, sealing: Sealing) -> PageHeader:
    """Return a header whose checksum is keyed with the secret of where the page goes."""
    return msgspec.structs.replace(header, checksum=checksum(payload, sealing.secret))


def _write(
    tar: tarfile.TarFile | None, folder: Path, name: str, data: bytes, stored_ns: int
) -> bool:
    """Write a page file, unless it is there already; say whether it was written."""
    if tar is not None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mtime = stored_ns / 1e9 or time.time()
        tar.addfile(member, io.BytesIO(data))
        return True
    path = folder / name
    if path.exists():
        return False
    missing = [each for each in path.parents if not each.exists()]
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            for each in missing:
                each.rmdir()
        raise
    return True
