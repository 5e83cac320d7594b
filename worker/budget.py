"""How a memory budget is split between pages and recurrent states.

Covers numbers of pages and state slots. Does not cover the memory itself (`pie.worker.arena`) or
what the machine has (`pie.worker.memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.page.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Shares:
    """How much of each kind fits into a budget."""

    pages: int
    state_slots: int


def split_budget(
    layout: PageLayout, budget_bytes: int, *, state_share: float, max_running: int
) -> Shares:
    """Return how many pages and state slots to allocate, together at most `budget_bytes`.

    A model without attention gives all to state slots, one without recurrent layers all to pages.
    Else states take `state_share`, but no more slots than can be of use: two for each running
    sequence (its state, and the snapshot that it goes on from) and one snapshot for each page.
    """
    if not layout.state_bytes:
        return Shares(budget_bytes // layout.page_bytes, 0)
    if not layout.attention_parts:
        return Shares(0, budget_bytes // layout.state_bytes)
    slots = int(budget_bytes * state_share) // layout.state_bytes
    busy = 2 * max_running
    left = budget_bytes - busy * layout.state_bytes
    useful = busy + max(0, left) // (layout.page_bytes + layout.state_bytes)
    slots = min(slots, useful)
    return Shares((budget_bytes - slots * layout.state_bytes) // layout.page_bytes, slots)
