"""Run benchmarks and write their results.

`python -m benchmarks [NAME …]` runs `bench_NAME.py`, all of them where none is named, each in a
process of its own so that none inherits another's threads or memory. The results go to
`benchmarks/results/NAME.json`, with the machine's description beside them.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import describe, write_result

_HERE = Path(__file__).parent


def main() -> int:
    """Run what the command line names; 1 where one of them failed."""
    names = sorted(path.stem.removeprefix("bench_") for path in _HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help=str(names))
    parser.add_argument("--here", action="store_true", help="run NAME in this process")
    arguments = parser.parse_args()
    if arguments.here:
        return _run_here(arguments.names[0])
    failed = [
        name
        for name in arguments.names or names
        if subprocess.run(
            [sys.executable, "-m", "benchmarks", "--here", name], check=False
        ).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_here(name: str) -> int:
    machine = describe()
    write_result(name, machine, importlib.import_module(f"benchmarks.bench_{name}").run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
