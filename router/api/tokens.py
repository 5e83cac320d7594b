"""`/tokenize` and `/detokenize`, as vLLM has them, and `/v1/embeddings`: bodies and answers.

Covers schemas. Does not cover who answers (`pie.router.tokenizing`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pie.router.api.conversation import ConversationBody

_CONFIG = ConfigDict(frozen=True, strict=True, extra="allow", protected_namespaces=())


class TokenizeText(BaseModel):
    """Body of `/tokenize` for a text."""

    model_config = _CONFIG

    model: str | None = Field(
        default=None, description="A served model; may be left out where there is one."
    )
    prompt: str = Field(description="The text.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add what the model expects around a text: true is the default."
    )
    return_token_strs: bool | None = Field(
        default=None, description="Answer each token's spelling as well."
    )


class TokenizeConversation(ConversationBody):
    """Body of `/tokenize` for a conversation."""

    model_config = _CONFIG

    model: str | None = Field(
        default=None, description="A served model; may be left out where there is one."
    )
    add_special_tokens: Literal[False] | None = Field(
        default=None, description="A chat template brings its own special tokens."
    )
    return_token_strs: bool | None = Field(
        default=None, description="Answer each token's spelling as well."
    )


class DetokenizeBody(BaseModel):
    """Body of `/detokenize`."""

    model_config = _CONFIG

    model: str | None = Field(
        default=None, description="A served model; may be left out where there is one."
    )
    tokens: Annotated[list[int], Field(fail_fast=True)] = Field(description="Token ids.")


class EmbeddingsBody(BaseModel):
    """Body of `/v1/embeddings`, as far as it is read."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model: str = Field(description="Name of a served model, see `/v1/models`.")


class Tokenized(msgspec.Struct):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str
