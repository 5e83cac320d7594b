"""Prefixes that a policy file names, and which pages they are.

    prefixes:
      support:
        system: You are the support desk of the harbour.

Covers what a prefix may be given as, and the keys of its pages under each model. Does not cover turning
text into tokens, which only workers can (`pie.worker.named_prefixes`), or what rules do with the pages
(`pie.policies.rule_book`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from pie.page.key import PageKey, RootKey, page_keys
from pie.policies.retention import PageView

PREFIX_NAME = re.compile(r"[A-Za-z_][\w-]{0,62}")
"""What a prefix may be called; no key in hexadecimal is so short."""
_KEY_BYTES = 32
_MOST_TOKENS = 1 << 20
_MOST_MODELS = 64
"""Models whose pages are told by tokens; those of more are not."""

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
    """Under all models that are known."""
    last: PageKey | None = None
    """Its last page, where the file gives that alone: those before it are not known."""


class Prefixes:
    """Which named prefix a page belongs to. Thread-safe.

    Pages with a salt belong to none: a file that named a tenant's text would tell its salt.
    """

    def __init__(self, named: Mapping[str, NamedPrefix]) -> None:
        self.named = named
        self._lock = threading.Lock()
        self._names: dict[bytes, frozenset[str]] = {}
        self._models: set[bytes] = set()
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
        """Learn the keys of all prefixes under one model.

        Args:
            root: The model's.
            page_tokens: Tokens in one of its pages.
            tokens_of: A prefix's tokens; None where they are not known.
        """
        with self._lock:
            if root in self._models:
                return
            self._models.add(bytes(root))
            for name, prefix in self.named.items():
                tokens = None if prefix.key is not None else tokens_of(prefix)
                if tokens:
                    run = page_keys(root, tokens, page_tokens)
                    self._runs.append(run)
                    self._add(name, run)

    def names_of(self, page: PageView) -> frozenset[str]:
        """Return the prefixes that a page belongs to.

        A model that nobody has resolved is resolved by the tokens that the file gives.
        """
        root = page.model_root
        is_new = root and page.page_tokens and root not in self._models
        if is_new and len(self._models) < _MOST_MODELS:
            self.resolve(root, page.page_tokens, lambda prefix: prefix.tokens)
        return self._names.get(page.key, frozenset())

    def runs(self) -> list[list[PageKey]]:
        """Return the pages of each prefix that is known by its tokens, in order."""
        with self._lock:
            return list(self._runs)

    def knows(self, root: RootKey) -> bool:
        """Say whether prefixes were resolved under a model, or too many models are known."""
        return root in self._models or len(self._models) >= _MOST_MODELS

    def by_name(self) -> Mapping[str, NamedPages]:
        """Return the pages of each prefix; read-only, since policies are shown it."""
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

    def _add(self, name: str, keys: Sequence[PageKey]) -> None:
        self._shown = None
        for key in keys:
            self._names[key] = self._names.get(key, frozenset()) | {name}


NO_PREFIXES = Prefixes({})
"""What a file without `prefixes` names."""
