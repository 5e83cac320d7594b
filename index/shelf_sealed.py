"""A shelf whose values nobody reads or makes who has not the cluster's secret.

Covers encryption around another shelf. Does not cover the cipher (`pie.page.cipher`). A value is encrypted for
its name: moved to another name, or written by somebody else, it is none. Names stay readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from pie.index.shelf import Latest, Shelf
from pie.page.cipher import Encrypted, KeyRing
from pie.page.errors import BadPage

_PURPOSE: Final = "pie 2026-11 index: values that routers share"
_NAME: Final = "pie 2026-11 index: name of a shelf"
_TAG_BYTES: Final = 4
_HEADER: Final = b"pie/shelf/1"
_NONCE_BYTES: Final = 12
_SEAL_BYTES: Final = _NONCE_BYTES + 16
"""A sealed value is longer by nonce and tag."""


def sealed_name(name: str, secret: bytes) -> str:
    """Return what a shelf is called in Redis, so that clusters of other secrets have others there."""
    tag = blake3(secret, derive_key_context=_NAME).digest(_TAG_BYTES)
    return f"{name}-{tag.hex()}"


class SealedShelf:
    """Encrypts what is put on a shelf.

    Args:
        shelf: Keeps it.
        name: The shelf's.
        secret: 32 bytes that all of the cluster share.
    """

    def __init__(self, shelf: Shelf, name: str, secret: bytes) -> None:
        self._shelf = shelf
        self._name = name
        self._ring = KeyRing([blake3(secret, derive_key_context=_PURPOSE).digest()])

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Do as `Shelf.put` says."""
        await self._shelf.put([(name, self._sealed(name, value)) for name, value in values])

    def takes(self, name: str, value: bytes) -> bool:
        """Do as `Shelf.takes` says."""
        return self._shelf.takes(name, bytes(len(value) + _SEAL_BYTES))

    async def get(self, name: str) -> bytes | None:
        """Do as `Shelf.get` says; what another cluster put there is none."""
        sealed = await self._shelf.get(name)
        if sealed is None:
            return None
        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        encrypted = Encrypted(self._ring.writes_with, nonce, data)
        try:
            opened = self._ring.decrypt(
                encrypted, tenant_tag=self._name, page=name.encode(), header=_HEADER
            )
        except BadPage:
            return None
        return bytes(opened)

    async def latest(self, most: int) -> Latest:
        """Do as `Shelf.latest` says."""
        return await self._shelf.latest(most)

    def _sealed(self, name: str, value: bytes) -> bytes:
        encrypted = self._ring.encrypt(
            value, tenant_tag=self._name, page=name.encode(), header=_HEADER
        )
        return encrypted.nonce + bytes(encrypted.data)
