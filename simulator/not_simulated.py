"""What policies say and nobody does in a simulation, so that it can be told.

Covers the sentences. Does not cover what is ordered and refused (`pie.simulator.ordered`).
"""

from __future__ import annotations

from pie.policies.policy_set import PolicySet


def not_simulated(policies: PolicySet, *, has_host: bool, has_pool: bool) -> list[str]:
    """Return what a set of policies says in vain, in a cluster that has these tiers or not."""
    told: list[str] = []
    ahead = policies.worker_moves().looks_ahead
    if ahead and has_host and has_pool:
        told.append(f"prefetch: pages of the next {ahead} requests in a queue are not brought near")
    named = policies.prefixes.named
    # Cluster policies are shown no prefix's pages, and what turns text into tokens is a model's.
    told += [
        f"{spec.name}: which pages are those of the prefix `{name}` is not known, so that it does nothing about it"
        for spec in (policies.replication, *policies.migration, policies.scale)
        if (name := spec.options.get("prefix")) in named
    ]
    told += [
        f"{rule.action_name}: which pages are those of the prefix `{name}` is not known, so that it keeps none of them"
        for rule in policies.rules
        if (name := rule.selector.prefix_name) is not None
        and name in named
        and (named[name].text is not None or named[name].system is not None)
    ]
    return told
