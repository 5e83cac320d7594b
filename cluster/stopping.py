"""How a signal ends a command, and where it must wait.

A handler that raises may do so anywhere. In pure Python that is what unwinds a start in good order; in
Ray's compiled calls it leaves an error in the wrong place, and the process crashes. So those run under
`uninterrupted`, and a signal that comes meanwhile counts when they are done. For the main thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Stop(BaseException):
    """A signal asks the command to end; not an Exception, so that nothing swallows it."""


class _Pending:
    depth = 0
    asked = False


def ask_to_stop() -> None:
    """Raise `Stop`, now or when what must not be interrupted is done."""
    _Pending.asked = True
    if not _Pending.depth:
        raise Stop


def stopping() -> None:
    """Take the signal for heard: the stop it asked for is under way."""
    _Pending.asked = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let what is inside end before `Stop` is raised.

    Raised again by the next one until `stopping` is called: an import or a callback may swallow it.
    """
    _Pending.depth += 1
    try:
        yield
    finally:
        _Pending.depth -= 1
        if not _Pending.depth and _Pending.asked:
            raise Stop
