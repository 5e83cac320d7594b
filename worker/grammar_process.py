"""The process that tries grammars before a worker compiles them: `python -m pie.worker.grammar_process`.

Covers compiling each grammar that comes on standard input in a process of its own, forked from this one, which
knows the model's tokens already, and saying what became of it. Does not cover who starts it and waits for it
(`pie.worker.grammar_trial`).
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import struct
import sys
from pathlib import Path
from typing import IO, TypeVar

import llguidance
import msgspec

from pie.wire.messages import Grammar
from pie.worker.grammar_text import BadGrammarError, beginning, on_deep_stack

STACK_BYTES = 64 << 20
"""Half of what a worker compiles with, so that what passes here passes there."""
LIMIT_S = 5.0
"""Longest compilation; a worker compiles it again after that."""
_MEMORY_BYTES = 1 << 30
"""That one compilation may take."""
_STEPS = 8
"""Of an answer, tried too."""
_MOST_VERDICT = 1 << 16
_SIZE = struct.Struct("<I")

Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True):
    """The model that grammars are for."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limit_s: float = LIMIT_S


class Verdict(msgspec.Struct, frozen=True):
    """What came of one grammar; an empty reason where it is right."""

    reason: str = ""
    is_final: bool = True
    """Whether it would be the same another time."""


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes], kind: type[Message]) -> Message | None:
    """Return the next message; None where the other end is gone."""
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    data = stream.read(size)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == size else None


def make_tokenizer(setup: Setup) -> llguidance.LLTokenizer:
    """Return a model's tokens as llguidance needs them; takes a second for 49,152."""
    return llguidance.LLTokenizer(
        setup.tokenizer, setup.vocab_size, eos_token=list(setup.eos_token_ids)
    )


def main() -> None:
    """Try grammars until standard input ends."""
    given, told = sys.stdin.buffer, sys.stdout.buffer
    setup = read(given, Setup)
    if setup is None:
        return
    tokenizer = make_tokenizer(setup)
    write(told, Verdict())
    while (grammar := read(given, Grammar)) is not None:
        verdict = _forked(tokenizer, grammar, setup.limit_s, given.fileno())
        if verdict is None:
            return
        write(told, verdict)


def _forked(
    tokenizer: llguidance.LLTokenizer, grammar: Grammar, limit_s: float, parent: int
) -> Verdict | None:
    """Return what came of a grammar; None where the worker is gone meanwhile."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _limit(limit_s)
            os.write(theirs, msgspec.msgpack.encode(_tried(tokenizer, grammar)))
        finally:
            os._exit(0)
    os.close(theirs)
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    poll.register(parent, select.POLLHUP)
    try:
        ready = [handle for handle, _ in poll.poll(limit_s * 1000)]
        told = os.read(ours, _MOST_VERDICT) if ours in ready else b""
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)
    if parent in ready:
        return None
    if not ready:
        return Verdict(f"it takes more than {limit_s:g} s to compile", is_final=False)
    if not told:
        return Verdict(
            "it is nested or chained too deeply to be compiled, "
            f"or takes more than {_MEMORY_BYTES >> 30} GiB"
        )
    return msgspec.msgpack.decode(told, type=Verdict)


def _limit(limit_s: float) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + STACK_BYTES + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # Who forked this process ends it before; where it cannot, this does.
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 2, int(limit_s) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tried(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> Verdict:
    try:
        on_deep_stack(lambda: _walk(beginning(tokenizer, grammar)), STACK_BYTES)
    except BadGrammarError as error:
        return Verdict(str(error))
    return Verdict()


def _walk(matcher: llguidance.LLMatcher) -> None:
    """Take a few steps of some answer: what would end a process there ends this one."""
    draw = random.Random(0)
    for _ in range(_STEPS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(bits.bit_length()) if bits >> token & 1]
        if matcher.is_error() or matcher.is_stopped() or not allowed:
            return
        matcher.consume_token(draw.choice(allowed))


if __name__ == "__main__":
    main()
