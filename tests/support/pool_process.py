"""`pie pool` as a person starts it, for tests to talk to, to halt, to kill and to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from pie.index.settings import IndexSettings
from tests.support.serving import PIE

SECRET = bytes(range(32))
START_S = 120.0


def secret_file(folder: Path) -> Path:
    """Return a file that has `SECRET`."""
    file = folder / "secret"
    file.write_bytes(SECRET)
    return file


class PoolProcess:
    """One `pie pool`.

    Args:
        folder: Where its log and its secret lie.
        index: Redis and key prefix.
        name: The node's name.
        settings: Environment variables, such as `PIE_POOL__RAM_BUDGET`.
    """

    def __init__(
        self,
        folder: Path,
        index: IndexSettings,
        name: str,
        *,
        listen: str = "curve://127.0.0.1:0",
        **settings: object,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        chosen = {
            "PIE_POOL__RAM_BUDGET": "64MiB",
            "PIE_POOL__LISTEN": listen,
            "PIE_INDEX__URL": index.url,
            "PIE_INDEX__KEY_PREFIX": index.key_prefix,
            "PIE_INDEX__TTL_S": index.ttl_s,
            "PIE_INDEX__POLL_S": index.poll_s,
            "PIE_CLUSTER__SECRET_FILE": secret_file(folder),
            "PIE_CLUSTER__DRAIN_TIMEOUT_S": 2,
            **settings,
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PIE_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*PIE, "pool", "--name", name],
                cwd=folder,
                env=clean | {name: str(value) for name, value in chosen.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    def wait_until_said(self, words: str, limit_s: float = START_S) -> str:
        """Wait until it has printed what a pattern says, and return its group."""
        until_s = time.monotonic() + limit_s
        while (found := re.search(words, self.text)) is None:
            assert self.process.poll() is None, f"it ended: {self.text}"
            assert time.monotonic() < until_s, f"no {words!r} in time: {self.text}"
            time.sleep(0.02)
        return found[found.lastindex or 0]

    def wait_until_up(self) -> str:
        """Wait until it serves, and return its address."""
        return self.wait_until_said(r"serves at (\S+);")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, limit_s: float = START_S) -> int:
        """Wait until it ends, and return its exit code."""
        return self.process.wait(limit_s)

    def close(self) -> None:
        """Kill it, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(START_S)
