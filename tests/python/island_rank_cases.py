"""What tests of float32 islands run on ranks: `python island_rank_cases.py NAME DIRECTORY`."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

import as_rank
import castor
from helpers import GIB, Boosted, boost, copies, plugin
from islands import KEPT, loaded, routed, routed_loss
from rank_cases import _refused

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{state_format}, {link}, {stage}": (
        link,
        {"optim_state_format": state_format, "zero_stage": stage},
    )
    for state_format in ("fp32", "split", "split_int8")
    for link, stage in (("auto", "auto"), ("group", 1), ("group", 2), ("group", 3))
}
"""State format, what ranks share, ZeRO's stage."""
WAYS["split, forward"] = ("auto", {"optim_state_format": "split", "overlap": "forward"})
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip


def islands(**settings: Any) -> Boosted:
    """In bf16, in a tight budget."""
    model = loaded()
    optimizer = castor.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    chosen = {"precision": "bf16", "max_norm": 0.05, "chunk_bytes": 4096, "seed": 3} | settings
    return boost(model, 32 << 10, optimizer, **chosen)


def steps(boosted: Boosted, ranks: range, first: int = 0, count: int = 4) -> list[float]:
    """Losses; `ranks`: whose batches this process takes."""
    losses = []
    for step in range(first, first + count):
        for rank in ranks:
            loss = routed_loss(boosted.model, 10 * step + rank)
            boosted.booster.backward(loss / len(ranks), boosted.optimizer)
            losses.append(loss.item())
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses


def on_two(directory: Path) -> None:
    """Each way: weights, a run that a save and a load interrupt, and its weights."""
    rank = distributed.get_rank()
    own = range(rank, rank + 1)
    for way, (link, settings) in WAYS.items():
        os.environ["CASTOR_RANK_LINK"] = link
        boosted = islands(**settings)
        losses = steps(boosted, own)
        weights = copies(boosted.model.parameters())
        place = directory / way.replace(", ", "_")
        boosted.booster.save(place, boosted.model, boosted.optimizer)
        losses += steps(boosted, own, 4, 2)
        resumed = islands(**settings)
        resumed.booster.load(place, resumed.model, resumed.optimizer)
        again = steps(resumed, own, 4, 2)
        found = {
            "weights": weights,
            "losses": losses,
            "again": again,
            "end": copies(boosted.model.parameters()),
            "resumed": copies(resumed.model.parameters()),
            "stage": boosted.report().zero_stage,
        }
        distributed.barrier()  # they were read of each other
        torch.save(found, directory / f"{way}.{rank}.pt")
    os.environ["CASTOR_RANK_LINK"] = "auto"
    kept = KEPT if rank == 0 else ["norm"]
    print(_refused(lambda: boost(routed(), precision="bf16", keep_fp32=kept)))


def mixture() -> nn.Module:
    """In float32."""
    torch.manual_seed(0)
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK))


def losses_of_mixture(boosted: Boosted) -> list[float]:
    """Of steps on the same tokens."""
    ids = torch.arange(64)[None]
    return [boosted.step(boosted.model(input_ids=ids, labels=ids).loss) for _ in range(3)]


def divided(directory: Path) -> None:
    """Tensor parallel, and experts of ranks of their own."""
    settings: dict[str, Any] = {
        "device": "cpu", "device_memory": GIB, "host_memory": GIB, "precision": "bf16",
    }  # fmt: skip
    for name, sizes in (("layers", {"tp_size": 2}), ("experts", {"ep_size": 2})):
        model = mixture()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        booster = castor.Booster(castor.HybridParallelPlugin(**settings, **sizes))
        booster.boost(model, optimizer)
        losses = losses_of_mixture(Boosted(booster, model, optimizer))
        booster.save_model(model, directory / name)
        types = {name: param.dtype for name, param in model.named_parameters()}
        torch.save((losses, types), directory / f"{name}.{distributed.get_rank()}.pt")


def alone() -> tuple[list[float], dict[str, torch.dtype]]:
    """The same in one process."""
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = castor.Booster(plugin(GIB, precision="bf16"))
    booster.boost(model, optimizer)
    losses = losses_of_mixture(Boosted(booster, model, optimizer))
    return losses, {name: param.dtype for name, param in model.named_parameters()}


if __name__ == "__main__":
    as_rank.run(globals())
