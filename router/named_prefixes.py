"""Prefixes that the policy file names, at one router: cluster policies select by them.

Covers learning which pages they have under each model that is served, with the tokenizer that the router has of
it. Does not cover which pages a prefix has (`pie.policies.prefixes`) or who is shown them
(`pie.router.conductor`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceKind
from pie.page.key import RootKey
from pie.policies.prefixes import NamedPrefix, Prefixes
from pie.router.models import ServedModel
from pie.tokens.errors import TokensError
from pie.tokens.leading import leading_tokens, system_tokens
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer

log = logging.getLogger("pie.router.named_prefixes")


async def resolve_prefixes(
    prefixes: Prefixes, records: Iterable[PlaceRecord], models: Collection[ServedModel]
) -> None:
    """Learn the pages of prefixes under the models of workers, on a thread; a model whose tokenizer is not there yet is for later.

    Args:
        prefixes: Those of the policies in force.
        records: The places that are up.
        models: The models that this router has tokenizers of.
    """
    by_digest = {one.digest: one.prompts for one in models}
    for record in records:
        root, prompts = record.model_root, by_digest.get(record.tokenizer_digest)
        if record.kind is not PlaceKind.WORKER or root is None or prompts is None:
            continue
        if len(prefixes) and not prefixes.knows(root):
            await asyncio.to_thread(
                _resolve, prefixes, root, record, prompts.tokenizer, prompts.template
            )


def _resolve(
    prefixes: Prefixes,
    root: RootKey,
    record: PlaceRecord,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> None:
    def tokens_of(prefix: NamedPrefix) -> Sequence[int] | None:
        try:
            if prefix.text is not None:
                return leading_tokens(tokenizer, prefix.text)
            if prefix.system is not None:
                return (
                    None if template is None else system_tokens(tokenizer, template, prefix.system)
                )
        except TokensError as error:
            log.warning(
                "a prefix of the policy file cannot be had with %s: %s", record.model_name, error
            )
            return None
        return prefix.tokens

    prefixes.resolve(root, record.page_tokens, tokens_of)
    # Here, because it takes a while where they are long.
    prefixes.by_name()
