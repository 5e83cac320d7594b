"""A router as a worker sees it, for tests."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from pie.page.key import pack_tokens
from pie.wire.client import WireClient
from pie.wire.ids import new_request_id
from pie.wire.messages import Cancel, Generate, Load, Message, Refused, StepTokens
from tests.worker.engine.driver import GREEDY, Answer


class Asker:
    """Sends requests to one worker and collects the answers."""

    def __init__(self, address: str) -> None:
        self.client = WireClient(address, on_message=self._take, on_gone=self._gone)
        self.answers: dict[str, Answer] = {}
        self.loads: list[Load] = []
        self.steps: list[StepTokens] = []
        self.gone = asyncio.Event()
        self._told = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(
        self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any
    ) -> tuple[str, Answer]:
        """Send a greedy request; return its id and its answer, which fills up."""
        prompt = array("I", tokens)
        given: dict[str, Any] = {
            "request_id": new_request_id(),
            "output_start": len(prompt),
            "sampling": GREEDY,
            "epoch": self.client.epoch,
        }
        request = Generate(max_tokens=max_tokens, **(given | fields))
        answer = self.answers[request.request_id] = Answer()
        await self.client.send(request, [pack_tokens(prompt)])
        return request.request_id, answer

    async def ask(self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> Answer:
        """Send a request and wait for its end."""
        _, answer = await self.send(tokens, max_tokens, **fields)
        await self.ended(answer)
        return answer

    async def ended(self, answer: Answer) -> None:
        await self.until_told(
            lambda: answer.finish_reason is not None or answer.refused is not None
        )

    async def until_told(self, condition: Any, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s), self._told:
            await self._told.wait_for(condition)

    async def cancel(self, request_id: str) -> None:
        await self.client.send(Cancel(request_id))

    def _take(self, message: Message, frames: Sequence[memoryview]) -> None:
        assert not frames
        match message:
            case StepTokens():
                self.steps.append(message)
                self.loads.append(message.load)
                for delta in message.deltas:
                    self.answers[delta.request_id].take(delta)
            case Refused():
                self.answers[message.request_id].refused = message
            case _:
                raise AssertionError(message)
        self._notify()

    def _gone(self) -> None:
        self.gone.set()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._told:
                self._told.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
