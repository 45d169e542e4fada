"""Prints an estimate as a table."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from castor.estimate.estimator import Estimate, size
from castor.estimate.machine import Machine
from castor.estimate.workload import Workload

_BOUNDS = {
    "compute": "the device's computing",
    "h2d": "the link from host to device (parameters)",
    "d2h": "the link from device to host (gradients)",
    "dram": "host memory (Adam and the links)",
    "nvme": "NVMe (what the host has no room for)",
}


def _activations(estimate: Estimate) -> str:
    """Describes the decisions on activations, and the bytes that remain."""
    found = f"at most {size(estimate.nonmodel_bytes)} beside chunks"
    if estimate.blocks:
        found += f"; {estimate.recomputed_blocks} of {estimate.blocks} blocks are recomputed"
        if estimate.offloaded_blocks:
            found += f", {estimate.offloaded_blocks} offloaded"
    if estimate.rows_per_tile:
        found += f"; logits in tiles of {estimate.rows_per_tile} rows"
    return found


def render(estimate: Estimate, workload: Workload, machine: Machine, console: Console) -> None:
    """Prints an estimate, and what would make the step fit if it does not."""
    console.print(
        f"{estimate.parameters / 1e9:.2f}B parameters, batch {workload.batch} x "
        f"{workload.sequence} tokens, {workload.precision}, {workload.optimizer}, state format "
        f"{workload.state_format}"
    )
    if workload.lora_rank is not None:
        base = ", 4 bits for the weights under them" if workload.four_bit_base else ""
        trained = f"{estimate.trained_parameters / 1e6:.1f}M parameters"
        console.print(f"adapters of rank {workload.lora_rank} train, {trained}{base}")
    console.print(f"on {escape(machine.name)}")
    table = Table(show_header=False, box=None)
    table.add_row("fits", "[green]yes[/green]" if estimate.fits else "[red]no[/red]")
    least = "" if estimate.fits else "at least "
    table.add_row("device", f"{least}{size(estimate.device_bytes)} of {size(machine.device_bytes)}")
    table.add_row("activations", _activations(estimate))
    table.add_row("host", f"{size(estimate.host_bytes)} of {size(machine.host_bytes)}")
    weights = estimate.nvme_weight_bytes
    of_these = f", {size(weights)} of it parameters and gradients" if weights else ""
    table.add_row("NVMe", size(estimate.nvme_bytes) + of_these)
    if estimate.step_time_s is not None and estimate.bound is not None:
        table.add_row("step", f"{estimate.step_time_s:.2f} s")
        table.add_row("bound by", _BOUNDS[estimate.bound])
        table.add_row("tokens/s", f"{estimate.tokens_per_s:,.0f}")
        if workload.device_update_fraction:
            table.add_row("updates", f"{estimate.device_update_fraction:.0%} on the device")
    table.add_row("largest batch", str(estimate.max_batch) if estimate.max_batch else "none fits")
    if estimate.max_sequence is not None:
        longest = f"{estimate.max_sequence} tokens" if estimate.max_sequence else "none fits"
        table.add_row("longest sequence", f"{longest}, at batch {workload.batch}")
    busy = ", ".join(
        f"{name} {seconds:.2f} s"
        for name, seconds in estimate.busy_s.items()
        if name != "nvme" or machine.nvme is not None
    )
    table.add_row("busy in a step", busy)
    console.print(table)
    for remedy in estimate.remedies:
        console.print(f"[yellow]to make it fit:[/yellow] {escape(remedy)}")
    for options in estimate.fits_with:
        console.print(f"[yellow]it fits with[/yellow] {escape(options)}")
    if not estimate.fits and not estimate.fits_with:
        console.print("It fits with none of the formats, activations and NVMe that there are.")
    if machine.device_bandwidth is None:
        console.print(
            "Operators are counted by their FLOPs alone: give the device's memory bandwidth "
            "(--device-bandwidth) to count those that it bounds."
        )
