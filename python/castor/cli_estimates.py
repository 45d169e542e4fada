"""The commands that predict from a model's configuration: `castor estimate`, `plan`, `scaling`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from castor.collections_paused import collections_paused
from castor.estimate_cache import Answer, AnswerCache
from castor.model_files import find_config
from castor.options import from_fields

if TYPE_CHECKING:
    from castor.estimate.workload import Workload

_Config = Annotated[
    str,
    typer.Argument(
        help="A config.json of a Hugging Face model, its folder, or its name in the hub's cache."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Samples and the optimizer of a predicted step."""

    seq: int = 1024
    """Tokens in a sample."""
    state_format: Annotated[str | None, typer.Option("--format")] = None
    """Optimizer state: fp32, split, split_bf16 or split_int8. Default: split for bf16, else
    fp32."""
    optimizer: str = "adam"
    """Update rule: adam, lion, sgd (without momentum) or sgd_momentum."""
    precision: str = "bf16"
    """fp32, bf16 or fp16."""

    def workload(self, **more: Any) -> Workload:
        """Returns the workload with these and further settings."""
        from castor.estimate.workload import Workload

        default = "split" if self.precision == "bf16" else "fp32"
        given: dict[str, Any] = {
            "sequence": self.seq, "precision": self.precision, "optimizer": self.optimizer,
            "state_format": self.state_format or default,
        }  # fmt: skip
        return Workload(**given, **more)


@dataclass(frozen=True, kw_only=True)
class _Step(_Training):
    """A step that `castor estimate` predicts."""

    batch: int = 1
    """Samples in a step."""
    activations: str | None = None
    """GeminiPlugin's: keep, recompute, offload or auto. Default: auto with --device-memory on one
    rank, else keep."""
    overlap: str = "forward"
    """Adam beside the next forward (forward) or after backward (none)."""
    max_prefetch: int = 1
    """GeminiPlugin's."""
    gather_embeddings: bool = False
    """GeminiPlugin's."""
    device_update_fraction: str = "0"
    """GeminiPlugin's; auto: the share with the shortest step."""
    lora: Annotated[int | None, typer.Option(min=1)] = None
    """Rank of LoRA adapters on all linear layers; the rest is frozen."""
    qlora: bool = False
    """Linear layers in 4 bits, with --lora 16 where none is given."""

    def workload(self, **more: Any) -> Workload:
        """Returns the workload with these and further settings."""
        same = ("batch", "overlap", "max_prefetch", "gather_embeddings")
        return super().workload(**{name: getattr(self, name) for name in same}, **more)


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """The figures of a machine; those that are left out are the preset's."""

    preset: str | None = None
    """rtx3090, rtx4090, rtx5090, rtx6000ada, a100, h100 or h200, with a host; cpu for castor's CPU
    device, of whose host the figures are given."""
    device_memory: str | None = None
    """Device memory, such as 24GiB."""
    host_memory: str | None = None
    """Host memory, such as 256GiB."""
    h2d: str | None = None
    """Link to the device, such as 25GB/s."""
    d2h: str | None = None
    """Link from the device; without a preset, as h2d."""
    dram: str | None = None
    """Bandwidth of host memory, such as 60GB/s."""
    updates: str | None = None
    """The host's optimizer alone, such as 85GB/s. Default: as --dram."""
    flops: str | None = None
    """Sustained FLOP/s, such as 70T."""
    device_bandwidth: str | None = None
    """Bandwidth of device memory, such as 750GB/s."""
    operator_us: float | None = None
    """Microseconds of any operator, beside its FLOPs and bytes."""
    nvme: str | None = None
    """NVMe for what the host has no room for, reads and writes together: 3GB/s."""
    nvme_memory: str | None = None
    """Room on it, such as 2TB."""


@dataclass(frozen=True, kw_only=True)
class _Between:
    """The links between ranks."""

    transport: str | None = None
    """Activations go through host memory (host), or from GPU to GPU (nccl, where each rank has a
    GPU of its own)."""
    link: str | None = None
    """Link of a rank to others of its machine, with --transport nccl: 300GB/s."""
    network: str | None = None
    """Link of a rank to other machines: 400Gb/s."""
    reduction: str | None = None
    """GeminiPlugin's: ordered; backend with --transport nccl; auto: the faster one."""
    reduce_on: str | None = None
    """GeminiPlugin's: host; device with --transport nccl; auto."""
    communicator_memory: str | None = None
    """Device memory of each of NCCL's communicators, with --transport nccl: 400MiB."""


@dataclass(frozen=True, kw_only=True)
class _Ranks(_Between):
    """The ranks that train together."""

    nproc: Annotated[int, typer.Option(min=1)] = 1
    """Ranks on a machine; --batch is of each."""
    nodes: Annotated[int, typer.Option(min=1)] = 1
    """Machines with as many ranks."""


@from_fields
def estimate(
    figures: _Figures,
    step: _Step,
    ranks: _Ranks,
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="A config.json of a Hugging Face model, its folder, or its name in the hub's "
            "cache; with --table several, or none: then those that castor brings.",
        ),
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="What fits: full, LoRA and QLoRA on devices of 24 to 80 GB and hosts of 64 to 256 "
            "GiB.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="With --table: a page of it in Markdown, such as table.md.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compute it, though the same question was asked before.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Predict whether a model trains on a machine, or several, how fast, and what bounds it.

    The exit status is 1 where it does not fit.
    """
    given = configs or []
    if table:
        _check_options_of_a_table(figures, step, ranks)
    elif len(given) != 1:
        raise typer.BadParameter(f"{len(given)} configs are given; give one, or --table")
    elif output is not None:
        raise typer.BadParameter("--output is for the page of --table")
    paths = [find_config(config) for config in given]
    console = Console(highlight=False, soft_wrap=True)
    asked = asdict(figures) | asdict(step) | asdict(ranks) | {"table": table, "as_json": as_json}
    shown = {"colours": console.color_system, "width": console.width}
    cache = AnswerCache(paths, asked | shown)
    answer = None if fresh or output else cache.find()
    if answer is None:
        with console.capture() as captured:
            if table:
                fits = _table(paths, console, output, figures, step, as_json=as_json)
            else:
                fits = _estimate(paths[0], console, figures, step, ranks, as_json=as_json)
        answer = Answer(text=captured.get(), status=0 if fits else 1)
        cache.keep(answer)
    sys.stdout.write(answer.text)
    if answer.status:
        raise typer.Exit(answer.status)


def _estimate(
    config: Path, console: Console, figures: _Figures, step: _Step, ranks: _Ranks, *, as_json: bool
) -> bool:
    """Prints an estimate; whether it fits."""
    with collections_paused():
        from castor.errors import UsageError
        from castor.estimate.estimator import Estimator
        from castor.estimate.machine import machine
        from castor.estimate.render import render

    num_ranks, activations = ranks.nproc * ranks.nodes, step.activations
    if activations is None:  # several ranks are predicted with "keep" and "recompute" alone
        activations = "auto" if figures.device_memory is not None and num_ranks == 1 else "keep"
    workload = step.workload(
        activations=activations,
        device_update_fraction=_update_fraction(step.device_update_fraction),
        lora_rank=step.lora or (_QLORA_RANK if step.qlora else None),
        four_bit_base=step.qlora,
    )
    of_machine = {name: one for name, one in asdict(figures).items() if name != "preset"}
    between = {field.name: getattr(ranks, field.name) for field in fields(_Between)}
    if num_ranks > 1:
        if workload.lora_rank is not None:
            raise UsageError(
                "--lora and --qlora are estimated for one rank; leave --nproc and --nodes out"
            )
        from castor.planner import data_parallel
        from castor.planner.cluster import Cluster

        joined = {"device": figures.preset, **between, **of_machine}
        given = {name: value for name, value in joined.items() if value is not None}
        if figures.nvme is not None:
            given["nvme_path"] = "."  # which directory is of no interest
        cluster = Cluster.of(
            {"nodes": ranks.nodes, "ranks_per_node": ranks.nproc, **given}, workload.precision
        )
        of_ranks = data_parallel.estimate_ranks(config, workload, cluster)
        if as_json:
            _print_json(console, of_ranks.as_json())
        else:
            data_parallel.render(of_ranks, workload, cluster, console)
        return of_ranks.fits
    for name, value in between.items():
        if value is not None:
            raise UsageError(f"--{name} is between ranks: give --nproc or --nodes as well")
    on = machine(figures.preset, precision=workload.precision, **of_machine)
    found = Estimator(config, workload).estimate(on)
    if as_json:
        _print_json(console, found.as_json())
    else:
        render(found, workload, on, console)
    return found.fits


def _update_fraction(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(
            f"--device-update-fraction is {text!r}; give 'auto' or a fraction in [0, 1]"
        ) from None


_QLORA_RANK = 16
"""Rank of the adapters where --qlora is given alone, and of a table's."""

_OF_A_TABLE = ("nvme", "nvme_memory")
"""Figures of a machine that a table takes; it has values of its own for the others."""


def _check_options_of_a_table(figures: _Figures, step: _Step, ranks: _Ranks) -> None:
    fixed = ("activations", "device_update_fraction", "qlora")
    given = [
        field.name
        for options in (figures, step, ranks)
        for field in fields(options)
        if getattr(options, field.name) != field.default
        and (field.name not in _OF_A_TABLE if options is not step else field.name in fixed)
    ]
    if given:
        raise typer.BadParameter(
            "--table has devices, hosts and ways to train of its own; leave "
            f"--{given[0].replace('_', '-')} out"
        )


def _table(
    configs: list[Path],
    console: Console,
    output: Path | None,
    figures: _Figures,
    step: _Step,
    *,
    as_json: bool,
) -> bool:
    """Prints what fits where, and writes the page of it; whether any of it fits."""
    with collections_paused():
        from castor.estimate import table

    workload = step.workload(activations="auto")
    rank, nvme = step.lora or _QLORA_RANK, figures.nvme
    memory = figures.nvme_memory
    found = [
        cell
        for config in configs or table.known_models()
        for cell in table.cells(config, workload, adapter_rank=rank, nvme=nvme, nvme_memory=memory)
    ]
    if output is not None:
        command = shlex.join(["castor", *sys.argv[1:]])
        output.write_text(table.page(found, workload, rank, nvme, command), encoding="utf-8")
    if as_json:
        _print_json(console, table.as_json(found))
    else:
        table.render(found, workload, rank, nvme, console)
    return any(cell.lacks is None for cell in found)


def _print_json(console: Console, figures: dict[str, Any] | list[dict[str, Any]]) -> None:
    console.print(json.dumps(figures, indent=2), markup=False)


@from_fields
def plan(
    config: _Config,
    cluster: Annotated[
        Path, typer.Option(help="YAML or JSON: nodes, ranks_per_node, device, and what joins them.")
    ],
    batch: Annotated[int, typer.Option(help="Samples in a step, of all ranks together.")],
    training: _Training,
    shown: Annotated[int, typer.Option(help="Layouts in the table.", min=1)] = 5,
    output: Annotated[
        Path | None, typer.Option(help="For the first one: what castor run --plan takes.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Find the fastest way to shard a model and its batch over the ranks of a cluster."""
    from castor.planner.layout_report import as_json as found_as_json
    from castor.planner.layout_report import search_and_show

    workload = training.workload(batch=batch)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    found = search_and_show(
        find_config(config), cluster, workload, console, shown=shown, output=output
    )
    if as_json:
        typer.echo(json.dumps(found_as_json(found), indent=2))
    if not found.fitting:
        raise typer.Exit(1)


@from_fields
def scaling(
    config: _Config,
    cluster: Annotated[Path, typer.Option(help="YAML or JSON, as castor plan's.")],
    batch: Annotated[int, typer.Option(help="Samples in a step, of all the cluster's ranks.")],
    training: _Training,
    most_ranks: Annotated[int, typer.Option(help="Up to which ranks double.", min=1)] = 1024,
    output: Annotated[Path | None, typer.Option(help="A page of the curves, such as s.html.")] = (
        None
    ),
    as_json: _Json = False,
) -> None:
    """Predict how steps scale from one rank to a thousand: as many samples a rank, and in all."""
    from castor.planner.scaling_report import as_json as found_as_json
    from castor.planner.scaling_report import scale_and_show

    workload = training.workload(batch=batch)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    found = scale_and_show(
        find_config(config), cluster, workload, console, most=most_ranks, output=output
    )
    if as_json:
        typer.echo(json.dumps(found_as_json(found), indent=2))
