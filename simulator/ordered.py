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
            lines.append(f"{report.name}: orders of {policy}: {told}")
        if report.orders.bytes_moved:
            moved = report.orders.bytes_moved.items()
            told = ", ".join(f"{kind} {size / 1e9:,.1f} GB" for kind, size in moved)
            lines.append(f"{report.name}: moved by orders: {told}")
        reasons = sorted(report.orders.refusals.items(), key=lambda one: (-one[1], one[0]))
        lines += [
            f"{report.name}: refused or failed {_times(count)}: {why}"
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
        if report.pages_lost:
            lines.append(
                f"{report.name}: {report.pages_lost:,} pages left with the only worker that had them"
            )
    return lines + notes([(one.name, one.not_simulated) for one in reports], "not simulated: ")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def notes(said: Sequence[tuple[str, Sequence[str]]], begins: str = "") -> list[str]:
    """Return what is said of sets of policies, each with their names before it; `all` where it is said of each.

    Args:
        said: The names, each with what is said of it.
        begins: What each begins with.
    """
    by_text: dict[str, list[str]] = {}
    for name, texts in said:
        for text in texts:
            by_text.setdefault(text, []).append(name)
    return [
        f"{'all' if len(names) == len(said) > 1 else ', '.join(names)}: {begins}{text}"
        for text, names in by_text.items()
    ]
