"""What every generating request may say, and the way from bytes to a body.

Covers the fields that chat and completions share, and their mistakes. Does not cover what is special
to an endpoint (`pie.router.api.chat`, `pie.router.api.completions`), fields that are no body's
(`pie.router.api.extras`) or how mistakes are told (`pie.router.api.problems`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pie.router.api.bulk import check_bulk
from pie.router.api.extras import extra_problems, unsupported_problems
from pie.router.api.long_ids import LONG_BYTES, without_long_ids
from pie.router.api.problems import Problem, problems_of, refuse
from pie.router.api.structured import (
    MAX_CHOICES,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    format_grammar,
    only_one,
    structured_grammar,
)
from pie.router.errors import invalid, shown
from pie.wire.messages import Grammar, Sampling

INT64_MAX = 2**63 - 1
MAX_PRIORITY = 1_000_000
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 256
"""Whatever the settings say."""
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIASES = 4096
"""What a worker takes: biases are put together anew at each step."""
_MAX_ID_DIGITS = 19


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits that come from the router's settings."""

    max_choices: int
    max_prompts: int
    max_stop_strings: int
    max_logprobs: int


def _limits(info: ValidationInfo) -> BodyLimits:
    """Return the limits that `parse_body` passed in."""
    return cast(BodyLimits, info.context)


class StreamOptions(BaseModel):
    """What a stream brings besides text."""

    model_config = ConfigDict(frozen=True, strict=True)

    include_usage: bool = Field(
        default=False, description="Send one more event, with the request's usage and no choice."
    )


def _stop_kind(value: object) -> str:
    """Tell one stop string from a list of them."""
    return "~list" if isinstance(value, list) else "~text"


_Stop = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("~list")],
    Discriminator(_stop_kind),
]


class GenerationBody(BaseModel):
    """The fields that chat and text completions share."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )

    model: str = Field(description="Name of a served model, see `/v1/models`.")
    stream: bool | None = Field(
        default=None, description="Send the answer as server-sent events while it is made."
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="Only with `stream`: what the stream brings besides text."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=INT64_MAX, description="Most tokens to generate for each choice."
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        description="Report the log-probability of each of the prompt's tokens, and so many of the "
        "likeliest there.",
    )
    n: int | None = Field(
        default=None, ge=1, description="Choices to make for each prompt, each with its own seed."
    )
    stop: _Stop | None = Field(
        default=None, description="Strings that end the answer; they are not part of it."
    )
    seed: int | None = Field(
        default=None, ge=-INT64_MAX, le=INT64_MAX, description="Makes draws repeatable."
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 takes the likeliest token; 1 is the default."
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Draw from the likeliest tokens of this mass."
    )
    top_k: int | None = Field(
        default=None,
        ge=-1,
        le=INT64_MAX,
        description="Draw from so many tokens; 0 or -1 from all.",
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop tokens below this share of the likeliest."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Subtracted from a token's logit for each use."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Subtracted from a used token's logit once."
    )
    logit_bias: dict[str, float] | None = Field(
        default=None,
        description=f"Added to the logits of these token ids, at most {MAX_LOGIT_BIASES:,}: -100 to 100.",
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=0.01,
        le=10,
        description="Above 1 makes tokens of prompt and answer less likely to come again.",
    )
    min_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT64_MAX,
        description="Tokens before which no token ends the answer; stop strings do.",
    )
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(fail_fast=True, max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = Field(default=None, description=f"Up to {MAX_BAD_WORDS} texts that are not generated.")
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=INT64_MAX,
        description="Keep so many of the prompt's last tokens; -1 as many as there is room for.",
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text: true is the default."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="End the text with the stop string that ended the answer."
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="What the whole answer must look like."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="The same in vLLM's words."
    )
    guided_json: str | Schema | None = Field(
        default=None, description="`structured_outputs.json` by its older name."
    )
    guided_regex: str | None = Field(
        default=None, description="`structured_outputs.regex` by its older name."
    )
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        default=None, description="`structured_outputs.choice` by its older name."
    )
    guided_grammar: str | None = Field(
        default=None, description="`structured_outputs.grammar` by its older name."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on after the model's end-of-text token."
    )
    stop_token_ids: (
        Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None
    ) = Field(
        default=None, description=f"Token ids that end the answer, at most {MAX_STOP_TOKENS}."
    )
    priority: int | None = Field(
        default=None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Workers take requests with a smaller number first; 0 is the default.",
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Share cached pages only with requests that carry the same salt.",
    )
    session_id: str | None = Field(
        default=None, max_length=512, description="Names a conversation, for routing policies."
    )
    prompt_cache_key: str | None = Field(
        default=None,
        max_length=512,
        description="Names requests that begin alike, for routing policies, where `session_id` is not set.",
    )
    user: str | None = Field(
        default=None,
        max_length=512,
        description="Who asks, for routing policies, where neither of those is set.",
    )

    @property
    def session(self) -> str | None:
        """What the request names that should stay at one worker, all else being equal."""
        named = (self.session_id, self.prompt_cache_key, self.user)
        return next((name for name in named if name), None)

    @field_validator("n")
    @classmethod
    def _n_within_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = _limits(info).max_choices
        if value is not None and value > most:
            raise PydanticCustomError("too_many", "must be at most {most}", {"most": most})
        return value

    @field_validator("stop")
    @classmethod
    def _stop_within_limits(
        cls, value: str | list[str] | None, info: ValidationInfo
    ) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        most = _limits(info).max_stop_strings
        if len(stops) > most:
            raise PydanticCustomError("too_many", "at most {most} strings", {"most": most})
        if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise PydanticCustomError(
                "bad_stop",
                "a stop string has 1 to {most} characters",
                {"most": MAX_STOP_CHARS},
            )
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _logit_bias_of_token_ids(cls, value: object) -> object:
        """Stop at the first mistake: a schema would look at every entry."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_LOGIT_BIASES:
            raise PydanticCustomError(
                "too_many", "at most {most} token ids", {"most": MAX_LOGIT_BIASES}
            )
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) <= _MAX_ID_DIGITS):
                raise PydanticCustomError(
                    "bad_token", "keys are token ids, not {token}", {"token": repr(shown(token))}
                )
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise PydanticCustomError("bad_bias", "values are numbers")
            if not -100 <= bias <= 100:
                raise PydanticCustomError("bad_bias", "values lie between -100 and 100")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some_tokens_are_kept(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("bad_count", "must be -1 or at least 1")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _prompt_logprobs_within_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = _limits(info).max_logprobs
        if value is not None and value > most:
            raise PydanticCustomError("too_many", "must be at most {most}", {"most": most})
        return value

    @model_validator(mode="after")
    def _prompt_logprobs_of_whole_answers(self) -> Self:
        if self.prompt_logprobs is not None and (self.stream or self.sequences > self.choices):
            raise PydanticCustomError(
                "prompt_logprobs",
                "prompt_logprobs: neither where stream is true nor with best_of",
            )
        return self

    @model_validator(mode="after")
    def _stream_options_with_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options: only allowed where stream is true"
            )
        return self

    @property
    def choices(self) -> int:
        """Choices asked for each prompt."""
        return self.n or 1

    @property
    def sequences(self) -> int:
        """Sequences to make for each prompt, of which `choices` are answered."""
        return self.choices

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def kept_tokens(self, context_tokens: int) -> int | None:
        """Return how many of the prompt's last tokens are kept; None for all."""
        asked = self.truncate_prompt_tokens
        return context_tokens - 1 if asked == -1 else asked

    @property
    def shows_special(self) -> bool:
        """Whether the text has special tokens."""
        return self.skip_special_tokens is False

    def grammar(self) -> tuple[str, Grammar] | None:
        """Return what the answer must match, and the field that says so; None for any text.

        Raises:
            ApiError: Two fields say it, or one says too much.
        """
        outputs, guided = self.structured_outputs, self._guided()
        return only_one(
            format_grammar(self.response_format),
            None if outputs is None else structured_grammar(outputs, "structured_outputs"),
            None if guided is None else structured_grammar(guided, _guided_field(guided)),
        )

    def _guided(self) -> StructuredOutputs | None:
        """Return what vLLM's older fields say together; None where none is given."""
        given = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if given == (None, None, None, None):
            return None
        return StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self,
        *,
        logprobs: int | None,
        vocab_size: int,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> Sampling:
        """Return how tokens are drawn; `bad_words` are the body's as token ids.

        Raises:
            ApiError: A token id lies outside the vocabulary.
        """
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if any(token >= vocab_size for token in bias):
            raise invalid(f"logit_bias: token ids are below {vocab_size}", "logit_bias")
        if any(not 0 <= token < vocab_size for token in self.stop_token_ids or ()):
            raise invalid(f"stop_token_ids: token ids are below {vocab_size}", "stop_token_ids")
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=bias,
            logprobs=logprobs,
            repetition_penalty=self.repetition_penalty or 1.0,
            min_tokens=self.min_tokens or 0,
            bad_words=bad_words,
        )


def _guided_field(guided: StructuredOutputs) -> str:
    """Return the first of vLLM's older fields that is given."""
    given = {
        "guided_json": guided.json_,
        "guided_regex": guided.regex,
        "guided_choice": guided.choice,
    }
    return next((name for name, value in given.items() if value is not None), "guided_grammar")


B = TypeVar("B", bound=BaseModel)


def parse_body(
    kind: type[B],
    data: bytes | bytearray,
    limits: BodyLimits,
    *,
    passed_on: Collection[str] = (),
) -> B:
    """Return the body that `data` spells, in about a tenth of a second at most.

    Fields of `passed_on` that it does not know are let through: somebody else reads and judges them.

    Raises:
        ApiError: 400 that names the problems; `param` is the first problem's field.
    """
    check_bulk(kind, data)
    lists: dict[str, list[int]] = {}
    if len(data) > LONG_BYTES:
        data, lists = without_long_ids(kind, data)
    try:
        body = kind.model_validate_json(data, context=limits)
    except ValidationError as error:
        problems = problems_of(error)
        told = {problem.param for problem in problems}
        unread = unsupported_problems(kind, data, {*told, *passed_on})
        refuse(chain(problems, unread))
        raise
    # What stood in their stead was judged: one id, as they are many.
    vars(body).update(lists)
    extra = body.__pydantic_extra__ or {}
    unknown = {name: value for name, value in extra.items() if name not in passed_on}
    refuse(chain(extra_problems(unknown), body_problems(body)))
    return body


def body_problems(body: BaseModel) -> Iterator[Problem]:
    """Yield what is wrong inside the parts of a body that has messages."""
    # Only where the schema knows them: what it does not know would be found as an attribute too.
    for position, message in enumerate(vars(body).get("messages", ())):
        if message.model_extra:
            yield from extra_problems(message.model_extra, f"messages[{position}].")
