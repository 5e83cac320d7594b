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
    raw_bytes: int = 0
    packed_bytes: int = 0
    packed_pages: dict[str, int] = field(default_factory=dict)
    seal_s: float = 0.0
    open_s: float = 0.0
    locked_pages: int = 0


def figures(tier: ObjectTier) -> ObjectFigures:
    """Return a tier's numbers."""
    written, sealed = tier.written, tier.sealing.counters
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
        raw_bytes=sealed.raw_bytes,
        packed_bytes=sealed.packed_bytes,
        packed_pages=dict(tier.sealing.pages_by_codec),
        seal_s=sealed.seal_s,
        open_s=sealed.open_s,
        locked_pages=sealed.locked,
    )
