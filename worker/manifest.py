"""What a converted model's folder holds.

Covers a file, written last, with the size and the hash of every other one, and finding out whether
the folder is still what was written. Does not cover the conversion (`pie.worker.gguf`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from pie.worker.errors import ModelNotFound
from pie.worker.fingerprint import file_hash

NAME = "pie-manifest.json"
_VERSION = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as it was written."""

    bytes: int
    blake3: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    files: dict[str, _File]
    """By path below the folder."""


def write_manifest(folder: Path) -> None:
    """Write down what a folder holds.

    Raises:
        OSError: A file cannot be read, or the manifest not written.
    """
    files = {
        name: _File(
            path.stat().st_size, blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        )
        for name, path in _files(folder).items()
    }
    (folder / NAME).write_bytes(msgspec.json.encode(_Manifest(_VERSION, files)))


def damage(folder: Path, cache_folder: Path) -> str | None:
    """Return what is wrong with a folder, or None where it is what was written.

    A file that nobody wrote is damage too: a tokenizer's or a template's file would be used. Weights
    are hashed once and again when they change: `cache_folder` remembers.
    """
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=_Manifest)
        if manifest.version != _VERSION:
            return f"{NAME} is of version {manifest.version}"
        found = _files(folder)
        if odd := sorted(manifest.files.keys() ^ found.keys()):
            missing = odd[0] in manifest.files
            return f"{odd[0]} is {'missing' if missing else 'not from the conversion'}"
        changed = (
            _change(found[name], written, cache_folder) for name, written in manifest.files.items()
        )
        return next(filter(None, changed), None)
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (OSError, msgspec.MsgspecError, ModelNotFound) as error:
        return f"it cannot be read: {error}"


def _change(path: Path, written: _File, cache_folder: Path) -> str | None:
    size = path.stat().st_size
    if size != written.bytes:
        return f"{path.name} has {size} bytes instead of {written.bytes}"
    if file_hash(path, cache_folder).hex() != written.blake3:
        return f"{path.name} has other content than was written"
    return None


def _files(folder: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path != folder / NAME and not path.is_dir()
    }
