"""Line plots as self-contained SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe & Ito 2008: told apart by everyone
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 300, 76, 16, 40, 44
_STYLE = """
text { font: 12px sans-serif; fill: #333; } .title { font-size: 14px; font-weight: bold; }
.grid { stroke: #ddd; } .axis { stroke: #888; } .line { fill: none; stroke-width: 1.6; }
.page { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; } .grid { stroke: #333; } .axis { stroke: #777; } .page { fill: #181818; }
}
"""


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
    """One plot with its axes."""

    title: str
    x_label: str
    lines: Sequence[Line]


def write_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels below each other."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT * len(panels)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT * len(panels)}"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0 {i * _HEIGHT})">')
        parts += _draw(panel)
        parts.append("</g>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _draw(panel: Panel) -> list[str]:
    x_low, x_high = _range([value for line in panel.lines for value in line.x], 0.0)
    y_low, y_high = _range([value for line in panel.lines for value in line.y], 0.05)

    def at_x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text class="title" x="{_LEFT}" y="18">{panel.title}</text>']
    for tick in _ticks(y_low, y_high):
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    bottom = _HEIGHT - _BOTTOM
    for tick in _ticks(x_low, x_high):
        parts.append(
            f'<text x="{at_x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{panel.x_label}</text>'
    )
    for i, line in enumerate(panel.lines):
        points = " ".join(
            f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in zip(line.x, line.y, strict=True)
        )
        dashes = ' stroke-dasharray="6 5"' if line.dashed else ""
        stroke = f'stroke="{line.colour}"{dashes}'
        parts.append(f'<polyline class="line" {stroke} points="{points}"/>')
        x = _LEFT + 150 * i
        parts.append(f'<line class="line" {stroke} x1="{x}" x2="{x + 24}" y1="30" y2="30"/>')
        parts.append(f'<text x="{x + 30}" y="34">{line.name}</text>')
    return parts


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high == low:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 10)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]
