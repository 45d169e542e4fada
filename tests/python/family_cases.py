"""Families with something of their own in divided layers: `python family_cases.py NAME DIRECTORY`.

As tensor_cases.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

import as_rank
from helpers import Boosted
from tensor_cases import FAMILIES, GATHERED, RING, boost, decoder, said, write, write_own

STEPS = 3
GATHER: dict[str, Any] = {"sequence_parallelism_mode": "all_gather"}
CASES = {
    "apertus": decoder("apertus", hf.ApertusConfig),  # activations have parameters
    "apertus1p5": decoder("apertus1p5", hf.Apertus1p5TextConfig),  # and loss, of out_features
    "jetmoe": decoder("jetmoe", hf.JetMoeConfig, num_attention_heads=None, kv_channels=12,
                      num_local_experts=4, num_experts_per_tok=2),  # views what attention gives
    "afmoe": GATHERED["mask_by_name"],
    "glm4_moe": decoder("glm4_moe", hf.Glm4MoeConfig, head_dim=12, use_qk_norm=True,
                        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    "doge": decoder("doge", hf.DogeConfig, keep_window_size=8),
    "inkling": decoder("inkling", hf.InklingTextConfig, head_dim=12, n_routed_experts=4,
                       num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1),
    "qwen3": FAMILIES["qwen3"],
    "mixtral": FAMILIES["mixtral"],
}  # fmt: skip
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus, layers": ("apertus", {"size": 2}),
    "apertus1p5, layers": ("apertus1p5", {"size": 2}),
    "apertus1p5, loss": ("apertus1p5", {"size": 2, "parallel_output": True}),
    "glm4_moe, layers": ("glm4_moe", {"size": 2}),  # a plan without its norms of heads
    "jetmoe, ring": ("jetmoe", {"sp_size": 2} | RING),
    "afmoe, heads": ("afmoe", {"sp_size": 2}),
    "afmoe, keys": ("afmoe", {"sp_size": 2} | GATHER),
    "afmoe, ring": ("afmoe", {"sp_size": 2} | RING),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    """What a gradient that is half of itself shows in."""
    return torch.optim.SGD(params, lr=0.05)


def small(model: nn.Module) -> list[float]:
    """Parameters of activations and of norms of heads."""
    named = model.named_parameters()
    some = [param for name, param in named if "act_fn" in name or "q_norm" in name]
    return [number for param in some for number in param.flatten().tolist()]


def plain(name: str) -> list[list[float]]:
    """Losses, and what small() gives, of plain PyTorch."""
    case = CASES[name]
    model = case.model()
    optimizer, losses = sgd(model.parameters()), []
    for seed in range(STEPS):
        loss = model(**case.batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, small(model)]


def _divided(name: str, **settings: Any) -> Boosted:
    return boost(CASES[name], optimizer=sgd, max_norm=0.0, **settings)


def families(directory: Path) -> None:
    """Losses of each way."""
    found = {}
    for way, (name, settings) in WAYS.items():
        boosted = _divided(name, **settings)
        losses = [
            boosted.step(boosted.model(**CASES[name].batch(seed)).loss) for seed in range(STEPS)
        ]
        found[way] = [losses, small(boosted.model)]
    write(directory, "families", found)


def refused(directory: Path) -> None:
    """What is said of layers that do something else than plans and masks say."""
    batch = CASES["doge"].batch(0)
    found = {
        "parameter": said(lambda: _divided("doge", size=2)),
        "kinds": said(lambda: _divided("inkling", size=2)),
    }
    for mode in ("all_to_all", "all_gather", "ring_attn"):
        boosted = _divided("doge", sp_size=2, sequence_parallelism_mode=mode)
        found[f"mask, {mode}"] = said(lambda: boosted.model(**batch))  # noqa: B023
    qwen3: Any = CASES["qwen3"].model()
    whole = {name: style for name, style in qwen3.tp_plan.items() if "_norm" not in name}
    boosted = _divided("qwen3", size=2, tp_plan=whole)
    found["norm"] = said(lambda: boosted.step(boosted.model(**batch).loss))
    found["own mask"] = said(lambda: _with_own_mask(batch))
    for name, change in {
        "attention": lambda model: model.set_attn_implementation("sdpa"),
        "router": lambda model: setattr(model.config, "output_router_logits", True),
    }.items():
        boosted = _divided("mixtral", sp_size=2)
        change(boosted.model)
        found[name] = said(lambda: boosted.model(**batch))  # noqa: B023
    write_own(directory, "refused", found)


def _with_own_mask(batch: dict[str, torch.Tensor]) -> None:
    boosted = _divided("qwen3", sp_size=2)
    layers: Any = boosted.model.model.layers  # type: ignore[union-attr]
    length = batch["input_ids"].shape[1]
    mask = {"attention_mask": torch.zeros(1, 1, length, length)}
    layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | mask), with_kwargs=True
    )
    boosted.model(**batch)


if __name__ == "__main__":
    as_rank.run(globals())
