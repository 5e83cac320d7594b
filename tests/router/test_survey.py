"""How a worker is, as the router tells it."""

from __future__ import annotations

import msgspec
import pytest

from pie.index.conformance import record
from pie.router.link import WorkerLink
from pie.router.survey import worker_state


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
