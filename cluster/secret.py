"""The secret that all of a cluster share.

Covers where it is kept: in a file of its own, for clusters of several hosts, or where pages lie on disk, or
would: those there and in a bucket are keyed with it and could not be read without it after the cluster was
stopped. Does not cover what is keyed with it (`pie.page.format`, `pie.wire.curve`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from pie.cluster.config import PieConfig
from pie.cluster.errors import StartError
from pie.page.header import SECRET_BYTES

log = logging.getLogger("pie.cluster.secret")

FILE_NAME = "cluster.secret"


def new_secret() -> bytes:
    """Return a secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


def secret_file(config: PieConfig) -> Path | None:
    """Return where the cluster of a configuration keeps its secret; None where each run has a new one."""
    pool = config.pool
    if config.cluster.secret_file is not None:
        return config.cluster.secret_file
    if pool.nodes and (pool.disk_budget or pool.object_bucket):
        return pool.disk_folders[0] / FILE_NAME
    if config.model.disk_kv_budget:
        return config.model.disk_kv_path / FILE_NAME
    return None


def joined_secret(file: Path) -> bytes:
    """Return the secret of a cluster that is there already.

    Raises:
        StartError: It cannot be read, or is not whole.
    """
    try:
        return read_secret(file)
    except OSError as error:
        raise StartError(
            f"the cluster's secret {file} cannot be read ({error.strerror}): copy it here from the "
            "cluster, where `pie serve` makes it"
        ) from error


def shared_secret(file: Path) -> bytes:
    """Return the secret in a file, making it where there is none yet.

    Raises:
        StartError: It cannot be read or made, or is not whole.
    """
    try:
        return _made(file)
    except OSError as error:
        raise StartError(
            f"the cluster's secret {file} cannot be read or made ({error.strerror})"
        ) from error


def kept_secret(file: Path) -> bytes:
    """Return the secret beside pages, making it where there is none yet.

    Where it cannot be kept, because the disk takes nothing, it is one for this run.

    Raises:
        StartError: There is one that is not whole.
    """
    try:
        return _made(file)
    except OSError as error:
        log.warning(
            "%s cannot be kept (%s): pages on disk and in a bucket are of this run alone",
            file,
            error,
        )
        return new_secret()


def _made(file: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return read_secret(file)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(file, new_secret())
    return read_secret(file)


def read_secret(file: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        OSError: It cannot be read.
        StartError: It is not whole.
    """
    secret = file.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise StartError(
            f"{file} is damaged: put back its {SECRET_BYTES} bytes, or remove it together with "
            "the pages that were stored with it, which nobody can read without it"
        )
    return secret


def _write(file: Path, secret: bytes) -> None:
    """Write a file as a whole, unless another process was first."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, secret)
        os.fsync(handle)
    finally:
        os.close(handle)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink()
