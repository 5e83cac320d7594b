"""Addresses: what is one, what stays on this host, and who has it already."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pie.wire import AddressError, Peer, WireClient, WireServer
from pie.wire.address import check_address, check_listen_address, is_local
from pie.wire.messages import Message

from .conftest import EPOCH, SECRET, Serve


async def ignore(peer: Peer, message: Message, frames: object) -> None:
    pass


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://",
        "tcp://host",
        "tcp://h:99999",
        "udp://h:1",
        "ipc://",
        "tcp://a b:1",
        "inproc://x",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError):
        check_address(address)
    with pytest.raises(AddressError):
        WireClient(address)


def test_a_path_that_is_too_long_is_refused_in_words() -> None:
    with pytest.raises(AddressError, match="longer than the 107 bytes"):
        check_address("ipc:///" + "x" * 107)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://eth0:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
    ],
)
def test_only_loopback_is_listened_on_in_clear(address: str, local: bool) -> None:
    assert is_local(address) is local
    if local:
        check_listen_address(address)
    else:
        with pytest.raises(AddressError, match="not encrypted: write curve://"):
            WireServer(address, ignore, epoch=EPOCH)
        with pytest.raises(AddressError, match="not encrypted: write curve://"):
            WireClient(address)


@pytest.mark.parametrize("host", ["10.0.0.1", "[fd00::1]", "eth0"])
def test_other_hosts_are_listened_to_encrypted(host: str) -> None:
    address = f"curve://{host}:0"
    assert not is_local(address)
    WireServer(address, ignore, epoch=EPOCH, secret=bytes(32))


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_an_address_that_nobody_can_connect_to_is_not_listened_on(host: str) -> None:
    with pytest.raises(AddressError, match="names no host"):
        check_listen_address(f"curve://{host}:0")


async def test_an_address_in_use_is_refused(serve: Serve) -> None:
    server = await serve(ignore)
    second = WireServer(server.address, ignore, epoch=EPOCH, secret=SECRET)
    with pytest.raises(AddressError, match="in use"):
        await second.start()


async def test_an_address_that_cannot_be_had_is_refused(folder: Path) -> None:
    server = WireServer(f"ipc://{folder}/no/such/folder", ignore, epoch=EPOCH)
    with pytest.raises(AddressError, match="Cannot listen"):
        await server.start()


async def test_a_socket_that_a_dead_process_left_is_taken_over(folder: Path, serve: Serve) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{folder}/left")
    await serve(ignore, address=f"ipc://{folder}/left")


async def test_the_address_is_free_after_close(serve: Serve) -> None:
    server = await serve(ignore)
    await server.close()
    again = await serve(ignore, address=server.address)
    assert again.address == server.address


async def test_others_of_this_host_cannot_open_the_socket(folder: Path, serve: Serve) -> None:
    await serve(ignore, address=f"ipc://{folder}/mine")
    assert os.stat(f"{folder}/mine").st_mode & 0o077 == 0  # noqa: PTH116
