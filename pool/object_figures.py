"""What an object tier says of itself.

Covers the numbers that a node's status shows. Does not cover what is counted (`pie.pool.object`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pie.pool.object import ObjectTier


@dataclass(frozen=True, slots=True)
class ObjectFigures:
    """Numbers of one tier; counts are since the start."""

    state: dict[str, int] = field(default_factory=dict)
    buffered_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    bad_pages: dict[str, int] = field(default_factory=dict)
    opened: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    written: int = 0
    removed: int = 0
    lost_races: int = 0
    dropped_pages: int = 0


def figures(tier: ObjectTier) -> ObjectFigures:
    """Return a tier's numbers."""
    written = tier.written
    return ObjectFigures(
        state=tier.states(),
        buffered_bytes=tier.buffered_bytes,
        errors=dict(tier.health.errors),
        bad_pages=dict(tier.bad_by_reason),
        opened=tier.health.opened,
        read_bytes=tier.read_bytes,
        written_bytes=written.written_bytes,
        written=written.objects,
        removed=written.removed,
        lost_races=written.lost_races,
        dropped_pages=written.dropped,
    )
