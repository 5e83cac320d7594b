"""Drawing against a slow reference in float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from pie.wire.messages import Sampling
from pie.worker.draws import uniform
from pie.worker.sampling import SamplingRow, bad_word_tail, draw, finite_rows

VOCAB = 40
Floats = NDArray[np.float64]


def row(position: int = 0, counts: dict[int, int] | None = None, **fields: Any) -> SamplingRow:
    sampling = Sampling(**{"temperature": 0.0} | fields)
    return SamplingRow(sampling, sampling.seed or 0, position, Counter(counts or {}))


def reference_choice(logits: Floats, row: SamplingRow) -> tuple[int, Floats]:
    """Return the token drawn, and each kept token's probability; one token a time, as one reads."""
    sampling = row.sampling
    adjusted = logits.astype(np.float64).copy()
    for token in row.seen:
        penalty = sampling.repetition_penalty
        adjusted[token] = (
            adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
        )
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    for token, count in row.counts.items():
        adjusted[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if row.position < sampling.min_tokens:
        adjusted[list(row.ends)] = -np.inf
    if not sampling.temperature:
        return int(adjusted.argmax()), np.eye(len(logits))[adjusted.argmax()]
    adjusted = (adjusted - adjusted.max()) / sampling.temperature
    if sampling.top_k:
        adjusted[adjusted < np.sort(adjusted)[::-1][: sampling.top_k][-1]] = -np.inf
    probabilities = np.exp(adjusted) / np.exp(adjusted).sum()
    if sampling.top_p < 1:
        falling = np.sort(probabilities)[::-1]
        enough = int(np.argmax(np.cumsum(falling) >= sampling.top_p))
        probabilities[probabilities < falling[enough]] = 0
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    number, passed = uniform(row.seed, row.position), 0.0
    for token, probability in enumerate(probabilities):
        passed += probability
        if passed > number:
            return token, probabilities
    raise AssertionError


def is_close_call(logits: Floats, row: SamplingRow) -> bool:
    """Say whether float32 may rightly choose otherwise: the draw or a cut falls on an edge."""
    _, probabilities = reference_choice(logits, row)
    edges = np.cumsum(probabilities) - uniform(row.seed, row.position)
    wider = [
        reference_choice(logits + noise, row)[1] > 0
        for seed in range(4)
        for noise in [np.random.default_rng(seed).normal(0, 1e-5, len(logits))]
    ]
    return bool(np.abs(edges).min() < 1e-5) or any(
        (kept != (probabilities > 0)).any() for kept in wider
    )


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 1000),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0]), max_size=3
    ),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 0, 20]),
)
seen = st.sets(st.integers(0, VOCAB - 1), max_size=6)
counts = st.dictionaries(st.integers(0, VOCAB - 1), st.integers(1, 5), max_size=5)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(samplings, counts, st.integers(0, 50), seen), min_size=1, max_size=8),
    st.integers(0, 10_000),
)
def test_a_batch_draws_what_the_reference_draws_for_each_row(
    wanted: list[tuple[Sampling, dict[int, int], int, set[int]]], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(wanted), VOCAB)).astype(np.float32)
    rows = [
        SamplingRow(s, s.seed or 0, at, Counter(c), seen=seen, ends=frozenset({1, 2}))
        for s, c, at, seen in wanted
    ]
    before = torch.from_numpy(logits.copy())
    given_logits = torch.from_numpy(logits)
    tokens = draw(given_logits, rows)
    assert torch.equal(given_logits, before), "the logits were changed"
    for one, token, own in zip(rows, tokens, logits.astype(np.float64), strict=True):
        if not is_close_call(own, one):
            assert token == reference_choice(own, one)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 0.7},
        {"top_k": 4},
        {"min_p": 0.2},
        {"temperature": 0.5},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 12)
    many = 20_000
    rows = [row(position, **{"temperature": 1.0, "seed": 5} | fields) for position in range(many)]
    drawn = Counter(draw(torch.from_numpy(logits).float().expand(many, -1), rows))
    _, expected = reference_choice(logits, rows[0])
    for token, probability in enumerate(expected):
        deviation = 4 * np.sqrt(probability * (1 - probability) / many)
        assert abs(drawn[token] / many - probability) <= deviation + 1e-12


def test_a_flat_distribution_is_cut_right_beyond_the_first_sort() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :2000] = 1.0
    chosen = {
        draw(logits, [row(position, temperature=1.0, top_p=0.5, seed=1)])[0]
        for position in range(300)
    }
    assert max(chosen) < 2000
    assert len(chosen) > 250


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row(at, temperature=0.9, top_p=0.8, seed=at) for at in range(5)] + [row()]
    assert draw(logits, rows) == [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.1, 0.9]])
    assert draw(logits, [row(temperature=temperature)]) == [1]


def test_a_bias_beyond_the_vocabulary_is_ignored() -> None:
    assert draw(torch.tensor([[1.0, 2.0]]), [row(logit_bias={7: 100.0, -1: 5.0})]) == [1]


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.tensor([[9.0, 1.0, -torch.inf]])
    rows = [row(p, temperature=1.0, seed=1, logit_bias={0: -1000.0}) for p in range(50)]
    assert {draw(logits, [one])[0] for one in rows} == {1}


def test_finds_rows_that_are_no_numbers() -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, -inf], [1.0, nan], [inf, 0.0], [-inf, -inf], [0.0, 0.0]])
    assert finite_rows(logits) == [True, False, False, False, True]


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_no_bad_word_is_ever_in_an_answer(words: list[tuple[int, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=0.0, bad_words=tuple(words))
    output: list[int] = [1]  # What another worker made: resumed, not drawn here.
    line = SamplingRow(sampling, 0, 1, tail=bad_word_tail(sampling, output))
    free = 5
    for _ in range(12):
        logits = torch.randn(1, VOCAB, generator=generator)
        logits[:, free:] = -20.0  # One of a few tokens, where that is allowed.
        (token,) = draw(logits, [line])
        line.tail.append(token)
        output.append(token)
        banned = {w[-1] for w in words if tuple(output[:-1][len(output) - len(w) :]) == w[:-1]}
        wanted = int(
            logits[0].masked_fill(torch.tensor([t in banned for t in range(VOCAB)]), -99).argmax()
        )
        assert token == wanted
    for word in words:
        for at in range(1, len(output) - len(word) + 1):
            assert tuple(output[at : at + len(word)]) != word


def test_a_row_that_is_no_numbers_draws_within_the_vocabulary_and_spoils_no_other() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (2, VOCAB))).float()
    rows = [row(0, temperature=1.0, seed=1), row(0, temperature=1.0, seed=1)]
    (alone,) = draw(logits[1:], rows[1:])
    logits[0, 5] = torch.nan
    broken, other = draw(logits, rows)
    assert 0 <= broken < 256
    assert other == alone
