"""What the engine asks of a model in one step, and what comes back.

Covers the records that both halves of a worker share: the engine makes a `Batch` of passes, the
runner answers with a `StepOutput`. Does not cover who chooses the passes (`pie.worker.scheduler`)
or how they are computed (`pie.worker.runner`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # A simulation shares page tables and schedulers, and should not wait for torch.
    import torch

PageSlot = int
"""Number of a physical page in the arena, from 0."""

StateSlot = int
"""Number of a state slot in the arena, from 0: room for all recurrent states of one sequence."""


class LogitRows(enum.Enum):
    """Which of a pass's tokens get logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Pass:
    """Tokens of one sequence to run through the model.

    Token `i` takes slot `start + i` of the sequence, and attends to the slots before it and to its
    own. No two passes of a batch write the same page or state slot.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    """Slot of the first token; the slots before it hold their keys and values already."""
    page_ids: Sequence[PageSlot]
    """Physical pages that hold slots 0, 1, … of the sequence, in order; at least up to the last
    token's. Longer is allowed."""
    logits: LogitRows = LogitRows.LAST
    write: bool = True
    """False leaves the arena alone: the tokens' own slots are read from frozen pages that hold them
    already, as for the last token of a fully cached prompt."""
    positions: Sequence[int] | None = None
    """Position of each token where it is not its slot."""
    mask: torch.Tensor | None = None
    """bool `[tokens, slots]`, `slots` = `start` + tokens: narrows what each token attends to; or
    `[layers or 1, query_heads or 1, tokens, slots]`, over the layers with attention. A token that is
    left with nothing gets zeros from that attention."""
    embeddings: torch.Tensor | None = None
    """`[tokens, hidden_size]`: what goes into the first layer instead of the tokens' own embeddings."""
    scores_queries: int = 0
    """Report the attention of this many last tokens, see `StepOutput.scores`."""
    hidden: bool = False
    """Report the last hidden state of each token, see `StepOutput.hidden`."""
    state_in: StateSlot | None = None
    """Slot with the recurrent states of the tokens before `start`; None where `start` is 0, and for
    a model without such states. Read, and left as it is unless it is `state_out` too."""
    state_out: StateSlot | None = None
    """Slot that gets the recurrent states of the tokens up to `end`; None for a model without."""

    @property
    def end(self) -> int:
        """The number of slots after the pass."""
        return self.start + len(self.token_ids)

    @property
    def is_pure(self) -> bool:
        """Whether what it writes is a function of the token ids alone (DESIGN §3).

        Not where it attends to less than all slots before it, numbers them otherwise, or is given
        embeddings: then no page that it writes may have a key, and none after it.
        """
        is_numbered = self.positions is None or list(self.positions) == list(
            range(self.start, self.end)
        )
        return self.mask is None and self.embeddings is None and is_numbered


@dataclass(frozen=True, slots=True)
class Batch:
    """The passes of one step, each of another sequence."""

    passes: Sequence[Pass]

    @property
    def tokens(self) -> int:
        """Tokens of all passes."""
        return sum(len(one.token_ids) for one in self.passes)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a batch gave, on the model's device."""

    logits: torch.Tensor
    """float32 `[rows, vocab_size]`: passes in order, each with the rows that it asked for."""
    rows: Sequence[range]
    """For each pass, its rows of `logits`; empty where it asked for none."""
    scores: Sequence[torch.Tensor | None]
    """For each pass, float32 `[layers, most query_heads of any layer, slots]`: attention that its last
    `scores_queries` tokens paid to each slot, summed over them; None where not asked for."""
    finite: Sequence[bool] | None = None
    """For each pass, whether all of its tokens and recurrent states came out as numbers; None where
    the logits of the last one say so, because it attends to all the others in every layer."""

    hidden: Sequence[torch.Tensor | None] | None = None
    """For each pass, `[tokens, hidden_size]`: what the logits are made of; None where not asked for."""

    def of(self, index: int) -> torch.Tensor:
        """Return the logits of pass `index`, `[rows, vocab_size]`; a view."""
        rows = self.rows[index]
        return self.logits[rows.start : rows.stop]
