"""What can go wrong with policies.

    PolicyError
    ├── PolicyFileError      the policy file is not acceptable; lists every problem
    │   └── PolicyLateError  a user's code that it names has not come back in time
    ├── UnknownPolicyError   a name is no policy of the kind asked for (`registry`)
    ├── LateError            a piece of a user's code has not come back in time (`user_code`)
    ├── PolicyStalledError   a user's policy has not answered in time
    └── BadChoiceError       a routing policy has returned what is no choice

A policy that raises or proposes nonsense while serving is no error: the manager contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a policy file. Lines and columns count from 1; 0 is the file."""

    line: int
    column: int
    path: str
    """Keys down to the value, such as `worker.retention`; empty for the file as a whole."""
    message: str

    def __str__(self) -> str:
        where = f"{self.line}:{self.column}: " if self.line else ""
        return f"{where}{self.path}: {self.message}" if self.path else f"{where}{self.message}"

    def told(self, file: str) -> str:
        """Return it with the file's name in front."""
        return f"{file}:{'' if self.line else ' '}{self}"


class PolicyError(Exception):
    """Anything that policies raise."""


class PolicyStalledError(PolicyError):
    """A user's policy has not answered in time; the built-in one answers instead."""


class BadChoiceError(PolicyError):
    """A routing policy has returned what is no choice; the built-in one answers instead."""


class PolicyFileError(PolicyError):
    """The policy file is not acceptable; nothing of it takes effect."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        super().__init__(file, tuple(problems))
        self.file = file
        self.problems = tuple(problems)

    def told(self) -> list[str]:
        """Return a line about each problem, with the file's name."""
        return [one.told(self.file) for one in self.problems]

    def __str__(self) -> str:
        return "\n".join(self.told())


class PolicyLateError(PolicyFileError):
    """A user's code has not come back in time: the file may be acceptable at another try."""
