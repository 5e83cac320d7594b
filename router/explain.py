"""Why a request went where it went, and why its tokens were computed: kept for a while.

Covers making the record of a request when it is over, and keeping the latest ones for all routers. Does not cover
the shape (`pie.router.api.explained`) or the reasons (`pie.router.misses`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from pie.index.contract import IndexReader
from pie.index.errors import PageIndexError
from pie.index.shelf import Latest, MemoryShelf, Shelf
from pie.index.shelf_behind import BEHIND_S, Behind
from pie.page.events import PlaceKind
from pie.page.key import PageKey, RootKey
from pie.policies.routing import WorkerView
from pie.router.api.explained import (
    Attempt,
    Candidate,
    CandidateCost,
    Delivered,
    Explained,
    ExplainedSequence,
    LoadRun,
)
from pie.router.generation import Ending, Generation, Tried
from pie.router.misses import Promise, misses
from pie.router.prefix import Prefix
from pie.router.rates import loaded_tokens
from pie.router.tenant import TenantLedger, session_tag, tenant_tag
from pie.wire.messages import Started

log = logging.getLogger("pie.router.explain")

_MOST_CANDIDATES = 64
_MOST_SEQUENCES = 64
_TOLD_S = 2 * BEHIND_S
_MOST_PAGES = 4096
"""Pages of one request that are looked for under other salts: 65,536 tokens at 16 a page."""

_encode = msgspec.json.Encoder().encode


class ExplainStore:
    """Records by request id, of this router's requests and of others'.

    Args:
        near: Keeps those of this router.
        far: Keeps those of all routers; None where there is nothing that all share.
        on_dropped: Told of records that others will not know of.
    """

    def __init__(
        self,
        near: MemoryShelf,
        far: Shelf | None = None,
        on_dropped: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._near = near
        self._far = far
        self._behind = None if far is None else Behind(far, on_dropped)

    def put(self, request_id: str, record: bytes) -> None:
        """Keep a record, encoded; others know it a moment later."""
        self._near.put_now(request_id, record)
        if self._behind is not None:
            self._behind.put(request_id, record)

    async def get(self, request_id: str) -> bytes | None:
        """Return a record as JSON; None where it is not known or no longer.

        Raises:
            PageIndexError: Another router may know it, and cannot be asked now.
        """
        record = self._near.get_now(request_id)
        if record is None and self._far is not None:
            record = await self._far.get(request_id)
            if record is None:
                # Another router may be about to tell of it.
                await asyncio.sleep(_TOLD_S)
                record = await self._far.get(request_id)
        return record

    async def latest(self, most: int) -> Latest:
        """Return what is known of the latest requests of all routers, or of this one where others cannot be asked."""
        if self._far is not None:
            try:
                return await self._far.latest(most)
            except PageIndexError as error:
                log.debug("this router's requests are listed alone: %s", error)
        return await self._near.latest(most)

    async def close(self) -> None:
        """Tell the others what they were not told yet, if that can be done soon."""
        if self._behind is not None:
            await self._behind.close()


class Explainer:
    """Makes records of requests that are over.

    Args:
        store: Keeps them.
        index: Says what others hold.
        secret: 32 bytes that all of the cluster share; keys the tags of tenants.
    """

    def __init__(
        self, store: ExplainStore, index: IndexReader, *, secret: bytes | None = None
    ) -> None:
        self.store = store
        self._index = index
        self._secret = secret
        self._ledger = TenantLedger()
        self._pages_left = 0
        """Pages of the request that is told that may still be looked for under other salts."""

    def record(
        self, request_id: str, path: str, generations: Sequence[Generation], status: int
    ) -> None:
        """Keep what became of a request that has ended, whether or not it was answered."""
        first = generations[0]
        if not any(generation.history for generation in generations):
            return
        told = generations[:_MOST_SEQUENCES]
        self._pages_left = _MOST_PAGES
        now_s = time.monotonic()
        record = Explained(
            request_id=request_id,
            arrived_unix_s=round(time.time() - now_s + first.order.arrived_s, 3),
            path=path,
            model=first.order.model.name,
            tenant_tag=self._tag(first, first.order.tenant_salt),
            session_tag=self._session_tag(first),
            status=status,
            duration_ms=_ms(now_s - first.order.arrived_s),
            sequences=[self._sequence(generation) for generation in told],
            sequences_left_out=len(generations) - len(told),
        )
        self.store.put(request_id, _encode(record))

    def _sequence(self, generation: Generation) -> ExplainedSequence:
        arrived_s, first_s = generation.order.arrived_s, generation.first_token_s
        started = generation.started
        return ExplainedSequence(
            index=generation.index,
            prompt_tokens=len(generation.order.prompt.ids),
            output_tokens=len(generation.output_ids),
            finish_reason=None if generation.finish is None else generation.finish.value,
            first_token_ms=None if first_s is None else _ms(first_s - arrived_s),
            attempts=[
                _attempt(tried, ending=_ending(generation, tried)) for tried in generation.history
            ],
            delivered=None if started is None else self._delivered(generation, started),
        )

    def _delivered(self, generation: Generation, started: Started) -> Delivered:
        load = started.load
        cached = {"device": started.cached.device} | loaded_tokens(started.cached)
        # The first token came from the first worker that was asked before there was any.
        tried = [one for one in generation.history if not one.after_tokens][-1]
        prompt_tokens = len(generation.order.prompt.ids)
        page_tokens = tried.chosen.link.record.page_tokens
        return Delivered(
            cached_tokens={tier: tokens for tier, tokens in cached.items() if tokens},
            queued_ms=_rounded(started.queued_ms),
            load_ms=_rounded(started.load_ms),
            prefill_ms=_rounded(started.prefill_ms),
            loads=[
                LoadRun(
                    tier=source.tier,
                    pages=source.pages,
                    load_ms=_rounded(source.load_ms),
                    compute_ms=_rounded(source.compute_ms),
                    was_chosen=source.chosen,
                    loaded_pages=source.loaded_pages,
                    took_ms=_rounded(source.took_ms),
                )
                for source in (() if load is None else load.sources)
            ],
            load_overran=load is not None and load.overran,
            misses=list(
                misses(prompt_tokens, page_tokens, started, self._promise(generation, tried))
            ),
        )

    def _promise(self, generation: Generation, tried: Tried) -> Promise:
        record = tried.chosen.link.record
        page_tokens = record.page_tokens
        own = other = 0
        for view in tried.chosen.views:
            if view.place == record.place:
                own = view.device_tokens + sum(view.loads.values())
            else:
                other = max(other, _own_tokens(view))
        return Promise(
            # A prompt that ends with a page is held one token short of it.
            own_pages=-(-own // page_tokens) if own else 0,
            other_pages=-(-other // page_tokens) if other else 0,
            tenant_pages=self._tenant_pages(generation, tried),
        )

    def _tenant_pages(self, generation: Generation, tried: Tried) -> int:
        """Return how many leading pages somebody else has, whom a salt keeps apart.

        After the answer, so that no client can tell from its time.
        """
        record, prefix = tried.chosen.link.record, generation.order.prefix
        assert record.model_root is not None
        root, tag = (record.model_root, record.page_tokens), self._tag(generation, prefix.salt)
        if prefix.salt is None:
            return self._ledger.pages_of_others(prefix.keys(*root), tag) if self._ledger else 0
        if generation.index != 0 and generation.leader is not None:
            return 0  # The first choice of the prompt says it.
        # Its own name is made anew for each page, which holds up streams.
        pages = min(len(prefix.ids) // record.page_tokens, self._pages_left)
        self._pages_left -= pages
        keys = Prefix(prefix.ids[: pages * record.page_tokens]).keys(*root)
        pages = max(self._ledger.pages_of_others(keys, tag), self._held_by_anybody(keys))
        self._ledger.note(keys, tag)
        return pages

    def _held_by_anybody(self, keys: Sequence[PageKey]) -> int:
        places = self._index.places()
        return max(
            (
                len(run)
                for place, run in self._index.matches(keys).items()
                if place in places and places[place].kind is PlaceKind.WORKER
            ),
            default=0,
        )

    def _tag(self, generation: Generation, salt: str | None) -> str:
        root = _root(generation)
        return "" if root is None else tenant_tag(root, salt, self._secret)

    def _session_tag(self, generation: Generation) -> str:
        root, order = _root(generation), generation.order
        if root is None:
            return ""
        return session_tag(root, order.prefix.salt, order.session, self._secret)


def _root(generation: Generation) -> RootKey | None:
    history = generation.history
    return history[0].chosen.link.record.model_root if history else None


def _ending(generation: Generation, tried: Tried) -> str:
    """Return why an attempt ended; of the last one, its answer may be known sooner."""
    is_last = tried is generation.history[-1]
    return Ending.DONE.value if is_last and generation.finish is not None else tried.ending


def _attempt(tried: Tried, *, ending: str) -> Attempt:
    chosen = tried.chosen
    costs = {cost.place: cost for cost in chosen.choice.costs}
    ranks = {place: rank for rank, place in enumerate(costs)}
    views = sorted(chosen.views, key=lambda view: ranks.get(view.place, len(ranks)))
    return Attempt(
        place=chosen.link.record.place,
        after_tokens=tried.after_tokens,
        predicted_tokens=chosen.predicted_tokens,
        ending=ending,
        is_fork=chosen.fork_of is not None,
        policy="" if chosen.fork_of is not None else chosen.policy,
        policy_failure="" if chosen.fork_of is not None else chosen.failure,
        workers=chosen.workers,
        awaited_tokens=chosen.awaited_pages * chosen.link.record.page_tokens,
        candidates=[
            Candidate(
                place=view.place,
                device_tokens=view.device_tokens,
                load_tokens=dict(view.loads),
                queued_tokens=view.queued_tokens,
                running=view.running,
                cost=None
                if (cost := costs.get(view.place)) is None
                else CandidateCost(
                    total_ms=_rounded(cost.total_ms),
                    wait_ms=_rounded(cost.wait_ms),
                    load_ms=_rounded(cost.load_ms),
                    prefill_ms=_rounded(cost.prefill_ms),
                    decode_share_ms=_rounded(cost.decode_share_ms),
                ),
            )
            for view in views[:_MOST_CANDIDATES]
        ],
    )


def _own_tokens(view: WorkerView) -> int:
    """Return what a worker has itself: the pool is everybody's."""
    return view.device_tokens + sum(tokens for tier, tokens in view.loads.items() if tier != "pool")


def _ms(seconds: float) -> float:
    return _rounded(seconds * 1e3)


def _rounded(ms: float) -> float:
    """Return milliseconds with as many digits as mean something."""
    return round(ms, 2)
