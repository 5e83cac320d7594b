"""`/v1/completions`: the body, and the shape of answers and stream events.

Covers schemas and shaping. Does not cover tokenising (`pie.router.prompt`) or who generates
(`pie.router.dispatch`).
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pie.router.api.body import INT64_MAX, BodyLimits, GenerationBody
from pie.router.api.scoring import LOWEST_LOGPROB, PromptLogprobs, prompt_logprobs
from pie.router.api.usage import Usage, finish_text
from pie.router.mailbox import Piece
from pie.wire.messages import PositionLogprobs


def _prompt_kind(value: object) -> str:
    """Tell the four spellings of a prompt apart by their first item."""
    if not isinstance(value, list):
        return "~text"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "~token_lists"
    return "~tokens" if isinstance(first, int) and not isinstance(first, bool) else "~texts"


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer tells beside the text that is made."""

    echoed: int | None = None
    """Likeliest tokens at each position of a prompt that is echoed with its log-probabilities."""
    scored: int | None = None
    """The same for `prompt_logprobs`."""
    nothing_made: bool = False
    """Whether the one token that is made is left out."""

    @property
    def of_prompt(self) -> int | None:
        """Likeliest tokens that a worker is asked for at each position of the prompt."""
        wanted = [count for count in (self.echoed, self.scored) if count is not None]
        return max(wanted, default=None)


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[list[str], Field(fail_fast=True), Tag("~texts")]
        | Annotated[list[int], Field(fail_fast=True), Tag("~tokens")]
        | Annotated[
            list[Annotated[list[int], Field(fail_fast=True)]],
            Field(fail_fast=True),
            Tag("~token_lists"),
        ],
        Discriminator(_prompt_kind),
    ] = Field(description="A text, a list of texts, a list of token ids, or a list of such lists.")
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT64_MAX,
        description="Most tokens to generate for each choice; 0 only tells of the prompt.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, description="Likeliest tokens to report at each position."
    )

    echo: bool | None = Field(
        default=None,
        description="Begin each text with its prompt, and `logprobs` with those of its tokens.",
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        description="Sequences to make for each prompt, of which the `n` likeliest are answered: "
        "at least `n`, and not with `stream` unless equal to it.",
    )

    @field_validator("best_of")
    @classmethod
    def _best_of_within_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        limits = info.context
        if value is not None and isinstance(limits, BodyLimits) and value > limits.max_choices:
            raise PydanticCustomError(
                "too_many", "must be at most {most}", {"most": limits.max_choices}
            )
        return value

    @model_validator(mode="after")
    def _best_of_covers_n(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise PydanticCustomError("best_of", "best_of: must be at least n")
        if self.stream and self.sequences > self.choices:
            raise PydanticCustomError("best_of", "best_of: must equal n where stream is true")
        return self

    @model_validator(mode="after")
    def _echo_of_whole_answers(self) -> Self:
        if (
            self.echo
            and self.logprobs is not None
            and (self.stream or self.sequences > self.choices)
        ):
            raise PydanticCustomError(
                "echo", "echo: with logprobs neither where stream is true nor with best_of"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_made_for_a_reason(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError(
                "max_tokens", "max_tokens: 0 only with echo or prompt_logprobs, else at least 1"
            )
        return self

    @field_validator("prompt")
    @classmethod
    def _prompt_within_limits(
        cls, value: str | list[str] | list[int] | list[list[int]], info: ValidationInfo
    ) -> str | list[str] | list[int] | list[list[int]]:
        if not value:
            raise PydanticCustomError("empty", "must not be empty")
        limits = info.context
        several = isinstance(value, list) and not isinstance(value[0], int)
        if several and isinstance(limits, BodyLimits) and len(value) > limits.max_prompts:
            raise PydanticCustomError(
                "too_many", "at most {most} prompts", {"most": limits.max_prompts}
            )
        if several and not all(value):
            raise PydanticCustomError("empty", "no prompt may be empty")
        return value

    @field_validator("logprobs")
    @classmethod
    def _logprobs_within_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        limits = info.context
        if value is not None and isinstance(limits, BodyLimits) and value > limits.max_logprobs:
            raise PydanticCustomError(
                "too_many", "must be at most {most}", {"most": limits.max_logprobs}
            )
        return value

    @property
    def sequences(self) -> int:
        """Sequences to make for each prompt, of which `choices` are answered."""
        return self.best_of or self.choices

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever way they were spelled."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value: one token is made where none is wanted."""
        return "max_tokens", 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def told(self) -> Told:
        """What is answered beside the text that is made."""
        return Told(
            echoed=self.logprobs if self.echo else None,
            scored=self.prompt_logprobs,
            nothing_made=self.max_tokens == 0,
        )


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of an answer, or of a part of it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    """None for the first token of a prompt that is echoed."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One answer, or what an event adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Where they were asked for."""


class Completion(msgspec.Struct):
    """Answer of `/v1/completions`, and one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    first_token: bytes


class CompletionLogprobsShaper:
    """Gives log-probabilities the shape of completions; one for each choice.

    A token may end inside a character, which then counts at the token that completes it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def echo(
        self, echoed: Echo, positions: Sequence[PositionLogprobs], most: int
    ) -> CompletionLogprobs:
        """Return those of a prompt, whose first token has none, with `most` likeliest ones."""
        first = echoed.first_token
        shaped = CompletionLogprobs([0], [None], [_spelled(first)], [None])
        text = self._decoder.decode(first)
        # What a tokenizer puts before a text is a token of the prompt, and no part of the text.
        self._offset += len(text) if echoed.text.startswith(text) else 0
        return self._add(shaped, positions, most)

    def shape(self, positions: Sequence[PositionLogprobs]) -> CompletionLogprobs | None:
        """Return the log-probabilities of the next tokens; None where there are none."""
        return self._add(CompletionLogprobs([], [], [], []), positions) if positions else None

    def _add(
        self,
        shaped: CompletionLogprobs,
        positions: Sequence[PositionLogprobs],
        most: int | None = None,
    ) -> CompletionLogprobs:
        for position in positions:
            chosen = position.chosen
            token = _spelled(chosen.token)
            logprob = max(chosen.logprob, LOWEST_LOGPROB)
            likeliest = position.top[:most]
            top = {_spelled(top.token): max(top.logprob, LOWEST_LOGPROB) for top in likeliest}
            top.setdefault(token, logprob)
            shaped.text_offset.append(self._offset)
            shaped.tokens.append(token)
            shaped.token_logprobs.append(logprob)
            shaped.top_logprobs.append(top)
            self._offset += len(self._decoder.decode(chosen.token))
        return shaped


def _spelled(token: bytes) -> str:
    """Return a token as text; bytes that are no text are spelled as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class CompletionShaper:
    """Shapes the pieces of one request.

    Args:
        request_id: Names it.
        created_s: When it came, in seconds of the Unix epoch.
        model: Who answers.
        usage_events: Whether a stream's events say that they have no usage.
        choices: Choices of each prompt.
        echoes: The prompts, where answers begin with them.
        told: What is answered beside the text that is made.
    """

    def __init__(
        self,
        request_id: str,
        created_s: int,
        model: str,
        *,
        usage_events: bool,
        choices: int = 1,
        echoes: Sequence[Echo] = (),
        told: Told = Told(),
    ) -> None:
        self._choices = choices
        self._told = told
        self._echoes = echoes
        self._read: dict[int, Sequence[PositionLogprobs]] = {}
        """Of each prompt, as its first choice was told."""
        self._id = f"cmpl-{request_id}"
        self._created_s = created_s
        self._model = model
        self._no_usage: UnsetType | None = None if usage_events else UNSET
        self._logprobs: defaultdict[int, CompletionLogprobsShaper] = defaultdict(
            CompletionLogprobsShaper
        )

    def answer(self, pieces: Sequence[Piece], counts: Usage) -> Completion:
        """Return the whole answer."""
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                self._read[piece.index // self._choices] = piece.prompt_logprobs
        return Completion(
            self._id,
            self._created_s,
            self._model,
            [self._choice(piece, whole=True) for piece in pieces],
            usage=self._counts(counts),
        )

    def opening(self, choices: int) -> list[Completion]:
        """Return the events before the first text: prompts, where they are echoed."""
        if not self._echoes:
            return []
        return [
            Completion(
                self._id,
                self._created_s,
                self._model,
                [CompletionChoice(index, self._echoes[index // self._choices].text)],
                usage=self._no_usage,
            )
            for index in range(choices)
        ]

    def events(self, piece: Piece) -> list[Completion]:
        """Return the event for what a sequence made."""
        return [
            Completion(
                self._id,
                self._created_s,
                self._model,
                [self._choice(piece)],
                usage=self._no_usage,
            )
        ]

    def closing(self, counts: Usage) -> Completion:
        """Return the event that has the usage."""
        return Completion(self._id, self._created_s, self._model, [], usage=self._counts(counts))

    def _counts(self, counts: Usage) -> Usage:
        """Return what is counted, without a token that is not answered."""
        if not self._told.nothing_made:
            return counts
        return msgspec.structs.replace(
            counts, completion_tokens=0, total_tokens=counts.prompt_tokens
        )

    def _choice(self, piece: Piece, *, whole: bool = False) -> CompletionChoice:
        nothing = self._told.nothing_made
        shaper, text = self._logprobs[piece.index], "" if nothing else piece.text
        read = self._read.get(piece.index // self._choices)
        told: CompletionLogprobs | None = None
        scored: PromptLogprobs | UnsetType = UNSET
        if whole and self._echoes:
            echo = self._echoes[piece.index // self._choices]
            text = echo.text + text
            if read is not None and self._told.echoed is not None:
                told = shaper.echo(echo, read, self._told.echoed)
        if read is not None and self._told.scored is not None:
            scored = prompt_logprobs(read, self._told.scored)
        made = None if nothing else shaper.shape(piece.logprobs)
        if told is not None and made is not None:
            for name in made.__struct_fields__:
                getattr(told, name).extend(getattr(made, name))
        finish = finish_text(piece.finish)
        if finish is not None and nothing:
            finish = "length"
        return CompletionChoice(piece.index, text, told or made, finish, scored)
