"""Shows scaling curves as tables, as JSON and as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from castor.checkpoint.files import os_errors, write_file
from castor.estimate.workload import Workload
from castor.planner.cluster import Cluster
from castor.planner.layout_search import LayoutSearch
from castor.planner.scaling import Point, Scaling, scaling
from castor.planner.scaling_page import HEADINGS, rows, scaling_page

_REMARKS = (
    "Predicted, not measured: each row is the fastest layout that castor plan finds for as many "
    "ranks. A rank has the same share of its node everywhere. Of linear: tokens a second and rank, "
    "beside those on the fewest ranks that have room.",
    "Exposed is communication that no computing hides, in layers and between replicas: its "
    "milliseconds, and their share of the step.",
    "Idle stages, and processors that other ranks compute on, are waited for; all else is done.",
)


def scale_and_show(
    config: Path,
    cluster: Path,
    workload: Workload,
    console: Console,
    *,
    most: int,
    output: Path | None,
) -> Scaling:
    """Predicts steps on one rank to `most`, prints them, and writes the page.

    Args:
        config: Path of the model's config.json.
        cluster: Path of the cluster's description; see Cluster.of.
        workload: The step of the cluster as described.
        console: The console that the tables are printed on.
        most: Number of ranks of the last point, at most.
        output: Path of the page; None: no page is written.

    Returns:
        The curves.

    Raises:
        OSError: A file cannot be read or written.
        UsageError, ValueError, TypeError: See scaling, and castor.planner.layout_report.
    """
    on = Cluster.read(cluster, workload.precision)
    search = LayoutSearch(config, workload)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("searching layouts", total=None)
        found = scaling(
            search,
            on,
            most=most,
            told=lambda done, every: progress.update(task, completed=done, total=every),
        )
    title = (
        f"{search.parameters / 1e9:.2f}B parameters, {workload.sequence} tokens a sample, "
        f"{workload.precision}, on nodes of {on.ranks_per_node} ranks, each: {on.machine.name}"
    )
    console.print(escape(f"{search.model_name}, {title}"))
    if remark := on.remark():
        console.print(remark)
    for name, points in (("weak scaling", found.weak), ("strong scaling", found.strong)):
        console.print(_table(name, points))
    if output is not None:
        with os_errors(output, "write"):
            write_file(
                output,
                [scaling_page(found, search.model_name, title, [*_REMARKS, on.remark()]).encode()],
            )
        console.print(f"A page of this is in {escape(str(output))}.")
    return found


def as_json(found: Scaling) -> dict[str, Any]:
    """Returns the figures that `castor scaling --json` prints."""

    def figures(point: Point) -> dict[str, Any]:
        cost = point.cost
        return {
            "ranks": point.ranks,
            "batch": point.batch,
            "tokens_per_second": point.tokens_per_second if cost else None,
            "step_time_s": cost and cost.seconds,
            "layout": cost and asdict(cost.layout),
            "bound": cost and cost.bound,
            "exposed_s": cost and cost.exposed,
            "exposed_share": cost and cost.exposed_share,
            "busy_s": cost and cost.busy,
        }

    return {
        "weak": [figures(point) for point in found.weak],
        "strong": [figures(point) for point in found.strong],
    }


def _table(name: str, points: list[Point]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=name)
    for number, heading in enumerate(HEADINGS):
        is_number = number < 6
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows(points):
        table.add_row(*row)
    return table
