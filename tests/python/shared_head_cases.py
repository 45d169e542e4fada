"""Scenarios of ranks that share key-value heads: `python shared_head_cases.py NAME DIRECTORY`."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed

import as_rank
from adapter_cases import adam, adapted
from tensor_cases import boost, decoder, of_all, train, write
from zoo import VOCABULARY, Case

EIGHT = {"num_attention_heads": 8, "hidden_size": 64}


def falcon(name: str, **settings: Any) -> Case:
    return decoder(name, hf.FalconConfig, num_key_value_heads=None, bias=True, **EIGHT, **settings)


CASES = {
    case.name: case
    for case in (
        decoder("llama", hf.LlamaConfig, num_key_value_heads=2, **EIGHT),
        decoder("one_head", hf.LlamaConfig, num_key_value_heads=1, attn_implementation="eager"),
        decoder("qwen2", hf.Qwen2Config, num_key_value_heads=2, **EIGHT),
        decoder("qwen3", hf.Qwen3Config, num_key_value_heads=2, head_dim=12),
        decoder("glm4", hf.Glm4Config, num_key_value_heads=2, head_dim=12),
        decoder("phi3", hf.Phi3Config, num_key_value_heads=2, **EIGHT),
        falcon("multi_query", multi_query=True),
        falcon("groups", new_decoder_architecture=True, num_kv_heads=2),
        decoder("odd", hf.LlamaConfig, num_key_value_heads=1, vocab_size=VOCABULARY + 3),
    )
}
"""Families that have fewer key-value heads than four ranks, and a vocabulary of an odd number."""


SOME_STEPS = 4


def shared_heads(directory: Path) -> None:
    """Losses, norms and files of families whose ranks share heads."""
    size, found = distributed.get_world_size(), {}
    for name, case in CASES.items():
        boosted = boost(case, size)
        losses = train(case, boosted, steps=SOME_STEPS)
        assert of_all(losses) == [losses] * size
        found[name] = [losses, boosted.report().gradient_norm]
        if name in SAVED:
            boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
    # Copies of the model beside: the norm has each shared row once.
    for name, given in COPIES.items():
        case = CASES[name]
        scratch = directory / f"{name}-nvme"
        scratch.mkdir(exist_ok=True)
        boosted = boost(case, 2, nvme_path=scratch, nvme_offload_fraction=1.0, **given)
        share = distributed.get_rank() // 2
        losses = torch.tensor(train(case, boosted, steps=SOME_STEPS, share=share, of=2))
        found[f"{name} copies"] = torch.tensor(of_all(losses.tolist())).mean(0).tolist()
    adapted = boost(with_lora(), size, optimizer=adam)
    found["lora"] = train(CASES["llama"], adapted, steps=SOME_STEPS)
    adapted.booster.save_model(adapted.model, directory / "lora")
    write(directory, "shared_heads", found)


SAVED = ("qwen2", "multi_query", "groups", "odd")
COPIES: dict[str, dict[str, Any]] = {"multi_query": {}, "odd": {"precision": "fp16"}}


def with_lora() -> Case:
    """A model whose shared layers have adapters."""
    return adapted(CASES["llama"], target_modules=["q_proj", "k_proj", "v_proj"])


if __name__ == "__main__":
    as_rank.run(globals())
