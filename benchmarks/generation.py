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
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by libgomp when torch is imported

import torch
from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import QUICK, SEED, VOCAB, Model
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from castor import Booster, GeminiPlugin

LINK = 2e9
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


class Clock(StoppingCriteria):
    """What a token costs, as it is done; stops nothing."""

    def __init__(self, booster: Booster | None) -> None:
        self.booster = booster
        self.seconds: list[float] = []
        self.h2d_bytes: list[int] = []
        self.demand_fetches: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Notes the time, and what castor has moved."""
        self.seconds.append(time.perf_counter())
        if self.booster is not None:
            report = self.booster.report()
            self.h2d_bytes.append(report.h2d_bytes)
            self.demand_fetches.append(report.demand_fetches)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Contender:
    """A model, and what its tokens took in each round."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.model = build().eval()
        self.booster: Booster | None = None
        if name != PLAIN:
            budget = sum(p.numel() * p.element_size() for p in self.model.parameters()) // 2
            plugin = GeminiPlugin(
                device="cpu",
                device_memory=budget,
                precision="fp32",
                link_bandwidth="2GB/s",
                max_prefetch=PREFETCH[name],
            )
            self.booster = Booster(plugin=plugin)
            self.booster.boost(self.model)
        self.seconds: list[float] = []
        self.link_seconds: list[float] = []
        self.demand_fetches: list[int] = []
        self.tokens: list[int] = []

    def run(self) -> None:
        """One round: 64 tokens."""
        prompt = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(SEED))
        clock = Clock(self.booster)
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        self.tokens = tokens[0].tolist()
        self.seconds.append((clock.seconds[-1] - clock.seconds[0]) / (TOKENS - 1))
        if self.booster is not None:
            moved = clock.h2d_bytes[-1] - clock.h2d_bytes[0]
            self.link_seconds.append(moved / (TOKENS - 1) / LINK)
            self.demand_fetches.append(clock.demand_fetches[-1] - clock.demand_fetches[0])

    def figures(self) -> dict[str, Any]:
        """Seconds of a token and, of castor's, what it streamed."""
        if self.booster is None:
            return {"seconds": spread(self.seconds)}
        report = self.booster.report()
        if report.peak_device_bytes > report.device_budget_bytes:
            raise RuntimeError(f"a peak of {report.peak_device_bytes} bytes passes the budget")
        return {
            "seconds": spread(self.seconds),
            "link_seconds": spread(self.link_seconds),
            "over_link": paired(self.seconds, self.link_seconds),
            "demand_fetches": max(self.demand_fetches),
            "streamed_bytes_per_token": spread([s * LINK for s in self.link_seconds])["median"],
            "report": vars(report),
        }


def run(build: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Figures of one model: of each contender."""
    contenders = {name: Contender(name, build) for name in (PLAIN, DEMAND, PLANNED)}
    for contender in contenders.values():
        contender.run()  # untimed: the plan is made of it
        for values in (contender.seconds, contender.link_seconds, contender.demand_fetches):
            values.clear()
    for _ in range(rounds):
        for contender in contenders.values():
            contender.run()
    for name, contender in contenders.items():
        if contender.tokens != contenders[PLAIN].tokens:
            raise RuntimeError(f"{name} generates other tokens than {PLAIN}")
    results = {name: contender.figures() for name, contender in contenders.items()}
    params = sum(p.numel() * p.element_size() for p in contenders[PLAIN].model.parameters())
    planned = results[PLANNED]
    return {
        "param_bytes": params,
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
