"""A service's host says how its start went, whatever it raised."""

from __future__ import annotations

import asyncio
import time

import pytest

from pie.cluster.host import Host, Phase, Progress, Service


class ExpectedError(Exception):
    """One that a person can mend."""


class Quiet:
    """A service that does nothing."""

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


class PassingError(ExpectedError): ...


def host(raised: BaseException | None) -> Host:
    async def start(_progress: Progress) -> tuple[Service, str]:
        if raised is not None:
            raise raised
        return Quiet(), "here"

    made = Host("one", start, expected=(ExpectedError,), passing=(PassingError,))
    deadline_s = time.monotonic() + 60
    while made.state.phase is Phase.STARTING:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return made


def test_a_service_that_started_has_its_address() -> None:
    one = host(None)
    assert (one.state.phase, one.state.detail) == (Phase.READY, "here")
    one.stop(0)
    assert one.state.phase is Phase.CLOSED


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_start_raises_is_a_failure(error: BaseException) -> None:
    one = host(error)
    assert one.state.phase is Phase.FAILED
    assert type(error).__name__ in one.state.detail
    assert not one.state.expected
    one.stop(0)


def test_an_expected_error_speaks_for_itself() -> None:
    one = host(ExpectedError("mend it"))
    assert (one.state.detail, one.state.expected) == ("mend it", True)
    one.stop(0)


def test_what_may_be_over_at_another_start_ends_no_cluster() -> None:
    one = host(PassingError("it takes long"))
    assert (one.state.detail, one.state.expected) == ("it takes long", False)
    one.stop(0)
