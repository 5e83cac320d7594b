"""Runs batches through the model.

Covers checking a batch and the forward passes over it. Does not cover what a batch holds
(`pie.worker.batch`), who makes it (`pie.worker.engine`), attention (`pie.worker.step`) or how the
batch of a recurrent model is cut (`pie.worker.forwards`).
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
from pie.worker.forwards import Forward, cut, join
from pie.worker.hf_cache import PageCache
from pie.worker.probe import takes_positions
from pie.worker.recurrent import States, state_pairs
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
        self._attention = dict(zip(model.attention_layers, model.specs, strict=True))
        self._windows = [
            index in self._attention and self._attention[index].window is not None
            for index in range(model.layers)
        ]
        self._pairs = state_pairs(model.states)
        self._keeps = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        self._takes_positions = takes_positions(model.module)

    def run(self, batch: Batch) -> StepOutput:
        """Compute a batch: write its keys, values and states to the arena, return logits and scores.

        Raises:
            BatchError: The batch breaks its contract; nothing was written.
        """
        check(batch.passes, self.model, self.arena)
        with torch.inference_mode():
            if not self.model.states:
                return self._forward(Forward(batch.passes))
            forwards = cut(batch.passes, stepped=self.model.stepped)
            return join(batch, forwards, [self._forward(one) for one in forwards])

    def _forward(self, forward: Forward) -> StepOutput:
        batch = Batch(forward.passes)
        step = Step(batch, self.arena, self._attention, self.backends, as_rows=forward.as_rows)
        cache = PageCache(self.model.layers, step.store, windows=self._windows, states=self._pairs)
        states = self._states(forward, cache) if self._pairs else None
        given: dict[str, object] = {"input_ids": step.input_ids}
        if self._takes_positions:
            given["position_ids"] = step.position_ids
        keeps = self._keeps and not forward.as_rows
        if keeps:
            given["logits_to_keep"] = step.wanted
        asks = any(one.hidden for one in batch.passes)
        with answering(step), self._embedding(batch), self._watching(asked=asks) as seen:
            output = self.model.module(**given, cache=cache, use_cache=True)
        logits = output.logits.flatten(0, 1)
        if not keeps:
            logits = logits[step.wanted]
        finite = _finite(seen[0], batch) if seen else None
        if states is not None:
            slots = [one.state_out for one in forward.passes if one.state_out is not None]
            kept = states.keep(slots)
            finite = (
                kept if finite is None else [a and b for a, b in zip(finite, kept, strict=True)]
            )
        hidden = _hidden(seen[0], batch) if asks else None
        return StepOutput(logits.float(), step.rows, step.scores, finite, hidden)

    def _states(self, forward: Forward, cache: PageCache) -> States:
        slots = [one.state_in for one in forward.passes if one.state_in is not None]
        assert len(slots) in (0, len(forward.passes)), "rows all go on, or there is one that begins"
        return States(self.model.states, self.arena.states, slots or None, cache)

    @contextlib.contextmanager
    def _embedding(self, batch: Batch) -> Iterator[None]:
        """Put the embeddings that passes bring in the place of their tokens' own."""
        if all(one.embeddings is None for one in batch.passes):
            yield
            return

        def replace(_module: torch.nn.Module, _inputs: object, own: torch.Tensor) -> torch.Tensor:
            sizes = [len(one.token_ids) for one in batch.passes]
            parts = torch.split(own.flatten(0, 1), sizes)
            put = [
                part if one.embeddings is None else one.embeddings.to(own)
                for part, one in zip(parts, batch.passes, strict=True)
            ]
            return torch.cat(put).view_as(own)

        hook = self.model.module.get_input_embeddings().register_forward_hook(replace)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def _watching(self, *, asked: bool) -> Iterator[list[torch.Tensor]]:
        """Collect the last hidden states, where asked or where the last token's logits do not tell of all.

        Behind a sliding window or a convolution a token that is not a number goes unseen: its state
        would be kept.
        """
        seen: list[torch.Tensor] = []
        if not asked and not any(self._windows) and not self._pairs:
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
    """Say of each pass whether its part of `hidden` (`[rows, tokens, hidden_size]`) is numbers."""
    rows = torch.isfinite(hidden).all(dim=-1).flatten()
    sizes = [len(one.token_ids) for one in batch.passes]
    return [bool(part.all()) for part in torch.split(rows, sizes)]


def _hidden(hidden: torch.Tensor, batch: Batch) -> list[torch.Tensor | None]:
    """Return each pass's part of `hidden` (`[rows, tokens, hidden_size]`) where it is asked for."""
    sizes = [len(one.token_ids) for one in batch.passes]
    parts = torch.split(hidden.flatten(0, 1), sizes)
    return [part if one.hidden else None for part, one in zip(parts, batch.passes, strict=True)]


def check(passes: Sequence[Pass], model: Model, arena: Arena) -> None:
    """Refuse a batch that would read or write what it must not.

    Raises:
        BatchError: Says which pass and what.
    """
    if not passes:
        raise BatchError("a batch has at least one pass")
    page_tokens = arena.layout.page_tokens
    written: dict[int, int] = {}
    if model.states:
        _check_states(passes, arena)
    for one in passes:
        name = f"pass of sequence {one.sequence_id}"
        pages = -(-one.end // page_tokens) if model.specs else 0
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
        if min(used, default=0) < 0 or max(used, default=0) >= max(1, arena.num_pages):
            raise BatchError(f"{name} names a page outside of the arena")
        _check_extras(one, name, model)
        if one.write:
            for page in used[one.start // page_tokens :]:
                if written.setdefault(page, one.sequence_id) != one.sequence_id:
                    raise BatchError(f"{name} writes page {page}, which another pass writes")


def _check_states(passes: Sequence[Pass], arena: Arena) -> None:
    read = {one.state_in: one.sequence_id for one in passes}
    written: set[int] = set()
    for one in passes:
        name = f"pass of sequence {one.sequence_id}"
        if (one.state_in is None) != (one.start == 0):
            raise BatchError(f"{name} must go on from a state slot just where it starts after 0")
        if one.state_out is None:
            raise BatchError(f"{name} has no slot for its recurrent states")
        for slot in (one.state_in, one.state_out):
            if slot is not None and not 0 <= slot < arena.state_slots:
                raise BatchError(f"{name} names a state slot outside of the arena")
        reader = read.get(one.state_out, one.sequence_id)
        if one.state_out in written or reader != one.sequence_id:
            raise BatchError(f"{name} writes state slot {one.state_out}, which another pass uses")
        written.add(one.state_out)


def _check_extras(one: Pass, name: str, model: Model) -> None:
    if one.positions is not None:
        if len(one.positions) != len(one.token_ids):
            raise BatchError(f"{name} has another number of positions than tokens")
        if min(one.positions) < 0 or max(one.positions) >= model.context_tokens:
            raise BatchError(f"{name} has a position outside of the context")
    if one.embeddings is not None and one.embeddings.shape[0] != len(one.token_ids):
        raise BatchError(f"{name} has another number of embeddings than tokens")
    if one.mask is not None:
        shape = (len(one.token_ids), one.end)
        heads = max((spec.query_heads for spec in model.specs), default=0)
        outer = tuple(one.mask.shape[:-2])
        fits = not outer or (
            len(outer) == 2 and outer[0] in (1, len(model.specs)) and outer[1] in (1, heads)
        )
        if not fits or one.mask.shape[-2:] != shape or one.mask.dtype is not torch.bool:
            raise BatchError(
                f"{name} has a mask of {tuple(one.mask.shape)} {one.mask.dtype}, not {shape} bool"
            )
