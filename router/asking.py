"""Asking one place what it has counted.

Covers one question over a connection that is there, and what a wrong answer counts for. Does not
cover connections (`pie.router.link`, `pie.router.nodes`) or asking everybody (`pie.router.census`).
"""

from __future__ import annotations

import logging

from pie.index.contract import PlaceRecord
from pie.wire import WireClient, WireError, new_request_id
from pie.wire.messages import AskStatus, StatusReport

log = logging.getLogger("pie.router.asking")


async def ask_status(
    client: WireClient, record: PlaceRecord, timeout_s: float
) -> StatusReport | None:
    """Return what a place says of itself; None where it says nothing in time.

    An address can be taken over: what another place, or another start of this one, says there is
    nothing either.
    """
    if not client.is_up:
        return None
    try:
        answer, _ = await client.request(AskStatus(new_request_id()), timeout_s=timeout_s)
    except WireError as error:
        log.debug("%s does not say what it counts: %s", record.place, error)
        return None
    if isinstance(answer, StatusReport) and (answer.place, answer.epoch) == (
        record.place,
        record.epoch,
    ):
        return answer
    return None
