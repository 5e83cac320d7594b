"""How many files this process may have open: each client's connection is one.

Covers asking the system for as many as the settings speak of. Does not cover connections
(`pie.router.connection`).
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("pie.router.open_files")

_OWN_FILES = 512
"""Workers, the index, logs, traces, and connections that are refused."""


def allow_connections(most: int) -> None:
    """Raise this process's limit so that `most` clients may be connected; say where it can't be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning(
            "this process may have %d files open (ulimit -Hn), which is too few for "
            "router.max_connections = %d: raise the one or lower the other",
            soft,
            most,
        )
