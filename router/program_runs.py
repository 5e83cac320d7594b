"""Programs that run at workers for this router's clients.

Covers which worker runs one, starting it there, what it says, what it is told, and its end. Does not cover
HTTP (`pie.router.inferlets`) or one connection (`pie.router.link`).

A program goes where most of what it begins with is held, as a request would. One that has begun is never
begun anew at another worker: what it has done up to then may have had effects.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from pie.page.events import PlaceId
from pie.router.choice import Chooser
from pie.router.errors import ApiError, invalid, overloaded, too_large, unavailable
from pie.router.link import WorkerLink
from pie.router.models import ServedModel
from pie.router.prefix import Prefix
from pie.router.program_store import StoredProgram
from pie.router.settings import RouterSettings
from pie.router.tenant import session_tag, tenant_tag
from pie.router.workers import WorkerSet
from pie.wire import WireError, WireTimeout
from pie.wire.errors import MessageTooLarge, RefusedError
from pie.wire.ids import new_request_id
from pie.wire.messages import RefusalCode
from pie.wire.program_runs import ProgramEnd, ProgramEvents, StartProgram, TellProgram

log = logging.getLogger("pie.router.program_runs")

_TELL_S = 10.0
WORKER_LOST = "worker_lost"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """A program to run, and how."""

    run: str
    """Names the run; nobody but its client knows it."""
    program: StoredProgram
    arguments: Mapping[str, str]
    entry: str
    model: ServedModel
    begins_with: array[int]
    """Tokens that its first working set is expected to begin with; empty where nothing is known."""
    session: str | None
    """The conversation that its pages are of, as its client names it."""
    salt: str | None
    tenant_salt: str | None
    """Whose pages they are to rules: `pie.router.access.Caller.tenant_salt`."""


class ProgramRun:
    """A program that runs at a worker."""

    def __init__(
        self, order: ProgramOrder, link: WorkerLink, events: AsyncGenerator[ProgramEvents, None]
    ) -> None:
        self.order = order
        self.link = link
        self._events = events
        self._stopped: asyncio.Future[ProgramEnd] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> PlaceId:
        """Where it runs."""
        return self.link.record.place

    async def next(self) -> ProgramEvents:
        """Wait for what it says next; one without events says that it still runs."""
        name = self.order.run
        waiting = asyncio.create_task(self._take())
        try:
            await asyncio.wait((waiting, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return ProgramEvents(name, end=self._stopped.result())
            return waiting.result()
        except (WireError, StopAsyncIteration):
            error = f"worker {self.place}, where it ran, is gone"
            return ProgramEvents(name, end=ProgramEnd(WORKER_LOST, error=error))
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def stop(self, reason: str, error: str) -> None:
        """End it."""
        if not self._stopped.done():
            self._stopped.set_result(ProgramEnd(reason, error=error))

    async def close(self) -> None:
        """Let go of it; where it has not ended, its worker ends it."""
        self._stopped.cancel()
        await self._events.aclose()

    async def _take(self) -> ProgramEvents:
        return await anext(self._events)


class ProgramRuns:
    """Runs programs at workers.

    Args:
        workers: Who could.
        chooser: Chooses among them.
        settings: Limits.
        secret: 32 bytes that all of the cluster share; keys the tags of tenants.
    """

    def __init__(
        self,
        workers: WorkerSet,
        chooser: Chooser,
        settings: RouterSettings,
        *,
        secret: bytes | None = None,
    ) -> None:
        self._workers = workers
        self._chooser = chooser
        self._settings = settings
        self._secret = secret
        self._runs: dict[str, ProgramRun] = {}

    @property
    def allowed(self) -> bool:
        """Whether any worker that is known runs programs."""
        return any(link.record.takes_programs for link in self._workers.links.values())

    async def begin(self, order: ProgramOrder) -> ProgramRun:
        """Start a program at the best worker that takes it.

        Raises:
            ApiError: None does.
        """
        tried: set[WorkerLink] = set()
        refused: RefusedError | None = None
        while len(tried) < self._settings.attempts:
            links = [
                link
                for link in self._workers.usable(order.model.name, order.model.digest)
                if link.record.takes_programs and link not in tried
            ]
            if not links:
                break
            # A prompt without a full page goes by load alone.
            prefix = Prefix(order.begins_with or array("I", (0,)), order.salt)
            link = self._chooser.choose(order.run, prefix, links, session=order.session).link
            tried.add(link)
            try:
                return await self._begun(order, link)
            except RefusedError as error:
                if error.code is RefusalCode.BAD_MESSAGE:
                    raise invalid(error.message, None) from error
                refused = error
            except MessageTooLarge as error:
                raise too_large(f"No worker takes a run of this size: {error}") from error
            except WireError as error:
                log.info("worker %s did not start %s: %s", link.record.place, order.run, error)
        retry_after_s = self._settings.retry_after_s
        if refused is not None and refused.code is RefusalCode.OVERLOADED:
            raise overloaded(f"All workers are busy: {refused.message}", retry_after_s)
        name = order.model.name
        if not self._workers.usable(name, order.model.digest):
            raise unavailable(self._workers.none_takes(name), retry_after_s)
        raise unavailable(f"No worker for {name} takes programs now.", retry_after_s)

    async def tell(self, run: str, tenant: str, text: str | None) -> None:
        """Hand a tenant's program a message of its client; None says that no more come.

        Raises:
            ApiError: There is no such run, or it cannot be told now.
        """
        running = self._known(run, tenant)
        link = running.link
        message = TellProgram(new_request_id(), link.record.epoch, running.order.run, text)
        try:
            await link.tell_program(message, timeout_s=_TELL_S)
        except RefusedError as error:
            if error.code is RefusalCode.OVERLOADED:
                raise overloaded(error.message, self._settings.retry_after_s) from error
            raise _no_such_run() from error
        except MessageTooLarge as error:
            raise too_large(f"No program takes a message of this size: {error}") from error
        except WireError as error:
            told = f"Worker {running.place} does not answer."
            raise unavailable(told, self._settings.retry_after_s) from error

    def cancel(self, run: str, tenant: str) -> None:
        """End a tenant's program.

        Raises:
            ApiError: There is no such run.
        """
        self._known(run, tenant).stop(CANCELLED, "it was cancelled")

    def stop(self) -> None:
        """End all programs: the router stops."""
        for run in self._runs.values():
            run.stop(CANCELLED, "the router is stopping")

    async def end(self, run: ProgramRun) -> None:
        """Forget a run; where it has not ended, its worker ends it."""
        self._runs.pop(run.order.run, None)
        await run.close()

    async def _begun(self, order: ProgramOrder, link: WorkerLink) -> ProgramRun:
        root = link.record.model_root
        assert root is not None
        message = StartProgram(
            request_id=order.run,
            epoch=link.record.epoch,
            name=order.program.name,
            arguments=dict(order.arguments),
            entry=order.entry,
            salt=order.salt,
            tenant_tag=tenant_tag(root, order.tenant_salt, self._secret),
            session_tag=session_tag(root, order.salt, order.session, self._secret),
        )
        events = link.run_program(message, order.program.source)
        try:
            await anext(events)
        except StopAsyncIteration as error:
            raise WireTimeout("the worker went") from error
        except BaseException:
            await events.aclose()
            raise
        run = self._runs[order.run] = ProgramRun(order, link, events)
        return run

    def _known(self, run: str, tenant: str) -> ProgramRun:
        found = self._runs.get(run)
        if found is None or found.order.program.tenant != tenant:
            raise _no_such_run()
        return found


def _no_such_run() -> ApiError:
    return ApiError(404, "There is no such run, or it has ended.", param="run", code="not_found")
