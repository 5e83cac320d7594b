"""What leaves this host is encrypted, and only those who know the cluster's secret take part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
import zmq

from pie.wire import AddressError, Peer, WireClient, WireServer, WireSettings, WireTimeout
from pie.wire.address import endpoint_of
from pie.wire.curve import wire_keys
from pie.wire.messages import AskStatus, Generate, Message, Pong

from .conftest import EPOCH, SECRET, Serve
from .helpers import WAIT_S

OTHER = bytes(32)
TEXT = b"all that they said to each other"


async def answer(peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
    if isinstance(message, Generate | AskStatus):
        await peer.send(Pong(message.request_id, EPOCH))


@pytest.fixture
def address() -> str:
    return "curve://127.0.0.1:0"


class Listener:
    """Passes bytes on between a client and a server, and keeps them."""

    def __init__(self, server: WireServer) -> None:
        self.heard = bytearray()
        self._port = int(server.address.rpartition(":")[2])

    @contextlib.asynccontextmanager
    async def between(self) -> AsyncIterator[int]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with listener:
            yield listener.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.heard += data
                writer.write(data)
            writer.close()


@pytest.mark.parametrize(("scheme", "is_read"), [("tcp", True), ("curve", False)])
async def test_who_listens_in_between_reads_nothing(
    serve: Serve, settings: WireSettings, scheme: str, is_read: bool
) -> None:
    server = await serve(answer, address=f"{scheme}://127.0.0.1:0")
    listener = Listener(server)
    async with listener.between() as port:
        client = WireClient(f"{scheme}://127.0.0.1:{port}", settings=settings, secret=SECRET)
        await client.start()
        message = Generate("r", EPOCH, output_start=0, max_tokens=1)
        await client.request(message, [TEXT], timeout_s=WAIT_S)
        await client.close()
    assert (TEXT in listener.heard) is is_read


async def test_a_client_of_another_cluster_is_not_answered(
    serve: Serve, settings: WireSettings
) -> None:
    server = await serve(answer)
    impatient = settings.model_copy(update={"connect_timeout_s": 0.5})
    client = WireClient(server.address, settings=impatient, secret=OTHER)
    with pytest.raises(WireTimeout):
        await client.start()


async def test_a_client_that_knows_the_servers_key_alone_is_not_let_in(serve: Serve) -> None:
    server = await serve(answer)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        stranger.setsockopt(zmq.CURVE_SERVERKEY, wire_keys(SECRET).listening.public)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
        with stranger.get_monitor_socket() as monitor:
            stranger.connect(endpoint_of(server.address))
            events = set[int]()
            async with asyncio.timeout(WAIT_S):
                while zmq.Event.HANDSHAKE_FAILED_AUTH not in events:
                    if await asyncio.to_thread(monitor.poll, 100):
                        events.add(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
            stranger.disable_monitor()
    assert zmq.Event.HANDSHAKE_SUCCEEDED not in events
    assert not server.peers


async def test_a_client_that_does_not_encrypt_is_not_let_in(
    serve: Serve, settings: WireSettings
) -> None:
    server = await serve(answer)
    impatient = settings.model_copy(update={"connect_timeout_s": 0.5})
    client = WireClient(endpoint_of(server.address), settings=impatient)
    with pytest.raises(WireTimeout):
        await client.start()


def test_an_encrypted_address_without_a_secret_is_refused() -> None:
    with pytest.raises(AddressError, match="no cluster secret"):
        WireServer("curve://127.0.0.1:0", answer, epoch=EPOCH)
    with pytest.raises(AddressError, match="no cluster secret"):
        WireClient("curve://10.0.0.1:1")


def test_keys_are_the_same_in_every_process_and_others_for_every_secret() -> None:
    keys = wire_keys(SECRET)
    assert keys.listening.public != keys.connecting.public
    assert keys.listening.public == b"(ZH)JBa#24<uUbPq0{O3I1VvCS*XUjTx@dtP+LgA"
    assert keys.listening.public != wire_keys(OTHER).listening.public
    assert SECRET.hex() not in repr(keys)
