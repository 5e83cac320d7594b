"""Names of frozen pages.

Covers the root of a key chain and the keys of full pages. Does not cover where a model's
fingerprint comes from (`pie.worker`) or what a page's bytes look like (`pie.page.format`).

A key names content: the model, the dtype and the exact tokens from the start of the sequence to
the end of the page. Two places that hold the same key hold the same page. The golden vectors in
`tests/golden/keys.json` fix the scheme; a change to it is a new `KEY_VERSION`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

from blake3 import blake3

RootKey = NewType("RootKey", bytes)
"""32 bytes that start a key chain: a model root, or a tenant's root derived from it."""

PageKey = NewType("PageKey", bytes)
"""32 bytes that name one frozen page."""

KEY_BYTES = 32
KEY_VERSION = 1

_TOKEN_BYTES = 4


def model_root(*, fingerprint: bytes, dtype: str, page_tokens: int, layout_id: str) -> RootKey:
    """Return the root that a place publishes for the model it runs.

    Args:
        fingerprint: What identifies the weights and configuration, made by the worker.
        dtype: Name of the dtype that the model computes in, such as `bfloat16`.
        page_tokens: Tokens in a page.
        layout_id: `pie.page.layout.PageLayout.layout_id`.
    """
    return _root(
        ("version", struct.pack("<I", KEY_VERSION)),
        ("fingerprint", fingerprint),
        ("dtype", dtype.encode()),
        ("page_tokens", struct.pack("<I", page_tokens)),
        ("layout_id", layout_id.encode()),
    )


def tenant_root(model: RootKey, *, adapter: str | None = None, salt: str | None = None) -> RootKey:
    """Return the root for one adapter and one salt; `model` itself where neither is set.

    An empty adapter or salt is not an absent one.
    """
    if adapter is None and salt is None:
        return model
    fields = [("model_root", bytes(model))]
    if adapter is not None:
        fields.append(("adapter", adapter.encode()))
    if salt is not None:
        fields.append(("salt", salt.encode()))
    return _root(*fields)


def page_keys(
    parent: RootKey | PageKey, tokens: Sequence[int] | array[int], page_tokens: int
) -> list[PageKey]:
    """Return the keys of the full pages of `tokens`; a partial tail has none.

    Args:
        parent: The root, or the key of the page that ends where `tokens` starts.
        tokens: Token ids, each in `[0, 2**32)`.
        page_tokens: Tokens in a page.

    Raises:
        OverflowError: A token id does not fit an unsigned 32-bit integer.
    """
    keys: list[PageKey] = []
    key: bytes = parent
    for page in packed_pages(tokens, page_tokens):
        key = blake3(key + page).digest()
        keys.append(PageKey(key))
    return keys


def packed_pages(tokens: Sequence[int] | array[int], page_tokens: int) -> list[bytes]:
    """Return the full pages of `tokens` as `pack_tokens` packs them, each for itself."""
    packed = pack_tokens(tokens)
    size = page_tokens * _TOKEN_BYTES
    return [packed[start : start + size] for start in range(0, len(packed) - size + 1, size)]


def keys_after(parent: RootKey | PageKey, pages: Iterable[bytes]) -> list[PageKey]:
    """Return the key of each of several pages that may come right after `parent`.

    Args:
        parent: The root, or the key of the page before.
        pages: Each page's tokens, packed.
    """
    return [PageKey(blake3(parent + page).digest()) for page in pages]


def pack_tokens(tokens: Sequence[int] | array[int]) -> bytes:
    """Return token ids as consecutive unsigned 32-bit little-endian integers."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """Return the token ids that `pack_tokens` packed."""
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def _root(*fields: tuple[str, bytes]) -> RootKey:
    """Hash named fields so that no two different lists of fields hash alike."""
    digest = blake3(b"pie/root")
    for name, value in fields:
        digest.update(struct.pack("<I", len(name)) + name.encode())
        digest.update(struct.pack("<Q", len(value)) + value)
    return RootKey(digest.digest())
