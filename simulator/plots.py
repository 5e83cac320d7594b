"""A report as one HTML page: figures side by side and four plots, nothing loaded from elsewhere.

Covers the page. Does not cover a plot's lines and axes (`pie.simulator.svg`) or the numbers
(`pie.simulator.report`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from pie.simulator.ordered import given, notes, refused
from pie.simulator.report import Moment, Report
from pie.simulator.svg import Line, bars, colour, dashes, lines
from pie.simulator.verdict import verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --dim: #5b6470; --rule: #d9dde2; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --dim: #9aa3ad; --rule: #3a4048; --back: #16181b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
p { color: var(--dim); margin: .2rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
th[scope=row] { text-align: left; font-weight: normal; }
thead th { vertical-align: bottom; white-space: normal; overflow-wrap: break-word; min-width: 6rem;
  max-width: 14rem; }
td.words { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; max-width: 14rem; }
p.verdict { color: var(--ink); margin: .6rem 0; overflow-wrap: anywhere; }
ul { color: var(--dim); margin: .6rem 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; }
.legend span { overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px; }
svg { width: 100%; min-width: 700px; height: auto; display: block; }
svg text { fill: var(--dim); font: 14px system-ui, sans-serif; }
svg .rule { stroke: var(--rule); } svg .line { fill: none; stroke-width: 2; }
"""

_CAPITAL = re.compile(r"(?<=[a-z0-9:])(?=[A-Z])")

_ALWAYS = ("retention", "routing")
"""Kinds of policies that are named also where all sets have the same."""

_Row = tuple[str, Callable[[Report], str]]

_ROWS: Sequence[_Row] = (
    ("requests", lambda one: f"{one.requests:,}"),
    ("refused", lambda one: f"{one.refused:,}"),
    ("hit rate", lambda one: f"{one.hit_rate:.4f}"),
    ("… from device memory", lambda one: _of(one.hit_rate_by_source, "device")),
    ("… from host memory", lambda one: _of(one.hit_rate_by_source, "host")),
    ("… from the pool", lambda one: _of(one.hit_rate_by_source, "pool")),
    ("… as the router expected", lambda one: f"{one.predicted_hit_rate:.4f}"),
    ("time to first token, mean", lambda one: f"{one.ttft_s.mean:.3f} s"),
    ("… p50", lambda one: f"{one.ttft_s.p50:.3f} s"),
    ("… p90", lambda one: f"{one.ttft_s.p90:.3f} s"),
    ("… p99", lambda one: f"{one.ttft_s.p99:.3f} s"),
    (
        "busiest over mean, tokens computed",
        lambda one: _of(one.busiest_over_mean, "computed_tokens"),
    ),
    ("… requests", lambda one: _of(one.busiest_over_mean, "requests")),
    ("… time", lambda one: _of(one.busiest_over_mean, "busy_s")),
    ("orders of cluster policies", lambda one: f"{given(one):,}"),
    ("… refused", lambda one: f"{refused(one):,}"),
    ("… bytes moved for them", lambda one: f"{sum(one.orders.bytes_moved.values()) / 1e9:,.1f} GB"),
    ("pages evicted", lambda one: f"{sum(one.evicted_pages.values()):,}"),
    ("bytes loaded and stored", lambda one: f"{sum(one.bytes_moved.values()) / 1e9:,.1f} GB"),
    ("kept, all tiers together", lambda one: f"{sum(one.storage_gb_hours.values()):,.1f} GB h"),
    ("simulated time", lambda one: f"{one.simulated_s:,.0f} s"),
)


def html_page(title: str, reports: Sequence[Report], setup: str = "") -> str:
    """Return the page about some reports on one trace.

    Args:
        title: Of the page.
        reports: One for each set of policies.
        setup: What was simulated, in a line below the title.
    """
    heads = "".join(f'<th scope="col">{_key(at, one.name)}</th>' for at, one in enumerate(reports))
    rows = _named_policies(reports) + "".join(
        f'<tr><th scope="row">{label}</th>'
        f"{''.join(f'<td>{shown(one)}</td>' for one in reports)}</tr>"
        for label, shown in _ROWS
    )
    waits = [
        _line(one, at, [(share / 100, s) for share, s in enumerate(one.ttft_quantiles_s)])
        for at, one in enumerate(reports)
    ]
    hits = [_moments(one, at, lambda moment: moment.hit_rate) for at, one in enumerate(reports)]
    means = [_moments(one, at, lambda moment: moment.ttft_s) for at, one in enumerate(reports)]
    loads = [
        (one.name, [worker.computed_tokens for worker in one.workers], colour(at))
        for at, one in enumerate(reports)
    ]
    keys = "".join(f"<span>{_key(at, one.name)}</span>" for at, one in enumerate(reports))
    legend = f'<p class="legend">{keys}</p>'
    best = "".join(f'<p class="verdict">{escape(one)}.</p>' for one in verdict(reports))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(setup)}</p>
{best}
<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
{_notes(reports)}
<h2>Time to first token</h2><p>Seconds that so large a share of the requests waited no longer than.</p>
{legend}{lines(waits, x_label="share of requests", y_label="seconds", title="Time to first token", logarithmic=True)}
<h2>Hit rate over time</h2><p>Share of the prompt tokens of requests that arrived then that were not
computed.</p>
{legend}{lines(hits, x_label="seconds since the first request", y_label="share", title="Hit rate over time")}
<h2>Time to first token over time</h2><p>Mean of the requests that arrived then.</p>
{legend}{lines(means, x_label="seconds since the first request", y_label="seconds", title="Time to first token over time", logarithmic=True)}
<h2>Load</h2><p>Prompt tokens that each worker computed.</p>
{legend}{bars(loads, x_label="workers, the busiest in front", y_label="tokens", title="Load")}
</body></html>
"""


def _moments(report: Report, at: int, value: Callable[[Moment], float]) -> Line:
    points = [(moment.from_s, value(moment)) for moment in report.moments if moment.requests]
    return _line(report, at, points)


def _line(report: Report, at: int, points: Sequence[tuple[float, float]]) -> Line:
    return Line(report.name, points, colour(at), dashes(at))


def _key(at: int, name: str) -> str:
    """Return a name with its colour before it."""
    # A line may end before a capital, such as that of a class, rather than anywhere.
    parts = "<wbr>".join(escape(one) for one in _CAPITAL.split(name))
    return f'<span class="key" style="background:{colour(at)}"></span>{parts}'


def _named_policies(reports: Sequence[Report]) -> str:
    """Return rows of what the sets are, without those in which all are alike."""
    kinds = dict.fromkeys(kind for one in reports for kind in one.policies)
    rows = {kind: [one.policies.get(kind, "–") for one in reports] for kind in kinds}
    told = ""
    for kind, said in rows.items():
        if len(set(said)) > 1 or kind in _ALWAYS:
            cells = "".join(f'<td class="words">{escape(one)}</td>' for one in said)
            told += f'<tr><th scope="row">{escape(kind)}</th>{cells}</tr>'
    return told


def _notes(reports: Sequence[Report]) -> str:
    """Return what is to be known beside the figures; nothing where that is nothing."""
    told = notes([(one.name, one.warnings) for one in reports])
    told += notes([(one.name, one.not_simulated) for one in reports], "not simulated: ")
    items = "".join(f"<li>{escape(one)}</li>" for one in told)
    return f"<ul>{items}</ul>" if told else ""


def _of(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.4f}" if name in values else "–"
