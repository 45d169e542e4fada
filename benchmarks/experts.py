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
from typing import Any

import torch
from _generation import LINK, Contender
from _machine import command_line, describe_machine, paired, spread, write_record
from _steps import SEED, VOCAB
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from castor import Booster, GeminiPlugin

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


def contender(name: str, sizes: dict[str, int]) -> Contender:
    """The model with one setting."""
    model, booster = build(sizes), None
    if name != PLAIN:
        param_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=param_bytes // 2,
            host_memory=param_bytes + (256 << 20),
            precision="fp32",
            link_bandwidth="2GB/s",
            gather_experts=name == BY_ROW,
        )
        booster = Booster(plugin=plugin)
        booster.boost(model)
    return Contender(model, booster, prompt=PROMPT, tokens=TOKENS[name], do_sample=True)


def figures(contender: Contender) -> dict[str, Any]:
    """Figures of a contender; of castor's also the share of experts that the device had."""
    found = contender.figures()
    if contender.booster is not None:
        counts = [
            (one.grown("expert_hits"), one.grown("expert_misses")) for one in contender.rounds
        ]
        found["hits"] = spread([hits / max(1, hits + misses) for hits, misses in counts])
    return found


def run(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Figures of each contender."""
    results, seconds, tokens = {}, {}, {}
    for name in TOKENS:
        one = contender(name, sizes)
        one.warm_up()
        for _ in range(rounds):
            one.run()
        results[name], seconds[name] = figures(one), one.seconds()
        tokens[name] = [each.tokens for each in one.rounds]
        param_bytes = one.param_bytes
        del one
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
