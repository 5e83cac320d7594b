"""Prefixes that the policy file names, at one worker.

Covers learning which pages they have under its model, which of them prompts begin with, and bringing them near before
anybody asks: from disk and the pool to host memory. Does not cover which pages a prefix has
(`pie.policies.prefixes`) or how long they stay (`pie.policies.rule_book`).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence

from pie.index.contract import PlaceRecord
from pie.page.groups import group_keys
from pie.page.key import PageKey, packed_pages, tenant_root
from pie.policies.policy_set import PolicySet
from pie.policies.prefixes import NamedPrefix, Prefixes
from pie.pool.tier import PageId, StoredPage
from pie.tokens.errors import TokensError
from pie.tokens.leading import tokens_of
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.worker.load_choice import LoadTier
from pie.worker.lower_tiers import LowerTiers
from pie.worker.model import Model
from pie.worker.page_copies import PageNames
from pie.worker.page_pool import PagePool

log = logging.getLogger("pie.worker.named_prefixes")

_MOST_EXPECTED = 256
"""Pages of a prompt that are looked at before it is computed, 0.4 ms where all are a prefix's."""
_WAITS_S = (0.0, 1.0, 3.0, 10.0, 30.0)
"""Before each look into the pool: its nodes may start after this worker."""


def resolve_prefixes(model: Model, tokenizer: Tokenizer, policies: PolicySet) -> None:
    """Learn which pages of a worker's model each named prefix has; what cannot be is logged."""
    prefixes = policies.prefixes
    if not len(prefixes):
        return

    def tokens(prefix: NamedPrefix) -> Sequence[int] | None:
        try:
            return tokens_of(prefix, tokenizer, lambda: ChatTemplate.load(model.folder))
        except TokensError as error:
            log.warning("a prefix of the policy file cannot be had with %s: %s", model.name, error)
            return None

    prefixes.resolve(model.model_root, model.layout.page_tokens, tokens)


def expect_prefixes(
    prefixes: Prefixes, record: PlaceRecord, salt: str | None, tokens: array[int]
) -> None:
    """Learn which named prefix a prompt with a salt begins with, so that no step has to find out.

    Args:
        prefixes: Those in force.
        record: The worker's.
        salt: The prompt's.
        tokens: The prompt.
    """
    if prefixes.depth and salt is not None and record.model_root is not None:
        root = tenant_root(record.model_root, salt=salt)
        begins = tokens[: min(prefixes.depth, _MOST_EXPECTED) * record.page_tokens]
        prefixes.expect(record.model_root, root, packed_pages(begins, record.page_tokens))


class Preloading:
    """One preload at a time: that of the prefixes in force. Made and ended on an event loop.

    Args:
        tiers: Where pages are brought; nothing is done without them.
        pool: Where pages come from; nothing is done without one.
        names: What names this worker's pages.
        limit_s: Longest load of one prefix.
    """

    def __init__(
        self, tiers: LowerTiers | None, pool: PagePool | None, names: PageNames, limit_s: float
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._names = names
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def begin(self, prefixes: Prefixes) -> None:
        """Bring these prefixes near, instead of those before; from any thread."""
        self._loop.call_soon_threadsafe(self._begin, prefixes)

    def end(self) -> None:
        """Bring nothing more."""
        if self._task is not None:
            self._task.cancel()

    def _begin(self, prefixes: Prefixes) -> None:
        self.end()
        if len(prefixes) and self._tiers is not None and self._pool is not None:
            work = preload(prefixes, self._tiers, self._pool, self._names, self._limit_s)
            self._task = self._loop.create_task(work)


async def preload(
    prefixes: Prefixes, tiers: LowerTiers, pool: PagePool, names: PageNames, limit_s: float
) -> None:
    """Bring pages of named prefixes, which only the pool has, to the tiers of this worker.

    Nothing hangs on it: what does not come is loaded or computed when somebody asks. Disk and host
    memory are seen to by the tiers themselves.
    """
    for wait_s in _WAITS_S:
        await asyncio.sleep(wait_s)
        is_missing = False
        for run in prefixes.runs():
            try:
                is_missing |= not await _bring(run, tiers, pool, names, limit_s)
            except Exception:
                log.exception("a named prefix could not be had from the pool")
        if not is_missing:
            return


async def _bring(
    run: Sequence[PageKey], tiers: LowerTiers, pool: PagePool, names: PageNames, limit_s: float
) -> bool:
    """Load the pages of one prefix that are not here; say whether all are here now."""
    parts = names.layout.attention_parts
    groups = dict(zip(run, group_keys(run), strict=True))
    missing = [key for key in run if tiers.tier_of(key, parts) in (None, LoadTier.POOL)]
    if not missing:
        return True
    pages = [PageId(key, part) for key in missing for part in names.layout.parts]
    came = await pool.load(pages, groups=[groups[page.key] for page in pages], deadline_s=limit_s)
    by_key: dict[PageKey, list[StoredPage]] = {}
    for page in came:
        if page is not None and page.header.layout_id == names.layout.layout_id:
            by_key.setdefault(page.header.key, []).append(page)
    kept = 0
    for key in missing:
        got = by_key.get(key, [])
        if {page.header.part for page in got} >= set(parts):
            copied = [(page.header, page.payload) for page in got]
            kept += await asyncio.to_thread(tiers.put, copied)
    if kept:
        log.info("%d pages of named prefixes came from the pool", kept)
    return kept == len(missing)
