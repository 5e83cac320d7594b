"""Puts together what a router knows of the cluster.

Covers reading workers, models, index and counters into one status, and bringing gauges up to date.
Does not cover the status' shape (`pie.router.status`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pie.index.commons import Commons
from pie.index.contract import IndexMode, PlaceRecord
from pie.index.mirror import Mirror
from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PlacePolicies
from pie.index.tallies import Tally
from pie.page.events import PlaceId, PlaceKind
from pie.policies.cluster_policy import Wanted
from pie.router.census import Census
from pie.router.failures import RoutingFailures
from pie.router.gate import Gate
from pie.router.link import WorkerLink
from pie.router.memory import AnswerMemory
from pie.router.metrics import RouterMetrics
from pie.router.models import ModelCatalog
from pie.router.rates import FleetRates
from pie.router.status import ClusterStatus, PlaceLine, WantedLine, WorkerLine
from pie.router.sums import added
from pie.router.workers import WorkerSet

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Survey:
    """Looks at the parts of one router."""

    def __init__(
        self,
        *,
        mirror: Mirror,
        workers: WorkerSet,
        catalog: ModelCatalog,
        gate: Gate,
        memory: AnswerMemory,
        metrics: RouterMetrics,
        failures: RoutingFailures,
        commons: Commons,
    ) -> None:
        self._mirror = mirror
        self._workers = workers
        self._catalog = catalog
        self._gate = gate
        self._memory = memory
        self._metrics = metrics
        self._failures = failures
        self._commons = commons
        self.router = ""
        """What this router is called; known once it has started."""

    def status(
        self,
        census: Census | None = None,
        wanted: Mapping[str, Wanted] | None = None,
        policies: PolicyFollower | None = None,
    ) -> ClusterStatus:
        """Return what is known now and what places said, and bring the gauges up to date.

        Args:
            census: What places said.
            wanted: How many workers models should have.
            policies: Says which policies this router runs.
        """
        runs = PlacePolicies(0) if policies is None else policies.state
        census = census or {}
        metrics, mode = self._metrics, self._mirror.mode
        links = list(self._workers.links.values())
        rates = FleetRates(link.rates for link in links)
        usable = sum(link.usable for link in links)
        metrics.workers.set(usable)
        metrics.policy_version.set(runs.version)
        metrics.policy_refused.set(runs.refused)
        metrics.commons_degraded.set(self._commons.is_degraded)
        for known in IndexMode:
            metrics.index_mode.labels(known.value).set(known is mode)
        models = [model.name for model in self._catalog.models]
        reason = self._why_not_ready(usable)
        without = [] if reason else self._workers.without_worker()
        told = ClusterStatus(
            model=models[0] if models else "",
            index=mode.value,
            routers_together="degraded" if self._commons.is_degraded else "ok",
            workers=[
                WorkerLine(
                    place=link.record.place,
                    address=link.record.address,
                    pages=self._pages(link.record.place),
                    state=worker_state(link, census),
                    **_figures(link.record, census),
                    model=link.record.model_name,
                    running=0,  # as all that routers count, below
                    waiting=link.load.waiting if link.load else 0,
                    queued_tokens=link.queued_tokens,
                    free_pages=link.load.free_pages if link.load else link.record.total_pages,
                    total_pages=link.load.total_pages if link.load else link.record.total_pages,
                    prefill_tokens_per_s=rates.prefill_tokens_per_s(link.rates),
                )
                for link in links
            ],
            pool=[
                PlaceLine(
                    place=place,
                    address=record.address,
                    pages=self._pages(place),
                    state=_state(record, census),
                    **_figures(record, census),
                )
                for place, record in self._mirror.places().items()
                if record.kind is PlaceKind.POOL
            ],
            ready=not reason,
            reason=reason or " ".join(without),
            models=models,
            usable_workers=usable,
            policy_version=runs.version,
            policy_refused=runs.refused,
            policy_edit_refused=str((policies and policies.refused_edit) or ""),
            wanted=self._wanted(wanted or {}, links),
            remembered_answers=len(self._memory),
            remembered_bytes=self._memory.used_bytes,
        )
        return added(told, [self.tally(policies)])

    def tally(self, policies: PolicyFollower | None = None) -> Tally:
        """Return what this router has counted, and is told others."""
        runs = PlacePolicies(0) if policies is None else policies.state
        metrics, links = self._metrics, self._workers.links.values()
        running = {str(link.record.place): link.decoding for link in links if link.decoding}
        return Tally(
            self.router,
            running,
            in_flight=self._gate.inside,
            requests=sum(
                count
                for (path, _), count in metrics.by_labels(metrics.requests).items()
                if path in _GENERATING
            ),
            prompt_tokens=metrics.total(metrics.prompt_tokens),
            cached_tokens={
                tier: count for (tier,), count in metrics.by_labels(metrics.cached_tokens).items()
            },
            predicted_tokens=metrics.total(metrics.predicted_tokens),
            output_tokens=metrics.total(metrics.output_tokens),
            policy_failures=self._failures.count,
            policy_version=runs.version,
            policy_refused=runs.refused,
        )

    def _wanted(
        self, wanted: Mapping[str, Wanted], links: Sequence[WorkerLink]
    ) -> list[WantedLine]:
        # What nobody says any more is not shown either.
        gauge = self._metrics.wanted_workers
        gauge.clear()
        for model, one in wanted.items():
            gauge.labels(model).set(one.workers)
        return [
            WantedLine(
                model=model,
                workers=sum(link.usable and link.record.model_name == model for link in links),
                wanted=one.workers,
                reason=one.reason,
                policy=one.policy,
            )
            for model, one in sorted(wanted.items())
        ]

    def _why_not_ready(self, usable: int) -> str:
        if self._gate.draining:
            return "The router is stopping."
        if self._catalog.problems and not self._catalog.models:
            return self._catalog.problems[0]
        if not usable:
            if any(link.record.draining for link in self._workers.links.values()):
                return " ".join(self._workers.without_worker())
            index = "" if self._mirror.mode is IndexMode.OK else f"; index: {self._mirror.mode}"
            return f"No worker is connected{index}."
        if not self._catalog.models:
            return "The tokenizer is being loaded."
        return ""

    def _pages(self, place: PlaceId) -> dict[str, int]:
        return {tier.name.lower(): count for tier, count in self._mirror.pages(place).items()}


def _state(record: PlaceRecord, census: Census) -> str:
    """Return how a place is that the router can reach, as far as it was asked."""
    told = census.get(record.place)
    if told is None or told.record.epoch != record.epoch:
        return "ready"
    if told.report is None:
        return "silent"
    return "ready" if told.report.state == "serving" else told.report.state


def worker_state(link: WorkerLink, census: Census) -> str:
    """Return how a worker is, as far as it can be reached and was asked."""
    if link.usable:
        return _state(link.record, census)
    return "draining" if link.connected and link.record.draining else "unreachable"


def _figures(record: PlaceRecord, census: Census) -> dict[str, dict[str, int | float]]:
    """Return what a place counts, as it said."""
    told = census.get(record.place)
    if told is None or told.report is None or told.record.epoch != record.epoch:
        return {}
    return {"counters": told.report.counters, "gauges": told.report.gauges}
