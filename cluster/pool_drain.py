"""`pie pool drain`: a pool node is asked to hand its pages to the others.

Covers finding the node, asking and waiting. Does not cover what the node does (`pie.pool.migration`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pie.cluster import preflight
from pie.cluster.config import PieConfig
from pie.cluster.errors import ConfigError, NotRunningError
from pie.cluster.secret import joined_secret
from pie.index.contract import PlaceRecord
from pie.index.errors import PageIndexError
from pie.index.lookup import DirectLookup
from pie.page.events import PlaceId, PlaceKind
from pie.wire.client import WireClient
from pie.wire.errors import WireError, WireTimeout
from pie.wire.ids import new_request_id
from pie.wire.place_orders import Drained, DrainNode

_ANSWER_S = 30.0
"""How much longer than the node may take its answer is waited for."""


def drain_node(config: PieConfig, name: str, say: Callable[[str], None]) -> int:
    """Empty the node `name`, and return how many pages nobody took in time.

    Raises:
        ConfigError: The configuration does not say where the index is.
        NotRunningError: There is no such node, or it does not answer.
        StartError: The cluster's secret cannot be read.
    """
    config = preflight.absolute(config)
    if not config.index.url:
        raise ConfigError(
            ["index.url is not set: name the Redis of the cluster that the node is of"]
        )
    nodes = _nodes(config)
    record = nodes.get(PlaceId(name))
    if record is None:
        known = ", ".join(sorted(nodes)) or "none"
        raise NotRunningError(f"no pool node {name} is up; those that are: {known}")
    file = config.cluster.secret_file
    secret = None if file is None else joined_secret(file)
    try:
        done = asyncio.run(_drain(record, secret, config.pool.drain_timeout_s, say))
    except WireError as error:
        raise NotRunningError(f"{name} at {record.address}: {error}") from error
    say(f"{name}: {done.moved} pages went to other nodes, {done.left} are left")
    if done.left and len(nodes) == 1:
        say("There was no other node to take them.")
    if done.left:
        say(
            f"What is left stays on the disk of {name} or in its bucket, and is served once a node of "
            "that name starts; without either it is lost with the node's RAM."
        )
    say(f"{name} ends now where `pie pool` runs it; where `pie serve` does, it stays up.")
    return done.left


def _nodes(config: PieConfig) -> dict[PlaceId, PlaceRecord]:
    """Return the pool nodes that are up."""
    try:
        places = DirectLookup(config.index.url, settings=config.index).places()
    except PageIndexError as error:
        raise NotRunningError(f"the index does not answer: {error}") from error
    return {p: r for p, r in places.items() if r.kind is PlaceKind.POOL}


async def _drain(
    record: PlaceRecord, secret: bytes | None, timeout_s: float, say: Callable[[str], None]
) -> Drained:
    client = WireClient(record.address, secret=secret)
    try:
        epoch = await client.start()
    except WireTimeout as error:
        raise WireTimeout(
            f"{error} It is gone or halted, or its secret is another than the one given here."
        ) from error
    say(f"{record.place} hands its pages to others, for {timeout_s:g} s at most")
    try:
        ask = DrainNode(new_request_id(), epoch, timeout_s)
        answer, _ = await client.request(ask, timeout_s=timeout_s + _ANSWER_S)
    finally:
        await client.close()
    if not isinstance(answer, Drained):
        raise WireError(f"It answered with {type(answer).__name__}.")
    return answer
