"""The socket that a router listens with.

Covers its options and what is wrong with an address. Does not cover who is answered on it
(`pie.router.connection`).
"""

from __future__ import annotations

import errno
import socket

from pie.router.errors import AddressUnusableError, PortBusyError
from pie.router.settings import RouterSettings

BACKLOG = 2048


def listener(settings: RouterSettings, *, shares_port: bool) -> socket.socket:
    """Return a listening socket.

    Raises:
        PortBusyError: The address is taken.
        AddressUnusableError: It is not this machine's, or not allowed.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it: one whose client takes nothing for so long is dropped.
            opened.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.send_timeout_s * 1000)
            )
        opened.bind((settings.host, settings.port))
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusyError(settings.host, settings.port) from error
        raise AddressUnusableError(settings.host, settings.port, str(error)) from error
    return opened
