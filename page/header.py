"""What is known of a page beside its payload, and the checksum that ties the two.

Covers the header that goes beside a payload on the wire and in a page file. Does not cover that file
(`pie.page.format`).
"""

from __future__ import annotations

import hmac

import msgspec
import xxhash
from blake3 import blake3
from typing_extensions import Buffer

from pie.page.errors import BadPage, BadPageReason
from pie.page.events import Part
from pie.page.key import PageKey, RootKey

FORMAT_VERSION = 1

CHECKSUM_BYTES = 16
SECRET_BYTES = 32


class PageHeader(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a page's part besides its payload."""

    key: PageKey
    parent: bytes
    index: int
    part: Part
    model_root: RootKey
    dtype: str
    layout_id: str
    page_tokens: int
    raw_bytes: int
    """Size of the payload before any codec."""
    checksum: bytes
    """XXH3-128 of the raw payload, or a keyed BLAKE3 of it where a cluster secret is set."""
    shard: int = 0
    codec: str = "none"
    """How the payload beside this header is packed; `none` for all that `decode_page` returns."""
    tenant_tag: str = ""
    version: int = FORMAT_VERSION
    group: bytes = b""
    """Key of the first page of its group, by which pool nodes share pages out; empty where the page has
    not been in a pool."""
    session_tag: str = ""
    """Stands for the conversation whose request computed it; empty where it named none."""


def checksum(payload: Buffer, secret: bytes | None = None) -> bytes:
    """Return the 16 bytes that a header's `checksum` holds.

    XXH3-128 finds damage. Keyed BLAKE3, with the cluster's secret of 32 bytes, also tells pages
    that were made elsewhere.
    """
    if secret is None:
        return xxhash.xxh3_128_digest(payload)
    return blake3(payload, key=secret).digest(CHECKSUM_BYTES)


def check_payload(header: PageHeader, payload: memoryview, secret: bytes | None = None) -> None:
    """Compare a raw payload with its header.

    Raises:
        BadPage: Its size or checksum is another.
    """
    if payload.nbytes != header.raw_bytes:
        detail = f"{payload.nbytes} bytes instead of {header.raw_bytes}"
        raise BadPage(BadPageReason.CHECKSUM, detail)
    if not hmac.compare_digest(checksum(payload, secret), header.checksum):
        raise BadPage(BadPageReason.CHECKSUM, "the payload is not the one that was written")
