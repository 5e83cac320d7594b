"""Cluster policies asked on threads of their own.

Covers one question at a time to each policy, its deadline, and ending one that does not come back. Does not cover
what is made of the answers (`pie.router.conductor`). A policy that hangs holds up nobody, and no other one; what
cannot be ended goes on until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from pie.policies.cluster_manager import Asked
from pie.policies.ending import ENDS_S, Endable
from pie.policies.telling import told


class AskedAside:
    """Questions to the policies of one manager. For one event loop.

    Args:
        policies: How many there are.
        ends_s: How long a question may take before the policy is ended, and not asked again.
    """

    def __init__(self, policies: int, *, ends_s: float = ENDS_S) -> None:
        self._asked: list[asyncio.Future[Asked] | None] = [None] * policies
        self._endables = [Endable() for _ in range(policies)]
        self._ends_s = ends_s
        self._told: set[int] = set()
        """Those that were ended, once that has been told."""

    async def ask(
        self, questions: Sequence[Callable[[], Asked]], deadline_s: float
    ) -> tuple[list[Asked], list[int]]:
        """Ask every policy that is not still busy with an earlier question.

        Returns the answers, in order, and the numbers of those that have not answered this question in time.
        """
        begun: dict[int, asyncio.Future[Asked]] = {}
        ended: list[Asked] = []
        for number, question in enumerate(questions):
            before = self._asked[number]
            if before is not None and not before.done():
                continue
            if not self._endables[number].was_ended:
                begun[number] = self._asked[number] = self._begin(number, question)
            elif number not in self._told:
                self._told.add(number)
                failure = (
                    f"it had not come back in {self._ends_s:g} s, was ended, and is not asked again"
                )
                ended.append(Asked(number, failures=(failure,)))
        if begun:
            await asyncio.wait(begun.values(), timeout=deadline_s)
        late = [number for number, asked in begun.items() if not asked.done()]
        return [*ended, *(asked.result() for asked in begun.values() if asked.done())], late

    def _begin(self, number: int, question: Callable[[], Asked]) -> asyncio.Future[Asked]:
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[Asked] = loop.create_future()
        endable = self._endables[number]

        def settle(answer: Asked) -> None:
            timer.cancel()
            if not asked.done():
                asked.set_result(answer)

        def work() -> None:
            try:
                answer = endable.run(question)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the policy's
                # Without an answer the policy would never be asked again.
                answer = Asked(number, failures=(told(error),))
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle, answer)

        threading.Thread(target=work, name="pie-cluster-policy", daemon=True).start()
        # By the loop, so that it is due also where this router leads no longer, or others are asked. Not before there is
        # a thread: it would end a later question.
        timer = loop.call_later(self._ends_s, endable.end)
        return asked
