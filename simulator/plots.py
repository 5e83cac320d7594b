"""A report as one HTML page: figures side by side and four plots, nothing loaded from elsewhere.

Covers the page. Does not cover a plot's lines and axes (`pie.simulator.svg`) or the numbers
(`pie.simulator.report`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from pie.simulator.ordered import given, refused
from pie.simulator.report import Moment, Report
from pie.simulator.svg import COLOURS, Line, bars, lines

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --dim: #5b6470; --rule: #d9dde2; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --dim: #9aa3ad; --rule: #3a4048; --back: #16181b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
p { color: var(--dim); margin: .2rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { vertical-align: bottom; }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
svg .rule { stroke: var(--rule); } svg .line { fill: none; stroke-width: 2; }
"""

_Row = tuple[str, Callable[[Report], str]]

_ROWS: Sequence[_Row] = (
    ("requests", lambda one: f"{one.requests:,}"),
    ("refused", lambda one: f"{one.refused:,}"),
    ("hit rate", lambda one: f"{one.hit_rate:.4f}"),
    ("… from device memory", lambda one: _of(one.hit_rate_by_source, "device")),
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
    ("… moved", lambda one: f"{sum(one.orders.bytes_moved.values()) / 1e9:,.1f} GB"),
    ("pages evicted", lambda one: f"{sum(one.evicted_pages.values()):,}"),
    ("moved", lambda one: f"{sum(one.bytes_moved.values()) / 1e9:,.1f} GB"),
    ("kept", lambda one: f"{sum(one.storage_gb_hours.values()):,.1f} GB h"),
    ("simulated time", lambda one: f"{one.simulated_s:,.0f} s"),
)


def html_page(title: str, reports: Sequence[Report]) -> str:
    """Return the page about some reports on one trace."""
    heads = "".join(
        f'<th><span class="key" style="background:{_colour(at)}"></span>{escape(one.name)}</th>'
        for at, one in enumerate(reports)
    )
    rows = "".join(
        f"<tr><td>{label}</td>{''.join(f'<td>{shown(one)}</td>' for one in reports)}</tr>"
        for label, shown in _ROWS
    )
    waits = [
        Line(one.name, [(at / 100, s) for at, s in enumerate(one.ttft_quantiles_s)], _colour(at_))
        for at_, one in enumerate(reports)
    ]
    hits = [_moments(one, at, lambda moment: moment.hit_rate) for at, one in enumerate(reports)]
    means = [_moments(one, at, lambda moment: moment.ttft_s) for at, one in enumerate(reports)]
    loads = [
        (one.name, [worker.computed_tokens for worker in one.workers], _colour(at))
        for at, one in enumerate(reports)
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
<h2>Time to first token</h2><p>Seconds that so large a share of the requests waited no longer than.</p>
{lines(waits, x_label="share of requests", y_label="seconds", logarithmic=True)}
<h2>Hit rate over time</h2><p>Share of the prompt tokens of requests that arrived then that were not
computed.</p>
{lines(hits, x_label="seconds", y_label="share")}
<h2>Time to first token over time</h2><p>Mean of the requests that arrived then.</p>
{lines(means, x_label="seconds", y_label="seconds", logarithmic=True)}
<h2>Load</h2><p>Prompt tokens that each worker computed.</p>
{bars(loads, y_label="tokens")}
</body></html>
"""


def _moments(report: Report, at: int, value: Callable[[Moment], float]) -> Line:
    points = [(moment.from_s, value(moment)) for moment in report.moments if moment.requests]
    return Line(report.name, points, _colour(at))


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _of(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.4f}" if name in values else "–"
