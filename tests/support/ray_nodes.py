"""A Ray of several nodes on this machine, whose processes a test may kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_PROGRAM = """
import sys
from ray.cluster_utils import Cluster
port, nodes = sys.argv[1:]
small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
head = small | {"gcs_server_port": int(port)}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(int(nodes) - 1):
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class RayNodes:
    """A Ray cluster; `address` is what a driver connects to.

    Args:
        nodes: How many.
        log: File for what its starter says on standard error.
    """

    def __init__(self, nodes: int, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # Where Ray says which cluster is the current one, among others; short, because sockets lie below it.
        self._folder = Path(tempfile.mkdtemp(prefix="pie", dir="/tmp"))
        (self._folder / "ray").mkdir()
        own = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._folder),
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(port), str(nodes)],
                env=os.environ | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.kill()
        assert self.address, log.read_text()

    def pids(self, kind: str) -> list[int]:
        """Return the processes of an actor class."""
        found = []
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                if f"ray::{kind}" in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def kill(self) -> None:
        """End all of its processes at once, its own and every actor's."""
        self._end(self._family())

    def stop(self) -> None:
        """End it in good order."""
        family = self._family()
        try:
            self._process.communicate(timeout=60)
        finally:
            self._end(family)

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _end(self, family: list[psutil.Process]) -> None:
        self._process.kill()
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(nodes: int, folder: Path) -> Iterator[RayNodes]:
    """Run a Ray for a block."""
    ray = RayNodes(nodes, folder / "ray.log")
    try:
        yield ray
    finally:
        ray.stop()
