"""One sequence's way through a program's pass, chunk by chunk.

Covers what each chunk attends to, and collecting what was asked for. Does not cover when a chunk
runs (`pie.worker.programs.lane`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pie.page.key import PageKey
from pie.wire.programs import Rows, Trouble
from pie.worker.batch import LogitRows, PageSlot, Pass
from pie.worker.programs.calls import ModelShape, PassCall
from pie.worker.programs.cells import Bools, Ints
from pie.worker.programs.slots import SlotSet
from pie.worker.programs.trouble import CallError
from pie.worker.sampling import SamplingRow
from pie.worker.working_state import WorkingState

_LOGITS = {Rows.NONE: LogitRows.NONE, Rows.LAST: LogitRows.LAST, Rows.ALL: LogitRows.ALL}
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Gathered:
    """What the chunks of a run gave so far."""

    logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    top: tuple[torch.Tensor, torch.Tensor] | None = None
    scores: Floats | None = None
    """Summed over queries, `[layers, query_heads, slots]`."""


class Run:
    """Tokens of one sequence on their way through the model.

    Args:
        number: Tells it from all others in a step.
        call: What was asked.
        target: Its working set.
        shape: The model.
        row: How the next token is drawn after the last; None draws none.
    """

    def __init__(
        self,
        number: int,
        call: PassCall,
        target: SlotSet,
        shape: ModelShape,
        row: SamplingRow | None = None,
    ) -> None:
        self.number = number
        self.set = target
        self.row = row
        self.tokens = call.tokens
        self.fed = 0
        self.first_slot = target.next_slot
        self.gathered = Gathered()
        self.token: int | None = None
        self.blocked_s: float | None = None
        """Since when there has been no room for its next chunk."""
        self.is_loading = False
        """Whether pages of it are on their way from below device memory."""
        self.load_tried = False
        self._call = call
        self._wants = call.wants
        self._shape = shape
        self._positions = call.positions
        self._is_narrow = call.read is not None or call.mask is not None
        self._embeddings = call.embeddings
        self._upcoming = target.upcoming(call.tokens) if self.is_plain else []
        self._reached = self._place()

    @property
    def left(self) -> int:
        """Tokens that have not run."""
        return len(self.tokens) - self.fed

    @property
    def scored(self) -> int:
        """Queries whose attention is collected."""
        return self._wants.scores

    def go_on(self) -> None:
        """Run the token that was drawn next."""
        assert self.token is not None
        self.tokens.append(self.token)

    @property
    def is_plain(self) -> bool:
        """Whether its tokens may be taken from pages instead of run."""
        wants = self._wants
        return not (
            self._is_narrow
            or self._embeddings is not None
            or self._positions is not None
            or wants.scores
            or wants.targets > 1
            or Rows.ALL in (wants.logits, wants.hidden)
        )

    @property
    def score_bytes(self) -> int:
        """What the scores that it gives will take."""
        slots = self.first_slot + len(self.tokens)
        return self._shape.layers * self._shape.query_heads * slots * 4 if self.scored else 0

    def check(self) -> None:
        """Refuse what would read slots that are not there, or attend to nothing.

        Raises:
            CallError: Names the slot.
        """
        self.set.check_usable()
        call, end = self._call, self.set.next_slot + len(self.tokens)
        if self.set.used + len(self.tokens) > self._shape.context_tokens:
            raise CallError(
                Trouble.CONTEXT_LENGTH,
                f"{len(self.tokens)} tokens after {self.set.used} slots that are still in pages do not "
                f"fit into the model's context of {self._shape.context_tokens}: drop some and compact",
            )
        if self.set.next_position + len(self.tokens) > self._shape.context_tokens and (
            call.positions is None
        ):
            raise CallError(
                Trouble.CONTEXT_LENGTH,
                f"{len(self.tokens)} tokens after position {self.set.next_position - 1} do not fit "
                f"into the model's context of {self._shape.context_tokens}",
            )
        if call.read is not None:
            self.set.cells_of(call.read)
        if call.mask is None:
            return
        if call.mask.shape[2:] != (len(self.tokens), end):
            raise CallError(
                Trouble.BAD_CALL,
                f"the mask is for {call.mask.shape[2]} tokens and {call.mask.shape[3]} slots, and the "
                f"pass has {len(self.tokens)} tokens and reaches up to slot {end - 1}",
            )
        seen = self._allowed(len(self.tokens))
        own = np.arange(len(self.tokens))
        behind = seen[..., self.set.used :]
        behind[..., own[:, None] < own[None, :]] = False
        empty = np.argwhere(~seen.any(-1))
        if len(empty):
            layer, head, token = (int(at) for at in empty[0])
            slot = self.set.next_slot + token
            raise CallError(
                Trouble.NOTHING_ATTENDED,
                f"slot {slot} would attend to nothing in layer {layer}, head {head}: let it attend "
                "to itself at least",
                slot,
            )

    def next_keys(self) -> list[PageKey]:
        """Return the keys of the pages that it is about to compute."""
        return self._upcoming[-(-self.fed // self.set.page_tokens) :]

    def announced(self) -> list[PageKey]:
        """Return the keys of what others may wait for.

        Those are the pages that it is about to compute; of a recurrent model's, those at whose end a
        snapshot is due.
        """
        keys = self.next_keys()
        if self.set.state is None or not keys:
            return keys
        first = -(-self.set.used // self.set.page_tokens)
        return [keys[at - 1 - first] for at in self.set.due(self.left) if first < at]

    def waits_for(self, under_way: Collection[PageKey]) -> bool:
        """Say whether somebody else is about to make what it could go on from."""
        if self.set.state is None:
            keys = self.next_keys()
            return bool(keys) and self.left > self.set.page_tokens and keys[0] in under_way
        return any(key in under_way for key in self.loadable_keys())

    def next_chunk(self, most: int) -> int:
        """Return how many tokens to run next: up to a page's end, or where a snapshot is due."""
        size, used = self.set.page_tokens, self.set.used
        count = min(self.left, most)
        boundary = next(self.set.due(self.left), None)
        if boundary is not None:
            count = min(count, boundary * size - used)
        if count < self.left:
            aligned = (used + count) // size * size - used
            count = aligned if aligned > 0 else count
        return count

    def match(self, now_s: float) -> int:
        """Take what is there in pages; return how many tokens need not run."""
        if not self._upcoming or not self.is_plain:
            return 0
        self._check_place()
        won = self.set.match(self.tokens[self.fed :], self.next_keys(), now_s)
        self.fed += won
        self._reached = self._place()
        return won

    def loadable_keys(self) -> list[PageKey]:
        """Return the keys of pages that may be loaded next; the last token runs in any case."""
        if not self.is_plain or not self.set.is_pure or self.set.used % self.set.page_tokens:
            return []
        return self.next_keys()[: (self.left - 1) // self.set.page_tokens]

    def take_loaded(
        self, pages: Sequence[PageSlot], count: int, state: WorkingState | None, now_s: float
    ) -> None:
        """Go on behind its next `count` pages, which have been written. See `SlotSet.take_loaded`."""
        self._check_place()
        left = self.tokens[self.fed :]
        self.fed += self.set.take_loaded(pages, count, left, self.next_keys(), now_s, state)
        self._reached = self._place()

    def make_pass(self, count: int) -> Pass:
        """Return the pass of the next `count` tokens, for which there is room."""
        self._check_place()
        last = count == self.left
        wants, end = self._wants, len(self.tokens)
        allowed = self._allowed(count) if self._narrows(count) else None
        mask = None
        if allowed is not None and not allowed.all():
            mask = torch.from_numpy(np.ascontiguousarray(allowed))
            if mask.shape[:2] == (1, 1):
                mask = mask[0, 0]
        logits = _LOGITS[wants.logits]
        if wants.targets > 1:
            logits = LogitRows.ALL
        elif last and (self.row is not None or wants.top or wants.targets):
            logits = LogitRows.ALL if logits is LogitRows.ALL else LogitRows.LAST
        elif not last and logits is LogitRows.LAST:
            logits = LogitRows.NONE
        scored = max(0, self.fed + count - (end - wants.scores)) if wants.scores else 0
        positions = self._next_positions(count)
        plain = bool((positions == np.arange(self.set.used, self.set.used + count)).all())
        return Pass(
            sequence_id=-1 - self.number,
            token_ids=self.tokens[self.fed : self.fed + count],
            start=self.set.used,
            page_ids=self.set.pages,
            # The last token's logits show whether the pass came out as numbers.
            logits=LogitRows.LAST if logits is LogitRows.NONE else logits,
            positions=None if plain else positions.tolist(),
            mask=mask,
            embeddings=self._next_embeddings(count),
            scores_queries=min(count, scored),
            hidden=wants.hidden is Rows.ALL or (last and wants.hidden is Rows.LAST),
            state_in=None if self.set.state is None else self.set.state.source,
            state_out=None if self.set.state is None else self.set.state.target,
        )

    def take(
        self,
        count: int,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        scores: torch.Tensor | None,
        now_s: float,
    ) -> None:
        """Take in what the next `count` tokens gave.

        Args:
            count: How many.
            logits: `[rows, vocab_size]`, as the pass asked for them.
            hidden: `[count, hidden_size]`, where asked for.
            scores: `[layers, query_heads, cells]`, where asked for.
            now_s: The time.
        """
        self._check_place()
        wants, last = self._wants, count == self.left
        gathered = self.gathered
        if wants.logits is Rows.ALL or (last and wants.logits is Rows.LAST):
            gathered.logits.append(logits[-count:] if wants.logits is Rows.ALL else logits[-1:])
        if hidden is not None:
            gathered.hidden.append(hidden if wants.hidden is Rows.ALL else hidden[-1:])
        if wants.targets:
            self._take_targets(count, logits)
        if last and wants.top:
            values, ids = logits[-1].log_softmax(-1).topk(wants.top)
            gathered.top = (ids, values)
        positions = self._next_positions(count)
        self.set.advance(
            self.tokens[self.fed : self.fed + count],
            positions,
            now_s,
            is_pure=not self._is_narrow and self._embeddings is None,
            ahead=self.left - count,
        )
        self.fed += count
        self._reached = self._place()
        if scores is not None:
            self._take_scores(scores)

    def _place(self) -> tuple[int, Sequence[PageKey]]:
        """Return what its next tokens come after: how many cells, and the last page's key."""
        return self.set.used, self.set.names.keys[-1:]

    @property
    def is_in_place(self) -> bool:
        """Whether its working set is where it left it."""
        return self._place() == self._reached

    def _check_place(self) -> None:
        """Raise `AssertionError` where its working set went on without it.

        Keys that it has made would name other tokens' pages then, and everybody finds those.
        """
        assert self.is_in_place, "a pass goes on where it left its working set"

    def _take_targets(self, count: int, logits: torch.Tensor) -> None:
        """Look up the log-probabilities of the targets that follow these tokens."""
        wanted = self._call.targets
        first = len(self.tokens) - len(wanted)
        rows = [at for at in range(count) if self.fed + at >= first]
        if not rows:
            return
        ids = torch.tensor([int(wanted[self.fed + at - first]) for at in rows])
        at = [row - count for row in rows]
        chosen = logits[at].log_softmax(-1).gather(1, ids.to(logits.device)[:, None])[:, 0]
        self.gathered.targets.append(chosen)

    def _take_scores(self, scores: torch.Tensor) -> None:
        """Add attention to cells up to its slots, by slot."""
        cells = self.set.cells[: scores.shape[-1]]
        alive = cells >= 0
        found = np.zeros((*scores.shape[:2], self.first_slot + len(self.tokens)), np.float32)
        found[..., cells[alive]] = scores.cpu().numpy()[..., alive]
        before = self.gathered.scores
        self.gathered.scores = found if before is None else before + found

    def _next_positions(self, count: int) -> Ints:
        if self._positions is not None:
            return self._positions[self.fed : self.fed + count]
        first = self.set.next_position
        return np.arange(first, first + count)

    def _next_embeddings(self, count: int) -> torch.Tensor | None:
        if self._embeddings is None:
            return None
        # A copy: what came off the pipe may not be written to, which torch wants.
        return torch.from_numpy(self._embeddings[self.fed : self.fed + count].copy())

    def _narrows(self, count: int) -> bool:
        """Say whether the next tokens may not attend to all cells before them."""
        if self._is_narrow or not self.set.is_whole:
            return True
        if not any(self._shape.windows):
            return False
        first = self._next_positions(count)
        return not self.set.is_plain or bool(
            (first != np.arange(self.set.used, self.set.used + count)).any()
        )

    def _allowed(self, count: int) -> Bools:
        """Return which cells the next `count` tokens may attend to, besides what is causal.

        `[layers or 1, heads or 1, count, cells]`
        """
        cells = self.set.cells
        own = np.arange(self.set.next_slot, self.set.next_slot + count)
        alive = np.concatenate([cells >= 0, np.ones(count, np.bool_)])
        allowed = np.broadcast_to(alive, (1, 1, count, len(alive))).copy()
        if self._call.read is not None:
            named = np.isin(cells, self._call.read) | (cells >= self.first_slot)
            allowed &= np.concatenate([named, np.ones(count, np.bool_)])
        if self._call.mask is not None:
            columns = np.concatenate([np.maximum(cells, 0), own])
            rows = slice(self.fed, self.fed + count)
            allowed = allowed & self._call.mask.unpacked()[:, :, rows][..., columns]
        if any(self._shape.windows):
            allowed = allowed & self._in_windows(count)
        return allowed

    def _in_windows(self, count: int) -> Bools:
        """Return what sliding windows leave, counted in positions: `[layers, 1, count, cells]`."""
        positions = self._next_positions(count)
        behind = positions[:, None] - np.concatenate([self.set.positions, positions])[None, :]
        layers = [
            np.ones_like(behind, np.bool_) if window is None else behind < window
            for window in self._shape.windows
        ]
        return np.stack(layers)[:, None]
