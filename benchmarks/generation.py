# Question: does a token generated behind a slow link take no longer than the bytes that it streams?
# Baseline: those bytes at the link's rate; beside it the same without prefetch, where a module
#     waits for each chunk that is not there, and plain PyTorch with all parameters in memory.
# Work: generate() of 64 tokens, greedy, one row, behind an emulated link of 2 GB/s, with half of
#     the parameters' bytes as the device budget: caches and activations are in it too.
# Models: GPT-2 of 42.5M and 312M parameters (benchmarks/step.py), a Llama of 134M; fp32.
# Clock: from the first token, which is the prompt's, to the last. Contenders take turns; ratios are
#     taken within a round. Tokens are compared with plain PyTorch's, and demand fetches behind
#     the first token are counted. Idle OpenMP threads sleep early (GOMP_SPINCOUNT), as in
#     benchmarks/overlap.py: the link's thread needs a core, which it does not on a GPU.
"""Tokens behind a slow link: `python benchmarks/generation.py [--rounds R] [--quick]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by libgomp when torch is imported

import torch
from _generation import LINK, Contender
from _machine import command_line, describe_machine, write_record
from _steps import QUICK, SEED, VOCAB, Model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from castor import Booster, GeminiPlugin

TOKENS = 64
TARGET = 1.10
PROMPT = 16
PLAIN, DEMAND, PLANNED = "plain PyTorch", "castor, on demand", "castor"
PREFETCH = {DEMAND: 0, PLANNED: 1}
SMALL = replace(QUICK, layers=24, width=128)
"""What --quick runs: half of it holds its embedding."""


def llama() -> Any:
    """A Llama of 134M parameters."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=17,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


CASES: dict[str, Callable[[], Any]] = {
    "GPT-2 42.5M": Model().build,
    "GPT-2 312M": Model(layers=24, width=1024).build,
    "Llama 134M": llama,
}


def contender(name: str, build: Callable[[], Any]) -> Contender:
    """A model, boosted or not."""
    model, booster = build().eval(), None
    if name != PLAIN:
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=sum(p.numel() * p.element_size() for p in model.parameters()) // 2,
            precision="fp32",
            link_bandwidth="2GB/s",
            max_prefetch=PREFETCH[name],
        )
        booster = Booster(plugin=plugin)
        booster.boost(model)
    return Contender(model, booster, prompt=PROMPT, tokens=TOKENS, do_sample=False)


def figures(contender: Contender) -> dict[str, Any]:
    """Figures of a contender; of castor's also what it streamed."""
    found = contender.figures()
    if contender.booster is not None:
        found["demand_fetches"] = max(one.grown("demand_fetches") for one in contender.rounds)
        found["streamed_bytes_per_token"] = LINK * found["link_seconds"]["median"]
    return found


def run(build: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Figures of one model: of each contender."""
    contenders = {name: contender(name, build) for name in (PLAIN, DEMAND, PLANNED)}
    for one in contenders.values():
        one.warm_up()
    for _ in range(rounds):
        for one in contenders.values():
            one.run()
    for name, one in contenders.items():
        if one.rounds[-1].tokens != contenders[PLAIN].rounds[-1].tokens:
            raise RuntimeError(f"{name} generates other tokens than {PLAIN}")
    results = {name: figures(one) for name, one in contenders.items()}
    planned = results[PLANNED]
    return {
        "param_bytes": contenders[PLAIN].param_bytes,
        "results": results,
        "met": planned["over_link"]["median"] <= TARGET and planned["demand_fetches"] == 0,
    }


def show(title: str, case: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{title}, half of its parameters, behind {LINK / 1e9:g} GB/s")
    headings = ("", "ms a token", "link ms", "token / link", "streamed", "demand fetches")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in case["results"].items():
        of_link = ("", "", "", "")
        if "over_link" in result:
            share = result["streamed_bytes_per_token"] / case["param_bytes"]
            of_link = (
                f"{1e3 * result['link_seconds']['median']:.1f}",
                f"{result['over_link']['median']:.3f}",
                f"{share:.0%}",
                str(result["demand_fetches"]),
            )
        table.add_row(name, f"{1e3 * result['seconds']['median']:.1f}", *of_link)
    console.print(table)
    verdict = "met" if case["met"] else "MISSED"
    console.print(f"a token over its bytes: at most {TARGET}, 0 demand fetches: {verdict}")


def main() -> int:
    parser = command_line("generation", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    machine = describe_machine()
    rounds = 1 if arguments.quick else arguments.rounds
    cases = {}
    for title, build in CASES.items():
        if arguments.quick and title != next(iter(CASES)):
            continue
        cases[title] = run(SMALL.build if arguments.quick else build, rounds)
        show(title, cases[title], console)
    record = {
        "rounds": rounds,
        "tokens": TOKENS,
        "link_bytes_per_second": LINK,
        "target": TARGET,
        "cases": cases,
    }
    write_record(arguments, "generation", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
