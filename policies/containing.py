"""Whether a policy is a user's, and whether an error is a policy's own.

A user's policy may raise anything, also what would end the process that asks it: `SystemExit`,
`KeyboardInterrupt`, a cancellation, a kind of its own. Covers telling those from a signal that this
process got while the policy ran. Does not cover what is said of one (`pie.policies.telling`) or what is
done instead (`pie.policies.manager`, `pie.router.choice`).
"""

from __future__ import annotations

import asyncio
import signal
import threading

from pie.policies.telling import module_of


def is_builtin(policy: object) -> bool:
    """Say whether a policy, or the class of one, is Pie's: a user's class may have such a one as its base."""
    # As the types are: what a user's object says of itself is code of the user's.
    kind = policy if issubclass(type(policy), type) else type(policy)
    return module_of(kind).startswith("pie.policies.")  # type: ignore[arg-type]


def is_own(error: BaseException) -> bool:
    """Say whether a policy raised `error` itself, so that it must not go further.

    Signals arrive in the main thread alone, so elsewhere everything is the policy's. There, an error
    that is no `Exception` may be what a signal's handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    kind = type(error)
    if issubclass(kind, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return issubclass(kind, (Exception, SystemExit, GeneratorExit, asyncio.CancelledError))
