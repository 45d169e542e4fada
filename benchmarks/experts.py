# Question: does a token of a mixture of experts behind a slow link take no longer than the experts
#     that the cache on the device lacks?
# Baseline: the bytes of those experts at the link's rate; beside it full layers, which castor
#     streams with gather_experts=False, and plain PyTorch with all parameters in memory.
# Work: generate(), sampling, one row, behind an emulated link of 2 GB/s, with half of the bytes of
#     the parameters as the device budget: caches and activations are in it too.
# Model: a Qwen3-MoE of 16 layers with 64 experts, 4 for each token; fp32. Its values and so its
#     tokens are random: consecutive tokens share few experts.
# Clock: from the first token, which is the prompt's, to the last. Contenders run one after the
#     other, since memory has no room for both; their tokens are compared. Torch computes on one
#     core: the link's thread needs the other, which it does not on a GPU.
"""Experts behind a slow link: `python benchmarks/experts.py [--rounds R] [--quick]`."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import SEED, VOCAB
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StoppingCriteria

from castor import Booster, GeminiPlugin

LINK = 2e9
PROMPT = 4
TARGET = 1.15
SPEEDUP = 5.0
PLAIN, FULL_LAYERS, BY_ROW = "plain PyTorch", "full layers", "experts"
TOKENS = {PLAIN: 48, FULL_LAYERS: 5, BY_ROW: 48}
"""New tokens of a round: full layers take over a second each."""
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 16}
QUICK_SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4}


def build(sizes: dict[str, int]) -> Any:
    """A Qwen3-MoE: 1.2G parameters, 4.9 GB, nearly all of them in experts."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=VOCAB,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model = model.to_empty(device="cpu").requires_grad_(False).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    first: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        short = name.rpartition("experts.")[2]
        if "norm" in name:
            param.fill_(1.0)
        elif "experts." in name and short in first:  # drawing them all would take minutes
            param.copy_(first[short])
        else:
            # Tokens differ by their embeddings, which decide where the routers send them.
            first[short] = param.normal_(std=1.0 if "embed_tokens" in name else 0.02)

    return model


class Clock(StoppingCriteria):
    """What a token costs, as it is done; stops nothing."""

    def __init__(self, booster: Booster | None) -> None:
        self.booster = booster
        self.seconds: list[float] = []
        self.reports: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Notes the time, and what castor has moved."""
        self.seconds.append(time.perf_counter())
        if self.booster is not None:
            self.reports.append(self.booster.report())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Contender:
    """The model with one setting, and what its tokens took in each round."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.num_tokens = TOKENS[name]
        self.model = build(sizes)
        self.param_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.booster: Booster | None = None
        if name != PLAIN:
            plugin = GeminiPlugin(
                device="cpu",
                device_memory=self.param_bytes // 2,
                host_memory=self.param_bytes + (256 << 20),
                precision="fp32",
                link_bandwidth="2GB/s",
                gather_experts=name == BY_ROW,
            )
            self.booster = Booster(plugin=plugin)
            self.booster.boost(self.model)
        self.seconds: list[float] = []
        self.link_seconds: list[float] = []
        self.hits: list[float] = []
        self.tokens: list[list[int]] = []

    def run(self) -> None:
        """One round."""
        prompt = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(SEED))
        clock = Clock(self.booster)
        torch.manual_seed(SEED + len(self.seconds))
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.num_tokens,
            min_new_tokens=self.num_tokens,
            do_sample=True,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        self.tokens.append(tokens[0].tolist())
        count = self.num_tokens - 1
        self.seconds.append((clock.seconds[-1] - clock.seconds[0]) / count)
        if self.booster is None:
            return
        first, last = clock.reports[0], clock.reports[-1]
        self.link_seconds.append((last.h2d_bytes - first.h2d_bytes) / count / LINK)
        hits = last.expert_hits - first.expert_hits
        needed = hits + last.expert_misses - first.expert_misses
        self.hits.append(hits / needed if needed else 0.0)

    def figures(self) -> dict[str, Any]:
        """Seconds of a token, and what it copied over the link."""
        if self.booster is None:
            return {"seconds": spread(self.seconds)}
        report = self.booster.report()
        if report.peak_device_bytes > report.device_budget_bytes:
            raise RuntimeError(f"a peak of {report.peak_device_bytes} bytes passes the budget")
        return {
            "seconds": spread(self.seconds),
            "link_seconds": spread(self.link_seconds),
            "over_link": paired(self.seconds, self.link_seconds),
            "hits": spread(self.hits),
            "report": vars(report),
        }


def run(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Figures of each contender."""
    results, seconds, tokens = {}, {}, {}
    for name in TOKENS:
        contender = Contender(name, sizes)
        contender.run()  # untimed: the plan is made of it, and the cache filled
        for values in (contender.seconds, contender.link_seconds, contender.hits):
            values.clear()
        for _ in range(rounds):
            contender.run()
        results[name] = contender.figures()
        seconds[name], tokens[name] = contender.seconds, contender.tokens
        param_bytes = contender.param_bytes
        del contender
        gc.collect()
    for plain, full, by_row in zip(*(tokens[name] for name in TOKENS), strict=True):
        if by_row != plain or plain[: len(full)] != full:
            raise RuntimeError("castor generates other tokens than plain PyTorch")
    speedup = paired(seconds[FULL_LAYERS], seconds[BY_ROW])
    return {
        "param_bytes": param_bytes,
        "results": results,
        "speedup": speedup,
        "met": results[BY_ROW]["over_link"]["median"] <= TARGET and speedup["median"] >= SPEEDUP,
    }


def show(case: dict[str, Any], console: Console) -> None:
    table = Table(title=f"half of {case['param_bytes'] / 1e9:.2f} GB, behind {LINK / 1e9:g} GB/s")
    for heading in ("", "ms a token", "link ms", "token / link", "on the device"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in case["results"].items():
        of_link = ("", "", "")
        if "over_link" in result:
            of_link = (
                f"{1e3 * result['link_seconds']['median']:.1f}",
                f"{result['over_link']['median']:.3f}",
                f"{result['hits']['median']:.0%}",
            )
        table.add_row(name, f"{1e3 * result['seconds']['median']:.1f}", *of_link)
    console.print(table)
    verdict = "met" if case["met"] else "MISSED"
    console.print(
        f"{case['speedup']['median']:.1f} times the tokens (at least {SPEEDUP:g}); a token over "
        f"its missing experts at most {TARGET}: {verdict}"
    )


def main() -> int:
    parser = command_line("experts", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    rounds = 1 if arguments.quick else arguments.rounds
    case = run(QUICK_SIZES if arguments.quick else SIZES, rounds)
    show(case, Console())
    record = {
        "rounds": rounds,
        "tokens": TOKENS,
        "link_bytes_per_second": LINK,
        "target": TARGET,
        "speedup_target": SPEEDUP,
        **case,
    }
    write_record(arguments, "experts", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
