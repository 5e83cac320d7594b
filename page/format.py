"""Bytes of a page: its header, its checksum and its file.

Covers the Arrow IPC file that the disk tier and the object tier share, and the header that goes
beside a payload on the wire. Does not cover where files lie (`pie.pool`).
"""

from __future__ import annotations

import msgspec

from pie.page.events import Part
from pie.page.key import PageKey, RootKey

FORMAT_VERSION = 1


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
    tenant_tag: str = ""
    version: int = FORMAT_VERSION
