"""Forward passes on their way to the engine.

Passes on one working set run in the order in which they were submitted; those on others run together, as
the engine has room. Nothing waits for an earlier pass's answer but who awaits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from pie.inferlet.connection import Connection, Pending
from pie.inferlet.forward import ForwardPass, PassResult
from pie.wire.frames import Buffer
from pie.wire.programs import FromHost, PassDone, RunPass


class Pipeline:
    """A way to the engine. Make one with `Context.pipeline`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def submit(self, *passes: ForwardPass) -> Pending[list[PassResult]]:
        """Send passes, to run together, without waiting; await what is returned for their results.

        Raises:
            BadCallError: One of them cannot be meant.
        """
        inputs, frames = [], list[Buffer]()
        for one in passes:
            message, more = one.message()
            inputs.append(message)
            frames += more
        call = self._connection.next_call()

        def take(message: FromHost, got: Sequence[bytes]) -> list[PassResult]:
            assert isinstance(message, PassDone)
            left = list(got)
            return [one.result(part, left) for one, part in zip(passes, message.parts, strict=True)]

        def learn(message: FromHost, _: Sequence[bytes]) -> None:
            parts = message.parts if isinstance(message, PassDone) else [None] * len(passes)
            for one, step, part in zip(passes, steps, parts, strict=True):
                one.working_set.ran(step, part)

        # All of them can be meant, so the call is made.
        steps = [one.begin() for one in passes]
        return self._connection.call(call, RunPass(call, tuple(inputs)), take, frames, learn)

    @overload
    async def run(self, one: ForwardPass, /) -> PassResult: ...

    @overload
    async def run(self, one: ForwardPass, /, *more: ForwardPass) -> list[PassResult]: ...

    async def run(self, one: ForwardPass, /, *more: ForwardPass) -> PassResult | list[PassResult]:
        """Run passes together and return their results: one for one, a list for several.

        Raises:
            InferletError: One of them failed; none has changed anything.
        """
        results = await self.submit(one, *more)
        return results if more else results[0]
