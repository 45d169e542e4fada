"""Shows the layouts that a search found, as a table, as JSON and as a plan's file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from castor.config.files import write_plan
from castor.estimate.estimator import size
from castor.estimate.workload import Workload
from castor.planner.cluster import Cluster
from castor.planner.layout_cost import Found, LayoutCost
from castor.planner.layout_search import LayoutSearch
from castor.planner.layouts import Layout

BOUNDS = {
    "compute": "computing",
    "exchange": "exchange in layers",
    "reduce": "exchange of gradients",
    "copies": "chunks from host",
    "update": "Adam",
    "nvme": "NVMe",
    "bubble": "idle stages",
    "processors": "processors",
    "dram": "host memory",
}
"""Texts for the resources of LayoutCost.busy."""


def search_and_show(
    config: Path,
    cluster: Path,
    workload: Workload,
    console: Console,
    *,
    shown: int,
    output: Path | None,
) -> Found:
    """Finds the fastest layouts, prints them, and writes the first one's plan.

    Args:
        config: Path of the model's config.json.
        cluster: Path of the cluster's description; see Cluster.of.
        workload: The step of all ranks together.
        console: The console that the table is printed on.
        shown: Number of layouts to find.
        output: Path of the plan, which is written if a layout fits; None: no plan is written.

    Returns:
        The result of the search.

    Raises:
        OSError: A file cannot be read or written.
        UsageError, ValueError, TypeError: A file has a wrong entry, the batch cannot be divided
            among the ranks, or the model cannot be recorded.
    """
    on = Cluster.read(cluster, workload.precision)
    search = LayoutSearch(config, workload)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing layouts", total=None)
        found = search.search(
            on,
            shown=shown,
            told=lambda done, every: progress.update(task, completed=done, total=every),
        )
    _render(found, search, workload, console)
    if output is not None and found.fitting:
        write_plan(output, plan_of(found.fitting[0], on, workload))
        console.print(
            f"The first one is in {escape(str(output))}: `castor run --plan` starts its ranks, and "
            f"HybridParallelPlugin('auto') shards the model so; batch_size is "
            f"{_samples(found.fitting[0].layout)}."
        )
    return found


def plan_of(cost: LayoutCost, cluster: Cluster, workload: Workload) -> dict[str, Any]:
    """Returns the contents of a plan's file, for write_plan."""
    return {
        "layout": arguments_of(cost, cluster),
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "batch_size": _samples(cost.layout),
        "workload": {
            "batch": workload.batch,
            "sequence": workload.sequence,
            "precision": workload.precision,
            "state_format": workload.state_format,
            "optimizer": workload.optimizer,
        },
        "predicted": {"step_seconds": cost.seconds, "device_bytes": cost.device_bytes,
                      "host_bytes": cost.host_bytes, "nvme_bytes": cost.nvme_bytes,
                      "bound": cost.bound},
    }  # fmt: skip


def arguments_of(cost: LayoutCost, cluster: Cluster) -> dict[str, Any]:
    """Returns HybridParallelPlugin's arguments; if NVMe is used, with the memory budgets."""
    found = cost.layout.arguments()
    if cost.reduction == "backend" and cluster.ranks > 1:
        found["reduction"] = "backend"
    elif cluster.reduce_on != "auto" and cluster.ranks > 1:
        found["reduce_on"] = cluster.reduce_on
    if cost.nvme_bytes:
        found |= {
            "host_memory": cluster.machine.host_bytes,
            "nvme_path": list(cluster.nvme_paths),
        }
        if cluster.machine.nvme_bytes is not None:
            found["nvme_memory"] = cluster.machine.nvme_bytes
    return found


def as_json(found: Found) -> dict[str, Any]:
    """Returns the figures that `castor plan --json` prints."""

    def figures(cost: LayoutCost) -> dict[str, Any]:
        return {
            "arguments": arguments_of(cost, found.cluster),
            "layout": asdict(cost.layout),
            "step_time_s": cost.seconds,
            "device_bytes": cost.device_bytes,
            "host_bytes": cost.host_bytes,
            "nvme_bytes": cost.nvme_bytes,
            "nvme_weight_bytes": cost.nvme_weight_bytes,
            "busy_s": cost.busy,
            "bound": cost.bound,
            "exposed_s": cost.exposed,
            "exposed_share": cost.exposed_share,
            "reduction": cost.reduction,
            "reduced_on": cost.reduced_on,
            "dram_bytes": cost.dram_bytes,
            "dram_s": cost.dram_seconds,
        }

    return {
        "fitting": [figures(cost) for cost in found.fitting],
        "too_large": [figures(cost) for cost in found.others],
        "refused": found.refused,
        "compared": found.compared,
    }


def _samples(layout: Layout) -> int:
    """Returns the samples of a step of one data-parallel replica."""
    return layout.rows * layout.microbatches


def ranks_of(layout: Layout) -> str:
    """Describes the parallel sizes of a layout, such as "tp 2, dp 4"."""
    sizes = {"tp": layout.dims.tp, "ep": layout.dims.ep, "sp": layout.dims.cp}
    sizes |= {"pp": layout.dims.pp, "dp": layout.dims.edp}
    found = [f"{name} {of}" for name, of in sizes.items() if of > 1]
    return ", ".join([*found, *filter(None, [layout.sequence_parallelism])]) or "one"


def exposed(seconds: float, share: float) -> str:
    """Describes the communication that no computing hides, such as "12.3 ms, 2.4%"."""
    return f"{1e3 * seconds:.3g} ms, {share:.1%}"


def exposed_of(cost: LayoutCost) -> str:
    """Describes the communication of a layout that no computing hides."""
    return exposed(cost.exposed, cost.exposed_share)


def dram_of(num_bytes: int, seconds: float, step_seconds: float) -> str:
    """Describes a node's traffic through host memory, such as "96.0 GiB, 0.52 s, 63%"."""
    return f"{size(num_bytes)}, {seconds:.3g} s, {seconds / step_seconds:.0%}"


def schedule_of(layout: Layout) -> str:
    """Describes the micro-batches and their rows, and the pipeline's schedule."""
    how = f"{layout.microbatches} x {layout.rows}"
    return f"{how} {layout.style}" if layout.dims.pp > 1 else how


def _render(found: Found, search: LayoutSearch, workload: Workload, console: Console) -> None:
    machine = found.cluster.machine
    console.print(
        f"{search.parameters / 1e9:.2f}B parameters, batch {workload.batch} x {workload.sequence} "
        f"tokens, {workload.precision}, {workload.optimizer}, state format {workload.state_format}"
    )
    console.print(
        f"on {found.cluster.nodes} x {found.cluster.ranks_per_node} ranks, each: "
        f"{escape(machine.name)}"
    )
    fits = bool(found.fitting)
    table = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title=None if fits else "No layout fits; those that lack least:",
    )
    # Columns are as wide as their longest word, so that the table fits a terminal of 80 columns.
    on_nvme = [("NVMe", 0)] if machine.nvme else []
    for heading, widest in (
        ("ranks", 12), ("micro-batches", 13), ("blocks", 9), ("device", 0), ("host", 0), *on_nvme,
        ("step s", 0), ("exposed", 0), ("bound by", 9),
    ):  # fmt: skip
        table.add_column(
            heading,
            justify="left" if widest else "right",
            no_wrap=not widest,
            min_width=widest or None,
        )
    for cost in found.fitting or found.others:
        table.add_row(
            ranks_of(cost.layout),
            schedule_of(cost.layout),
            cost.layout.activations,
            size(cost.device_bytes),
            size(cost.host_bytes),
            *([size(cost.nvme_bytes)] if on_nvme else []),
            f"{cost.seconds:.2f}" if fits else "",
            exposed_of(cost) if fits else "",
            BOUNDS[cost.bound] if fits else "",
        )
    console.print(table)
    console.print(
        f"{found.compared} layouts; a rank has {size(machine.device_bytes)} of device and "
        f"{size(machine.host_bytes)} of host memory"
        + (f", {size(machine.nvme_bytes)} of NVMe" if machine.nvme_bytes else "")
    )
    if fits:
        first = found.fitting[0]
        console.print(
            "Through a node's memory in a step of the first one: "
            f"{dram_of(first.dram_bytes, first.dram_seconds, first.seconds)} of it."
        )
        if found.cluster.reduction == "auto" and first.layout.dims.same_shard > 1:
            console.print(f"Its replicas reduce with reduction={first.reduction!r}.")
    if remark := found.cluster.remark():
        console.print(remark)
    for what, why in found.refused.items():
        console.print(f"[yellow]not with {escape(what)}:[/yellow] {escape(why)}")
