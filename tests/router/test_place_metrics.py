"""What places said becomes metrics with the right names, types and labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.router.census import Told
from pie.router.place_metrics import PlaceMetrics
from pie.wire.messages import StatusReport


def told(place: str, report: StatusReport | None) -> tuple[PlaceId, Told]:
    record = PlaceRecord(PlaceId(place), Epoch(1), PlaceKind.WORKER, "ipc:///nowhere")
    return record.place, Told(record, report)


def text(*each: tuple[PlaceId, Told]) -> list[str]:
    registry, metrics = CollectorRegistry(), PlaceMetrics()
    registry.register(metrics)
    metrics.show(dict(each))
    return [line for line in generate_latest(registry).decode().splitlines() if "HELP" not in line]


def says(
    place: str, counters: dict[str, int | float], gauges: dict[str, int | float]
) -> StatusReport:
    return StatusReport("id", PlaceId(place), Epoch(1), "serving", counters, gauges)


def test_one_metric_has_a_sample_for_each_place() -> None:
    assert text(
        told("a", says("a", {"steps": 3}, {"running": 1})),
        told("b", says("b", {"steps": 4}, {"running": 0})),
    ) == [
        "# TYPE pie_worker_up gauge",
        'pie_worker_up{place="a"} 1.0',
        'pie_worker_up{place="b"} 1.0',
        "# TYPE pie_worker_steps_total counter",
        'pie_worker_steps_total{place="a"} 3.0',
        'pie_worker_steps_total{place="b"} 4.0',
        "# TYPE pie_worker_running gauge",
        'pie_worker_running{place="a"} 1.0',
        'pie_worker_running{place="b"} 0.0',
    ]


def test_several_numbers_of_one_name_are_told_apart_by_a_label() -> None:
    shown = text(told("a", says("a", {"bad.at_load": 1, "bad.at_store": 2}, {})))
    assert shown[-3:] == [
        "# TYPE pie_worker_bad_total counter",
        'pie_worker_bad_total{kind="at_load",place="a"} 1.0',
        'pie_worker_bad_total{kind="at_store",place="a"} 2.0',
    ]


def test_a_silent_place_is_down_and_has_nothing_else() -> None:
    assert text(told("a", None)) == ["# TYPE pie_worker_up gauge", 'pie_worker_up{place="a"} 0.0']


def test_a_name_that_is_none_is_left_out() -> None:
    shown = text(told("a", says("a", {"": 1, "a b": 2, "x\ny": 3, "good": 4}, {})))
    assert shown[-1] == 'pie_worker_good_total{place="a"} 4.0'
    assert len(shown) == 4
