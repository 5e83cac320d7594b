"""The HTTP application: which path does what.

Covers routes, the way from a body to orders, and errors in OpenAI's shape for everything. Does not
cover starting and stopping (`pie.router.service`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
from blake3 import blake3
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pie.page.events import PlaceId
from pie.router import openapi
from pie.router.admin import Admin
from pie.router.answer import Answerer
from pie.router.api.body import BodyLimits, GenerationBody, parse_body
from pie.router.api.chat import ChatBody
from pie.router.api.chat_answers import ChatShaper
from pie.router.api.completions import CompletionBody, CompletionShaper
from pie.router.api.listing import Model, ModelList
from pie.router.api.usage import Shaper
from pie.router.census import Census, CensusTaker
from pie.router.conversing import Calling, conversation
from pie.router.errors import ApiError, invalid, model_not_found, server_error, shown, unavailable
from pie.router.exchange import BodyBudget, ClientGoneError, Exchange
from pie.router.gate import Gate
from pie.router.generation import Order
from pie.router.likeliest import Likeliest
from pie.router.metrics import RouterMetrics
from pie.router.models import ModelCatalog, ServedModel
from pie.router.prefix import Prefix
from pie.router.prompt import Prompt
from pie.router.settings import RouterSettings
from pie.router.status import ClusterStatus
from pie.router.workers import WorkerSet
from pie.wire.messages import Grammar

log = logging.getLogger("pie.router.app")

Handler = Callable[[Exchange], Awaitable[None]]

_PLACE_HEADER = b"x-pie-place"
_SEED_BITS = 63
_ID_CHARS = 24


class MakeShaper(Protocol):
    """Makes the shaper of one request."""

    def __call__(
        self, request_id: str, created_s: int, model: str, *, usage_events: bool
    ) -> Shaper:
        """Return it."""
        ...


class RouterApp:
    """Handlers of every path."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        catalog: ModelCatalog,
        workers: WorkerSet,
        answerer: Answerer,
        gate: Gate,
        metrics: RouterMetrics,
        census: CensusTaker,
        status: Callable[[Census | None], ClusterStatus],
        admin: Admin,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._workers = workers
        self._answerer = answerer
        self._gate = gate
        self._metrics = metrics
        self._census = census
        self._status = status
        self._admin = admin
        self._token = settings.api_token.get_secret_value().encode()
        self._bodies = BodyBudget(int(settings.body_budget_bytes), settings.retry_after_s)
        self._document: dict[str, object] | None = None
        self._limits = BodyLimits(
            max_choices=settings.max_choices,
            max_prompts=settings.max_prompts,
            max_stop_strings=settings.max_stop_strings,
            max_logprobs=settings.max_logprobs,
        )

    def asgi(self) -> Starlette:
        """Return the ASGI application."""
        get, post = ["GET"], ["POST"]
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint(self._chat), methods=post),
                Route("/v1/completions", self._endpoint(self._complete), methods=post),
                Route("/v1/models", self._endpoint(self._list_models), methods=get),
                Route("/v1/models/{model:path}", self._endpoint(self._model), methods=get),
                Route("/health", self._endpoint(self._health, public=True), methods=get),
                Route("/ready", self._endpoint(self._ready, public=True), methods=get),
                Route("/status", self._endpoint(self._show_status), methods=get),
                Route("/metrics", self._endpoint(self._show_metrics), methods=get),
                Route("/admin/requests", self._endpoint(self._admin.requests), methods=get),
                Route(
                    "/admin/requests/{request_id:path}",
                    self._endpoint(self._admin.request),
                    methods=get,
                ),
                Route("/openapi.json", self._endpoint(self._openapi, public=True), methods=get),
            ],
            exception_handlers={HTTPException: self._no_such_thing},
        )
        app.router.redirect_slashes = False
        return app

    def _endpoint(self, handler: Handler, *, public: bool = False) -> _Endpoint:
        token = b"" if public else self._token
        return _Endpoint(handler, self._settings, self._metrics, self._bodies, token=token)

    def _no_such_thing(self, request: Request, error: Exception) -> Response:
        """Answer for an unknown path or a wrong method."""
        assert isinstance(error, HTTPException)
        asked = f"{shown(request.method)} {shown(request.url.path)}"
        if error.status_code == 405:
            allowed = " or ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            told = ApiError(
                405,
                f"{asked} is not allowed; this path takes {allowed}.",
                code="method_not_allowed",
                headers=error.headers,
            )
        else:
            told = ApiError(
                error.status_code,
                f"{asked} is nothing that this server does; `/openapi.json` lists what it does.",
                code="not_found",
                headers=error.headers,
            )
        self._metrics.requests.labels("other", str(error.status_code)).inc()
        return JSONResponse(told.body(), told.status, told.headers)

    async def _chat(self, exchange: Exchange) -> None:
        arrived_s = time.monotonic()
        self._gate.check()
        body = parse_body(ChatBody, await exchange.body(), self._limits)
        model = self._served(body.model)
        with self._gate.enter(body.sequences):
            calling = Calling(body, model.prompts)
            grammar = calling.grammar(body.grammar())
            prompt = await model.prompts.conversation(
                conversation(body),
                model=model.name,
                salt=body.cache_salt,
                context_tokens=model.context_tokens,
            )
            await self._generate(
                exchange,
                body,
                model,
                [prompt],
                arrived_s,
                partial(
                    ChatShaper,
                    reader=calling.reader(prompt),
                    id_chars=calling.format.id_chars if calling.format else _ID_CHARS,
                ),
                param="messages",
                grammar=grammar,
                shows_special=body.shows_special or calling.shows_special,
                limit=body.token_limit,
                logprobs=body.logprobs_wanted,
                default_tokens=None,
            )

    async def _complete(self, exchange: Exchange) -> None:
        arrived_s = time.monotonic()
        self._gate.check()
        body = parse_body(CompletionBody, await exchange.body(), self._limits)
        model = self._served(body.model)
        with self._gate.enter(body.sequences * len(body.prompts)):
            prompts = [await _plain(model, asked) for asked in body.prompts]
            await self._generate(
                exchange,
                body,
                model,
                prompts,
                arrived_s,
                CompletionShaper,
                param="prompt",
                grammar=body.grammar(),
                shows_special=body.shows_special,
                limit=body.token_limit,
                logprobs=body.logprobs,
                default_tokens=self._settings.default_completion_tokens,
            )

    async def _generate(
        self,
        exchange: Exchange,
        body: GenerationBody,
        model: ServedModel,
        prompts: Sequence[Prompt],
        arrived_s: float,
        shaper: MakeShaper,
        *,
        param: str,
        grammar: tuple[str, Grammar] | None,
        shows_special: bool,
        limit: tuple[str, int | None],
        logprobs: int | None,
        default_tokens: int | None,
    ) -> None:
        """Make orders and answer them."""
        request_id = exchange.request_id
        sampling = body.sampling(logprobs=logprobs, vocab_size=model.vocab_size)
        choices = body.sequences
        likeliest = None
        if body.choices < choices:
            likeliest = Likeliest(body.choices, shows_logprobs=logprobs is not None)
            sampling = msgspec.structs.replace(sampling, logprobs=logprobs or 0)
        # Without a seed of its own, a stream that is resumed could not go on with the same draws.
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        seeds = [_derived(seed, choice) for choice in range(choices)]
        samplings = [msgspec.structs.replace(sampling, seed=seed) for seed in seeds]
        place = self._place(exchange.header(_PLACE_HEADER))
        grammar_param, wanted = grammar or (None, None)
        orders = [
            Order(
                model=model,
                prompt=prompt,
                prefix=prefix,
                max_tokens=_room(prompt, model, limit, default_tokens),
                sampling=seeded,
                stop=body.stops,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                ignore_eos=bool(body.ignore_eos),
                grammar=wanted,
                grammar_param=grammar_param,
                shows_special=shows_special,
                shows_stop=bool(body.include_stop_str_in_output),
                param=param,
                session=body.session,
                only_place=place,
                arrived_s=arrived_s,
            )
            for prompt in prompts
            for prefix in (Prefix(prompt.ids, body.cache_salt),)
            for seeded in samplings
        ]
        await self._answerer.answer(
            exchange,
            orders,
            shaper(request_id, int(time.time()), model.name, usage_events=body.include_usage),
            choices=choices,
            likeliest=likeliest,
            stream=bool(body.stream),
            usage_events=body.include_usage,
        )

    def _served(self, name: str) -> ServedModel:
        """Return the model of that name.

        Raises:
            ApiError: 404 where nobody serves it, 503 where somebody did or nobody serves anything.
        """
        model = self._catalog.get(name)
        if model is not None:
            return model
        if self._catalog.was_served(name) or not self._catalog.models:
            problems = self._catalog.problems
            why = f" ({problems[0]})" if problems else ""
            raise unavailable(f"No worker is ready{why}.", self._settings.retry_after_s)
        raise model_not_found(name)

    def _place(self, name: str | None) -> PlaceId | None:
        """Return the place that a request is directed at.

        Raises:
            ApiError: There is no such worker, or clients may not choose.
        """
        if name is None:
            return None
        if not self._settings.takes_place_header:
            raise invalid(
                "x-pie-place: this router chooses workers itself (router.allow_place_header)",
                "x-pie-place",
                "unsupported_parameter",
            )
        place = PlaceId(name)
        if place not in self._workers.links:
            raise invalid(
                f"x-pie-place: no worker {shown(name)!r}; there are "
                f"{', '.join(sorted(self._workers.links)) or 'none'}",
                "x-pie-place",
                "unknown_place",
            )
        return place

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, ModelList([_listed(m) for m in self._catalog.models]))

    async def _model(self, exchange: Exchange) -> None:
        name = str(exchange.scope["path_params"]["model"])
        model = self._catalog.get(name)
        if model is None:
            raise model_not_found(name)
        await exchange.respond_json(200, _listed(model))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        status = self._status(None)
        if not status.ready:
            raise unavailable(status.reason, self._settings.retry_after_s, "not_ready")
        await exchange.respond_json(
            200,
            {
                "status": "ready",
                "model": status.model,
                "workers": status.usable_workers,
                "index": status.index,
            },
        )

    async def _show_status(self, exchange: Exchange) -> None:
        await exchange.respond_json(200, self._status(await self._census.take()))

    async def _show_metrics(self, exchange: Exchange) -> None:
        census = await self._census.take()
        self._status(census)
        self._metrics.places.show(census)
        await exchange.respond(
            200, self._metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _openapi(self, exchange: Exchange) -> None:
        if self._document is None:
            self._document = openapi.document()
        await exchange.respond_json(200, self._document)


class _Endpoint:
    """One handler as an ASGI application: who may ask, and what goes wrong."""

    def __init__(
        self,
        handler: Handler,
        settings: RouterSettings,
        metrics: RouterMetrics,
        bodies: BodyBudget,
        *,
        token: bytes,
    ) -> None:
        self._handler = handler
        self._bodies = bodies
        self._settings = settings
        self._metrics = metrics
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._settings, self._bodies)
        path = shown(scope["path"])
        try:
            try:
                self._authorise(exchange)
                await self._handler(exchange)
            except ApiError as error:
                if error.status >= 500:
                    log.warning("%s: %d %s", path, error.status, error.message)
                else:
                    told = (error.status, error.code, error.param)
                    log.info("%s: %d, code %s, param %s", path, *told)
                await exchange.refuse(error)
            except ClientGoneError:
                exchange.status = exchange.status or 499
            # Whatever else goes wrong is our own bug: it is logged, and the client is told so.
            except Exception:
                log.exception("%s failed", path)
                await exchange.refuse(server_error("The router failed."))
        except ClientGoneError:
            exchange.status = exchange.status or 499
        route = getattr(scope.get("route"), "path", scope["path"])
        self._metrics.requests.labels(route, str(exchange.status)).inc()

    def _authorise(self, exchange: Exchange) -> None:
        """Hold the request to the token, where one is set."""
        if not self._token:
            return
        given = (exchange.header(b"authorization") or "").encode("latin-1")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise ApiError(
                401,
                "Incorrect API key: send `Authorization: Bearer …` with router.api_token.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


async def _plain(model: ServedModel, asked: str | Sequence[int]) -> Prompt:
    """Return one prompt of several; streams have a turn before each."""
    await asyncio.sleep(0)
    context_tokens = model.context_tokens
    if isinstance(asked, str):
        return await model.prompts.text(asked, context_tokens=context_tokens)
    return model.prompts.tokens(asked, context_tokens=context_tokens, vocab_size=model.vocab_size)


def _room(
    prompt: Prompt, model: ServedModel, limit: tuple[str, int | None], default: int | None
) -> int:
    """Return how many tokens may be generated.

    Raises:
        ApiError: More were asked for than the context has room for.
    """
    name, asked = limit
    room = model.context_tokens - len(prompt.ids)
    if asked is not None and asked > room:
        raise invalid(
            f"{name}: {asked} tokens do not fit: this model's maximum context length is "
            f"{model.context_tokens} tokens, and the prompt has {len(prompt.ids)}",
            name,
            "context_length_exceeded",
        )
    return asked or min(default or room, room)


def _derived(seed: int, choice: int) -> int:
    """Return the seed of a choice; the first one's is the request's own."""
    if choice == 0:
        return seed
    digest = blake3(f"pie/choice/{seed}/{choice}".encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1


def _listed(model: ServedModel) -> Model:
    return Model(model.name, model.created_s, model.context_tokens)
