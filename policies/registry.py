"""Names of built-in policies, and classes of users' policies by `module:Class`.

Covers turning a name into a class and saying why it cannot be. Does not cover the policy file
(`pie.policies.loader`) or a policy's options (`pie.policies.options`).
"""

from __future__ import annotations

import difflib
import enum
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

from pie.policies.adaptive import AdaptiveRetention
from pie.policies.arc import ArcRetention
from pie.policies.by_load import ByLoad
from pie.policies.cluster_policy import ClusterPolicy, FixedCopies, FixedWorkers
from pie.policies.drain import Drain
from pie.policies.errors import PolicyError
from pie.policies.expire import Expire
from pie.policies.follow_session import FollowSession
from pie.policies.frequency import CostRetention, LfuRetention
from pie.policies.lru import LruRetention
from pie.policies.prefetch import Prefetch
from pie.policies.rebalance import Rebalance
from pie.policies.replicate import Replicate
from pie.policies.replicate_hot import ReplicateHot
from pie.policies.retention import RetentionPolicy, SeesPins
from pie.policies.routing import RoutingPolicy
from pie.policies.routing_affinity import ConsistentHashRouting, PrefixAffinityRouting
from pie.policies.routing_cost import CostRouting
from pie.policies.routing_plain import LeastLoadedRouting, PowerOfTwoRouting, RoundRobinRouting
from pie.policies.routing_weighted import WeightedRouting
from pie.policies.s3_fifo import S3FifoRetention
from pie.policies.spill_to_pool import SpillToPool
from pie.policies.telling import name_of, said_by
from pie.policies.user_code import MODULES, LateError, UserCode, note_loaded


class PolicyKind(enum.StrEnum):
    """What a policy decides."""

    RETENTION = "retention"
    ROUTING = "routing"
    REPLICATION = "replication"
    MIGRATION = "migration"
    SCALE = "scale"


PolicyClass = type[RetentionPolicy] | type[RoutingPolicy] | type[ClusterPolicy]

BUILTIN: Mapping[PolicyKind, Mapping[str, PolicyClass]] = {
    PolicyKind.RETENTION: {
        "lru": LruRetention,
        "lfu": LfuRetention,
        "s3-fifo": S3FifoRetention,
        "arc": ArcRetention,
        "cost": CostRetention,
        "adaptive": AdaptiveRetention,
    },
    PolicyKind.ROUTING: {
        "cost": CostRouting,
        "round-robin": RoundRobinRouting,
        "least-loaded": LeastLoadedRouting,
        "power-of-two": PowerOfTwoRouting,
        "prefix-affinity": PrefixAffinityRouting,
        "consistent-hash": ConsistentHashRouting,
        "weighted": WeightedRouting,
    },
    PolicyKind.REPLICATION: {
        "fixed": FixedCopies,
        "replicate-hot": ReplicateHot,
        "replicate": Replicate,
    },
    PolicyKind.MIGRATION: {
        "drain": Drain,
        "prefetch": Prefetch,
        "spill-to-pool": SpillToPool,
        "follow-session": FollowSession,
        "rebalance": Rebalance,
        "expire": Expire,
        "replicate": Replicate,
    },
    PolicyKind.SCALE: {"fixed": FixedWorkers, "by-load": ByLoad},
}
"""Classes of the built-in policies by name."""

DEFAULT: Mapping[PolicyKind, str] = {
    PolicyKind.RETENTION: "lru",
    PolicyKind.ROUTING: "cost",
    PolicyKind.REPLICATION: "fixed",
    PolicyKind.MIGRATION: "drain",
    PolicyKind.SCALE: "fixed",
}
"""The policy of each kind where the file names none; of migration the first of those in `ALWAYS`."""

ALWAYS = ("drain", "prefetch", "spill-to-pool")
"""Migration policies that are in force with their defaults where the file does not name them."""

_METHODS: Mapping[PolicyKind, Mapping[str, int]] = {
    PolicyKind.RETENTION: {"stored": 2, "hit": 3, "removed": 2, "victims": 2},
    PolicyKind.ROUTING: {"choose": 2},
    PolicyKind.REPLICATION: {"decide": 1},
    PolicyKind.MIGRATION: {"decide": 1},
    PolicyKind.SCALE: {"decide": 1},
}
"""What a class of each kind must have, with the number of arguments it is called with."""
_OF_PINS = {"pinned": 2, "unpinned": 2}
"""What a retention policy may have besides: both or none."""

_USER_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class UnknownPolicyError(PolicyError):
    """A name that is no policy of the kind asked for; the message says why and what is allowed."""


def resolve(
    kind: PolicyKind, name: str, folder: Path | None = None, code: UserCode | None = None
) -> PolicyClass:
    """Return the class that `name` stands for.

    Args:
        kind: What the policy must decide.
        name: A built-in's name, or `module:Class`.
        folder: Where to look for the module before Python's own path; the policy file's folder.
        code: Imports the module by a deadline; its own one where None.

    Raises:
        UnknownPolicyError: There is no such policy, or it is not of that kind.
    """
    builtin = BUILTIN[kind]
    if name in builtin:
        return builtin[name]
    if ":" not in name:
        installed = _installed(kind)
        if name in installed:
            return resolve(kind, installed[name], code=code)
        for other, names in BUILTIN.items():
            if name in names:
                raise UnknownPolicyError(
                    f"{name!r} is a {other} policy, not a {kind} policy; {_allowed(kind)}"
                )
        raise UnknownPolicyError(
            f"there is no {kind} policy {name!r}{did_you_mean(name, [*builtin, *installed])}; "
            f"{_allowed(kind, installed)}"
        )
    if not _USER_CLASS.fullmatch(name):
        raise UnknownPolicyError(f"{name!r} is not written as `module:Class`")
    module_name, _ = name.split(":")
    code = code or UserCode()
    module = _import(module_name, folder, code)
    code.look_at(module)
    try:
        found = code.run(("class", kind, id(module), name), lambda: _found_in(module, kind, name))
    except LateError as error:
        raise UnknownPolicyError(f"a look at {name!r} {error}") from error
    if type(found) is str:
        raise UnknownPolicyError(found)
    return found  # type: ignore[return-value]


def _found_in(module: ModuleType, kind: PolicyKind, name: str) -> PolicyClass | str:
    """Return the class of a module that a name means, or why there is none; runs the user's code."""
    module_name, class_name = name.split(":")
    try:
        found = getattr(module, class_name, None)
        if found is None:
            classes = [n for n, v in vars(module).items() if inspect.isclass(v)]
            return (
                f"module {module_name!r} has no {class_name!r}{did_you_mean(class_name, classes)}"
            )
        return _not_of(kind, name, found) or found
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the module's
        return f"{name!r} cannot be looked at: {said_by(error, names_kind=True)}"


def _installed(kind: PolicyKind) -> Mapping[str, str]:
    """Return policies of a kind that installed packages bring, by name, as `module:Class`.

    They are entry points of the group `pie.policies.KIND`; a built-in of the same name goes before.
    """
    group = importlib.metadata.entry_points(group=f"pie.policies.{kind}")
    return {one.name: one.value for one in group}


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `, did you mean …?` where an allowed name looks much like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _allowed(kind: PolicyKind, installed: Iterable[str] = ()) -> str:
    names = ", ".join(f"`{name}`" for name in [*BUILTIN[kind], *installed])
    return f"allowed are {names} and your own `module:Class`"


def _import(name: str, folder: Path | None, code: UserCode) -> ModuleType:
    """Import a user's module; one that lies in `folder` goes before any other of its name."""
    file = None if folder is None else folder.joinpath(*name.split(".")).with_suffix(".py")
    try:
        if file is not None and file.is_file():
            found = code.run(
                ("import", file), lambda: _imported(name, folder, lambda: _import_file(name, file))
            )
        elif name in sys.modules:
            return importlib.import_module(name)
        else:
            found = code.run(
                ("import", name),
                lambda: _imported(name, folder, lambda: importlib.import_module(name)),
            )
    except LateError as error:
        raise UnknownPolicyError(
            f"the import of module {name!r} {error}: try again once it is over, or let it do less"
        ) from error
    if isinstance(found, str):
        raise UnknownPolicyError(found)
    return found


def _imported(name: str, folder: Path | None, work: Callable[[], ModuleType]) -> ModuleType | str:
    """Return a user's module, or why it cannot be imported; runs the user's code."""
    try:
        return work()
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == name or name.startswith(f"{error.name}.")):
            looked = (
                f"in {folder} or on Python's path"
                if folder is not None
                else "on Python's path, and no policy file is configured that it could lie beside: set "
                "`[policies] file` in pie.toml and start anew, or install the module"
            )
            return f"there is no module {name!r} {looked}"
        return f"module {name!r} cannot be imported: {said_by(error)}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the module's
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return f"module {name!r} cannot be imported: {said_by(error, names_kind=True)}{at}"


def _import_file(name: str, file: Path) -> ModuleType:
    """Import a file under a name of our own, so that it shadows no other module."""
    own_name = f"{MODULES}{name}"
    loaded = sys.modules.get(own_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(own_name, file)
    if spec is None or spec.loader is None:
        raise UnknownPolicyError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    note_loaded(own_name, file)
    # Dataclasses and the like look their module up while it is being run.
    sys.modules[own_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(own_name, None)
        raise
    return module


def _not_of(kind: PolicyKind, name: str, found: object) -> str:
    """Return why what a module has is no policy of a kind: that is a class with certain methods. Nothing where it is."""
    if not inspect.isclass(found):
        return f"{name!r} is not a class but a {name_of(type(found))}"
    methods = dict(_METHODS[kind])
    if kind is PolicyKind.RETENTION and issubclass(found, SeesPins):
        methods |= _OF_PINS
    for method, arguments in methods.items():
        function = getattr(found, method, None)
        if not callable(function):
            return f"{name!r} is not a {kind} policy: it has no `{method}`"
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return f"{name!r}: `{method}` must not be async"
        try:
            inspect.signature(function).bind(None, *range(arguments))
        except TypeError as error:
            return (
                f"{name!r}: `{method}` does not take the {arguments} arguments of a {kind} "
                f"policy: {said_by(error)}"
            )
        except ValueError:  # a signature that Python cannot tell
            continue
    return ""
