"""A model run over a whole text at once, each token attending to what a test says.

What a token's keys and values are depends on what it attended to when it was written, and on nothing
later: so one pass over everything, with a row of the mask for each token, is what any way of running,
dropping and gathering must give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def masked(
    module: PreTrainedModel,
    tokens: Sequence[int],
    allowed: torch.Tensor,
    positions: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits `[tokens, vocab]` and each layer's attention `[heads, tokens, tokens]`.

    Args:
        module: In float64, with eager attention.
        tokens: The text.
        allowed: bool `[tokens, tokens]`, or `[layers, heads, tokens, tokens]`; what is not causal is
            cut off.
        positions: Of each token; by default its place.
    """
    count = len(tokens)
    full = allowed if allowed.ndim == 4 else allowed[None, None]
    full = full & torch.ones(count, count, dtype=torch.bool).tril()
    added = torch.zeros(full.shape, dtype=torch.float64).masked_fill(~full, float("-inf"))
    at = torch.tensor([list(positions) if positions is not None else list(range(count))])
    hooks = []
    for index, layer in enumerate(module.base_model.get_submodule("layers").children()):
        mask = added[index if len(added) > 1 else 0][None]

        def give(
            _module: object,
            args: tuple[object, ...],
            given: dict[str, object],
            mask: torch.Tensor = mask,
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            return args, given | {"attention_mask": mask}

        hooks.append(layer.register_forward_pre_hook(give, with_kwargs=True))
    try:
        with torch.inference_mode():
            out = module(
                torch.tensor([list(tokens)]),
                position_ids=at,
                use_cache=False,
                output_attentions=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return out.logits[0], [one[0] for one in out.attentions]
