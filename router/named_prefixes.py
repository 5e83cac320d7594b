"""Prefixes that the policy file names, at one router: cluster policies select by them.

Covers learning which pages they have under each model that is served, with the tokenizer that the router has of
it, and which are too short to have any. Does not cover which pages a prefix has (`pie.policies.prefixes`) or who is
shown them (`pie.router.conductor`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId, PlaceKind
from pie.page.key import RootKey
from pie.policies.errors import Problem
from pie.policies.policy_set import PolicySet
from pie.policies.prefix_warnings import short_prefixes
from pie.policies.prefixes import NamedPrefix, Prefixes
from pie.router.models import ServedModel
from pie.router.prompt import PromptMaker
from pie.tokens.errors import TokensError
from pie.tokens.leading import tokens_of

log = logging.getLogger("pie.router.named_prefixes")


class NamedPrefixes:
    """Turns named prefixes into tokens, with the models that workers serve.

    Args:
        places: The places that are up.
        models: The models that this router has tokenizers of.
    """

    def __init__(
        self,
        places: Callable[[], Mapping[PlaceId, PlaceRecord]],
        models: Callable[[], Collection[ServedModel]],
    ) -> None:
        self._places = places
        self._models = models

    async def resolve(self, prefixes: Prefixes) -> None:
        """Learn their pages under the models of workers, on a thread; a model whose tokenizer is not there yet is for later."""
        if not len(prefixes):
            return
        for root, record, prompts in self._served():
            if not prefixes.knows(root):
                await asyncio.to_thread(_resolve, prefixes, root, record, prompts)

    async def short(self, policies: PolicySet) -> list[Problem]:
        """Return a warning for each prefix that fills no page of a model that is served, found on a thread."""
        served = self._served() if len(policies.prefixes) else ()
        models = {(one.model_name, one.page_tokens, prompts) for _, one, prompts in served}

        def look() -> list[Problem]:
            return [
                problem
                for name, page_tokens, prompts in sorted(models, key=lambda model: model[:2])
                for problem in short_prefixes(
                    policies, page_tokens, _tokens_with(prompts, name), model=name
                )
            ]

        return await asyncio.to_thread(look) if models else []

    def _served(self) -> Iterator[tuple[RootKey, PlaceRecord, PromptMaker]]:
        """Yield the models of workers, as far as there is a tokenizer."""
        by_digest = {one.digest: one.prompts for one in self._models()}
        for record in list(self._places().values()):
            root, prompts = record.model_root, by_digest.get(record.tokenizer_digest)
            if record.kind is PlaceKind.WORKER and root is not None and prompts is not None:
                yield root, record, prompts


def _resolve(prefixes: Prefixes, root: RootKey, record: PlaceRecord, prompts: PromptMaker) -> None:
    prefixes.resolve(root, record.page_tokens, _tokens_with(prompts, record.model_name))
    # Here, because it takes a while where they are long.
    prefixes.by_name()


def _tokens_with(prompts: PromptMaker, model: str) -> Callable[[NamedPrefix], Sequence[int] | None]:
    """Return what says a prefix's tokens, and nothing of one that cannot be had, which is logged."""

    def tokens(prefix: NamedPrefix) -> Sequence[int] | None:
        try:
            return tokens_of(prefix, prompts.tokenizer, lambda: prompts.template)
        except TokensError as error:
            log.warning("a prefix of the policy file cannot be had with %s: %s", model, error)
            return None

    return tokens
