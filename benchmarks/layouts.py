# Question: does the planner of layouts (`castor plan`) know which one is fastest, and how fast?
# Baseline: the steps themselves, of ten layouts on two and four ranks of this machine, which has
#     two cores, of which four ranks have two at one time, and of one process.
# Model: hybrid_parallel.py's Llama of 44M parameters, fp32, steps of 8 x 128 tokens on all ranks
#     together, AdamW, clipping, room for everything, one thread a rank.
# Method: a probe of as many ranks, which work at once: seconds of all the model's products,
#     forward and backward, of plain passes of 1, 2 and 4 rows (to which the bandwidth of memory
#     and what an operator takes by itself are fitted), of a copy, of Adam, and of sums among the
#     ranks. What ranks take that share a core is that core's time, their getting in each other's
#     way with it. From these alone all layouts are predicted. The probe, and steps of as many
#     ranks, run in turn, so that slow spells of the machine meet all of them.
# Target: times of the ten within 20%, and the three fastest in their order (of those that the run
#     can tell apart: by more than 5%, and in three of four pairs of steps), also of those with as
#     many ranks alone, among which a plan chooses; of data-parallel replicas on 1, 2 and 4 ranks
#     within 15%. And a search: Llama 70B on 64 H100s, 256 x 4096 tokens, in less than a minute.
"""Layouts predicted and measured: `python benchmarks/layouts.py [--rounds R]`."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _machine import command_line, describe_machine, paired, spread, write_record
from _ranks import Ranks
from _steps import LR, MAX_NORM, QUICK, Model, Report, Step
from hybrid_parallel import build
from rich.console import Console
from rich.table import Table

MODEL = Model(rows=8)
PROBED_ROWS = (1, 2, 4)
WITHIN, WITHIN_OF_COPIES, APART = 0.2, 0.15, 0.05
BUDGET, CORES = "3GiB", 2


def layouts(ranks: int, samples: int) -> list[Any]:
    """Those that are measured."""
    from castor.planner.layouts import Layout
    from castor.runtime.parallel_dims import ParallelDims

    def layout(microbatches: int = 1, style: Any = "1f1b", **sizes: int) -> Layout:
        return Layout(dims=ParallelDims(**sizes), microbatches=microbatches, style=style)

    if ranks == 1:
        found = [Layout()]
    elif ranks == 2:
        found = [
            layout(dp=2), layout(tp=2), layout(cp=2), layout(pp=2, microbatches=4),
            layout(pp=2, microbatches=2), layout(pp=2, microbatches=4, style="gpipe"),
        ]  # fmt: skip
    else:
        found = [
            layout(dp=4), layout(dp=2, tp=2),
            layout(dp=2, pp=2, microbatches=2), layout(tp=2, pp=2, microbatches=4),
        ]  # fmt: skip
    return [replace(one, rows=samples // (one.dims.edp * one.microbatches)) for one in found]


def title(layout: Any) -> str:
    names = {
        "dp": layout.dims.edp,
        "tp": layout.dims.tp,
        "sp": layout.dims.cp,
        "pp": layout.dims.pp,
    }
    of = " ".join(f"{name} {size}" for name, size in names.items() if size > 1)
    of = of or "one process"
    return f"{of}, {layout.microbatches} x {layout.rows} {layout.style}".removesuffix(" 1f1b")


def make_probe(_: int, model: Model) -> tuple[Step, Report]:
    """What a rank computes and sends while all others do the same; seconds."""
    import torch
    from torch import distributed

    from castor import HybridAdam
    from castor.distributed import ParallelGroups
    from castor.runtime.parallel_dims import ParallelDims

    module = build(model)
    world = distributed.get_world_size()
    ranks = ParallelGroups.make(ParallelDims(tp=world)).layers
    params = sum(p.numel() for p in module.parameters())

    def median(work: Callable[[], Any], times: int = 3) -> float:
        found = []
        for _ in range(times):
            module.zero_grad(set_to_none=False)
            if ranks:
                ranks.barrier("measures")
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def passes(rows: int) -> None:
        batch = replace(model, rows=rows).batch(0)
        module(**batch).loss.backward()

    def report() -> dict[str, Any]:
        hidden = torch.zeros(model.rows, model.sequence, model.width)
        source, target = torch.zeros(params), torch.zeros(params)
        of_rows = {rows: median(lambda rows=rows: passes(rows)) for rows in PROBED_ROWS}
        tokens = max(PROBED_ROWS) * model.sequence
        weights = [m.weight.detach() for m in module.modules() if isinstance(m, torch.nn.Linear)]
        inputs = {weight.shape[1]: torch.randn(tokens, weight.shape[1]) for weight in weights}

        def products() -> None:
            for weight in weights:
                x = inputs[weight.shape[1]]
                out = x @ weight.T
                _ = out @ weight, out.T @ x

        adam = HybridAdam([torch.nn.Parameter(source)], lr=LR)
        adam.param_groups[0]["params"][0].grad = target
        adam.step()
        return {
            "flops": 6 * tokens * sum(w.numel() for w in weights) / median(products),
            "passes": of_rows,
            "copy": median(lambda: target.copy_(source)) / (4 * params),
            "adam": median(adam.step) / (28 * params),
            "sums": {tensor.numel() * 4: median(lambda tensor=tensor: ranks.sum(tensor), 10)
                     for tensor in (hidden[:1, :1], hidden) if ranks},
        }  # fmt: skip

    return lambda _: 0.0, report


def make_layout(_: int, model: Model, layout: Any) -> tuple[Step, Report]:
    import torch

    from castor import Booster, HybridParallelPlugin

    module = build(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    plugin = HybridParallelPlugin(
        **layout.arguments(), device="cpu", precision="fp32", max_norm=MAX_NORM,
        device_memory=BUDGET, host_memory=BUDGET,
    )  # fmt: skip
    booster = Booster(plugin)
    booster.boost(module, optimizer)
    own = replace(model, rows=layout.rows * layout.microbatches)
    pipelined = layout.dims.pp > 1 or layout.microbatches > 1

    def step(i: int) -> float:
        batch = own.batch(i)
        if pipelined:
            done = booster.execute_pipeline(iter([batch]), module, None, optimizer)
            loss = float(done["loss"])
        else:
            out = module(**batch).loss
            booster.backward(out, optimizer)
            loss = float(out.detach())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, dict


def median_of(found: Sequence[Any]) -> Any:
    """Of numbers, or of each entry of mappings."""
    if isinstance(found[0], dict):
        return {key: median_of([one[key] for one in found]) for key in found[0]}
    return statistics.median(found)


def fitted(
    measured: dict[int, float], flops: float, record: Callable[[int], Any]
) -> tuple[float, float]:
    """What fits operators best, each of which takes the larger of two times, and one of its own.

    Args:
        measured: Seconds by rows.
        flops: The rate of products.
        record: The simulated pass of so many rows.

    Returns:
        The bandwidth of memory, and microseconds of an operator.
    """
    works = {
        rows: [work for moment in (*one.forward, *one.backward) for work in moment.work]
        for rows, one in ((rows, record(rows)) for rows in measured)
    }

    def missed(bandwidth: float) -> tuple[float, float, float]:
        of_bytes = {
            rows: sum(max(f / flops, b / bandwidth) for f, b in of) for rows, of in works.items()
        }
        return min(
            (
                sum(
                    math.log((of_bytes[rows] + len(works[rows]) * us / 1e6) / seconds) ** 2
                    for rows, seconds in measured.items()
                ),
                bandwidth,
                us,
            )
            for us in range(1, 200)
        )

    _, bandwidth, us = min(missed(1e8 * 10 ** (n / 50)) for n in range(200))
    return bandwidth, us


def cluster_of(probes: Sequence[dict[str, Any]], record: Callable[[int], Any]) -> Any:
    """What the planner is told of the machine.

    Args:
        probes: What each rank measured.
        record: The simulated pass of so many rows.
    """
    from castor.planner.cluster import Cluster

    ranks = len(probes)
    at_once = min(CORES, ranks)

    def slowest(measured: Callable[[dict[str, Any]], float]) -> float:
        """Seconds of a core."""
        return max(map(measured, probes)) * at_once / ranks

    flops = 1 / slowest(lambda probe: 1 / probe["flops"])
    passes = {rows: slowest(lambda probe, rows=rows: probe["passes"][rows]) for rows in PROBED_ROWS}
    bandwidth, operator_us = fitted(passes, flops, record)
    link: dict[str, float] = {}  # one rank has none
    if ranks > 1:
        sums = {of: max(probe["sums"][of] for probe in probes) for of in probes[0]["sums"]}
        (small, least), (large, most) = sorted(sums.items())
        # A sum is two exchanges of (n - 1) / n of it.
        speed = 2 * (ranks - 1) / ranks * (large - small) / max(most - least, 1e-9)
        link = {"link": int(speed), "link_latency_us": least / 2 * 1e6}
    return Cluster.of(
        {
            "ranks_per_node": ranks, "device": "cpu", "at_once": at_once,
            "device_memory": BUDGET, "host_memory": f"{3 * ranks}GiB",
            "flops": flops, "device_bandwidth": int(bandwidth), "operator_us": operator_us,
            "h2d": int(1 / slowest(lambda probe: probe["copy"])),
            "dram": int(at_once / slowest(lambda probe: probe["adam"])),
            **link,
        },
        "fp32",
    )  # fmt: skip


def main() -> int:
    parser = command_line("layouts", __doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of each layout in a round")
    arguments = parser.parse_args()
    console = Console(width=110)
    machine = describe_machine()

    from castor.estimate.workload import Workload
    from castor.planner.layout_search import LayoutSearch

    model = replace(QUICK, width=256, rows=8) if arguments.quick else MODEL
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    sizes = (1, 2) if arguments.quick else (1, 2, 4)
    config = build(model).config
    config.architectures = ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.json")
        config.to_json_file(path, use_diff=False)
        workload = Workload(
            batch=model.rows, sequence=model.sequence, precision="fp32", state_format="fp32"
        )
        search = LayoutSearch(path, workload)
        predicted: dict[str, dict[str, Any]] = {}
        copies: set[str] = set()  # of the whole model alone
        found: dict[str, Ranks] = {}
        clusters: dict[int, Any] = {}
        for size in sizes:
            probe = Ranks.start(f"probe of {size}", size, make_probe, model)
            of_name = {
                title(layout) if size == 1 else f"{size} ranks: {title(layout)}": layout
                for layout in layouts(size, model.rows)
            }
            contenders = {
                name: Ranks.start(name, size, make_layout, model, layout)
                for name, layout in of_name.items()
            }
            probed = []
            for _ in range(rounds):
                probed.append(probe.report())
                for contender in contenders.values():
                    contender.run(steps, timed=True)
            for contender in (probe, *contenders.values()):
                contender.stop()
            found |= contenders
            probes = [median_of(of_rank) for of_rank in zip(*probed, strict=True)]
            clusters[size] = cluster_of(probes, search.whole_pass)
            for name, layout in of_name.items():
                cost = search.cost(layout, clusters[size])
                if layout.dims.edp == size:
                    copies.add(name)
                predicted[name] = {"seconds": cost.seconds, "busy": cost.busy}
    measured = {name: spread([s for of in one.seconds for s in of]) for name, one in found.items()}
    table = Table(title=f"Llama of {search.parameters / 1e6:.0f}M, {model.rows} x {model.sequence}")
    for heading in ("layout", "predicted s", "measured s", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("layout", "") else "right")
    results = {}
    for name in sorted(found, key=lambda name: measured[name]["median"]):
        ratio = predicted[name]["seconds"] / measured[name]["median"]
        met = abs(ratio - 1) <= (WITHIN_OF_COPIES if name in copies else WITHIN)
        results[name] = {"predicted": predicted[name], "measured": measured[name], "ratio": ratio,
                         "within_target": met}  # fmt: skip
        table.add_row(
            name, f"{predicted[name]['seconds']:.3f}", f"{measured[name]['median']:.3f}",
            f"{ratio:.2f}", "[green]met" if met else "[red]missed",
        )  # fmt: skip
    console.print(table)
    divided = {name: one for name, one in results.items() if name[0].isdigit()}

    def ordered_of(kind: str) -> bool:
        return in_order(
            [
                (one["predicted"]["seconds"], [s for of in found[name].seconds for s in of])
                for name, one in divided.items()
                if name.startswith(kind)
            ]
        )

    ordered = ordered_of("")
    ordered_of_each = {size: ordered_of(f"{size} ranks") for size in sizes if size > 1}
    farthest = max(abs(results[name]["ratio"] - 1) for name in copies)
    console.print(f"the three fastest in their order: {'met' if ordered else 'MISSED'}")
    for size, met in ordered_of_each.items():
        console.print(f"... of those on {size} ranks: {'met' if met else 'MISSED'}")
    large = search_large(2 if arguments.quick else 80)
    console.print(f"70B on 64 ranks: {large['layouts']} layouts in {large['seconds']:.0f} s")
    console.print(f"copies of the model: {farthest:.0%} off at most")
    write_record(
        arguments,
        "layouts",
        {
            "results": results,
            "three_fastest_in_order": ordered,
            "three_fastest_in_order_of_each": ordered_of_each,
            "kinds_in_order": sum(ordered_of_each.values()),
            "within_target": sum(abs(one["ratio"] - 1) <= WITHIN for one in divided.values()),
            "layouts": len(divided),
            "copies_off_by": farthest,
            "search_of_70b_on_64_ranks": large,
            "machines": {
                size: {"flops": one.machine.flops, "device_bandwidth": one.machine.device_bandwidth,
                       "operator_seconds": one.machine.operator_seconds,
                       "h2d": one.machine.h2d, "dram": one.machine.dram,
                       "link": one.link.bytes_per_second, "link_latency": one.link.latency}
                for size, one in clusters.items()
            },
        },
        machine=machine,
    )  # fmt: skip
    return 0


def search_large(layers: int) -> dict[str, Any]:
    """Seconds of a search for Llama 70B on 64 ranks, and how many layouts there are."""
    from transformers import LlamaConfig

    from castor.estimate.workload import Workload
    from castor.planner.cluster import Cluster
    from castor.planner.layout_search import LayoutSearch

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    cluster = Cluster.of(
        {"nodes": 8, "ranks_per_node": 8, "device": "h100", "link": "300GB/s",
         "link_latency_us": 8, "network": "40GB/s", "network_latency_us": 15},
        "bf16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.json")
        config.to_json_file(path, use_diff=False)
        start = time.perf_counter()
        found = LayoutSearch(path, Workload(batch=256, sequence=4096)).search(cluster)
        return {"seconds": time.perf_counter() - start, "layouts": found.compared}


def in_order(times: Sequence[tuple[float, Sequence[float]]]) -> bool:
    """Whether the predicted times put the three measured fastest before all slower ones.

    Args:
        times: Predicted, and those of the measured steps; fastest median first.
    """
    return all(
        fast[0] < slow[0]
        for n, fast in enumerate(times[:3])
        for slow in times[n + 1 :]
        if told_apart(fast[1], slow[1])
    )


def told_apart(fast: Sequence[float], slow: Sequence[float]) -> bool:
    """Whether steps that ran in turn differ by more than APART, and by more than their noise."""
    differs = statistics.median(slow) > statistics.median(fast) * (1 + APART)
    return differs and paired([*slow], [*fast])["lower_quartile"] > 1


if __name__ == "__main__":
    sys.exit(main())
