"""What policies say and nobody does in a simulation, so that it can be told.

Covers the sentences. Does not cover what is ordered and refused (`pie.simulator.ordered`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pie.policies.options import marked
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.policies.units import SelectsBy


def not_simulated(
    policies: PolicySet, unknown: Mapping[str, str], *, has_host: bool, has_pool: bool
) -> list[str]:
    """Return what a set of policies says in vain.

    Args:
        policies: The set.
        unknown: Why pages of named prefixes are not known, by name.
        has_host: Whether workers have host memory.
        has_pool: Whether there is a pool.
    """
    told: list[str] = []
    ahead = policies.worker_moves().looks_ahead
    if ahead and has_host and has_pool:
        told.append(f"prefetch: pages of the next {ahead} requests in a queue are not brought near")
    told += [
        f"{spec.name}: which pages are those of the prefix `{name}` is not known, so that it does nothing about it: {why}"
        for spec in (policies.replication, *policies.migration, policies.scale)
        for option in _prefix_options(spec)
        if (why := unknown.get(name := str(spec.options.get(option)))) is not None
    ]
    told += [
        f"{rule.action_name}: which pages are those of the prefix `{name}` is not known, so that it keeps none of them: {why}"
        for rule in policies.rules
        if (name := rule.selector.prefix_name or "") in unknown
        for why in (unknown[name],)
    ]
    return told


def _prefix_options(spec: PolicySpec) -> list[str]:
    """Return the options of a policy that select by a prefix."""
    marks = marked(spec.factory, SelectsBy)
    return [option for option, mark in marks.items() if mark.what == "prefix"]
