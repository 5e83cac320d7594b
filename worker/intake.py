"""Which requests a worker takes on.

Covers checking a `Generate` before it reaches the engine: nothing that a client sends may fail a
step. Does not cover how busy the worker is (`pie.worker.scheduler`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pie.page.key import unpack_tokens
from pie.wire.errors import RefusedError
from pie.wire.messages import Generate, RefusalCode, Sampling

_TOKEN_BYTES = 4
_MOST_LOGPROBS = 256
_MOST_STOPS = 256
_MOST_BAD_WORDS = 512
_MOST_BIASES = 4096
"""Biases are put together anew at each step, a microsecond each."""


@dataclass(frozen=True, slots=True)
class Intake:
    """What requests must keep to.

    Args:
        vocab_size: One more than the largest token id.
        context_tokens: Most tokens of prompt and output together.
    """

    vocab_size: int
    context_tokens: int

    def tokens(self, request: Generate, frames: Sequence[memoryview]) -> array[int]:
        """Return a request's tokens.

        Raises:
            RefusedError: The request cannot be carried out; the message names what is wrong.
        """
        if len(frames) != 1 or frames[0].nbytes % _TOKEN_BYTES:
            raise _bad("a request brings one frame of 32-bit token ids")
        tokens = unpack_tokens(bytes(frames[0]))
        if not tokens:
            raise _bad("the prompt is empty")
        if len(tokens) > self.context_tokens:
            raise RefusedError(
                RefusalCode.CONTEXT_LENGTH,
                f"the prompt has {len(tokens)} tokens and the context {self.context_tokens}, "
                "which must hold at least one token more",
            )
        if len(tokens) == self.context_tokens and request.output_start == len(tokens):
            raise RefusedError(
                RefusalCode.CONTEXT_LENGTH,
                f"the prompt fills the context of {self.context_tokens} tokens, "
                "which leaves no room for an answer",
            )
        if max(tokens) >= self.vocab_size:
            raise _bad(f"token id {max(tokens)} is not below {self.vocab_size}")
        if not 0 <= request.output_start <= len(tokens):
            raise _bad(f"output_start {request.output_start} is not in the {len(tokens)} tokens")
        if request.max_tokens < 1:
            raise _bad("max_tokens must be at least 1")
        if not request.request_id:
            raise _bad("request_id is empty")
        if any(not stop for stop in request.stop):
            raise _bad("a stop string is empty")
        if len(request.stop) > _MOST_STOPS or len(request.stop_token_ids) > _MOST_STOPS:
            raise _bad(f"more than {_MOST_STOPS} stop strings or stop tokens")
        wanted = request.prompt_logprobs
        if wanted is not None and not 0 <= wanted <= _MOST_LOGPROBS:
            raise _bad(f"prompt_logprobs must be between 0 and {_MOST_LOGPROBS}")
        check_sampling(request.sampling)
        return tokens


def check_sampling(sampling: Sampling) -> None:
    """Refuse what no token can be drawn by.

    Raises:
        RefusedError: Names what is wrong.
    """
    wrong = [
        text
        for good, text in (
            (0 <= sampling.temperature < math.inf, "temperature must be 0 or more"),
            (0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1"),
            (sampling.top_k >= 0, "top_k must be 0 or more"),
            (0 <= sampling.min_p <= 1, "min_p must be between 0 and 1"),
            (math.isfinite(sampling.frequency_penalty), "frequency_penalty must be a number"),
            (math.isfinite(sampling.presence_penalty), "presence_penalty must be a number"),
            (
                all(map(math.isfinite, sampling.logit_bias.values())),
                "logit_bias must hold numbers",
            ),
            (
                len(sampling.logit_bias) <= _MOST_BIASES,
                f"logit_bias must have at most {_MOST_BIASES} entries",
            ),
            (
                0 < sampling.repetition_penalty < math.inf,
                "repetition_penalty must be above 0",
            ),
            (sampling.min_tokens >= 0, "min_tokens must be 0 or more"),
            (
                len(sampling.bad_words) <= _MOST_BAD_WORDS and all(sampling.bad_words),
                f"bad_words must be at most {_MOST_BAD_WORDS} sequences, none of them empty",
            ),
            (
                sampling.logprobs is None or 0 <= sampling.logprobs <= _MOST_LOGPROBS,
                f"logprobs must be between 0 and {_MOST_LOGPROBS}",
            ),
        )
        if not good
    ]
    if wrong:
        raise _bad("; ".join(wrong))


def _bad(text: str) -> RefusedError:
    return RefusedError(RefusalCode.BAD_MESSAGE, text)
