"""A cluster's life: start every part, watch it, stop it in good order.

Covers the run's temporary folder, the guard, the index server, Ray and the actors. Does not cover
what a person sees (`pie.cluster.cli`) or what a part does (its own package).

Order of the start: guard, index, Ray, then router, pool and workers side by side. The stop goes
the other way: the router refuses new requests and lets running ones end, then workers, pool,
Ray, index; the guard ends whatever is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from pie.cluster import preflight, ray_environment
from pie.cluster.actors import PoolActor, RouterActor, WorkerActor
from pie.cluster.claim import Claim
from pie.cluster.config import PieConfig
from pie.cluster.encryption import encryption_keys
from pie.cluster.errors import ConfigError, StartError
from pie.cluster.guard import MARK_VARIABLE, Guard, kill_marked
from pie.cluster.host import Phase, State
from pie.cluster.policy_command import checked, read, warnings
from pie.cluster.policy_watch import ServedPolicies
from pie.cluster.secret import kept_secret, new_secret, secret_file, shared_secret
from pie.cluster.stopping import stopping, uninterrupted
from pie.index.errors import ServerError
from pie.index.server import EmbeddedServer
from pie.page.events import PlaceId
from pie.router.tls import trusted

if TYPE_CHECKING:
    from pie.cluster.ray_runtime import Actor, RayRuntime

log = logging.getLogger("pie.cluster.launch")

_POLL_S = 0.2
_STATE_TIMEOUT_S = 5.0
_SILENT_S = 15.0
"""A part that was ready and answers nothing for so long hangs."""
_FOLDER_CHARS = 34
"""A socket's path may have 107 characters, of which Ray takes 72 below its folder."""
_ASKED = 4
"""Times that each of several routers is asked whether it is ready, on average."""
_CRASHES = 5
"""Unexpected failures of one part, one after another, after which the cluster gives up."""

Report = Callable[[str, str], None]
"""Told the part and what it does now."""


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where a running cluster answers."""

    router: str
    index: str
    workers: dict[str, str]
    pool: dict[str, str]
    logs: Path


class Part:
    """One actor: how it is made, and its handle."""

    def __init__(self, name: str, make: Callable[[], Actor]) -> None:
        self.name = name
        self._make = make
        self.handle = make()
        self.state = State(Phase.STARTING)
        self.failures = 0
        self.pid: int | None = None
        """Its process, once it was ready; on its own host."""
        self._silent_s: float | None = None
        """Since when it does not answer; None while it does."""

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer when it was asked last."""
        return self._silent_s is not None

    def heard(self, answer: State | None, now_s: float) -> State:
        """Return how far it is, from its answer, or None where it gave none in time.

        One that was ready and has been silent for `_SILENT_S` has failed: connections and requests go to it all
        the same, and hang.
        """
        if answer is not None:
            self._silent_s = None
            return answer
        if self._silent_s is None:
            self._silent_s = now_s
        silent_s = now_s - self._silent_s
        if self.state.phase is not Phase.READY or silent_s < _SILENT_S:
            return self.state
        return State(Phase.FAILED, f"it has not answered for {silent_s:.0f} s", expected=False)

    def remake(self) -> None:
        """Replace the actor by a new one."""
        self.state = State(Phase.STARTING)
        self._silent_s = self.pid = None
        self.handle = self._make()


class Cluster:
    """Everything that `pie serve` starts.

    Use as a context manager: leaving it stops what was started, however far it came.

    Args:
        config: The effective configuration.
        report: Told how far each part is.
    """

    def __init__(self, config: PieConfig, report: Report = lambda _part, _what: None) -> None:
        # Ray starts processes where it likes; a path in `pie.toml` is meant from here.
        self._config = preflight.absolute(config)
        self._report = report
        self._folder = _make_folder()
        self._mark = uuid.uuid4().hex
        self._guard = Guard(self._mark, self._folder)
        os.environ[MARK_VARIABLE] = self._mark
        # Whatever a library of a part leaves there goes with the folder.
        self._tmpdir = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self._folder)
        self._index: EmbeddedServer | None = None
        self._index_url = config.index.url
        self._router_settings = config.router
        self._secret = new_secret()
        self._encryption_keys: tuple[bytes, ...] = ()
        self._claim: Claim | None = None
        self._policies: ServedPolicies | None = None
        self._ray: RayRuntime | None = None
        self._routers: list[Part] = []
        self._pool: list[Part] = []
        self._workers: list[Part] = []
        self._stopped = False
        self.model = ""
        """What clients call the model; known after `start`."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def parts(self) -> list[Part]:
        """All actors, in the order of their stop."""
        return [*self._routers, *self._workers, *self._pool]

    def start(self) -> Addresses:
        """Start every part and wait until each is ready.

        Raises:
            StartError: A part cannot start; the message says which and why in one sentence.
        """
        self._check()
        self._start_index()
        self._claim = Claim(self._index_url, self._config.index)
        self._ray = self._start_ray()
        self._make_parts(self._ray)
        deadline_s = time.monotonic() + self._config.cluster.start_timeout_s
        while waiting := self._waiting():
            if time.monotonic() > deadline_s:
                limit_s = self._config.cluster.start_timeout_s
                raise StartError(
                    f"not ready after {limit_s:g} s: {waiting}; "
                    "cluster.start_timeout_s sets how long to wait"
                )
            time.sleep(_POLL_S)
            self.poll()
        if self._policies is not None:
            if self._config.policies.watch:
                self._policies.start()
            else:
                self._policies.tell()
        return self.addresses()

    def addresses(self) -> Addresses:
        """Return where the parts answer now."""
        return Addresses(
            router=self._routers[0].state.detail,
            index=self._index_url,
            workers={part.name: part.state.detail for part in self._workers},
            pool={part.name: part.state.detail for part in self._pool},
            logs=self._logs,
        )

    def poll(self) -> None:
        """Ask every part how far it is; call it every second or so while the cluster runs.

        A part that died is started again by Ray; one that failed to start is made anew.

        Raises:
            StartError: A part failed in a way that starting again will not mend.
        """
        assert self._ray is not None
        if ended := self._ray.ended():
            raise StartError(
                f"Ray's {' and '.join(ended)} ended, without which nothing runs; was it killed, or "
                "the machine out of memory?"
            )
        if self._guard.watch():
            self._report("guard", "starting again")
        self._watch_index()
        if self._claim is not None:
            self._claim.check()
        states = self._ray.states([part.handle for part in self.parts], _STATE_TIMEOUT_S)
        for part, answer in zip(self.parts, states, strict=True):
            state = part.heard(answer, time.monotonic())
            if state == part.state:
                continue
            if state.phase is Phase.FAILED:
                self._failed(part, state)
                continue
            if state.phase is Phase.READY:
                part.failures = 0
                part.pid = self._ray.pid(part.handle, _STATE_TIMEOUT_S)
            part.state = state
            self._report(part.name, state.detail or state.phase.value)

    def stop(self) -> None:
        """Drain and stop every part, and leave nothing behind. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        stopping()
        if self._policies is not None:
            self._policies.close()
        drain_s = self._config.cluster.drain_timeout_s
        if self._ray is not None:
            for group in (self._routers, self._workers, self._pool):
                # One that never was ready has nothing to end, and may not answer yet.
                ready = [part.handle for part in group if part.state.phase is Phase.READY]
                self._ray.stop(ready, drain_s)
            self._ray.close()
        if self._claim is not None:
            self._claim.give_up()
        if self._index is not None:
            self._index.stop()
        os.environ.pop(MARK_VARIABLE, None)
        os.environ.pop("TMPDIR", None)
        if self._tmpdir is not None:
            os.environ["TMPDIR"] = self._tmpdir
        self._guard.release()

    @property
    def _logs(self) -> Path:
        return self._config.cluster.log_dir or self._folder / "logs"

    def _waiting(self) -> str:
        """Return what is not ready yet; nothing when the router can reach every worker."""
        if parts := [p for p in self.parts if p.state.phase is not Phase.READY]:
            return ", ".join(f"{p.name} ({p.state.detail or p.state.phase})" for p in parts)
        workers = len(self._workers)
        # Which of several routers answers is the system's choice, anew for each connection.
        for _ in range(1 if len(self._routers) == 1 else _ASKED * len(self._routers)):
            try:
                answer = httpx.get(
                    f"{self.addresses().router}/ready",
                    timeout=_STATE_TIMEOUT_S,
                    verify=trusted(self._router_settings),
                )
            except httpx.HTTPError as error:
                return f"router ({error})"
            reached = answer.json()["workers"] if answer.is_success else 0
            if reached < workers:
                return f"router (reaches {reached} of {workers} workers)"
            self.model = answer.json()["model"]
        return ""

    def _failed(self, part: Part, state: State) -> None:
        part.failures += 1
        if state.expected or part.failures >= _CRASHES:
            raise StartError(f"{part.name}: {state.detail}")
        log.warning("%s failed, is started again: %s", part.name, state.detail)
        self._report(part.name, f"starting again: {state.detail}")
        assert self._ray is not None
        if part.is_silent:
            # Ray asks a process to end, which one that was halted does not hear.
            kill_marked(part.pid, self._mark)
            self._ray.kill(part.handle)
        else:
            self._ray.stop([part.handle], 0.0)
        part.remake()

    def _check(self) -> None:
        """Find what can be found wrong before anything is started."""
        found = preflight.problems(self._config)
        if found:
            raise ConfigError(found)
        file = self._config.policies.file
        if file is not None:
            for warning in warnings(file, checked(file), self._config.model.page_tokens):
                self._report("policies", f"warning: {warning}")
        router = self._config.router
        try:
            # A router that is started again keeps its port, also where any free one will do.
            port = preflight.listened(router.host, router.port)
        except OSError as error:
            raise StartError(f"{router.host}: no port is free ({error.strerror})") from error
        self._router_settings = router.model_copy(update={"port": port})

    def _start_index(self) -> None:
        if self._index_url:
            return
        self._report("index", "starting")
        settings = self._config.index
        self._index = EmbeddedServer(
            settings.data_dir, port=settings.port, memory_budget_bytes=settings.memory_budget
        )
        try:
            self._index_url = self._index.start()
        except ServerError as error:
            raise StartError(str(error)) from error
        self._report("index", "ready")

    def _start_ray(self) -> RayRuntime:
        self._report("ray", "starting")
        address = self._config.cluster.ray_address
        ray_environment.prepare(address)
        with uninterrupted():  # What Ray imports swallows whatever is raised meanwhile.
            from pie.cluster.ray_runtime import RayRuntime  # noqa: PLC0415

        ray = RayRuntime(address, self._folder)
        self._report("ray", "ready")
        return ray

    def _watch_index(self) -> None:
        """Start the index server again where it died: places announce themselves anew."""
        if self._index is None or self._index.running:
            return
        self._report("index", "starting again")
        try:
            self._index.start()
        except ServerError as error:
            log.warning("the index server cannot be started again: %s", error)
        else:
            self._report("index", "ready")

    def _make_parts(self, ray: RayRuntime) -> None:
        config = self._config
        pool = config.pool
        self._encryption_keys = encryption_keys(config.cluster)
        file = secret_file(config)
        if file is not None:
            is_named = config.cluster.secret_file is not None
            self._secret = shared_secret(file) if is_named else kept_secret(file)
        common = {
            "index": config.index,
            "index_url": self._index_url,
            # Read once: a place that starts again must not fail over an edit.
            "policies": read(config.policies.file),
        }
        if config.policies.file is not None:
            self._policies = self._served_policies(config.policies.file)
        cores = psutil.cpu_count() or 1
        nodes = ray.nodes() if config.cluster.spread else [""]
        beside = -(-config.cluster.workers // len(nodes))
        threads = config.model.threads or max(1, cores // beside)
        model = config.model.model_copy(update={"threads": threads})
        routers = config.cluster.routers
        self._routers = [
            Part(
                name,
                functools.partial(
                    ray.actor,
                    RouterActor,
                    name,
                    self._logs,
                    secret=self._secret,
                    router=self._router_settings,
                    routers=routers,
                    **common,
                ),
            )
            for name in (["router"] if routers == 1 else [f"router-{i}" for i in range(routers)])
        ]
        turns = itertools.cycle(nodes)
        self._pool = [
            self._part(ray, PoolActor, f"pool-{i}", next(turns), pool=pool, **common)
            for i in range(pool.nodes)
        ]
        self._workers = [
            self._part(
                ray,
                WorkerActor,
                f"worker-{i}",
                next(turns),
                model=model,
                programs=config.programs,
                pool=pool,
                **common,
            )
            for i in range(config.cluster.workers)
        ]

    def _served_policies(self, file: Path) -> ServedPolicies:
        return ServedPolicies(
            file,
            checked(file).text,
            self._index_url,
            self._config.index,
            functools.partial(self._report, "policies"),
        )

    def _part(self, ray: RayRuntime, kind: type, name: str, node: str, **settings: object) -> Part:
        return Part(
            name,
            lambda: ray.actor_on(
                node,
                kind,
                PlaceId(name),
                self._logs,
                sockets=None if node else self._folder,
                secret=self._secret,
                encryption_keys=self._encryption_keys,
                **settings,
            ),
        )


def _make_folder() -> Path:
    """Make the run's temporary folder, at a path that leaves room for Ray's sockets below it."""
    name = "pie-run-"
    long = len(f"{tempfile.gettempdir()}/{name}12345678") > _FOLDER_CHARS
    return Path(tempfile.mkdtemp(prefix=name, dir="/tmp" if long else None))  # noqa: S108


@contextlib.contextmanager
def running(config: PieConfig, report: Report) -> Iterator[tuple[Cluster, Addresses]]:
    """Start a cluster, and stop it at the end of the block."""
    with Cluster(config, report) as cluster:
        yield cluster, cluster.start()
