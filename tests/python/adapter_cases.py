"""What test_parallel_adapters.py runs on ranks: `python adapter_cases.py NAME DIRECTORY`.

As in parallel_cases: models with LoRA of PEFT, whose layers, experts or sequences ranks divide.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import distributed, nn

import castor
from grids import some
from helpers import assert_equal, copies
from parallel_cases import DEEP, INTERLEAVED, SPLIT_GATHER, STAGES, Way, in_little, plain
from pipeline_cases import ZERO_BUBBLE
from rank_rng_cases import dropped
from tensor_cases import EXPERTS, FAMILIES, RING, STEPS, of_all, said, write
from zoo import Case

# peft asks transformers for what transformers 6 will rename, and for files of the base model.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
warnings.filterwarnings("ignore", "Could not find a config file in", UserWarning)

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}
"""Of families whose linear layers have other names than a Llama's."""
BIASED = ("gpt2", "opt")
LLAMAS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(case: Case, **options: Any) -> Case:
    """The model with adapters in it, none of whose matrices is zero."""

    def build() -> Any:
        given: dict[str, Any] = {
            "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM",
            "target_modules": TARGETS.get(case.name, LLAMAS), "lora_bias": case.name in BIASED,
            "fan_in_fan_out": case.name == "gpt2",
        }  # fmt: skip
        config = peft.LoraConfig(**given | options)
        return peft.get_peft_model(case.build(), config)  # type: ignore[arg-type]

    return Case(case.name, build, case.batch)


WAYS = some({
    "layers": Way(adapted(FAMILIES["llama"]), {"tp_size": 2}),
    "packed": Way(adapted(FAMILIES["gpt2"]), {"tp_size": 2}),
    "biases": Way(adapted(FAMILIES["opt"]), {"tp_size": 2}),
    "head": Way(
        adapted(FAMILIES["llama"], target_modules=[*LLAMAS, "lm_head"]), {"tp_size": 2}
    ),
    "loss": Way(adapted(FAMILIES["llama"]), {"tp_size": 2, "parallel_output": True}),
    "experts": Way(adapted(EXPERTS["mixtral"]), {"ep_size": 2}, own_data=True),
    "experts of layers": Way(adapted(EXPERTS["mixtral"]), {"tp_size": 2, "ep_size": 2}),
    "sequences": Way(adapted(FAMILIES["llama"]), {"sp_size": 2}),
    "ring": Way(adapted(FAMILIES["gpt2"]), {"sp_size": 2} | RING),
    "stages": Way(adapted(FAMILIES["gpt2"]), STAGES),
    "interleaved": Way(adapted(DEEP), STAGES | INTERLEAVED),
    "zbv": Way(adapted(DEEP), STAGES | ZERO_BUBBLE),
    "layers, stages": Way(adapted(DEEP), STAGES | INTERLEAVED | {"tp_size": 2}, ranks=4),
    "layers, sequences": Way(adapted(FAMILIES["llama"]), {"tp_size": 2, "sp_size": 2}, ranks=4),
}, "layers", "biases", "head", "experts of layers", "zbv")  # fmt: skip

IN_LITTLE = ("layers", "experts", "sequences", "interleaved")


def adam(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW((param for param in params if param.requires_grad), lr=1e-3)


def trained(directory: Path) -> None:
    """Losses of adapters in every division, in little room too, and what is saved of them."""
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        if way.ranks != distributed.get_world_size():
            continue
        boosted = way.boost(adam)
        losses = way.train(boosted)
        found[name] = [losses, plain(way, adam)]
        run = directory / name
        boosted.booster.save(run, boosted.model, boosted.optimizer)
        boosted.booster.save_model(boosted.model, directory / f"{name}-model")
        other = way.boost(adam)
        other.booster.load_model(other.model, directory / f"{name}-model")
        assert_equal(copies(other.model.parameters()), copies(boosted.model.parameters()))
        later = way.train(boosted, STEPS, 2)
        scratch = directory / f"{name}-nvme"
        little = in_little(boosted, scratch, "nvme", "lazy") if name in IN_LITTLE else {}
        for setting, given in little.items():
            again = way.boost(adam, **given)
            assert way.train(again) == losses, (name, setting)
            again.booster.load(run, again.model, again.optimizer)
            assert way.train(again, STEPS, 2) == later, (name, setting)
    write(directory, "trained", found)


def masks(directory: Path) -> None:
    """What ranks drop out in front of adapters, and whether blocks that run again do it alike."""
    case = adapted(FAMILIES["llama"], lora_dropout=0.3)
    way = Way(case, {"tp_size": 2})
    boosted = way.boost(adam)
    with dropped() as drawn:
        boosted.model(**case.batch(0))
    first, second = of_all([mask.tolist() for mask in drawn])
    states = of_all(torch.get_rng_state().tolist())
    found = {
        "alike": [one == other for one, other in zip(first, second, strict=True)],
        "widths": [mask.shape[-1] for mask in drawn],
        "same state": states[0] == states[1],
        "losses": [],
    }
    for activations in ("keep", "recompute"):
        boosted = way.boost(adam, activations=activations)
        torch.manual_seed(5)
        found["losses"].append(way.train(boosted))
    write(directory, "masks", found)


def refused(directory: Path) -> None:
    """What is said of adapters that ranks cannot divide."""
    llama = FAMILIES["llama"]
    two = {"tp_size": 2}
    ways = {
        "tokens": Way(adapted(llama), two | SPLIT_GATHER),
        "dora": Way(adapted(llama, use_dora=True), two),
        "embedding": Way(adapted(llama, target_modules=["embed_tokens"]), two),
        "copied": Way(adapted(llama, modules_to_save=["lm_head"]), two),
        "prompts": Way(Case("prompts", _prompted, llama.batch), two),
    }  # fmt: skip
    found = {name: of_all(said(lambda way=way: way.boost(adam))) for name, way in ways.items()}
    write(directory, "refused", found)


def _prompted() -> Any:
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(FAMILIES["llama"].build(), config)  # type: ignore[arg-type]


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
