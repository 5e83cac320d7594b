"""How workers are, as the router tells it."""

from __future__ import annotations

import msgspec
import pytest

from pie.index.conformance import record
from pie.page.events import PlaceId
from pie.router.link import WorkerLink
from pie.router.survey import worker_state
from pie.router.workers import WorkerSet


@pytest.mark.parametrize(
    ("connected", "draining", "state"),
    [
        (True, False, "ready"),
        (True, True, "draining"),
        (False, True, "unreachable"),
        (False, False, "unreachable"),
    ],
)
def test_a_worker_that_is_drained_is_told_from_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, connected: bool, draining: bool, state: str
) -> None:
    monkeypatch.setattr(WorkerLink, "connected", connected)
    link = WorkerLink(msgspec.structs.replace(record("w0"), draining=draining))
    assert worker_state(link, {}) == state


def workers(**models: str) -> WorkerSet:
    """Return workers by what each is: `ready`, `draining` or `lost`, and its model after a colon."""
    links: dict[PlaceId, WorkerLink] = {}
    for name, told in models.items():
        state, _, model = told.partition(":")
        made = msgspec.structs.replace(
            record(name), model_name=model or "m", draining=state == "draining"
        )
        links[PlaceId(name)] = WorkerLink(made)
    found = WorkerSet(8)
    found._links.update(links)
    return found


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({}, "No worker for m is there."),
        ({"a": "lost"}, "No worker for m is there."),
        ({"a": "draining:n"}, "No worker for m is there."),
        (
            {"b": "draining", "a": "draining", "c": "ready:n"},
            "All workers for m are draining (a, b): they take no requests.",
        ),
        (
            {"a": "draining", "b": "lost"},
            "No worker for m takes requests: of 2 workers 1 is draining (a) and 1 is unreachable (b).",
        ),
        (
            {f"w{at:02}": "draining" for at in range(10)},
            (
                "All workers for m are draining (w00, w01, w02, w03, w04, w05, w06, w07 and 2 more): "
                "they take no requests."
            ),
        ),
    ],
)
def test_why_no_worker_takes_requests(there: dict[str, str], told: str) -> None:
    assert workers(**there).none_takes("m") == told


def test_why_the_worker_that_was_asked_for_takes_no_requests() -> None:
    there = workers(a="draining", b="lost")
    told = [there.none_takes("m", PlaceId(place)) for place in "abc"]
    assert told == [
        "Worker a takes no requests: it is draining.",
        "Worker b takes no requests.",
        "Worker c takes no requests.",
    ]


def test_each_model_without_a_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerLink, "connected", property(lambda link: link.record.place != "c"))
    known = workers(a="draining:m", b="ready:n", c="lost:o", d="draining:n")
    assert known.without_worker() == [known.none_takes("m"), known.none_takes("o")]
