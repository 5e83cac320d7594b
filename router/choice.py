"""Which worker takes a request: what each candidate holds, and what the policy says.

Covers turning runs of held pages, prefixes in the making and loads into the views that a routing
policy is shown, and containing a policy that fails. Does not cover the policies
(`pie.policies.routing_cost`) or sending (`pie.router.dispatch`).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from pie.index.contract import IndexReader, PlaceRecord
from pie.index.runs import MaskRun
from pie.page.events import Part, PartMask, PlaceId, PlaceKind, Tier, part_tiers
from pie.page.key import PageKey, RootKey
from pie.page.layout import usable_segments
from pie.policies.choice_checks import checked
from pie.policies.containing import is_own
from pie.policies.failing import failures_of, reason_of
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView, divisible
from pie.policies.routing_cost import CostRouting
from pie.router.books import WorkerBooks
from pie.router.coming import Coming, for_worker, in_making, longest_wait_s
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.failures import RoutingFailures
from pie.router.metrics import RouterMetrics
from pie.router.prefix import Prefix
from pie.router.rates import FleetRates

log = logging.getLogger("pie.router.choice")

_Segments = Sequence[tuple[PartMask, int]]
_NEAREST = ((Tier.HOST, "host"), (Tier.DISK, "disk"))
_DEVICE = 1 << Tier.DEVICE
_NOTHING: Mapping[str, int] = MappingProxyType({})
_HOT_REQUESTS = 8
"""A page that so many requests share at this moment is hot."""
_HOP_PAGES = 64
"""Pages asked for where a run goes on at another pool node: two of the groups that nodes keep."""


class Held(msgspec.Struct, frozen=True):
    """How many of a prompt's leading pages a worker could use, by where they are."""

    device_pages: int = 0
    load_pages: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def pages(self) -> int:
        """All of them."""
        return self.device_pages + sum(self.load_pages.values())


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

    def choose(
        self,
        request_id: str,
        prefix: Prefix,
        links: Sequence[Link],
        *,
        session: str | None,
    ) -> Chosen[Link]:
        """Return the worker for a prompt. `links` is never empty."""
        runs_by_root: dict[tuple[RootKey, int], Runs] = {}
        tokens = len(prefix.ids)
        views: dict[PlaceId, tuple[WorkerView, Link]] = {}
        conversation = None if session is None else (prefix.salt, session)
        latest = None if conversation is None else self.conversations.place_of(conversation)
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
        shown = tuple(view for view, _ in views.values())
        choice, failure = self._decide(
            RequestView(
                request_id,
                tokens,
                page_tokens,
                session,
                runs.keys,
                _hot_pages(runs.keys, links) * page_tokens,
            ),
            shown,
        )
        chosen, link = views[choice.place]
        root = link.record.model_root
        assert root is not None
        keys, now_s = runs_by_root[root, link.record.page_tokens].keys, self._clock()
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
            awaited_pages=chosen.coming_tokens // link.record.page_tokens if awaited else 0,
            await_s=longest_wait_s(chosen.coming_ms, compute_ms),
            held_pages=held_at[choice.place].pages,
            policy=self.failures.policy,
            failure=failure,
        )

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


def pool_nodes(places: Mapping[PlaceId, PlaceRecord]) -> Collection[PlaceId]:
    """Return which places are pool nodes."""
    return {place for place, record in places.items() if record.kind is PlaceKind.POOL}


class Runs:
    """Who holds the pages of one prompt.

    Args:
        index: Who has which page.
        keys: The prompt's pages.
        nodes: The pool nodes that are up; looked for where None.
    """

    def __init__(
        self,
        index: IndexReader,
        keys: Sequence[PageKey],
        nodes: Collection[PlaceId] | None = None,
    ) -> None:
        self.keys = keys
        self._index = index
        self._pool_nodes = pool_nodes(index.places()) if nodes is None else nodes
        self._runs = index.matches(keys) if keys else {}
        self._pooled: dict[int, _Segments] = {}
        self._held_by_kind: dict[tuple[object, ...], Held] = {}
        self._making: list[tuple[WorkerBooks, int]] = []
        self._coming: Sequence[Coming] = ()

    def held(self, link: WorkerBooks) -> Held:
        """Return what `link`'s worker could use."""
        record = link.record
        own = self._runs.get(record.place)
        held = self._pooled_for(record) if own is None else self._held_with(own, record)
        making = link.pages_in_making(self.keys)
        if making:
            self._making.append((link, making))
            return in_the_making(held, making)
        return held

    def _pooled_for(self, record: PlaceRecord) -> Held:
        """Return what workers could use that have nothing of the prompt: of a thousand, most."""
        kind = (record.parts, record.window_tokens, record.page_tokens)
        held = self._held_by_kind.get(kind)
        if held is None:
            held = self._held_by_kind[kind] = held_pages((), self._pool(0), record)
        return held

    def _held_with(self, own: Sequence[PartMask], record: PlaceRecord) -> Held:
        pool = self._pool(0)
        if self._pool_nodes and sum(pages for _, pages in pool) < len(own):
            # The pool may go on where the worker ends, without what the worker has.
            pool = self._pool(len(own))
        return held_pages(_segments(own), pool, record)

    def find_coming(self, rates: FleetRates) -> None:
        """Find out what is in the making, once all workers have been asked for, and when it is there."""
        if self._pool_nodes:
            found = (in_making(link, self.keys, pages, rates) for link, pages in self._making)
            self._coming = [one for one in found if one is not None]

    def coming(self, place: PlaceId) -> Coming | None:
        """Return what a worker could wait for."""
        return for_worker(place, self._coming) if self._coming else None

    def at_workers(self) -> dict[PlaceId, int]:
        """Return how many leading pages each worker has itself that has any, in any tier."""
        records = self._index.places()
        found = {}
        # Of a thousand workers few have any of it.
        for place, run in self._runs.items():
            record = records.get(place)
            if record is None or record.kind is not PlaceKind.WORKER or not record.parts:
                continue
            if pages := held_pages(_segments(run), (), record).pages:
                found[place] = pages
        return found

    def pooled(self) -> int:
        """Return how many leading pages pool nodes have together."""
        return sum(pages for _, pages in self._pool(0))

    def _pool(self, start: int) -> _Segments:
        """Return the run that pool nodes hold together from page `start` on; before it they hold nothing.

        Groups of pages are spread over nodes, so that a run goes on at another node where it ends.
        """
        known = self._pooled.get(start)
        if known is not None:
            return known
        segments: list[tuple[PartMask, int]] = [(PartMask(0), start)] if start else []
        at, asked = start, 0
        while at < len(self.keys) and self._pool_nodes:
            if at:
                # All that is left, at every hop, would be quadratic.
                asked = max(2 * asked, _HOP_PAGES)
                runs = self._index.matches(self.keys[at : at + asked])
            else:
                runs, asked = self._runs, len(self.keys)
            nodes = (run for place, run in runs.items() if place in self._pool_nodes)
            best = max(nodes, key=len, default=None)
            if not best:
                break
            segments += _segments(best)
            at += len(best)
            asked = asked if len(best) == asked else 0
        self._pooled[start] = segments
        return segments


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


def held_pages(own: _Segments, pool: _Segments, record: PlaceRecord) -> Held:
    """Return how many leading pages a worker could use that holds `own` and may load from `pool`."""
    if not own and not pool:
        return Held(0, {})
    parts = tuple(Part(part) for part in record.parts)
    merged = list(_merge(own, pool))
    main = Part.FULL if Part.FULL in parts else parts[0]
    if parts == (Part.FULL,):
        usable = 0
        for a, b, pages in merged:
            if not part_tiers(PartMask(a | b), Part.FULL):
                break
            usable += pages
    else:
        usable = usable_segments(
            ((PartMask(a | b), pages) for a, b, pages in merged),
            parts=parts,
            window_tokens=record.window_tokens,
            page_tokens=record.page_tokens,
        )
    if record.has_states_alone:
        return _held_snapshots([(a, pages) for a, _, pages in merged], usable)
    device = 0
    loads: dict[str, int] = {}
    for a, _, pages in merged:
        pages = min(pages, usable)  # noqa: PLW2901
        if not pages:
            break
        usable -= pages
        tiers = part_tiers(a, main)
        if tiers & _DEVICE:
            device += pages
            continue
        tier = next((name for tier, name in _NEAREST if tiers & (1 << tier)), "pool")
        loads[tier] = loads.get(tier, 0) + pages
    return Held(device, loads)


def _held_snapshots(own: _Segments, usable: int) -> Held:
    """Return `held_pages` of a model without attention, of whose snapshots the last is used.

    What is usable and not on the device comes from where the last one is, the pages before with it.
    """
    at = device = tiers = 0
    for mask, pages in own:
        at += pages
        if at <= usable:
            tiers = part_tiers(mask, Part.STATE)
            device = at if tiers & _DEVICE else device
    if device == usable:
        return Held(device, {})
    tier = next((name for tier, name in _NEAREST if tiers & (1 << tier)), "pool")
    return Held(device, {tier: usable - device})


def in_the_making(held: Held, pages: int) -> Held:
    """Return `held` where the first `pages` pages are being computed or loaded already."""
    if pages <= held.device_pages:
        return held
    loads: dict[str, int] = {}
    gone = pages - held.device_pages
    for tier, count in held.load_pages.items():
        left = max(0, count - gone)
        gone -= count - left
        if left:
            loads[tier] = left
    return Held(pages, loads)


def _segments(run: Sequence[PartMask]) -> _Segments:
    """Return a run compressed."""
    if isinstance(run, MaskRun):
        return run.segments
    return [(mask, 1) for mask in run]


def _merge(first: _Segments, second: _Segments) -> Iterator[tuple[PartMask, PartMask, int]]:
    """Yield both runs side by side; where one has ended, its mask is 0."""
    left, right = _spent(first), _spent(second)
    a, a_pages = next(left)
    b, b_pages = next(right)
    none = PartMask(0)
    while a_pages or b_pages:
        pages = min(a_pages or b_pages, b_pages or a_pages)
        yield (a if a_pages else none), (b if b_pages else none), pages
        if a_pages:
            a_pages -= pages
            if not a_pages:
                a, a_pages = next(left)
        if b_pages:
            b_pages -= pages
            if not b_pages:
                b, b_pages = next(right)


def _spent(segments: Iterable[tuple[PartMask, int]]) -> Iterator[tuple[PartMask, int]]:
    """Yield segments, then empty ones for ever."""
    yield from segments
    while True:
        yield PartMask(0), 0
