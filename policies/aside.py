"""A user's retention policy on a thread of its own, so that it holds up nobody.

Covers handing it events, waiting for its proposals no longer than a deadline, and what is said
where it does not answer. Does not cover what is done instead (`pie.policies.manager`).

Events are handed over in order and are not waited for. Proposals are taken some at a time, as many
as are needed and few more: a policy that would propose all its pages does no work for most of
them. All of them have one deadline together. A policy that has not answered by then is not waited
for again until it has: one that hangs costs one deadline, however often it is asked. A late answer
is thrown away, because the pages have changed meanwhile. One that has not come back in `ENDS_S` is
ended, where that is possible, and not asked again.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.ending import ENDS_S, Endable
from pie.policies.errors import PolicyStalledError
from pie.policies.failing import Asking, Failures
from pie.policies.proposals import Proposal, Proposals, sizes
from pie.policies.retention import PageView, RetentionPolicy, seeing_pins

DEADLINE_S = 0.001
"""What a step may lose to one question."""
MOST_WAITING = 100_000
"""Events that wait for a policy; one that is further behind is given up for good."""


class AsidePolicy(Asking):
    """A policy that answers by a deadline, or raises `PolicyStalledError`.

    Args:
        policy: The user's; called from one thread alone.
        deadline_s: How long `victims` waits for an answer.
        ends_s: How long it may be about one event or question before it is ended.
        failures: Those of all that ask this policy of a file.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        *,
        deadline_s: float = DEADLINE_S,
        ends_s: float = ENDS_S,
        failures: Failures | None = None,
    ) -> None:
        super().__init__(policy, failures)
        self.policy = policy
        self._seeing = seeing_pins(policy)
        self._deadline_s = deadline_s
        self._desk = _Desk(ends_s)
        thread = threading.Thread(target=self._desk.work, name="pie-policy", daemon=True)
        thread.start()
        # The thread knows the desk alone, so that it ends when nobody asks any more.
        weakref.finalize(self, self._desk.end)

    def stored(self, page: PageView, now_s: float) -> None:
        """Hand on that `page` is held."""
        policy = self.policy
        self._desk.tell(lambda: policy.stored(page, now_s))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Hand on that a page was used."""
        policy = self.policy
        self._desk.tell(lambda: policy.hit(key, part, now_s))

    def removed(self, key: PageKey, part: Part) -> None:
        """Hand on that a page has left."""
        policy = self.policy
        self._desk.tell(lambda: policy.removed(key, part))

    def pinned(self, key: PageKey, part: Part) -> None:
        """Hand on that a page is in use, to a policy that sees it."""
        if (policy := self._seeing) is not None:
            self._desk.tell(lambda: policy.pinned(key, part))

    def unpinned(self, key: PageKey, part: Part) -> None:
        """Hand on that a page is in use no longer."""
        if (policy := self._seeing) is not None:
            self._desk.tell(lambda: policy.unpinned(key, part))

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[Proposal]:
        """Return what the policy proposes, without end where it proposes so.

        Raises:
            PolicyStalledError: It has not answered in time, now or to an earlier question. While the
                answer is read, too.
            BaseException: What the policy raised, here or at an event since the last question.
        """
        policy = self.policy
        proposals = Proposals(lambda: policy.victims(bytes_needed, now_s))
        some = sizes()
        first, left_s = self._take(proposals, next(some), self._deadline_s)
        return self._taken(proposals, first, some, left_s)

    def _take(
        self, proposals: Proposals[Proposal], most: int, left_s: float
    ) -> tuple[list[Proposal], float]:
        """Return some proposals, and what is left of the time."""
        began_s = time.monotonic()
        question = functools.partial(proposals.take, most)
        taken = self._desk.ask(question, proposals.close, left_s, self._deadline_s)
        return taken, left_s - (time.monotonic() - began_s)

    def _taken(
        self,
        proposals: Proposals[Proposal],
        taken: list[Proposal],
        some: Iterator[int],
        left_s: float,
    ) -> Iterator[Proposal]:
        try:
            yield from taken
            while not proposals.are_over:
                taken, left_s = self._take(proposals, next(some), left_s)
                yield from taken
        finally:
            # What a policy does where its answer is not read to the end is its own thread's too.
            if not proposals.are_over:
                self._desk.tell(proposals.close)


class _Desk:
    """What waits for a policy, and its last answer."""

    def __init__(self, ends_s: float) -> None:
        self._ends_s = ends_s
        self._endable = Endable()
        self._began_s: float | None = None
        """Since when the policy is about one event or question."""
        self._lock = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._question: Callable[[], list[Proposal]] | None = None
        self._is_busy = False
        """Whether a question has been put and not answered."""
        self._answer: list[Proposal] | None = None
        self._error: BaseException | None = None
        self._given_up = ""
        """Why it is not asked again; empty where it is."""
        self._has_ended = False
        self._is_watched = False
        """Whether a thread looks now and then whether the policy has come back."""
        self._unwatch = threading.Event()

    def tell(self, event: Callable[[], None]) -> None:
        with self._lock:
            if self._given_up:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._give_up("fell too far behind")
                self._endable.end()
                return
            if self._waiting:
                self._end_late()
            self._waiting.append(event)
            if len(self._waiting) == 1:
                self._lock.notify_all()

    def ask(
        self,
        question: Callable[[], list[Proposal]],
        close: Callable[[], None],
        limit_s: float,
        deadline_s: float,
    ) -> list[Proposal]:
        """Return an answer.

        Args:
            question: What to ask.
            close: Done after it where there is no answer.
            limit_s: How long to wait.
            deadline_s: How long this question and those that it goes on from may take.
        """
        with self._lock:
            if self._given_up:
                raise PolicyStalledError(f"it {self._given_up} and is not asked again")
            if self._is_busy:
                self._end_late()
                raise PolicyStalledError("it has not answered an earlier question")
            self._is_busy, self._question, self._answer = True, question, None
            self._lock.notify_all()
            answered = self._lock.wait_for(lambda: not self._is_busy, limit_s)
            error, self._error = self._error, None
            answer = self._answer_now()
            if error is None and answered and answer is not None:
                return answer
            # A question that has not begun does not, for nobody waits for it.
            self.tell(close)
            if error is not None:
                raise error
            self._watch()
            raise PolicyStalledError(f"it has not answered in {deadline_s * 1e3:g} ms")

    def _answer_now(self) -> list[Proposal] | None:
        """Return the answer, which another thread may have given meanwhile."""
        return self._answer

    def _watch(self) -> None:
        """See to it that it is ended in time, also where nobody asks or tells it anything until then."""
        if self._is_watched:
            return
        # One thread, however often it is late: starting one takes the asking thread longer than the deadline may be.
        threading.Thread(target=self._look, name="pie-policy-watch", daemon=True).start()
        self._is_watched = True

    def _look(self) -> None:
        """Look whenever it may be late, until nothing is left to do for it."""
        wait_s = self._ends_s
        while not self._unwatch.wait(wait_s):
            with self._lock:
                self._end_late()
                began_s = self._began_s
                if began_s is None and not self._is_busy:
                    self._is_watched = False
                    return
            # What began late, after others that took a while, has its whole time; one that was ended and goes on
            # is ended again.
            left_s = 0.0 if began_s is None else began_s + self._ends_s - time.monotonic()
            wait_s = left_s if left_s > 0.0 else self._ends_s

    def _end_late(self) -> None:
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s >= self._ends_s:
            self._endable.end()

    def _give_up(self, why: str) -> None:
        self._given_up = why
        self._waiting.clear()

    def end(self) -> None:
        with self._lock:
            self._has_ended = True
            self._lock.notify_all()
        self._unwatch.set()
        # Nobody waits for what it is about now.
        self._endable.end()

    def _has_something_to_do(self) -> bool:
        return bool(self._waiting or self._question or self._has_ended or self._given_up)

    def work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(self._has_something_to_do)
                if self._has_ended or self._given_up:
                    return
                event = self._waiting.popleft() if self._waiting else None
                question = self._question
                if event is None:
                    self._question = None
                self._began_s = time.monotonic()
            answer: list[Proposal] | None = None
            error: BaseException | None = None
            # On a thread of its own nothing that a policy raises is a signal's.
            try:
                if event is not None:
                    self._endable.run(event)
                elif question is not None:
                    answer = self._endable.run(question)
            except BaseException as raised:  # noqa: BLE001
                error = raised
            with self._lock:
                self._began_s = None
                self._error = error or self._error
                if self._endable.was_ended and not self._given_up:
                    self._give_up(f"had not come back in {self._ends_s:g} s, was ended,")
                if event is None:
                    self._answer, self._is_busy = answer, False
                    self._lock.notify_all()
