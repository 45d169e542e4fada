"""Adapters of PEFT (LoRA, Hu et al. 2021) in tensor-parallel layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from castor.distributed.tensor_plan import COLUMNS, GATHERED_COLUMNS, ROWS
from castor.runtime.peft_model import is_peft_model

_OUTPUTS = COLUMNS | GATHERED_COLUMNS


def beneath_adapters(model: nn.Module) -> nn.Module:
    """Returns the model that a PeftModel wraps; returns any other model as it is.

    Raises:
        NotImplementedError: An adapter trains prompts, which belong to no layer of the model.
    """
    if not is_peft_model(model):
        return model
    of_peft: Any = model
    prompts = [name for name, config in of_peft.peft_config.items() if config.is_prompt_learning]
    if prompts:
        raise NotImplementedError(
            f"adapter '{prompts[0]}' of this {type(model).__name__} is made of prompts, which are "
            "put in front of a call of the full model, and ranks with shards of a model train "
            "adapters of its layers (LoRA): give tp_size=1, ep_size=1, sp_size=1 and pp_size=1, "
            "with which ranks train prompts with other data each"
        )
    base: nn.Module = of_peft.get_base_model()
    return base


def with_adapters(
    model: nn.Module, plan: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Returns the plan, extended by the adapters that PEFT has put beside the layers.

    Beside a column-parallel layer, a rank has a shard of B's outputs and the full A. Beside a
    row-parallel layer, it has a shard of A's inputs and the full B. So B A x is sharded, or
    partial, in the same way as W x, to which it is added.

    Args:
        model: The model beneath a PeftModel.
        plan: Styles by name; see castor.distributed.tensor_plan.

    Raises:
        NotImplementedError: An adapter of a sharded layer is not plain LoRA of a linear layer.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return plan
    wrappers = tuners.BaseTunerLayer, sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper
    modules, found = dict(model.named_modules()), dict[str, Sequence[str]]()
    for name, styles in plan.items():
        layer = modules.get(name)
        kinds = {style.partition(":")[0] for style in styles}
        if not isinstance(layer, wrappers) or not (kinds & (_OUTPUTS | ROWS) or _is_cut(kinds)):
            found[name] = styles
            continue
        _check(name, layer, kinds)
        part = "lora_B" if kinds <= _OUTPUTS else "lora_A"
        found[f"{name}.base_layer"] = styles
        found |= {f"{name}.{part}.{adapter}": styles for adapter in getattr(layer, part)}
    return found


def dropouts_of_adapters(region: nn.Module, sums: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yields the dropouts of LoRA in a tensor-parallel region whose input is equal on all ranks.

    Args:
        region: The module that contains the tensor-parallel layers.
        sums: Its row-parallel layers. Their adapters are left out, since each rank drops out its
            own shard of their input.
    """
    for module in region.modules():
        dropouts = getattr(module, "lora_dropout", None)
        if isinstance(dropouts, nn.ModuleDict) and module not in sums:
            yield from (one for one in dropouts.values() if isinstance(one, nn.Dropout))


def _is_cut(kinds: set[str]) -> bool:
    return not kinds.isdisjoint(
        {"embedding_rowwise", "heads", "moe_tp_experts", "whole_experts", "exchanged_experts"}
    )


def _check(name: str, layer: Any, kinds: set[str]) -> None:
    """Raises NotImplementedError unless the layer's adapters are plain LoRA of a linear layer."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    linear = lora is not None and isinstance(layer, lora.Linear)
    if not linear or not (kinds <= _OUTPUTS or kinds <= ROWS):
        what = type(getattr(layer, "base_layer", layer)).__name__
        raise NotImplementedError(
            f"'{name}' is a {type(layer).__name__} of PEFT over a {what}, and tensor parallelism "
            "shards LoRA of linear layers: leave it out of target_modules and modules_to_save"
        )
    if layer.lora_variant:
        variant = type(next(iter(layer.lora_variant.values()))).__name__
        raise NotImplementedError(
            f"'{name}', which ranks shard, has a {variant} of PEFT, which needs the full weight: "
            "give plain LoRA (use_dora=False)"
        )
