"""How a payload is packed.

Covers `none`, `lz4` and `bshuf-lz4`, which first puts the first bytes of all numbers together,
then the second bytes, and so on: sign and exponent of neighbouring numbers are alike. Does not
cover when packing pays (`pie.pool`).
"""

from __future__ import annotations

import enum

import lz4.block
import numpy as np
from typing_extensions import Buffer

from pie.page.errors import BadPage, BadPageReason
from pie.page.layout import DTYPE_BYTES

# LZ4 cannot pack tighter; a page that claims more is made to exhaust memory.
_MOST_RAW_PER_PACKED = 255


class Codec(enum.StrEnum):
    """How a payload is packed."""

    NONE = "none"
    LZ4 = "lz4"
    BSHUF_LZ4 = "bshuf-lz4"


def pack(payload: Buffer, codec: Codec, dtype: str) -> Buffer:
    """Return the packed payload."""
    if codec is Codec.NONE:
        return payload
    raw = payload if codec is Codec.LZ4 else _shuffle(payload, DTYPE_BYTES.get(dtype, 1))
    packed: bytes = lz4.block.compress(raw, store_size=False)
    return packed


def unpack(packed: memoryview, codec: Codec, dtype: str, raw_bytes: int) -> memoryview:
    """Return the payload; `packed` itself for `none`.

    Raises:
        BadPage: It cannot be unpacked to `raw_bytes` bytes.
    """
    if codec is Codec.NONE:
        return packed
    if raw_bytes > _MOST_RAW_PER_PACKED * (packed.nbytes + 1):
        raise BadPage(BadPageReason.CODEC, f"{packed.nbytes} bytes cannot hold {raw_bytes}")
    try:
        raw = lz4.block.decompress(packed, uncompressed_size=raw_bytes)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise BadPage(BadPageReason.CODEC, str(error)) from None
    if len(raw) != raw_bytes:
        raise BadPage(BadPageReason.CODEC, f"{len(raw)} bytes came out, not {raw_bytes}")
    if codec is Codec.BSHUF_LZ4:
        return _unshuffle(raw, DTYPE_BYTES.get(dtype, 1))
    return memoryview(raw)


def _shuffle(payload: Buffer, item_bytes: int) -> memoryview:
    raw = np.frombuffer(memoryview(payload).cast("B"), dtype=np.uint8)
    whole = raw.size - raw.size % item_bytes
    planes = np.empty_like(raw)
    planes[:whole].reshape(item_bytes, -1)[:] = raw[:whole].reshape(-1, item_bytes).T
    planes[whole:] = raw[whole:]
    return planes.data


def _unshuffle(shuffled: bytes, item_bytes: int) -> memoryview:
    planes = np.frombuffer(shuffled, dtype=np.uint8)
    whole = planes.size - planes.size % item_bytes
    raw = np.empty_like(planes)
    # A plane at a time: as one transposed assignment it takes five times as long.
    for i, plane in enumerate(planes[:whole].reshape(item_bytes, -1)):
        raw[i:whole:item_bytes] = plane
    raw[whole:] = planes[whole:]
    return raw.data
