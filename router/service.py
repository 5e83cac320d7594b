"""The router as one object with a life: start, drain, close.

Covers what a process that runs a router holds. Does not cover the HTTP application
(`pie.router.app`) or the life of one request (`pie.router.dispatch`).
"""

from __future__ import annotations

from pie.index.settings import IndexSettings
from pie.policies.routing import RoutingPolicy
from pie.router.settings import RouterSettings


class RouterService:
    """The OpenAI-compatible front door of a cluster.

    It learns models, tokenizers and workers from the index alone, so that it may be started
    before any of them and be killed and started again at any time.

    Args:
        settings: Limits and address.
        index_url: Redis that holds the index, such as `redis://127.0.0.1:6380/0` or
            `unix:///run/pie/redis.sock`.
        index: The index's settings (key prefix, timings); its own `url` is not read.
        routing: Chooses workers; the built-in cost route where None.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        index_url: str,
        index: IndexSettings | None = None,
        routing: RoutingPolicy | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Base URL, such as `http://127.0.0.1:8000`; known after `start`."""
        raise NotImplementedError

    async def start(self) -> str:
        """Listen and read the index; return `url`.

        Requests are answered 503 until a worker is known; `/ready` says when.

        Raises:
            PortBusyError: The address is taken.
            IndexUnreadableError: The index could not be read in time.
        """
        raise NotImplementedError

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests with 503, wait for running ones; True where all ended in time."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening, cancel what runs, close every connection. Safe to call twice."""
        raise NotImplementedError
