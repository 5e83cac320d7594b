"""What can be found wrong before anything is started.

Covers what the settings' own bounds cannot say, because it depends on this machine: files, folders,
the port, devices, cores and memory. All of it is told at once. Does not cover what a part finds out
when it starts (its own package).
"""

from __future__ import annotations

import contextlib
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from pie.cluster.config import PieConfig
from pie.cluster.encryption import encryption_keys
from pie.cluster.errors import ConfigError
from pie.cluster.secret import FILE_NAME
from pie.cluster.settings import ClusterSettings
from pie.index.address import TLS_FILES, parse_address
from pie.index.settings import IndexSettings
from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policy_file
from pie.pool.object_errors import ObjectStoreError, StoreFailure
from pie.pool.settings import PoolSettings
from pie.router.errors import CertificateError, KeyFileError
from pie.router.key_file import read_key_file
from pie.router.settings import RouterSettings
from pie.router.tls import server_context
from pie.wire.address import check_listen_address
from pie.wire.errors import AddressError

_THREADS_PER_CORE = 4
_DEVICES_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 5.0


def absolute(config: PieConfig) -> PieConfig:
    """Return a configuration whose paths are meant from here, wherever a process runs.

    Raises:
        OSError: The working directory is gone.
    """
    cluster, model, pool = config.cluster, config.model, config.pool
    policies, router = config.policies, config.router
    source = _absolute(Path(model.source)) if _is_path(model.source) else model.source
    return config.model_copy(
        update={
            "cluster": cluster.model_copy(
                update={
                    "log_dir": cluster.log_dir and _absolute(cluster.log_dir),
                    "encryption_key_file": cluster.encryption_key_file
                    and _absolute(cluster.encryption_key_file),
                    "secret_file": cluster.secret_file and _absolute(cluster.secret_file),
                }
            ),
            "model": model.model_copy(
                update={
                    "cache_folder": _absolute(model.cache_folder),
                    "disk_kv_path": _absolute(model.disk_kv_path),
                    "source": str(source),
                }
            ),
            "pool": pool.model_copy(
                update={
                    "disk_folders": tuple(_absolute(one) for one in pool.disk_folders),
                    "object_ca_file": pool.object_ca_file and _absolute(pool.object_ca_file),
                }
            ),
            "router": router.model_copy(
                update={
                    name: found and _absolute(found)
                    for name in ("keys_file", "tls_cert_file", "tls_key_file")
                    for found in (getattr(router, name),)
                }
            ),
            "index": config.index.model_copy(update={"data_dir": _absolute(config.index.data_dir)}),
            "policies": policies.model_copy(
                update={"file": policies.file and _absolute(policies.file)}
            ),
        }
    )


def problems(config: PieConfig) -> list[str]:
    """Return a sentence for each thing that would keep the cluster from starting."""
    return [
        *_policies(config),
        *_model(config),
        *_folders(config),
        *_keys(config.cluster),
        *_bucket(config.pool),
        *_index(config.index),
        *_ray(config.cluster.ray_address),
        *_spread(config),
        *_router(config.router),
        *_ports(config),
        *_memory(config),
        *_shelves(config),
    ]


def node_problems(config: PieConfig) -> list[str]:
    """Return a sentence for each thing that would keep a node of `pie pool` from starting."""
    return [
        *_policies(config),
        *_keys(config.cluster),
        *_node_folders(config.pool),
        *_node_address(config),
        *_index(config.index),
        *_node_memory(config.pool),
    ]


def listened(host: str, port: int) -> int:
    """Return the port that can be listened on: `port`, or a free one for 0.

    Raises:
        OSError: None can.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        # A name that no resolver is asked for: too long, or with a character that none may have.
        except (TypeError, UnicodeError, ValueError) as error:
            raise OSError(0, "not the name of a host") from error
        found: int = probe.getsockname()[1]
        return found


def _keys(settings: ClusterSettings) -> Iterator[str]:
    try:
        encryption_keys(settings)
    except ConfigError as error:
        yield from error.problems


def _router(settings: RouterSettings) -> Iterator[str]:
    """Look at the files that a router needs."""
    try:
        server_context(settings)
    except CertificateError as error:
        yield str(error)
    try:
        if settings.keys_file is not None:
            read_key_file(settings.keys_file)
    except KeyFileError as error:
        yield f"router.keys_file: {error}"


def _policies(config: PieConfig) -> Iterator[str]:
    try:
        load_policy_file(config.policies.file)
    except PolicyFileError as error:
        yield from error.told()


def _model(config: PieConfig) -> Iterator[str]:
    model = config.model
    if _is_path(model.source):
        path = Path(model.source)
        try:
            if not path.exists():
                yield f"model.source: there is no folder or file {model.source!r}"
            elif path.is_dir() and not (path / "config.json").is_file():
                yield f"model.source: {path} has no config.json, so it is not a model's folder"
        except OSError as error:
            yield f"model.source: {path} cannot be read ({error.strerror})"
    cores = psutil.cpu_count() or 1
    most = _THREADS_PER_CORE * cores
    if model.threads is not None and model.threads > most:
        yield (
            f"model.threads is {model.threads}: at most {most} are allowed, {_THREADS_PER_CORE} for "
            f"each of this machine's {cores} cores"
        )
    if model.device.startswith("cuda"):
        there = _cuda_devices()
        if int(model.device.partition(":")[2] or 0) >= there:
            known = [f"cuda:{number}" for number in range(there)]
            yield (
                f"model.device: there is no {model.device} here; allowed are "
                f"{', '.join(['cpu', *known])}"
            )


def _folders(config: PieConfig) -> Iterator[str]:
    if config.cluster.log_dir is not None:
        yield from _unwritable("cluster.log_dir", config.cluster.log_dir)
    # One that is read-only may hold the converted model already.
    yield from _unusable("model.cache_folder", config.model.cache_folder)
    if not config.index.url:
        yield from _unwritable("index.data_dir", config.index.data_dir, mode=0o700)
    if config.model.disk_kv_budget:
        yield from _unusable("model.disk_kv_path", config.model.disk_kv_path)
    if config.pool.nodes:
        yield from _node_folders(config.pool)


def _node_folders(pool: PoolSettings) -> Iterator[str]:
    if not pool.disk_budget:
        return
    for folder in pool.disk_folders:
        # A disk that takes nothing costs pages and no start.
        yield from _unusable("pool.disk_folders", folder)
    if len({folder.resolve() for folder in pool.disk_folders}) < len(pool.disk_folders):
        yield "pool.disk_folders: a folder is named twice"


def _node_address(config: PieConfig) -> Iterator[str]:
    if config.pool.name == FILE_NAME:
        yield f"pool.name: {FILE_NAME} is the name of the secret beside the nodes' folders: give another"
    try:
        check_listen_address(config.pool.listen)
    except AddressError as error:
        yield f"pool.listen: {error}"
    if config.cluster.secret_file is None:
        yield (
            "cluster.secret_file is not set: name the file with the secret of the cluster that this "
            "node belongs to"
        )
    if not config.index.url:
        yield "index.url is not set: name the Redis of the cluster that this node belongs to"


def _node_memory(pool: PoolSettings) -> Iterator[str]:
    free = psutil.virtual_memory().available
    if pool.ram_budget > free:
        yield (
            f"pool.ram_budget is {pool.ram_budget / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of "
            "memory are free: lower it"
        )


def _bucket(pool: PoolSettings) -> Iterator[str]:
    """Say what a store says at once; one that says nothing now may do so later."""
    if not (pool.nodes and pool.object_bucket):
        return
    if pool.object_ca_file is not None and not pool.object_ca_file.is_file():
        yield f"pool.object_ca_file: there is no file {pool.object_ca_file}"
        return
    # Only who has a bucket pays for importing boto3.
    from pie.pool.object_s3 import probe_bucket  # noqa: PLC0415

    at = pool.object_endpoint_url or "AWS"
    try:
        probe_bucket(pool)
    except ObjectStoreError as error:
        match error.failure:
            case StoreFailure.NO_BUCKET:
                yield (
                    f"pool.object_bucket: there is no bucket {pool.object_bucket!r} at {at}: make it, "
                    "or name another"
                )
            case StoreFailure.DENIED:
                yield (
                    f"pool.object_bucket: {at} gives no access to {pool.object_bucket!r} "
                    f"({error.detail}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                    "AWS_PROFILE, to somebody who may list, read, write and delete there"
                )
            case StoreFailure.UNREACHABLE:
                yield f"pool.object_endpoint_url: no store answers at {at} ({error.detail})"
            case StoreFailure.TLS:
                yield (
                    f"pool.object_ca_file: the certificate of {at} is not trusted ({error.detail}): "
                    "name a file with the one that signed it"
                )
            case StoreFailure.STRANGE:
                yield f"pool.object_endpoint_url: {at} is not taken as an S3 store ({error.detail})"
            case StoreFailure.TIMEOUT | StoreFailure.BUSY:
                pass


def _unusable(setting: str, folder: Path) -> Iterator[str]:
    """Say what is in a folder's way; one that may not be looked at may still do."""
    for path in (folder, *folder.parents):
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                yield f"{setting}: {folder} cannot be a folder: {path} is none"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            return
        except (OSError, ValueError) as error:
            yield f"{setting}: {folder} cannot be a folder ({_reason(error)})"
        return


def _unwritable(setting: str, folder: Path, *, mode: int = 0o777) -> Iterator[str]:
    """Say why nothing can be written in a folder; makes it."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        yield f"{setting}: {folder} cannot be written to ({_reason(error)}): name another folder"


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def _index(index: IndexSettings) -> Iterator[str]:
    if not index.url:
        return
    options = parse_address(index.url).options
    for name in TLS_FILES:
        if name in options:
            try:
                with Path(options[name]).open("rb"):
                    pass
            except (OSError, ValueError) as error:
                yield (
                    f"index.url: {name}: {options[name]} cannot be read ({_reason(error)}): "
                    "name a PEM file that every process of Pie can read"
                )


def _ray(address: str) -> Iterator[str]:
    """Find out in time that nobody listens: Ray would try for long, then end this process."""
    if not address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield f"cluster.ray_address: {address!r} is not HOST:PORT"
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        yield f"cluster.ray_address: no Ray answers at {address}: {_reason(error)}"


def _spread(config: PieConfig) -> Iterator[str]:
    cluster = config.cluster
    if not cluster.spread:
        return
    for setting, value in (
        ("cluster.ray_address", cluster.ray_address),
        ("index.url", config.index.url),
        ("cluster.log_dir", cluster.log_dir),
    ):
        if not value:
            yield f"cluster.spread: {setting} is not set, and every node of Ray needs it"


def _ports(config: PieConfig) -> Iterator[str]:
    host, port = config.router.host, config.router.port
    try:
        listened(host, port)
    except OSError as error:
        yield (
            f"{host}:{port} cannot be listened on ({error.strerror}): set router.host to an address "
            "of this machine and router.port to a free port, or --port 0 for any"
        )
    index = config.index
    if not index.url and index.port:
        try:
            listened("127.0.0.1", index.port)
        except OSError as error:
            yield f"index.port: {index.port} cannot be listened on ({error.strerror}): set another"


def _memory(config: PieConfig) -> Iterator[str]:
    if config.cluster.spread:
        return  # What other hosts have is theirs to say.
    model = config.model
    on_cpu = model.device == "cpu"
    one_worker = model.host_kv_budget + (model.device_kv_budget if on_cpu else 0)
    wanted = config.pool.nodes * config.pool.ram_budget + config.cluster.workers * one_worker
    free = psutil.virtual_memory().available
    if wanted > free:
        yield (
            f"the page budgets need {wanted / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of memory "
            "are free: lower model.device_kv_budget, model.host_kv_budget, pool.ram_budget or "
            "cluster.workers"
        )


def _shelves(config: PieConfig) -> Iterator[str]:
    """Look whether what routers keep leaves places room to say what they hold."""
    if config.index.url:
        return  # How large that Redis is, is its owner's to say.
    router, budget = config.router, config.index.memory_budget
    kept = router.responses_bytes + router.explained_bytes
    if kept > budget // 2:
        yield (
            f"router.responses_bytes and router.explained_bytes are {kept / 2**20:.1f} MiB together, more than half "
            f"of index.memory_budget ({budget / 2**20:.1f} MiB), which places need too: lower them, or raise that to "
            f"{2 * kept / 2**20:.1f} MiB"
        )


def _cuda_devices() -> int:
    """Count CUDA's devices, in a process of its own: torch stays out of this one."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pie.worker.devices"],
            capture_output=True,
            text=True,
            timeout=_DEVICES_TIMEOUT_S,
            check=True,
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def _is_path(source: str) -> bool:
    try:
        return (
            source.startswith((".", "/", "~")) or source.endswith(".gguf") or Path(source).is_dir()
        )
    except OSError:  # Too long for a name of anything.
        return False


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:  # Nobody has that home.
        return path.absolute()
