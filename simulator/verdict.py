"""Which set of policies did best, in sentences.

Covers what is said above the figures. Does not cover the figures (`pie.simulator.report`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.simulator.report import Report

_ALIKE = 0.01
"""What differs by less, as a share, is taken for alike."""


def verdict(reports: Sequence[Report]) -> list[str]:
    """Return which of several sets did best and by how much; nothing of a single one.

    The time to first token decides. Sets that refused more requests than another are left out: those that they
    refused did not wait.
    """
    if len(reports) < 2:
        return []
    least = min(one.refused for one in reports)
    served = [one for one in reports if one.refused == least]
    lines = [
        f"{_named([one])} refused {one.refused:,} requests, {one.refused - least:,} more than others"
        for one in reports
        if one.refused > least
    ]
    lines += _quickest(served)
    if len(served) > 1 and not any(one.evicted_pages["device"] for one in served):
        lines.append(
            "no page left device memory, so that retention policies had nothing to decide: "
            "less room (`--pages`) or more requests tell them apart"
        )
    return lines


def _quickest(reports: Sequence[Report]) -> list[str]:
    best = min(reports, key=lambda one: one.ttft_s.mean)
    mean_s = best.ttft_s.mean
    quick = [one for one in reports if one.ttft_s.mean <= mean_s * (1 + _ALIKE)]
    rest = [one for one in reports if one not in quick]
    most = max(quick, key=lambda one: one.hit_rate)
    each = f"a first token after {mean_s:.3f} s on average, hit rate {most.hit_rate:.4f}"
    if len(quick) > 1:
        lines = [f"{_named(quick)} are alike: {each}"]
    else:
        lines = [f"{_named(quick)} is the quickest: {each}"]
    if rest:
        second = min(rest, key=lambda one: one.ttft_s.mean)
        sooner = 1 - mean_s / second.ttft_s.mean
        lines[0] += (
            f"; {_named([second])}, which is next, takes {second.ttft_s.mean:.3f} s "
            f"({sooner:.0%} is saved)"
        )
        finder = max(rest, key=lambda one: one.hit_rate)
        if finder.hit_rate > most.hit_rate * (1 + _ALIKE):
            lines.append(f"{_named([finder])} computes least: hit rate {finder.hit_rate:.4f}")
        steady = min(rest, key=lambda one: one.ttft_s.p99)
        if steady.ttft_s.p99 * (1 + _ALIKE) < min(one.ttft_s.p99 for one in quick):
            lines.append(
                f"{_named([steady])} has the shortest of long waits: p99 {steady.ttft_s.p99:.3f} s"
            )
    return lines


def _named(reports: Sequence[Report]) -> str:
    names = [f"`{one.name}`" for one in reports]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
