"""An answer in the making.

Covers taking it bit by bit or as a whole, with the engine's sampler or the program's own. Does not
cover what comes before and after it (`pie.inferlet.context`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import TYPE_CHECKING, TypeVar

from pie.inferlet.connection import u32
from pie.inferlet.errors import BadCallError, InferletError
from pie.inferlet.forward import ForwardPass
from pie.inferlet.samplers import LogitFunction, Sampler
from pie.wire.messages import Grammar
from pie.wire.programs import CancelCall, GenerateTokens

if TYPE_CHECKING:
    from pie.inferlet.context import Context

_T = TypeVar("_T")


class Generation:
    """What `Context.generate` returns. Await it, or iterate over it; once.

    Attributes:
        tokens: The ids so far.
        text: Their text so far.
        finish: `stop` or `length` once it is over.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler | LogitFunction,
        max_tokens: int,
        stop: tuple[str, ...],
        ignore_eos: bool,
        grammar: Grammar | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish = ""
        self._context = context
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop = stop
        self._ignore_eos = ignore_eos
        self._grammar = grammar
        self._has_failed = False
        self._cancelled: asyncio.CancelledError | None = None

    def __await__(self) -> Generator[object, None, str]:
        """Wait for all of it and return the text."""
        return self._all().__await__()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        """Yield pieces of text as they come; none ends inside a character or a stop text.

        Who stops before the end uses `contextlib.aclosing`: what was generated until then is part of the
        conversation. So it is where the wait is cancelled, by `asyncio.timeout` say, after a token more; where it
        fails, what was added before is still there to be generated from, and nothing else has changed.
        """
        if self._grammar is not None and not isinstance(self._sampler, Sampler):
            raise BadCallError("what an answer must match goes with a Sampler, not with a function")
        tokens = await self._context.take_tokens()
        if not tokens:
            raise BadCallError("there is nothing to go on from: add a turn or fill(tokens) first")
        if isinstance(self._sampler, Sampler):
            pieces = self._by_engine(tokens, self._sampler)
        else:
            pieces = self._by_function(tokens, self._sampler)
        try:
            async for piece in pieces:
                if piece:
                    yield piece
        finally:
            await pieces.aclose()
            if self.tokens and not self._has_failed:
                is_over = self.finish == "stop"
                self._context.generated(self.tokens, self.text, is_over=is_over)
            else:
                self._context.put_back(tokens)

    async def _all(self) -> str:
        async for _ in self:
            pass
        return self.text

    async def _by_engine(self, tokens: list[int], sampler: Sampler) -> AsyncGenerator[str, None]:
        connection, one = self._context.connection(), self._context.working_set
        call = connection.next_call()
        message = GenerateTokens(
            call,
            one.number,
            self._max_tokens,
            sampler.declared(),
            self._stop,
            ignore_eos=self._ignore_eos,
            grammar=self._grammar,
        )
        frames = [u32(tokens)]
        step = one.generate()
        stream = connection.stream(call, message, frames, lambda end, _: one.generated(step, end))

        async def take() -> str:
            try:
                drawn = await stream.next()
            except InferletError:
                # Nothing was changed by it: its tokens are no part of the conversation.
                self._has_failed = True
                raise
            self.tokens += drawn.tokens
            self.text += drawn.text
            self.finish = drawn.finish
            return drawn.text

        async def take_rest() -> None:
            while not self.finish:
                await take()

        try:
            while not self.finish:
                piece = await take()
                connection.raise_unclaimed()
                yield piece
        finally:
            if not (self.finish or self._has_failed):
                connection.tell(CancelCall(connection.next_call(), call))
                # The engine may be some tokens ahead of who stopped it.
                await self._to_its_end(take_rest())
                self._raise_if_cancelled()

    async def _by_function(
        self, tokens: list[int], choose: LogitFunction
    ) -> AsyncGenerator[str, None]:
        pipe, one, eos = self._context.pipeline(), self._context.working_set, self._context.eos
        while not self.finish:
            fed = ForwardPass(one).input(tokens).logits("last")
            result = await self._to_its_end(pipe.run(fed))
            assert result.logits is not None
            token = int(choose(result.logits[0]))
            tokens = [token]
            self.tokens.append(token)
            if token in eos and not self._ignore_eos:
                self.finish = "stop"
                self._raise_if_cancelled()
                return
            # Decoded anew, because a character may take several tokens.
            text = await self._to_its_end(self._context.decode(self.tokens))
            ends = [at for at in map(text.find, self._stop) if at >= 0]
            piece = ""
            if ends:
                text, self.finish = text[: min(ends)], "stop"
            elif len(self.tokens) >= self._max_tokens:
                self.finish = "length"
            if self.finish or not text.endswith("\ufffd"):
                piece, self.text = text[len(self.text) :], text
            self._raise_if_cancelled()
            yield piece

    async def _to_its_end(self, work: Coroutine[object, object, _T]) -> _T:
        """Wait for what the engine does in any case; `_raise_if_cancelled` tells of a cancellation meanwhile.

        What it did would be no part of the conversation otherwise, and of the working set it is.
        """
        task = asyncio.get_running_loop().create_task(work)
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                self._cancelled = error
        return task.result()

    def _raise_if_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, None
        if cancelled is not None:
            raise cancelled
