"""Scaling curves as one self-contained page: no network, no scripts, no libraries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from castor.planner.layout_report import BOUNDS, exposed_of, ranks_of, schedule_of
from castor.planner.scaling import Point, Scaling, first_that_fits

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 14, 48
_FEW_DECADES = 3
_COLOURS = {
    "compute": "--param",
    "exchange": "--grad",
    "reduce": "--demand",
    "copies": "--exp_avg",
    "update": "--master",
    "nvme": "--scales",
    "bubble": "--nonmodel",
    "processors": "--exp_avg_sq",
    "dram": "--resident",
}
"""Colours of the resources of LayoutCost.busy: names of variables in page.css."""
HEADINGS = ("ranks", "samples", "step s", "exposed", "tokens/s", "of linear",
            "layout", "micro-batches", "bound by")  # fmt: skip
"""Columns of a table of points; the first six are numbers."""

_LINES = {"simulated": "series", "linear": "budget"}
"""Legend of the chart of speeds: names of lines, and their classes in page.css."""
_STYLE = """
.plot svg text { font-size: 13px; }
@media (max-width: 560px) { .plot svg text { font-size: 22px; } }
"""
"""Style of the charts' texts: charts scale with the page, so a telephone needs larger texts."""


def scaling_page(found: Scaling, model: str, title: str, remarks: Sequence[str]) -> str:
    """Returns the HTML of the page.

    Args:
        found: The curves.
        model: Name of the model's class.
        title: One line about the model's size and the cluster.
        remarks: Remarks on all curves, a paragraph each; empty ones are left out.
    """
    style = (resources.files("castor.report") / "page" / "page.css").read_text(encoding="utf-8")
    curves = (
        ("Weak scaling", "as many samples a rank everywhere", found.weak),
        ("Strong scaling", "as many samples in all", found.strong),
    )
    sections = "\n".join(_section(*curve) for curve in curves)
    notes = "\n".join(f'<p class="note">{escape(remark)}</p>' for remark in remarks if remark)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>castor scaling: {escape(model)}, {escape(title)}</title>
<style>
{style}{_STYLE}</style>
</head>
<body>
<main>
<header><h1>Simulated scaling of {escape(model)}</h1><p>{escape(title)}</p></header>
{sections}
<section class="card" aria-label="Remarks">{notes}</section>
</main>
</body>
</html>
"""


def _section(name: str, how: str, points: list[Point]) -> str:
    first = first_that_fits(points)
    if first is None:
        charts = '<p class="empty">The model fits on none of these.</p>'
    else:
        charts = (
            f'<div class="pair"><div><h3>Tokens per second</h3>{_legend_of_lines()}'
            f"{_speeds(points, first)}</div><div><h3>Shares of a step's time</h3>{_legend()}"
            f"{_shares(points)}</div></div>"
        )
    return (
        f'<section class="card"><h2>{name}</h2><p class="note">{how}</p>{charts}'
        f"{_table(points)}</section>"
    )


def _speeds(points: list[Point], first: Point) -> str:
    """Draws tokens per second over ranks, both on a log scale, beside linear scaling."""
    fitting = [point for point in points if point.cost]
    linear = [first.tokens_per_second / first.ranks * point.ranks for point in fitting]
    speeds = [point.tokens_per_second for point in fitting]
    low, high = math.log2(min(speeds)), math.log2(max(*linear, *speeds))
    high = max(high, low + 1)
    xs = {point.ranks: x for point, x in zip(points, _places(len(points)), strict=True)}

    def y(value: float) -> float:
        return _TOP + (high - math.log2(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def path(values: list[float]) -> str:
        pairs = zip(fitting, values, strict=True)
        return "M" + "L".join(f"{xs[p.ranks]:.1f},{y(value):.1f}" for p, value in pairs)

    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" '
        f'y2="{y(value):.1f}"/><text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" '
        f'text-anchor="end">{_short(value)}</text>'
        for value in _round_numbers(2.0**low, 2.0**high)
    )
    dots = "".join(
        f'<circle class="dot" cx="{xs[p.ranks]:.1f}" cy="{y(value):.1f}" r="3.5">'
        f"<title>{p.ranks} ranks: {_short(value)} tokens/s, {p.of_linear(first):.0%} of linear"
        "</title></circle>"
        for p, value in zip(fitting, speeds, strict=True)
    )
    return _svg(
        f'{grid}{_axis(points)}<path class="budget" fill="none" d="{path(linear)}"/>'
        f'<path class="series" d="{path(speeds)}"/>{dots}',
        "tokens per second over ranks; dashed: linear",
    )


def _shares(points: list[Point]) -> str:
    """Draws the shares of a step's seconds by resource, a column for each number of ranks."""
    height = _HEIGHT - _TOP - _BOTTOM
    wide = 0.7 * (_WIDTH - _LEFT - _RIGHT) / len(points)
    parts = [_axis(points)]
    for point, x in zip(points, _places(len(points)), strict=True):
        if not point.cost:
            continue
        total, top = sum(point.cost.busy.values()), float(_TOP)
        for name, seconds in point.cost.busy.items():
            tall = seconds / total * height
            parts.append(
                f'<rect x="{x - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{tall:.1f}" style="fill:var({_COLOURS[name]})">'
                f"<title>{point.ranks} ranks: {BOUNDS[name]} {seconds / total:.0%}</title></rect>"
            )
            top += tall
    return _svg("".join(parts), "shares of a step's seconds over ranks")


def _legend_of_lines() -> str:
    return _legend_of(
        f'<span class="plot" style="width:auto"><svg width="22" height="10" aria-hidden="true">'
        f'<path class="{line}" fill="none" d="M1 5H21"/></svg>{name}</span>'
        for name, line in _LINES.items()
    )


def _legend() -> str:
    return _legend_of(
        f'<span><svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" rx="2" '
        f'style="fill:var({colour})"/></svg>{BOUNDS[name]}</span>'
        for name, colour in _COLOURS.items()
    )


def _legend_of(entries: Iterator[str]) -> str:
    return f'<div class="legend">{"".join(entries)}</div>'


def rows(points: list[Point]) -> Iterator[tuple[str, ...]]:
    """Yields the texts of a table's rows, under HEADINGS."""
    first = first_that_fits(points)
    for point in points:
        counts = f"{point.ranks:,}", f"{point.batch:,}"
        if point.cost is None or first is None:
            yield (*counts, *[""] * 4, "no layout fits", "", "")
        else:
            yield (
                *counts,
                f"{point.cost.seconds:.3g}",
                exposed_of(point.cost),
                f"{point.tokens_per_second:,.0f}",
                f"{point.of_linear(first):.0%}",
                ranks_of(point.cost.layout),
                schedule_of(point.cost.layout),
                BOUNDS[point.cost.bound],
            )


def _table(points: list[Point]) -> str:
    head = "".join(f"<th>{name}</th>" for name in HEADINGS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows(points)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _places(count: int) -> list[float]:
    """Returns evenly spaced x coordinates of columns, since ranks double."""
    step = (_WIDTH - _LEFT - _RIGHT) / count
    return [_LEFT + (n + 0.5) * step for n in range(count)]


def _axis(points: list[Point]) -> str:
    bottom = _HEIGHT - _BOTTOM
    ticks = "".join(
        f'<text x="{x:.1f}" y="{bottom + 21}" text-anchor="middle">{point.ranks}</text>'
        for point, x in zip(points, _places(len(points)), strict=True)
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return (
        f'<line class="frame" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
        f'{ticks}<text x="{middle:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">ranks</text>'
    )


def _svg(body: str, label: str) -> str:
    return (
        f'<div class="plot"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'aria-label="{label}">{body}</svg></div>'
    )


def _round_numbers(low: float, high: float) -> list[float]:
    """Returns the round numbers from `low` to `high`: powers of ten, and 2 and 5 times them.

    From three decades on there are powers of ten only.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < _FEW_DECADES else (1,)
    return [f * 10.0**n for n in powers for f in factors if low <= f * 10.0**n <= high]


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
