"""Lines and bars as SVG.

Covers two kinds of plot, in the few ways that a report needs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f6fd6", "#d9622b", "#2c9a6a", "#a04bc4", "#b8860b", "#c23b5a", "#4a8fa8", "#7a7f87")
"""Told apart in light and dark, and by most who see colours otherwise."""

_WIDTH, _HEIGHT = 1000, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 34, 46
_MOST_BARS = 400
_WIDEST_BAR = 60.0
_MOST_DECADES = 8
"""Of a logarithmic axis with more of them not each has a rule."""
_DASHES = ("", "7 4", "2 3")
"""Where there are more lines than colours, the next ones are dashed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashes: str = ""


def colour(at: int) -> str:
    """Return the colour of one of several."""
    return COLOURS[at % len(COLOURS)]


def dashes(at: int) -> str:
    """Return how the line of one of several is broken; it is whole where that is empty."""
    return _DASHES[at // len(COLOURS) % len(_DASHES)]


def lines(
    drawn: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    logarithmic: bool = False,
) -> str:
    """Return a plot of lines; with a logarithmic axis, values that are not above 0 are left out.

    Args:
        drawn: The lines.
        x_label: What is told from left to right, with its unit.
        y_label: What is told upwards, with its unit.
        title: What is shown, for whoever does not see it.
        logarithmic: Whether the upright axis is.
    """
    points = [point for line in drawn for point in line.points if not logarithmic or point[1] > 0]
    if not points:
        return "<p>Nothing to show.</p>"
    x_from, x_to = min(x for x, _ in points), max(x for x, _ in points)
    y_axis = _log_axis([y for _, y in points]) if logarithmic else _axis(max(y for _, y in points))
    body = [_grid(y_axis, y_label)]
    for x in _steps(x_from, x_to):
        at = _x(x, x_from, x_to)
        body.append(
            f'<text x="{at:.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{_short(x)}</text>'
        )
    body.append(_below(x_label))
    for line in drawn:
        places = [
            (_x(x, x_from, x_to), y_axis.place(y))
            for x, y in line.points
            if not logarithmic or y > 0
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashed = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        body.append(
            f'<polyline class="line" stroke="{line.colour}"{dashed} points="{path}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
        if len(places) == 1:
            # A line of one point is not seen.
            [(x, y)] = places
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>')
    names = ", ".join(line.name for line in drawn)
    return _svg(body, title, f"{y_label}, by {x_label}: {names}")


def bars(
    groups: Sequence[tuple[str, Sequence[float], str]],
    *,
    y_label: str,
    x_label: str = "",
    title: str = "",
) -> str:
    """Return bars, a group for each name; the largest of them where there are very many."""
    drawn = [
        (name, sorted(values, reverse=True)[: _MOST_BARS // max(1, len(groups))], colour)
        for name, values, colour in groups
    ]
    count = sum(len(values) for _, values, _ in drawn) + len(drawn) - 1
    if not any(values for _, values, _ in drawn):
        return "<p>Nothing to show.</p>"
    y_axis = _axis(max(max(values, default=0.0) for _, values, _ in drawn))
    body = [_grid(y_axis, y_label)]
    body.append(_below(x_label))
    width = min(_WIDEST_BAR, (_WIDTH - _LEFT - _RIGHT) / count)
    at = float(_LEFT)
    floor = _HEIGHT - _BOTTOM
    for name, values, colour in drawn:
        for value in values:
            top = y_axis.place(value)
            body.append(
                f'<rect x="{at + 0.1 * width:.1f}" y="{top:.1f}" width="{0.8 * width:.1f}" '
                f'height="{floor - top:.1f}" fill="{colour}">'
                f"<title>{escape(name)}: {_short(value)}</title></rect>"
            )
            at += width
        at += width
    told = (f"{name}, at most {_short(max(values))}" for name, values, _ in drawn if values)
    return _svg(body, title, f"{y_label}, by {x_label}: {', '.join(told)}")


@dataclass(frozen=True, slots=True)
class _Axis:
    """The upright axis."""

    least: float
    most: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value is, from the top."""
        if self.logarithmic:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axis(most: float) -> _Axis:
    ticks = _steps(0.0, most or 1.0)
    return _Axis(0.0, max(most or 1.0, ticks[-1]), ticks)


def _log_axis(values: Sequence[float]) -> _Axis:
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    every = math.ceil((high - low) / _MOST_DECADES)
    return _Axis(10.0**low, 10.0**high, [10.0**at for at in range(low, high + 1, every)], True)


def _grid(axis: _Axis, label: str) -> str:
    # Above the highest number, and not beside it.
    parts = [f'<text x="4" y="14">{escape(label)}</text>']
    for tick in axis.ticks:
        y = axis.place(tick)
        parts.append(
            f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        )
    return "".join(parts)


def _steps(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / 4))
    step = next(step * by for by in (1, 2, 5, 10) if span / (step * by) <= 5)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _x(x: float, x_from: float, x_to: float) -> float:
    share = (x - x_from) / (x_to - x_from) if x_to > x_from else 0.5
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


def _below(label: str) -> str:
    return (
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )


def _svg(body: Sequence[str], title: str, told: str) -> str:
    label = escape(f"{title}. {told}" if title else told)
    return (
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"<desc>{label}</desc>{''.join(body)}</svg></div>"
    )
