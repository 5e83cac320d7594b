"""How payloads are checked.

Covers choosing and comparing checksums: XXH3-128 finds damage, and a keyed BLAKE3 also refuses
pages that were made outside of the cluster. Does not cover when they are checked.
"""

from __future__ import annotations

import hmac

import xxhash
from blake3 import blake3

from pie.page.format import PageHeader
from pie.wire.frames import Buffer

SECRET_BYTES = 32
_DIGEST_BYTES = 16


class Checksum:
    """Makes and compares checksums of raw payloads. Thread-safe; large payloads free the GIL."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Use keyed BLAKE3 with a `secret` of 32 bytes, or XXH3-128 without one."""
        if secret is not None and len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def digest(self, payload: Buffer) -> bytes:
        """Return the 16 bytes that a header's `checksum` holds."""
        if self._secret is None:
            return xxhash.xxh3_128_digest(payload)
        return blake3(payload, key=self._secret).digest(_DIGEST_BYTES)

    def matches(self, header: PageHeader, payload: memoryview) -> bool:
        """Say whether a payload is the one that its header describes."""
        if payload.nbytes != header.raw_bytes:
            return False
        return hmac.compare_digest(self.digest(payload), header.checksum)
