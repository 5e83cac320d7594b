"""What the pages of a program's working set are called.

Covers its tokens and the keys of its full pages, as long as they are a function of the tokens alone
(DESIGN's purity rule). Does not cover which slots are alive (`pie.worker.programs.slots`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey, RootKey, page_keys
from pie.worker.page_table import FrozenPage


class Naming:
    """Names of one sequence's pages; none from `spoil` on.

    Args:
        root: Names the model, and the tenant where there is a salt.
        page_tokens: Tokens in a page.
        tenant_tag: Of its frozen pages.
        session_tag: The same.
    """

    def __init__(
        self, root: RootKey, *, page_tokens: int, tenant_tag: str = "", session_tag: str = ""
    ) -> None:
        self.is_pure = True
        self.tokens = array("I")
        self.keys: list[PageKey] = []
        self._root = root
        self._page_tokens = page_tokens
        self._tenant_tag = tenant_tag
        self._session_tag = session_tag

    def twin(self) -> Naming:
        """Return the same names, for a sequence that goes on by itself."""
        twin = Naming(
            self._root,
            page_tokens=self._page_tokens,
            tenant_tag=self._tenant_tag,
            session_tag=self._session_tag,
        )
        twin.is_pure = self.is_pure
        twin.tokens, twin.keys = self.tokens[:], self.keys[:]
        return twin

    def upcoming(self, tokens: Sequence[int]) -> list[PageKey]:
        """Return keys of the pages that `tokens` would fill, from a page's beginning on."""
        return page_keys(self._parent(len(self.keys)), tokens, self._page_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Learn which tokens follow."""
        if self.is_pure:
            self.tokens.extend(tokens)

    def extend(self) -> None:
        """Name the pages that are full and have no key yet."""
        if self.is_pure:
            done = len(self.keys)
            tail = self.tokens[done * self._page_tokens :]
            self.keys.extend(page_keys(self._parent(done), tail, self._page_tokens))

    def cut(self, start: int) -> None:
        """Forget tokens from `start` on, none of which lies in a full page."""
        del self.tokens[start:]

    def mark(self) -> Callable[[], None]:
        """Return what makes all names what they are now, whatever is added, cut or spoiled until then."""
        is_pure, tokens, keys, count = self.is_pure, self.tokens, self.keys, len(self.keys)
        named = count * self._page_tokens
        tail = tokens[named:]

        def put_back() -> None:
            self.is_pure, self.tokens, self.keys = is_pure, tokens, keys
            del keys[count:], tokens[named:]
            tokens.extend(tail)

        return put_back

    def spoil(self) -> None:
        """Give no page a key from now on."""
        self.is_pure = False
        self.tokens, self.keys = array("I"), []

    def page(self, index: int) -> FrozenPage:
        """Return what names the page at `index`."""
        parent = bytes(self._parent(index))
        return FrozenPage(self.keys[index], parent, index, self._tenant_tag, self._session_tag)

    def group(self, index: int) -> PageKey:
        """Return the first key of the group that the page at `index` is in."""
        return self.keys[index - index % GROUP_PAGES]

    def _parent(self, index: int) -> PageKey | RootKey:
        return self.keys[index - 1] if index else self._root
