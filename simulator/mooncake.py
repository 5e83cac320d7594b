"""Mooncake's trace format: a JSON object a line, prompts as hashes of their pages.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

Covers reading it. The time is in milliseconds; each hash names 512 tokens and everything before them,
and the last one what is left (Qin and others, "Mooncake", FAST '25).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from pie.simulator.trace import PageRuns, Trace, TraceRequest, problem_at, whole
from pie.wire.malformed import why_malformed

HASHED_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_ANSWERS = 1 << 31
"""Answers are made of tokens from here on: in this format nothing says that a prompt holds an earlier
answer, so that they match nothing."""


def read_mooncake(lines: Iterable[str], problems: list[str]) -> Trace:
    """Return a trace; adds what is wrong with it to `problems`."""
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(line, number))
        except ValueError as error:
            problem_at(problems, number, str(error))
    return Trace(requests, _token_of_key, page_tokens=HASHED_TOKENS)


def _token_of_key(key: bytes) -> int | None:
    """Return the hash that a key is, as a number."""
    number = int.from_bytes(key, "big")
    return number if number < _ANSWERS else None


def _request(line: str, number: int) -> TraceRequest:
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ValueError(f"is not a JSON object: {why_malformed(line, error)}") from None
    missing = [name for name in _FIELDS if name not in record]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing; a request has {', '.join(_FIELDS)}")
    timestamp, hashes = record["timestamp"], record["hash_ids"]
    if (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not 0 <= timestamp <= 1e15
    ):
        raise ValueError("`timestamp` must be milliseconds, of at least 0")
    tokens = whole(record["input_length"], "input_length")
    answer = whole(record["output_length"], "output_length", least=0)
    if not isinstance(hashes, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < _ANSWERS for one in hashes
    ):
        raise ValueError(f"`hash_ids` must be a list of whole numbers from 0 to {_ANSWERS - 1:,}")
    needed = math.ceil(tokens / HASHED_TOKENS)
    if len(hashes) != needed:
        raise ValueError(
            f"`hash_ids` has {len(hashes)} entries, and {tokens} tokens are {needed} pages of "
            f"{HASHED_TOKENS}"
        )
    return TraceRequest(
        arrival_s=timestamp / 1e3,
        runs=PageRuns(hashes, HASHED_TOKENS, tokens - HASHED_TOKENS * (needed - 1)),
        # Every answer has a token at least.
        output_tokens=max(1, answer),
        answer=_ANSWERS + number % _ANSWERS,
    )
