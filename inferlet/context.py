"""What a program's `main` is given: a conversation, and the way to everything else.

Covers turns, text, generating, forking, scoring and messages. Does not cover passes
(`pie.inferlet.forward`, `pie.inferlet.pipeline`), which a context is made of.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pie.inferlet.connection import Connection, u32, whole
from pie.inferlet.errors import BadCallError, InferletError, type_told
from pie.inferlet.forward import Floats, ForwardPass
from pie.inferlet.generation import Generation
from pie.inferlet.grammars import grammar_of
from pie.inferlet.pipeline import Pipeline
from pie.inferlet.samplers import LogitFunction, Sampler, is_no_choice, sampler_told
from pie.inferlet.tools import Tool
from pie.inferlet.web import HttpResponse
from pie.inferlet.working_set import WorkingSet
from pie.wire.programs import (
    CallTool,
    ChatTurn,
    Decode,
    Decoded,
    Encode,
    Encoded,
    FromHost,
    Heard,
    HttpAnswer,
    HttpCall,
    Listen,
    ModelFacts,
    Render,
    Say,
    ToolAnswer,
)

_SCORED_AT_ONCE = 2048
"""Tokens of a text that one pass scores."""


class Context:
    """A conversation on a working set of its own.

    Attributes:
        model: Facts of the model.
        tools: What the operator lets programs call.
        working_set: Where this conversation's tokens are.
    """

    def __init__(
        self, connection: Connection, model: ModelFacts, tools: Sequence[Tool] = ()
    ) -> None:
        self.model = model
        self.tools = tuple(tools)
        self.working_set = WorkingSet(connection)
        self._connection = connection
        self._turns: list[ChatTurn] = []
        self._rendered = 0
        """Turns whose tokens are in the working set or in `_pending`."""
        self._answer: str | None = None
        """The text of the answer after those, from where the template has opened it."""
        self._pending: list[int] = []
        """Tokens that have not run."""

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.model.eos_token_ids)

    def system(self, text: str) -> Context:
        """Add instructions; returns the context, so that turns can be chained."""
        return self._turn("system", text)

    def user(self, text: str) -> Context:
        """Add what the user says."""
        return self._turn("user", text)

    def assistant(self, text: str) -> Context:
        """Add an answer as if the model had given it."""
        return self._turn("assistant", text)

    def fill(self, tokens: Sequence[int]) -> Context:
        """Add raw tokens, without a template."""
        if self._rendered < len(self._turns):
            raise BadCallError("fill(tokens) after turns: generate an answer to them first")
        self._pending += whole(tokens, "tokens").tolist()
        return self

    async def take_tokens(self) -> list[int]:
        """Return the tokens that were added and have not run, to run them by oneself."""
        await self._render()
        tokens, self._pending = self._pending, []
        return tokens

    def put_back(self, tokens: Sequence[int]) -> None:
        """Note that what `take_tokens` returned has not run after all: for `Generation`."""
        self._pending = [*tokens, *self._pending]

    def generate(
        self,
        sampler: Sampler | LogitFunction | None = None,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        *,
        schema: Mapping[str, object] | str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        ignore_eos: bool = False,
    ) -> Generation:
        """Go on with the conversation.

        `await` what is returned for the whole text, or take it bit by bit with `async for`. What was
        generated is part of the conversation, and the next turn goes on from it. Without a turn in between, what is
        generated next belongs to the same answer.

        Args:
            sampler: A declaration, which the engine carries out by itself; or a function from logits
                `[vocab_size]` to a token, which costs a round trip for each one.
            max_tokens: Most tokens to generate.
            stop: Texts that end it; they are not part of the result.
            schema: The answer is JSON that a JSON Schema describes.
            regex: The answer matches an expression as a whole.
            choice: The answer is one of these.
            grammar: The answer follows a Lark grammar.
            ignore_eos: Go on past the model's end tokens.

        Raises:
            BadCallError: More than one thing is said that the answer must match, `choice` is no list of texts, or
                `sampler` neither a `Sampler` nor a function.
        """
        if sampler is not None and is_no_choice(sampler):
            raise BadCallError(
                "generate takes a Sampler, such as `greedy()`, or a function over logits, "
                f"not {sampler_told(sampler)}"
            )
        wanted = grammar_of(schema=schema, regex=regex, choice=choice, grammar=grammar)
        return Generation(self, sampler or Sampler(), max_tokens, tuple(stop), ignore_eos, wanted)

    async def fork(self, count: int) -> list[Context]:
        """Return `count` contexts that go on from here, each by itself.

        What was added is run first, once for all of them, but for its last token.
        """
        await self._render()
        if len(self._pending) > 1:
            ahead, self._pending = self._pending[:-1], self._pending[-1:]
            try:
                await self.pipeline().run(ForwardPass(self.working_set).input(ahead))
            except InferletError:
                self.put_back(ahead)
                raise
        return self._split(count)

    def _split(self, count: int) -> list[Context]:
        made = []
        for one in self.working_set.forks(count):
            twin = copy.copy(self)
            twin.diverge(one)
            made.append(twin)
        return made

    def diverge(self, working_set: WorkingSet) -> None:
        """Go on with a working set that is a fork of one's own: for `fork`."""
        self.working_set = working_set
        self._turns, self._pending = list(self._turns), list(self._pending)

    async def embed(self, text: str) -> Floats:
        """Return the last hidden state after a text, `[hidden_size]`; the context stays as it is."""
        tokens = await self.encode(text)
        one = WorkingSet(self._connection)
        try:
            result = await self.pipeline().run(ForwardPass(one).input(tokens).hidden("last"))
        finally:
            one.close()
        assert result.hidden is not None
        vector: Floats = result.hidden[0]
        return vector

    async def score(self, text: str) -> float:
        """Return the log-likelihood of a text as what comes next; the context stays as it is."""
        await self._render()
        before, tokens = self._pending, await self.encode(text)
        if not before or not tokens:
            raise BadCallError("score(text) needs something to follow, and a text")
        (fork,) = self._split(1)
        total, pipe, ahead = 0.0, self.pipeline(), before[:-1]
        feed = [before[-1], *tokens[:-1]]
        try:
            if ahead:
                pipe.submit(ForwardPass(fork.working_set).input(ahead))
            for at in range(0, len(tokens), _SCORED_AT_ONCE):
                part = slice(at, at + _SCORED_AT_ONCE)
                one = ForwardPass(fork.working_set).input(feed[part]).logprobs(tokens[part])
                result = await pipe.run(one)
                assert result.logprobs is not None
                total += float(result.logprobs.sum())
        finally:
            fork.close()
        return total

    def pipeline(self) -> Pipeline:
        """Return a way to run passes."""
        return Pipeline(self._connection)

    def new_context(self) -> Context:
        """Return an empty conversation of its own."""
        return Context(self._connection, self.model, self.tools)

    def new_working_set(self) -> WorkingSet:
        """Return an empty working set."""
        return WorkingSet(self._connection)

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return a text's tokens; `special` adds what the model expects around a plain text."""
        call = self._connection.next_call()
        return await self._connection.call(call, Encode(call, text, special), _tokens)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

        def take(message: FromHost, _: Sequence[bytes]) -> str:
            assert isinstance(message, Decoded)
            return message.text

        call = self._connection.next_call()
        return await self._connection.call(call, Decode(call), take, [u32(tokens)])

    async def say(self, text: str) -> None:
        """Send a message to the client."""
        self._connection.tell(Say(text))
        await self._connection.drain()

    async def listen(self) -> str | None:
        """Wait for the client's next message; None where it will send no more."""

        def take(message: FromHost, _: Sequence[bytes]) -> str | None:
            assert isinstance(message, Heard)
            return message.text

        call = self._connection.next_call()
        return await self._connection.call(call, Listen(call), take)

    async def http(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | str = b"",
        json: object = None,
    ) -> HttpResponse:
        """Ask a server that the operator grants; the worker's host asks it for the program.

        Redirects are not followed: the answer says where to.

        Args:
            method: Such as `GET`.
            url: Of http or https.
            headers: Besides those that say how a request travels.
            body: What is sent; text as UTF-8.
            json: Sent as the body instead, where it is not None.

        Raises:
            NotAllowedError: Nothing grants this server or method; the message names what would.
            HttpFailedError: It did not answer, or too slowly, or too much.
        """
        sent = dict(headers or {})
        if json is not None:
            body = msgspec.json.encode(json)
            sent.setdefault("content-type", "application/json")

        def take(message: FromHost, frames: Sequence[bytes]) -> HttpResponse:
            assert isinstance(message, HttpAnswer)
            told: dict[str, str] = {}
            for name, value in message.headers:
                told[name] = f"{told[name]}, {value}" if name in told else value
            return HttpResponse(message.status, told, bytes(frames[0]))

        call = self._connection.next_call()
        asked = HttpCall(call, method.upper(), url, tuple(sent.items()))
        data = body.encode() if isinstance(body, str) else body
        return await self._connection.call(call, asked, take, [data])

    async def tool(self, name: str, /, **arguments: object) -> object:
        """Call one of `tools`, which runs in the host and not in the program; return its result, from JSON.

        Raises:
            NotAllowedError: There is no such tool.
            BadCallError: It does not take these arguments.
            ToolFailedError: It raised, or took too long.
        """

        def take(message: FromHost, frames: Sequence[bytes]) -> object:
            assert isinstance(message, ToolAnswer)
            result: object = msgspec.json.decode(bytes(frames[0]))
            return result

        call = self._connection.next_call()
        data = msgspec.json.encode(arguments)
        return await self._connection.call(call, CallTool(call, name), take, [data])

    async def sleep(self, seconds: float) -> None:
        """Do nothing for a while; the program's other tasks go on."""
        await asyncio.sleep(seconds)

    async def park(self) -> None:
        """Let the conversation's pages wait in host memory until it goes on: while a tool works, say.

        Raises:
            OutOfPagesError: There is no room for them there.
        """
        await self.working_set.park()

    def close(self) -> None:
        """Let go of the conversation's pages."""
        self.working_set.close()

    def connection(self) -> Connection:
        """Return the way to the host: for `Generation`."""
        return self._connection

    def generated(self, tokens: Sequence[int], text: str, *, is_over: bool) -> None:
        """Note an answer, or a part of one: for `Generation`.

        Args:
            tokens: The last of them has not run.
            text: Of all of them.
            is_over: Whether the model ended it.
        """
        self._pending = list(tokens[-1:])
        is_more, self._answer = self._answer is not None, (self._answer or "") + text
        turn = ChatTurn("assistant", self._answer)
        if is_more and self._rendered < len(self._turns):
            # It was over once, and has been gone on with.
            self._turns[self._rendered] = turn
        elif is_over and self._turns:
            self._turns.append(turn)

    def _turn(self, role: str, text: str) -> Context:
        if not isinstance(text, str):
            raise BadCallError(f"the text of a turn is a str, not {type_told(text)}")
        if self._answer is not None and (not self._turns or self._turns[-1].role != "assistant"):
            self._turns.append(ChatTurn("assistant", self._answer))
        self._turns.append(ChatTurn(role, text))
        return self

    async def _render(self) -> None:
        """Put the tokens of turns that are not there yet behind those that are."""
        answered = self._answer is not None
        if self._rendered + answered >= len(self._turns):
            return
        call = self._connection.next_call()
        opens = self._turns[-1].role == "user"
        message = Render(
            call,
            tuple(self._turns),
            opens_answer=opens,
            known_turns=self._rendered,
            known_answer=self._answer,
        )
        tokens = await self._connection.call(call, message, _tokens)
        if answered and self._pending and self._pending[-1] in self.eos:
            self._pending = []  # The template writes the end of the answer itself.
        self._pending += tokens
        self._rendered, self._answer = len(self._turns), "" if opens else None


def _tokens(message: FromHost, frames: Sequence[bytes]) -> list[int]:
    assert isinstance(message, Encoded)
    found: list[int] = np.frombuffer(frames[0], "<u4").tolist()
    return found
