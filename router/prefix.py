"""The tokens that a worker is sent, packed, and the keys of their pages: each made once.

Covers sharing them among the choices of a prompt and between attempts. Does not cover who holds
the pages (`pie.router.choice`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property

from pie.page.key import PageKey, RootKey, pack_tokens, page_keys, tenant_root

_LONG_TOKENS = 16_384
_AT_ONCE_PAGES = 1_024
"""Keys made in one go, at 0.6 µs each and more for large pages."""


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

    @property
    def is_long(self) -> bool:
        """Whether its keys take so long that they are prepared."""
        return len(self.ids) > _LONG_TOKENS

    async def prepare(self, models: Iterable[tuple[RootKey, int]]) -> bool:
        """Make keys that `keys` would make in one go, with turns for others in between; return whether there were any.

        A quarter of a million tokens take 10 ms in pages of 16.
        """
        others_had_turns = False
        for model, page_tokens in set(models):
            if not self.is_long or (model, page_tokens) in self._keys:
                continue
            others_had_turns = True
            if self._begins is not None:
                await self._begins.prepare([(model, page_tokens)])
            keys, parent = self._begun(model, page_tokens)
            for at in range(len(keys) * page_tokens, len(self.ids), _AT_ONCE_PAGES * page_tokens):
                some = self.ids[at : at + _AT_ONCE_PAGES * page_tokens]
                keys += page_keys(parent, some, page_tokens)
                parent = keys[-1] if keys else parent
                await asyncio.sleep(0)
            self._keys.setdefault((model, page_tokens), keys)
        return others_had_turns

    def longer(self, ids: array[int]) -> Prefix:
        """Return this with more tokens behind it."""
        return Prefix(self.ids + ids, self.salt, begins=self)

    def _made(self, model: RootKey, page_tokens: int) -> Sequence[PageKey]:
        known, parent = self._begun(model, page_tokens)
        return known + page_keys(parent, self.ids[len(known) * page_tokens :], page_tokens)

    def _begun(self, model: RootKey, page_tokens: int) -> tuple[list[PageKey], RootKey | PageKey]:
        """Return the keys that are known, and what the next one follows."""
        known = [] if self._begins is None else list(self._begins.keys(model, page_tokens))
        return known, known[-1] if known else tenant_root(model, salt=self.salt)
