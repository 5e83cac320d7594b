"""The cluster's way to check payloads.

Covers binding the cluster's secret to the checksums of `pie.page.format`, with an answer for an
error. Does not cover when payloads are checked.
"""

from __future__ import annotations

from typing_extensions import Buffer

from pie.page.errors import BadPage
from pie.page.header import SECRET_BYTES, PageHeader, check_payload, checksum


class Checksum:
    """Makes and compares checksums of raw payloads. Thread-safe; large payloads free the GIL."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Use keyed BLAKE3 with a `secret` of 32 bytes, or XXH3-128 without one."""
        if secret is not None and len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def digest(self, payload: Buffer) -> bytes:
        """Return the 16 bytes that a header's `checksum` holds."""
        return checksum(payload, self._secret)

    def matches(self, header: PageHeader, payload: memoryview) -> bool:
        """Say whether a payload is the one that its header describes."""
        try:
            check_payload(header, payload, self._secret)
        except BadPage:
            return False
        return True
