"""A program's calls that are under way at the engine or its host, and what they take of the worker's memory.

Covers how many there may be and how large, with what their answers will take. Does not cover
carrying them to the engine (`pie.worker.programs.host`).

A call is under way from when it was read until the engine has carried it out or answered it for good. What is
answered waits in the pipe, from which no more calls are read while much of it is unread
(`pie.wire.pipe`): so a program that reads no answers makes the worker hold no more than is counted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pie.wire.programs import (
    CallTool,
    CancelCall,
    CloseSet,
    EngineCall,
    GenerateTokens,
    HttpCall,
    ModelFacts,
    OpenSet,
    Rows,
    RunPass,
)
from pie.worker.programs.calls import MOST_RESULT_BYTES

MOST_CALLS = 4096
MOST_BYTES = 128 << 20
"""One call alone may be larger."""
_CALL_BYTES = 512
"""What one takes besides its frames, such as its place on a working set."""
_DRAWN_BYTES = 64
"""What telling a token takes."""


def size_of(
    call: EngineCall | HttpCall | CallTool, frames: Sequence[bytes], model: ModelFacts
) -> int:
    """Return what a call and its answer take at most, in bytes."""
    given = sum(len(frame) for frame in frames)
    match call:
        case OpenSet() | CloseSet() | CancelCall() | HttpCall() | CallTool():
            answer = 0
        case RunPass(_, inputs):
            answer = 0
            for one in inputs:
                # Tokens or embeddings are among the frames.
                rows = {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: given // 4}
                elements = (
                    rows[one.logits] * model.vocab_size + rows[one.hidden] * model.hidden_size
                )
                answer += 4 * (elements + max(one.targets, 0) + 2 * max(one.top, 0))
            scored = sum(1 for one in inputs if one.scores)
            scores = 4 * model.layers * model.query_heads * model.context_tokens * scored
            # The engine refuses results that are larger.
            answer = min(answer, MOST_RESULT_BYTES) + min(scores, MOST_RESULT_BYTES)
        case GenerateTokens():
            answer = _DRAWN_BYTES * min(max(call.max_tokens, 0), model.context_tokens)
        case _:
            answer = 4 * model.context_tokens  # a working set's slots
    return _CALL_BYTES + given + answer


class CallsUnderWay:
    """The calls of one program. For one event loop."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of all calls under way, with their answers."""
        self.is_over = False
        """Whether the program is gone, and no call begins any more."""
        self._sizes: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sizes)

    async def begin(self, call: int, size: int) -> bool:
        """Wait until there is room for a call and count it; False where the program is gone.

        Raises:
            ValueError: A call of this number is under way.
        """
        while not self.is_over and self._sizes and not self._has_room(size):
            self._room.clear()
            await self._room.wait()
        if call in self._sizes:
            raise ValueError(f"call {call} is under way")
        if not self.is_over:
            self._sizes[call] = size
            self.bytes += size
        return not self.is_over

    def end(self, call: int) -> None:
        """Count a call no more; one that is not under way is ignored."""
        self.bytes -= self._sizes.pop(call, 0)
        self._cancelled.discard(call)
        self._room.set()

    def cancel(self, call: int) -> bool:
        """Say whether a call is under way that was not cancelled before."""
        if call not in self._sizes or call in self._cancelled:
            return False
        self._cancelled.add(call)
        return True

    def close(self) -> None:
        """Let nothing wait any more: the program is gone."""
        self.is_over = True
        self._room.set()

    def _has_room(self, size: int) -> bool:
        return len(self._sizes) < MOST_CALLS and self.bytes + size <= MOST_BYTES
