# Question: does a model train whose parameters, gradients and optimizer state are 3 times, or 8
#     times, what device and host may hold together, the rest being on NVMe? Until 3 times the host
#     holds parameters and gradients; beyond, little but the windows on NVMe.
# Work: a GPT-2 in bf16 with fp32 masters and moments (16 bytes a parameter), built lazily. The
#     device budget is a few chunks and the activations of a short batch.
# Method: one process, one run after the other. Peaks are castor's, which no budget lets pass, and
#     beside them resident anonymous memory, read every 10 ms, above what there was before the
#     run. On the CPU device both tiers are in it, with what torch allocates of its own.
"""Beyond device and host: `python benchmarks/beyond.py [--layers N] [--times T ...]`."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _machine import ROOT, command_line, describe_machine, write_record
from _memory import PeakWatch, anonymous_bytes
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from castor import Booster, GeminiPlugin, LazyInitContext, OutOfMemoryError

SEQUENCE, HEAD_WIDTH = 32, 64
STEPS, TIMES, QUICK_TIMES = 6, (3.0, 8.0), (3.0, 5.0)
STATE_BYTES = 16  # bf16 weight and gradient, fp32 master and two moments


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model, and what goes with it."""

    layers: int = 24
    width: int = 1024
    vocab: int = 2048
    device_bytes: int = 96 * 2**20
    chunk_bytes: int = 16 * 2**20


QUICK = Size(layers=8, width=256, vocab=512, device_bytes=6 * 2**20, chunk_bytes=2**20)


def build(size: Size) -> Any:
    config = GPT2Config(
        vocab_size=size.vocab, n_positions=SEQUENCE, n_embd=size.width, n_layer=size.layers,
        n_head=size.width // HEAD_WIDTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    torch.manual_seed(0)
    with LazyInitContext():
        return GPT2LMHeadModel(config).train()


def boost(size: Size, directory: str, host_memory: int) -> tuple[Booster, Any, Any]:
    model = build(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    plugin = GeminiPlugin(
        device="cpu",
        device_memory=size.device_bytes,
        host_memory=host_memory,
        precision="bf16",
        optim_state_format="fp32",
        chunk_bytes=size.chunk_bytes,
        nvme_path=directory,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def train(size: Size, directory: str, host_memory: int) -> dict[str, Any]:
    """Six steps: losses, seconds of each, the report, and the highest resident memory."""
    gc.collect()
    before = anonymous_bytes()
    watch = PeakWatch()
    booster, model, optimizer = boost(size, directory, host_memory)
    ids = torch.randint(size.vocab, (1, SEQUENCE), generator=torch.Generator().manual_seed(1))
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return {
        "losses": losses,
        "seconds": seconds,
        "report": vars(booster.report()),
        "peak_resident_bytes": watch.stop() - before,
    }


def main() -> int:
    parser = command_line("beyond", __doc__)
    parser.add_argument("--layers", type=int, default=Size().layers)
    parser.add_argument("--times", type=float, nargs="+", default=TIMES)
    parser.add_argument("--directory", type=Path, default=ROOT / "build")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    size = QUICK if arguments.quick else Size(layers=arguments.layers)
    num_params = sum(param.numel() for param in build(size).parameters())
    total = STATE_BYTES * num_params
    runs = []
    for times in QUICK_TIMES if arguments.quick else arguments.times:
        with tempfile.TemporaryDirectory(prefix="castor-bench-", dir=arguments.directory) as folder:
            try:
                run = train(size, folder, int(total / times) - size.device_bytes)
            except OutOfMemoryError as error:
                console.print(f"{num_params / 1e6:.0f}M parameters do not fit: {error}")
                return 1
        report, losses = run["report"], run["losses"]
        budgets = report["device_budget_bytes"] + report["host_budget_bytes"]
        run["over_budgets"] = total / budgets
        runs.append(run)
        met = total >= times * budgets and losses[-1] < losses[0]
        console.print(
            f"{num_params / 1e6:.0f}M parameters, {total / 2**20:,.0f} MiB of state; device "
            f"{report['device_budget_bytes'] / 2**20:,.0f} MiB, host "
            f"{report['host_budget_bytes'] / 2**20:,.0f} MiB: {total / budgets:.2f} times both\n"
            f"host peak {report['host_bytes'] / 2**20:,.0f} MiB, device peak "
            f"{report['peak_device_bytes'] / 2**20:,.0f} MiB, on NVMe "
            f"{report['nvme_bytes'] / 2**20:,.0f} MiB, of these parameters and gradients "
            f"{report['nvme_weight_bytes'] / 2**20:,.0f} MiB, resident "
            f"{run['peak_resident_bytes'] / 2**20:,.0f} MiB\n"
            f"losses {', '.join(f'{loss:.3f}' for loss in losses)}; "
            f"{min(run['seconds']):.1f} s a step\n"
            f"at least {times:g} times the budgets, and the loss falls: "
            f"{'met' if met else 'MISSED'}"
        )
    same = all(run["losses"] == runs[0]["losses"] for run in runs)
    console.print(f"losses of all runs bitwise equal: {'yes' if same else 'NO'}")
    write_record(
        arguments,
        "beyond",
        {"parameters": num_params, "state_bytes": total, "runs": runs, "same_losses": same},
        machine=machine,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
