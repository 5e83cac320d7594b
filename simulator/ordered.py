"""What came of cluster policies' orders, in lines that a person reads.

Covers the lines. Does not cover the numbers (`pie.simulator.report`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.simulator.report import Report

_OUTCOMES = frozenset({"done", "refuse", "fail"})
_MOST_REASONS = 5


def given(report: Report) -> int:
    """Return how many orders were given."""
    counts = report.orders.by_policy.values()
    return sum(n for one in counts for action, n in one.items() if action not in _OUTCOMES)


def refused(report: Report) -> int:
    """Return how often an order was refused, as far as that was told."""
    return sum(one.get("refuse", 0) for one in report.orders.by_policy.values())


def orders_told(reports: Sequence[Report]) -> list[str]:
    """Return what policies ordered, what was moved for it and what was refused; nothing where none did."""
    lines: list[str] = []
    for report in reports:
        for policy, counts in report.orders.by_policy.items():
            told = ", ".join(f"{action} {count:,}" for action, count in counts.items())
            lines.append(f"{report.name}: {policy}: {told}")
        if report.orders.bytes_moved:
            moved = report.orders.bytes_moved.items()
            told = ", ".join(f"{kind} {size / 1e9:,.1f} GB" for kind, size in moved)
            lines.append(f"{report.name}: moved by orders: {told}")
        reasons = sorted(report.orders.refusals.items(), key=lambda one: (-one[1], one[0]))
        lines += [
            f"{report.name}: refused or failed {count:,} times: {why}"
            for why, count in reasons[:_MOST_REASONS]
        ]
        if len(reasons) > _MOST_REASONS:
            lines.append(f"{report.name}: and for {len(reasons) - _MOST_REASONS} more reasons")
        lines += [
            f"{report.name}: {policy} failed {count:,} times, and what is built in decided then"
            for policy, count in report.policy_failures.items()
        ]
        lines += [
            f"{report.name}: {one.late:,} of {one.answers:,} answers of {policy} took over "
            f"{one.deadline_ms:g} ms of real time; {one.instead}"
            for policy, one in report.late_answers.items()
            if one.late
        ]
        lines += [f"{report.name}: not simulated: {what}" for what in report.not_simulated]
        if report.pages_lost:
            lines.append(
                f"{report.name}: {report.pages_lost:,} pages left with the only worker that had them"
            )
    return lines
