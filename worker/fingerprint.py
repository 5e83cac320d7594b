"""What identifies a model.

Covers the hash of weight files, remembered by path, size and mtime, and the fingerprint that goes
into every key's root (DESIGN §3). Does not cover keys (`pie.page.key`).

A fingerprint is made of the content of the source files, the version of the conversion, and the
configuration without paths and library versions. An edited checkpoint cannot read old pages; an
upgrade of a library, or another host's path, does not lose them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from pie.worker.errors import ModelNotFound

if TYPE_CHECKING:
    from pie.worker.sources import ModelFolder

log = logging.getLogger("pie.worker.fingerprint")

FINGERPRINT_VERSION = 1

_UNHASHED_CONFIG = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of `config.json` that say nothing about what is computed; the dtype that a worker computes
in has its own field in the root."""

_REMEMBERED_FILES = 4096
_HASH = re.compile(r"[0-9a-f]{64}")


def model_fingerprint(folder: ModelFolder, cache_folder: Path) -> bytes:
    """Return the 32 bytes that identify a model's weights and configuration.

    Hashes each weight file once (about 1 s a gigabyte) and remembers the hash in `cache_folder`.
    """
    digest = blake3(b"pie/fingerprint" + struct.pack("<I", FINGERPRINT_VERSION))
    hashes = sorted(file_hash(file, cache_folder) for file in folder.provenance)
    digest.update(struct.pack("<I", len(hashes)) + b"".join(hashes))
    if folder.conversion_version is None:
        digest.update(b"config" + _canonical_config(folder.path / "config.json"))
    else:
        # A GGUF file holds its own configuration; what a conversion makes of it follows from the
        # file and the conversion's version.
        digest.update(b"conversion" + struct.pack("<I", folder.conversion_version))
    return digest.digest()


def file_hash(file: Path, cache_folder: Path) -> bytes:
    """Return the BLAKE3 hash of a file's content.

    Remembered in `cache_folder` by path, size and mtime. A memory that cannot be read or written
    costs time, never an error.

    Raises:
        ModelNotFound: The file cannot be read.
    """
    try:
        # A hub's snapshot holds links; the path behind one names the content.
        real = file.resolve(strict=True)
        stat = real.stat()
        memory = cache_folder.expanduser() / "hashes.json"
        name = f"{real}|{stat.st_size}|{stat.st_mtime_ns}"
        remembered = _read_memory(memory)
        if known := remembered.get(name):
            return bytes.fromhex(known)
        digest = blake3(max_threads=blake3.AUTO).update_mmap(real).digest()
    except OSError as error:
        raise ModelNotFound(f"cannot read {file}: {error.strerror or error}") from error
    remembered = {**_read_memory(memory), name: digest.hex()}
    _write_memory(memory, dict(list(remembered.items())[-_REMEMBERED_FILES:]))
    return digest


def _canonical_config(file: Path) -> bytes:
    """Return a configuration's meaning as bytes: no paths, no versions, keys sorted."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot read {file}: {error}") from error
    return json.dumps(_without(config), sort_keys=True, separators=(",", ":")).encode()


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without(v) for k, v in value.items() if k not in _UNHASHED_CONFIG}
    if isinstance(value, list):
        return [_without(item) for item in value]
    return value


def _read_memory(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and _HASH.fullmatch(v)}


def _write_memory(file: Path, hashes: dict[str, str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix="hashes-", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(hashes, out)
        Path(scratch).replace(file)
    except OSError as error:
        log.info("cannot remember hashes of weight files in %s: %s", file, error)
