"""A user's retention policy on a thread of its own, so that it holds up nobody.

Covers handing it events, waiting for its proposals no longer than a deadline, and what is said
where it does not answer. Does not cover what is done instead (`pie.policies.manager`).

Events are handed over in order and are not waited for. A policy that has not answered by the
deadline is not waited for again until it has: one that hangs costs one deadline, however often it
is asked. A late answer is thrown away, because the pages have changed meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.errors import PolicyStalledError
from pie.policies.retention import PageView, RetentionPolicy

DEADLINE_S = 0.001
"""What a step may lose to one question."""
MOST_WAITING = 100_000
"""Events that wait for a policy; one that is further behind is given up for good."""
_MORE_PROPOSALS = 1_000
"""Proposals taken beyond the pages that are held: a policy may propose without end."""

Proposals = list[tuple[PageKey, Part]]


class AsidePolicy:
    """A policy that answers by a deadline, or raises `PolicyStalledError`.

    Args:
        policy: The user's; called from one thread alone.
        deadline_s: How long `victims` waits for an answer.
    """

    def __init__(self, policy: RetentionPolicy, *, deadline_s: float = DEADLINE_S) -> None:
        self.policy = policy
        self._deadline_s = deadline_s
        self._desk = _Desk(policy)
        thread = threading.Thread(target=self._desk.work, name="pie-policy", daemon=True)
        thread.start()
        # The thread knows the desk alone, so that it ends when nobody asks any more.
        weakref.finalize(self, self._desk.end)

    def stored(self, page: PageView, now_s: float) -> None:
        """Hand on that `page` is held."""
        policy = self.policy
        self._desk.tell(lambda: policy.stored(page, now_s), held=1)

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Hand on that a page was used."""
        policy = self.policy
        self._desk.tell(lambda: policy.hit(key, part, now_s))

    def removed(self, key: PageKey, part: Part) -> None:
        """Hand on that a page has left."""
        policy = self.policy
        self._desk.tell(lambda: policy.removed(key, part), held=-1)

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        """Return what the policy proposes.

        Raises:
            PolicyStalledError: It has not answered in time, now or to an earlier question.
            BaseException: What the policy raised, here or at an event since the last question.
        """
        policy = self.policy
        return self._desk.ask(
            lambda most: list(islice(policy.victims(bytes_needed, now_s), most)), self._deadline_s
        )


class _Desk:
    """What waits for a policy, and its last answer."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self._name = type(policy).__name__
        self._lock = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._question: Callable[[int], Proposals] | None = None
        self._is_busy = False
        """Whether a question has been put and not answered."""
        self._answer: Proposals | None = None
        self._error: BaseException | None = None
        self._held = 0
        self._is_given_up = False
        self._has_ended = False

    def tell(self, event: Callable[[], None], *, held: int = 0) -> None:
        with self._lock:
            self._held += held
            if self._is_given_up:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._is_given_up = True
                self._waiting.clear()
                return
            self._waiting.append(event)
            if len(self._waiting) == 1:
                self._lock.notify_all()

    def ask(self, question: Callable[[int], Proposals], limit_s: float) -> Proposals:
        with self._lock:
            if self._is_given_up:
                raise PolicyStalledError(f"{self._name} fell too far behind and is not asked again")
            if self._is_busy:
                raise PolicyStalledError(f"{self._name} has not answered an earlier question")
            self._is_busy, self._question, self._answer = True, question, None
            self._lock.notify_all()
            answered = self._lock.wait_for(lambda: not self._is_busy, limit_s)
            error, self._error = self._error, None
            if error is not None:
                raise error
            answer = self._taken()
            if not answered or answer is None:
                raise PolicyStalledError(f"{self._name} has not answered in {limit_s * 1e3:g} ms")
            return answer

    def _taken(self) -> Proposals | None:
        return self._answer

    def end(self) -> None:
        with self._lock:
            self._has_ended = True
            self._lock.notify_all()

    def work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._question or self._has_ended)
                if self._has_ended:
                    return
                event = self._waiting.popleft() if self._waiting else None
                question, most = self._question, self._held + _MORE_PROPOSALS
                if event is None:
                    self._question = None
            answer: Proposals | None = None
            error: BaseException | None = None
            # On a thread of its own nothing that a policy raises is a signal's.
            try:
                if event is not None:
                    event()
                elif question is not None:
                    answer = question(most)
            except BaseException as raised:  # noqa: BLE001
                error = raised
            with self._lock:
                self._error = error or self._error
                if event is None:
                    self._answer, self._is_busy = answer, False
                    self._lock.notify_all()
