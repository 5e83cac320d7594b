"""The number of a place's next start.

Covers choosing it where the clock may have been set back. Does not cover what happens to a start
whose number is too small (`pie.index.publisher`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pie.index.client import asking, make_async_client
from pie.index.errors import IndexUnavailableError
from pie.index.names import PlaceKeys
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId

log = logging.getLogger("pie.index.epochs")


async def next_epoch(
    url: str,
    settings: IndexSettings,
    place: PlaceId,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Epoch:
    """Return a number larger than that of any start of `place` that Redis knows.

    It is the time, unless the clock stands before what Redis has. Where Redis does not answer it
    is the time alone; too small a number shows when the place announces itself, and the start
    after that chooses again.
    """
    client = make_async_client(url)
    known: bytes | str | None = None
    try:
        async with asking(settings.request_timeout_s):
            known = await client.hget(PlaceKeys(settings.key_prefix, place).record, "epoch")
    except IndexUnavailableError as error:
        log.warning("the clock alone numbers this start of %s: %s", place, error)
    finally:
        await client.aclose()
    # Somebody else may have written there.
    last = int(known) if isinstance(known, bytes) and known.isdigit() else -1
    return Epoch(max(clock_ns(), last + 1))
