"""A process that serves does not look at all of its objects again and again."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from pie.cluster.collector import keep_pauses_short

keep = [[number] for number in range(2_000_000)]
keep_pauses_short()
keep_pauses_short()
assert gc.get_freeze_count() >= 2_000_000, gc.get_freeze_count()
assert len(gc.callbacks) == 1

class Ring:
    pass

ring = Ring()
ring.itself = ring
del ring
frozen = gc.get_freeze_count()
assert gc.collect() > 0, "what came later is collected"
assert gc.get_freeze_count() == frozen, "a short collection freezes nothing"
"""


def test_a_long_collection_is_the_last_over_what_it_leaves() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
