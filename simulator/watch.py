"""Users' policies asked by a limit, so that one that does not come back ends the simulation and not its user's day.

Covers the limit, users' policies of each kind under it, and counting answers that would have come too late while
serving; built-in ones are asked as ever. Does not cover how a thread is made to leave what it runs
(`pie.policies.ending`). What comes late counts all the same: deadlines while serving (`pie.policies.aside`) are far
shorter and in real time, and so would make each simulation another one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar, cast

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies import aside, order_limits, routing_aside
from pie.policies.choice_checks import checked
from pie.policies.cluster_policy import ClusterPolicy, ClusterView, Order
from pie.policies.containing import is_builtin, is_own
from pie.policies.ending import Endable, PolicyEndedError
from pie.policies.failing import Asking, Failures
from pie.policies.proposals import Proposals, sizes
from pie.policies.proposed_orders import order_of
from pie.policies.retention import PageView, RetentionPolicy, seeing_pins
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView
from pie.policies.rules import Ruled
from pie.simulator.errors import StalledError

LIMIT_S = 10.0
"""What one question may take. Policies that a router or a worker asks have some milliseconds."""
_LOOK_S = 0.1
_WAKES = signal.SIGURG
"""Nobody minds one that comes late: by default it does nothing. A job in the background ignores SIGINT."""

_T = TypeVar("_T")


@dataclass(slots=True)
class AnswerTimes:
    """How many answers of a policy would have come too late while serving."""

    deadline_s: float
    instead: str
    """What is done there instead, as a sentence says it."""
    answers: int = 0
    late: int = 0

    def took(self, spent_s: float) -> None:
        """Count an answer."""
        self.answers += 1
        self.late += spent_s > self.deadline_s


class Watch:
    """Looks on while users' policies are asked, from the thread that enters it.

    Leaving it raises `StalledError` where one of them has not come back.

    Args:
        limit_s: What one question may take.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self.failures = Counter[str]()
        """How often each of them has raised, or chosen what cannot be."""
        self._told = defaultdict[str, Failures](lambda: Failures(tells_once=True))
        """The same for the log, which many ask."""
        self.times: dict[str, AnswerTimes] = {}
        """How long each of them took, in real time: nothing in a simulation goes by it."""
        self._endable = Endable()
        self._until_s = math.inf
        self._late: str | None = None
        self._asked = ""
        self._has_users = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_exit = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._has_users:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main:
                self._at_exit.enter_context(_ending_waits())
            self._thread = threading.Thread(
                target=self._look, args=(is_main,), name="pie-policy-watch", daemon=True
            )
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._at_exit.close()
        if self._late is not None:
            raise StalledError(
                f"{self._late} has not come back in {self.limit_s:g} s, which ends the simulation"
            ) from None

    def retention(self, name: str, policy: RetentionPolicy) -> RetentionPolicy:
        """Return a retention policy that is asked by the limit; a built-in one as it is."""
        if isinstance(policy, Ruled):
            return Ruled(self.retention(name, policy.policy), policy.rules, policy.prefixes)
        if is_builtin(policy):
            return policy
        self._has_users = True
        name = f"the retention policy {name}"
        self._time(name, aside.DEADLINE_S, "a worker would have used `lru`")
        return _Retention(self, name, policy)

    def routing(self, name: str, policy: RoutingPolicy) -> RoutingPolicy:
        """Return the same of a routing policy."""
        if is_builtin(policy):
            return policy
        self._has_users = True
        name = f"the routing policy {name}"
        self._time(name, routing_aside.DEADLINE_S, "a router would have used `cost`")
        return _Routing(self, name, policy)

    def cluster(self, name: str, policy: ClusterPolicy) -> ClusterPolicy:
        """Return the same of a cluster policy."""
        if is_builtin(policy):
            return policy
        self._has_users = True
        name = f"the cluster policy {name}"
        self._time(name, order_limits.DEADLINE_S, "a router would have gone on without")
        return _Cluster(self, name, policy)

    def _time(self, name: str, deadline_s: float, instead: str) -> None:
        self.times.setdefault(name, AnswerTimes(deadline_s, instead))

    def ask(self, name: str, work: Callable[[], _T], until_s: float | None = None) -> _T:
        """Return what a policy answers.

        Args:
            name: What the policy is called.
            work: Asks it.
            until_s: When it must have come back, by `time.monotonic`; after the limit where None.

        Raises:
            PolicyEndedError: It has not come back, now or earlier.
            BaseException: What it raised.
        """
        if self._late is None:
            self._asked = name
            self._until_s = self.until_s() if until_s is None else until_s
            try:
                answer = self._endable.run(work)
            except BaseException:
                if not self._endable.was_ended:
                    self.failures[name] += 1
                    raise
            else:
                if not self._endable.was_ended:
                    return answer
            finally:
                self._until_s = math.inf
            self._late = name
        raise PolicyEndedError

    def told(self, name: str) -> Failures:
        """Return where failures are counted that the log tells of."""
        return self._told[name]

    def until_s(self) -> float:
        """Return when a question of now must be answered."""
        return time.monotonic() + self.limit_s

    def answer(self, name: str, work: Callable[[], _T]) -> _T:
        """Return what a policy answers at once, as `ask` does, and count how long it took."""
        began_s = time.perf_counter()
        try:
            return self.ask(name, work)
        finally:
            self.times[name].took(time.perf_counter() - began_s)

    def proposals(self, name: str, ask: Callable[[], Iterable[_T]]) -> Iterator[_T]:
        """Yield what a policy proposes, taken some at a time as while serving, all by one limit."""
        until_s, spent_s = self.until_s(), 0.0
        proposals = Proposals(ask)
        try:
            for most in sizes():
                began_s = time.perf_counter()
                try:
                    taken = self.ask(name, functools.partial(proposals.take, most), until_s)
                finally:
                    spent_s += time.perf_counter() - began_s
                yield from taken
                if proposals.are_over:
                    return
        finally:
            self.times[name].took(spent_s)
            # What a policy does where its answer is not read to the end is under the limit too.
            if not proposals.are_over:
                self._close(name, proposals, until_s)

    def _close(self, name: str, proposals: Proposals[_T], until_s: float) -> None:
        """Let a policy end an answer; what it raises then is counted, and one that does not come back is late."""
        try:
            self.ask(name, proposals.close, until_s)
        except BaseException as error:
            if not is_own(error) and self._late is None:
                raise

    def _look(self, is_main: bool) -> None:
        while not self._over.wait(_LOOK_S):
            if time.monotonic() < self._until_s:
                continue
            # An error reaches code of Python. A wait, such as a sleep, ends at a signal, which the main thread has.
            if self._endable.end() and is_main:
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKES)


@contextlib.contextmanager
def _ending_waits() -> Iterator[None]:
    """Let the signal that wakes end waits of the main thread in which an error is due.

    Its handler does nothing, but is code of Python, which the error reaches, and with it the wait.
    """
    before = signal.signal(_WAKES, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(_WAKES, before)


class _Retention(Asking):
    def __init__(self, watch: Watch, name: str, policy: RetentionPolicy) -> None:
        super().__init__(policy, watch.told(name))
        self._watch = watch
        self._name = name
        self._policy = policy
        self._seeing = seeing_pins(policy)

    def stored(self, page: PageView, now_s: float) -> None:
        """Pass it on."""
        self._watch.ask(self._name, lambda: self._policy.stored(page, now_s))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Pass it on."""
        self._watch.ask(self._name, lambda: self._policy.hit(key, part, now_s))

    def removed(self, key: PageKey, part: Part) -> None:
        """Pass it on."""
        self._watch.ask(self._name, lambda: self._policy.removed(key, part))

    def pinned(self, key: PageKey, part: Part) -> None:
        """Pass it on, to a policy that sees it."""
        if (policy := self._seeing) is not None:
            self._watch.ask(self._name, lambda: policy.pinned(key, part))

    def unpinned(self, key: PageKey, part: Part) -> None:
        """Pass it on."""
        if (policy := self._seeing) is not None:
            self._watch.ask(self._name, lambda: policy.unpinned(key, part))

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        """Return what it proposes."""
        return self._watch.proposals(self._name, lambda: self._policy.victims(bytes_needed, now_s))


class _Routing(Asking):
    def __init__(self, watch: Watch, name: str, policy: RoutingPolicy) -> None:
        super().__init__(policy, watch.told(name))
        self._watch = watch
        self._name = name
        self._policy = policy

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return its choice, checked."""
        places = {worker.place for worker in workers}

        def choose() -> Choice:
            return checked(self._policy.choose(request, workers), places, len(workers))

        return self._watch.answer(self._name, choose)


class _Cluster:
    def __init__(self, watch: Watch, name: str, policy: ClusterPolicy) -> None:
        self._watch = watch
        self._name = name
        self._policy = policy

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return its orders, with fields that run none of its code; None for what is no order."""
        return cast(Iterable[Order], self._watch.proposals(self._name, lambda: self._orders(view)))

    def _orders(self, view: ClusterView) -> Iterator[Order | None]:
        for one in self._policy.decide(view):
            yield order_of(one)
