"""Time that a test lets pass, for what is given up when it takes too long."""

from __future__ import annotations

import threading

import pytest

from pie.worker import load_job, offload, stalls, storing


class Clock:
    """Stands still until a test, or what it slows down, lets time pass."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def stopped(monkeypatch: pytest.MonkeyPatch, least_load_s: float = 0.1) -> Clock:
    """Stop the time of loads and stores, and give a load `least_load_s` of it at least."""
    clock = Clock()
    for module in (load_job, offload, stalls, storing):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", least_load_s)
    return clock


class Hanging:
    """A sleep that lasts until a test ends it; loads find it one of `seconds`, longer than any waits for."""

    def __init__(self, clock: Clock, seconds: float = 60.0) -> None:
        self.over = threading.Event()
        self.on = False
        self._clock = clock
        self._seconds = seconds

    def __call__(self, _seconds: float) -> None:
        if self.on:
            if threading.current_thread().name.startswith("pie-load"):
                self._clock.sleep(self._seconds)
            assert self.over.wait(120)
