"""`best_of`: the likeliest of a prompt's sequences are its answer."""

from __future__ import annotations

from collections.abc import Sequence

from pie.router.likeliest import Likeliest
from pie.router.mailbox import Piece
from pie.wire.messages import PositionLogprobs, TokenLogprob


def piece(index: int, logprobs: Sequence[float]) -> Piece:
    tokens = [TokenLogprob(1, b"a", logprob) for logprob in logprobs]
    return Piece(index, [str(index)], [PositionLogprobs(token, ()) for token in tokens])


def kept(pieces: Sequence[Piece], count: int, choices: int) -> list[tuple[int, str]]:
    likeliest = Likeliest(count, shows_logprobs=True)
    return [(one.index, one.text) for one in likeliest.of(pieces, choices=choices)]


def test_the_mean_of_a_token_counts_and_not_the_length() -> None:
    pieces = [piece(0, [-1, -1, -1, -1]), piece(1, [-2]), piece(2, [-0.5, -1])]
    assert kept(pieces, 2, 3) == [(0, "2"), (1, "0")]


def test_each_prompt_keeps_its_own_and_the_choices_are_numbered_through() -> None:
    pieces = [piece(0, [-3]), piece(1, [-1]), piece(2, [-1]), piece(3, [-2])]
    assert kept(pieces, 1, 2) == [(0, "1"), (1, "2")]


def test_an_answer_without_tokens_comes_last() -> None:
    assert kept([piece(0, []), piece(1, [-9])], 1, 2) == [(0, "1")]


def test_log_probabilities_that_nobody_asked_for_are_not_shown() -> None:
    (only,) = Likeliest(1, shows_logprobs=False).of([piece(0, [-1]), piece(1, [-2])], choices=2)
    assert only.logprobs == []
