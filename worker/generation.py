"""One request's way from drawn tokens to what its router is told.

Covers stop tokens, stop strings, limits, text, penalties' counts and timing. Does not cover which
token is drawn (`pie.worker.sampling`) or when (`pie.worker.scheduler`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set as AbstractSet
from dataclasses import dataclass

from pie.tokens.detokenizer import Detokenizer
from pie.tokens.stops import StopMatcher
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import (
    FinishReason,
    Generate,
    PositionLogprobs,
    Started,
    TokenDelta,
)
from pie.worker.draws import fresh_seed
from pie.worker.grammar import Constraint
from pie.worker.sampling import SamplingRow, bad_word_tail
from pie.worker.sequence import Sequence, SequenceState

RequestKey = tuple[bytes, str]
"""A router's peer id and its request id: ids are unique among one router's requests only."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a generation must know of the model."""

    tokenizer: Tokenizer
    eos_token_ids: AbstractSet[int]
    context_tokens: int


class Generation:
    """A request that is being carried out."""

    def __init__(
        self,
        owner: bytes,
        request: Generate,
        sequence: Sequence,
        vocabulary: Vocabulary,
        constraint: Constraint | None = None,
    ) -> None:
        self.owner = owner
        self.request = request
        self.sequence = sequence
        self.deadline_s = (
            None if request.deadline_s is None else sequence.arrived_s + request.deadline_s
        )
        tokens = sequence.working_set.tokens
        output = tokens[request.output_start :].tolist()
        seed = request.sampling.seed
        self._stop_ids = frozenset(request.stop_token_ids)
        if constraint is not None:
            # What another worker sent already brings it to where it was.
            constraint.take(output)
        if not request.ignore_eos or constraint is not None:
            self._stop_ids |= vocabulary.eos_token_ids
        repeats = request.sampling.repetition_penalty != 1
        self.row = SamplingRow(
            sampling=request.sampling,
            seed=fresh_seed() if seed is None else seed,
            position=len(output),
            counts=Counter(output),
            seen=set(tokens) if repeats else set(),
            ends=self._stop_ids,
            constraint=constraint,
            tail=bad_word_tail(request.sampling, output),
        )
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(
            vocabulary.tokenizer,
            tokens[: request.output_start].tolist(),
            shows_special=request.shows_special,
        )
        self._stops = StopMatcher(request.stop)
        # What another worker sent already is not sent again.
        self._stops.push(self._detokenizer.push(output))
        self._room = min(request.max_tokens - len(output), vocabulary.context_tokens - len(tokens))
        self._first_token_s: float | None = None
        self._prompt_logprobs: list[PositionLogprobs] = []
        if request.prompt_logprobs is not None:
            sequence.working_set.own_from = 0

    @property
    def key(self) -> RequestKey:
        """What tells this request from all others."""
        return (self.owner, self.request.request_id)

    @property
    def is_first(self) -> bool:
        """Whether no token was drawn here yet."""
        return self._first_token_s is None

    @property
    def is_forking(self) -> bool:
        """Whether it waits for another one's prompt."""
        return self.sequence.state is SequenceState.FORKING

    @property
    def is_spent(self) -> bool:
        """Whether there is no room for another token."""
        return self._room <= 0

    @property
    def unread(self) -> range:
        """Positions of prompt tokens whose log-probabilities are wanted and not known yet."""
        if self.request.prompt_logprobs is None or not self.is_first:
            return range(0)
        return range(len(self._prompt_logprobs) + 1, self.request.output_start)

    def read_prompt(self, logprobs: Iterable[PositionLogprobs]) -> None:
        """Take in log-probabilities of the next prompt tokens, now that a chunk is computed."""
        self._prompt_logprobs.extend(logprobs)
        working_set = self.sequence.working_set
        if working_set.own_from is not None:
            working_set.own_from = working_set.computed if self.unread else None

    def push(self, token: int, logprobs: PositionLogprobs | None, now_s: float) -> TokenDelta:
        """Take the next token and return what to tell the router; it may be the last.

        Raises:
            GrammarFailedError: The answer cannot go on as its grammar wants.
        """
        row = self.row
        if row.constraint is not None and token not in self._stop_ids:
            row.constraint.take((token,))
        if row.sampling.repetition_penalty != 1:
            row.seen.add(token)
        self.sequence.working_set.append(token)
        self.row.position += 1
        self.row.counts[token] += 1
        self.row.tail.append(token)
        self._room -= 1
        started = self._start(now_s)
        finish: FinishReason | None = None
        if token in self._stop_ids:
            finish, text = FinishReason.STOP, ""
        else:
            shown = self._stops.push(self._detokenizer.push((token,)))
            text = shown.text
            if self.is_spent and shown.matched is None:
                finish = FinishReason.LENGTH
        if finish is not None:
            text += self._stops.push(self._detokenizer.flush()).text + self._stops.flush()
        if self._stops.matched is not None:
            finish = FinishReason.STOP
            if self.request.shows_stop:
                text += self._stops.matched
        return TokenDelta(
            request_id=self.request.request_id,
            token_ids=(token,),
            text=text,
            finish_reason=finish,
            started=started,
            logprobs=None if logprobs is None else (logprobs,),
            stop_string=self._stops.matched,
            prompt_logprobs=self._read() if started is not None else None,
        )

    def spent(self) -> TokenDelta:
        """Return what to tell the router of a request that came with all its tokens."""
        return TokenDelta(
            request_id=self.request.request_id,
            token_ids=(),
            text="",
            finish_reason=FinishReason.LENGTH,
        )

    def failed(self, reason: str) -> TokenDelta:
        """Return the last thing to tell the router of a request that cannot go on."""
        return TokenDelta(
            request_id=self.request.request_id,
            token_ids=(),
            text="",
            finish_reason=FinishReason.FAILED,
            error=reason,
        )

    def _read(self) -> tuple[PositionLogprobs, ...] | None:
        """Return what was wanted of the prompt, and keep it no longer."""
        if self.request.prompt_logprobs is None:
            return None
        read, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return read

    def _start(self, now_s: float) -> Started | None:
        if self._first_token_s is not None:
            return None
        self._first_token_s = now_s
        return self.sequence.started(now_s)
