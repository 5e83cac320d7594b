"""The policies in force: which classes, with which options.

Covers making policies from what the file says. Does not cover reading the file
(`pie.policies.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pie.policies.aside import AsidePolicy
from pie.policies.cluster_policy import ClusterPolicy
from pie.policies.containing import is_builtin
from pie.policies.drain import Drain
from pie.policies.errors import PolicyError, Problem
from pie.policies.failing import Failures
from pie.policies.prefetch import Prefetch
from pie.policies.prefixes import Prefixes, PrefixPlace
from pie.policies.registry import ALWAYS, DEFAULT, PolicyClass, PolicyKind, resolve
from pie.policies.retention import RetentionPolicy
from pie.policies.routing import RoutingPolicy
from pie.policies.routing_aside import AsideRouting
from pie.policies.rules import Rule, Ruled
from pie.policies.spill_to_pool import SpillToPool
from pie.policies.tag_warnings import TagPattern
from pie.policies.telling import told
from pie.policies.user_code import LateError, made


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy as the file names it, checked: its class exists and takes the options."""

    name: str
    """A built-in's name, or `module:Class`."""
    factory: PolicyClass
    options: Mapping[str, object] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures, compare=False, repr=False)
    """Of all policies that were made of it here."""

    def build(self, aside: Callable[[Any], object] | None = None) -> object:
        """Return a new policy.

        Args:
            aside: Makes of a user's policy what asks it on a thread of its own.

        Raises:
            PolicyError: A user's class, of which one was made while the file was read, refuses this time, or does not
                come back.
        """
        if is_builtin(self.factory):
            return self.factory(**self.options)

        def work() -> object:
            try:
                policy = self.factory(**self.options)
                return policy if aside is None else aside(policy)
            except BaseException as error:  # noqa: BLE001 - on this thread it is the class's, whatever it is
                raise PolicyError(f"a new {self.name} cannot be made: {told(error)}") from None

        try:
            return made(("built", id(self.factory)), work)
        except LateError as error:
            raise PolicyError(f"a new {self.name} cannot be made: it {error}") from None


def default_spec(kind: PolicyKind) -> PolicySpec:
    """Return the policy of a kind where the file names none."""
    return PolicySpec(DEFAULT[kind], resolve(kind, DEFAULT[kind]))


def always() -> tuple[PolicySpec, ...]:
    """Return the migration policies that are in force where the file names none."""
    return tuple(PolicySpec(name, resolve(PolicyKind.MIGRATION, name)) for name in ALWAYS)


@dataclass(frozen=True, slots=True)
class WorkerMoves:
    """What policies say of pages that a worker moves by itself."""

    looks_ahead: int = 4
    """Requests from the head of its queue on whose pages are brought near."""
    stores_as_made: bool = True
    """Whether it stores pages in the pool as it makes them."""
    drain_share: float = 0.5
    """How much of the time that it has to end goes to handing pages on, at most."""


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All policies in force; `PolicySet()` is the built-ins `lru`, `cost` and twice `fixed`, and `ALWAYS`."""

    retention: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.RETENTION))
    routing: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.ROUTING))
    replication: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.REPLICATION))
    migration: tuple[PolicySpec, ...] = field(default_factory=always)
    """Those of the file in its order, and then those of `ALWAYS` that it does not name."""
    scale: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.SCALE))
    rules: tuple[Rule, ...] = ()
    """What comes before the retention policy: the first rule that fits a page, and the first `quota` that does."""
    text: str | None = field(default=None, compare=False)
    """The file that they are from; None where there is none."""
    file: str = field(default="", compare=False)
    """What messages call that."""
    folder: Path | None = None
    """Where users' modules were looked for, besides Python's own path."""
    prefixes: Prefixes = field(default_factory=lambda: Prefixes({}), compare=False)
    """The prefixes that rules may name; a worker resolves them for its model."""
    prefix_places: Mapping[str, PrefixPlace] = field(default_factory=dict, compare=False)
    """Where the file says what each prefix is, by name."""
    patterns: tuple[TagPattern, ...] = field(default=(), compare=False)
    """The tenants, conversations and models that its selectors go by."""
    warnings: tuple[Problem, ...] = field(default=(), compare=False)
    """What is no mistake of the file but likely none of what was meant."""

    def all(self) -> Iterator[tuple[PolicyKind, PolicySpec]]:
        """Yield all policies in force, defaults included."""
        for kind in PolicyKind:
            found: PolicySpec | tuple[PolicySpec, ...] = getattr(self, kind)
            specs = found if isinstance(found, tuple) else (found,)
            yield from ((kind, spec) for spec in specs)

    def same_retention(self, other: PolicySet) -> bool:
        """Say whether pages are treated alike by both, so that nothing changes for them."""
        return (
            self.retention == other.retention
            and self.rules == other.rules
            and self.prefixes.named == other.prefixes.named
        )

    def new_retention(self) -> RetentionPolicy:
        """Return a new retention policy; every tier of every place has its own."""
        policy = cast(RetentionPolicy, self.retention.build())
        return Ruled(policy, self.rules, self.prefixes) if self.rules else policy

    def new_retention_aside(self) -> RetentionPolicy:
        """Return a new retention policy that a step may ask: a user's runs on a thread of its own."""
        failures = self.retention.failures
        policy = self.retention.build(lambda policy: AsidePolicy(policy, failures=failures))
        policy = cast(RetentionPolicy, policy)
        return Ruled(policy, self.rules, self.prefixes) if self.rules else policy

    def new_routing(self) -> RoutingPolicy:
        """Return a new routing policy; every router has its own."""
        return cast(RoutingPolicy, self.routing.build())

    def new_routing_aside(self) -> RoutingPolicy:
        """Return a new routing policy that an event loop may ask: a user's runs on a thread of its own."""
        failures = self.routing.failures
        policy = self.routing.build(lambda policy: AsideRouting(policy, failures=failures))
        return cast(RoutingPolicy, policy)

    def new_cluster(self) -> list[tuple[str, ClusterPolicy]]:
        """Return all new policies over the whole cluster, with their names."""
        specs = (self.replication, *self.migration, self.scale)
        return [(spec.name, cast(ClusterPolicy, spec.build())) for spec in specs]

    def same_cluster(self, other: PolicySet) -> bool:
        """Say whether the cluster is treated alike by both."""
        mine = (self.replication, self.migration, self.scale)
        return mine == (other.replication, other.migration, other.scale)

    def worker_moves(self) -> WorkerMoves:
        """Return what the policies say of pages that each worker moves by itself."""
        moves = WorkerMoves()
        for spec in self.migration:
            if not issubclass(spec.factory, (Prefetch, SpillToPool, Drain)):
                continue
            policy = spec.build()
            if isinstance(policy, Prefetch):
                moves = replace(moves, looks_ahead=policy.requests)
            elif isinstance(policy, SpillToPool):
                moves = replace(moves, stores_as_made=policy.as_made)
            elif isinstance(policy, Drain):
                moves = replace(moves, drain_share=policy.share)
        return moves
