"""Pie's worker engine as a contestant: `python -m benchmarks.peers.pie_contestant THREADS`."""

from __future__ import annotations

import sys

from benchmarks.engine_driver import EngineDriver
from benchmarks.peers.contest import own_output, serve


class PieContestant(EngineDriver):
    """Pie with a worker's own settings."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.about: dict[str, object] = {"name": "pie", "attention": self.attention}


if __name__ == "__main__":
    answers = own_output()
    serve(PieContestant(int(sys.argv[1])), answers)
