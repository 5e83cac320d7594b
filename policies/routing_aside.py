"""A user's routing policy on a thread of its own, so that it holds up no stream.

Covers asking it, waiting for its choice no longer than a deadline, and ending one that does not come back.
Does not cover what is done instead (`pie.router.choice`). A policy that was late is not asked for a while, and
not before it has come back, so that one that is slow or hangs costs one deadline a second; what it chose then
is thrown away.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pie.policies.ending import ENDS_S, Endable
from pie.policies.errors import PolicyStalledError
from pie.policies.failing import Asking, Failures
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView

DEADLINE_S = 0.02
"""What one choice may hold up a router's event loop."""

PAUSE_S = 1.0
"""How long a policy that was late is not asked."""

_Questions = queue.SimpleQueue[Callable[[], None] | None]


class AsideRouting(Asking):
    """A policy that chooses by a deadline, or raises `PolicyStalledError`.

    Args:
        policy: The user's; called from one thread alone, one request at a time.
        deadline_s: How long `choose` waits.
        pause_s: How long it is left alone once it was late.
        ends_s: How long a choice may take before the policy is ended, and not asked again.
        failures: Those of all that ask this policy of a file.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = PAUSE_S,
        ends_s: float = ENDS_S,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(policy, failures)
        self.policy = policy
        self._pause_s = pause_s
        self._late_s = -pause_s
        self._deadline_s = deadline_s
        self._ends_s = ends_s
        self._endable = Endable()
        self._asked: Future[Choice] | None = None
        self._questions = _Questions()
        # The thread knows neither this nor the policy while it waits, so that it ends when nobody asks any more.
        thread = threading.Thread(
            target=_work, args=(self._questions,), name="pie-routing-policy", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, self._questions, self._endable)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the policy's choice.

        Raises:
            PolicyStalledError: It has not chosen in time, now or for an earlier request.
            BaseException: What the policy raised.
        """
        if self._endable.was_ended:
            reason = f"had not come back in {self._ends_s:g} s, was ended, and is not asked again"
            raise PolicyStalledError(f"it {reason}")
        is_busy = self._asked is not None and not self._asked.done()
        if is_busy or time.monotonic() - self._late_s < self._pause_s:
            raise PolicyStalledError("it has not chosen for an earlier request in time")
        asked, policy, endable = Future[Choice](), self.policy, self._endable

        def answer() -> None:
            # On a thread of its own nothing that a policy raises is a signal's.
            try:
                choice = endable.run(lambda: policy.choose(request, workers))
            except BaseException as error:  # noqa: BLE001
                asked.set_exception(error)
            else:
                asked.set_result(choice)

        self._asked = asked
        self._questions.put(answer)
        with contextlib.suppress(TimeoutError):
            return asked.result(self._deadline_s)
        if asked.done():
            # It chose just now, or has raised a `TimeoutError` of its own.
            return asked.result()
        self._late_s = time.monotonic()
        timer = threading.Timer(self._ends_s, endable.end)
        timer.daemon = True
        timer.start()
        asked.add_done_callback(lambda _: timer.cancel())
        raise PolicyStalledError(f"it has not chosen in {self._deadline_s * 1e3:g} ms")


def _work(questions: _Questions) -> None:
    while (answer := questions.get()) is not None:
        answer()
        del answer


def _end(questions: _Questions, endable: Endable) -> None:
    questions.put(None)
    endable.end()
