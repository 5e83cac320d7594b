"""Who can go on from pages that lie below device memory: requests and programs, as loads see them.

Does not cover moving pages (`pie.worker.offload`) or who waits for them when
(`pie.worker.scheduler`, `pie.worker.programs.lane`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pie.page.key import PageKey
from pie.wire.messages import LoadDecision
from pie.worker.batch import PageSlot
from pie.worker.working_state import WorkingState


class LoadTarget(Protocol):
    """The pages of one sequence, those included that a load is to write."""

    @property
    def keys(self) -> Sequence[PageKey]:
        """Keys of its leading pages, at least of all that could be loaded."""

    @property
    def pages(self) -> Sequence[PageSlot]:
        """Where they lie, as far as there is a place for them."""

    @property
    def frozen(self) -> int:
        """Leading pages that it has."""

    @property
    def loadable_keys(self) -> Sequence[PageKey]:
        """Keys of the pages after those, of which a load would be of use."""

    @property
    def state(self) -> WorkingState | None:
        """A recurrent model's: its target is where a load puts the snapshot."""


class Loadable(Protocol):
    """One sequence that loads. Compared by identity."""

    load_wish: LoadDecision | None
    """A decision to load, until there was room to begin."""
    load_decision: LoadDecision | None
    """What was weighed when it was last decided whether to load."""
    load_s: float

    @property
    def working_set(self) -> LoadTarget:
        """Its pages."""

    @property
    def missing(self) -> int:
        """Tokens that it would have to compute."""

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for what it loads; asked from any thread."""
