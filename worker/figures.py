"""What an engine says of itself: how busy it is, and what it has counted.

Covers putting the numbers of an engine's parts together. Does not cover counting them, or the records that
they go into (`pie.worker.status`, `pie.wire.messages`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.policies.victims import counted_together
from pie.wire.messages import Load
from pie.worker.counters import Counters
from pie.worker.in_pool import PoolBelow
from pie.worker.load_choice import LoadTier
from pie.worker.offload import Offload
from pie.worker.page_table import PageTable
from pie.worker.rates import StepTimes
from pie.worker.scheduler import Scheduler
from pie.worker.state_table import StateStatus, StateTable
from pie.worker.status import WorkerStatus
from pie.worker.stores import StoreQueue
from pie.worker.suspended import SuspendedPages


@dataclass(slots=True)
class Figures:
    """The parts of one engine that have something to tell. For the step thread."""

    scheduler: Scheduler
    table: PageTable
    states: StateTable | None
    stores: StoreQueue
    times: StepTimes
    counters: Counters
    offload: Offload | None = None
    suspended: SuspendedPages | None = None

    def load(self) -> Load:
        """Return how busy the engine is."""
        # A model without attention has no pages: state slots are what it may run out of.
        room = self.table if self.table.total or self.states is None else self.states
        return Load(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            waiting_tokens=self.scheduler.waiting_tokens,
            free_pages=room.available,
            total_pages=room.total,
            prefill_tokens_per_s=self.times.prefill.per_s,
            step_ms=self.times.step_s * 1e3,
        )

    def status(self) -> WorkerStatus:
        """Return all counters and gauges."""
        pages, counters, offload = self.table.counts(), self.counters, self.offload
        suspended = self.suspended
        states = self.states.status() if self.states is not None else StateStatus()
        tables = [self.table] if self.states is None else [self.table, self.states.slots]
        seen = [table.retention.counts for table in tables]
        if offload is not None and offload.tiers is not None:
            seen.append(offload.tiers.policy_counts)
        policy = counted_together(seen)
        evicted = sum(table.evicted for table in tables)
        return WorkerStatus(
            state="serving",
            policy_failures=policy.failures,
            policy_fallbacks=policy.fallbacks,
            policy_proposals_refused=policy.refused(),
            policy_failing=policy.failing(),
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            loading=self.scheduler.loading,
            waiting_tokens=self.scheduler.waiting_tokens,
            pages=self.table.total,
            pages_free=pages.free,
            pages_writable=pages.writable,
            pages_idle=pages.idle,
            pages_in_use=pages.in_use,
            pages_loading=pages.loading,
            state_slots=states.slots,
            state_slots_free=states.free,
            state_slots_running=states.running,
            snapshots_idle=states.idle,
            snapshots_in_use=states.in_use,
            snapshots_taken=states.taken,
            snapshots_skipped=states.skipped,
            store_queue_pages=len(self.stores),
            prefill_tokens_per_s=self.times.prefill.per_s,
            load_tokens_per_s={}
            if offload is None
            else {tier.value: int(one.tokens_per_s) for tier, one in offload.choice.times.items()},
            step_ms=self.times.step_s * 1e3,
            steps=counters.steps,
            requests=counters.requests,
            finished=counters.finished,
            failed=counters.failed,
            cancelled=counters.cancelled,
            refused=counters.refused,
            preemptions=self.scheduler.preemptions,
            suspended=0 if suspended is None else suspended.suspended,
            resumed=0 if suspended is None else suspended.resumed,
            suspended_bytes=0 if suspended is None else suspended.used_bytes,
            prefill_tokens=counters.prefill_tokens,
            prefill_tokens_shared_in_flight=self.scheduler.shared_in_flight,
            decode_tokens=counters.decode_tokens,
            forks=counters.forks,
            cached_tokens_device=counters.cached_tokens_device,
            cached_tokens_host=counters.cached_tokens_loaded[LoadTier.HOST],
            cached_tokens_disk=counters.cached_tokens_loaded[LoadTier.DISK],
            cached_tokens_pool=counters.cached_tokens_loaded[LoadTier.POOL],
            pages_stored=self.stores.stored,
            pages_store_dropped=self.stores.dropped,
            pages_evicted=evicted,
            # Lower tiers count by themselves which pages they had no room for.
            pages_lost=evicted
            if offload is None or offload.is_last
            else sum(one.below.lost for one in tables if isinstance(one.below, PoolBelow)),
            pages_loaded={tier.value: n for tier, n in counters.pages_loaded.items()},
            pages_prefetched=0 if offload is None else offload.prefetched,
            loads_missed=0 if offload is None else offload.counts.missed,
            loads_overran=0 if offload is None else offload.counts.overran,
            loads_skipped=0 if offload is None else offload.choice.skipped + offload.counts.paused,
        )
