"""How the `pie` command tells what a person can mend.

Covers errors of a cluster in one sentence each, with exit code 2, or 1 where something may have changed, and text that others wrote. Does not cover the sentences
(`pie.cluster.errors`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pie.cluster.errors import ClusterError, ConfigError, SimulationError, UncertainError


def printable(text: str) -> str:
    """Return a text that others may have written, for one line of a terminal: what does not print is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number of things in words: 1 page, 2 pages."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def warn(text: str) -> None:
    """Say what is no mistake but likely none of what was meant."""
    print(f"pie: warning: {text}", file=sys.stderr, flush=True)


def drop_output() -> None:
    """Let what is printed go nowhere from now on, also what could not be written yet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def sentences() -> Iterator[None]:
    """Say what a person can mend in one sentence each, and end with 2; with 1 where it is not known whether all is as it was."""
    try:
        yield
    except ConfigError as error:
        for problem in error.problems:
            print(f"pie: {problem}", file=sys.stderr)
        raise typer.Exit(2) from error
    except SimulationError as error:
        for problem in str(error).splitlines():
            print(f"pie: {problem}", file=sys.stderr)
        raise typer.Exit(2) from error
    except ClusterError as error:
        print(f"pie: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, UncertainError) else 2) from error
    except BrokenPipeError:
        # Whoever read along, such as `head`, has enough.
        drop_output()
        raise typer.Exit(0) from None
