"""A program's calls to its host.

Covers numbering calls, handing answers to who waits for them, and failures that nobody waits for. Does
not cover what the calls mean (`pie.inferlet.working_set`, `pie.inferlet.pipeline`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pie.inferlet.errors import (
    BadCallError,
    HostGoneError,
    InferletError,
    error_of,
    type_told,
)
from pie.wire.errors import MessageTooLarge, PeerGone, WireError
from pie.wire.frames import Buffer
from pie.wire.pipe import Pipe, encode
from pie.wire.programs import (
    Begin,
    CallFailed,
    Drawn,
    FromHost,
    Trouble,
    decode_from_host,
    decode_from_program,
)

_CLOSES_S = 600.0
"""Longest wait for a host to read what was sent last; it has limits of its own, and ends this process by them."""
_SETTLES_S = 10.0
"""Longest wait at a program's end for answers that nobody waits for."""
_MOST_NUMBER = (1 << 32) - 1
Answer = tuple[FromHost, Sequence[bytes]]
Learn = Callable[[FromHost, Sequence[bytes]], None]
_T = TypeVar("_T")


class Pending(Generic[_T]):
    """What a call will give: await it, or go on and let a later wait raise what went wrong."""

    def __init__(
        self,
        connection: Connection,
        future: asyncio.Future[Answer],
        take: Callable[[FromHost, Sequence[bytes]], _T],
    ) -> None:
        self._connection = connection
        self._future = future
        self._take = take

    def __await__(self) -> Generator[object, None, _T]:
        """Wait for the answer.

        Raises:
            InferletError: The call failed, or an earlier one that nobody waited for did.
        """
        return self._wait().__await__()

    async def _wait(self) -> _T:
        self._connection.claim(self._future)
        try:
            message, frames = await self._future
        except InferletError:
            # What went wrong before may be why this did too.
            self._connection.raise_unclaimed()
            raise
        self._connection.raise_unclaimed()
        return self._take(message, frames)


class DrawnStream:
    """The answers to a call that is answered bit by bit, none of which is lost to a wait that is cancelled."""

    def __init__(self, queue: asyncio.Queue[Answer | None]) -> None:
        self._queue = queue

    async def next(self) -> Drawn:
        """Wait for the next one; the one with a `finish` is the last.

        Raises:
            InferletError: The call failed, or the worker is gone.
        """
        answer = await self._queue.get()
        if answer is None:
            raise HostGoneError("the worker is gone")
        found = answer[0]
        if isinstance(found, CallFailed):
            raise error_of(found)
        assert isinstance(found, Drawn)
        return found


class Connection:
    """One program's end of the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._last_call = 0
        self._last_set = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._streams: dict[int, asyncio.Queue[Answer | None]] = {}
        self._learn: dict[int, Learn] = {}
        self._claimed: set[asyncio.Future[Answer]] = set()
        self._unclaimed: InferletError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def begin(self) -> Begin:
        """Return what the host says first, and read on behind the caller's back."""
        header, _ = await self._pipe.read()
        message = decode_from_host(header)
        assert isinstance(message, Begin)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return message

    def next_call(self) -> int:
        """Return a number for a call."""
        self._last_call += 1
        return self._last_call

    def next_set(self) -> int:
        """Return a number for a working set."""
        self._last_set += 1
        return self._last_set

    def tell(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        """Send what is not answered.

        Raises:
            BadCallError: It cannot be meant: something is of another type, or it is too large.
        """
        self._send(message, frames)

    def call(
        self,
        number: int,
        message: msgspec.Struct,
        take: Callable[[FromHost, Sequence[bytes]], _T],
        frames: Sequence[Buffer] = (),
        learn: Learn | None = None,
    ) -> Pending[_T]:
        """Send a call.

        Args:
            number: Its number.
            message: The call.
            take: Makes the result of its answer, for who waits for it.
            frames: Of the message.
            learn: Called with the answer as it comes, also where the call failed.

        Raises:
            BadCallError: It cannot be meant: something is of another type, or it is too large.
        """
        self._send(message, frames, number, learn)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if learn is not None:
            self._learn[number] = learn
        return Pending(self, future, take)

    def stream(
        self,
        number: int,
        message: msgspec.Struct,
        frames: Sequence[Buffer] = (),
        learn: Learn | None = None,
    ) -> DrawnStream:
        """Send a call that is answered bit by bit; `learn` is called with its last answer as it comes.

        Raises:
            BadCallError: See `call`.
        """
        self._send(message, frames, number, learn)
        queue = self._streams[number] = asyncio.Queue()
        if learn is not None:
            self._learn[number] = learn
        return DrawnStream(queue)

    async def drain(self) -> None:
        """Wait until the host has taken most of what was sent."""
        with contextlib.suppress(PeerGone):
            await self._pipe.drain()

    def claim(self, future: asyncio.Future[Answer]) -> None:
        """Note that somebody waits for an answer, and gets its failure."""
        self._claimed.add(future)
        if future.done() and self._unclaimed is not None and future.exception() is self._unclaimed:
            self._unclaimed = None

    def raise_unclaimed(self) -> None:
        """Raise what went wrong with a call that nobody waited for; once."""
        error, self._unclaimed = self._unclaimed, None
        if error is not None:
            raise error

    async def settle(self) -> InferletError | None:
        """Wait for calls on working sets that are under way; return what went wrong and nobody waited for."""
        under_way = [self._waiting[number] for number in self._learn if number in self._waiting]
        if under_way:
            await asyncio.wait(under_way, timeout=_SETTLES_S)
        error, self._unclaimed = self._unclaimed, None
        return error

    async def close(self) -> None:
        """Send what is unsent, and wait until the host has read it: it closes its end then.

        An end that is closed while answers are on their way to it takes what it sent last with it.
        """
        await self.drain()
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSES_S):
                    await self._reader
        self._pipe.close()

    def _send(
        self,
        message: msgspec.Struct,
        frames: Sequence[Buffer],
        number: int = 0,
        learn: Learn | None = None,
    ) -> None:
        """Send what the host will take; with what it would not, it would end the program."""
        try:
            decode_from_program(encode(message))
            self._pipe.send(message, frames)
        except (TypeError, ValueError, OverflowError, RecursionError, MessageTooLarge) as error:
            # Those of msgspec are ValueErrors, and so is text that cannot be written in UTF-8.
            reason = f"{type(message).__name__} cannot be sent: {error}"
            if learn is not None:
                learn(CallFailed(number, Trouble.BAD_CALL, reason), ())
            raise BadCallError(reason) from error

    async def _read(self) -> None:
        try:
            while True:
                header, frames = await self._pipe.read()
                self._take(decode_from_host(header), frames)
        except WireError:
            gone = HostGoneError("the worker is gone")
            for number in list(self._waiting):
                self._fail(number, gone)
            for queue in self._streams.values():
                queue.put_nowait(None)

    def _take(self, message: FromHost, frames: Sequence[bytes]) -> None:
        assert not isinstance(message, Begin)
        stream = self._streams.get(message.call)
        if stream is None or not isinstance(message, Drawn) or message.finish:
            # The last answer to the call, whoever waits for it or does not any more.
            self._streams.pop(message.call, None)
            learn = self._learn.pop(message.call, None)
            if learn is not None:
                learn(message, frames)
        if stream is not None:
            stream.put_nowait((message, frames))
        elif isinstance(message, CallFailed):
            self._fail(message.call, error_of(message))
        else:
            future = self._waiting.pop(message.call, None)
            if future is not None and not future.done():
                future.set_result((message, frames))
            if future is not None:
                self._claimed.discard(future)

    def _fail(self, number: int, error: InferletError) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.cancelled():
            self._unclaimed = self._unclaimed or error
        elif not future.done():
            future.set_exception(error)
            future.exception()  # seen: asyncio need not complain of it
            if future not in self._claimed:
                self._unclaimed = self._unclaimed or error
            self._claimed.discard(future)


def whole(numbers: ArrayLike | Iterable[int], what: str) -> NDArray[np.int64]:
    """Return numbers of tokens, slots or positions, `what` they are called.

    Raises:
        BadCallError: One of them is no whole number, or does not fit into 32 bits.
    """
    if inspect.isawaitable(numbers):
        raise BadCallError(f"{what} are whole numbers, not {type_told(numbers)}")
    try:
        array = np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise BadCallError(f"{what} are whole numbers: {error}") from error
    if array.size and array.dtype.kind not in "iu":
        raise BadCallError(f"{what} are whole numbers, not {array.dtype}")
    flat = array.reshape(-1)
    wrong = flat[(flat < 0) | (flat > _MOST_NUMBER)]
    if wrong.size:
        raise BadCallError(f"{what} are from 0 to {_MOST_NUMBER}, not {int(wrong[0])}")
    return flat.astype(np.int64)


def u32(numbers: ArrayLike | Iterable[int], what: str = "numbers") -> Buffer:
    """Return numbers as a frame.

    Raises:
        BadCallError: See `whole`.
    """
    return np.ascontiguousarray(whole(numbers, what), "<u4").tobytes()
