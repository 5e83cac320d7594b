"""`/v1/inferlets` and `/v1/inferlet-runs`: users' programs over HTTP.

Covers installing, listing, running, messages and cancelling. Does not cover where programs run
(`pie.router.program_runs`) or what bodies look like (`pie.router.api.inferlets`).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator

from starlette.routing import Route
from starlette.types import ASGIApp

from pie.router.api.inferlets import (
    Done,
    Inferlet,
    InferletList,
    InstallBody,
    MessageBody,
    RunBody,
    RunEvent,
    TurnBody,
    parse,
)
from pie.router.endpoint import Handler
from pie.router.errors import ApiError, invalid, model_not_found, shown, unavailable
from pie.router.exchange import Exchange
from pie.router.gate import Gate
from pie.router.memory import Turn
from pie.router.models import ModelCatalog, ServedModel
from pie.router.program_runs import CANCELLED, ProgramOrder, ProgramRun, ProgramRuns
from pie.router.program_store import ProgramStore, StoredProgram
from pie.router.prompt import Conversation
from pie.router.settings import RouterSettings
from pie.wire.program_runs import ProgramEvents

_MOST_SOURCE_BYTES = 1 << 20


class Inferlets:
    """Handlers of programs.

    Args:
        settings: Limits.
        catalog: The models that are served.
        runs: Runs programs.
        gate: Counts a running program as one sequence.
    """

    def __init__(
        self, settings: RouterSettings, *, catalog: ModelCatalog, runs: ProgramRuns, gate: Gate
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._runs = runs
        self._gate = gate
        self._store = ProgramStore(int(settings.installed_bytes))

    def routes(self, endpoint: Callable[[Handler], ASGIApp]) -> list[Route]:
        """Return the paths; `endpoint` makes an application of a handler."""
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        return [
            Route("/v1/inferlets", endpoint(self._install), methods=post),
            Route("/v1/inferlets", endpoint(self._list), methods=get),
            Route("/v1/inferlets/{id}", endpoint(self._remove), methods=delete),
            Route("/v1/inferlets/{id}/runs", endpoint(self._run), methods=post),
            Route("/v1/inferlet-runs/{run}/messages", endpoint(self._tell), methods=post),
            Route("/v1/inferlet-runs/{run}", endpoint(self._cancel), methods=delete),
        ]

    async def _install(self, exchange: Exchange) -> None:
        self._check_allowed()
        body = parse(InstallBody, await exchange.body())
        try:
            source = body.source.encode()
        except UnicodeEncodeError as error:
            raise invalid("source: is no text that can be written in UTF-8", "source") from error
        if len(source) > _MOST_SOURCE_BYTES:
            raise invalid(f"source: has more than {_MOST_SOURCE_BYTES} bytes", "source")
        tenant = exchange.caller.tenant
        program = self._store.install(body.name, source, int(time.time()), tenant)
        if program is None:
            raise invalid("source: is larger than router.installed_bytes", "source")
        await exchange.respond_json(200, _shape(program))

    async def _list(self, exchange: Exchange) -> None:
        self._check_allowed()
        kept = self._store.of(exchange.caller.tenant)
        await exchange.respond_json(200, InferletList([_shape(one) for one in kept]))

    async def _remove(self, exchange: Exchange) -> None:
        self._check_allowed()
        named = _in_path(exchange, "id")
        if not self._store.remove(named, exchange.caller.tenant):
            raise _not_installed(named)
        await exchange.respond_json(200, Done())

    async def _run(self, exchange: Exchange) -> None:
        self._check_allowed()
        self._gate.check()
        caller, named = exchange.caller, _in_path(exchange, "id")
        if caller.quota is not None and caller.quota.counts_tokens:
            raise ApiError(
                403,
                "Tokens of programs are not counted, so a tenant with a quota of tokens runs none.",
                "permission_error",
                code="insufficient_scope",
            )
        program = self._store.get(named, caller.tenant)
        if program is None:
            raise _not_installed(named)
        body = parse(RunBody, await exchange.body())
        model = self._model(body.model)
        salt = caller.salt(body.cache_salt)
        with self._gate.enter(1):
            async with caller.enter(1):
                order = ProgramOrder(
                    run=exchange.request_id,
                    program=program,
                    arguments=body.texts,
                    entry=body.entry,
                    model=model,
                    begins_with=await exchange.in_time(
                        self._beginning(body, model, salt, caller.tenant)
                    ),
                    session=body.session_id or None,
                    salt=salt,
                    tenant_salt=caller.tenant_salt(body.cache_salt),
                )
                run = await exchange.in_time(self._runs.begin(order))
                try:
                    await _tell_all(exchange, run)
                finally:
                    await self._runs.end(run)

    async def _tell(self, exchange: Exchange) -> None:
        self._check_allowed()
        body = parse(MessageBody, await exchange.body())
        await self._runs.tell(_in_path(exchange, "run"), exchange.caller.tenant, body.text)
        await exchange.respond_json(200, Done())

    async def _cancel(self, exchange: Exchange) -> None:
        self._check_allowed()
        self._runs.cancel(_in_path(exchange, "run"), exchange.caller.tenant)
        await exchange.respond_json(200, Done())

    def _check_allowed(self) -> None:
        """Refuse where no worker runs programs.

        Raises:
            ApiError: 403, or 503 where no worker is known yet.
        """
        if self._runs.allowed:
            return
        if not self._catalog.models:
            raise unavailable("No worker is ready.", self._settings.retry_after_s)
        raise ApiError(
            403,
            "Programs are off here: they run users' Python on the hosts of the workers, so whoever runs "
            "the cluster has to allow them ([programs] allow = true).",
            code="programs_off",
        )

    def _model(self, name: str | None) -> ServedModel:
        models = self._catalog.models
        if name is not None:
            model = self._catalog.get(name)
            if model is None:
                raise model_not_found(name)
            return model
        if len(models) > 1:
            raise invalid(
                f"model: is required, because several are served: "
                f"{', '.join(model.name for model in models)}",
                "model",
                "missing_required_parameter",
            )
        if not models:
            raise unavailable("No worker is ready.", self._settings.retry_after_s)
        return models[0]

    async def _beginning(
        self, body: RunBody, model: ServedModel, salt: str | None, tenant: str
    ) -> array[int]:
        """Return the tokens that a program is expected to begin with; a hint, so never an error."""
        begins, prompt = body.begins_with, body.arguments.get("prompt")
        if begins is None and isinstance(prompt, str):
            begins = [TurnBody(role="user", content=prompt)]
        if not begins:
            return array("I")
        try:
            if isinstance(begins, str):
                made = await model.prompts.text(
                    begins, context_tokens=model.context_tokens, tenant=tenant
                )
            else:
                made = await model.prompts.conversation(
                    _conversation(begins),
                    model=model.name,
                    salt=salt,
                    context_tokens=model.context_tokens,
                    tenant=tenant,
                )
        except ApiError:
            return array("I")
        return made.ids


async def _tell_all(exchange: Exchange, run: ProgramRun) -> None:
    """Stream what a program says; a client that hangs up ends it."""
    watch = asyncio.create_task(exchange.watch(lambda: run.stop(CANCELLED, "its client hung up")))
    try:
        await exchange.begin_stream({"x-pie-worker": run.place})
        await exchange.send_events([RunEvent("started", run=run.order.run, worker=run.place)])
        while True:
            said = await run.next()
            if said.end is not None:
                await exchange.end_stream(_shaped(said))
                return
            await exchange.send_events(_shaped(said))
    finally:
        watch.cancel()


def _shaped(said: ProgramEvents) -> Iterator[RunEvent]:
    for event in said.events:
        yield RunEvent("said" if event.kind == "said" else "printed", text=event.text)
    if said.end is not None:
        end = said.end
        yield RunEvent("ended", reason=end.reason, result=end.result, error=end.error)
    elif not said.events:
        yield RunEvent("running")


def _conversation(turns: list[TurnBody]) -> Conversation:
    return Conversation(
        messages=[{"role": turn.role, "content": turn.content} for turn in turns],
        turns=tuple(Turn(turn.role, turn.content) for turn in turns),
    )


def _shape(program: StoredProgram) -> Inferlet:
    return Inferlet(program.id, program.name, len(program.source), program.created_s)


def _in_path(exchange: Exchange, name: str) -> str:
    return str(exchange.scope["path_params"][name])


def _not_installed(named: str) -> ApiError:
    return ApiError(
        404,
        f"No program {shown(named)!r} is installed here: install it (`POST /v1/inferlets`) and run it "
        "again. A router forgets them when it is started again, or when there is no room.",
        param="id",
        code="not_installed",
    )
