"""Line and bar plots as self-contained SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

# Okabe & Ito 2008: told apart by everyone.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c7f13")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 76, 32, 24, 44
_LEGEND_ROW, _CHARACTER = 18, 6.6  # pixels: of a row of names, about of a character
_BAR_ROW, _BAR_FIGURE = 26, 90  # of a bar: its height, and what its figure takes beside it
_STYLE = """
text { font: 12px sans-serif; fill: #333; } .title { font-size: 14px; font-weight: bold; }
.grid { stroke: #ddd; } .axis { stroke: #888; } .line { fill: none; stroke-width: 1.6; }
.page { fill: #fff; } .spread { stroke: #333; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; } .grid { stroke: #333; } .axis { stroke: #777; } .page { fill: #181818; }
  .spread { stroke: #ddd; }
}
"""

Scale = Literal["linear", "log"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve; `y` has a value for each of `x`."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot with its axes. A log scale takes positive values only and ticks by powers of 10."""

    title: str
    x_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_names: Sequence[tuple[float, str]] = ()
    """Ticks of the horizontal axis in place of round numbers."""

    @property
    def height(self) -> int:
        """Pixels, the rows of curve names included."""
        return _HEIGHT + _LEGEND_ROW * len(_legend_rows(self.lines))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar from 0 to `value`, and the range that values spread over."""

    name: str
    value: float
    low: float
    high: float
    colour: str = COLOURS[0]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars below each other; all values are positive."""

    title: str
    unit: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        """Pixels."""
        return _TOP + _BAR_ROW * len(self.bars) + 12


def write_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels below each other, with their own colours for light and dark pages."""
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
    ]
    top = 0
    for panel in panels:
        parts += [f'<g transform="translate(0 {top})">', *_draw(panel), "</g>"]
        top += panel.height
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def inline(plot: Panel | Bars) -> str:
    """An SVG element for a page, which styles the classes title, grid, axis, line and spread."""
    parts = _draw(plot) if isinstance(plot, Panel) else _draw_bars(plot)
    label = escape(plot.title, quote=True)
    head = f'<svg class="chart" viewBox="0 0 {_WIDTH} {plot.height}" role="img"'
    return "\n".join([f'{head} aria-label="{label}">', *parts, "</svg>"])


def _draw(panel: Panel) -> list[str]:
    x_low, x_high = _range([value for line in panel.lines for value in line.x], panel.x_scale, 0.0)
    y_low, y_high = _range([value for line in panel.lines for value in line.y], panel.y_scale, 0.05)
    top = _TOP + panel.height - _HEIGHT
    bottom = panel.height - _BOTTOM

    def at_x(value: float) -> float:
        part = (_scaled(value, panel.x_scale) - x_low) / (x_high - x_low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return bottom - (_scaled(value, panel.y_scale) - y_low) / (y_high - y_low) * (bottom - top)

    parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(panel.title)}</text>']
    for tick, name in _ticks(y_low, y_high, panel.y_scale):
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for tick, name in panel.x_names or _ticks(x_low, x_high, panel.x_scale):
        parts.append(
            f'<text x="{at_x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{panel.height - 8}" text-anchor="middle">'
        f"{escape(panel.x_label)}</text>"
    )
    for line in panel.lines:
        points = " ".join(
            f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(line.x, line.y, strict=True)
        )
        parts.append(f'<polyline class="line" {_stroke(line)} points="{points}"/>')
    for row, entries in enumerate(_legend_rows(panel.lines)):
        y = 34 + row * _LEGEND_ROW
        for x, line in entries:
            parts.append(
                f'<line class="line" {_stroke(line)} x1="{x:.0f}" x2="{x + 24:.0f}" '
                f'y1="{y - 4}" y2="{y - 4}"/>'
            )
            parts.append(f'<text x="{x + 30:.0f}" y="{y}">{escape(line.name)}</text>')
    return parts


def _draw_bars(plot: Bars) -> list[str]:
    highest = max(max(bar.value, bar.high) for bar in plot.bars)
    left = 8 + int(_CHARACTER * max(len(bar.name) for bar in plot.bars))

    def at(value: float) -> float:
        return left + value / highest * (_WIDTH - left - _BAR_FIGURE)

    parts = [f'<text class="title" x="0" y="16">{escape(plot.title)}</text>']
    for row, bar in enumerate(plot.bars):
        y = _TOP + row * _BAR_ROW
        middle = y + _BAR_ROW / 2
        parts += [
            f'<text x="{left - 8}" y="{middle + 4}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{left}" y="{y + 4}" width="{at(bar.value) - left:.1f}" '
            f'height="{_BAR_ROW - 8}" fill="{bar.colour}"/>',
            f'<line class="spread" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" '
            f'y1="{middle}" y2="{middle}"/>',
            f'<text x="{at(max(bar.value, bar.high)) + 6:.1f}" y="{middle + 4}">'
            f"{bar.value:.3g} {escape(plot.unit)}</text>",
        ]
    return parts


def _stroke(line: Line) -> str:
    dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
    return f'stroke="{line.colour}"{dashes}'


def _legend_rows(lines: Sequence[Line]) -> list[list[tuple[float, Line]]]:
    """Rows of (left edge, line), as many names in each as fit."""
    rows: list[list[tuple[float, Line]]] = [[]]
    x = float(_LEFT)
    for line in lines:
        width = 48 + _CHARACTER * len(line.name)
        if rows[-1] and x + width > _WIDTH - _RIGHT:
            rows.append([])
            x = float(_LEFT)
        rows[-1].append((x, line))
        x += width
    return rows


def _scaled(value: float, scale: Scale) -> float:
    return math.log10(value) if scale == "log" else value


def _range(values: Sequence[float], scale: Scale, margin: float) -> tuple[float, float]:
    low, high = _scaled(min(values), scale), _scaled(max(values), scale)
    if high == low:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(low: float, high: float, scale: Scale) -> list[tuple[float, str]]:
    """Round numbers inside the range, with their names; of a log scale some of each power of 10."""
    if scale == "log":
        powers = range(math.floor(low), math.ceil(high) + 1)
        factors = (1, 2, 5) if high - low > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        values = [factor * 10.0**power for power in powers for factor in factors]
        inside = [value for value in values if low <= math.log10(value) <= high]
        return [(value, f"{value:,.10g}") for value in inside]
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 10)
    first = math.ceil(low / step)
    values = [i * step for i in range(first, math.floor(high / step) + 1)]
    return [(value, f"{value:g}") for value in values]
