"""A signal waits for what must not be interrupted, and only for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pie.cluster.stopping import Stop, ask_to_stop, stopping, uninterrupted


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Leave no signal to the next test."""
    yield
    stopping()


def test_a_signal_ends_at_once_what_may_be_interrupted() -> None:
    with pytest.raises(Stop):
        ask_to_stop()


def test_a_signal_waits_for_what_must_not_be_interrupted() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                ask_to_stop()
            done.append("the rest")

    with pytest.raises(Stop):
        work()
    assert done == ["the rest"]


def test_a_signal_that_was_swallowed_is_raised_again_until_it_is_heard() -> None:
    with contextlib.suppress(Stop):
        ask_to_stop()
    with pytest.raises(Stop), uninterrupted():
        pass
    stopping()
    with uninterrupted():
        pass


def test_a_signal_is_not_lost_by_an_error() -> None:
    def work() -> None:
        with uninterrupted():
            ask_to_stop()
            raise ValueError

    with pytest.raises(Stop):
        work()
