"""`pie pool drain`: a pool node is asked to hand its pages to the others.

Covers finding the node, asking and waiting. Does not cover what the node does (`pie.pool.migration`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pie.cluster import preflight
from pie.cluster.config import PieConfig
from pie.cluster.errors import ConfigError, NotRunningError
from pie.cluster.secret import shared_secret
from pie.index.contract import PlaceRecord
from pie.index.errors import PageIndexError
from pie.index.lookup import DirectLookup
from pie.page.events import PlaceId, PlaceKind
from pie.wire.client import WireClient
from pie.wire.errors import WireError
from pie.wire.ids import new_request_id
from pie.wire.messages import Drained, DrainNode

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
    record = _find(config, name)
    file = config.cluster.secret_file
    secret = None if file is None else shared_secret(file)
    say(f"{name} hands its pages to others, for {config.pool.drain_timeout_s:g} s at most")
    try:
        done = asyncio.run(_drain(record, secret, config.pool.drain_timeout_s))
    except WireError as error:
        raise NotRunningError(f"{name} at {record.address}: {error}") from error
    say(f"{name}: {done.moved} pages went to other nodes, {done.left} are left")
    return done.left


def _find(config: PieConfig, name: str) -> PlaceRecord:
    try:
        places = DirectLookup(config.index.url, settings=config.index).places()
    except PageIndexError as error:
        raise NotRunningError(f"the index does not answer: {error}") from error
    nodes = {p: r for p, r in places.items() if r.kind is PlaceKind.POOL}
    record = nodes.get(PlaceId(name))
    if record is None:
        known = ", ".join(sorted(nodes)) or "none"
        raise NotRunningError(f"no pool node {name} is up; those that are: {known}")
    return record


async def _drain(record: PlaceRecord, secret: bytes | None, timeout_s: float) -> Drained:
    client = WireClient(record.address, secret=secret)
    epoch = await client.start()
    try:
        ask = DrainNode(new_request_id(), epoch, timeout_s)
        answer, _ = await client.request(ask, timeout_s=timeout_s + _ANSWER_S)
    finally:
        await client.close()
    if not isinstance(answer, Drained):
        raise WireError(f"It answered with {type(answer).__name__}.")
    return answer
