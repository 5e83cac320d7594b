"""What was tried for one sequence since its last token, and what is left to try.

Covers attempts, workers that are left out for a while, the wait for one that takes it, and what a client is
told when none does. Does not cover sending (`pie.router.dispatch`) or who is chosen (`pie.router.choice`).

A token is progress: whoever made one has shown that the sequence can go on, so that a long answer is
not ended by the fourth worker that dies during it, and all begins anew.
"""

from __future__ import annotations

from pie.router.errors import ApiError, overloaded, server_error, unavailable
from pie.router.generation import Ending, Order
from pie.router.link import WorkerLink
from pie.router.settings import RouterSettings
from pie.wire.messages import RefusalCode, Refused

_MOST_FAILURES = 2
"""A sequence that two workers tried and could not go on with is not tried on a third."""
_NO_ROOM = frozenset({RefusalCode.OVERLOADED, RefusalCode.DRAINING})
"""Refusals that say nothing against the sequence."""


class Tries:
    """The attempts of one sequence.

    Args:
        order: What is asked.
        settings: Limits.
    """

    def __init__(self, order: Order, settings: RouterSettings) -> None:
        self._order = order
        self._settings = settings
        self._left = settings.attempts
        self._failures = 0
        self._left_out: set[WorkerLink] = set()
        self._begun = False
        """Whether there is a token."""
        self._since_s: float | None = None
        """When the wait for a worker began; None outside of one."""
        self._forgot_s = 0.0
        """When workers were left out no longer."""
        self._place = ""
        self._ending: Ending | None = None
        self._reason = ""
        self._refused: Refused | None = None
        self._failure = ""

    def may_go_on(self) -> bool:
        """Whether there is another attempt, if somebody takes it."""
        return self._left > 0 and self._failures < _MOST_FAILURES

    def leaves_out(self, link: WorkerLink) -> bool:
        """Say whether a worker is not asked for now, because it was just now."""
        return link in self._left_out

    def ended(
        self,
        link: WorkerLink,
        ending: Ending,
        reason: str,
        *,
        tokens: int,
        refused: Refused | None = None,
        failure: str = "",
    ) -> None:
        """Note how an attempt ended that made so many tokens."""
        if tokens:
            self._left, self._failures = self._settings.attempts, 0
            self._left_out.clear()
            self._begun = True
            self._since_s = None
            self._failure = ""
        is_full = refused is not None and refused.code in _NO_ROOM
        # Half an answer waits for room as it waits for a worker: with time and not with attempts, of which
        # all sequences of a worker that died would have none left at the next full ones.
        if not is_full or not self._begun:
            self._left -= 1
            self._since_s = None
        # A worker that is gone takes no request until it is back, and then it may.
        if ending is not Ending.GONE:
            self._left_out.add(link)
        self._failures += ending is Ending.FAILED
        self._place, self._ending, self._reason = link.record.place, ending, reason
        self._refused, self._failure = refused, failure or self._failure

    def waits(self, now_s: float) -> bool:
        """Say whether to wait on while nobody is there who could be asked.

        A sequence that lost its worker waits a while for one to come back, and one that has tokens for
        one that has room; a new one does not.
        """
        if self._ending is None or (self._refused is not None and not self._begun):
            return False
        if self._since_s is None:
            self._since_s = self._forgot_s = now_s
        if now_s >= self._since_s + self._settings.worker_wait_s:
            return False
        if now_s >= self._forgot_s + self._settings.retry_after_s:
            self._left_out.clear()
            self._forgot_s = now_s
        return True

    def gave_up(self, *, others: int, nobody: str) -> ApiError:
        """Return what to tell the client.

        Args:
            others: Workers that are there and were not asked.
            nobody: Why none takes requests, where none does.
        """
        retry_after_s = self._settings.retry_after_s
        if self._refused is not None:
            retry_after_s = self._refused.retry_after_s or retry_after_s
            return self._refusal(self._refused, others, retry_after_s)
        if self._failure:
            return server_error(
                f"The worker failed: {self._failure}", logged=f"worker {self._place} failed"
            )
        if self._ending is None:
            return unavailable(nobody, retry_after_s)
        lost = f"the last, {self._place}, was lost ({self._reason})"
        if self._left <= 0:
            attempts = self._settings.attempts
            return unavailable(
                f"{attempts} workers in a row brought no token (router.attempts): {lost}.",
                retry_after_s,
            )
        wait_s = self._settings.worker_wait_s
        return unavailable(
            f"No worker went on within {wait_s:g} s (router.worker_wait_s): {lost}.", retry_after_s
        )

    def _refusal(self, refused: Refused, others: int, retry_after_s: float) -> ApiError:
        """Return what to tell where the last word was a worker's no."""
        if refused.code not in _NO_ROOM:
            return server_error(
                f"The worker refused: {refused.message}",
                logged=f"worker {self._place} refused ({refused.code})",
            )
        who = "All workers are"
        if others:
            attempts = self._settings.attempts
            who = f"The workers that were asked, {attempts} of them (router.attempts), are"
        if self._begun:
            who = f"For {self._settings.worker_wait_s:g} s (router.worker_wait_s) all workers were"
        if refused.code is RefusalCode.OVERLOADED:
            return overloaded(f"{who} busy: {refused.message}", retry_after_s)
        return unavailable(f"{who} draining: they take no requests.", retry_after_s)
