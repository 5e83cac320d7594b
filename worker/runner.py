"""Runs batches through the model.

Covers checking a batch and one forward pass over it. Does not cover what a batch holds
(`pie.worker.batch`), who makes it (`pie.worker.engine`) or attention (`pie.worker.step`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pie.worker.arena import Arena
from pie.worker.attention.hook import answering
from pie.worker.attention.protocol import AttentionBackend
from pie.worker.attention.select import choose
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.batch import Batch, Pass, StepOutput
from pie.worker.errors import BatchError
from pie.worker.hf_cache import PageCache
from pie.worker.step import Step

if TYPE_CHECKING:
    from pie.worker.model import Model


class Runner:
    """Computes steps of one model over one arena. One thread at a time."""

    def __init__(self, model: Model, arena: Arena, backend: AttentionBackend | None = None) -> None:
        """Choose the attention.

        Args:
            model: Loaded.
            arena: Made for the model's layout, on its device.
            backend: None takes what `model.attention` says.
        """
        self.model = model
        self.arena = arena
        self.backends: Sequence[AttentionBackend] = (
            [backend, TorchBackend()]
            if backend is not None
            else choose(
                model.attention,
                model.specs,
                dtype=model.dtype,
                device=model.device,
                cache_folder=model.cache_folder,
            )
        )
        self._windows = [spec.window is not None for spec in model.specs]
        self._keeps = "logits_to_keep" in inspect.signature(model.module.forward).parameters

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch: write its keys and values to the arena, return logits and scores.

        Raises:
            BatchError: The batch breaks its contract; nothing was written.
        """
        check(batch.passes, self.model, self.arena)
        with torch.inference_mode():
            step = Step(batch, self.arena, self.model.specs, self.backends)
            cache = PageCache(len(self.model.specs), step.store, windows=self._windows)
            kept = {"logits_to_keep": step.wanted} if self._keeps else {}
            with answering(step), self._watching() as seen:
                output = self.model.module(
                    input_ids=step.input_ids,
                    position_ids=step.position_ids,
                    cache=cache,
                    use_cache=True,
                    **kept,
                )
            logits = output.logits[0]
            if not self._keeps:
                logits = logits[step.wanted]
            finite = _finite(seen[0], batch) if seen else None
            return StepOutput(logits.float(), step.rows, step.scores, finite)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[list[torch.Tensor]]:
        """Collect the last hidden states, where the last token's logits do not tell of all.

        Behind a sliding window a token that is not a number goes unseen: its state would be kept.
        """
        seen: list[torch.Tensor] = []
        if not any(self._windows):
            yield seen
            return

        def look(_module: torch.nn.Module, _inputs: object, output: Sequence[torch.Tensor]) -> None:
            seen.append(output[0])

        hook = self.model.module.base_model.register_forward_hook(look)
        try:
            yield seen
        finally:
            hook.remove()


def _finite(hidden: torch.Tensor, batch: Batch) -> list[bool]:
    """Say of each pass whether its rows of `hidden` (`[1, tokens, hidden_size]`) are numbers."""
    rows = torch.isfinite(hidden[0]).all(dim=-1)
    sizes = [len(one.token_ids) for one in batch.passes]
    return [bool(part.all()) for part in torch.split(rows, sizes)]


def check(passes: Sequence[Pass], model: Model, arena: Arena) -> None:
    """Refuse a batch that would read or write what it must not.

    Raises:
        BatchError: Says which pass and what.
    """
    if not passes:
        raise BatchError("a batch has at least one pass")
    page_tokens = arena.layout.page_tokens
    written: dict[int, int] = {}
    for one in passes:
        name = f"pass of sequence {one.sequence_id}"
        pages = -(-one.end // page_tokens)
        if not len(one.token_ids) or one.start < 0:
            raise BatchError(f"{name} has no tokens or starts before 0")
        if one.end > model.context_tokens:
            raise BatchError(
                f"{name} ends at {one.end}, past the context of {model.context_tokens}"
            )
        if min(one.token_ids) < 0 or max(one.token_ids) >= model.vocab_size:
            raise BatchError(f"{name} has a token that the model does not know")
        if len(one.page_ids) < pages:
            raise BatchError(f"{name} needs {pages} pages and has {len(one.page_ids)}")
        used = one.page_ids[:pages]
        if min(used) < 0 or max(used) >= arena.num_pages:
            raise BatchError(f"{name} names a page outside of the arena")
        _check_extras(one, name, model.context_tokens)
        if one.write:
            for page in used[one.start // page_tokens :]:
                if written.setdefault(page, one.sequence_id) != one.sequence_id:
                    raise BatchError(f"{name} writes page {page}, which another pass writes")


def _check_extras(one: Pass, name: str, context_tokens: int) -> None:
    if one.positions is not None:
        if len(one.positions) != len(one.token_ids):
            raise BatchError(f"{name} has another number of positions than tokens")
        if min(one.positions) < 0 or max(one.positions) >= context_tokens:
            raise BatchError(f"{name} has a position outside of the context")
    if one.mask is not None:
        shape = (len(one.token_ids), one.end)
        if one.mask.shape != shape or one.mask.dtype is not torch.bool:
            raise BatchError(
                f"{name} has a mask of {tuple(one.mask.shape)} {one.mask.dtype}, not {shape} bool"
            )
