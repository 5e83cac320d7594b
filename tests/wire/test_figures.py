"""A status travels flat, each number as a counter or as a gauge."""

from __future__ import annotations

import msgspec

from pie.page.events import Epoch, PlaceId
from pie.wire.figures import Counter, Gauge, Kind, kinds, report
from pie.wire.messages import StatusReport


class Status(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "n"
    running: Gauge[int] = 2
    rate: Gauge[float] = 0.5
    pages: Gauge[dict[str, int]] = msgspec.field(default_factory=lambda: {"ram": 3})
    steps: Counter[int] = 7
    bad: Counter[dict[str, int]] = msgspec.field(
        default_factory=lambda: {"at_load": 1, "at_store": 0}
    )


def test_marked_fields_are_reported_flat_and_by_kind() -> None:
    assert report("id", PlaceId("w0"), Epoch(4), "serving", Status()) == StatusReport(
        "id",
        PlaceId("w0"),
        Epoch(4),
        "serving",
        counters={"steps": 7, "bad.at_load": 1, "bad.at_store": 0},
        gauges={"running": 2, "rate": 0.5, "pages.ram": 3},
    )


def test_what_is_not_marked_is_not_reported() -> None:
    assert set(kinds(Status)) == {"running", "rate", "pages", "steps", "bad"}
    assert kinds(Status)["bad"] is Kind.COUNTER
