"""What the log says of a user's policy that fails.

Covers one line about a failure: whose it is, in which call, what it says and where it was raised; and which failures
are told: the first one, with the calls that led to it, and then ever fewer, counted over all that ask a policy of one
file: a worker has one for each of its tiers, and a simulation for each of its workers. Does not cover what is done
instead (`pie.policies.manager`, `pie.router.choice`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pie.policies.errors import BadChoiceError, PolicyStalledError
from pie.policies.telling import (
    line,
    module_of,
    name_of,
    place_of,
    qualified_name_of,
    told,
    trace_of,
)
from pie.policies.user_code import MODULES


@dataclass(slots=True)
class Failures:
    """How often one policy of a file has failed in this process."""

    count: int = 0
    is_traced: bool = False
    """Whether the calls that led to one were logged."""
    tells_once: bool = False
    """Whether only the first one is logged, and the first with the calls that led to it: somebody else tells how many there were."""

    def tell(
        self,
        log: logging.Logger,
        policy: object,
        call: str,
        error: BaseException,
        *,
        instead: str,
        where: str = "",
        traces: bool = False,
        says: bool = True,
    ) -> None:
        """Count a failure, and log it where its turn has come.

        Args:
            log: Who says it.
            policy: The policy, or what asks it.
            call: What it was asked.
            error: What it raised, or what is said of its answer.
            instead: What is done instead.
            where: Who asked it.
            traces: Whether the first error that it raised itself is told with the calls that led to it.
            says: Whether what an error that it raised says is told, which may be what a client called its session.
        """
        self.count += 1
        is_new = traces and not self.is_traced and not _is_ours(error)
        self.is_traced |= is_new
        # A policy that always raises must not fill the log.
        is_due = self.count == 1 if self.tells_once else not self.count & (self.count - 1)
        if not (is_due or is_new):
            return
        log.error(
            "%s%s failed in %s(): %s; %s%s%s",
            f"{where}: " if where else "",
            class_name(policy),
            call,
            _said(error) if says else reason_of(error),
            instead,
            f" ({self.count} failures so far)" if self.count > 1 else "",
            # Not as `logging` tells errors: that runs their code, and goes on to all that caused them.
            "".join(f"\n  {call}" for call in trace_of(error)) if is_new else "",
        )


class Asking:
    """What stands before a user's policy and asks it.

    Args:
        policy: The user's.
        failures: Those of all that ask a policy which the same file names.
    """

    def __init__(self, policy: object, failures: Failures | None = None) -> None:
        self.asked = policy
        self.failures = failures or Failures()


def failures_of(policy: object) -> Failures:
    """Return where the failures of a policy are counted."""
    # A user's class may have a `failures` of its own, or say that it is of another type.
    return policy.failures if issubclass(type(policy), Asking) else Failures()  # type: ignore[attr-defined]


def behind(policy: object) -> object:
    """Return a policy that another one may ask for it."""
    while issubclass(type(policy), Asking):
        policy = policy.asked  # type: ignore[attr-defined]
    return policy


def class_name(policy: object) -> str:
    """Return a policy's class as files name it, also where another one asks it."""
    kind = type(behind(policy))
    return f"{module_of(kind).removeprefix(MODULES)}:{qualified_name_of(kind)}"


_OURS = (BadChoiceError, PolicyStalledError)
"""Said of a policy, and not raised by it."""


def reason_of(error: BaseException) -> str:
    """Return why a policy failed, in few words: of what it raised only what it is and where, which is alike each time."""
    return _ours(error) or f"{name_of(type(error))}{place_of(error)}"


def _said(error: BaseException) -> str:
    """Return what an error says and where it was raised, in one line."""
    return _ours(error) or told(error)


def _is_ours(error: BaseException) -> bool:
    # By identity: a class of a class of a user's may have any `==`.
    return any(type(error) is one for one in _OURS)


def _ours(error: BaseException) -> str:
    """Return what is said of a policy; nothing where it raised the error itself."""
    # A user's class may inherit from ours, and a user's code may raise ours with whatever in it.
    is_ours = _is_ours(error) and error.args and type(error.args[0]) is str
    return line(error.args[0]) if is_ours else ""
