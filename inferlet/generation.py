"""An answer in the making.

Covers taking it bit by bit or as a whole, with the engine's sampler or the program's own. Does not
cover what comes before and after it (`pie.inferlet.context`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING

from pie.inferlet.connection import u32
from pie.inferlet.errors import BadCallError
from pie.inferlet.forward import ForwardPass
from pie.inferlet.samplers import LogitFunction, Sampler
from pie.wire.messages import Grammar
from pie.wire.programs import CancelCall, Drawn, GenerateTokens

if TYPE_CHECKING:
    from pie.inferlet.context import Context


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

    def __await__(self) -> Generator[object, None, str]:
        """Wait for all of it and return the text."""
        return self._all().__await__()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        """Yield pieces of text as they come; none ends inside a character or a stop text.

        Who stops before the end uses `contextlib.aclosing`: what was generated until then is part of the
        conversation.
        """
        tokens = await self._context.take_tokens()
        if not tokens:
            raise BadCallError("there is nothing to go on from: add a turn or fill(tokens) first")
        if self._grammar is not None and not isinstance(self._sampler, Sampler):
            raise BadCallError("what an answer must match goes with a Sampler, not with a function")
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
            if self.tokens:
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
        stream = connection.stream(call, message, [u32(tokens)])

        def take(drawn: Drawn) -> None:
            self.tokens += drawn.tokens
            self.text += drawn.text
            self.finish = drawn.finish
            if drawn.finish:
                one.extended(drawn.length, drawn.pages, drawn.cached_tokens)

        try:
            async for drawn in stream:
                take(drawn)
                yield drawn.text
        finally:
            if not self.finish:
                connection.tell(CancelCall(connection.next_call(), call))
                # The engine may be some tokens ahead of who stopped it.
                async for drawn in stream:
                    take(drawn)

    async def _by_function(
        self, tokens: list[int], choose: LogitFunction
    ) -> AsyncGenerator[str, None]:
        pipe, one, eos = self._context.pipeline(), self._context.working_set, self._context.eos
        while not self.finish:
            result = await pipe.run(ForwardPass(one).input(tokens).logits("last"))
            assert result.logits is not None
            token = int(choose(result.logits[0]))
            tokens = [token]
            self.tokens.append(token)
            if token in eos and not self._ignore_eos:
                self.finish = "stop"
                return
            # Decoded anew, because a character may take several tokens.
            text = await self._context.decode(self.tokens)
            ends = [at for at in map(text.find, self._stop) if at >= 0]
            if ends:
                text, self.finish = text[: min(ends)], "stop"
            elif len(self.tokens) >= self._max_tokens:
                self.finish = "length"
            elif text.endswith("\ufffd"):
                continue
            piece, self.text = text[len(self.text) :], text
            yield piece
