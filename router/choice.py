"""Which worker takes a request: what each candidate holds, and what the policy says.

Covers turning runs of held pages, prefixes in the making and loads into the views that a routing
policy is shown, and containing a policy that fails. Does not cover the policies
(`pie.policies.routing_cost`) or sending (`pie.router.dispatch`).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pie.index.contract import IndexReader
from pie.index.mirror import Mirror
from pie.page.events import PlaceId
from pie.page.key import PageKey, RootKey
from pie.policies.choice_checks import checked
from pie.policies.containing import is_own
from pie.policies.failing import failures_of, reason_of
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView, divisible
from pie.policies.routing_cost import CostRouting
from pie.policies.shortlist import Shortlisting
from pie.router.books import WorkerBooks
from pie.router.coming import Coming, longest_wait_s
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.failures import RoutingFailures
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from pie.router.rates import FleetRates
from pie.router.runs import Held, Runs
from pie.router.shortlist import MANY, Shortlister

log = logging.getLogger("pie.router.choice")

_NOTHING: Mapping[str, int] = MappingProxyType({})
_HOT_REQUESTS = 8
"""A page that so many requests share at this moment is hot."""


Link = TypeVar("Link", bound=WorkerBooks)
"""What a worker is to the caller."""


class Chosen(msgspec.Struct, Generic[Link], frozen=True):
    """A worker, and what the choice was made from."""

    link: Link
    prefix: Prefix
    """What it was chosen for."""
    keys: Sequence[PageKey]
    predicted_tokens: int
    choice: Choice
    views: Sequence[WorkerView] = ()
    """What the policy was shown."""
    workers: int = 0
    """How many workers could have taken it: of many, those are shown that can be the best."""
    awaited_pages: int = 0
    """Leading pages that the pool will have once another worker has computed them; 0 to wait for none."""
    await_s: float = 0.0
    """Longest wait for them."""
    held_pages: int = 0
    """Of its leading pages those that the worker has or loads by itself."""
    fork_of: str | None = None
    """Request id there whose prompt it shares, see `pie.wire.messages.Generate`."""
    policy: str = ""
    """What the routing policy in force is called."""
    failure: str = ""
    """Why it did not choose, so that `cost` did; empty where it chose."""


class _Seen(NamedTuple, Generic[Link]):
    """What a policy is shown, and what it was made from."""

    views: Mapping[PlaceId, tuple[WorkerView, Link]]
    held_at: Mapping[PlaceId, Held]
    keys: Sequence[PageKey]
    """Of the prompt's pages, as the first worker names them."""
    page_tokens: int
    hot_pages: int


class Chooser:
    """Chooses workers by what the index says and a policy decides.

    Args:
        index: Who holds which page.
        policy: Decides; the built-in cost route where None, and where it fails.
        metrics: Counts failures.
        awaits: Whether a worker may be told to wait for pages that another one computes.
        clock: Seconds, from anywhere, going forward.
        policy_name: What the policy is called, for events.
    """

    def __init__(
        self,
        index: IndexReader,
        policy: RoutingPolicy | None,
        metrics: RouterMetrics,
        *,
        awaits: bool = False,
        clock: Callable[[], float] = time.monotonic,
        policy_name: str = "",
    ) -> None:
        self._index = index
        self._clock = clock
        self.awaits = awaits
        self._fallback = CostRouting()
        self._policy: RoutingPolicy = policy or self._fallback
        self._is_builtin = _is_builtin(self._policy)
        self._metrics = metrics
        self._told = failures_of(self._policy)
        """What the log tells of its failures."""
        self.failures = RoutingFailures(policy_name)
        """What is told of that as events."""
        self.demand = Demand()
        """What is asked for."""
        self.conversations = Conversations()
        self._shortlister: Shortlister | None = None
        if isinstance(index, Mirror):
            self._shortlister = Shortlister(index, clock)

    def choose(
        self,
        request_id: str,
        prefix: Prefix,
        links: Sequence[Link],
        *,
        session: str | None,
    ) -> Chosen[Link]:
        """Return the worker for a prompt. `links` is never empty."""
        tokens = len(prefix.ids)
        conversation = None if session is None else (prefix.salt, session)
        latest = None if conversation is None else self.conversations.place_of(conversation)
        seen = self._few_of_many(request_id, prefix, links, session, latest)
        if seen is None:
            seen = self._all(prefix, links, latest)
        shown = tuple(view for view, _ in seen.views.values())
        request = _request_view(request_id, tokens, seen.keys, seen.page_tokens, session)
        request = msgspec.structs.replace(request, hot_tokens=seen.hot_pages * seen.page_tokens)
        choice, failure = self._decide(request, shown)
        chosen, link = seen.views[choice.place]
        root = link.record.model_root
        assert root is not None
        keys, now_s = prefix.keys(root, link.record.page_tokens), self._clock()
        self.demand.used(keys, now_s)
        if conversation is not None:
            self.conversations.began(conversation, choice.place, root, keys, now_s)
        awaited = chosen.awaited_tokens(tokens)
        compute_ms = awaited * 1000 / divisible(chosen.prefill_tokens_per_s)
        return Chosen(
            link,
            prefix,
            keys,
            min(chosen.device_tokens + sum(chosen.loads.values()), tokens - 1),
            choice,
            shown,
            workers=len(links),
            awaited_pages=chosen.coming_tokens // link.record.page_tokens if awaited else 0,
            await_s=longest_wait_s(chosen.coming_ms, compute_ms),
            held_pages=seen.held_at[choice.place].pages,
            policy=self.failures.policy,
            failure=failure,
        )

    def _all(self, prefix: Prefix, links: Sequence[Link], latest: PlaceId | None) -> _Seen[Link]:
        """Look at each worker."""
        runs_by_root: dict[tuple[RootKey, int], Runs] = {}
        tokens = len(prefix.ids)
        views: dict[PlaceId, tuple[WorkerView, Link]] = {}
        rates = FleetRates(link.rates for link in links)
        held_at: dict[PlaceId, Held] = {}
        for link in links:
            record = link.record
            assert record.model_root is not None
            model = (record.model_root, record.page_tokens)
            if model not in runs_by_root:
                runs_by_root[model] = Runs(self._index, prefix.keys(*model))
            held_at[record.place] = runs_by_root[model].held(link)
        if self.awaits:
            for runs in runs_by_root.values():
                runs.find_coming(rates)
        for link in links:
            record = link.record
            assert record.model_root is not None
            place = record.place
            views[place] = (
                view(
                    link,
                    held_at[place],
                    tokens,
                    rates,
                    has_session=place == latest,
                    coming=runs_by_root[record.model_root, record.page_tokens].coming(place),
                ),
                link,
            )
        (_, page_tokens), runs = next(iter(runs_by_root.items()))
        return _Seen(views, held_at, runs.keys, page_tokens, _hot_pages(runs.keys, links))

    def _few_of_many(
        self,
        request_id: str,
        prefix: Prefix,
        links: Sequence[Link],
        session: str | None,
        latest: PlaceId | None,
    ) -> _Seen[Link] | None:
        """Look at those alone that could be chosen; None where that is not to be told, or all are few."""
        policy = self._policy
        if (
            self._shortlister is None
            or len(links) < MANY
            or not self._is_builtin
            or not isinstance(policy, Shortlisting)
        ):
            return None
        tokens, record = len(prefix.ids), links[0].record
        assert record.model_root is not None
        page_tokens = record.page_tokens
        keys = prefix.keys(record.model_root, page_tokens)
        found = self._shortlister.of(
            policy,
            _request_view(request_id, tokens, keys, page_tokens, session),
            links,
            latest=latest,
            awaits=self.awaits,
            hot_requests=_HOT_REQUESTS,
        )
        if found is None:
            return None
        views: dict[PlaceId, tuple[WorkerView, Link]] = {}
        held_at: dict[PlaceId, Held] = {}
        for row, held in found.workers:
            link = links[row]
            place = link.record.place
            held_at[place] = held
            has_session = place == latest
            views[place] = view(link, held, tokens, found.rates, has_session=has_session), link
        return _Seen(views, held_at, keys, page_tokens, found.hot_pages)

    def replace_policy(self, policy: RoutingPolicy, name: str = "") -> None:
        """Let another policy decide from now on; conversations keep their workers."""
        self._policy, self._is_builtin = policy, _is_builtin(policy)
        self.failures.begin(name)
        self._told = failures_of(policy)

    def _decide(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[Choice, str]:
        """Ask the policy; where it fails, the built-in answers, and why is told too."""
        failure = ""
        if self._policy is not self._fallback:
            try:
                if self._is_builtin:
                    return self._policy.choose(request, workers), ""
                # Keys are a list that others read too.
                shown = msgspec.structs.replace(request, keys=tuple(request.keys))
                places = {worker.place for worker in workers}
                return checked(self._policy.choose(shown, workers), places, len(workers)), ""
            # A user's policy may raise anything.
            except BaseException as error:
                if not is_own(error):
                    raise
                self._metrics.policy_failures.inc()
                failure = reason_of(error)
                self.failures.note(failure)
                self._told.tell(
                    log, self._policy, "choose", error, instead="`cost` chooses instead", says=False
                )
        return self._fallback.choose(request, workers), failure


def _request_view(
    request_id: str, tokens: int, keys: Sequence[PageKey], page_tokens: int, session: str | None
) -> RequestView:
    return RequestView(request_id, tokens, page_tokens, session, keys)


def _is_builtin(policy: RoutingPolicy) -> bool:
    """Say whether a policy's choices need no check: it is Pie's own, and no shell of a user's."""
    return type(policy) in BUILTIN[PolicyKind.ROUTING].values()


def _hot_pages(keys: Sequence[PageKey], links: Sequence[WorkerBooks]) -> int:
    """Return how many leading pages at least `_HOT_REQUESTS` requests share now."""
    busy = [link.inflight_keys for link in links if link.inflight_keys]
    # Who has a page has those before it, so that the first one that is not hot is found by bisection.
    return bisect.bisect_left(
        keys,
        True,
        key=lambda key: sum(inflight.get(key, 0) for inflight in busy) < _HOT_REQUESTS,
    )


def view(
    link: WorkerBooks,
    held: Held,
    prompt_tokens: int,
    rates: FleetRates,
    *,
    has_session: bool = False,
    coming: Coming | None = None,
) -> WorkerView:
    """Return what a policy is shown of a worker."""
    page_tokens = link.record.page_tokens
    tiers = {*held.load_pages, "pool"} if coming is not None else held.load_pages
    ahead = link.ahead()
    return WorkerView(
        place=link.record.place,
        device_tokens=min(held.device_pages * page_tokens, prompt_tokens),
        loads=MappingProxyType(
            {tier: pages * page_tokens for tier, pages in held.load_pages.items()}
        )
        if held.load_pages
        else _NOTHING,
        queued_tokens=ahead.queued_tokens,
        waiting=ahead.waiting,
        running=ahead.decoding,
        prefill_tokens_per_s=rates.prefill_tokens_per_s(link.rates),
        load_tokens_per_s=MappingProxyType(
            {tier: rates.load_tokens_per_s(link.rates, tier) for tier in tiers}
        )
        if tiers
        else _NOTHING,
        decode_step_ms=link.decode_step_ms,
        free_share=link.free_share,
        has_session=has_session,
        coming_tokens=0 if coming is None else coming.pages * page_tokens,
        coming_ms=0.0 if coming is None else coming.ms,
    )
