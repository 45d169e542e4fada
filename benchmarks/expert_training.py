# Question: does a training step over frozen experts fetch no more than the experts that its tokens
#     touch, and how much sooner is it over than one that streams full layers?
# Baseline: castor with gather_experts=False, which streams every layer; plain PyTorch with all
#     parameters in memory.
# Work: LoRA on the attention of a Qwen3-MoE of 6 layers with 64 experts, 4 for each token, whose
#     shape and values are those of benchmarks/experts.py; 2 x 128 tokens a step, in fp32, behind an
#     emulated link of 2 GB/s, with half of the bytes of the parameters and 32 MiB as the budget.
#     placement_policy="cpu": no layer stays on the device, so that each of them is counted.
# Batches: the routers are random, so that tokens go to experts by what they are. The fewer
#     distinct tokens a batch has, the fewer experts of a layer it touches.
# Bytes: an experts' module is called twice in a step, in forward and for backward. Touched bytes
#     are those of the distinct experts of each layer, twice. What the link moves beside them is at
#     most the other parameters, twice.
# Method: contenders and batches take turns. Losses of castor's contenders are compared bit for bit,
#     and with plain PyTorch's up to a relative difference of 1e-6.
"""Training over frozen experts: `python benchmarks/expert_training.py [--rounds R] [--quick]`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
from _generation import LINK
from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import SEED
from experts import build
from rich.console import Console
from rich.table import Table

from castor import Booster, GeminiPlugin, MemoryReport

ROWS, SEQUENCE, LR = 2, 128, 1e-3
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 6}
QUICK_SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
PLAIN, FULL_LAYERS, BY_ROW = "plain PyTorch", "full layers", "experts"
DISTINCT = {"4 tokens": 4, "8 tokens": 8, "16 tokens": 16}
"""Batches, by the number of distinct tokens in each. With more, some layers come in full."""
SETTLED = 3
"""Steps after which the plan is made, and experts come by the row."""
BYTES_TARGET = 1.10
TOLERANCE = 1e-6


class Contender:
    """A model with adapters, its optimizer and what its steps took."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        model = build(sizes)
        self.param_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.touched_bytes = 0
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self._count)
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(SEED)
        self.model = peft.get_peft_model(model, config).train()
        adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(adapters, lr=LR, fused=True)
        self.booster: Booster | None = None
        if name != PLAIN:
            self.booster = Booster(
                plugin=GeminiPlugin(
                    device="cpu",
                    device_memory=self.param_bytes // 2 + (32 << 20),
                    host_memory=2 * self.param_bytes + (256 << 20),
                    precision="fp32",
                    link_bandwidth="2GB/s",
                    placement_policy="cpu",
                    activations="keep",
                    tile_logits=False,
                    gather_experts=name == BY_ROW,
                )
            )
            self.model, self.optimizer, *_ = self.booster.boost(self.model, self.optimizer)

    def _count(self, module: Any, args: Any) -> None:
        row_bytes = sum(p.nbytes // p.shape[0] for p in module.parameters())
        self.touched_bytes += 2 * row_bytes * args[1].unique().numel()

    def report(self) -> MemoryReport | None:
        """Returns castor's figures so far."""
        return self.booster.report() if self.booster else None

    def step(self, ids: torch.Tensor) -> dict[str, Any]:
        """Runs one step, and returns its loss, times and bytes."""
        before, self.touched_bytes = self.report(), 0
        seconds, cpu_seconds = time.perf_counter(), time.process_time()
        loss = self.model(input_ids=ids, labels=ids).loss
        if self.booster:
            self.booster.backward(loss, self.optimizer)
        else:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {
            "loss": loss.item(),
            "seconds": time.perf_counter() - seconds,
            "cpu_seconds": time.process_time() - cpu_seconds,
            "touched_bytes": self.touched_bytes,
        }
        if before and (after := self.report()):
            if after.peak_device_bytes > after.device_budget_bytes:
                raise RuntimeError(f"a peak of {after.peak_device_bytes} bytes passes the budget")
            found["fetched_bytes"] = after.expert_fetched_bytes - before.expert_fetched_bytes
            found["link_bytes"] = after.h2d_bytes - before.h2d_bytes
        return found


def batch(distinct: int, number: int) -> torch.Tensor:
    """Tokens of a step, of which so many are distinct."""
    generator = torch.Generator().manual_seed(1000 * distinct + number)
    some = torch.randperm(8192, generator=generator)[:distinct]
    return some[torch.randint(distinct, (ROWS, SEQUENCE), generator=generator)]


def run(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Figures of each contender with each batch."""
    contenders = {name: Contender(name, sizes) for name in (PLAIN, FULL_LAYERS, BY_ROW)}
    steps: dict[str, dict[str, list[dict[str, Any]]]] = {}
    number = 0

    def each(use: Callable[[str, dict[str, Any]], None], distinct: int) -> None:
        nonlocal number
        number += 1
        losses: dict[str, float] = {}
        for name, contender in contenders.items():
            step = contender.step(batch(distinct, number))
            use(name, step)
            losses[name] = step["loss"]
        if losses[BY_ROW] != losses[FULL_LAYERS] or not math.isclose(
            losses[BY_ROW], losses[PLAIN], rel_tol=TOLERANCE
        ):
            raise RuntimeError(f"step {number}: the losses differ: {losses}")

    for _ in range(SETTLED):
        each(lambda name, step: None, DISTINCT["8 tokens"])
    for _ in range(rounds):
        for title, distinct in DISTINCT.items():
            found = steps.setdefault(title, {name: [] for name in contenders})
            each(lambda name, step, found=found: found[name].append(step), distinct)  # type: ignore[misc]
    sizes_of = {n: p.nbytes for n, p in contenders[PLAIN].model.named_parameters()}
    expert_bytes = 2 * sum(nbytes for name, nbytes in sizes_of.items() if ".experts." in name)
    other_bytes = 2 * sum(sizes_of.values()) - expert_bytes
    results = {title: figures(found, expert_bytes, other_bytes) for title, found in steps.items()}
    return {
        "param_bytes": contenders[PLAIN].param_bytes,
        "other_bytes": other_bytes,
        "results": results,
        "met": all(
            one[key]["max"] <= BYTES_TARGET
            for one in results.values()
            for key in ("fetched_over_touched", "link_over_touched")
        ),
    }


def figures(
    found: dict[str, list[dict[str, Any]]], expert_bytes: int, other_bytes: int
) -> dict[str, Any]:
    """Figures of the steps with one kind of batch.

    Args:
        found: Figures of each contender's steps.
        expert_bytes: Bytes of all experts, twice.
        other_bytes: Bytes of all other parameters, twice, which the link may move beside rows.
    """

    def of(name: str, key: str) -> list[float]:
        return [step[key] for step in found[name]]

    by_row = [{"touched": s["touched_bytes"], **s} for s in found[BY_ROW]]
    return {
        "touched": spread([step["touched"] / expert_bytes for step in by_row]),
        "touched_bytes": spread([step["touched"] for step in by_row]),
        "fetched_bytes": spread(of(BY_ROW, "fetched_bytes")),
        "fetched_over_touched": paired(of(BY_ROW, "fetched_bytes"), of(BY_ROW, "touched_bytes")),
        "link_over_touched": paired(
            [moved - other_bytes for moved in of(BY_ROW, "link_bytes")],
            of(BY_ROW, "touched_bytes"),
        ),
        "link_bytes": {name: spread(of(name, "link_bytes")) for name in (FULL_LAYERS, BY_ROW)},
        "seconds": {name: spread(of(name, "seconds")) for name in found},
        "cpu_seconds": {name: spread(of(name, "cpu_seconds")) for name in found},
        "speedup": paired(of(FULL_LAYERS, "seconds"), of(BY_ROW, "seconds")),
    }


def show(case: dict[str, Any], console: Console) -> None:
    title = f"half of {case['param_bytes'] / 1e9:.2f} GB, behind {LINK / 1e9:g} GB/s"
    table = Table(title=title)
    headings = ("", "touched", "touched MB", "fetched MB", "link MB", "full layers' MB")
    for heading in (*headings, "plain s", "full layers s", "experts s", "times as fast"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in case["results"].items():
        table.add_row(
            name,
            f"{result['touched']['median']:.0%}",
            *(f"{result[key]['median'] / 1e6:.0f}" for key in ("touched_bytes", "fetched_bytes")),
            *(f"{result['link_bytes'][one]['median'] / 1e6:.0f}" for one in (BY_ROW, FULL_LAYERS)),
            *(f"{result['seconds'][one]['median']:.2f}" for one in (PLAIN, FULL_LAYERS, BY_ROW)),
            f"{result['speedup']['median']:.2f}",
        )
    console.print(table)
    verdict = "met" if case["met"] else "MISSED"
    console.print(
        f"rows fetched, and all of the link but {case['other_bytes'] / 1e6:.0f} MB of other "
        f"parameters, over touched bytes at most {BYTES_TARGET}: {verdict}"
    )


def main() -> int:
    parser = command_line("expert_training", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    rounds = 1 if arguments.quick else arguments.rounds
    case = run(QUICK_SIZES if arguments.quick else SIZES, rounds)
    show(case, Console())
    record = {"rounds": rounds, "link_bytes_per_second": LINK, "target": BYTES_TARGET, **case}
    write_record(arguments, "expert_training", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
