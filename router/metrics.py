"""What the router counts, for `/metrics`.

Covers names and meanings. Does not cover what workers and pool nodes count
(`pie.router.place_metrics`), which is in the same registry.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pie.router.place_metrics import PlaceMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_OVERHEAD = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 1)


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count, gauge, spread = self._count, self._gauge, self._spread
        self.requests = count("requests", "HTTP requests, by path and status.", "path", "status")
        self.in_flight = gauge("in_flight", "Sequences in flight.")
        self.first_token_s = spread(
            "first_token_seconds", "From a request to its first token.", _SECONDS
        )
        self.duration_s = spread("duration_seconds", "From a request to its last token.", _SECONDS)
        self.overhead_s = spread("dispatch_seconds", "From a request to its dispatch.", _OVERHEAD)
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of sequences begun.")
        self.output_tokens = count("output_tokens", "Tokens generated.")
        self.cached_tokens = count(
            "cached_tokens", "Prompt tokens not computed, by where they came from.", "tier"
        )
        self.predicted_tokens = count(
            "predicted_tokens", "Prompt tokens that the index said were held."
        )
        self.retries = count(
            "retries", "Attempts that failed before a first token, by reason.", "reason"
        )
        self.resumes = count(
            "resumes", "Attempts that failed after it and were resumed, by reason.", "reason"
        )
        self.other_models = count(
            "other_models", "Resumes at a worker with other weights or another dtype."
        )
        self.disconnects = count("disconnects", "Clients that hung up.")
        self.policy_failures = count(
            "policy_failures", "Choices that the routing policy failed to make."
        )
        self.cluster_events = count(
            "cluster_policy_events",
            "What cluster policies did and what became of it, while this router asked them.",
            "policy",
            "action",
        )
        self.trace_dropped = count(
            "trace_dropped", "Rows of the request trace that were not written."
        )
        self.workers = gauge("workers", "Workers that take requests.")
        self.policy_version = gauge(
            "policy_version", "Version of the policies that this router runs; 0 for none applied."
        )
        self.policy_refused = gauge(
            "policy_refused", "Version that this router could not take on; 0 for none."
        )
        self.wanted_workers = gauge(
            "wanted_workers", "Workers that a model should have, as a policy hints.", "model"
        )
        self.places = PlaceMetrics()
        self.registry.register(self.places)
        self.untold = count("untold_requests", "Explanations that other routers will not know of.")
        self.commons_degraded = gauge(
            "routers_together_degraded",
            "1 while Redis does not answer for what routers share, and this one has its share alone.",
        )
        self.index_mode = gauge("index_mode", "1 for the mode that the index is in.", "mode")

    def total(self, counter: Counter) -> int:
        """Return a counter's sum over its labels."""
        samples = (sample for metric in counter.collect() for sample in metric.samples)
        return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))

    def by_labels(self, counter: Counter) -> dict[tuple[str, ...], int]:
        """Return a counter's values by its labels' values, in order."""
        return {
            tuple(sample.labels.values()): int(sample.value)
            for metric in counter.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"pie_router_{name}", told, labels, registry=self.registry)

    def _gauge(self, name: str, told: str, *labels: str) -> Gauge:
        return Gauge(f"pie_router_{name}", told, labels, registry=self.registry)

    def _spread(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"pie_router_{name}", told, registry=self.registry, buckets=buckets)
