# Question: how much host memory does it take to build a model in chunks, beyond what its training
#     needs anyway, and does a model whose state nearly fills the machine build and train?
# Baseline: what the host tier holds once the model stands there (fp32: 16 bytes a parameter).
# Method: every way of building runs in a process of its own; its peak of resident anonymous memory,
#     less what it held after the imports, is read from /proc/self/smaps_rollup every 10 ms.
"""Peak host memory while building: `python benchmarks/build.py [--params 1.2e9]`."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import RESULTS, describe_machine, write_record
from _memory import PeakWatch, anonymous_bytes
from rich.console import Console
from rich.table import Table

WIDTH, VOCAB, HEADS, SEQUENCE = 2048, 50257, 16, 128
WAYS = ("eager", "lazy", "from_pretrained")
STEPS, DEVICE_MEMORY = 2, "1400MiB"
TARGET = 1.05  # of the final bytes, plus the largest tensor


def num_layers(num_params: float) -> int:
    """GPT-2 layers of 12 * WIDTH^2 parameters that bring the model nearest to `num_params`."""
    return max(1, round((num_params - (VOCAB + 1024) * WIDTH) / (12 * WIDTH**2)))


def config_of(layers: int) -> Any:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=layers, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    return config


def build(way: str, layers: int, directory: str | None) -> Any:
    import torch
    from transformers import GPT2LMHeadModel

    from castor import LazyInitContext

    torch.manual_seed(0)
    with contextlib.nullcontext() if way == "eager" else LazyInitContext():
        if way == "from_pretrained":
            return GPT2LMHeadModel.from_pretrained(directory)
        return GPT2LMHeadModel(config_of(layers))


def measure(way: str, layers: int, directory: str | None, train: bool, pipe: Any) -> None:
    import torch

    from castor import Booster, GeminiPlugin

    GeminiPlugin(device="cpu")  # everything is imported
    before = anonymous_bytes()
    watch = PeakWatch()
    start = time.perf_counter()
    model = build(way, layers, directory)
    before_boost = watch.peak - before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plugin = GeminiPlugin(
        device="cpu", device_memory=DEVICE_MEMORY, host_memory="20GiB", max_norm=1.0
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    model.train()
    seconds = time.perf_counter() - start
    peak = watch.stop() - before
    figures: dict[str, Any] = {
        "num_params": sum(param.numel() for param in model.parameters()),
        "largest_tensor_bytes": max(param.nbytes for param in model.parameters()),
        "bytes_before_boost": before_boost,
        "peak_bytes": peak,
        "final_host_bytes": booster.report().host_bytes,
        "seconds": seconds,
        "checksum": sum(float(param.detach().double().sum()) for param in model.parameters()),
    }
    if train:
        watch = PeakWatch()
        losses = []
        for step in range(STEPS):
            tokens = torch.randint(
                VOCAB, (1, SEQUENCE), generator=torch.Generator().manual_seed(step)
            )
            loss = model(input_ids=tokens, labels=tokens).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        figures["training"] = {
            "losses": losses,
            "peak_resident_bytes": watch.stop(),
            "report": vars(booster.report()),
        }
    pipe.send(figures)


def in_process(*arguments: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        figures: dict[str, Any] = mine.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"building ended with status {process.exitcode}; see above") from None
    process.join()
    return figures


def save_pretrained(layers: int, directory: str) -> None:
    import torch
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(config_of(layers)).save_pretrained(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=3e8, help="of the comparison")
    parser.add_argument(
        "--large", type=float, default=0, help="parameters of a lazy model to train"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "build.json")
    arguments = parser.parse_args()
    console = Console()

    machine = describe_machine()
    layers = num_layers(arguments.params)
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        saver = multiprocessing.get_context("spawn").Process(
            target=save_pretrained, args=(layers, directory)
        )
        saver.start()
        saver.join()
        for way in WAYS:
            results[way] = in_process(way, layers, directory, False)
    if arguments.large:
        results["lazy, large"] = in_process("lazy", num_layers(arguments.large), None, True)

    table = Table(
        title=f"Building a GPT-2 in chunks, fp32, AdamW ({STEPS} steps for the large one)"
    )
    for heading in ("", "parameters", "final MiB", "before boost", "peak MiB", "peak / final", "s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for way, found in results.items():
        bound = TARGET * found["final_host_bytes"] + found["largest_tensor_bytes"]
        found["within_target"] = found["peak_bytes"] <= bound
        table.add_row(
            way,
            f"{found['num_params'] / 1e6:.0f} M",
            f"{found['final_host_bytes'] / 2**20:.0f}",
            f"{found['bytes_before_boost'] / 2**20:.0f}",
            f"{found['peak_bytes'] / 2**20:.0f}",
            f"{found['peak_bytes'] / found['final_host_bytes']:.3f}",
            f"{found['seconds']:.1f}",
        )
    console.print(table)
    if len({results[way]["checksum"] for way in WAYS}) != 1:
        raise RuntimeError("the ways of building gave different weights")
    if "lazy, large" in results:
        training = results["lazy, large"]["training"]
        console.print(
            f"large: losses {training['losses']}, peak resident "
            f"{training['peak_resident_bytes'] / 2**30:.2f} GiB"
        )
    write_record(arguments.output, "build", {"results": results}, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
