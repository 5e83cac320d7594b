"""The worker's host of programs.

Covers starting programs within limits, carrying their calls to the step thread and back, text and templates,
messages to and from clients, and letting go of all that a program had when it ends, for whatever
reason. Does not cover one process (`pie.worker.programs.process`) or what calls do to pages
(`pie.worker.programs.roster`). For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pie.tokens.errors import TokensError
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.wire.errors import RefusedError
from pie.wire.frames import Buffer
from pie.wire.programs import (
    Begin,
    CallFailed,
    CallTool,
    CancelCall,
    Decode,
    Decoded,
    Drawn,
    Encode,
    Encoded,
    EngineCall,
    Finished,
    FromProgram,
    GenerateTokens,
    Heard,
    HttpCall,
    Listen,
    ModelFacts,
    Render,
    Say,
)
from pie.worker.grammar_queue import GrammarQueue
from pie.worker.programs.calls import MOST_TEXT_CHARS, bad, read_ints
from pie.worker.programs.commands import (
    Carried,
    ProgramAnswer,
    ProgramBegan,
    ProgramCall,
    ProgramCommand,
    ProgramEnded,
)
from pie.worker.programs.conversation import Conversations
from pie.worker.programs.errands import Errands
from pie.worker.programs.process import Ended, EndReason, ProgramProcess
from pie.worker.programs.tools import Toolbox
from pie.worker.programs.trouble import CallError
from pie.worker.programs.under_way import CallsUnderWay, size_of
from pie.worker.programs.web import Web
from pie.worker.settings import ProgramSettings

log = logging.getLogger("pie.worker.programs.host")

_MESSAGES_AT_ONCE = 64
"""Messages of one program that are carried out before others have a turn of the event loop."""
_MOST_HEARD = 1024
"""Messages of a client that wait to be listened to."""
_MOST_HEARD_CHARS = 4 << 20
"""Of all of them together."""


class TooManyPrograms(Exception):  # noqa: N818
    """No more programs are taken now."""


@dataclass(frozen=True, slots=True)
class ProgramToRun:
    """A program and what it is run with."""

    name: str
    source: str
    arguments: Mapping[str, str]
    entry: str = "main"
    salt: str | None = None
    tenant_tag: str = ""
    session_tag: str = ""


class RunningProgram:
    """One program that runs. Await `ended`."""

    def __init__(
        self, name: str, process: ProgramProcess, http_at_once: int, tools_at_once: int
    ) -> None:
        self.name = name
        self.process = process
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.calls = CallsUnderWay()
        self.errands = Errands(process.send, http_at_once, self.calls.end)
        self.tool_errands = Errands(process.send, tools_at_once, self.calls.end)
        process.on_gone = self.calls.close
        self._heard: deque[str | None] = deque()
        self._heard_chars = 0
        self._listening: deque[int] = deque()

    def tell(self, text: str | None) -> bool:
        """Give it a message of its client, None for the last; False where too many wait."""
        chars = len(text or "")
        if len(self._heard) >= _MOST_HEARD or self._heard_chars + chars > _MOST_HEARD_CHARS:
            return False
        self._heard.append(text)
        self._heard_chars += chars
        self._match()
        return True

    def listen(self, call: int) -> None:
        """Note that it waits for a message."""
        if len(self._listening) >= _MOST_HEARD:
            self.process.send(bad("too many calls listen at once").answer(call))
            return
        self._listening.append(call)
        self._match()

    def cancel(self) -> None:
        """End it."""
        self.process.kill(EndReason.CANCELLED)

    def _match(self) -> None:
        while self._heard and self._listening:
            text = self._heard[0]
            self.process.send(Heard(self._listening.popleft(), text))
            if text is None:
                return  # and every later wait gets it too
            self._heard.popleft()
            self._heard_chars -= len(text)


class ProgramHost:
    """Runs programs for one engine.

    Args:
        put: Hands a command to the step thread.
        tokenizer: The model's.
        template: The model's chat template; None where it has none.
        facts: What programs may know of the model.
        settings: Limits.
        grammars: Compiles what answers must match.
        tools: What programs may call; closed with the host.
    """

    def __init__(
        self,
        put: Callable[[ProgramCommand], None],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        facts: ModelFacts,
        settings: ProgramSettings,
        grammars: GrammarQueue,
        tools: Toolbox | None = None,
    ) -> None:
        self._put = put
        self._tools = tools or Toolbox((), settings)
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._conversations = Conversations(tokenizer, template)
        self._facts = facts
        self._settings = settings
        self._web = Web(settings)
        self._programs: dict[str, RunningProgram] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    @property
    def running(self) -> int:
        """Programs that run now."""
        return len(self._programs)

    async def start(
        self,
        program: ProgramToRun,
        on_said: Callable[[str], None] = lambda _: None,
        on_output: Callable[[str], None] = lambda _: None,
    ) -> RunningProgram:
        """Start a program.

        Args:
            program: What to run.
            on_said: Called with each message for the client.
            on_output: Called with what it prints, as it comes.

        Raises:
            TooManyPrograms: As many run as may.
            OSError: There is no process to be had.
        """
        if len(self._programs) >= self._settings.most:
            raise TooManyPrograms(
                f"{len(self._programs)} programs run already, which is all that [programs] most allows"
            )
        number = f"program-{next(self._numbers)}"
        process = ProgramProcess(self._settings, on_output)
        running = self._programs[number] = RunningProgram(
            number, process, self._settings.http_at_once, self._settings.tools_at_once
        )
        self._put(ProgramBegan(number, program.salt, program.tenant_tag, program.session_tag))
        try:
            begin = Begin(
                program.name,
                program.source,
                dict(program.arguments),
                self._facts,
                program.entry,
                self._tools.facts,
            )
            await process.start(begin)
        except BaseException:
            self._forget(number)
            raise
        task = asyncio.get_running_loop().create_task(self._serve(running, on_said))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    def take(self, answers: Iterable[ProgramAnswer]) -> None:
        """Pass answers of the step thread on."""
        for answer in answers:
            running = self._programs.get(answer.program)
            if running is None:
                continue
            message = answer.message
            if not isinstance(message, Carried):
                running.process.send(message, answer.frames)
            if not isinstance(message, Drawn) or message.finish:
                running.calls.end(message.call)

    def end_all(self) -> None:
        """End all programs."""
        for running in list(self._programs.values()):
            running.cancel()

    async def close(self) -> None:
        """End all programs and wait until they are gone."""
        self.end_all()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._web.close()
        await self._tools.close()

    async def _serve(self, running: RunningProgram, on_said: Callable[[str], None]) -> None:
        process = running.process
        try:
            async with asyncio.timeout(self._settings.wall_s):
                for count in itertools.count(1):
                    got = await process.read()
                    if got is None:
                        break
                    await self._carry_out(running, *got, on_said)
                    if not count % _MESSAGES_AT_ONCE:
                        # What has come already is read without a wait.
                        await asyncio.sleep(0)
        except TimeoutError:
            process.kill(EndReason.TOO_LONG)
        except Exception:
            log.exception("a program's messages could not be carried out")
            process.kill(EndReason.DIED)
        # Its pages go first: nobody else waits for a process to be gone.
        self._put(ProgramEnded(running.name))
        await running.errands.close()
        await running.tool_errands.close()
        try:
            ended = await process.ended()
        except Exception:
            log.exception("a program's process did not end")
            ended = Ended(EndReason.DIED, error="its process could not be ended")
        self._programs.pop(running.name, None)
        running.ended.set_result(ended)

    async def _carry_out(
        self,
        running: RunningProgram,
        message: FromProgram,
        frames: Sequence[bytes],
        on_said: Callable[[str], None],
    ) -> None:
        process = running.process
        match message:
            case Say(text):
                # Some that came with one too many may still be on their way.
                if process.may_say(len(text.encode())):
                    with contextlib.suppress(Exception):
                        on_said(text)
            case Listen(call):
                running.listen(call)
            case Encode() | Render() | Decode():
                # Beside the event loop: a long text takes milliseconds.
                answer, made = await asyncio.to_thread(self._text, message, frames)
                process.send(answer, made)
            case HttpCall(call):
                body = frames[0] if frames else b""
                if await self._begin(running, message, frames):
                    running.errands.begin(call, partial(self._web.ask, message, body))
            case CallTool(call):
                given = frames[0] if frames else b"{}"
                if await self._begin(running, message, frames):
                    running.tool_errands.begin(call, partial(self._tools.call, message, given))
            case Finished():
                pass  # the process has taken note
            case CancelCall(_, target):
                if running.calls.cancel(target):
                    self._put(ProgramCall(running.name, message, frames))
            case _:
                await self._hand_over(running, message, frames)

    async def _hand_over(
        self, running: RunningProgram, message: EngineCall, frames: Sequence[bytes]
    ) -> None:
        """Give a call to the step thread; the program's later calls wait for its grammar, and for room."""
        if not await self._begin(running, message, frames):
            return
        constraint = None
        if isinstance(message, GenerateTokens) and message.grammar is not None:
            try:
                constraint = await self._grammars.compiled(message.grammar)
            except RefusedError as error:
                running.process.send(bad(f"the grammar: {error.message}").answer(message.call))
                running.calls.end(message.call)
                return
        self._put(ProgramCall(running.name, message, frames, constraint))

    async def _begin(
        self,
        running: RunningProgram,
        message: EngineCall | HttpCall | CallTool,
        frames: Sequence[bytes],
    ) -> bool:
        """Wait until there is room for a call; False where none is wanted any more."""
        try:
            size = size_of(message, frames, self._facts)
            return await running.calls.begin(message.call, size)
        except ValueError as error:
            running.process.send(bad(str(error)).answer(message.call))
            return False

    def _text(
        self, message: Encode | Render | Decode, frames: Sequence[bytes]
    ) -> tuple[Encoded | Decoded | CallFailed, Sequence[Buffer]]:
        """Answer a call that is about text alone."""
        try:
            match message:
                case Encode(call, text, special):
                    if len(text) > MOST_TEXT_CHARS:
                        raise bad(f"a text of more than {MOST_TEXT_CHARS} characters")
                    tokens = self._tokenizer.encode(text, add_special_tokens=special)
                    return Encoded(call), [_u32(tokens)]
                case Render(call):
                    return Encoded(call), [_u32(self._conversations.tokens(message))]
                case Decode(call):
                    return Decoded(call, self._tokenizer.decode(read_ints(frames).tolist())), ()
        except CallError as error:
            return error.answer(message.call), ()
        except TokensError as error:
            return bad(str(error)).answer(message.call), ()

    def _forget(self, number: str) -> None:
        self._programs.pop(number, None)
        self._put(ProgramEnded(number))


def _u32(tokens: Sequence[int]) -> Buffer:
    return np.asarray(tokens, "<u4").data
