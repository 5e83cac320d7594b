"""What workers and pool nodes count, for `/metrics`.

Covers names and types of their metrics. Does not cover asking them (`pie.router.census`) or the
router's own metrics (`pie.router.metrics`).

A place's numbers come with the scrape that shows them: one that was silent has only an `up` of 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pie.page.events import PlaceKind
from pie.router.census import Census

_KINDS = {PlaceKind.WORKER: "worker", PlaceKind.POOL: "pool"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class PlaceMetrics(Collector):
    """Shows the latest census to a registry."""

    def __init__(self) -> None:
        self._census: Census = {}

    def show(self, census: Census) -> None:
        """Show this census from now on."""
        self._census = census

    def collect(self) -> Iterable[Metric]:
        """Return a metric for every name, with a sample for each place."""
        families: dict[tuple[str, str], Metric] = {}
        for place, told in self._census.items():
            kind = _KINDS[told.record.kind]
            up = _family(families, f"pie_{kind}_up", "gauge", "1 where it said what it counts.")
            up.add_sample(up.name, {"place": place}, float(told.report is not None))
            if told.report is not None:
                _add(families, kind, place, "counter", told.report.counters)
                _add(families, kind, place, "gauge", told.report.gauges)
        return families.values()


def _add(
    families: dict[tuple[str, str], Metric],
    kind: str,
    place: str,
    type_: str,
    figures: Mapping[str, float],
) -> None:
    """Add the figures of one place; `bad_pages.at_load` is `bad_pages` with a label `kind`."""
    for figure, value in figures.items():
        name, _, part = figure.partition(".")
        if not _NAME.fullmatch(name):
            continue
        told = f"{name.replace('_', ' ').capitalize()}, as the {kind} counts."
        family = _family(families, f"pie_{kind}_{name}", type_, told)
        labels = {"place": place} | ({"kind": part} if part else {})
        family.add_sample(
            f"{family.name}_total" if type_ == "counter" else family.name, labels, value
        )


def _family(families: dict[tuple[str, str], Metric], name: str, type_: str, told: str) -> Metric:
    return families.setdefault((name, type_), Metric(name, told, type_))
