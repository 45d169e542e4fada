"""Estimates data-parallel replicas on a cluster (`castor estimate --nproc`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castor.errors import UsageError
from castor.estimate.estimator import size
from castor.estimate.workload import Workload
from castor.planner.cluster import Cluster
from castor.planner.layout_report import BOUNDS, dram_of, exposed
from castor.planner.layout_search import LayoutSearch
from castor.planner.layouts import Layout, LayoutActivations
from castor.planner.replicas import sent_between_replicas
from castor.runtime.engine import WORKING_DTYPES
from castor.runtime.parallel_dims import ParallelDims


@dataclass(frozen=True, kw_only=True)
class RanksEstimate:
    """Estimate of a step, with the memory of each rank."""

    fits: bool
    """Whether each rank has room for the step."""
    device_bytes: int
    """Device bytes that a rank needs at least, with streamed chunks."""
    host_bytes: int
    """Host bytes of a rank; weights and gradients that ranks share count by the rank's share."""
    nvme_bytes: int
    """NVMe bytes of a rank."""
    step_time_s: float
    """Seconds of the step, whether it fits or not."""
    bound: str
    """Resource that takes longest; see LayoutCost.busy."""
    tokens_per_s: float
    """Tokens per second of all ranks."""
    busy_s: dict[str, float]
    """Seconds of the step by resource; see LayoutCost.busy."""
    exposed_s: float
    """Seconds of communication that no computing hides."""
    exposed_share: float
    """Share of the step that they take."""
    reduction: str
    """GeminiPlugin's reduction with which the step is predicted."""
    reduced_on: str
    """Place where gradients are reduced: "device" or "host"."""
    dram_bytes: int
    """Bytes that the ranks of a node move through its memory in a step; see LayoutCost."""
    dram_s: float
    """Seconds that these take of the memory's bandwidth."""
    node_bytes: int
    """Bytes of gradients and weights that a rank sends to others of its node."""
    network_bytes: int
    """Bytes of gradients and weights that a rank sends to other nodes."""

    def as_json(self) -> dict[str, Any]:
        """Returns the figures that `castor estimate --nproc N --json` prints."""
        return asdict(self)


def estimate_ranks(config: Path, workload: Workload, cluster: Cluster) -> RanksEstimate:
    """Predicts a step with one data-parallel replica on each rank (ZeRO).

    Args:
        config: Path of the model's config.json.
        workload: The workload of each rank.
        cluster: The cluster.

    Raises:
        UsageError: The workload has an option that is not predicted for several ranks.
        OSError, ValueError, ModuleNotFoundError: See castor.estimate.model.build.
    """
    for name, given, known in (
        ("activations", workload.activations, get_args(LayoutActivations)),
        ("max-prefetch", workload.max_prefetch, (1,)),
        ("gather-embeddings", workload.gather_embeddings, (False,)),
        ("device-update-fraction", workload.device_update_fraction, (0.0,)),
    ):
        if given not in known:
            raise UsageError(
                f"--{name} {given} is not predicted of several ranks: "
                f"{' or '.join(map(str, known))} is"
            )
    activations = cast(LayoutActivations, workload.activations)
    dims = ParallelDims(dp=cluster.ranks)
    layout = Layout(dims=dims, rows=workload.batch, activations=activations)
    search = LayoutSearch(config, workload)
    cost = search.cost(layout, cluster)
    each = WORKING_DTYPES[workload.precision].itemsize
    sent = sent_between_replicas(layout, cluster, search.parameters * each, each)
    return RanksEstimate(
        fits=cost.fits(cluster.machine),
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        nvme_bytes=cost.nvme_bytes,
        step_time_s=cost.seconds,
        bound=cost.bound,
        tokens_per_s=cluster.ranks * workload.batch * workload.sequence / cost.seconds,
        busy_s=cost.busy,
        exposed_s=cost.exposed,
        exposed_share=cost.exposed_share,
        reduction=cost.reduction,
        reduced_on=cost.reduced_on,
        dram_bytes=cost.dram_bytes,
        dram_s=cost.dram_seconds,
        node_bytes=int(sent.within),
        network_bytes=int(sent.across),
    )


def render(estimate: RanksEstimate, workload: Workload, on: Cluster, console: Console) -> None:
    """Prints the estimate of the workload on a cluster."""
    machine = on.machine
    console.print(
        f"{on.nodes} x {on.ranks_per_node} ranks, each {workload.batch} x {workload.sequence} "
        f"tokens, {workload.precision}, {workload.optimizer}, state format {workload.state_format}"
    )
    console.print(f"on {escape(machine.name)}")
    if remark := on.remark():
        console.print(remark)
    table = Table(show_header=False, box=None)
    table.add_row("fits", "[green]yes[/green]" if estimate.fits else "[red]no[/red]")
    table.add_row(
        "device", f"at least {size(estimate.device_bytes)} of {size(machine.device_bytes)}"
    )
    table.add_row("host", f"{size(estimate.host_bytes)} of {size(machine.host_bytes)} a rank")
    table.add_row("NVMe", f"{size(estimate.nvme_bytes)} a rank")
    table.add_row("step", f"{estimate.step_time_s:.2f} s")
    table.add_row("bound by", BOUNDS[estimate.bound])
    table.add_row("tokens/s", f"{estimate.tokens_per_s:,.0f} on all")
    hidden_by_nothing = exposed(estimate.exposed_s, estimate.exposed_share)
    table.add_row("communication", f"{hidden_by_nothing} of the step that no computing hides")
    if on.reduction == "auto":
        table.add_row("reduction", estimate.reduction)
    if not on.on_host:
        table.add_row("reduced on", f"the {estimate.reduced_on}")
    through = dram_of(estimate.dram_bytes, estimate.dram_s, estimate.step_time_s)
    table.add_row("host DRAM", f"{through} of the step, of all ranks of a node")
    table.add_row("sent in a step", f"{size(estimate.node_bytes)} a rank within a node, "
                                    f"{size(estimate.network_bytes)} to others")  # fmt: skip
    busy = (f"{name} {seconds:.2f} s" for name, seconds in estimate.busy_s.items() if seconds)
    table.add_row("busy in a step", ", ".join(busy))
    console.print(table)
    if not estimate.fits:
        console.print("[yellow]to make it fit:[/yellow] castor plan compares other layouts")
