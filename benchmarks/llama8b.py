# Question: does a Llama of 8.03B parameters, born lazily, train on a machine with 24 GiB and no
#     GPU, the boost included, with 4 GiB of device and 12 GiB of host memory, the rest on NVMe?
# Baseline: the machine's memory; weights, gradients, masters and moments take 64 GB.
# Work: the shape of Llama-3-8B (32 layers, 4096 wide, vocabulary 128256; embedding and head are
#     1 GiB each in bf16), bf16, split_int8 states, clipping; steps over one short sequence, since
#     the bar is memory, and a CPU without matrix instructions for bf16 takes torch's plain loops:
#     0.1 to 0.2 GFLOPS for gradients of activations, a minute and more per token and step.
# Method: one process from the first import on. Its peak resident memory is VmHWM, and apart from
#     it anonymous memory, read every 10 ms, for boost and steps on their own. Where the disk has no
#     room for all layers, as many of them as fit, which the output says.
"""Llama-8B beyond host memory: `python benchmarks/llama8b.py [--layers N]`, see --help."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _machine import ROOT, command_line, describe_machine, write_record
from _memory import PeakWatch, peak_resident_bytes
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from castor import Booster, GeminiPlugin, LazyInitContext

SEQUENCE, STEPS, MAX_NORM = 2, 3, 1.0
STORED_BYTES = 8.1  # a parameter: bf16 weight and gradient, 16 bits of the master, int8 moments
PEAK_BAR = 19 * 2**30


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model, and its budgets."""

    layers: int = 32
    width: int = 4096
    vocab: int = 128256
    device_memory: str = "4GiB"
    host_memory: str = "12GiB"


QUICK = Size(layers=2, width=256, vocab=1024, device_memory="32MiB", host_memory="16MiB")


def config_of(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.width, intermediate_size=7 * size.width // 2,
        num_hidden_layers=size.layers, num_attention_heads=size.width // 128,
        num_key_value_heads=max(1, size.width // 512), max_position_embeddings=8192,
        rope_theta=500000.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def num_params(size: Size) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in LlamaForCausalLM(config_of(size)).parameters())


def with_room(size: Size, directory: Path) -> Size:
    """With the most layers whose state fits the directory beside 2 GiB that stay free."""
    room = shutil.disk_usage(directory).free - 2 * 2**30
    while size.layers > 1 and STORED_BYTES * num_params(size) > room:
        size = replace(size, layers=size.layers - 1)
    return size


def train(
    size: Size, steps: int, sequence: int, directory: str, console: Console
) -> dict[str, Any]:
    watch, start = PeakWatch(), time.perf_counter()
    torch.manual_seed(0)
    with LazyInitContext():
        model = LlamaForCausalLM(config_of(size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plugin = GeminiPlugin(
        device="cpu",
        device_memory=size.device_memory,
        host_memory=size.host_memory,
        nvme_path=directory,
        precision="bf16",
        optim_state_format="split_int8",
        max_norm=MAX_NORM,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    boost = {
        "seconds": time.perf_counter() - start,
        "peak_resident_bytes": watch.stop(),
        "nvme_written_bytes": booster.report().nvme_written_bytes,
    }
    console.print(
        f"boosted in {boost['seconds']:.0f} s, resident {boost['peak_resident_bytes'] / 2**30:.2f} "
        f"GiB at most, {boost['nvme_written_bytes'] / 1e9:.0f} GB written"
    )
    ids = torch.randint(size.vocab, (1, sequence), generator=torch.Generator().manual_seed(1))
    results = []
    for step in range(steps):
        before, watch, start = booster.report(), PeakWatch(), time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        seconds, after = time.perf_counter() - start, booster.report()
        results.append(
            {
                "loss": loss.item(),
                "seconds": seconds,
                "peak_resident_bytes": watch.stop(),
                "nvme_read_bytes": after.nvme_read_bytes - before.nvme_read_bytes,
                "nvme_written_bytes": after.nvme_written_bytes - before.nvme_written_bytes,
            }
        )
        console.print(
            f"step {step}: loss {loss.item():.3f}, {seconds:.0f} s, "
            f"{results[-1]['nvme_read_bytes'] / 1e9:.0f} GB read, "
            f"{results[-1]['nvme_written_bytes'] / 1e9:.0f} GB written, resident "
            f"{results[-1]['peak_resident_bytes'] / 2**30:.2f} GiB at most"
        )
    return {"boost": boost, "steps": results, "report": vars(booster.report())}


def main() -> int:
    parser = command_line("llama8b", __doc__)
    parser.add_argument("--layers", type=int, default=Size().layers)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--directory", type=Path, default=ROOT / "build")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    arguments.directory.mkdir(parents=True, exist_ok=True)
    asked = QUICK if arguments.quick else Size(layers=arguments.layers)
    size = with_room(asked, arguments.directory)
    parameters = num_params(size)
    console.print(f"Llama of {size.layers} layers, {parameters / 1e9:.2f}B parameters")
    if size.layers < asked.layers:
        console.print(
            f"[yellow]{arguments.directory} has no room for all of {asked.layers} layers "
            f"({STORED_BYTES * num_params(asked) / 1e9:.0f} GB): {size.layers} of them"
        )
    with tempfile.TemporaryDirectory(prefix="castor-bench-", dir=arguments.directory) as folder:
        run = train(size, arguments.steps, arguments.sequence, folder, console)
    peak = peak_resident_bytes()
    losses = [step["loss"] for step in run["steps"]]
    verdicts = {
        "losses finite and falling": all(map(math.isfinite, losses))
        and losses == sorted(losses, reverse=True),
        f"peak resident {peak / 2**30:.2f} GiB <= {PEAK_BAR / 2**30:.0f} GiB": peak <= PEAK_BAR,
    }
    for what, met in verdicts.items():
        console.print(f"{what}: {'met' if met else 'MISSED'}")
    figures = {
        "layers": size.layers,
        "layers_asked": asked.layers,
        "parameters": parameters,
        "device_memory": size.device_memory,
        "host_memory": size.host_memory,
        "sequence": arguments.sequence,
        "peak_resident_bytes": peak,
        "peak_bar_bytes": PEAK_BAR,
        **run,
    }
    write_record(arguments, "llama8b", figures, machine=machine)
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
