"""`pie serve` as a person starts it, for tests to talk to, to kill and to stop."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

PIE = [sys.executable, "-m", "pie.cluster"]
START_TIMEOUT_S = 240.0
LONG_S = 180.0
"""Longest wait for what takes seconds at most; only a failing test waits so long."""

SMALL: Mapping[str, str] = {
    "PIE_ROUTER__PORT": "0",
    "PIE_MODEL__DEVICE_KV_BUDGET": "96MiB",
    "PIE_POOL__RAM_BUDGET": "256MiB",
    "PIE_CLUSTER__DRAIN_TIMEOUT_S": "5",
}


def environment(folder: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment for `pie`: a small cluster, its files under `folder`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIE_") or "TEST" in k}
    return {
        **clean,
        **SMALL,
        "PIE_INDEX__DATA_DIR": str(folder / "index"),
        "PIE_CLUSTER__LOG_DIR": str(folder / "logs"),
        **(settings or {}),
    }


class Serving:
    """One `pie serve`.

    Args:
        folder: Its working directory, and where its logs go.
        settings: Environment variables beside those of `SMALL`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [*PIE, "serve"],
            cwd=folder,
            env=environment(folder, settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All that it printed so far."""
        return "".join(self.output)

    @property
    def url(self) -> str:
        """The router's address."""
        found = re.search(r"serves .* at (http://\S+)/v1", self.text)
        assert found, self.text
        return found[1]

    def wait_until_said(self, words: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it prints `words`."""
        deadline_s = time.monotonic() + timeout_s
        while words not in self.text:
            assert self.process.poll() is None, f"it ended: {self.text}{self.logs()}"
            assert time.monotonic() < deadline_s, f"no {words!r} in time: {self.text}{self.logs()}"
            time.sleep(0.05)

    def wait_until_ready(self, workers: int | None = None, timeout_s: float = LONG_S) -> None:
        """Wait until the router answers, and knows so many ready workers."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/status", timeout=20)
                # A router knows its workers before it has their tokenizer.
                if httpx.get(f"{self.url}/ready", timeout=20).is_success and answer.is_success:
                    ready = [w for w in answer.json()["workers"] if w["state"] == "ready"]
                    if len(ready) >= (workers or 1):
                        return
            time.sleep(0.1)
        raise AssertionError(f"not ready in time: {self.text}{self.logs()}")

    def pids(self, kind: str) -> list[int]:
        """Return the processes of an actor class, such as `RouterActor`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = []
        for child in children:
            with contextlib.suppress(psutil.Error):
                if f"ray::{kind}" in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def index_pid(self) -> int:
        """Return the process of the embedded index server."""
        for child in psutil.Process(self.process.pid).children():
            if "valkey-server" in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError("no index server")

    def wait_until_status(self, name: str, value: object, timeout_s: float = LONG_S) -> None:
        """Wait until the router's status has `value` under `name`."""
        deadline_s = time.monotonic() + timeout_s
        while (seen := httpx.get(f"{self.url}/status", timeout=LONG_S).json()[name]) != value:
            assert time.monotonic() < deadline_s, f"{name} is {seen}: {self.text}{self.logs()}"
            time.sleep(0.1)

    def wait_until_kept(self, timeout_s: float = LONG_S) -> None:
        """Wait until all pages of the pool are in its bucket."""
        deadline_s = time.monotonic() + timeout_s
        seen: list[tuple[float, ...]] = []
        names = ("pages.pool_ram", "pages.pool_object", "object_buffered_bytes")
        while True:
            gauges = httpx.get(f"{self.url}/status", timeout=LONG_S).json()["pool"][0]["gauges"]
            seen.append(tuple(gauges.get(name, 0) for name in names))
            # Twice the same: workers send what they have made a moment later.
            if len(seen) > 3 and len(set(seen[-3:])) == 1 and 0 < seen[-1][0] <= seen[-1][1]:
                assert seen[-1][2] == 0
                return
            assert time.monotonic() < deadline_s, f"{names} were {seen[-5:]}: {self.logs()}"
            time.sleep(0.3)

    def stored(self) -> int:
        """Return how many pages the pool has been given."""
        nodes = httpx.get(f"{self.url}/status", timeout=LONG_S).json()["pool"]
        return sum(int(node["counters"].get("stored", 0)) for node in nodes)

    def wait_until_stored(self, count: int, timeout_s: float = LONG_S) -> None:
        """Wait until the pool has been given so many pages: workers send them behind their answers."""
        deadline_s = time.monotonic() + timeout_s
        seen: list[int] = []
        # Until no more come, too: some may be of earlier requests.
        while len(seen) < 4 or len(set(seen[-4:])) > 1 or seen[-1] < count:
            assert time.monotonic() < deadline_s, f"{seen} of {count}: {self.text}{self.logs()}"
            seen.append(self.stored())
            time.sleep(0.3)

    def logs(self) -> str:
        """Return the parts' log files."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "".join(f"\n--- {file.name}\n{file.read_text()[-4000:]}" for file in files)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = LONG_S) -> int:
        """Send a signal and return the exit code."""
        family: list[psutil.Process] = []
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(number)
        try:
            self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            # What a signal ends at once, the guard cleans up a little later.
            psutil.wait_procs(family, timeout=60)
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            self.output.extend(iter(self.process.stdout.readline, ""))
