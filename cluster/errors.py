"""What can go wrong before and while a cluster runs.

    ClusterError
    ├── ConfigError        the configuration is wrong; every problem at once
    ├── StartError         the cluster cannot start, and why, in one sentence
    ├── NotRunningError    no cluster answers where one was looked for
    │   └── UnansweredError    it was asked, and broke off or said nothing
    │       └── UncertainError  and whether it has done what it was asked is not known
    ├── UnknownKeyError    there is no such API key or tenant
    ├── UnknownRequestError a router knows nothing of the request that was asked about
    └── SimulationError    a trace, a policy file or a cluster that cannot be simulated

Each is shown to a person as it is, without a traceback; the `pie` command ends with exit code 2, and with 1
after `UncertainError`.
"""

from __future__ import annotations

from collections.abc import Sequence


class ClusterError(Exception):
    """Anything that a person who starts a cluster can mend."""


class ConfigError(ClusterError):
    """The configuration is wrong. `problems` has a sentence for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class StartError(ClusterError):
    """The cluster cannot start."""


class NotRunningError(ClusterError):
    """No cluster answers."""


class UnansweredError(NotRunningError):
    """A router was asked, and has not answered."""


class UncertainError(UnansweredError):
    """It may have done what it was asked, or may do it later; the message says how to find out."""


class UnknownKeyError(ClusterError):
    """There is no such API key or tenant."""


class UnknownRequestError(ClusterError):
    """A router knows nothing of a request."""


class SimulationError(ClusterError):
    """A trace, a policy file or a cluster that cannot be simulated; the message says all of it."""
