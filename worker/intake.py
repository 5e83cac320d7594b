"""Which requests a worker takes on.

Covers checking a `Generate` before it reaches the engine: nothing that a client sends may fail a
step. Does not cover how busy the worker is (`pie.worker.scheduler`).
"""

from __future__ import annotations

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
_MOST_BAD_WORD_TOKENS = 1 << 18
"""Of all bad words together, which are compared at each step."""
_MOST_BIAS = 100.0
_MOST_PENALTY = 2.0
_MOST_TEMPERATURE = 100.0
_SCALES = (0.01, 10.0)
"""Repetition penalties. Beyond these bounds a logit in float32 may become an infinity, and a row of
them one that nothing can be drawn from."""


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
            (
                0 <= sampling.temperature <= _MOST_TEMPERATURE,
                f"temperature must be between 0 and {_MOST_TEMPERATURE:g}",
            ),
            (0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1"),
            (sampling.top_k >= 0, "top_k must be 0 or more"),
            (0 <= sampling.min_p <= 1, "min_p must be between 0 and 1"),
            (
                abs(sampling.frequency_penalty) <= _MOST_PENALTY,
                f"frequency_penalty must be between -{_MOST_PENALTY:g} and {_MOST_PENALTY:g}",
            ),
            (
                abs(sampling.presence_penalty) <= _MOST_PENALTY,
                f"presence_penalty must be between -{_MOST_PENALTY:g} and {_MOST_PENALTY:g}",
            ),
            (
                all(abs(value) <= _MOST_BIAS for value in sampling.logit_bias.values()),
                f"logit_bias must hold numbers between -{_MOST_BIAS:g} and {_MOST_BIAS:g}",
            ),
            (
                len(sampling.logit_bias) <= _MOST_BIASES,
                f"logit_bias must have at most {_MOST_BIASES} entries",
            ),
            (
                _SCALES[0] <= sampling.repetition_penalty <= _SCALES[1],
                f"repetition_penalty must be between {_SCALES[0]:g} and {_SCALES[1]:g}",
            ),
            (sampling.min_tokens >= 0, "min_tokens must be 0 or more"),
            (
                len(sampling.bad_words) <= _MOST_BAD_WORDS and all(sampling.bad_words),
                f"bad_words must be at most {_MOST_BAD_WORDS} sequences, none of them empty",
            ),
            (
                sum(map(len, sampling.bad_words)) <= _MOST_BAD_WORD_TOKENS,
                f"bad_words must have at most {_MOST_BAD_WORD_TOKENS} tokens together",
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
