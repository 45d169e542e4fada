"""The commands that predict from a model's configuration: `castor estimate`, `plan`, `scaling`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from castor.collections_paused import collections_paused
from castor.estimate_cache import Answer, AnswerCache
from castor.model_files import find_config

if TYPE_CHECKING:
    from castor.config import StateFormat
    from castor.estimate.workload import Workload

_Config = Annotated[
    str,
    typer.Argument(
        help="A config.json of a Hugging Face model, its folder, or its name in the hub's cache."
    ),
]
_Sequence = Annotated[int, typer.Option("--seq", help="Tokens in a sample.")]
_Format = Annotated[
    str | None, typer.Option("--format", help="Optimizer state, as in castor estimate.")
]
_Rule = Annotated[str, typer.Option("--optimizer", help="What steps, as in castor estimate.")]
_Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def estimate(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="A config.json of a Hugging Face model, its folder, or its name in the hub's "
            "cache; with --table several, or none: then those that castor brings.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="rtx3090, rtx4090, rtx5090, rtx6000ada, a100, h100 or h200, with a host; cpu for "
            "castor's CPU device, of whose host the figures are given."
        ),
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Such as 24GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Such as 256GiB.")] = None,
    h2d: Annotated[str | None, typer.Option(help="Link to the device, such as 25GB/s.")] = None,
    d2h: Annotated[
        str | None, typer.Option(help="Link from the device; without a preset, as h2d.")
    ] = None,
    dram: Annotated[str | None, typer.Option(help="Host memory, such as 60GB/s.")] = None,
    updates: Annotated[
        str | None,
        typer.Option(help="The host's optimizer alone, such as 85GB/s. Default: as --dram."),
    ] = None,
    flops: Annotated[str | None, typer.Option(help="Sustained FLOP/s, such as 70T.")] = None,
    device_bandwidth: Annotated[
        str | None, typer.Option(help="Device memory, such as 750GB/s.")
    ] = None,
    operator_us: Annotated[
        float | None,
        typer.Option(help="Microseconds of any operator, beside its FLOPs and bytes."),
    ] = None,
    nvme: Annotated[
        str | None,
        typer.Option(
            help="NVMe for what the host has no room for, reads and writes together: 3GB/s."
        ),
    ] = None,
    nvme_memory: Annotated[str | None, typer.Option(help="Of it, such as 2TB.")] = None,
    batch: Annotated[int, typer.Option(help="Samples in a step.")] = 1,
    seq: _Sequence = 1024,
    state_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Optimizer state: fp32, split, split_bf16 or split_int8. Default: split for "
            "bf16, else fp32.",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="What steps: adam, lion, sgd (without momentum) or sgd_momentum.")
    ] = "adam",
    precision: _Precision = "bf16",
    activations: Annotated[
        str | None,
        typer.Option(
            help="As in GeminiPlugin: keep, recompute, offload or auto. Default: auto with "
            "--device-memory on one rank, else keep."
        ),
    ] = None,
    overlap: Annotated[
        str, typer.Option(help="Adam beside the next forward (forward) or after backward (none).")
    ] = "forward",
    max_prefetch: Annotated[int, typer.Option(help="As in GeminiPlugin.")] = 1,
    gather_embeddings: Annotated[
        bool, typer.Option("--gather-embeddings", help="As in GeminiPlugin.")
    ] = False,
    device_update_fraction: Annotated[
        str, typer.Option(help="As in GeminiPlugin; auto: the share with the shortest step.")
    ] = "0",
    nproc: Annotated[int, typer.Option(help="Ranks on a machine; --batch is of each.", min=1)] = 1,
    nodes: Annotated[int, typer.Option(help="Machines with as many ranks.", min=1)] = 1,
    transport: Annotated[
        str | None,
        typer.Option(
            help="Activations go through host memory (host), or from GPU to GPU (nccl, where "
            "each rank has a GPU of its own)."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Of a rank to others of its machine, with --transport nccl: 300GB/s."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Of a rank to other machines: 400Gb/s.")
    ] = None,
    reduction: Annotated[
        str | None,
        typer.Option(
            help="As in GeminiPlugin: ordered; backend with --transport nccl; auto: the faster one."
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(help="Rank of LoRA adapters on all linear layers; the rest is frozen.", min=1),
    ] = None,
    qlora: Annotated[
        bool,
        typer.Option(
            "--qlora", help="Linear layers in 4 bits, with --lora 16 where none is given."
        ),
    ] = False,
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
    options = {k: v for k, v in locals().items() if k not in _NO_OPTIONS_OF_A_STEP}
    given = configs or []
    if table:
        _check_options_of_a_table(options)
    elif len(given) != 1:
        raise typer.BadParameter(f"{len(given)} configs are given; give one, or --table")
    elif output is not None:
        raise typer.BadParameter("--output is for the page of --table")
    paths = [find_config(config) for config in given]
    console = Console(highlight=False, soft_wrap=True)
    shown = {"colours": console.color_system, "width": console.width}
    cache = AnswerCache(paths, options | shown | {"table": table})
    answer = None if fresh or output else cache.find()
    if answer is None:
        with console.capture() as captured:
            if table:
                fits = _table(paths, console, output, options)
            else:
                fits = _estimate(paths[0], console, **options)
        answer = Answer(text=captured.get(), status=0 if fits else 1)
        cache.keep(answer)
    sys.stdout.write(answer.text)
    if answer.status:
        raise typer.Exit(answer.status)


def _estimate(
    config: Path,
    console: Console,
    *,
    preset: str | None,
    device_memory: str | None,
    host_memory: str | None,
    h2d: str | None,
    d2h: str | None,
    dram: str | None,
    updates: str | None,
    flops: str | None,
    device_bandwidth: str | None,
    operator_us: float | None,
    nvme: str | None,
    nvme_memory: str | None,
    batch: int,
    seq: int,
    state_format: str | None,
    optimizer: str,
    precision: str,
    activations: str | None,
    overlap: str,
    max_prefetch: int,
    gather_embeddings: bool,
    device_update_fraction: str,
    nproc: int,
    nodes: int,
    transport: str | None,
    link: str | None,
    network: str | None,
    reduction: str | None,
    lora: int | None,
    qlora: bool,
    as_json: bool,
) -> bool:
    """Prints an estimate; whether it fits."""
    with collections_paused():
        from castor.config import Precision
        from castor.errors import UsageError
        from castor.estimate.estimator import Estimator
        from castor.estimate.machine import machine
        from castor.estimate.render import render
        from castor.estimate.workload import Activations, Overlap, Workload

    if activations is None:  # several ranks are predicted with "keep" and "recompute" alone
        activations = "auto" if device_memory is not None and nproc * nodes == 1 else "keep"
    workload = Workload(
        batch=batch,
        sequence=seq,
        precision=cast(Precision, precision),
        state_format=_state_format(state_format, precision),
        optimizer=optimizer,
        activations=cast(Activations, activations),
        overlap=cast(Overlap, overlap),
        max_prefetch=max_prefetch,
        gather_embeddings=gather_embeddings,
        device_update_fraction=_update_fraction(device_update_fraction),
        lora_rank=lora or (_QLORA_RANK if qlora else None),
        four_bit_base=qlora,
    )
    figures: dict[str, Any] = {
        "device_memory": device_memory, "host_memory": host_memory, "h2d": h2d, "d2h": d2h,
        "dram": dram, "updates": updates, "flops": flops, "device_bandwidth": device_bandwidth,
        "operator_us": operator_us, "nvme": nvme, "nvme_memory": nvme_memory,
    }  # fmt: skip
    if nproc * nodes > 1:
        if workload.lora_rank is not None:
            raise UsageError(
                "--lora and --qlora are estimated for one rank; leave --nproc and --nodes out"
            )
        from castor.planner import data_parallel
        from castor.planner.cluster import Cluster

        between = {
            "device": preset, "transport": transport, "link": link, "network": network,
            "reduction": reduction, **figures,
        }  # fmt: skip
        given = {name: value for name, value in between.items() if value is not None}
        if nvme is not None:
            given["nvme_path"] = "."  # which directory is of no interest
        cluster = Cluster.of({"nodes": nodes, "ranks_per_node": nproc, **given}, workload.precision)
        of_ranks = data_parallel.estimate_ranks(config, workload, cluster)
        if as_json:
            _print_json(console, of_ranks.as_json())
        else:
            data_parallel.render(of_ranks, workload, cluster, console)
        return of_ranks.fits
    ways = {"transport": transport, "link": link, "network": network, "reduction": reduction}
    for name, value in ways.items():
        if value is not None:
            raise UsageError(f"--{name} is between ranks: give --nproc or --nodes as well")
    on = machine(preset, precision=workload.precision, **figures)
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

_NO_OPTIONS_OF_A_STEP = ("configs", "fresh", "table", "output")

_FIXED_IN_A_TABLE = {
    **dict.fromkeys(("preset", "device_memory", "host_memory", "h2d", "d2h", "dram", "flops")),
    **dict.fromkeys(("updates", "device_bandwidth", "operator_us", "activations")),
    "device_update_fraction": "0",
    **dict.fromkeys(("transport", "link", "network", "reduction")),
    "nproc": 1, "nodes": 1, "qlora": False,
}  # fmt: skip
"""Options that a table has values of its own for, and their defaults."""


def _check_options_of_a_table(options: Mapping[str, Any]) -> None:
    for name, default in _FIXED_IN_A_TABLE.items():
        if options[name] != default:
            raise typer.BadParameter(
                f"--table has devices, hosts and ways to train of its own; leave "
                f"--{name.replace('_', '-')} out"
            )


def _table(
    configs: list[Path], console: Console, output: Path | None, options: Mapping[str, Any]
) -> bool:
    """Prints what fits where, and writes the page of it; whether any of it fits."""
    with collections_paused():
        from castor.estimate import table
        from castor.estimate.workload import Workload

    precision = options["precision"]
    workload = Workload(
        batch=options["batch"],
        sequence=options["seq"],
        precision=precision,
        state_format=_state_format(options["state_format"], precision),
        optimizer=options["optimizer"],
        activations="auto",
        overlap=options["overlap"],
        max_prefetch=options["max_prefetch"],
        gather_embeddings=options["gather_embeddings"],
    )
    rank, nvme = options["lora"] or _QLORA_RANK, options["nvme"]
    found = table.all_cells(
        configs or table.known_models(), workload,
        adapter_rank=rank, nvme=nvme, nvme_memory=options["nvme_memory"],
    )  # fmt: skip
    if output is not None:
        command = shlex.join(["castor", *sys.argv[1:]])
        output.write_text(table.page(found, workload, rank, nvme, command), encoding="utf-8")
    if options["as_json"]:
        _print_json(console, table.as_json(found))
    else:
        table.render(found, workload, rank, nvme, console)
    return any(cell.lacks is None for cell in found)


def _print_json(console: Console, figures: dict[str, Any] | list[dict[str, Any]]) -> None:
    console.print(json.dumps(figures, indent=2), markup=False)


def _workload(
    batch: int, seq: int, precision: str, state_format: str | None, optimizer: str
) -> Workload:
    """Returns the workload of several ranks, without activations: each layout has its own."""
    from castor.config import Precision
    from castor.estimate.workload import Workload

    return Workload(
        batch=batch,
        sequence=seq,
        precision=cast(Precision, precision),
        state_format=_state_format(state_format, precision),
        optimizer=optimizer,
    )


def _state_format(given: str | None, precision: str) -> StateFormat:
    return cast("StateFormat", given or ("split" if precision == "bf16" else "fp32"))


def plan(
    config: _Config,
    cluster: Annotated[
        Path, typer.Option(help="YAML or JSON: nodes, ranks_per_node, device, and what joins them.")
    ],
    batch: Annotated[int, typer.Option(help="Samples in a step, of all ranks together.")],
    seq: _Sequence = 1024,
    state_format: _Format = None,
    optimizer: _Rule = "adam",
    precision: _Precision = "bf16",
    shown: Annotated[int, typer.Option(help="Layouts in the table.", min=1)] = 5,
    output: Annotated[
        Path | None, typer.Option(help="For the first one: what castor run --plan takes.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Find the fastest way to shard a model and its batch over the ranks of a cluster."""
    from castor.planner.layout_report import as_json as found_as_json
    from castor.planner.layout_report import search_and_show

    workload = _workload(batch, seq, precision, state_format, optimizer)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    found = search_and_show(
        find_config(config), cluster, workload, console, shown=shown, output=output
    )
    if as_json:
        typer.echo(json.dumps(found_as_json(found), indent=2))
    if not found.fitting:
        raise typer.Exit(1)


def scaling(
    config: _Config,
    cluster: Annotated[Path, typer.Option(help="YAML or JSON, as castor plan's.")],
    batch: Annotated[int, typer.Option(help="Samples in a step, of all the cluster's ranks.")],
    seq: _Sequence = 1024,
    state_format: _Format = None,
    optimizer: _Rule = "adam",
    precision: _Precision = "bf16",
    most_ranks: Annotated[int, typer.Option(help="Up to which ranks double.", min=1)] = 1024,
    output: Annotated[Path | None, typer.Option(help="A page of the curves, such as s.html.")] = (
        None
    ),
    as_json: _Json = False,
) -> None:
    """Predict how steps scale from one rank to a thousand: as many samples a rank, and in all."""
    from castor.planner.scaling_report import as_json as found_as_json
    from castor.planner.scaling_report import scale_and_show

    workload = _workload(batch, seq, precision, state_format, optimizer)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)
    found = scale_and_show(
        find_config(config), cluster, workload, console, most=most_ranks, output=output
    )
    if as_json:
        typer.echo(json.dumps(found_as_json(found), indent=2))
