"""Responses kept for the next turn: their conversations, and the sessions that those are.

Covers `/v1/responses/{id}` and what `previous_response_id` means. Does not cover bodies and answers
(`pie.router.api.responses`, `pie.router.api.responses_answers`) or generating (`pie.router.app`). Kept in
this router's memory alone, the least recently used forgotten first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import msgspec

from pie.router.access import Caller
from pie.router.api.body import BodyLimits, parse_body
from pie.router.api.chat import ChatBody
from pie.router.api.responses import Message, ResponsesBody
from pie.router.api.responses_answers import Keep, Response
from pie.router.errors import ApiError, shown
from pie.router.exchange import Exchange

_ENTRY_BYTES = 500
_NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
)
"""Fields of a chat by what a response calls them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response and the conversation that it ended."""

    response: bytes
    """As it was answered."""
    messages: bytes
    """Of the whole conversation but instructions, as JSON."""
    session: str
    """The first response's id."""


class ResponseStore:
    """Responses by tenant and id.

    Args:
        budget_bytes: Most memory to take; 0 keeps none.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self.used_bytes = 0

    def put(self, tenant: str, id_: str, kept: Kept) -> None:
        """Keep a response."""
        if _size(kept) > self._budget_bytes:
            return
        self._kept[tenant, id_] = kept
        self.used_bytes += _size(kept)
        while self.used_bytes > self._budget_bytes:
            self.used_bytes -= _size(self._kept.popitem(last=False)[1])

    def get(self, tenant: str, id_: str, param: str) -> Kept:
        """Return a response.

        Raises:
            ApiError: 404.
        """
        kept = self._kept.get((tenant, id_))
        if kept is None:
            raise ApiError(
                404,
                f"Response {shown(id_)!r} is not kept here: it was not stored, was another router's, "
                "or is older than what is kept (router.responses_bytes).",
                param=param,
                code="previous_response_not_found",
            )
        self._kept.move_to_end((tenant, id_))
        return kept

    def drop(self, tenant: str, id_: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404.
        """
        self.used_bytes -= _size(self.get(tenant, id_, "response_id"))
        del self._kept[tenant, id_]


class Deleted(msgspec.Struct):
    """Answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


class Responding:
    """What is special to responses.

    Args:
        store: Keeps them.
        limits: Of bodies.
    """

    def __init__(self, store: ResponseStore, limits: BodyLimits) -> None:
        self._store = store
        self._limits = limits

    def body(self, data: bytes) -> ResponsesBody:
        """Return what was asked; what it shares with chats is read, and judged, as a chat's.

        Raises:
            ApiError: 400 that names the problems.
        """
        return parse_body(ResponsesBody, data, self._limits, passed_on=ChatBody.model_fields)

    def chat(self, body: ResponsesBody, caller: Caller) -> tuple[ChatBody, Keep]:
        """Return the chat that a response means, and what is to be told of its end.

        Raises:
            ApiError: It means none, or goes on after a response that is not there.
        """
        before: list[Message] = []
        session = ""
        if body.previous_response_id is not None:
            name = body.previous_response_id
            kept = self._store.get(caller.tenant, name, "previous_response_id")
            before, session = msgspec.json.decode(kept.messages), kept.session
        asked = dict(body.chat(before))
        if session and not any(asked.get(n) for n in ("session_id", "prompt_cache_key", "user")):
            asked["session_id"] = session
        try:
            chat = parse_body(ChatBody, msgspec.json.encode(asked), self._limits)
        except ApiError as error:
            raise as_response(error) from error
        said = [*before, *body.said()]
        keep = partial(self._keep, caller.tenant, said, session, body.store is not False)
        return chat, keep

    async def show(self, exchange: Exchange) -> None:
        """Answer with a response that is kept."""
        kept = self._store.get(exchange.caller.tenant, _asked(exchange), "response_id")
        await exchange.respond(200, kept.response)

    async def delete(self, exchange: Exchange) -> None:
        """Forget a response."""
        self._store.drop(exchange.caller.tenant, _asked(exchange))
        await exchange.respond_json(200, Deleted(_asked(exchange)))

    def _keep(
        self,
        tenant: str,
        said: list[Message],
        session: str,
        wanted: bool,
        response: Response,
        answer: Message,
    ) -> None:
        if not wanted:
            return
        messages = msgspec.json.encode([*said, answer])
        kept = Kept(msgspec.json.encode(response), messages, session or response.id)
        self._store.put(tenant, response.id, kept)


def as_response(error: ApiError) -> ApiError:
    """Return an error of a chat in the words of a response."""
    if error.status != 400:
        return error
    param, message = error.param, error.message
    for pattern, name in _NAMES:
        param = None if param is None else pattern.sub(name, param)
        message = pattern.sub(name, message)
    return ApiError(error.status, message, error.kind, param, error.code, error.headers)


def _asked(exchange: Exchange) -> str:
    return str(exchange.scope["path_params"]["response_id"])


def _size(kept: Kept) -> int:
    return _ENTRY_BYTES + len(kept.response) + len(kept.messages)
