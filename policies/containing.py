"""Whether a policy is a user's, and whether an error is a policy's own.

A user's policy may raise anything, also what would end the process that asks it: `SystemExit`,
`KeyboardInterrupt`, a cancellation, a kind of its own. Covers telling those from a signal that this
process got while the policy ran, and telling of one. Does not cover what is done instead
(`pie.policies.manager`, `pie.router.choice`).
"""

from __future__ import annotations

import asyncio
import signal
import threading


def is_builtin(policy: object) -> bool:
    """Say whether a policy, or the class of one, is Pie's: a user's class may have such a one as its base."""
    kind = policy if isinstance(policy, type) else type(policy)
    return str(kind.__module__).startswith("pie.policies.")


def is_own(error: BaseException) -> bool:
    """Say whether a policy raised `error` itself, so that it must not go further.

    Signals arrive in the main thread alone, so elsewhere everything is the policy's. There, an error
    that is no `Exception` may be what a signal's handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, (Exception, SystemExit, GeneratorExit, asyncio.CancelledError))


def told(error: BaseException) -> str:
    """Return what an error says: also its text is a policy's own code, which may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as other:
        if not is_own(other):
            raise
        return "it raised an error that does not say what it is"
