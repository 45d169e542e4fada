"""Models with adapters of PEFT."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a peft.PeftModel."""
    peft: Any = sys.modules.get("peft")  # a PeftModel would have imported it
    return peft is not None and isinstance(model, peft.PeftModel)


@torch.no_grad()
def adapter_tensors(
    model: Any, state: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the tensors that PEFT would write, by adapter and key in its file.

    Args:
        model: A PeftModel.
        state: State dict of the model; most tensors of the result are objects of it.
    """
    peft: Any = sys.modules["peft"]
    return {
        adapter: peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        for adapter in model.peft_config
    }
