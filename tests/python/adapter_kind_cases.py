"""Scenarios of PEFT's kinds of adapters on ranks: `python adapter_kind_cases.py NAME DIRECTORY`."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft

import as_rank
from adapter_cases import LLAMAS, adam
from parallel_cases import STAGES, Way
from tensor_cases import FAMILIES, write
from zoo import Case

warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)

STEPS = 2


def of_kind(config: Callable[..., Any], **options: Any) -> Case:
    """A Llama with adapters of a kind."""
    case = FAMILIES["llama"]

    def build() -> Any:
        given = {"task_type": "CAUSAL_LM"} | options
        return peft.get_peft_model(case.build(), config(**given))  # type: ignore[arg-type]

    return Case(config.__name__, build, case.batch)


def lora(**options: Any) -> Case:
    """LoRA none of whose matrices is zero."""
    options = {"r": 4, "init_lora_weights": False, "target_modules": LLAMAS} | options
    return of_kind(peft.LoraConfig, **options)


KINDS = {
    "dora": lora(use_dora=True),
    "ia3": of_kind(peft.IA3Config, target_modules=["k_proj", "down_proj"],
                   feedforward_modules=["down_proj"]),
    "lokr": of_kind(peft.LoKrConfig, r=4, target_modules=["q_proj", "down_proj"]),
    "norms": of_kind(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"]),
    "embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "head": lora(modules_to_save=["lm_head"]),
    "embedding copy": lora(modules_to_save=["embed_tokens"]),
    "tokens": lora(trainable_token_indices=[3, 7]),
    "tokens alone": of_kind(peft.TrainableTokensConfig, token_indices=[3, 7]),
}  # fmt: skip
"""Kinds that stages train."""


def in_stages(directory: Path) -> None:
    """Losses of every kind in stages, and its files."""
    found = {}
    for name, case in KINDS.items():
        way = Way(case, STAGES)
        boosted = way.boost(adam)
        found[name] = way.train(boosted, steps=STEPS)
        boosted.booster.save_model(boosted.model, directory / name)
        boosted.booster.load_model(boosted.model, directory / name)
        boosted.booster.save_model(boosted.model, directory / f"{name} again")
    write(directory, "in_stages", found)


if __name__ == "__main__":
    as_rank.run(globals())
