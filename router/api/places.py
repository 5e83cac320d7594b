"""The shapes of `/admin/workers`: what is asked of one worker.

Does not cover the cluster's status (`pie.router.status`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a worker take no more requests, and hand on what only it has."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0
    """How long that may take; what runs then is given up by who stops the worker."""


class WorkerTakesAgain(msgspec.Struct, frozen=True):
    """A worker takes requests again."""

    worker: str


class WorkerDrained(msgspec.Struct, frozen=True):
    """What became of it."""

    worker: str
    moved: int
    """Pages that the pool took."""
    left: int
    """Pages that only the worker has."""
