"""Ray as Pie uses it: start or join, make actors, ask them, stop them.

Covers every call to Ray. A private Ray listens on loopback only, on free ports, with its files in
the run's temporary folder. Does not cover the actors' classes (`pie.cluster.actors`). Import it
after `pie.cluster.ray_environment.prepare`: Ray reads its environment when it is imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
import ray
import ray.exceptions
from ray._private import services, utils as ray_utils
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pie.cluster.errors import StartError
from pie.cluster.host import Phase, State
from pie.cluster.stopping import Stop, uninterrupted


class ActorMethod(Protocol):
    """A method of an actor, as its handle has it."""

    def remote(self, *args: object) -> object:
        """Call it; returns a reference to the answer."""
        ...


class Actor(Protocol):
    """A handle of one of the classes of `pie.cluster.actors`."""

    @property
    def state(self) -> ActorMethod:
        """`ServiceActor.state`."""
        ...

    @property
    def pid(self) -> ActorMethod:
        """`ServiceActor.pid`."""
        ...

    @property
    def stop(self) -> ActorMethod:
        """`ServiceActor.stop`."""
        ...


_OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: pages and tokens travel on Pie's own wire."""
_STOP_EXTRA_S = 10.0
"""Longest that a part may take to close, beside the time that it drains."""
_ANSWER_S = 5.0
"""A part that answers nothing for so long, while it stops, is ended without it."""
_END_S = 8.0
"""Longest that Ray may take to end actors, or itself; it takes 2 s."""
_POLL_S = 0.2


class RayRuntime:
    """A connection to Ray.

    Args:
        address: A running Ray to join; empty starts a private one.
        folder: Where a private Ray keeps its files; its path must be short (sockets).

    Raises:
        StartError: Ray cannot be started or joined.
    """

    def __init__(self, address: str, folder: Path) -> None:
        private: dict[str, Any] = {
            # Whatever RAY_ADDRESS says.
            "address": "local",
            "num_cpus": os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(folder / "ray"),
            "_node_ip_address": "127.0.0.1",
        }
        joined = {"address": address}
        try:
            with (
                uninterrupted(),
                _own_signals(),
                _loopback() if not address else contextlib.nullcontext(),
            ):
                ray.init(
                    configure_logging=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace=f"pie-{os.getpid()}",
                    **(joined if address else private),
                )
        except Exception as error:
            # Of a node that is not up within its 30 s Ray says so in a plain one.
            what = f"no Ray answers at {address}" if address else "Ray cannot be started"
            raise StartError(f"{what}: {error}") from error
        except Stop:
            # Nobody else knows of this Ray; the interpreter crashes if it ends beside a running one.
            ray.shutdown()
            raise
        self._given_up = False
        self._node_id = ray.get_runtime_context().get_node_id()
        self._processes = {} if address else _processes_of_ray()

    def alive(self) -> bool:
        """Whether Ray answers; calls would wait for long where a process of its own is gone."""
        return not self._given_up and not self.ended()

    def ended(self) -> list[str]:
        """Return the names of those of a private Ray's own processes that have ended."""
        return [name for name, process in self._processes.items() if not _lives(process)]

    def nodes(self) -> list[str]:
        """Return the ids of all nodes that are alive, this one first, always in the same order."""
        list_nodes: Any = ray.nodes  # It has no types.
        with uninterrupted():
            known = list_nodes()
        alive = sorted(node["NodeID"] for node in known if node["Alive"])
        return [self._node_id, *(node for node in alive if node != self._node_id)]

    def actor(self, kind: type, *args: object, **kwargs: object) -> Actor:
        """Make an actor on this node that Ray starts again whenever it dies."""
        return self.actor_on("", kind, *args, **kwargs)

    def actor_on(self, node: str, kind: type, /, *args: object, **kwargs: object) -> Actor:
        """Make an actor on a node, and on another one where that is gone; empty is on this one."""
        here = NodeAffinitySchedulingStrategy(node or self._node_id, soft=bool(node))
        remote: Any = ray.remote(kind)
        with uninterrupted():
            made: Actor = remote.options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=here,
            ).remote(*args, **kwargs)
        return made

    def states(self, handles: Sequence[Actor], timeout_s: float) -> list[State | None]:
        """Ask actors how far they are, all at once; None for one that does not answer in time."""
        with uninterrupted():
            asked = [handle.state.remote() for handle in handles]
            _wait([*asked], timeout_s)
        return [self._state(one) for one in asked]

    def _state(self, asked: object) -> State | None:
        try:
            with uninterrupted():
                state = _get(asked, 0.0)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.ActorDiedError as error:
            return State(Phase.FAILED, f"its process died: {error}", expected=False)
        except ray.exceptions.RayActorError:
            return State(Phase.STARTING, "starting again")
        assert isinstance(state, State)
        return state

    def pid(self, handle: Actor, timeout_s: float) -> int | None:
        """Return the number of an actor's process, on its own host; None where it does not answer in time."""
        try:
            with uninterrupted():
                pid = _get(handle.pid.remote(), timeout_s)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return None
        assert isinstance(pid, int)
        return pid

    def kill(self, handle: Actor) -> None:
        """End an actor's process without asking it."""
        if self.alive():
            self._within(lambda: ray.kill(cast(ActorHandle[Any], handle)))

    def stop(self, handles: Sequence[Actor], drain_s: float) -> None:
        """Stop actors side by side: each drains for at most `drain_s`, then its process ends.

        One that no longer answers, because it hangs or was halted, is not waited for.
        """
        if not self.alive():
            return
        with uninterrupted():
            stopping = {handle.stop.remote(drain_s): handle for handle in handles}
        deadline_s = time.monotonic() + drain_s + _STOP_EXTRA_S
        while stopping and self.alive() and time.monotonic() < deadline_s:
            with uninterrupted():
                asked = {handle.pid.remote(): stop for stop, handle in stopping.items()}
                _, silent = _wait([*asked], _ANSWER_S)
            for one in silent:
                del stopping[asked[one]]
            if stopping:
                with uninterrupted():
                    _, left = _wait([*stopping], _POLL_S)
                stopping = {stop: stopping[stop] for stop in left}

        def kill() -> None:
            for handle in handles:
                ray.kill(cast(ActorHandle[Any], handle))

        if self.alive():
            self._within(kill)

    def close(self) -> None:
        """Disconnect, and end a private Ray; one that does not answer is left to the guard."""
        if self.alive():
            self._within(ray.shutdown)

    def _within(self, call: Callable[[], None]) -> None:
        """Carry out what has no time limit of its own; past ours, Ray is given up."""
        thread = threading.Thread(target=call, name="pie-ray-end", daemon=True)
        with uninterrupted():
            thread.start()
            thread.join(_END_S)
        self._given_up = thread.is_alive()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray take 127.0.0.1 at its word; it would listen at all of the host's addresses instead."""
    before = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = before


def _processes_of_ray() -> dict[str, psutil.Process]:
    """Return the processes of a private Ray without which nothing answers, by name."""
    names = {"gcs_server", "raylet"}
    children = ((child.name(), child) for child in psutil.Process().children())
    return {name: child for name, child in children if name in names}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _get(reference: object, timeout_s: float) -> object:
    # Ray's own annotation of `get` does not fit what an untyped handle's call returns.
    get: Any = ray.get
    return get(reference, timeout=timeout_s)


def _wait(references: list[object], timeout_s: float) -> tuple[list[object], list[object]]:
    """Wait for all; return those that were answered, whatever the answer, and the others."""
    wait: Any = ray.wait
    done, left = wait(references, num_returns=len(references), timeout=timeout_s)
    return done, left


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM: Ray's own ends `ray.init` where it stands, and the process crashes."""
    before = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = before
