"""What an object store is: objects by name.

Covers what the tier asks of a bucket. Does not cover S3 (`pie.pool.object_s3`) or what the objects
hold (`pie.pool.object`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import Buffer


class FoundObject(NamedTuple):
    """An object as a listing shows it."""

    name: str
    size: int
    stored_ns: int
    """Wall-clock time by the store's clock."""


class ObjectStart(NamedTuple):
    """The first bytes of an object."""

    data: bytes
    object_bytes: int
    """Size of the whole object."""


class ObjectStore(Protocol):
    """Objects by name. Thread-safe; every call ends within its time-outs.

    Raises from every method:
        ObjectStoreError: The store did not do it.
    """

    def put(self, name: str, data: Buffer) -> bool:
        """Make an object; False where there was one of that name, which stays as it is."""
        ...

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return an object or a range of it, as far as it goes; None where it is not there."""
        ...

    def get_start(self, name: str, length: int) -> ObjectStart | None:
        """Return an object's first bytes, so many at most, and its size; None where it is not there."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is gone."""
        ...

    def found(self) -> Iterator[FoundObject]:
        """List all objects, in the order of their names."""
        ...

    def probe(self) -> None:
        """Ask for next to nothing, to see whether the store answers."""
        ...

    def close(self) -> None:
        """Let go of the connections."""
        ...
