"""Encryption of page payloads at rest.

Covers keys, what is derived from them, and AES-256-GCM over one payload. Does not cover where keys
come from (`pie.cluster`) or what of a page file is encrypted (`pie.page.format`).

From a master key a key for each tenant tag is derived, and from that one for each page (HKDF-SHA256).
A nonce never repeats under one key: it is 96 random bits, and a page's own key encrypts nothing but
that page. It would take 2^32 writes of the same page for a chance of 2^-33 that two share a nonce.

A key's id is derived from the key as well, so a file says which key it needs and a wrong key is told
from damage: nobody names keys, and no name can stand for two.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from typing_extensions import Buffer

from pie.page.errors import BadPage, BadPageReason

CIPHER: Final = "aes-256-gcm"
KEY_BYTES: Final = 32
ID_BYTES: Final = 8

_NONCE_BYTES = 12
_MOST_TENANTS = 4096
"""Of which the keys are remembered, for each master key: to derive one takes 10 µs."""


class Encrypted(NamedTuple):
    """A payload, encrypted, and what is needed beside the key to read it."""

    key_id: bytes
    nonce: bytes
    data: Buffer
    """As long as the payload, and the tag of 16 bytes behind it."""


class KeyRing:
    """Keys that pages are encrypted with: the first writes, all read. Thread-safe."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Hold some keys.

        Raises:
            ValueError: There is none, or one has not 32 bytes.
        """
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"one key or more is wanted, of {KEY_BYTES} bytes each")
        self._masters = {key_id(key): _Master(key) for key in reversed(keys)}
        self.writes_with = key_id(keys[0])
        """Id of the key that new pages are encrypted with."""

    def __contains__(self, wanted: object) -> bool:
        """Say whether there is a key of this id."""
        return wanted in self._masters

    @property
    def ids(self) -> list[bytes]:
        """The ids of all keys."""
        return list(self._masters)

    def encrypt(self, payload: Buffer, *, tenant_tag: str, page: bytes, header: bytes) -> Encrypted:
        """Encrypt a payload with the first key.

        Args:
            payload: Raw or packed.
            tenant_tag: Whose page it is.
            page: What tells the page from all others.
            header: Is authenticated with the payload and stays readable.
        """
        nonce = os.urandom(_NONCE_BYTES)
        cipher = self._masters[self.writes_with].cipher(tenant_tag, page)
        return Encrypted(
            self.writes_with, nonce, cipher.encrypt(nonce, memoryview(payload), header)
        )

    def decrypt(
        self, encrypted: Encrypted, *, tenant_tag: str, page: bytes, header: bytes
    ) -> memoryview:
        """Return the payload that `encrypt` was called with.

        Raises:
            BadPage: `LOCKED`, the key is not here; `CHECKSUM`, it is not what was encrypted.
        """
        master = self._masters.get(encrypted.key_id)
        if master is None:
            raise locked(encrypted.key_id)
        cipher = master.cipher(tenant_tag, page)
        try:
            return memoryview(cipher.decrypt(encrypted.nonce, memoryview(encrypted.data), header))
        except (InvalidTag, ValueError):
            detail = "the encrypted payload or its header is not the one that was written"
            raise BadPage(BadPageReason.CHECKSUM, detail) from None


def key_id(key: bytes) -> bytes:
    """Return the id of a master key, which tells nothing of the key."""
    return HKDF(SHA256(), ID_BYTES, salt=None, info=b"pie/key-id").derive(key)


def locked(wanted: bytes) -> BadPage:
    """Return what is raised where a key is not here."""
    return BadPage(BadPageReason.LOCKED, f"it is encrypted with key {wanted.hex()}, not given here")


class _Master:
    """One master key and the tenants' keys derived from it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tenants: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def cipher(self, tenant_tag: str, page: bytes) -> AESGCM:
        tenant = self._tenants.get(tenant_tag)
        if tenant is None:
            info = b"pie/tenant/" + tenant_tag.encode()
            tenant = HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._key)
            with self._lock:
                if len(self._tenants) >= _MOST_TENANTS:
                    self._tenants.clear()
                self._tenants[tenant_tag] = tenant
        return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info=b"pie/page/" + page).derive(tenant))
