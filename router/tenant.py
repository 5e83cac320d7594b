"""What tells the pages of tenants and of conversations apart without telling whose they are.

Covers the tags that pages carry, and which tenant has been seen with which tokens. Does not cover the keys that keep tenants' pages
apart (`pie.page.key`).
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from pie.page.key import PageKey, RootKey, tenant_root

_PURPOSE = b"pie/tenant"
_SESSION = b"pie/session"
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


def session_tag(
    model: RootKey, salt: str | None, session: str | None, secret: bytes | None = None
) -> str:
    """Return the tag of a conversation's pages; empty where it has no name.

    Tenants' conversations of one name have tags of their own. What a client calls a conversation may
    name a person, so only routers know it. See `tenant_tag` for `secret`.
    """
    if session is None:
        return ""
    named = _SESSION + tenant_root(model, salt=salt) + session.encode(errors="surrogatepass")
    hashed = blake3(named) if secret is None else blake3(named, key=secret)
    return hashed.hexdigest(_TAG_BYTES)


class TenantLedger:
    """Which tag was last seen with which page of tokens, whatever its salt. Bounded.

    A page is named by its key without a salt, cut to eight bytes: to explain a miss, not to share.

    Args:
        most_pages: How many pages are remembered, at 150 bytes each.
    """

    def __init__(self, most_pages: int = 65_536) -> None:
        self._most_pages = most_pages
        self._tags: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._tags)

    def note(self, keys: Sequence[PageKey], tag: str) -> None:
        """Learn that a tenant has computed these pages."""
        for key in keys[: self._most_pages]:
            name = key[:_TAG_BYTES]
            self._tags.pop(name, None)
            self._tags[name] = tag
        while len(self._tags) > self._most_pages:
            del self._tags[next(iter(self._tags))]

    def pages_of_others(self, keys: Sequence[PageKey], tag: str) -> int:
        """Return how many leading pages were last seen with another tag."""
        pages = 0
        for key in keys:
            if self._tags.get(key[:_TAG_BYTES], tag) == tag:
                break
            pages += 1
        return pages
