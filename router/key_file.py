"""The file of tenants and their API keys: what stands in it, read and written as a whole.

Covers its format, making keys, and hashing them, so that the file gives none away. Does not cover who
may ask for what (`pie.router.access`) or what a person sees (`pie.cluster.key_command`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3

from pie.router.errors import KeyFileError
from pie.wire.malformed import why_malformed

_PURPOSE = "pie router api key 1"
_SECRET_BYTES = 32
_SALT_BYTES = 16
_ID_BYTES = 4
_PREFIX = "pie"
_MOST_BYTES = 16 << 20

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whose pages they are, and what they may take."""

    salt: Annotated[str, msgspec.Meta(min_length=1)]
    """Keeps the tenant's pages apart from everybody else's."""
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    """Of prompts and answers together."""
    concurrent: _Count | None = None
    """Sequences in flight."""
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0
    """Workers take a smaller one first."""


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is kept of a key."""

    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Name
    created: str
    is_admin: bool = False
    """Whether it opens `/admin`, `/status` and `/metrics`."""
    note: Annotated[str, msgspec.Meta(max_length=256)] = ""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tenants by name, and all keys by id."""

    tenants: dict[Name, Tenant] = {}
    keys: dict[str, ApiKey] = {}

    def with_tenant(self, name: str, **limits: int | None) -> KeyFile:
        """Return it with a tenant, which gets a salt where it is new, and the limits that are given."""
        tenant = self.tenants.get(name) or Tenant(secrets.token_hex(_SALT_BYTES))
        return KeyFile(
            self.tenants | {name: msgspec.structs.replace(tenant, **limits)}, dict(self.keys)
        )

    def with_key(self, tenant: str, *, is_admin: bool, note: str) -> tuple[KeyFile, str, str]:
        """Return it with a new key of a tenant that is there, the key's id, and the key itself."""
        id_ = secrets.token_hex(_ID_BYTES)
        key = f"{_PREFIX}-{id_}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        created = datetime.now(UTC).isoformat(timespec="seconds")
        kept = ApiKey(hashed(key), tenant, created, is_admin, note)
        return KeyFile(dict(self.tenants), self.keys | {id_: kept}), id_, key

    def without_key(self, id_: str) -> KeyFile:
        """Return it without a key; the tenant stays, and with it its salt."""
        return KeyFile(dict(self.tenants), {k: v for k, v in self.keys.items() if k != id_})


def hashed(key: str) -> str:
    """Return what is kept of a key: it has 256 random bits, so that a fast hash gives none away."""
    return blake3(key.encode(), derive_key_context=_PURPOSE).hexdigest()


def read_key_file(file: Path) -> KeyFile:
    """Return what stands in a file; nothing where there is none.

    Raises:
        KeyFileError: It cannot be read, or is not one.
    """
    data = b""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise KeyFileError(f"{file}: larger than {_MOST_BYTES >> 20} MiB")
        data = file.read_bytes()
        found = msgspec.json.decode(data, type=KeyFile)
    except FileNotFoundError:
        return KeyFile()
    except OSError as error:
        raise KeyFileError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = why_malformed(data, error)
        raise KeyFileError(f"{file}: is no file of API keys: {why}") from error
    for id_, key in found.keys.items():
        if key.tenant not in found.tenants:
            raise KeyFileError(f"{file}: key {id_} is of tenant {key.tenant}, which is not there")
    return found


@dataclass
class Edited:
    """What will stand in a file."""

    content: KeyFile


@contextmanager
def editing(file: Path) -> Iterator[Edited]:
    """Give what stands in a file, and write what is made of it; one at a time may.

    Raises:
        KeyFileError: It cannot be read or written.
    """
    lock = file.with_name(f"{file.name}.lock")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = lock.open("w")
    except OSError as error:
        raise KeyFileError(f"{file}: cannot be written: {error.strerror}") from error
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        edited = Edited(read_key_file(file))
        yield edited
        write_key_file(file, edited.content)


def write_key_file(file: Path, content: KeyFile) -> None:
    """Put a file in place as a whole, for its owner alone.

    Raises:
        KeyFileError: It cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(data + b"\n")
            opened.flush()
            os.fsync(handle)
        temporary.replace(file)
    except OSError as error:
        raise KeyFileError(f"{file}: cannot be written: {error.strerror}") from error
