"""Which places `pie pages` looks at.

Covers folders of nodes and workers as the configuration names them, and paths and buckets that a person
names. Does not cover what lies there (`pie.pool.at_rest`, `pie.pool.bucket_source`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pie.cluster.config import PieConfig
from pie.cluster.encryption import encryption_keys
from pie.cluster.errors import ClusterError
from pie.cluster.secret import FILE_NAME, read_secret, secret_file, shared_secret
from pie.pool.at_rest import FolderSource, Source, TarSource
from pie.pool.bucket_source import BucketSource
from pie.pool.object_errors import ObjectStoreError
from pie.pool.sealing import Sealing
from pie.pool.settings import Compression, PoolSettings

if TYPE_CHECKING:
    from pie.pool.object_s3 import S3Store

_UNLIMITED = 1 << 60
_S3 = "s3://"
_TRIED = 16
"""So many pages are looked at to see which secret they were written with: the first may be bad."""


class PagesError(ClusterError):
    """What was asked about pages at rest cannot be done, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node's or worker's folders, or one that a person named."""

    name: str
    folders: tuple[Path, ...]
    budget_bytes: int = _UNLIMITED
    compression: Compression = Compression.NONE
    keep_bad_pages: bool = True
    bucket: PoolSettings | None = None
    """How it is reached, where the place is a bucket and not folders."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A source of pages and how its page files are read."""

    source: Source
    sealing: Sealing


def places(config: PieConfig) -> list[Place]:
    """Return the nodes and workers whose folders the configuration names and that are there."""
    pool, model = config.pool, config.model
    found = {}
    for top in pool.disk_folders:
        for name in _children(top):
            folders = tuple(each / name for each in pool.disk_folders)
            budget = int(pool.disk_budget) or _UNLIMITED
            found[name] = Place(name, folders, budget, pool.disk_compression, pool.keep_bad_pages)
    for name in _children(model.disk_kv_path):
        budget = int(model.disk_kv_budget) or _UNLIMITED
        folder = model.disk_kv_path.expanduser() / name
        found[name] = Place(name, (folder,), budget, model.disk_compression, model.keep_bad_pages)
    return [found[name] for name in sorted(found)]


def is_bucket(where: str) -> bool:
    """Say whether a person names a bucket and not a file."""
    return where.startswith(_S3)


def named(where: str | None, config: PieConfig) -> list[Place]:
    """Return the places that a person means: a place's name, a path, or all where None.

    Raises:
        PagesError: There is no such place.
    """
    if where == "":
        raise PagesError("an empty name is neither a place nor a folder or tar file")
    if where is not None and is_bucket(where):
        return [_bucket(where, config)]
    known = places(config)
    if where is None:
        if not known:
            tops = [*config.pool.disk_folders, config.model.disk_kv_path]
            raise PagesError(
                f"no node or worker keeps pages in {', '.join(map(str, tops))}: name a folder, or a "
                "configuration with --config"
            )
        return known
    for place in known:
        if place.name == where:
            return [place]
    path = Path(where).expanduser()
    if not path.exists():
        names = ", ".join(place.name for place in known) or "none"
        raise PagesError(
            f"{where} is neither a place (there are: {names}) nor a folder or tar file"
        )
    inside = [Place(str(path / name), (path / name,)) for name in _children(path)]
    return inside or [Place(str(path), (path,))]


def one(where: str, config: PieConfig) -> Place:
    """Return the one place that a person means.

    Raises:
        PagesError: There is none, or there are several.
    """
    path = Path(where).expanduser()
    if not path.exists() and len(path.parts) > 1 and not is_bucket(where):
        return Place(str(path), (path,))
    found = named(where, config)
    if len(found) != 1:
        names = ", ".join(place.name for place in found)
        raise PagesError(f"{where} has several places: name one of {names}")
    if any(folder.is_file() for folder in found[0].folders):
        raise PagesError(f"{where} is a file: name a node's folder or a bucket")
    return found[0]


@contextmanager
def sources(
    where: str | None, config: PieConfig, secret_file: Path | None = None
) -> Iterator[list[Opened]]:
    """Open what a person means as sources for a block; folders that are not there are left out.

    Args:
        where: See `named`.
        config: Has the encryption keys.
        secret_file: The cluster's secret; where None it is looked for beside the pages, and then
            where the configuration's own pages lie.

    Raises:
        PagesError: There is nothing, or it cannot be read.
    """
    with ExitStack() as exits:
        found = []
        for place in named(where, config):
            secrets = _secrets(place, config, secret_file)
            if place.bucket is not None:
                found.append(_opened(place, place.name, secrets, config))
                exits.callback(found[-1].source.close)
            for path in place.folders:
                if path.exists():
                    found.append(_opened(place, path, secrets, config))
                    exits.callback(found[-1].source.close)
        yield found


def sealing_of(place: Place, config: PieConfig) -> Sealing:
    """Return how new page files of a place are made, with the secret that its cluster reads them with.

    A cluster that has not started yet gets its secret now, where its first start would keep it.

    Raises:
        ConfigError: The encryption keys are wrong.
        StartError: The secret is damaged, or cannot be read or made.
        PagesError: No secret is known, so that no cluster could read the pages.
    """
    own = secret_file(config)
    beside = _beside(place)
    if own is not None and (not beside or _is_own(place, config)):
        secret: bytes | None = shared_secret(own.expanduser())
    else:
        secret = _secrets(place, config, None)[0]
    if secret is None:
        raise PagesError(
            f"no cluster could read what is put into {place.name}: this configuration keeps no pages "
            "and no secret; start the cluster once, or name its cluster.secret_file"
        )
    return _sealing(place, secret, config)


def index_url(config: PieConfig) -> str | None:
    """Return where the index of a running cluster is; None where that is not known."""
    socket = config.index.data_dir.absolute() / "valkey.sock"
    if not config.index.url and socket.exists():
        return f"unix://{socket}"
    return config.index.url or None


def wire_secret(config: PieConfig, file: Path | None) -> bytes | None:
    """Return the secret that a running cluster's nodes are reached with; see `sources`."""
    return _secrets(Place("", ()), config, file or config.cluster.secret_file)[0]


def store_of(settings: PoolSettings) -> S3Store:
    """Return a bucket that answers.

    Raises:
        PagesError: It does not.
    """
    # Only who looks into a bucket pays for importing boto3.
    from pie.pool.object_s3 import S3Store  # noqa: PLC0415

    store = None
    try:
        store = S3Store(settings)
        store.probe()
    except ObjectStoreError as error:
        if store is not None:
            store.close()
        at = settings.object_endpoint_url or "AWS"
        raise PagesError(
            f"the bucket {settings.object_bucket} at {at} cannot be read: {error}; `pool.object_…` in "
            "pie.toml and AWS's own variables say how it is reached"
        ) from error
    return store


def _bucket(where: str, config: PieConfig) -> Place:
    """Return the place that an address such as `s3://bucket/prefix` names."""
    bucket, _, prefix = where.removeprefix(_S3).partition("/")
    named = {"object_bucket": bucket, "object_prefix": prefix.rstrip("/")}
    try:
        settings = PoolSettings.model_validate(config.pool.model_dump() | named)
    except ValidationError as error:
        raise PagesError(
            f"{where} is no bucket: s3://BUCKET/PREFIX is, with names as S3 allows them"
        ) from error
    if not bucket:
        raise PagesError(f"{where} names no bucket: s3://BUCKET/PREFIX does")
    return Place(
        where,
        (),
        int(settings.object_budget),
        settings.object_compression,
        bucket=settings,
    )


def _opened(
    place: Place, path: Path | str, secrets: Sequence[bytes | None], config: PieConfig
) -> Opened:
    """Open a source with the first secret that one of its first pages was written with."""
    for secret in secrets:
        sealing = _sealing(place, secret, config)
        try:
            source = _source(place, path, sealing)
            first = list(islice(source.pages(), _TRIED))
        except OSError as error:
            raise PagesError(f"{path} cannot be read: {error.strerror or error}") from error
        if not first or any(page.header for page in first) or secret is secrets[-1]:
            return Opened(source, sealing)
        source.close()
    raise AssertionError("there is one secret at least, None")


def _source(place: Place, path: Path | str, sealing: Sealing) -> Source:
    if place.bucket is not None:
        return BucketSource(
            store_of(place.bucket), place.name, sealing, threads=place.bucket.object_threads
        )
    folder = Path(path)
    return FolderSource(folder, sealing) if folder.is_dir() else TarSource(folder, sealing)


def _sealing(place: Place, secret: bytes | None, config: PieConfig) -> Sealing:
    keys = encryption_keys(config.cluster)
    return Sealing(secret, compression=place.compression, keys=keys, name=place.name)


def _secrets(place: Place, config: PieConfig, file: Path | None) -> list[bytes | None]:
    """Return the secrets that pages may have been written with, the likeliest first."""
    if file is not None:
        try:
            return [read_secret(file)]
        except OSError as error:
            raise PagesError(f"{file} cannot be read: {error.strerror}") from error
    own = secret_file(config)
    own = None if own is None else own.expanduser()
    if own is not None and own.is_file() and _is_own(place, config):
        # The cluster takes no other: pages of another secret are not good here.
        return [read_secret(own)]
    folders = [config.pool.disk_folders[0], config.model.disk_kv_path]
    files = [*_beside(place), *([] if own is None else [own])]
    files += [folder.expanduser() / FILE_NAME for folder in folders]
    found: list[bytes | None] = [read_secret(each) for each in files if each.is_file()]
    return list(dict.fromkeys([*found, None]))


def _beside(place: Place) -> list[Path]:
    """Return the files with a secret that lie beside pages."""
    files = (each / FILE_NAME for folder in place.folders for each in (folder, folder.parent))
    return [file for file in files if file.expanduser().is_file()]


def _is_own(place: Place, config: PieConfig) -> bool:
    """Say whether nodes or workers of a configuration's cluster keep their pages in a place."""
    pool = config.pool
    if place.bucket is not None:
        there = (place.bucket.object_bucket, place.bucket.object_prefix)
        return there == (pool.object_bucket, pool.object_prefix)
    tops = {_whole(top) for top in (*pool.disk_folders, config.model.disk_kv_path)}
    return any(_whole(folder).parent in tops for folder in place.folders)


def _whole(path: Path) -> Path:
    return path.expanduser().absolute()


def _children(top: Path) -> Iterator[str]:
    """Name the folders below one that nodes or workers use or have used."""
    top = top.expanduser()
    if top.is_dir():
        for path in sorted(top.iterdir()):
            if (path / ".lock").exists():
                yield path.name
