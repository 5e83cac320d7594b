"""`pie pool`: one pool node in a process of its own, wherever that runs.

Covers what a node is made of, its name, and its life from the start to a signal. Does not cover the
node itself (`pie.pool.node`) or nodes that `pie serve` starts as Ray actors (`pie.cluster.actors`).

A second node with the name of one that answers refuses to start, or ends before it announces itself where the
index answers only later; where the first answers nothing, it is fenced by the second's larger epoch and ends as
soon as it learns of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from pie.cluster import preflight
from pie.cluster.config import PieConfig
from pie.cluster.encryption import encryption_keys
from pie.cluster.errors import ConfigError, StartError
from pie.cluster.policy_command import read
from pie.cluster.secret import joined_secret
from pie.index.client import check_login
from pie.index.contract import PlaceRecord
from pie.index.epochs import next_epoch
from pie.index.errors import IndexDeniedError
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.errors import PolicyError
from pie.policies.loader import PolicyText
from pie.pool.errors import PoolError
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.wire.client import WireClient
from pie.wire.errors import AddressError, WireError
from pie.wire.settings import WireSettings

log = logging.getLogger("pie.cluster.pool_process")

_ANSWER_S = 2.0
"""How long a node of the same name has to say that it is there."""
_DRAINED_S = 1.0
"""How long a node that was drained goes on: its answer is on the way to whoever asked."""


def new_node(
    place: PlaceId,
    *,
    pool: PoolSettings,
    policies: PolicyText,
    index: IndexSettings,
    index_url: str,
    address: str,
    epoch: Epoch,
    secret: bytes,
    encryption_keys: tuple[bytes, ...],
    on_dead: Callable[[BaseException], None],
    on_drained: Callable[[], None] | None = None,
) -> PoolNode:
    """Return a node as the configuration wants it.

    Raises:
        PolicyFileError: The policy file is wrong.
    """
    return PoolNode(
        place,
        pool,
        index_settings=index,
        index_url=index_url,
        address=address,
        epoch=epoch,
        secret=secret,
        encryption_keys=encryption_keys,
        on_dead=on_dead,
        on_drained=on_drained,
        policies=policies.load(),
    )


def run_node(config: PieConfig, say: Callable[[str], None]) -> None:
    """Run a node until a signal ends it; a second signal ends it at once.

    Raises:
        ConfigError: The configuration is wrong; every problem at once.
        StartError: The node cannot start, the secret of its cluster is not here, or another one of its
            name took over.
    """
    config = preflight.absolute(config)
    if found := preflight.node_problems(config):
        raise ConfigError(found)
    assert config.cluster.secret_file is not None
    secret = joined_secret(config.cluster.secret_file)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("pie").addHandler(handler)
    logging.getLogger("pie").setLevel(logging.INFO)
    try:
        uvloop.run(_Process(config, secret, say).run())
    except PolicyError as error:
        # What was good a moment ago may name code of a user's that is late, or cannot be made again.
        raise StartError(str(error)) from error


class _Process:
    """The life of the one node."""

    def __init__(self, config: PieConfig, secret: bytes, say: Callable[[str], None]) -> None:
        self._config = config
        self._secret = secret
        self._say = say
        self._place = PlaceId(config.pool.name or f"pool-{socket.gethostname()}")
        self._end = asyncio.Event()
        self._is_signalled = False
        self._dead: BaseException | None = None

    async def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        config = self._config
        try:
            await check_login(config.index.url, config.index.request_timeout_s)
        except IndexDeniedError as error:
            raise StartError(f"{self._place}: {error}") from error
        may_announce = None if await self._refuse_if_up() else self._may_announce
        node = new_node(
            self._place,
            pool=config.pool,
            policies=read(config.policies.file),
            index=config.index,
            index_url=config.index.url,
            address=config.pool.listen,
            epoch=await next_epoch(config.index.url, config.index, self._place),
            secret=self._secret,
            encryption_keys=encryption_keys(config.cluster),
            on_dead=self._died,
            on_drained=self._drained,
        )
        try:
            record = await self._start(node, may_announce)
            if record is not None:
                self._say(
                    f"Pool node {self._place} serves at {record.address}; "
                    "Ctrl-C or SIGTERM stops it."
                )
                await self._end.wait()
            if record is not None and self._dead is None:
                pool = config.pool
                await node.drain(
                    pool.drain_timeout_s if pool.drain_on_stop else config.cluster.drain_timeout_s
                )
        finally:
            await node.close()
        if isinstance(self._dead, StartError):
            raise self._dead
        if self._dead is not None:
            raise StartError(f"{self._dead}: every node needs a name of its own") from self._dead

    async def _start(
        self, node: PoolNode, may_announce: Callable[[], Awaitable[bool]] | None = None
    ) -> PlaceRecord | None:
        """Start the node; None where it is to end before its disks have answered.

        Raises:
            StartError: It cannot start.
        """
        starting = asyncio.create_task(node.start(may_announce))
        ending = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        except (AddressError, PoolError) as error:
            raise StartError(f"{self._place}: {error}") from error
        finally:
            starting.cancel()
            ending.cancel()
            await asyncio.gather(starting, ending, return_exceptions=True)

    async def _refuse_if_up(self) -> bool:
        """See whether another process runs a node of this name; say whether the index knows.

        Raises:
            StartError: It does.
        """
        index = self._config.index
        mirror = Mirror()
        feed = MirrorFeed(index.url, mirror, settings=index, with_pages=False)
        await feed.start()
        try:
            answers = await feed.ready(index.request_timeout_s)
        finally:
            await feed.close()
        if not answers:
            log.warning("the index does not answer: whether %s is up is not known", self._place)
        await self._refuse_if_answers(mirror.places().get(self._place))
        return answers

    async def _may_announce(self) -> bool:
        """Wait until the index answers; say whether no other process runs a node of this name.

        One that was up before the index went away announces itself again within its time to live.
        """
        index = self._config.index
        mirror = Mirror()
        feed = MirrorFeed(index.url, mirror, settings=index, with_pages=False)
        await feed.start()
        try:
            while not await feed.ready(index.request_timeout_s):
                pass
            await asyncio.sleep(index.ttl_s)
        finally:
            await feed.close()
        try:
            await self._refuse_if_answers(mirror.places().get(self._place))
        except StartError as error:
            self._died(error)
            return False
        return True

    async def _refuse_if_answers(self, record: PlaceRecord | None) -> None:
        """Refuse to go on where the node that the index knows by this name answers.

        Raises:
            StartError: It does.
        """
        if record is None:
            return
        impatient = WireSettings(connect_timeout_s=_ANSWER_S)
        try:
            client = WireClient(record.address, settings=impatient, secret=self._secret)
            await client.start()
        except WireError as error:
            log.info("%s was at %s and answers nothing: %s", self._place, record.address, error)
            return
        await client.close()
        raise StartError(
            f"{self._place} is up at {record.address}: give this node another --name, or stop that one"
        )

    def _died(self, error: BaseException) -> None:
        self._dead = error
        self._end.set()

    def _drained(self) -> None:
        asyncio.get_running_loop().call_later(_DRAINED_S, self._end.set)

    def _signalled(self, number: int) -> None:
        # Counted by themselves: a node that was emptied, or is fenced, ends without one.
        if self._is_signalled:
            _end_now(number)
        self._is_signalled = True
        log.info("%s stops; once more ends it at once", self._place)
        self._end.set()


def _end_now(number: int) -> NoReturn:
    os._exit(128 + number)
