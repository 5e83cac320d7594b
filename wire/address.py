"""Addresses to listen on and to connect to.

Covers what an address may be, whether it stays on this host, and that what leaves it is encrypted.
Does not cover the keys (`pie.wire.curve`).

    tcp://127.0.0.1:PORT   loopback, in clear
    ipc:///PATH            a Unix socket, in clear
    curve://HOST:PORT      TCP with CurveZMQ, the only one beyond loopback
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from pathlib import Path

import zmq

from pie.wire.errors import AddressError

_TCP = re.compile(
    r"(?P<scheme>tcp|curve)://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})"
)
_IPC = "ipc://"
_CURVE = "curve://"
_PLAIN = "tcp://"
_EVERYWHERE = {"*", "0.0.0.0", "::"}  # noqa: S104 - what is refused


def check_address(address: str) -> None:
    """Refuse what is no address, or would send pages in clear to another host.

    Raises:
        AddressError: It is none of the forms above, the path is too long, or it is `tcp://` beyond
            loopback.
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
            f"{address!r} is not an address: write tcp://host:port, curve://host:port or "
            "ipc:///path/to/socket."
        )
    if match["scheme"] == "tcp" and not is_local(address):
        raise AddressError(
            f"{address} is reachable from other hosts and not encrypted: write "
            f"{address.replace(_PLAIN, _CURVE, 1)}."
        )


def check_keys(address: str, secret: bytes | None) -> None:
    """Refuse an encrypted address where there is no secret to make keys of.

    Raises:
        AddressError: That is so.
    """
    if is_encrypted(address) and secret is None:
        raise AddressError(f"{address} is encrypted, and there is no cluster secret to do it with.")


def check_listen_address(address: str) -> None:
    """Refuse to listen on what is no address, is not encrypted, or is not where others connect to.

    Raises:
        AddressError: See above.
    """
    check_address(address)
    match = _TCP.fullmatch(address)
    if match is not None and match["host"].strip("[]") in _EVERYWHERE:
        raise AddressError(
            f"{address} names no host: write the address of this host that others connect to."
        )


def is_encrypted(address: str) -> bool:
    """Return whether what travels is encrypted and both sides prove who they are."""
    return address.startswith(_CURVE)


def endpoint_of(address: str) -> str:
    """Return the address in zmq's words."""
    return address.replace(_CURVE, _PLAIN, 1) if is_encrypted(address) else address


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
    if "://[" in address:
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
        listener.bind(endpoint_of(address))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressError(f"{address} is in use by another process.") from None
        raise AddressError(f"Cannot listen on {address}: {error.strerror}.") from None
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    if endpoint.startswith(_IPC):
        Path(endpoint.removeprefix(_IPC)).chmod(0o600)
    return endpoint.replace(_PLAIN, _CURVE, 1) if is_encrypted(address) else endpoint


def _is_served(path: Path) -> bool:
    """Return whether a process listens on a socket's path; zmq itself would take it over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
