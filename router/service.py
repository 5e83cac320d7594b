"""The router as one object with a life: start, drain, close.

Covers what a process that runs a router holds, and the HTTP server in it. Does not cover the
application (`pie.router.app`) or the life of one request (`pie.router.dispatch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn

from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PolicyVersion
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.page.events import PlaceKind
from pie.policies.policy_set import PolicySet, WorkerMoves
from pie.policies.versions import PolicyVersions
from pie.router.access import Access
from pie.router.admin import Admin
from pie.router.allowances import QuotaKeeper
from pie.router.answer import Answerer
from pie.router.app import RouterApp
from pie.router.census import Census, CensusTaker
from pie.router.choice import Chooser
from pie.router.conductor import Conductor
from pie.router.connection import Connection, Door
from pie.router.dispatch import Dispatcher
from pie.router.errors import unavailable
from pie.router.exchange import Exchange
from pie.router.explain import Explainer
from pie.router.gate import Gate
from pie.router.generation import Generation
from pie.router.inferlets import Inferlets
from pie.router.listener import BACKLOG, listener
from pie.router.memory import AnswerMemory
from pie.router.metrics import RouterMetrics
from pie.router.models import ModelCatalog
from pie.router.named_prefixes import NamedPrefixes
from pie.router.nodes import NodeSet
from pie.router.open_files import allow_connections
from pie.router.ordering import Ordering
from pie.router.overview import Overview
from pie.router.policy_desk import PolicyDesk
from pie.router.program_runs import ProgramRuns
from pie.router.settings import RouterSettings
from pie.router.sharing import Sharing
from pie.router.status import ClusterStatus
from pie.router.survey import Survey
from pie.router.tenant import tenant_tag
from pie.router.tls import server_context
from pie.router.trace import TraceRecorder
from pie.router.turns import Turns
from pie.router.workers import WorkerSet
from pie.tokens.pieces import PieceMemory
from pie.wire import WireSettings

log = logging.getLogger("pie.router.service")

_LOOK_S = 0.1
"""How often workers are held against the mirror, which costs no round trip."""
_KEEP_ALIVE_S = 75
"""Longer than the 5 s after which OpenAI's client lets an idle connection go, and than the 60 s of
common proxies: the side that sends requests closes first, so that none is sent into a closing one."""
_CLOSE_S = 3.0
"""Longest wait for each of the things that are let go of at the end."""
_THREADS = 2
_LOOKS = 100
_MEET_S = 2.0
"""Longest wait at the start for workers that are up, while clients wait to be let in."""


class RouterService:
    """The OpenAI-compatible front door of a cluster.

    It learns models, tokenizers and workers from the index alone, so that it may be started
    before any of them and be killed and started again at any time.

    Args:
        settings: Limits and address.
        index_url: Redis that holds the index, such as `redis://127.0.0.1:6380/0` or
            `unix:///run/pie/redis.sock`.
        index: The index's settings (key prefix, timings); its own `url` is not read.
        policies: Which policy chooses workers, until others are applied; the built-ins where None.
        wire: Limits of connections to workers.
        secret: 32 bytes that all of the cluster share; keys the tags of tenants, and connections
            beyond this host.
        routers: How many of this user listen on the same port.
        title: What an operator calls it.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        index_url: str,
        index: IndexSettings | None = None,
        policies: PolicySet | None = None,
        wire: WireSettings | None = None,
        secret: bytes | None = None,
        routers: int = 1,
        title: str = "router",
    ) -> None:
        self._shares_port = routers > 1
        self._title = title
        self.settings = settings
        self._secret = secret
        self.metrics = RouterMetrics()
        self._mirror = Mirror()
        self._feed = MirrorFeed(index_url, self._mirror, settings=index)
        self._memory = AnswerMemory(int(settings.remembered_bytes))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pie-router")
        self._turns = Turns(
            self._threads,
            at_once=_THREADS,
            # No sequence in flight has more than one piece of work; bodies that are parsed here too wait
            # within their own limit of bytes.
            most_waiting=settings.max_in_flight,
            retry_after_s=settings.retry_after_s,
        )
        self._workers = WorkerSet(settings.max_workers_connected, wire, secret=secret)
        self._catalog = ModelCatalog(
            memory=self._memory,
            pieces=PieceMemory(int(settings.tokenised_bytes)),
            thread_bytes=int(settings.thread_bytes),
            threads=self._threads,
            turns=self._turns,
            on_change=self._look,
            retry_after_s=settings.retry_after_s,
        )
        self._gate = Gate(settings.max_in_flight, settings.retry_after_s, self.metrics)
        self._policies = PolicyVersions(policies or PolicySet())
        chooser = self._chooser = Chooser(
            self._mirror,
            self._policies.current.new_routing_aside(),
            self.metrics,
            policy_name=self._policies.current.routing.name,
        )
        self._take_moves(self._policies.current.worker_moves())
        self._follower: PolicyFollower | None = None
        self._conductor: Conductor | None = None
        self._index_url, self._index = index_url, index
        dispatcher = Dispatcher(
            self._workers,
            chooser,
            settings,
            self.metrics,
            secret=secret,
        )
        self._runs = ProgramRuns(self._workers, chooser, settings, secret=secret)
        self._census = CensusTaker(self._mirror, self._workers, wire, secret=secret)
        sharing = self._sharing = Sharing(
            settings,
            index_url=index_url,
            index=index,
            secret=secret,
            routers=routers,
            on_untold=self.metrics.untold.inc,
        )
        self._explainer = Explainer(sharing.explained, self._mirror, secret=secret)
        self._trace = self._trace_recorder()
        self._answerer = Answerer(dispatcher, self.metrics, self._over)
        self._survey = Survey(
            mirror=self._mirror,
            workers=self._workers,
            catalog=self._catalog,
            gate=self._gate,
            memory=self._memory,
            metrics=self.metrics,
            failures=self._chooser.failures,
            commons=sharing.commons,
        )
        access = self._access = Access(settings, sharing.allowances)
        self.quotas = QuotaKeeper(
            sharing.commons, sharing.allowances, lambda: access.quotas, sharing.trim
        )
        self._named = NamedPrefixes(self._mirror.places, lambda: self._catalog.models)
        app = RouterApp(
            settings,
            catalog=self._catalog,
            workers=self._workers,
            answerer=self._answerer,
            gate=self._gate,
            metrics=self.metrics,
            census=self._census,
            status=self.status,
            whole=sharing.sums.whole,
            admin=Admin(sharing.explained, self._workers),
            policy_desk=PolicyDesk(
                self._policies, self._tenant_tags, self._named.short, index_url, index
            ),
            access=access,
            responses=sharing.responses,
            inferlets=Inferlets(settings, catalog=self._catalog, runs=self._runs, gate=self._gate),
            turns=self._turns,
        )
        self._server = _Server(
            server_context(settings),
            settings.head_timeout_s,
            uvicorn.Config(
                app.asgi(),
                http=cast(
                    type[asyncio.Protocol],
                    functools.partial(Connection, door=Door(settings, self.metrics)),
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Who a proxy speaks for decides nothing here.
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                # What is left when draining is over has been cancelled.
                timeout_graceful_shutdown=1,
            ),
        )
        self._url = ""
        self._name = title
        self._looking: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """Base URL, such as `http://127.0.0.1:8000`; known after `start`."""
        return self._url

    @property
    def name(self) -> str:
        """What this start of this router is called among all that share an index; known after `start`."""
        return self._name

    @property
    def leads(self) -> bool:
        """Whether cluster policies are asked here, as far as this router knows."""
        return self._conductor is not None and self._conductor.leads

    async def start(self) -> str:
        """Listen and read the index; return `url`.

        It begins to answer when it can reach the workers that are up, or two seconds later: 503 as long as there is
        none; `/ready` says when.

        Raises:
            PortBusyError: The address is taken.
            AddressUnusableError: It is not this machine's, or not allowed.
        """
        allow_connections(self.settings.max_connections)
        opened = listener(self.settings, shares_port=self._shares_port)
        host, port = opened.getsockname()[:2]
        self._url = self.settings.url(host, port)
        await self._feed.start()
        if not await self._feed.ready(self.settings.index_ready_timeout_s):
            log.warning("the index could not be read yet; serving without it until it can")
        self._name = self._survey.router = _own_name(self._title, self._url)
        chooser = self._chooser
        overview = Overview(
            self._mirror, lambda: self._workers.links, chooser.demand, chooser.conversations
        )
        self._conductor = Conductor(
            self._index_url,
            self._name,
            overview,
            Ordering(
                lambda: self._workers.links,
                self._mirror.places,
                NodeSet(secret=self._secret),
                overview,
            ),
            self._policies.current,
            resolve=self._named.resolve,
            failures=self._chooser.failures,
            on_event=lambda policy, action: self.metrics.cluster_events.labels(
                policy, action
            ).inc(),
            settings=self._index,
            bytes_per_s=self.settings.order_rate,
        )
        self._follower = PolicyFollower(
            self._index_url,
            self._name,
            self._take_policies,
            settings=self._index,
        )
        await self._follower.start()
        self._conductor.start()
        self.quotas.start()
        self._sharing.sums.start(lambda: self._survey.tally(self._follower))
        self._look()
        self._looking = asyncio.create_task(self._keep_looking())
        await self._meet_workers()
        self._serving = asyncio.create_task(self._server.serve([opened]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.005)
        return self._url

    async def _meet_workers(self) -> None:
        """Wait a little until the workers that the index names can be asked.

        Who is dealt a router that was started again has waited then, and is not refused.
        """
        for _ in range(_LOOKS):
            if not self._workers.links or self.status().ready:
                return
            await asyncio.sleep(_MEET_S / _LOOKS)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests with 503, wait for running ones; True where all ended in time."""
        self._gate.drain()
        return await self._gate.empty(timeout_s)

    async def close(self) -> None:
        """Stop listening, cancel what runs, close every connection. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._gate.drain()
        if self._looking is not None:
            await end([self._looking])
        self._answerer.stop(
            unavailable("The router is stopping.", self.settings.retry_after_s, "draining")
        )
        self._runs.stop()
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        for name, closing in (
            ("pool nodes", self._census.close()),
            ("workers", self._workers.close()),
            ("tokenizers", self._catalog.close()),
            ("the index", self._feed.close()),
            ("quotas", self.quotas.close()),
            ("what routers share", self._sharing.close()),
            *([("policies", self._follower.close())] if self._follower is not None else []),
            *([("orders", self._conductor.close())] if self._conductor is not None else []),
        ):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await closing
            except TimeoutError:
                log.warning("letting go of %s took more than %g s", name, _CLOSE_S)
        self._turns.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    def status(self, census: Census | None = None) -> ClusterStatus:
        """Return what this router knows and places said, and bring its gauges up to date."""
        wanted = {} if self._conductor is None else self._conductor.wanted
        return self._survey.status(census, wanted, self._follower)

    def _tenant_tags(self) -> set[str] | None:
        """Return the tags of tenants' pages; None where no tenant is known, or no model yet."""
        salts, places = self._access.salts(), self._mirror.places().values()
        roots = {one.model_root for one in places if one.model_root is not None}
        if salts is None or not roots:
            return None
        return {tenant_tag(root, salt, self._secret) for root in roots for salt in salts}

    async def _take_policies(self, number: int, version: PolicyVersion) -> str:
        """Take a version of the policies on; return why it cannot be, or nothing."""
        policies = await self._policies.look_at(number, version.text)
        if isinstance(policies, str):
            return policies
        # All of them are made, which may be a user's code, before the first is changed.
        routing = await asyncio.to_thread(policies.new_routing_aside)
        cluster = await asyncio.to_thread(policies.new_cluster)
        moves = await asyncio.to_thread(policies.worker_moves)
        if policies.routing != self._policies.current.routing:
            self._chooser.replace_policy(routing, policies.routing.name)
        if self._conductor is not None:
            self._conductor.show_prefixes(policies.prefixes)
            if not policies.same_cluster(self._policies.current):
                self._conductor.replace_policies(cluster)
        self._policies.current = policies
        self._take_moves(moves)
        return ""

    def _take_moves(self, moves: WorkerMoves) -> None:
        # What is not stored as it is made does not come to the pool while somebody waits for it.
        self._chooser.awaits = moves.stores_as_made

    async def _keep_looking(self) -> None:
        """Hold workers and models against the mirror."""
        while not self._closed:
            await asyncio.sleep(_LOOK_S)
            self._look()
            if self._trace is not None:
                self._trace.tick()

    def _trace_recorder(self) -> TraceRecorder | None:
        """Return what records traces; None where they are off."""
        if not self.settings.trace_dir:
            return None
        return TraceRecorder(
            Path(self.settings.trace_dir),
            budget_bytes=int(self.settings.trace_budget_bytes),
            secret=self._secret,
            on_dropped=self.metrics.trace_dropped.inc,
        )

    def _over(self, exchange: Exchange, generations: Sequence[Generation], status: int) -> None:
        """Keep what became of a request that is over, and count its answer's tokens."""
        exchange.caller.answered(sum(len(one.output_ids) for one in generations))
        if self.settings.explained_requests:
            path = str(exchange.scope["path"])
            self._explainer.record(exchange.request_id, path, generations, status)
        if self._trace is not None:
            self._trace.record(exchange.request_id, generations)

    def _look(self) -> None:
        """Hold workers and models against the mirror once."""
        if self._closed:
            return
        try:
            self._sync()
        except Exception:
            log.exception("workers could not be brought up to date")

    def _sync(self) -> None:
        records = [
            record
            for record in self._mirror.places().values()
            if record.kind is PlaceKind.WORKER and record.model_root is not None
        ]
        self._workers.sync(records)
        self._catalog.update(records)


def _own_name(title: str, url: str) -> str:
    """Return a name that no other router has, nor this one after its next start.

    Several may have one address: on one port, or in pods of a host each. Of two with one name both would hold the
    lease of cluster policies.
    """
    process = f"{socket.gethostname()}, {os.getpid()}-{secrets.token_hex(4)}"
    return f"{title} at {urlsplit(url).netloc} ({process})"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a limit on TLS handshakes.

    Whoever runs the process handles signals.

    Args:
        tls: What it listens with; None for plain HTTP.
        handshake_s: Longest time of a handshake, where uvicorn would give 60 s.
        config: uvicorn's own.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, handshake_s: float, config: uvicorn.Config
    ) -> None:
        super().__init__(config)
        self._tls: dict[str, Any] = (
            {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": handshake_s}
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets that are bound."""

        def protocol() -> asyncio.Protocol:
            make = cast(Any, self.config.http_protocol_class)
            made: asyncio.Protocol = make(
                config=self.config, server_state=self.server_state, app_state={}
            )
            return made

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(protocol, sock=one, backlog=BACKLOG, **self._tls)
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
