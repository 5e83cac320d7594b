"""`pie serve` ends cleanly whatever is halted or killed, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import LONG_S, Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("command"), pytest.mark.timeout(300)]


class Run:
    """A cluster of one worker, with a temporary folder of its own."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.temporary = temporary
        self.serving = Serving(folder, {"PIE_CLUSTER__WORKERS": "1", "TMPDIR": str(temporary)})
        self._family: set[psutil.Process] = set()

    def family(self) -> set[psutil.Process]:
        """Return every process that was seen below it so far."""
        if self.serving.process.poll() is None:
            self._family |= set(psutil.Process(self.serving.process.pid).children(recursive=True))
        return self._family

    def find(self, name: str) -> psutil.Process:
        """Return one of its processes by a part of its command line."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # It has ended.
                if name in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"there is no {name}: {self.family()}")

    def left(self) -> list[object]:
        """Return what it has left behind."""
        living = [p for p in self.family() if p.is_running() and p.status() != "zombie"]
        return [*living, *self.temporary.rglob("*")]

    def wait_until_nothing_is_left(self) -> None:
        """Wait for its guard."""
        deadline_s = time.monotonic() + LONG_S
        while left := self.left():
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path, temporary: Path) -> Iterator[Run]:
    """A cluster that is up."""
    one = Run(tmp_path, temporary)
    try:
        one.serving.wait_until_said("Ctrl-C stops it")
        one.family()
        yield one
    finally:
        one.serving.stop(signal.SIGKILL)
        one.wait_until_nothing_is_left()


def test_parts_that_are_halted_do_not_keep_it_from_stopping(run: Run) -> None:
    for part in ("ray::PoolActor", "ray::WorkerActor", "valkey-server"):
        run.find(part).suspend()
    assert run.serving.stop(signal.SIGTERM) == 0, run.serving.text
    assert "Traceback" not in run.serving.text
    assert not run.left()


def test_a_ray_that_is_halted_does_not_either(run: Run) -> None:
    run.find("/raylet").suspend()
    assert run.serving.stop(signal.SIGTERM) == 0, run.serving.text
    assert not run.left()


def test_a_guard_that_was_killed_is_replaced_and_without_ray_it_ends_with_a_sentence(
    run: Run,
) -> None:
    guard = run.find("pie.cluster.guard")
    guard.kill()
    run.serving.wait_until_said("guard     starting again")
    assert run.find("pie.cluster.guard") != guard
    run.find("/gcs_server").kill()
    assert run.serving.process.wait(LONG_S) == 2, run.serving.text
    assert run.serving.text.rstrip().splitlines()[-1].startswith("pie: Ray's gcs_server ended")
    assert not run.left()


@pytest.mark.parametrize("delay_s", [0.7, 1.5])
def test_a_signal_at_any_moment_of_rays_start_ends_it_cleanly(
    tmp_path: Path, temporary: Path, delay_s: float
) -> None:
    run = Run(tmp_path, temporary)
    try:
        run.serving.wait_until_said("ray       starting")
        time.sleep(delay_s)
        run.family()
    finally:
        code = run.serving.stop(signal.SIGTERM)
    assert code == 0, run.serving.text
    assert not run.left()


def test_two_clusters_run_side_by_side_and_ctrl_c_or_a_kill_leaves_nothing_of_either(
    run: Run, tmp_path: Path
) -> None:
    port = httpx.URL(run.serving.url).port
    second = tmp_path / "second"
    second.mkdir()
    taken = Serving(second, {"PIE_CLUSTER__WORKERS": "1", "PIE_ROUTER__PORT": str(port)})
    assert taken.process.wait(LONG_S) == 2
    taken.stop()
    assert f"127.0.0.1:{port} cannot be listened on" in taken.text
    with tempfile.TemporaryDirectory(prefix="pie", dir="/tmp") as name:
        other = Run(second, Path(name))
        try:
            other.serving.wait_until_said("Ctrl-C stops it")
            other.family()
            assert list(other.temporary.iterdir())
            for one in (run.serving, other.serving):
                body = {"model": "smollm2", "prompt": "Hello", "max_tokens": 2}
                answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=LONG_S)
                assert answer.is_success, answer.text
        finally:
            code = other.serving.stop(signal.SIGINT)
        assert code == 0, other.serving.text
        other.wait_until_nothing_is_left()
    assert httpx.get(f"{run.serving.url}/ready").is_success
    assert run.serving.stop(signal.SIGKILL) == -signal.SIGKILL
    run.wait_until_nothing_is_left()
