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

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _machine import RESULTS, ROOT, describe_machine, write_record
from _memory import PeakWatch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from castor import Booster, GeminiPlugin, LazyInitContext

LAYERS, WIDTH, VOCAB, SEQUENCE = 32, 4096, 128256, 8
STEPS, MAX_NORM = 3, 1.0
DEVICE_MEMORY, HOST_MEMORY = "4GiB", "12GiB"
STORED_BYTES = 8.1  # a parameter: bf16 weight and gradient, 16 bits of the master, int8 moments
PEAK_BAR = 19 * 2**30


def config_of(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500000.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def num_params(layers: int) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in LlamaForCausalLM(config_of(layers)).parameters())


def layers_that_fit(layers: int, directory: Path) -> int:
    """The most of `layers` whose state finds room in the directory beside 2 GiB that stay free."""
    room = shutil.disk_usage(directory).free - 2 * 2**30
    while layers > 1 and STORED_BYTES * num_params(layers) > room:
        layers -= 1
    return layers


def peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def train(
    layers: int, steps: int, sequence: int, directory: str, console: Console
) -> dict[str, Any]:
    watch, start = PeakWatch(), time.perf_counter()
    torch.manual_seed(0)
    with LazyInitContext():
        model = LlamaForCausalLM(config_of(layers)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plugin = GeminiPlugin(
        device="cpu",
        device_memory=DEVICE_MEMORY,
        host_memory=HOST_MEMORY,
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
    ids = torch.randint(VOCAB, (1, sequence), generator=torch.Generator().manual_seed(1))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--directory", type=Path, default=ROOT / "build")
    parser.add_argument("--output", type=Path, default=RESULTS / "llama8b.json")
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()

    arguments.directory.mkdir(parents=True, exist_ok=True)
    layers = layers_that_fit(arguments.layers, arguments.directory)
    parameters = num_params(layers)
    console.print(f"Llama of {layers} layers, {parameters / 1e9:.2f}B parameters")
    if layers < arguments.layers:
        console.print(
            f"[yellow]{arguments.directory} has no room for all of {arguments.layers} layers "
            f"({STORED_BYTES * num_params(arguments.layers) / 1e9:.0f} GB): {layers} of them"
        )
    with tempfile.TemporaryDirectory(prefix="castor-bench-", dir=arguments.directory) as folder:
        run = train(layers, arguments.steps, arguments.sequence, folder, console)
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
        "layers": layers,
        "layers_asked": arguments.layers,
        "parameters": parameters,
        "device_memory": DEVICE_MEMORY,
        "host_memory": HOST_MEMORY,
        "sequence": arguments.sequence,
        "peak_resident_bytes": peak,
        "peak_bar_bytes": PEAK_BAR,
        **run,
    }
    write_record(arguments.output, "llama8b", figures, machine=machine)
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
