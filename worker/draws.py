"""Random numbers for sampling.

A draw is a pure function of a request's seed and the output position, so that any worker can go on
with a request that another one began. `tests/worker/engine/test_draws.py` fixes the numbers: a change
to them breaks that.
"""

from __future__ import annotations

import secrets
import struct

from blake3 import blake3

_SEED_BITS = 64


def uniform(seed: int, position: int) -> float:
    """Return the draw for output position `position`, counted from 0, in [0, 1)."""
    packed = struct.pack("<QQ", seed % (1 << _SEED_BITS), position)
    digest = blake3(b"pie/draw" + packed).digest(8)
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def fresh_seed() -> int:
    """Return a seed for a request that brought none."""
    return secrets.randbits(_SEED_BITS)
