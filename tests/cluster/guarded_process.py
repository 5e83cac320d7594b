"""A process that has a guard, and does what it is told.

Run as `python -m tests.cluster.guarded_process MARK FOLDER`. It prints the numbers of a process that
carries the mark and of a child that it had before, takes one command a line, and answers each with a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pie.cluster.guard import MARK_VARIABLE, Guard


def say(answer: object) -> None:
    """Answer with one line."""
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def main() -> None:
    mark, folder = sys.argv[1:]
    earlier = subprocess.Popen(["sleep", "300"])
    guard = Guard(mark, Path(folder))
    child = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK_VARIABLE: mark})
    say(f"{child.pid} {earlier.pid}")
    for line in sys.stdin:
        match line.split():
            case ["pid"]:
                answer = str(guard.pid)
            case ["watch"]:
                answer = str(guard.watch())
            case ["release", timeout_s]:
                guard.release(float(timeout_s))
                answer = "released"
            case _:
                raise AssertionError(line)
        say(answer)


if __name__ == "__main__":
    main()
