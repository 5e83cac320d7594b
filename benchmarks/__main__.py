"""Run benchmarks and write their results.

`python -m benchmarks [NAME …]` runs `bench_NAME.py`, all of them where none is named, each in a
process of its own so that none inherits another's threads or memory. The results go to
`benchmarks/results/NAME.json`, with the machine's description beside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import describe

_HERE = Path(__file__).parent
_RESULTS = _HERE / "results"


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
    result = importlib.import_module(f"benchmarks.bench_{name}").run()
    _RESULTS.mkdir(exist_ok=True)
    file = _RESULTS / f"{name}.json"
    file.write_text(json.dumps({"machine": machine, "result": result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"written to {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
