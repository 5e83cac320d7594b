"""The policies in force: which classes, with which options.

Covers making policies from what the file says. Does not cover reading the file
(`pie.policies.loader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pie.policies.aside import AsidePolicy
from pie.policies.cluster_policy import ClusterPolicy
from pie.policies.errors import Problem
from pie.policies.prefixes import Prefixes
from pie.policies.registry import BUILTIN, DEFAULT, PolicyClass, PolicyKind, resolve
from pie.policies.retention import RetentionPolicy
from pie.policies.routing import RoutingPolicy
from pie.policies.rules import Rule, Ruled


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy as the file names it, checked: its class exists and takes the options."""

    name: str
    """A built-in's name, or `module:Class`."""
    factory: PolicyClass
    options: Mapping[str, object] = field(default_factory=dict)

    def build(self) -> RetentionPolicy | RoutingPolicy | ClusterPolicy:
        """Return a new policy."""
        return self.factory(**self.options)


def default_spec(kind: PolicyKind) -> PolicySpec:
    """Return the policy of a kind where the file names none."""
    return PolicySpec(DEFAULT[kind], resolve(kind, DEFAULT[kind]))


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All policies in force; `PolicySet()` is the built-ins `lru` and `cost`."""

    retention: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.RETENTION))
    routing: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.ROUTING))
    replication: PolicySpec = field(default_factory=lambda: default_spec(PolicyKind.REPLICATION))
    rules: tuple[Rule, ...] = ()
    """What comes before the retention policy, the first rule that fits a page for it."""
    text: str | None = field(default=None, compare=False)
    """The file that they are from; None where there is none."""
    folder: Path | None = None
    """Where users' modules were looked for, besides Python's own path."""
    prefixes: Prefixes = field(default_factory=lambda: Prefixes({}), compare=False)
    """The prefixes that rules may name; a worker resolves them for its model."""

    warnings: tuple[Problem, ...] = field(default=(), compare=False)
    """What is no mistake of the file but likely none of what was meant."""

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
        policy = cast(RetentionPolicy, self.retention.build())
        if self.retention.factory not in BUILTIN[PolicyKind.RETENTION].values():
            policy = AsidePolicy(policy)
        return Ruled(policy, self.rules, self.prefixes) if self.rules else policy

    def new_routing(self) -> RoutingPolicy:
        """Return a new routing policy; every router has its own."""
        return cast(RoutingPolicy, self.routing.build())

    def new_replication(self) -> ClusterPolicy:
        """Return a new policy for copies in the pool; the router that leads asks it."""
        return cast(ClusterPolicy, self.replication.build())
