"""How the next token is chosen.

A `Sampler` is a declaration that the engine carries out; a function over logits runs in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pie.inferlet.errors import type_told
from pie.wire.messages import Sampling

LogitFunction = Callable[[NDArray[np.float32]], int]
"""Takes logits `[vocab_size]` and returns a token id."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A draw by the engine.

    Attributes:
        temperature: 0 takes the likeliest token; at most 100.
        top_p: Draw from the fewest likeliest tokens that hold this share.
        top_k: Draw from so many likeliest tokens; 0 from all.
        min_p: Draw from tokens at least this likely, relative to the likeliest.
        seed: The same seed draws the same tokens; None draws another one each time.
        frequency_penalty: Taken off a token's logit for each time it was generated; -2 to 2.
        presence_penalty: Taken off once it was; -2 to 2.
        logit_bias: Added to logits, by token id; -100 to 100.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def declared(self) -> Sampling:
        """Return it as the engine takes it."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias,
        )


def greedy() -> Sampler:
    """Return the sampler that takes the likeliest token."""
    return Sampler(temperature=0.0)


def is_no_choice(sampler: object) -> bool:
    """Whether it is neither a `Sampler` nor a function over logits."""
    if sampler is greedy or isinstance(sampler, type):
        return True
    return not (isinstance(sampler, Sampler) or callable(sampler))


def sampler_told(sampler: object) -> str:
    """Return how an error names what is no `Sampler`."""
    if sampler is greedy or sampler is Sampler:
        return f"{sampler.__name__} itself: is `()` missing?"
    return repr(sampler)[:100] if isinstance(sampler, str) else type_told(sampler)
