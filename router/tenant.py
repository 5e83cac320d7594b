"""What tells the pages of tenants apart without telling their salts.

Covers the tag that pages and the index carry. Does not cover the keys that keep tenants' pages
apart (`pie.page.key`).
"""

from __future__ import annotations

from blake3 import blake3

from pie.page.key import RootKey, tenant_root

_PURPOSE = b"pie/tenant"
_TAG_BYTES = 8


def tenant_tag(model: RootKey, salt: str | None, secret: bytes | None = None) -> str:
    """Return the tag of a salt's pages under one model; empty where there is no salt.

    Args:
        model: The model's root.
        salt: The tenant's.
        secret: 32 bytes that all routers of a cluster share. Without it, whoever reads the tag and
            the model root can try salts: one that is easily guessed is found.
    """
    if salt is None:
        return ""
    named = _PURPOSE + tenant_root(model, salt=salt)
    hashed = blake3(named) if secret is None else blake3(named, key=secret)
    return hashed.hexdigest(_TAG_BYTES)
