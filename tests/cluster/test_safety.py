"""What a cluster lets the outside see."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from tests.support.serving import Serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]


def test_nothing_listens_beyond_loopback(cluster: Serving) -> None:
    serving = psutil.Process(cluster.process.pid)
    addresses = [
        (process.name(), connection.laddr.ip)
        for process in [serving, *serving.children(recursive=True)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert addresses
    open_ = [(name, ip) for name, ip in addresses if not _is_loopback(ip)]
    assert not open_


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
