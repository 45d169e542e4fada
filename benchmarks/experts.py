# Question: does a token of a mixture of experts behind a slow link take no longer than the experts
#     that the cache on the device lacks?
# Baseline: the bytes of those experts at the link's rate; beside it full layers, which castor
#     streams with gather_experts=False, plain PyTorch with all parameters in memory, and castor
#     without guesses of the next layer's experts, which takes turns with castor as it is.
# Link: the bytes of a token are those that it needed and the cache lacked, fetched by a guess or
#     not; those of wrong guesses are told apart. On a busy machine --link makes the link slower, so
#     that its share of a token's time is that of a quiet one: half a token of plain PyTorch.
# Work: generate(), sampling, one row, behind an emulated link of 2 GB/s, with half of the bytes of
#     the parameters as the device budget: caches and activations are in it too.
# Model: a Qwen3-MoE of 16 layers with 64 experts, 4 for each token; fp32. Its values and so its
#     tokens are random: consecutive tokens share few experts.
# Clock: from the first token, which is the prompt's, to the last. The other contenders run one
#     after the other, since memory has no room for both; all tokens are compared. Torch computes
#     on one core: the link's thread needs the other, which it does not on a GPU.
"""Experts behind a slow link: `python benchmarks/experts.py [--rounds R] [--link G] [--quick]`."""

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
UNGUESSED = "experts, without guesses"
TOKENS = {PLAIN: 48, FULL_LAYERS: 5, UNGUESSED: 48, BY_ROW: 48}
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


def contender(name: str, sizes: dict[str, int], link: float) -> Contender:
    """The model with one setting, behind a link of so many GB/s."""
    model, booster = build(sizes), None
    if name != PLAIN:
        param_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        plugin = GeminiPlugin(
            device="cpu",
            device_memory=param_bytes // 2,
            host_memory=param_bytes + (256 << 20),
            precision="fp32",
            link_bandwidth=f"{link:g}GB/s",
            gather_experts=name == BY_ROW,
        )
        booster = Booster(plugin=plugin)
        booster.boost(model)
    return Contender(
        model, booster, prompt=PROMPT, tokens=TOKENS[name], link=1e9 * link, do_sample=True
    )


def let_guess(model: Any, routers: list[Any] | None) -> list[Any]:
    """Lets layers guess by these routers, None: by none, and empties the cache.

    Returns:
        The routers by which they guessed.
    """
    calls = [layer.mlp.experts._compiled_call_impl for layer in model.model.layers]
    before = [call._next_router for call in calls]
    calls[0]._cache.clear()
    for i, call in enumerate(calls):
        call._next_router = routers[i] if routers else None
    return before


def in_turns(guessing: Contender, rounds: int) -> Contender:
    """Runs rounds with guesses and without, in turns; each after one that fills the cache.

    Returns:
        The contender without guesses, of the same model.
    """
    other = Contender(
        guessing.model,
        guessing.booster,
        prompt=PROMPT,
        tokens=guessing.num_tokens,
        link=guessing.link,
        do_sample=True,
    )
    routers = let_guess(guessing.model, None)
    for _ in range(rounds):
        for one, guesses in ((other, None), (guessing, routers)):
            let_guess(one.model, guesses)
            one.run()  # fills the cache
            one.rounds.pop()
            one.run()
    return other


def figures(contender: Contender) -> dict[str, Any]:
    """Figures of a contender; of castor's also the share of experts that the device had.

    A guess that was right is an expert that it did not have. "wrong" is the share of bytes over the
    link that were for wrong guesses.
    """
    found = contender.figures()
    if contender.booster is None:
        return found
    report = contender.booster.report()
    expert_bytes = report.expert_fetched_bytes // max(1, report.expert_misses)
    hits, wrong, link_seconds = [], [], []
    for one in contender.rounds:
        right = one.grown("expert_right_guesses")
        had, needed = one.grown("expert_hits") - right, one.grown("expert_misses") + right
        hits.append(had / max(1, had + needed))
        wrong_bytes = one.grown("expert_guessed_bytes") - right * expert_bytes
        wrong.append(wrong_bytes / max(1, one.grown("h2d_bytes")))
        link_seconds.append((1 - wrong[-1]) * one.link_seconds)
    return found | {
        "hits": spread(hits),
        "wrong": spread(wrong),
        "link_seconds": spread(link_seconds),
        "over_link": paired(contender.seconds(), link_seconds),
    }


def run(sizes: dict[str, int], rounds: int, link: float) -> dict[str, Any]:
    """Figures of each contender."""
    results, seconds, tokens = {}, {}, {}
    for name in (PLAIN, FULL_LAYERS, BY_ROW):
        one = contender(name, sizes, link)
        one.warm_up()
        found = {name: one}
        if name == BY_ROW:
            found = {UNGUESSED: in_turns(one, rounds), name: one}
        else:
            for _ in range(rounds):
                one.run()
        for title, each in found.items():
            results[title], seconds[title] = figures(each), each.seconds()
            tokens[title] = [round_.tokens for round_ in each.rounds]
        param_bytes = one.param_bytes
        del one, each, found
        gc.collect()
    for plain, full, *by_row in zip(*(tokens[name] for name in TOKENS), strict=True):
        if by_row != [plain, plain] or plain[: len(full)] != full:
            raise RuntimeError("castor generates other tokens than plain PyTorch")
    speedup = paired(seconds[FULL_LAYERS], seconds[BY_ROW])
    return {
        "param_bytes": param_bytes,
        "results": results,
        "speedup": speedup,
        "guesses_speedup": paired(seconds[UNGUESSED], seconds[BY_ROW]),
        "met": results[BY_ROW]["over_link"]["median"] <= TARGET and speedup["median"] >= SPEEDUP,
    }


def show(case: dict[str, Any], link: float, console: Console) -> None:
    table = Table(title=f"half of {case['param_bytes'] / 1e9:.2f} GB, behind {link:g} GB/s")
    headings = ("", "ms a token", "CPU ms", "link ms", "token / link", "on the device")
    for heading in (*headings, "wrong guesses"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in case["results"].items():
        of_link = ("", "", "", "")
        if "over_link" in result:
            of_link = (
                f"{1e3 * result['link_seconds']['median']:.1f}",
                f"{result['over_link']['median']:.3f}",
                f"{result['hits']['median']:.0%}",
                f"{result['wrong']['median']:.0%}",
            )
        both = (result[key]["median"] for key in ("seconds", "cpu_seconds"))
        table.add_row(name, *(f"{1e3 * seconds:.1f}" for seconds in both), *of_link)
    console.print(table)
    print(f"without guesses / with them: {case['guesses_speedup']['median']:.2f}")
    verdict = "met" if case["met"] else "MISSED"
    console.print(
        f"{case['speedup']['median']:.1f} times the tokens (at least {SPEEDUP:g}); a token over "
        f"its missing experts at most {TARGET}: {verdict}"
    )


def main() -> int:
    parser = command_line("experts", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", type=float, default=LINK / 1e9, help="GB/s, each way")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    rounds = 1 if arguments.quick else arguments.rounds
    sizes = QUICK_SIZES if arguments.quick else SIZES | {"num_hidden_layers": arguments.layers}
    case = run(sizes, rounds, arguments.link)
    show(case, arguments.link, Console())
    record = {
        "rounds": rounds,
        "tokens": TOKENS,
        "link_bytes_per_second": 1e9 * arguments.link,
        "target": TARGET,
        "speedup_target": SPEEDUP,
        **case,
    }
    write_record(arguments, "experts", record, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
