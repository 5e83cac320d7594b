"""What can go wrong in a simulation.

SimulatorError
├── TraceError      a trace that cannot be read, with every problem and its line
├── SetupError      a cluster that cannot be simulated, or that cannot carry a trace
└── StalledError    a user's policy that has not come back
"""

from __future__ import annotations

from collections.abc import Sequence


class SimulatorError(Exception):
    """Base of the errors here."""


class SetupError(SimulatorError):
    """A cluster that cannot be simulated; the message says why and what is allowed."""


def within(name: str, value: int, least: int, most: int) -> None:
    """Raise `SetupError` where a number is not from `least` to `most`."""
    if not least <= value <= most:
        raise SetupError(f"{name} must be from {least:,} to {most:,}, not {value:,}")


class StalledError(SimulatorError):
    """A user's policy has not come back; the message names it."""


class TraceError(SimulatorError):
    """A trace that cannot be read.

    Args:
        name: What messages call the file.
        problems: One sentence each, with the line where there is one.
    """

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        super().__init__(name, problems)
        self.name = name
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(f"{self.name}: {problem}" for problem in self.problems)
