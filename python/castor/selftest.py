"""A check of an installation: `python -m castor.selftest`.

Trains a small model inside a device budget on the CPU device and holds it against plain torch, and
tries the optimizer, the out-of-memory error and a trace's way through a file. Needs torch only.
Exit status 0 if everything holds, 1 if not.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from castor import _C
from castor._loader import BUILD_INFO
from castor.booster import Booster
from castor.config import StateFormat
from castor.errors import OutOfMemoryError
from castor.optim import HybridAdam
from castor.plugins import GeminiPlugin

STEPS = 6
LR = 1e-3
LOSS_TOLERANCE = 1e-5
"""Relative; the first loss, before any update, must be equal in every bit."""
ADAM_TOLERANCE = 1e-6
"""Relative to the largest weight, after STEPS updates."""
FORMAT_TOLERANCE = 0.02
"""Relative, of a loss in bf16."""
WIDTH = 128
BUDGET = 512 * 1024
"""Bytes of the device budget in the training check; the model's parameters take 800 KiB."""


class SelfTestError(Exception):
    """A check that did not hold; the message says what was expected and what came."""


def expect(holds: bool, message: str) -> None:
    """Raises SelfTestError unless `holds`. Not assert, which `python -O` drops."""
    if not holds:
        raise SelfTestError(message)


def tower() -> nn.Sequential:
    """The model of the checks, with the same weights at every call."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def loss_of(model: nn.Module, seed: int, rows: int = 32) -> torch.Tensor:
    """The cross-entropy of random rows, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((rows, WIDTH), generator=generator)
    labels = torch.randint(0, 8, (rows,), generator=generator)
    loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), labels)
    return loss


def plugin_of(budget: int, trace_file: Path | None = None) -> GeminiPlugin:
    """The CPU device with this many bytes."""
    return GeminiPlugin(device="cpu", device_memory=budget, trace_file=trace_file)


class Boosted:
    """A boosted tower and what belongs to it."""

    def __init__(self, plugin: GeminiPlugin) -> None:
        self.booster = Booster(plugin=plugin)
        self.model: nn.Module = tower()
        self.optimizer: torch.optim.Optimizer = HybridAdam(self.model.parameters(), lr=LR)
        self.model, self.optimizer, *_ = self.booster.boost(self.model, self.optimizer)

    def train(self, steps: int) -> list[float]:
        """Losses of `steps` steps."""
        losses = []
        for seed in range(steps):
            loss = loss_of(self.model, seed)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def check_training() -> str:
    """Losses as in plain torch, in a device budget below the parameters' size."""
    plain = tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    expected = []
    for seed in range(STEPS):
        loss = loss_of(plain, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    boosted = Boosted(plugin_of(BUDGET))
    losses = boosted.train(STEPS)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    expect(losses[0] == expected[0], f"the first loss is {losses[0]}, plain torch's {expected[0]}")
    expect(worst <= LOSS_TOLERANCE, f"losses differ from plain torch's by {worst:.1e} (relative)")
    report = boosted.booster.report()
    param_bytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    expect(param_bytes > BUDGET, f"the model has {param_bytes} bytes, no more than the budget")
    expect(
        report.peak_device_bytes <= BUDGET,
        f"the device held {report.peak_device_bytes} bytes, over its budget of {BUDGET}",
    )
    expect(report.evictions > 0, "no chunk left the device, although the model does not fit")
    return (
        f"{param_bytes / 2**10:.0f} KiB of parameters in {report.peak_device_bytes / 2**10:.0f} of "
        f"{BUDGET / 2**10:.0f} KiB, losses within {worst:.0e}; host tier: {report.host_arena}"
    )


def check_adam() -> str:
    """HybridAdam against torch's AdamW, on sizes that leave a vector loop's tail."""
    torch.manual_seed(3)
    ours = [nn.Parameter(torch.randn(n)) for n in (1, 1021, 100_003)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (
        HybridAdam(ours, lr=LR, weight_decay=0.01),
        torch.optim.AdamW(theirs, lr=LR, weight_decay=0.01),
    )
    for _ in range(STEPS):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    worst = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)
    )
    expect(worst <= ADAM_TOLERANCE, f"weights differ from torch AdamW's by {worst:.1e} (relative)")
    return f"within {worst:.0e} of torch AdamW after {STEPS} steps; {_C.adam_isa()} loop"


def check_state_formats() -> str:
    """In bf16, the split state takes fp32's steps in every bit; the narrow ones train as well."""
    weights, losses = {}, {}
    for state_format in get_args(StateFormat):
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=BUDGET,
            precision="bf16",
            optim_state_format=state_format,
        )
        boosted = Boosted(plugin)
        losses[state_format] = boosted.train(STEPS)
        weights[state_format] = [p.detach().clone() for p in boosted.model.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(weights["fp32"], weights["split"], strict=True))
    expect(same, "weights of optim_state_format='split' differ from those of 'fp32'")
    worst = max(
        abs(a - b) / abs(b)
        for own in losses.values()
        for a, b in zip(own, losses["fp32"], strict=True)
    )
    expect(worst <= FORMAT_TOLERANCE, f"losses of the state formats differ by {worst:.1e}")
    return f"split is fp32 bit for bit; split_bf16 and split_int8 within {worst:.0e} of its losses"


def check_out_of_memory() -> str:
    """A budget that is too small raises, names what would do, and changes nothing."""
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in tower().modules())
    budget = largest * 4 // 2
    try:
        Boosted(plugin_of(budget))
    except OutOfMemoryError as error:
        caught = error
    else:
        raise SelfTestError(f"a device budget of {budget} bytes was accepted")
    expect(
        (caught.tier, caught.budget) == ("device", budget) and "device_memory" in str(caught),
        f"the error is about {caught.budget} bytes of {caught.tier} memory: {caught}",
    )
    boosted = Boosted(plugin_of(BUDGET))
    before = [p.detach().clone() for p in boosted.model.parameters()]
    try:
        loss_of(boosted.model, 0, rows=4096)
    except OutOfMemoryError as error:
        rows_error = error
    else:
        raise SelfTestError("a batch larger than the device budget was accepted")
    expect(rows_error.budget == BUDGET, f"the error names a budget of {rows_error.budget} bytes")
    same = all(torch.equal(a, b) for a, b in zip(boosted.model.parameters(), before, strict=True))
    expect(same, "a step that ran out of memory changed weights")
    return f"budget of {budget:,} bytes and batch of 4096 rows refused, weights untouched"


def check_trace() -> str:
    """A trace written to a file makes another run's first step follow the plan."""
    with tempfile.TemporaryDirectory(prefix="castor-selftest-") as directory:
        path = Path(directory) / "trace.json"
        first = Boosted(plugin_of(BUDGET))
        losses = first.train(2)
        first.booster.save_trace(path, first.model)
        second = Boosted(plugin_of(BUDGET, trace_file=path))
        expect(second.booster.report().plans == 1, "the trace was read, and no plan came of it")
        again = second.train(2)
        report = second.booster.report()
    expect(again == losses, f"with the trace the losses are {again}, without it {losses}")
    expect(report.divergent_steps == 0, f"{report.divergent_steps} steps left the trace's order")
    expect(report.prefetch_hits > 0, "the plan fetched nothing ahead of its use")
    return f"first step ran by plan: {report.prefetch_hits} prefetches used in 2 steps"


CHECKS: dict[str, Callable[[], str]] = {
    "training in a budget": check_training,
    "HybridAdam": check_adam,
    "state formats": check_state_formats,
    "out of memory": check_out_of_memory,
    "trace": check_trace,
}


def versions() -> Table:
    """Versions and what this machine gives."""
    table = Table(show_header=False, box=None)
    rows = {
        "castor": f"{_C.__version__} for torch {BUILD_INFO.torch}, by {BUILD_INFO.compiler}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores for this process",
        "instruction set": _C.adam_isa(),
        "libraries": f"oneTBB {BUILD_INFO.tbb}, hwloc {BUILD_INFO.hwloc}, "
        f"jemalloc {BUILD_INFO.jemalloc}",
        "installed in": str(Path(__file__).parent),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


def run(console: Console) -> bool:
    """Runs every check, after a failure too, and prints one line for each. True if all hold."""
    console.print(versions())
    # The sizes are small: more OpenMP threads gain nothing, and where something else wants the
    # cores they wait for each other in spin loops. castor's own threads stay as they are.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_checks(console)
    finally:
        torch.set_num_threads(num_threads)


def run_checks(console: Console) -> bool:
    """Runs the checks in order."""
    all_hold = True
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            detail, mark = check(), "[green]ok    [/green]"
        except Exception as error:
            # Whatever breaks is what a selftest is to show; the next check runs all the same.
            detail, mark = f"{type(error).__name__}: {error}", "[red]FAILED[/red]"
            all_hold = False
        seconds = time.perf_counter() - start
        console.print(f"{mark} {name} ({seconds:.1f} s) {escape(detail)}", soft_wrap=True)
    return all_hold


def main() -> int:
    """Exit status: 0 if the installation works."""
    start = time.perf_counter()
    all_hold = run(Console(highlight=False))
    seconds = time.perf_counter() - start
    print(f"castor selftest: {'passed' if all_hold else 'FAILED'} in {seconds:.1f} s")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
