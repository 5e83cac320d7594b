"""Policies in lines, as `pie policy show` and `diff` have them."""

from pathlib import Path

from pie.cluster.policy_command import checked, lines_of
from pie.policies.loader import load_policies


def test_policies_are_shown_in_the_units_that_the_file_takes() -> None:
    policies = load_policies(
        """
        worker:
          rules:
            - {match: {age: 90m, hits: 2}, action: pin, max: 2GiB}
            - {action: keep-session, keep: 1h, max: 1000}
        cluster:
          routing: {policy: weighted, filters: {max-wait-ms: 4000}, scorers: {queue: 2}}
          replication: {policy: replicate, copies: 2, tenant: "8f*"}
          migration:
            - {policy: rebalance, idle: 30s, rate: 128MiB}
            - {policy: expire, after: 2d, pool: false}
            - {policy: follow-session, within: 500ms}
        """,
        name="p",
    )
    assert lines_of(policies) == [
        "  retention   lru",
        "  routing     weighted, filters: {max-wait-ms: 4000.0}, scorers: {queue: 2.0}",
        "  replication replicate, copies: 2, tenant: 8f*",
        "  migration   rebalance, idle: 30s, rate: 128MiB",
        "  migration   expire, after: 2d, pool: false",
        "  migration   follow-session, within: 500ms",
        "  migration   drain",
        "  migration   prefetch",
        "  migration   spill-to-pool",
        "  scale       fixed",
        "  rule 0      pin, max: 2GiB; used 2 times or more, there for 90m",
        "  rule 1      keep-session, keep: 1h, max: 1000; any page",
    ]


def test_a_default_that_is_spelt_out_is_no_difference(tmp_path: Path) -> None:
    short, long = (tmp_path / name for name in ("short.yaml", "long.yaml"))
    short.write_text("cluster: {routing: cost, replication: {policy: replicate, copies: 2}}")
    long.write_text(
        "cluster: {routing: {policy: cost, miss_weight: 5}, "
        "replication: {policy: replicate, copies: 2, uses: 0}}"
    )
    first, second = (lines_of(checked(file), shortly=True) for file in (short, long))
    assert first == second
    assert "  replication replicate, copies: 2" in first
