"""The index, claimed by one cluster for as long as it runs.

Covers keeping the lease of a cluster on a thread of its own: whatever its parts do or do not, a second cluster
must not name places under the same prefix. Does not cover the lease itself (`pie.index.lease`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from pie.cluster.errors import StartError
from pie.index.errors import PageIndexError
from pie.index.lease import Lease
from pie.index.settings import IndexSettings

log = logging.getLogger("pie.cluster.claim")

_TTL_S = 10.0
_KEEP_S = 2.0
_END_S = 5.0
"""Longest that giving it up waits for Redis."""


class Claim:
    """One cluster's claim to an index; taken at once, and kept until it is given up.

    Args:
        url: Redis.
        settings: Key prefix and time limits.

    Raises:
        StartError: Another cluster has it, or the index cannot be used.
    """

    def __init__(self, url: str, settings: IndexSettings) -> None:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            self._lease = Lease(url, "cluster", holder, ttl_s=_TTL_S, settings=settings)
            other = self._lease.keep()
        # A TypeError: the URL has an option that no connection takes.
        except (PageIndexError, TypeError) as error:
            raise StartError(f"the index cannot be used: {error}") from error
        if other is not None:
            raise StartError(
                f"another cluster ({other}) uses this index: set index.key_prefix or index.url; "
                f"where it was killed, try again in {_TTL_S:g} seconds"
            )
        self._taken_by: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="pie-claim", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `StartError` where another cluster has taken the index over."""
        if self._taken_by is not None:
            raise StartError(f"another cluster ({self._taken_by}) has taken over this index")

    def give_up(self) -> None:
        """Let others claim the index; where Redis does not answer the lease ends by itself."""
        self._over.set()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            with contextlib.suppress(PageIndexError):
                self._lease.give_back()

    def _keep(self) -> None:
        while not self._over.wait(_KEEP_S):
            try:
                other = self._lease.renew()
            except PageIndexError as error:
                log.warning("the claim to the index cannot be kept: %s", error)
                continue
            if other is not None:
                self._taken_by = other
                return
