"""Line and bar plots as SVG, drawn by matplotlib; on a page they take the page's colours."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe & Ito 2008: told apart by everyone.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c7f13")
_INK, _GRID = "#333334", "#ddddde"  # nobody else's: inline() puts the page's in their place
_WIDTH, _LEGEND_ROW, _PLOT, _BAR_ROW = 7.5, 0.2, 2.9, 0.27  # inches
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "castor",  # the same picture for the same figures
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}color": _INK for part in ("edge", "label")},
}

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
    """One plot with its axes. A log scale takes positive values only."""

    title: str
    x_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    x_names: Sequence[tuple[float, str]] = ()
    """Ticks of the horizontal axis in place of round numbers."""

    @property
    def height(self) -> float:
        """Inches, the names of the curves included."""
        return _PLOT + _LEGEND_ROW * ((len(self.lines) + 1) // 2)

    def draw(self, axes: Axes) -> None:
        """Everything but the title."""
        for line in self.lines:
            style = (0, (4, 3)) if line.dashed else "-"
            axes.plot(line.x, line.y, color=line.colour, linestyle=style, label=line.name)
        axes.set(xlabel=self.x_label, xscale=self.x_scale, yscale=self.y_scale)
        plain = FuncFormatter(lambda value, _: f"{value:,.6g}")
        for axis, scale in ((axes.xaxis, self.x_scale), (axes.yaxis, self.y_scale)):
            if scale == "log":
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(plain)
        if self.x_names:
            ticks, names = zip(*self.x_names, strict=True)
            axes.set_xticks(ticks, names)
        axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)


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
    def height(self) -> float:
        """Inches."""
        return 0.4 + _BAR_ROW * len(self.bars)

    def draw(self, axes: Axes) -> None:
        """Everything but the title."""
        values = [bar.value for bar in self.bars]
        rows = range(len(values))
        axes.barh(rows, values, color=[bar.colour for bar in self.bars], height=0.7)
        for row, bar in enumerate(self.bars):
            axes.plot([bar.low, bar.high], [row, row], color=_INK)
            end = max(bar.value, bar.high)
            axes.annotate(
                f"{bar.value:.3g} {self.unit}", (end, row), (5, 0), textcoords="offset points",
                va="center",
            )  # fmt: skip
        axes.set_yticks(rows, [bar.name for bar in self.bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(max(bar.value, bar.high) for bar in self.bars))
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)


def _svg(plots: Sequence[Panel | Bars], *, transparent: bool) -> str:
    heights = [plot.height for plot in plots]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        rows = figure.subplots(len(plots), squeeze=False, height_ratios=heights)[:, 0]
        for plot, axes in zip(plots, rows, strict=True):
            plot.draw(axes)
            for artist in axes.findobj():
                artist.set_clip_on(False)  # all of it is inside, and a page needs no clip paths
            legend = _LEGEND_ROW * ((len(plot.lines) + 1) // 2) if isinstance(plot, Panel) else 0
            axes.set_title(plot.title, pad=4 + 72 * legend)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=transparent)
    return text.getvalue()


def write_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Writes the panels below each other, on white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_svg(panels, transparent=False), encoding="utf-8")


def inline(plot: Panel | Bars) -> str:
    """An SVG element for a page with the colours --ink and --grid."""
    text = _svg([plot], transparent=True)
    text = text[text.index("<svg") :].replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # part of an HTML page
    # Identifiers are of the whole page.
    mark = f"p{zlib.crc32(plot.title.encode()):x}"
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{mark}-", text)
    label = escape(plot.title, quote=True)
    return re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
        rf'<svg class="chart" viewBox="\1" role="img" aria-label="{label}">',
        text,
        count=1,
    )
