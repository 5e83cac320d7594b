"""Cluster policies asked on threads of their own.

Covers one question at a time to each policy, and its deadline. Does not cover what is made of the answers
(`pie.router.conductor`). A thread ends with the process: a policy that hangs holds up nobody, and no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from pie.policies.cluster_manager import Asked
from pie.policies.containing import told


class AskedAside:
    """Questions to the policies of one manager. For one event loop.

    Args:
        policies: How many there are.
    """

    def __init__(self, policies: int) -> None:
        self._asked: list[asyncio.Future[Asked] | None] = [None] * policies

    async def ask(
        self, questions: Sequence[Callable[[], Asked]], deadline_s: float
    ) -> tuple[list[Asked], list[int]]:
        """Ask every policy that is not still busy with an earlier question.

        Returns the answers, in order, and the numbers of those that have not answered this question in time.
        """
        begun: dict[int, asyncio.Future[Asked]] = {}
        for number, question in enumerate(questions):
            before = self._asked[number]
            if before is None or before.done():
                begun[number] = self._asked[number] = _begin(number, question)
        if begun:
            await asyncio.wait(begun.values(), timeout=deadline_s)
        late = [number for number, asked in begun.items() if not asked.done()]
        return [asked.result() for asked in begun.values() if asked.done()], late


def _begin(number: int, question: Callable[[], Asked]) -> asyncio.Future[Asked]:
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[Asked] = loop.create_future()

    def settle(answer: Asked) -> None:
        if not asked.done():
            asked.set_result(answer)

    def work() -> None:
        try:
            answer = question()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the policy's
            # Without an answer the policy would never be asked again.
            answer = Asked(number, failures=(told(error),))
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=work, name="pie-cluster-policy", daemon=True).start()
    return asked
