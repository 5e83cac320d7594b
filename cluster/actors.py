"""Ray actors: thin shims around the services.

Ray places, starts, watches and restarts these processes; tokens and pages travel on the wire.
An actor starts its service as soon as it is made, so that one that Ray restarted comes back by
itself; `state` says how far it is. Does not cover what a service does.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from pie.cluster.collector import keep_pauses_short
from pie.cluster.host import Host, Progress, Service, State
from pie.cluster.pool_process import new_node
from pie.index.epochs import next_epoch
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.errors import PolicyFileError, PolicyLateError
from pie.policies.loader import PolicyText
from pie.pool.errors import PoolError
from pie.pool.settings import PoolSettings
from pie.router.errors import RouterError
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.worker.settings import ModelSettings, ProgramSettings

_LOG_BYTES = 16 << 20


def _end_process(_error: BaseException) -> None:
    """End this process: nothing in it can be saved, and Ray starts it again."""
    os._exit(1)


def _address(sockets: Path | None, place: PlaceId, epoch: Epoch) -> str:
    """Return the wire address of one start: in a folder that only this user may enter.

    Without one it is a free port at the address that Ray knows this host by. Every start has its own,
    so that whoever still talks to an earlier one finds nobody.
    """
    if sockets is None:
        # Ray reads its environment when it is imported, which is not yet set where the cluster starts.
        from ray.util import get_node_ip_address  # noqa: PLC0415

        host_of_ray: Callable[[], str] = get_node_ip_address
        return f"curve://{host_of_ray()}:0"
    return f"ipc://{sockets}/{place}-{epoch}"


def _host(
    name: str, start: Callable[[Progress], Awaitable[tuple[Service, str]]], error: type[Exception]
) -> Host:
    """Run a service, which has this process for itself."""
    return Host(
        name,
        start,
        expected=(error, PolicyFileError),
        # The file was good when the cluster started: a module that takes long now is no reason to end all of it.
        passing=(PolicyLateError,),
        settle=keep_pauses_short,
    )


class ServiceActor:
    """What every actor answers while its service runs beside it."""

    def __init__(self, name: str, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            log_dir / f"{name}.log", maxBytes=_LOG_BYTES, backupCount=1
        )
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log = logging.getLogger("pie")
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        self._host: Host

    def state(self) -> State:
        """Return how far the service is."""
        return self._host.state

    def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    def stop(self, drain_s: float) -> None:
        """Drain the service for at most `drain_s` and close it."""
        self._host.stop(drain_s)


class WorkerActor(ServiceActor):
    """One worker."""

    def __init__(
        self,
        place: PlaceId,
        log_dir: Path,
        *,
        sockets: Path | None,
        secret: bytes,
        encryption_keys: tuple[bytes, ...],
        model: ModelSettings,
        programs: ProgramSettings,
        policies: PolicyText,
        pool: PoolSettings,
        index: IndexSettings,
        index_url: str,
    ) -> None:
        super().__init__(place, log_dir)
        # Only a worker's process pays for importing torch.
        from pie.worker.errors import WorkerError  # noqa: PLC0415
        from pie.worker.service import WorkerService  # noqa: PLC0415

        async def start(progress: Progress) -> tuple[Service, str]:
            epoch = await next_epoch(index_url, index, place)
            service = WorkerService(
                place,
                model,
                policies=policies.load(),
                pool_settings=pool,
                programs=programs,
                index_settings=index,
                index_url=index_url,
                address=_address(sockets, place, epoch),
                epoch=epoch,
                secret=secret,
                encryption_keys=encryption_keys,
                on_dead=_end_process,
            )
            await service.start(progress)
            return service, service.record.address

        self._host = _host(place, start, WorkerError)


class PoolActor(ServiceActor):
    """One pool node."""

    def __init__(
        self,
        place: PlaceId,
        log_dir: Path,
        *,
        sockets: Path | None,
        secret: bytes,
        encryption_keys: tuple[bytes, ...],
        pool: PoolSettings,
        policies: PolicyText,
        index: IndexSettings,
        index_url: str,
    ) -> None:
        super().__init__(place, log_dir)

        async def start(_progress: Progress) -> tuple[Service, str]:
            epoch = await next_epoch(index_url, index, place)
            node = new_node(
                place,
                pool=pool,
                policies=policies,
                index=index,
                index_url=index_url,
                address=_address(sockets, place, epoch),
                epoch=epoch,
                secret=secret,
                encryption_keys=encryption_keys,
                on_dead=_end_process,
            )
            record = await node.start()
            return node, record.address

        self._host = _host(place, start, PoolError)


class RouterActor(ServiceActor):
    """One router, alone or beside others on one port."""

    def __init__(
        self,
        name: str,
        log_dir: Path,
        *,
        secret: bytes,
        router: RouterSettings,
        routers: int,
        policies: PolicyText,
        index: IndexSettings,
        index_url: str,
    ) -> None:
        super().__init__(name, log_dir)

        async def start(_progress: Progress) -> tuple[Service, str]:
            service = RouterService(
                router,
                index_url=index_url,
                index=index,
                policies=policies.load(),
                secret=secret,
                routers=routers,
                title=name,
            )
            return service, await service.start()

        self._host = _host(name, start, RouterError)
