# Question: how much longer does a step of compiled blocks take when castor follows them?
# Baseline: plain PyTorch with the same blocks compiled alike (inductor, fullgraph=True), AdamW of
#     fused=True and no clipping, in the same process: both run the same compiled code.
# Model: GPT-2 of 42.5M parameters at 4 x 128 tokens in fp32; an ample budget, and one that streams.
# Clock: CPU time of the process, so that other work on the machine is not counted; nothing waits
#     here. Contenders step in turn; ratios are taken within a round. The first rounds compile and
#     plan, and are not timed.
"""Compiled blocks with castor and without: `python benchmarks/compiled.py [--quick]`."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from _machine import command_line, describe_machine, paired, write_record
from _steps import LR, QUICK, Model
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from castor import Booster, GeminiPlugin

TOLERANCE = 1e-4
WARMUP = 3
STREAMED_SHARE = 0.5
"""Of the parameters' bytes, which a budget that streams has beside activations."""


class Contender:
    """A model with compiled blocks, and what its steps took."""

    def __init__(self, model: Model, device_memory: int | None) -> None:
        """Boosts the model in a budget; None: it is plain PyTorch's."""
        self.data, self.module = model, model.build()
        for block in self.module.transformer.h:
            block.compile(fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR, fused=True)
        self.booster = None
        if device_memory is not None:
            plugin = GeminiPlugin(
                device="cpu", device_memory=device_memory, host_memory="4GiB", precision="fp32"
            )
            self.booster = Booster(plugin)
            self.booster.boost(self.module, self.optimizer)
        self.passes: list[float] = []
        self.steps: list[float] = []
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """One step on the batch of that number."""
        batch = self.data.batch(number)
        gc.collect()
        start = time.process_time()
        loss = self.module(**batch).loss
        loss.backward()
        middle = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.passes.append(middle - start)
        self.steps.append(time.process_time() - start)
        self.losses.append(loss.item())

    def figures(self, plain: Contender) -> dict[str, Any]:
        """What it took beside plain PyTorch, and what it kept to."""
        assert self.booster is not None
        report = self.booster.report()
        error = max(abs(a - b) / b for a, b in zip(self.losses, plain.losses, strict=True))
        if error > TOLERANCE:
            raise RuntimeError(f"the losses differ by {error:.1e}")
        if report.divergent_steps or report.peak_device_bytes > report.device_budget_bytes:
            raise RuntimeError("the boosted model did not run by plan, or left its budget")
        return {
            "device_budget_bytes": report.device_budget_bytes,
            "peak_nonmodel_bytes": report.peak_nonmodel_bytes,
            "largest_relative_loss_difference": error,
            "step_ratio": paired(self.steps[WARMUP:], plain.steps[WARMUP:]),
            "forward_and_backward_ratio": paired(self.passes[WARMUP:], plain.passes[WARMUP:]),
        }


def main() -> None:
    parser = command_line("compiled", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    gc.freeze()  # a collection looks through what steps make, not through what was imported
    machine, rounds = describe_machine(), 1 if args.quick else args.rounds
    model = QUICK if args.quick else Model()

    plain, ample = Contender(model, None), Contender(model, 2**32)
    for number in range(WARMUP):
        plain.step(number)
        ample.step(number)
    assert ample.booster is not None
    beside = ample.booster.report().peak_nonmodel_bytes
    streaming = Contender(model, beside + int(STREAMED_SHARE * 4 * model.num_params))
    for number in range(WARMUP):
        streaming.step(number)
    for number in range(WARMUP, WARMUP + rounds):
        order = (plain, ample, streaming) if number % 2 else (streaming, ample, plain)
        for contender in order:
            contender.step(number)
    broken = sum(counters["graph_break"].values())
    if broken:
        raise RuntimeError(f"{broken} graph breaks")
    results = {"ample": ample.figures(plain), "streaming": streaming.figures(plain)}

    table = Table("budget", "step", "forward and backward", title=f"{model.title}: castor / plain")
    for name, figures in results.items():
        ratios = [figures[key] for key in ("step_ratio", "forward_and_backward_ratio")]
        cells = [f"{r['median']:.3f} ({r['min']:.3f} to {r['max']:.3f})" for r in ratios]
        table.add_row(name, *cells)
    Console().print(table)
    write_record(args, "compiled", {"graph_breaks": broken, "results": results}, machine=machine)


if __name__ == "__main__":
    main()
