"""Device memory for a model, for tests: an arena, and tables over it."""

from __future__ import annotations

from dataclasses import dataclass

from pie.policies.manager import RetentionManager
from pie.worker.arena import Arena
from pie.worker.model import Model
from pie.worker.state_table import StateTable


@dataclass(frozen=True)
class Device:
    """An arena, how many pages it has, and a recurrent model's states."""

    arena: Arena
    pages: int
    states: StateTable | None


def device(model: Model, pages: int, *, slots: int, stride_pages: int = 4) -> Device:
    """Return memory of so many pages and state slots, none of what the model does not have."""
    pages = pages if model.specs else 0
    if not model.states:
        return Device(Arena(model.layout, pages), pages, None)
    states = StateTable(
        slots,
        state_bytes=model.layout.state_bytes,
        stride_pages=stride_pages,
        retention=RetentionManager(),
    )
    return Device(Arena(model.layout, pages, state_slots=slots), pages, states)
