"""What a rank gives of its parts while another one writes the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from castor.checkpoint.container import SavedTensor
from castor.checkpoint.model import state_of
from castor.checkpoint.optimizer import names_of, tensors_and_numbers
from castor.checkpoint.parts import values_of
from castor.runtime.engine import compiled_from
from castor.runtime.model_parts import PartsOf


def parts_of(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> PartsOf:
    """Looks up what in_whole asks for: key -> (parameter, this rank's part).

    Args:
        model: That is saved, if one is.
        optimizers: That are saved.
    """

    @cache
    def of_model() -> dict[str, torch.Tensor]:
        assert model is not None
        return state_of(compiled_from(model))

    @cache
    def of_optimizers() -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        found = {}
        for optimizer in optimizers:
            params = {name: param for param, name in names_of(optimizer, model).items()}
            for key, tensor in tensors_and_numbers(optimizer, model)[0].items():
                found[key] = params[key.rpartition(".")[0]], tensor
        return found

    def find(key: str) -> tuple[torch.Tensor, torch.Tensor]:
        kind, _, name = key.partition(":")
        if kind == "model":
            param = of_model()[name]
            return param, values_of(param)
        param, tensor = of_optimizers()[name]
        return param, values_of(tensor)

    return find
