"""Prefixes that a policy file names, and which pages they are.

    prefixes:
      support:
        system: You are the support desk of the harbour.

Covers what a prefix may be given as, and which pages are its own under each model, whichever tenant's. Does not cover
turning text into tokens, which workers and routers can (`pie.worker.named_prefixes`, `pie.router.named_prefixes`), or
what rules do with the pages (`pie.policies.rule_book`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pie.page.key import PageKey, RootKey, keys_after, page_keys
from pie.page.key_table import Keys
from pie.policies.prefix_tree import FoundPages, PrefixPage, tree_of
from pie.policies.retention import PageView

PREFIX_NAME = re.compile(r"[A-Za-z_][\w-]{0,62}")
"""What a prefix may be called; no key in hexadecimal is so short."""
_KEY_BYTES = 32
_MOST_TOKENS = 1 << 20
_MOST_MODELS = 64
"""Models whose pages are told by tokens; those of more are not."""
_LEARNT_AT_ONCE = 65_536
"""Pages whose keys are copied together."""
_NONE: frozenset[str] = frozenset()

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(min_length=1, max_length=_MOST_TOKENS)
]


class NamedPrefix:
    """What prompts begin with, given as exactly one of these.

    Args:
        text: As `/v1/completions` takes it.
        system: The system message of conversations, which the chat template puts in front.
        tokens: Token ids.
        key: The key of the last page, in hexadecimal: that page, which those before it do not leave ahead of.
    """

    def __init__(
        self,
        *,
        text: str | None = None,
        system: str | None = None,
        tokens: TokenIds | None = None,
        key: str | None = None,
    ) -> None:
        if sum(given is not None for given in (text, system, tokens, key)) != 1:
            raise ValueError("give exactly one of `text`, `system`, `tokens` and `key`")
        self.text = text
        self.system = system
        self.tokens = None if tokens is None else tuple(tokens)
        self.key = None if key is None else parse_key("key", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedPrefix) and vars(self) == vars(other)

    def begins_with(self, other: NamedPrefix) -> bool:
        """Say whether all pages of another prefix certainly belong to this one too."""
        if self.tokens is None or other.tokens is None:
            return self == other
        return self.tokens[: len(other.tokens)] == other.tokens

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{len(self.tokens)} tokens"
        if self.key is not None:
            return f"key {self.key.hex()}"
        kind, text = ("text", self.text) if self.text is not None else ("system", self.system)
        return f"{kind} of {len(text or '')} characters"

    def __hash__(self) -> int:
        return hash((self.text, self.system, self.tokens, self.key))


class PrefixPlace(NamedTuple):
    """Where a policy file says what prompts begin with."""

    line: int
    column: int
    path: str


def parse_key(name: str, text: str) -> PageKey:
    """Return a page's key from hexadecimal digits.

    Raises:
        ValueError: It is none; `name` is what the sentence calls it.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a page's key in hexadecimal") from None
    if len(key) != _KEY_BYTES:
        raise ValueError(f"`{name}` must be {2 * _KEY_BYTES} hexadecimal digits")
    return PageKey(key)


def name_or_key(prefix: str | None) -> tuple[str | None, PageKey | None]:
    """Return the name of a prefix, or else the key of its last page, as a selector gives it.

    Raises:
        ValueError: It is neither.
    """
    if prefix is None or PREFIX_NAME.fullmatch(prefix):
        return prefix, None
    return None, parse_key("prefix", prefix)


@dataclass(frozen=True, slots=True)
class NamedPages:
    """The pages of a named prefix, as far as they are known."""

    pages: frozenset[PageKey]
    """Under all models that are known, without a salt; `GroupView.prefixes` tells of those with one too."""
    last: PageKey | None = None
    """Its last page, where the file gives that alone: those before it are not known."""


class LeadingPages(NamedTuple):
    """Pages that are here, one in a line: of each sequence those at its beginning."""

    keys: Keys
    parents: Keys
    """The keys before them, or their roots."""
    indexes: npt.NDArray[np.int32]
    """Their places in their sequences."""


class Prefixes:
    """Which named prefix a page belongs to, whichever tenant's it is. Thread-safe.

    Pages under a model's own root are known from the start. Those with a salt are told along their sequence from its
    first page on (`pie.policies.prefix_tree`), so that no salt has to be known and none is learned.
    """

    def __init__(self, named: Mapping[str, NamedPrefix]) -> None:
        self.named = named
        self.depth = 0
        """Pages of the longest prefix under the models that are known; of those with a `key` alone nothing is known."""
        self._lock = threading.Lock()
        self._names: dict[bytes, frozenset[str]] = {}
        self._trees: dict[bytes, PrefixPage] = {}
        self._trees_of_tokens: dict[int, PrefixPage] = {}
        """By tokens in a page: of models whose tokenizer is not at hand."""
        self._salted = FoundPages()
        self._runs: list[list[PageKey]] = []
        self._shown: Mapping[str, NamedPages] | None = None
        for name, prefix in named.items():
            if prefix.key is not None:
                self._add(name, [prefix.key])

    def __len__(self) -> int:
        return len(self.named)

    def resolve(
        self,
        root: RootKey,
        page_tokens: int,
        tokens_of: Callable[[NamedPrefix], Sequence[int] | None],
    ) -> None:
        """Learn the pages of all prefixes under one model.

        Args:
            root: The model's.
            page_tokens: Tokens in one of its pages.
            tokens_of: A prefix's tokens; None where they are not known.
        """
        with self._lock:
            if root not in self._trees:
                tokens = self._tokens(tokens_of)
                self._take(root, page_tokens, tokens, self._tree_of(tokens, page_tokens))

    def meet(self, root: RootKey, page_tokens: int) -> None:
        """Learn that there is a model: one that nobody has resolved is by the tokens that the file gives."""
        if root in self._trees or not (root and page_tokens) or len(self._trees) >= _MOST_MODELS:
            return
        with self._lock:
            if root in self._trees:
                return
            tokens = self._tokens(lambda prefix: prefix.tokens)
            tree = self._trees_of_tokens.get(page_tokens)
            if tree is None:
                tree = self._trees_of_tokens[page_tokens] = self._tree_of(tokens, page_tokens)
            self._take(root, page_tokens, tokens, tree)

    def names_of(self, page: PageView) -> frozenset[str]:
        """Return the prefixes that a page belongs to.

        One with a salt belongs to them where the page before it was asked for before, or is the first.
        """
        self.meet(page.model_root, page.page_tokens)
        names = self._names.get(page.key, _NONE)
        if not self.depth:
            return names
        found = self._salted.get(page.key)
        if found is None:
            if page.index:
                before = self._salted.get(page.parent)
            elif page.parent == page.model_root:
                before = None
            else:
                before = self._trees.get(page.model_root)
            if before is not None:
                found = self._salted.find(before, page.parent, page.key)
        return names if found is None else names | found.names

    def names_along(
        self, model_root: RootKey, root: RootKey, pages: Sequence[PageKey]
    ) -> frozenset[str]:
        """Return the prefixes that the last of a sequence's pages belongs to.

        Args:
            model_root: The model's root.
            root: Their own: its tenant's.
            pages: All pages of the sequence up to that one, at least one.
        """
        names, before = self.names_of_key(pages[-1]), self._trees.get(model_root)
        if before is None or root == model_root or len(pages) > self.depth:
            return names
        if self._salted.get(pages[-1]) is not None:
            return names
        parent: bytes = root
        for key in pages:
            found = self._salted.find(before, parent, key)
            if found is None:
                return names
            before, parent = found, key
        return names | before.names

    def names_of_key(self, key: PageKey) -> frozenset[str]:
        """Return the prefixes that a page belongs to, one with a salt where that was told before."""
        names, found = self._names.get(key, _NONE), self._salted.get(key)
        return names if found is None else names | found.names

    def expect(self, model_root: RootKey, root: RootKey, contents: Iterable[bytes]) -> None:
        """Learn whose pages a sequence begins with, before `names_of` asks for them in a hurry.

        Args:
            model_root: The model's root.
            root: The sequence's own: its tenant's.
            contents: The packed tokens of its pages, from the first one on.
        """
        before, parent = self._trees.get(model_root), root
        for content in contents:
            if before is None or not before.pages:
                return
            (key,) = keys_after(parent, [content])
            # The page after the last of a prefix is asked for too, and so is what may come there.
            before = self._salted.get(key) or self._salted.find(before, parent, key)
            parent = RootKey(key)

    def learn(self, each: Sequence[LeadingPages]) -> None:
        """Learn of pages that are here already, in whichever order they come, of any model that is known."""
        if not each:
            return
        keys = np.concatenate([some.keys for some in each])
        parents = np.concatenate([some.parents for some in each])
        indexes = np.concatenate([some.indexes for some in each])
        lines = np.flatnonzero(indexes < self.depth)
        lines = lines[np.argsort(indexes[lines], kind="stable")]
        with self._lock:
            firsts = [tree for tree in set(self._trees.values()) if tree.pages]
        for start in range(0, len(lines), _LEARNT_AT_ONCE):
            some = lines[start : start + _LEARNT_AT_ONCE]
            rows = zip(keys[some], parents[some], indexes[some].tolist(), strict=True)
            for key, parent, index in rows:
                self._learn(PageKey(key.tobytes()), parent.tobytes(), index, firsts)

    def _learn(self, key: PageKey, parent: bytes, index: int, firsts: Iterable[PrefixPage]) -> None:
        if index:
            page = self._salted.get(parent)
            firsts = [] if page is None else [page]
        elif parent in self._trees:
            return
        for before in firsts:
            if self._salted.find(before, parent, key) is not None:
                return

    def runs(self) -> list[list[PageKey]]:
        """Return the pages of each prefix that is known by its tokens, without a salt, in order."""
        with self._lock:
            return list(self._runs)

    def knows(self, root: RootKey) -> bool:
        """Say whether prefixes were resolved under a model, or too many models are known."""
        return root in self._trees or len(self._trees) >= _MOST_MODELS

    def by_name(self) -> Mapping[str, NamedPages]:
        """Return the pages of each prefix, without a salt; read-only, since policies are shown it."""
        with self._lock:
            if self._shown is None:
                found: dict[str, list[PageKey]] = {name: [] for name in self.named}
                for key, names in self._names.items():
                    for name in names:
                        found[name].append(PageKey(key))
                self._shown = MappingProxyType(
                    {
                        name: NamedPages(frozenset(keys), self.named[name].key)
                        for name, keys in found.items()
                    }
                )
            return self._shown

    def _tokens(
        self, tokens_of: Callable[[NamedPrefix], Sequence[int] | None]
    ) -> dict[str, Sequence[int]]:
        found = {
            name: tokens_of(prefix) for name, prefix in self.named.items() if prefix.key is None
        }
        return {name: tokens for name, tokens in found.items() if tokens}

    def _tree_of(self, tokens: Mapping[str, Sequence[int]], page_tokens: int) -> PrefixPage:
        tree, depth = tree_of(tokens, page_tokens)
        self.depth = max(self.depth, depth)
        return tree

    def _take(
        self,
        root: RootKey,
        page_tokens: int,
        tokens: Mapping[str, Sequence[int]],
        tree: PrefixPage,
    ) -> None:
        """Take on a model, whose pages without a salt are these."""
        for name, of_prefix in tokens.items():
            run = page_keys(root, of_prefix, page_tokens)
            self._runs.append(run)
            self._add(name, run)
        # Last, because others look without the lock whether it is there.
        self._trees[bytes(root)] = tree

    def _add(self, name: str, keys: Sequence[PageKey]) -> None:
        self._shown = None
        for key in keys:
            self._names[key] = self._names.get(key, frozenset()) | {name}


NO_PREFIXES = Prefixes({})
"""What a file without `prefixes` names."""
