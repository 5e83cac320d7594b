"""A model's first passes, compared with transformers' own.

Covers the check at every start that a model computes over pages what it computes without them.
It catches what neither its configuration nor a probe shows: an architecture that uses positions,
past tokens or the cache in a way that Pie does not know. Does not cover the kernels, which have a
suite of their own (`pie.worker.attention.conformance`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from pie.worker.arena import Arena
from pie.worker.attention import hook
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.errors import UnsupportedModel
from pie.worker.runner import Runner

if TYPE_CHECKING:
    from pie.worker.model import Model

log = logging.getLogger("pie.worker.selfcheck")

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest error of a logit over the largest logit. A model that is computed wrongly is off by about
one; bfloat16's rounding stays under 5 % but for models with very large activations."""

_LENGTHS = (21, 14)
_CHUNK = 9


def verify(model: Model) -> None:
    """Compare two short sequences, chunked, decoded and batched over scattered pages.

    Raises:
        UnsupportedModel: Pie and transformers disagree.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = [min(length, model.context_tokens) for length in _LENGTHS]
    texts = [torch.randint(model.vocab_size, (n,), generator=draw).tolist() for n in lengths]
    own = _over_pages(model, texts)
    theirs = _without_pages(model, texts)
    for mine, expected in zip(own, theirs, strict=True):
        error = float((mine - expected).abs().max() / expected.abs().max())
        log.debug("self-check of %s: error %.2e", model.name, error)
        if not error <= _TOLERANCE[model.dtype]:
            raise UnsupportedModel(
                f"Pie computes {model.name} otherwise than transformers does (logits are off by "
                f"{error:.0%}), so its pages could not be trusted"
            )


def _over_pages(model: Model, texts: list[list[int]]) -> list[torch.Tensor]:
    page_tokens = model.layout.page_tokens
    pages = [-(-len(text) // page_tokens) for text in texts]
    arena = Arena(model.layout, sum(pages) + 1, model.device)
    runner = Runner(model, arena)
    numbers = list(range(sum(pages), 0, -1))
    tables = [numbers[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(texts))]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        passes: list[Pass] = []
        for i, text in enumerate(texts):
            left = len(text) - done[i]
            # The last tokens one at a time, the others in chunks.
            count = min(_CHUNK, left - 2) if left > 3 else min(1, left)
            if count:
                ids = text[done[i] : done[i] + count]
                passes.append(Pass(i, ids, done[i], tables[i], LogitRows.ALL))
        output = runner.run(Batch(passes))
        for index, one in enumerate(passes):
            logits[one.sequence_id].append(output.of(index))
            done[one.sequence_id] = one.end
    return [torch.cat(rows) for rows in logits]


def _without_pages(model: Model, texts: list[list[int]]) -> list[torch.Tensor]:
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return [
                model.module(input_ids=torch.tensor([text], device=model.device), use_cache=False)
                .logits[0]
                .float()
                for text in texts
            ]
    finally:
        model.module.set_attn_implementation(hook.NAME)
