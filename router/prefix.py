"""The tokens that a worker is sent, packed, and the keys of their pages: each made once.

Covers sharing them among the choices of a prompt and between attempts. Does not cover who holds
the pages (`pie.router.choice`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

from pie.page.key import PageKey, RootKey, pack_tokens, page_keys, tenant_root


class Prefix:
    """Token ids under one salt. Use it on one event loop only.

    Args:
        ids: The tokens; nobody changes them.
        salt: The tenant's; None where there is none.
        begins: A prefix of `ids` under the same salt, whose keys need not be made again.
    """

    def __init__(
        self, ids: array[int], salt: str | None = None, *, begins: Prefix | None = None
    ) -> None:
        self.ids = ids
        self.salt = salt
        self._begins = begins
        self._keys: dict[tuple[RootKey, int], Sequence[PageKey]] = {}

    @cached_property
    def packed(self) -> bytes:
        """The ids as they travel."""
        return pack_tokens(self.ids)

    def keys(self, model: RootKey, page_tokens: int) -> Sequence[PageKey]:
        """Return the keys of the full pages at workers of one model root."""
        root = (model, page_tokens)
        keys = self._keys.get(root)
        if keys is None:
            keys = self._keys[root] = self._made(model, page_tokens)
        return keys

    def longer(self, ids: array[int]) -> Prefix:
        """Return this with more tokens behind it."""
        return Prefix(self.ids + ids, self.salt, begins=self)

    def _made(self, model: RootKey, page_tokens: int) -> Sequence[PageKey]:
        known = [] if self._begins is None else list(self._begins.keys(model, page_tokens))
        parent = known[-1] if known else tenant_root(model, salt=self.salt)
        return known + page_keys(parent, self.ids[len(known) * page_tokens :], page_tokens)
