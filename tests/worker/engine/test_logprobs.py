from __future__ import annotations

import numpy as np
import torch

from pie.worker.logprobs import position_logprobs


def spell(token: int) -> bytes:
    return f"t{token}".encode()


def test_reports_the_models_own_distribution() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)) * 3
    first, second = position_logprobs(logits, [4, 7], [3, 0], spell)
    expected = logits.double().numpy()
    expected = expected - np.log(np.exp(expected).sum(axis=1, keepdims=True))
    assert (first.chosen.token_id, first.chosen.token) == (4, b"t4")
    np.testing.assert_allclose(first.chosen.logprob, expected[0, 4], rtol=1e-5)
    order = np.argsort(-expected[0])[:3]
    assert [top.token_id for top in first.top] == order.tolist()
    np.testing.assert_allclose([top.logprob for top in first.top], expected[0, order], rtol=1e-5)
    np.testing.assert_allclose(second.chosen.logprob, expected[1, 7], rtol=1e-5)
    assert second.top == ()


def test_more_rivals_than_tokens_are_all_tokens() -> None:
    (only,) = position_logprobs(torch.tensor([[0.0, 1.0]]), [0], [20], spell)
    assert [top.token_id for top in only.top] == [1, 0]
