"""Responses kept for the next turn: their conversations, and the sessions that those are.

Covers `/v1/responses/{id}` and what `previous_response_id` means. Does not cover bodies and answers
(`pie.router.api.responses`, `pie.router.api.responses_answers`) or generating (`pie.router.app`). Kept for
all routers, encrypted, or in this one's memory where it certainly never came to the others'; the least recently
used are forgotten first.
"""

from __future__ import annotations

import logging
import re
from functools import partial

import msgspec
from blake3 import blake3

from pie.index.errors import IndexNotAskedError, PageIndexError
from pie.index.shelf import MemoryShelf, Shelf
from pie.router.api.body import BodyLimits, GenerationBody, parse_body
from pie.router.api.chat import ChatBody
from pie.router.api.responses import Message, ResponsesBody
from pie.router.api.responses_answers import Keep, Response, response_id
from pie.router.errors import ApiError, shown, unavailable
from pie.router.exchange import Exchange

log = logging.getLogger("pie.router.responding")

_NAME_BYTES = 16
_NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
)
"""Fields of a chat by what a response calls them."""


class Kept(msgspec.Struct, frozen=True):
    """A response and the conversation that it ended."""

    response: bytes
    """As it was answered."""
    messages: bytes
    """Of the whole conversation but instructions, as JSON."""
    session: str
    """What its conversation is called; the first response's id where no request named another."""


_FORGOTTEN = b""
"""Lies where a response was that is forgotten."""


class ResponseStore:
    """Responses by tenant and id.

    Each is in one place, so that one that was deleted is nowhere: far, or near where it certainly never was far,
    and nobody else can have deleted it.

    Args:
        near: Keeps those that this router answered and that never were far.
        far: Keeps those of all routers; None where there is no place that nobody else can read.
        secret: Keys the names by which they are kept; names alone tell nothing.
        retry_after_s: What a client is told to wait for what cannot be had now.
    """

    def __init__(
        self, near: MemoryShelf, far: Shelf | None, *, secret: bytes, retry_after_s: float
    ) -> None:
        self._near = near
        self._far = far
        self._secret = secret
        self._retry_after_s = retry_after_s

    @property
    def keeps(self) -> bool:
        """Whether responses are kept at all."""
        return self._near.takes("", b"")

    async def put(self, tenant: str, id_: str, kept: Kept) -> None:
        """Keep a response."""
        name, value = self._name(tenant, id_), msgspec.msgpack.encode(kept)
        if self._far is None or not self._far.takes(name, value):
            self._near.put_now(name, value)
            return
        try:
            await self._far.put([(name, value)])
        except IndexNotAskedError as error:
            log.debug("response %s is kept by this router alone: %s", id_, error)
            self._near.put_now(name, value)
        except PageIndexError as error:
            # It may be far all the same, and be deleted there by others: a copy here would outlive that.
            log.debug("nobody knows whether response %s is kept: %s", id_, error)

    async def get(self, tenant: str, id_: str, param: str) -> Kept:
        """Return a response.

        Raises:
            ApiError: 404; 503 where another router may have it, and it cannot be had now.
        """
        name = self._name(tenant, id_)
        value = self._near.get_now(name)
        if value is None and self._far is not None:
            try:
                value = await self._far.get(name)
            except PageIndexError as error:
                message = f"Response {shown(id_)!r} cannot be looked for at present."
                raise self._not_now(message) from error
        if value is None or value == _FORGOTTEN:
            raise ApiError(
                404,
                f"Response {shown(id_)!r} is not kept: it was not stored, was deleted, or is older "
                "than what is kept (router.responses_bytes, router.kept_s).",
                param=param,
                code="previous_response_not_found",
            )
        return msgspec.msgpack.decode(value, type=Kept)

    async def drop(self, tenant: str, id_: str) -> None:
        """Forget a response.

        Raises:
            ApiError: 404; 503 where others may still have it.
        """
        name = self._name(tenant, id_)
        if self._near.drop_now(name):
            return
        await self.get(tenant, id_, "response_id")
        if self._far is not None:
            try:
                await self._far.put([(name, _FORGOTTEN)])
            except PageIndexError as error:
                raise self._not_now(f"Response {shown(id_)!r} cannot be deleted now.") from error

    def _not_now(self, message: str) -> ApiError:
        return unavailable(message, self._retry_after_s, "responses_unavailable")

    def _name(self, tenant: str, id_: str) -> str:
        both = msgspec.msgpack.encode((tenant, id_))
        return blake3(both, key=self._secret).hexdigest(_NAME_BYTES)


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

    async def chat(self, body: ResponsesBody, exchange: Exchange) -> tuple[ChatBody, Keep]:
        """Return the chat that a response means, in its conversation's session, and what is to be told of its end.

        Where nothing else names the session and the response can be gone on after, the session is called as it is:
        see `begins_session`.

        Raises:
            ApiError: It means none, or goes on after a response that is not there.
        """
        before: list[Message] = []
        caller = exchange.caller
        session = ""
        wanted = body.store is not False and self._store.keeps
        if body.previous_response_id is not None:
            name = body.previous_response_id
            kept = await self._store.get(caller.tenant, name, "previous_response_id")
            before, session = msgspec.json.decode(kept.messages), kept.session
        elif wanted:
            session = response_id(exchange.request_id)
        asked = msgspec.json.encode(body.chat(before))
        try:
            parse = partial(parse_body, ChatBody, limits=self._limits)
            chat = await exchange.parsed_from(asked, parse)
        except ApiError as error:
            raise as_response(error) from error
        if session and chat.session is None:
            chat = chat.model_copy(update={"session_id": session})
        said = [*before, *body.said()]
        return chat, partial(self._keep, exchange, said, chat.session or "", wanted)

    async def show(self, exchange: Exchange) -> None:
        """Answer with a response that is kept."""
        kept = await self._store.get(exchange.caller.tenant, _asked(exchange), "response_id")
        await exchange.respond(200, kept.response)

    async def delete(self, exchange: Exchange) -> None:
        """Forget a response."""
        await self._store.drop(exchange.caller.tenant, _asked(exchange))
        await exchange.respond_json(200, Deleted(_asked(exchange)))

    def _keep(
        self,
        exchange: Exchange,
        said: list[Message],
        session: str,
        wanted: bool,
        response: Response,
        answer: Message,
    ) -> None:
        if not wanted:
            return
        messages = msgspec.json.encode([*said, answer])
        kept = Kept(msgspec.json.encode(response), messages, session)
        # Before the client can go on after it, at any router.
        exchange.finish_first(self._store.put(exchange.caller.tenant, response.id, kept))


def begins_session(body: GenerationBody, request_id: str) -> bool:
    """Return whether the session of what is asked is named after the response that it is to be."""
    return body.session_id == response_id(request_id)


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
