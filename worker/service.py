"""One worker as a service: wire server, engine, index publisher and pool client in one process.

Covers starting, draining and closing them in order, and what the worker says of itself. Does not
cover who starts the process and watches it (`pie.cluster`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pie.index.contract import PlaceRecord
    from pie.index.settings import IndexSettings
    from pie.page.events import Epoch, PlaceId
    from pie.policies.loader import PolicySet
    from pie.worker.settings import ModelSettings
    from pie.worker.status import WorkerStatus


class WorkerService:
    """A worker: loads a model, serves `Generate` on its wire address, publishes its pages.

    Args:
        place: The worker's name, the same across its restarts.
        settings: The `[model]` section.
        policies: Which retention policy chooses victims.
        index_settings: The `[index]` section; its `url` is used unless `index_url` is given.
        index_url: Redis that the index lives in.
        address: Wire address to bind, such as `tcp://127.0.0.1:0` or `ipc:///run/pie/w0`.
        epoch: This start's number, larger than that of any earlier start of `place`.
    """

    def __init__(
        self,
        place: PlaceId,
        settings: ModelSettings,
        *,
        policies: PolicySet,
        index_settings: IndexSettings,
        index_url: str,
        address: str,
        epoch: Epoch,
    ) -> None: ...

    async def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Load the model, bind the wire address and announce the worker.

        `progress` is called, from any thread, with one sentence for each stage that takes time.

        Raises:
            WorkerError: The model cannot be had or served; the message says why in one sentence.
        """

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and return when the running ones are done or time is up."""

    async def close(self) -> None:
        """Stop at once and give everything back. Safe to call twice, and after a failed start."""

    @property
    def record(self) -> PlaceRecord:
        """What the worker announced; valid after `start`."""

    def status(self) -> WorkerStatus:
        """Return the worker's counters and gauges as they are now."""
