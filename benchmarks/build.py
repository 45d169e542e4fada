# Question: how much host memory does it take to build a model in chunks, beyond what its training
#     needs anyway, and does a model whose state nearly fills the machine build and train?
# Baseline: what the host tier holds once the model stands there (fp32: 16 bytes a parameter).
# Method: every way of building runs in a process of its own; its peak of resident anonymous memory,
#     less what it held after the imports, is read from /proc/self/smaps_rollup every 10 ms.
"""Peak host memory while building: `python benchmarks/build.py [--params 1.2e9]`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

from _machine import command_line, describe_machine, write_record
from _memory import PeakWatch, anonymous_bytes
from _steps import processes
from rich.console import Console
from rich.table import Table

SEQUENCE, HEAD_WIDTH = 128, 128
WAYS = ("eager", "lazy", "from_pretrained")
STEPS, DEVICE_MEMORY = 2, "1400MiB"
TARGET = 1.05  # of the final bytes, plus the largest tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a GPT-2."""

    layers: int = 1
    width: int = 2048
    vocab: int = 50257

    def of(self, num_params: float) -> Shape:
        """With the layers that bring it nearest to so many parameters."""
        beside = (self.vocab + 1024) * self.width
        layers = max(1, round((num_params - beside) / (12 * self.width**2)))
        return replace(self, layers=layers)


QUICK = Shape(width=256, vocab=1024)


def config_of(shape: Shape) -> Any:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=shape.vocab, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.width // HEAD_WIDTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    return config


def build(way: str, shape: Shape, directory: str | None) -> Any:
    import torch
    from transformers import GPT2LMHeadModel

    from castor import LazyInitContext

    torch.manual_seed(0)
    with contextlib.nullcontext() if way == "eager" else LazyInitContext():
        if way == "from_pretrained":
            return GPT2LMHeadModel.from_pretrained(directory)
        return GPT2LMHeadModel(config_of(shape))


def measure(way: str, shape: Shape, directory: str | None, train: bool, pipe: Any) -> None:
    import torch

    from castor import Booster, GeminiPlugin

    GeminiPlugin(device="cpu")  # everything is imported
    before = anonymous_bytes()
    watch = PeakWatch()
    start = time.perf_counter()
    model = build(way, shape, directory)
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
                shape.vocab, (1, SEQUENCE), generator=torch.Generator().manual_seed(step)
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
    context = processes()
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


def save_pretrained(shape: Shape, directory: str) -> None:
    import torch
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(config_of(shape)).save_pretrained(directory)


def main() -> int:
    parser = command_line("build", __doc__)
    parser.add_argument("--params", type=float, default=3e8, help="of the comparison")
    parser.add_argument(
        "--large", type=float, default=1.2e9, help="parameters of a lazy model to train; 0: none"
    )
    arguments = parser.parse_args()
    console = Console()

    machine = describe_machine()
    shape = QUICK.of(1e6) if arguments.quick else Shape().of(arguments.params)
    large = QUICK.of(4e6) if arguments.quick else Shape().of(arguments.large)
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        saver = processes().Process(target=save_pretrained, args=(shape, directory))
        saver.start()
        saver.join()
        for way in WAYS:
            results[way] = in_process(way, shape, directory, False)
    if arguments.large or arguments.quick:
        results["lazy, large"] = in_process("lazy", large, None, True)

    table = Table(
        title=f"Building a GPT-2 in chunks, fp32, AdamW ({STEPS} steps for the large one)"
    )
    for heading in ("", "parameters", "final MiB", "before boost", "peak MiB", "peak / final", "s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for way, found in results.items():
        bound = TARGET * found["final_host_bytes"] + found["largest_tensor_bytes"]
        found["peak_over_final"] = found["peak_bytes"] / found["final_host_bytes"]
        found["within_target"] = found["peak_bytes"] <= bound
        table.add_row(
            way,
            f"{found['num_params'] / 1e6:.0f} M",
            f"{found['final_host_bytes'] / 2**20:.0f}",
            f"{found['bytes_before_boost'] / 2**20:.0f}",
            f"{found['peak_bytes'] / 2**20:.0f}",
            f"{found['peak_over_final']:.3f}",
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
    write_record(arguments, "build", {"results": results}, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
