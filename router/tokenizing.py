"""Texts and conversations as token ids and back, without a worker.

Covers `/tokenize` and `/detokenize`, and says that there are no embeddings. Does not cover bodies
(`pie.router.api.tokens`) or making prompts (`pie.router.prompt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from pie.router.api.body import BodyLimits, parse_body
from pie.router.api.extras import raw_fields
from pie.router.api.tokens import (
    DetokenizeBody,
    Detokenized,
    EmbeddingsBody,
    TokenizeConversation,
    TokenizeText,
)
from pie.router.conversing import conversation
from pie.router.errors import invalid, shown
from pie.router.exchange import Exchange
from pie.router.gate import Gate
from pie.router.models import ModelCatalog, ServedModel

_ROOM = 1 << 40
"""No prompt of a body is longer: nothing is generated, so that no context limits it."""


_MOST_TOLD = 1 << 20
"""Token ids of one answer: with their spelling some 30 MB."""
_PIECE = 4096
"""Ids that are spelled and written at a time, so that streams have their turn in between."""


class _Written(msgspec.Struct):
    """A `Tokenized` whose lists are JSON already."""

    count: int
    max_model_len: int
    tokens: msgspec.Raw
    token_strs: msgspec.Raw | None = None


class Tokenizing:
    """Handlers of what tokenizers alone can answer.

    Args:
        catalog: The models.
        limits: Of bodies.
        gate: Counts those who are answered.
    """

    def __init__(self, catalog: ModelCatalog, limits: BodyLimits, gate: Gate) -> None:
        self._catalog = catalog
        self._limits = limits
        self._gate = gate

    async def tokenize(self, exchange: Exchange) -> None:
        """Answer with the ids of a text or a conversation."""
        self._gate.check()
        body = await exchange.parsed(self._text_or_conversation)
        model, tenant = self._model(body.model), exchange.caller.tenant
        with self._gate.enter(1):
            async with exchange.caller.enter(1):
                if isinstance(body, TokenizeConversation):
                    making = model.prompts.conversation(
                        conversation(body),
                        model=model.name,
                        salt=exchange.caller.salt(None),
                        context_tokens=_ROOM,
                        tenant=tenant,
                    )
                    prompt = await exchange.in_time(making)
                    ids: Sequence[int] = prompt.ids
                else:
                    added = body.add_special_tokens is not False
                    ids = await exchange.in_time(
                        model.prompts.encode(body.prompt, add_special_tokens=added, tenant=tenant)
                    )
                if len(ids) > _MOST_TOLD:
                    param = "messages" if isinstance(body, TokenizeConversation) else "prompt"
                    raise invalid(
                        f"{param}: has {len(ids):,} tokens; at most {_MOST_TOLD:,} fit into an answer",
                        param,
                        "too_large",
                    )
                names = bool(body.return_token_strs)
                content = await exchange.in_time(
                    model.prompts.run(
                        len(ids) > _PIECE, lambda: _told(model, ids, names=names), tenant
                    )
                )
        await exchange.respond(200, content)

    async def detokenize(self, exchange: Exchange) -> None:
        """Answer with the text of token ids, special tokens included."""
        self._gate.check()
        body = await exchange.parsed(partial(parse_body, DetokenizeBody, limits=self._limits))
        model = self._model(body.model)

        def decode() -> str:
            ids = body.tokens
            if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
                text = f"tokens: token ids are at least 0 and below {model.vocab_size}"
                raise invalid(text, "tokens")
            return model.prompts.tokenizer.decode(ids, skip_special_tokens=False)

        with self._gate.enter(1):
            async with exchange.caller.enter(1):
                text = await exchange.in_time(
                    model.prompts.run(len(body.tokens) > _PIECE, decode, exchange.caller.tenant)
                )
        await exchange.respond_json(200, Detokenized(text))

    async def embeddings(self, exchange: Exchange) -> None:
        """Say that no model here has embeddings."""
        body = await exchange.parsed(partial(parse_body, EmbeddingsBody, limits=self._limits))
        model = self._catalog.served(body.model)
        raise invalid(
            f"model: {shown(model.name)} generates text and has no embeddings",
            "model",
            "unsupported_model",
        )

    def _text_or_conversation(self, data: bytes) -> TokenizeConversation | TokenizeText:
        if "messages" in raw_fields(TokenizeConversation, data):
            return parse_body(TokenizeConversation, data, self._limits)
        return parse_body(TokenizeText, data, self._limits)

    def _model(self, name: str | None) -> ServedModel:
        """Return the model of that name, or the only one.

        Raises:
            ApiError: There is no such model, or there are several and none is named.
        """
        models = self._catalog.models
        if name is None and len(models) > 1:
            raise invalid("model: is required where several are served", "model")
        if name is None:
            name = models[0].name if models else ""
        return self._catalog.served(name)


def _told(model: ServedModel, ids: Sequence[int], *, names: bool) -> bytes:
    """Return the answer for token ids, with their spelling where `names` are wanted."""
    spelled = model.prompts.tokenizer.token
    pieces = [list(ids[at : at + _PIECE]) for at in range(0, len(ids), _PIECE)]
    head = _Written(len(ids), model.context_tokens, _list(pieces))
    if names:
        head.token_strs = _list([[spelled(id_) or "" for id_ in piece] for piece in pieces])
    return msgspec.json.encode(head)


def _list(pieces: Sequence[Sequence[object]]) -> msgspec.Raw:
    """Return lists as the JSON of one, none of them longer than another thread can wait."""
    return msgspec.Raw(
        b"[" + b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces) + b"]"
    )
