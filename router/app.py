"""The HTTP application: which path does what.

Covers routes, the way from a body to orders, and errors in OpenAI's shape for everything. Does not
cover starting and stopping (`pie.router.service`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from pie.page.events import PlaceId
from pie.router import openapi
from pie.router.access import Access
from pie.router.admin import Admin
from pie.router.answer import Answerer
from pie.router.api.body import BodyLimits, GenerationBody, parse_body
from pie.router.api.chat import ChatBody
from pie.router.api.chat_answers import ChatShaper
from pie.router.api.completions import CompletionBody, CompletionShaper, Echo
from pie.router.api.listing import Model, ModelList
from pie.router.api.responses_answers import ResponsesShaper
from pie.router.api.usage import Shaper
from pie.router.census import Census, CensusTaker
from pie.router.completing import echoes_of, plain
from pie.router.conversing import Calling, conversation
from pie.router.endpoint import Endpoint, Handler
from pie.router.errors import ApiError, invalid, model_not_found, shown, unavailable
from pie.router.exchange import BodyBudget, Exchange, new_request_id
from pie.router.gate import Gate
from pie.router.generation import Order, derived_seed
from pie.router.inferlets import Inferlets
from pie.router.likeliest import Likeliest
from pie.router.metrics import RouterMetrics
from pie.router.models import ModelCatalog, ServedModel
from pie.router.pages import Pages
from pie.router.policy_desk import PolicyDesk
from pie.router.prefix import Prefix
from pie.router.prompt import Prompt
from pie.router.responding import Responding, ResponseStore, as_response, begins_session
from pie.router.settings import RouterSettings
from pie.router.status import ClusterStatus
from pie.router.tokenizing import Tokenizing
from pie.router.turns import Turns
from pie.router.workers import WorkerSet
from pie.wire.messages import Grammar

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
        whole: Callable[[ClusterStatus], Awaitable[ClusterStatus]],
        admin: Admin,
        policy_desk: PolicyDesk,
        access: Access,
        responses: ResponseStore,
        inferlets: Inferlets,
        turns: Turns,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._workers = workers
        self._answerer = answerer
        self._gate = gate
        self._metrics = metrics
        self._census = census
        self._status = status
        self._whole = whole
        self._admin = admin
        self._policy_desk = policy_desk
        self._access = access
        self._pages = Pages(settings)
        self._inferlets = inferlets
        self._bodies = BodyBudget(int(settings.body_budget_bytes), settings.retry_after_s, turns)
        self._document: dict[str, object] | None = None
        self._limits = BodyLimits(
            max_choices=settings.max_choices,
            max_prompts=settings.max_prompts,
            max_stop_strings=settings.max_stop_strings,
            max_logprobs=settings.max_logprobs,
        )
        self._responding = Responding(responses, self._limits)
        self._tokenizing = Tokenizing(catalog, self._limits, gate)

    def asgi(self) -> Starlette:
        """Return the ASGI application."""
        get, post = ["GET"], ["POST"]
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint(self._chat), methods=post),
                Route("/v1/completions", self._endpoint(self._complete), methods=post),
                Route("/v1/responses", self._endpoint(self._respond), methods=post),
                Route(
                    "/v1/responses/{response_id}",
                    self._endpoint(self._responding.show),
                    methods=get,
                ),
                Route(
                    "/v1/responses/{response_id}",
                    self._endpoint(self._responding.delete),
                    methods=["DELETE"],
                ),
                Route("/v1/embeddings", self._endpoint(self._tokenizing.embeddings), methods=post),
                Route("/tokenize", self._endpoint(self._tokenizing.tokenize), methods=post),
                Route("/detokenize", self._endpoint(self._tokenizing.detokenize), methods=post),
                Route("/v1/models", self._endpoint(self._list_models), methods=get),
                Route("/v1/models/{model:path}", self._endpoint(self._model), methods=get),
                Route("/health", self._endpoint(self._health, public=True), methods=get),
                Route("/ready", self._endpoint(self._ready, public=True), methods=get),
                Route("/status", self._endpoint(self._show_status, admin=True), methods=get),
                Route("/metrics", self._endpoint(self._show_metrics, admin=True), methods=get),
                Route(
                    "/admin/requests",
                    self._endpoint(self._admin.requests, admin=True),
                    methods=get,
                ),
                Route(
                    "/admin/requests/{request_id:path}",
                    self._endpoint(self._admin.request, admin=True),
                    methods=get,
                ),
                Route(
                    "/admin/workers/{worker}/drain",
                    self._endpoint(self._admin.drain, admin=True),
                    methods=post,
                ),
                Route(
                    "/admin/workers/{worker}/drain",
                    self._endpoint(self._admin.take_again, admin=True),
                    methods=["DELETE"],
                ),
                *self._inferlets.routes(self._endpoint),
                *self._policy_desk.routes(partial(self._endpoint, admin=True)),
                Route("/openapi.json", self._endpoint(self._openapi, public=True), methods=get),
            ],
            exception_handlers={HTTPException: self._no_such_thing},
        )
        app.router.redirect_slashes = False
        self._pages.let_read(app)
        return app

    def _endpoint(self, handler: Handler, *, public: bool = False, admin: bool = False) -> Endpoint:
        """Return a handler for anybody, for those who may ask, or for those who run the router."""
        access = None if public else self._access
        return Endpoint(
            handler,
            self._settings,
            self._metrics,
            self._bodies,
            pages=self._pages,
            access=access,
            admin=admin,
        )

    def _no_such_thing(self, request: Request, error: Exception) -> Response:
        """Answer for an unknown path or a wrong method."""
        assert isinstance(error, HTTPException)
        asked = f"{shown(request.method)} {shown(request.url.path)}"
        if error.status_code == 405:
            methods = _methods(request)
            told = ApiError(
                405,
                f"{asked} is not allowed; this path takes {' or '.join(methods)}.",
                code="method_not_allowed",
                headers={"allow": ", ".join(methods)},
            )
        else:
            told = ApiError(
                error.status_code,
                f"{asked} is nothing that this server does; `/openapi.json` lists what it does.",
                code="not_found",
                headers=error.headers,
            )
        self._metrics.requests.labels("other", str(error.status_code)).inc()
        named = {"x-pie-request-id": new_request_id()}
        return JSONResponse(told.body(), told.status, named | told.headers)

    async def _chat(self, exchange: Exchange) -> None:
        arrived_s = time.monotonic()
        self._gate.check()
        body = await exchange.parsed(partial(parse_body, ChatBody, limits=self._limits))
        await self._converse(exchange, body, ChatShaper, arrived_s, usage_events=body.include_usage)

    async def _respond(self, exchange: Exchange) -> None:
        arrived_s = time.monotonic()
        self._gate.check()
        body = await exchange.parsed(self._responding.body)
        chat, keep = await self._responding.chat(body, exchange)
        try:
            shaper = partial(ResponsesShaper, body=body, keep=keep)
            await self._converse(exchange, chat, shaper, arrived_s, usage_events=True)
        except ApiError as error:
            raise as_response(error) from error

    async def _converse(
        self,
        exchange: Exchange,
        body: ChatBody,
        shaper: Callable[..., Shaper],
        arrived_s: float,
        *,
        usage_events: bool,
    ) -> None:
        """Answer a conversation."""
        model = self._catalog.served(body.model)
        with self._gate.enter(body.sequences):
            async with exchange.caller.enter(body.sequences):
                calling = Calling(body, model.prompts)
                grammar = calling.grammar(body.grammar())
                making = model.prompts.conversation(
                    conversation(body),
                    model=model.name,
                    salt=exchange.caller.salt(body.cache_salt),
                    context_tokens=model.context_tokens,
                    keep=body.kept_tokens(model.context_tokens),
                    tenant=exchange.caller.tenant,
                )
                prompt = await exchange.in_time(making)
                await self._generate(
                    exchange,
                    body,
                    model,
                    [prompt],
                    arrived_s,
                    partial(
                        shaper,
                        reader=calling.reader(prompt),
                        id_chars=calling.format.id_chars if calling.format else _ID_CHARS,
                    ),
                    param="messages",
                    grammar=grammar,
                    shows_special=body.shows_special or calling.shows_special,
                    limit=body.token_limit,
                    logprobs=body.logprobs_wanted,
                    default_tokens=None,
                    usage_events=usage_events,
                    prompt_logprobs=body.prompt_logprobs,
                )

    async def _complete(self, exchange: Exchange) -> None:
        arrived_s = time.monotonic()
        self._gate.check()
        body = await exchange.parsed(partial(parse_body, CompletionBody, limits=self._limits))
        model = self._catalog.served(body.model)
        sequences = body.sequences * len(body.prompts)
        with self._gate.enter(sequences):
            async with exchange.caller.enter(sequences):
                keep = body.kept_tokens(model.context_tokens)
                tenant = exchange.caller.tenant
                prompts = await exchange.in_time(plain(model, body.prompts, keep, tenant))
                echoes: list[Echo] = []
                if body.echo:
                    making = echoes_of(model, body.prompts, prompts, keep, tenant)
                    echoes = await exchange.in_time(making)
                told = body.told
                shaper = partial(CompletionShaper, choices=body.choices, echoes=echoes, told=told)
                await self._generate(
                    exchange,
                    body,
                    model,
                    prompts,
                    arrived_s,
                    shaper,
                    param="prompt",
                    grammar=body.grammar(),
                    shows_special=body.shows_special,
                    limit=body.token_limit,
                    logprobs=body.logprobs,
                    default_tokens=self._settings.default_completion_tokens,
                    usage_events=body.include_usage,
                    prompt_logprobs=told.of_prompt,
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
        usage_events: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Make orders and answer them."""
        request_id, caller = exchange.request_id, exchange.caller
        words = model.prompts.bad_words(body.bad_words or (), tenant=caller.tenant)
        sampling = body.sampling(
            logprobs=logprobs,
            vocab_size=model.vocab_size,
            bad_words=await exchange.in_time(words) if body.bad_words else await words,
        )
        choices = body.sequences
        likeliest = None
        if body.choices < choices:
            likeliest = Likeliest(body.choices, shows_logprobs=logprobs is not None)
            sampling = msgspec.structs.replace(sampling, logprobs=logprobs or 0)
        # Without a seed of its own, a stream that is resumed could not go on with the same draws.
        seed = secrets.randbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        seeds = [derived_seed(seed, choice) for choice in range(choices)]
        samplings = [msgspec.structs.replace(sampling, seed=seed) for seed in seeds]
        place = self._place(exchange.header(_PLACE_HEADER))
        grammar_param, wanted = grammar or (None, None)
        salt = caller.salt(body.cache_salt)
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
                tenant_salt=caller.tenant_salt(body.cache_salt),
                session=caller.session(body.session),
                begins_session=begins_session(body, request_id),
                priority=caller.priority_of(body.priority),
                # The choices of a prompt share what is told of it.
                prompt_logprobs=prompt_logprobs if choice == 0 else None,
                only_place=place,
                arrived_s=arrived_s,
            )
            for prompt in prompts
            for prefix in (Prefix(prompt.ids, salt),)
            for choice, seeded in enumerate(samplings)
        ]
        if caller.quota is not None:
            await exchange.in_time(caller.prompt(sum(len(prompt.ids) for prompt in prompts)))
        await self._answerer.answer(
            exchange,
            orders,
            shaper(request_id, int(time.time()), model.name, usage_events=usage_events),
            choices=choices,
            likeliest=likeliest,
            stream=bool(body.stream),
            usage_events=usage_events,
        )

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
        status = self._status(await self._census.take())
        told = await self._policy_desk.file_differs(status.policy_version)
        status = msgspec.structs.replace(status, policy_file_differs=told)
        await exchange.respond_json(200, await self._whole(status))

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


def _methods(request: Request) -> list[str]:
    """Return what the path of a request takes: several routes may share one path."""
    routes = [one for one in request.app.routes if isinstance(one, Route)]
    found = [one.methods or () for one in routes if one.matches(request.scope)[0] != Match.NONE]
    return sorted({method for methods in found for method in methods})


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


def _listed(model: ServedModel) -> Model:
    return Model(model.name, model.created_s, model.context_tokens)
