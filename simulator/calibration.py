"""A cost model fitted from a live cluster, through its API.

Covers what is asked and how numbers become a model. Does not cover the model's meaning
(`pie.simulator.cost_model`).

Prompts of made-up token ids that nobody has asked before are computed whole, so the time to their first
token grows with their length by what a token costs. Answers of one and of several sequences at once
give a decode step, and what a sequence more adds to it. How fast pages load is not asked for, because
nothing from outside makes a worker load: those rates stay as they are.
"""

from __future__ import annotations

import json
import math
import ssl
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import httpx

from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError

_PROMPT_TOKENS = (64, 256, 512)
_ROUNDS = 3
_ANSWER_TOKENS = 48
_CHOICES = 8
_ID_RANGE = (1_000, 10_000)
"""Ids that any vocabulary has, and that are no special tokens."""

Ask = Callable[[Sequence[int], int, int], list[float]]
"""Asks for a completion of token ids: most tokens of an answer, how many answers. Returns the seconds
from asking to each event of the stream."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen."""

    prefill: Sequence[tuple[int, float]]
    """Prompt tokens, and seconds to the first token."""
    step_s: float
    """A decode step of one sequence."""
    steps_s: float
    """A decode step of `choices` sequences."""
    choices: int


def calibrate(
    url: str,
    token: str,
    *,
    seed: int,
    timeout_s: float = 120.0,
    trust: ssl.SSLContext | bool = True,
) -> CostModel:
    """Return the cost model of the workers behind a router, whose certificate `trust` believes.

    Raises:
        SetupError: The router does not answer as it should; the message says what it said.
    """
    with httpx.Client(
        base_url=url, timeout=timeout_s, headers=_authorised(token), verify=trust
    ) as client:
        try:
            answer = client.get("/v1/models").raise_for_status()
            models = [str(one["id"]) for one in answer.json()["data"]]
            if not models:
                raise SetupError(f"{url} has no model to calibrate")
            return fit(observe(_asker(client, models[0]), Random(seed)))
        except httpx.HTTPStatusError as error:
            said = error.response.text[:200] if error.response.is_stream_consumed else ""
            code = error.response.status_code
            raise SetupError(f"{url} answered {code}: {said or error.request.url.path}") from None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SetupError(f"{url} does not answer as a router does: {reason}") from None


def observe(ask: Ask, random: Random) -> Observed:
    """Ask what is needed to fit a model."""

    def prompt(tokens: int) -> list[int]:
        return [random.randrange(*_ID_RANGE) for _ in range(tokens)]

    ask(prompt(16), 2, 1)  # the first request ever is slower
    prefill = [
        (tokens, ask(prompt(tokens), 1, 1)[0]) for _ in range(_ROUNDS) for tokens in _PROMPT_TOKENS
    ]
    one = [_gap_s(ask(prompt(16), _ANSWER_TOKENS, 1), 1) for _ in range(_ROUNDS)]
    many = [_gap_s(ask(prompt(16), _ANSWER_TOKENS, _CHOICES), _CHOICES) for _ in range(_ROUNDS)]
    return Observed(prefill, statistics.median(one), statistics.median(many), _CHOICES)


def fit(seen: Observed) -> CostModel:
    """Return the model that what was seen says.

    Raises:
        SetupError: It says nothing: a longer prompt took no longer.
    """
    lengths = sorted({tokens for tokens, _ in seen.prefill})
    # The median of each length: a busy machine makes some of them slow.
    medians = [statistics.median(s for tokens, s in seen.prefill if tokens == n) for n in lengths]
    slope_s = statistics.linear_regression(lengths, medians).slope
    if not (math.isfinite(slope_s) and slope_s > 0):
        raise SetupError("longer prompts took no longer: the cluster is too busy to be measured")
    added_s = max(0.0, (seen.steps_s - seen.step_s) / (seen.choices - 1))
    model = CostModel(
        prefill_tokens_per_s=round(1 / slope_s, 1),
        decode_step_ms=round(seen.step_s * 1e3, 3),
        decode_sequence_ms=round(added_s * 1e3, 3),
    )
    model.check()
    return model


def _gap_s(events_s: Sequence[float], choices: int) -> float:
    """Return the time between the tokens of a choice, from the times of all events."""
    if len(events_s) <= choices:
        raise ValueError("an answer ended after its first token")
    return (events_s[-1] - events_s[0]) / (len(events_s) / choices - 1)


def _asker(client: httpx.Client, model: str) -> Ask:
    def ask(ids: Sequence[int], max_tokens: int, choices: int) -> list[float]:
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "n": choices,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
        }
        events_s: list[float] = []
        began_s = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                answer.read()
            answer.raise_for_status()
            events_s.extend(
                time.perf_counter() - began_s
                for line in answer.iter_lines()
                if line.startswith("data: {") and json.loads(line[6:]).get("choices")
            )
        if not events_s:
            raise ValueError("an answer had no tokens")
        return events_s

    return ask


def _authorised(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}
