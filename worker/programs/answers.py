"""What a pass gave, as it goes onto the pipe.

Covers arrays to frames. Does not cover collecting them (`pie.worker.programs.run`).
"""

from __future__ import annotations

import numpy as np
import torch

from pie.wire.frames import Buffer
from pie.wire.programs import PassPart
from pie.worker.programs.run import Run
from pie.worker.programs.slots import SlotSet


def slots_frame(one: SlotSet) -> Buffer:
    """Return a working set's live slots, u32."""
    return one.live.astype("<u4").data


def part_of(run: Run) -> tuple[PassPart, list[Buffer]]:
    """Return what a run gave, and its frames in the order of `PassPart`'s fields."""
    gathered, frames = run.gathered, []
    logits = hidden = scores = None
    targets = top = 0
    if gathered.logits:
        logits, frame = _rows(gathered.logits)
        frames.append(frame)
    if gathered.hidden:
        hidden, frame = _rows(gathered.hidden)
        frames.append(frame)
    if gathered.scores is not None:
        mean = gathered.scores / np.float32(run.scored)
        scores = mean.shape
        frames.append(np.ascontiguousarray(mean, "<f4").data)
    if gathered.targets:
        found = torch.cat(gathered.targets).float().cpu().numpy()
        targets = len(found)
        frames.append(found.astype("<f4").data)
    if gathered.top is not None:
        ids, values = gathered.top
        top = len(ids)
        frames.append(ids.cpu().numpy().astype("<u4").data)
        frames.append(values.float().cpu().numpy().astype("<f4").data)
    one = run.set
    part = PassPart(
        first_slot=run.first_slot,
        length=one.next_slot,
        pages=len(one.pages),
        cached_tokens=one.cached_tokens,
        token=run.token,
        logits=logits,
        hidden=hidden,
        scores=scores,
        targets=targets,
        top=top,
    )
    return part, frames


def _rows(pieces: list[torch.Tensor]) -> tuple[tuple[int, int], Buffer]:
    array = torch.cat(pieces).float().cpu().numpy().astype("<f4")
    return (array.shape[0], array.shape[1]), array.data
