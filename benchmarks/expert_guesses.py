# Question: which experts will a token need in the next layer, before that layer's router chooses?
# Baseline: the experts that the router chose. Guesses: those that the next layer's router chooses
#     from this layer's hidden state (Eliseev & Mazur 2023, "Fast Inference of Mixture-of-Experts
#     Language Models with Offloading"), and those of the last token.
# Figures: the share of the chosen experts that are guessed; those that the cache lacks; the share
#     of these that are guessed, and the share of copies for guesses that the token needs. The last
#     two also where the likeliest missing expert of a layer alone is copied.
# Work: one row of sampled tokens. A cache of half or a quarter of each layer's experts, of
#     which the least recently used leaves, is simulated: a guess is worth something where it lacks
#     the expert.
# Models: a Qwen3-MoE of random values as in benchmarks/experts.py, with fewer numbers in an expert;
#     a small one that is trained here, on the bytes of this repository's docs, with the loss that
#     balances experts. Nothing is boosted.
"""Guesses of the next experts: `python benchmarks/expert_guesses.py [--quick]`."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _machine import command_line, describe_machine, write_record
from _steps import SEED
from experts import build
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NEXT_ROUTER, LAST_TOKEN = "the next layer's router", "the last token's experts"
RANDOM_SIZES = {"hidden_size": 512, "moe_intermediate_size": 32, "num_hidden_layers": 16}
QUICK_SIZES = {"hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 4}
TRAINED_SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
CACHED = {"half": 2, "a quarter": 4}
ROWS, SEQUENCE, LR = 8, 128, 2e-3


def train(layers: int, steps: int) -> tuple[Any, list[float]]:
    """A small Qwen3-MoE that predicts bytes of the docs, and its losses."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        **TRAINED_SIZES,
        num_hidden_layers=layers,
        vocab_size=256,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    model = Qwen3MoeForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses: list[float] = []
    for number in range(steps):
        ids = torch.stack([passage(SEQUENCE) for _ in range(ROWS)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % 50 == 0:
            print(f"step {number}: loss {losses[-1]:.2f}", flush=True)
    return model.eval(), losses


@cache
def text() -> bytes:
    """The docs of this repository."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    return b"".join(page.read_bytes() for page in pages)


def passage(length: int) -> torch.Tensor:
    """Bytes of the docs, from a random one on."""
    begin = int(torch.randint(len(text()) - length, ()))
    return torch.tensor(list(text()[begin : begin + length]))


def record(model: Any, prompt: torch.Tensor, tokens: int) -> list[list[dict[str, list[int]]]]:
    """Generates, and returns what each layer chose and what each guess was, token by token."""
    layers = [layer.mlp for layer in model.model.layers]
    found: list[list[dict[str, list[int]]]] = [[] for _ in layers]
    guessed: list[list[int]] = [[] for _ in layers]

    def note(at: int, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
        if hidden.shape[0] > 1:
            return  # the prompt
        last = found[at][-1]["chosen"] if found[at] else []
        found[at].append({"chosen": chosen[0].tolist(), LAST_TOKEN: last, NEXT_ROUTER: guessed[at]})
        if at + 1 < len(layers):
            scores = torch.nn.functional.linear(hidden, layers[at + 1].gate.weight)
            guessed[at + 1] = scores[0].topk(chosen.shape[1]).indices.tolist()

    for at, layer in enumerate(layers):
        layer.experts.register_forward_pre_hook(
            lambda _, args, at=at: note(at, args[0].reshape(-1, args[0].shape[-1]), args[1])
        )
    with torch.no_grad():
        model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            pad_token_id=0,
        )
    return found


def judge(found: list[list[dict[str, list[int]]]], cached: int) -> dict[str, dict[str, float]]:
    """Shares of right guesses over all layers but the first, once the simulated caches are full.

    Args:
        found: Of record().
        cached: Number of experts of a layer that its cache has room for.
    """
    results = {}
    for guess in (NEXT_ROUTER, LAST_TOKEN):
        counts: Counter[str] = Counter()
        for tokens in found[1:]:
            cache: list[int] = []  # the least recently used first
            for number, token in enumerate(tokens):
                chosen = set(token["chosen"])
                missing = chosen - set(cache)
                if number > len(tokens) // 4:
                    ahead = [one for one in token[guess] if one not in cache]
                    counts["chosen"] += len(chosen)
                    counts["right"] += len(chosen & set(token[guess]))
                    counts["missing"] += len(missing)
                    counts["ahead"] += len(ahead)
                    counts["right ahead"] += len(missing & set(ahead))
                    counts["first"] += len(ahead[:1])
                    counts["right first"] += len(missing & set(ahead[:1]))
                cache = [one for one in cache if one not in chosen] + token["chosen"]
                cache = cache[-cached:]
        results[guess] = {
            "experts_guessed": counts["right"] / counts["chosen"],
            "missing": counts["missing"] / counts["chosen"],
            "missing_guessed": counts["right ahead"] / max(1, counts["missing"]),
            "copies_needed": counts["right ahead"] / max(1, counts["ahead"]),
            "first_guessed": counts["right first"] / max(1, counts["missing"]),
            "first_needed": counts["right first"] / max(1, counts["first"]),
        }
    return results


def show(cases: dict[str, Any], console: Console) -> None:
    table = Table(title="guesses of a layer's experts, one layer ahead")
    headings = ("", "guess", "experts guessed", "missing", "missing guessed", "copies needed")
    for heading in (*headings, "guessed by the first", "first needed"):
        table.add_column(heading, justify="left" if heading in ("", "guess") else "right")
    for name, case in cases.items():
        for guess, result in case["guesses"].items():
            table.add_row(name, guess, *(f"{share:.0%}" for share in result.values()))
    console.print(table)


def main() -> int:
    parser = command_line("expert_guesses", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    machine = describe_machine()
    steps, tokens = (3, 12) if arguments.quick else (arguments.steps, arguments.tokens)
    cases: dict[str, Any] = {}
    sizes = QUICK_SIZES if arguments.quick else RANDOM_SIZES
    model = build(sizes)
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(model.config.vocab_size, (4,), generator=generator)
    found = record(model, prompt, tokens)
    for name, share in CACHED.items():
        guesses = judge(found, model.config.num_experts // share)
        cases[f"random, {name} cached"] = {"sizes": sizes, "guesses": guesses}
    model, losses = train(2 if arguments.quick else 8, steps)
    found = record(model, passage(64), tokens)
    ends = [losses[0], sum(losses[-20:]) / len(losses[-20:])]
    for name, share in CACHED.items():
        guesses = judge(found, model.config.num_experts // share)
        cases[f"trained, {name} cached"] = {"steps": steps, "losses": ends, "guesses": guesses}
    show(cases, Console())
    print(f"trained: loss {ends[0]:.2f} to {ends[1]:.2f}")
    write_record(arguments, "expert_guesses", {"tokens": tokens, "cases": cases}, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
