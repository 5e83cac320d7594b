"""Addresses to listen on and to connect to.

Covers what an address may be and whether it stays on this host. Does not cover who may connect:
beyond loopback that needs encryption, which has its own settings when it comes.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from pathlib import Path

import zmq

from pie.wire.errors import AddressError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})")
_IPC = "ipc://"


def check_address(address: str) -> None:
    """Refuse what is no address.

    Raises:
        AddressError: It is neither `tcp://host:port` nor `ipc://path`, or the path is too long.
    """
    if address.startswith(_IPC):
        path = address.removeprefix(_IPC)
        if not path or "\0" in path:
            raise AddressError(f"{address!r} names no path: write ipc:///path/to/socket.")
        if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
            raise AddressError(
                f"The path of {address!r} is longer than the {zmq.IPC_PATH_MAX_LEN} bytes that a "
                "socket's path may have: use a shorter folder."
            )
        return
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise AddressError(
            f"{address!r} is not an address: write tcp://host:port or ipc:///path/to/socket."
        )


def check_listen_address(address: str) -> None:
    """Refuse to listen on what is no address, or is reachable from elsewhere.

    Raises:
        AddressError: See above.
    """
    check_address(address)
    if not is_local(address):
        raise AddressError(
            f"{address} is reachable from other hosts, and the wire is not encrypted: listen on "
            "127.0.0.1 or a path."
        )


def is_local(address: str) -> bool:
    """Return whether only this host can reach the address."""
    match = _TCP.fullmatch(address)
    if match is None:
        return address.startswith(_IPC)
    host = match["host"].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare(zmq_socket: zmq.Socket[bytes], address: str) -> None:
    """Set what a socket needs for this kind of address."""
    if address.startswith("tcp://["):
        zmq_socket.setsockopt(zmq.IPV6, 1)


def bind(listener: zmq.Socket[bytes], address: str) -> str:
    """Bind a socket and return its real address.

    Raises:
        AddressError: Somebody listens there already, or the address cannot be had.
    """
    if address.startswith(_IPC) and _is_served(Path(address.removeprefix(_IPC))):
        raise AddressError(f"{address} is in use by another process.")
    prepare(listener, address)
    try:
        listener.bind(address)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressError(f"{address} is in use by another process.") from None
        raise AddressError(f"Cannot listen on {address}: {error.strerror}.") from None
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    if endpoint.startswith(_IPC):
        Path(endpoint.removeprefix(_IPC)).chmod(0o600)
    return endpoint


def _is_served(path: Path) -> bool:
    """Return whether a process listens on a socket's path; zmq itself would take it over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
