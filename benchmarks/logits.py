# Question: what do tiles of logits save, and what do they cost a step?
# Baseline: castor with tile_logits=False, whose loss is plain PyTorch's, in the same process.
# Models: GPT-2 of 42.5M parameters (vocabulary 8192) at 4 x 512 tokens, and a small Llama with a
#     vocabulary of 128,256 at 1 x 512; fp32, an ample budget, the same seed and batches everywhere.
# Clock: CPU time of the process, so that other work on the machine is not counted; nothing waits
#     here. Contenders step in turn; ratios are taken within a round. Bytes are exact.
"""Tiles of logits against all of them at once: `python benchmarks/logits.py [--quick]`."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from _machine import command_line, describe_machine, paired, write_record
from _steps import QUICK, VOCAB, Model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from castor import Booster, GeminiPlugin

TILES: tuple[bool | int, ...] = (False, 512, 128)
LARGE_VOCABULARY = 128_256
TOLERANCE = 2e-6


def small_llama(width: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LARGE_VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


class Contender:
    """A boosted model, and what its steps took."""

    def __init__(self, model: Any, vocabulary: int, tokens: tuple[int, int], tile: bool | int):
        self.model, self.vocabulary, self.tokens = model, vocabulary, tokens
        plugin = GeminiPlugin(
            device="cpu",
            device_memory="4GiB",
            host_memory="3GiB",
            precision="fp32",
            tile_logits=tile,
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.booster = Booster(plugin=plugin)
        self.booster.boost(model, self.optimizer)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """One step on the batch of that number; its forward and backward are timed."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, self.vocabulary, self.tokens, generator=generator)
        gc.collect()
        start = time.process_time()
        loss = self.model(input_ids=ids, labels=ids).loss
        self.booster.backward(loss, self.optimizer)
        self.seconds.append(time.process_time() - start)
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(build: Any, vocabulary: int, tokens: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Contenders in turn; the first round, which makes plans, is not timed."""
    contenders = {tile: Contender(build(), vocabulary, tokens, tile) for tile in TILES}
    for number in range(rounds + 1):
        for contender in contenders.values():
            contender.step(number)
    whole = contenders[False]
    logits_bytes = 4 * tokens[0] * tokens[1] * vocabulary
    result: dict[str, Any] = {"logits_bytes": logits_bytes, "tokens": list(tokens)}
    for tile, contender in contenders.items():
        report = contender.booster.report(contender.model)
        error = abs(contender.losses[0] - whole.losses[0]) / whole.losses[0]
        if error > TOLERANCE:
            raise AssertionError(f"tiles of {tile} give another loss: {error:.1e}")
        result["all at once" if tile is False else f"tiles of {tile}"] = {
            "peak_nonmodel_bytes": report.peak_nonmodel_bytes,
            "tiles": report.logit_tiles,
            "loss_error": error,
            "divergent_steps": report.divergent_steps,
            "forward_and_backward_ratio": paired(contender.seconds[1:], whole.seconds[1:]),
        }
    return result


def main() -> None:
    parser = command_line("logits", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    gc.freeze()  # a collection looks through what steps make, not through what was imported
    machine, rounds = describe_machine(), 1 if args.quick else args.rounds
    model = QUICK if args.quick else Model(sequence=512)
    width, tokens = (32, (1, 256)) if args.quick else (128, (1, 512))
    results = {
        f"GPT-2, {model.layers} layers": measure(
            model.build, VOCAB, (model.rows, model.sequence), rounds
        ),
        "Llama, 128k vocabulary": measure(
            lambda: small_llama(width), LARGE_VOCABULARY, tokens, rounds
        ),
    }
    table = Table("model", "loss", "peak non-model", "in logits", "forward and backward")
    for name, result in results.items():
        for loss, figures in result.items():
            if not isinstance(figures, dict):
                continue
            peak = figures["peak_nonmodel_bytes"]
            ratio = figures["forward_and_backward_ratio"]["median"]
            table.add_row(
                name,
                loss,
                f"{peak / 2**20:.1f} MiB",
                f"{peak / result['logits_bytes']:.2f}",
                f"{ratio:.2f}",
            )
    Console().print(table)
    write_record(args, "logits", {"results": results}, machine=machine)


if __name__ == "__main__":
    main()
