"""Ending background tasks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("pie.index.tasks")

_AGAIN_S = 0.25
_LIMIT_S = 5.0


async def end(tasks: Iterable[asyncio.Task[Any]], limit_s: float = _LIMIT_S) -> None:
    """Cancel tasks and wait until they have ended, but not longer than `limit_s`.

    A task must also look at a flag of its owner in every loop: libraries lose a cancellation now and
    then (`asyncio.wait_for` does in Python 3.11), and so it is also sent again.
    """
    left = set(tasks)
    deadline_s = time.monotonic() + limit_s
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
        if left and time.monotonic() > deadline_s:
            names = ", ".join(sorted(task.get_name() for task in left))
            log.error("tasks that do not end are left alone: %s", names)
            return
