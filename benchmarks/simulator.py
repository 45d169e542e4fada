# Question: how close does the simulator come to the steps that it predicts?
# Baseline: the steps themselves: GPT-2 of 42.5M parameters, fp32, batch 4 x 128, on the CPU device,
#     at five budgets, with copies at the speed of memory and with an emulated link of 2 GB/s.
# Method: a reference with an ample budget and no link gives the trace: its modules' times, without
#     the copies in them, and its non-model bytes. Copy, Adam and DRAM bandwidth are measured on
#     their own. From these alone each budget's step is predicted. Reference and budget step in turn
#     in one process, and each pair gives one ratio, so that slow spells of the machine cancel.
# Target: median predicted step within 15% of the measured one, peak device bytes equal.
"""The simulator against measured steps: `python benchmarks/simulator.py [--rounds R]`."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import command_line, describe_machine, spread, write_record
from _steps import LR, MAX_NORM, QUICK, Model
from rich.console import Console
from rich.table import Table

from castor import _C, Booster, GeminiPlugin, HybridAdam
from castor.activations.auto import compute_seconds
from castor.runtime.engine import engine_of
from castor.runtime.spec import ModelSpec

SHARES = (0.2, 0.35, 0.5, 0.8, None)  # tight(x); None: ample
LINK = 2_000_000_000
WARMUP_STEPS = 3
TARGET = 0.15


class Contender:
    """A boosted model and its steps."""

    def __init__(self, shape: Model, device_memory: int | str, link: int | None) -> None:
        self.shape, self.model = shape, shape.build()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=device_memory,
            precision="fp32",
            max_norm=MAX_NORM,
            link_bandwidth=link,
        )
        self.booster = Booster(plugin=plugin)
        self.model, self.optimizer, *_ = self.booster.boost(self.model, optimizer)
        self.session = engine_of(self.model).session
        self.steps = 0
        for _ in range(WARMUP_STEPS):
            self.step()

    def step(self) -> tuple[float, dict[str, Any]]:
        """One step: its seconds and its timeline."""
        inputs = self.shape.batch(self.steps)
        self.steps += 1
        start = time.perf_counter()
        loss = self.model(**inputs).loss
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        timeline = self.session.timeline()
        if timeline is None or not timeline["complete"]:
            raise RuntimeError("the step left no complete timeline")
        return seconds, timeline


def median(measure: Callable[[], float], repetitions: int = 7) -> float:
    """Median of what `measure` returns."""
    return statistics.median(measure() for _ in range(repetitions))


def measure_hardware(num_params: int, chunk_bytes: int) -> dict[str, float]:
    """Bandwidths, bytes per second, each measured on its own."""
    chunk = chunk_bytes // 4
    source, target = torch.zeros(num_params), torch.zeros(num_params)

    def copy() -> float:
        start = time.perf_counter()
        for begin in range(0, num_params, chunk):
            target[begin : begin + chunk].copy_(source[begin : begin + chunk])
        return 4 * num_params / (time.perf_counter() - start)

    rate = median(copy)
    param = torch.nn.Parameter(source)
    param.grad = target
    adam = HybridAdam([param], lr=LR)
    adam.step()

    def update() -> float:
        start = time.perf_counter()
        adam.step()
        return 28 * num_params / (time.perf_counter() - start)

    return {
        "copy": rate,
        "adam": median(update),
        "dram": _C.in_place_bandwidth(2**26, 7),
    }


class Predictor:
    """The simulator, laid out as the session is."""

    def __init__(self, model: torch.nn.Module) -> None:
        spec = ModelSpec.structure(model)
        params = zip(spec.names, spec.params, strict=True)
        self.simulator = _C.Simulator(
            params=[(name, param.numel(), param.requires_grad) for name, param in params],
            modules=[(m.name, m.params, m.parent) for m in spec.modules],
            precision="float32",
            chunk_bytes=0,
            state_format="fp32",
        )
        self.hardware: dict[str, float] = {}

    def predict(
        self, timeline: dict[str, Any], device_bytes: int, link: int | None
    ) -> dict[str, Any]:
        """The step of the reference's timeline in another budget."""
        return self.simulator.run(
            events=[(m[0], m[1], m[4], m[2]) for m in timeline["events"]],
            compute_seconds=compute_seconds(timeline),
            options={
                "policy": "auto",
                "offload_optim_frac": 0.0,
                "offload_param_frac": 0.0,
                "margin_ratio": 1.0,
                "max_prefetch": 1,
                "device_bytes": device_bytes,
                "host_bytes": 2**62,
                "nvme_bytes_per_second": 0.0,
                "ranks_sharing": 1,
                "h2d_bytes_per_second": float(link or self.hardware["copy"]),
                "d2h_bytes_per_second": float(link or self.hardware["copy"]),
                "dram_bytes_per_second": self.hardware["adam"],
                "update_bytes_per_second": 0.0,
                "device_update_fraction": 0.0,
                "device_memory_bytes_per_second": self.hardware["adam"],
                "parameter_copies": "overlapped" if link else "synchronous",
                "gradient_copies": "overlapped" if link else "synchronous",
                "update_cores": "shared",
                "overlap": "none",
                "num_ranks": 1,
                "gathering_ranks": 1,
                "with_norm": True,
            },
        )


def compare(
    reference: Contender, predictor: Predictor, budget: int, link: int | None, rounds: int
) -> dict[str, Any]:
    """Steps in turn; each pair gives a ratio of predicted to measured time."""
    contender = Contender(reference.shape, budget, link)
    measured, predicted, peaks, predicted_peaks = [], [], [], []
    for _ in range(rounds):
        _, trace = reference.step()
        seconds, timeline = contender.step()
        figures = predictor.predict(trace, budget, link)
        measured.append(seconds)
        predicted.append(figures["step_seconds"])
        peaks.append(timeline["peak_device_bytes"])
        predicted_peaks.append(figures["peak_device_bytes"])
    if len(set(peaks)) > 1 or len(set(predicted_peaks)) > 1:
        raise RuntimeError(f"peaks differ from step to step: {peaks}, {predicted_peaks}")
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    host_bytes = contender.session.report()["host_bytes"]
    del contender
    gc.collect()
    return {
        "measured_seconds": spread(measured),
        "predicted_seconds": spread(predicted),
        "fastest": {"measured": min(measured), "predicted": min(predicted)},
        "ratio": spread(ratios),
        "bound": figures["bound"],
        "busy_seconds": figures["busy_seconds"],
        "peak_device_bytes": {"measured": peaks[0], "predicted": predicted_peaks[0]},
        "host_bytes": {"measured": host_bytes, "predicted": figures["host_bytes"]},
        "within_target": abs(statistics.median(ratios) - 1.0) <= TARGET,
        "peak_exact": peaks[0] == predicted_peaks[0],
    }


def main() -> int:
    parser = command_line("simulator", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    rounds, shares = (1, SHARES[1:2]) if arguments.quick else (arguments.rounds, SHARES)
    reference = Contender(QUICK if arguments.quick else Model(), "1TiB", None)
    figures = reference.session.report()
    # Of gradients on their way to the host (docs/design/0016).
    window = max(p.numel() * p.element_size() for p in reference.model.parameters())
    param_bytes = sum(p.numel() * p.element_size() for p in reference.model.parameters())
    predictor = Predictor(reference.model)

    table = Table(title=f"step predicted and measured, {rounds} pairs each")
    for heading in (
        "budget",
        "link",
        "measured s",
        "predicted s",
        "ratio",
        "quartiles",
        "peak",
        "",
    ):
        table.add_column(heading)
    results = {}
    for share in shares:
        for link in (None, LINK):
            room = int((2.0 if share is None else share) * param_bytes)
            budget = int(figures["peak_nonmodel_bytes"]) + room + (window if link else 0)
            # Anew for each: the machine may be slower than it was.
            hardware = measure_hardware(param_bytes // 4, int(figures["chunk_bytes"]))
            predictor.hardware = hardware
            found = compare(reference, predictor, budget, link, rounds)
            name = "ample" if share is None else f"tight({share})"
            results[f"{name}, {'link' if link else 'no link'}"] = {
                "budget": budget,
                "hardware_bytes_per_second": hardware,
                **found,
            }
            ratio, peak = found["ratio"], found["peak_device_bytes"]
            table.add_row(
                name,
                "2 GB/s" if link else "memory",
                f"{found['measured_seconds']['median']:.3f}",
                f"{found['predicted_seconds']['median']:.3f}",
                f"{ratio['median']:.3f}",
                f"{ratio['lower_quartile']:.3f} - {ratio['upper_quartile']:.3f}",
                "exact" if found["peak_exact"] else f"{peak['predicted'] - peak['measured']:+d}",
                "[green]met" if found["within_target"] and found["peak_exact"] else "[red]missed",
            )
    console.print(table)

    record = {
        "rounds": rounds,
        "link_bytes_per_second": LINK,
        "target": {"step_time": TARGET, "peak_device_bytes": "equal"},
        "results": results,
    }
    write_record(arguments, "simulator", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
