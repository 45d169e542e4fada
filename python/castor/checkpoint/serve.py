"""What a rank gives of its parts while another one writes the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from castor.checkpoint.container import SavedTensor
from castor.checkpoint.model import state_of
from castor.checkpoint.optimizer import names_of, tensors_and_numbers
from castor.checkpoint.parts import of_blocks, shape_of_scales, values_of, whole_shape
from castor.runtime.boosted_model import compiled_from
from castor.runtime.engine import engines_holding
from castor.runtime.model_parts import Described


class PartsOf:
    """Looks up what in_whole asks for: castor.runtime.model_parts.OwnParts."""

    def __init__(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """Collects nothing yet.

        Args:
            model: That is saved, if one is.
            optimizers: That are saved.
        """
        self._model = model
        self._optimizers = optimizers

    def find(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(parameter, this process's part of a tensor of it)."""
        kind, _, name = key.partition(":")
        param, tensor = self._of(kind)[name]
        return param, values_of(tensor)

    def describe(self, kind: str) -> Described:
        """All that this process has, without values."""
        model = self._model
        engines = [] if model is None else engines_holding(compiled_from(model))
        tensors = {}
        for key, (param, tensor) in self._of(kind).items():
            shape = tuple(tensor.shape)
            if shape == tuple(param.shape):
                shape = whole_shape(engines, param)
            elif of_blocks(kind, key):
                shape = shape_of_scales(whole_shape(engines, param))
            tensors[key] = tensor.dtype, shape
        numbers = self._of_optimizers[1] if kind == "optimizer" else {}
        return Described(tensors=tensors, numbers=numbers)

    def _of(self, kind: str) -> Mapping[str, tuple[torch.Tensor, SavedTensor]]:
        return self._of_model if kind == "model" else self._of_optimizers[0]

    @cached_property
    def _of_model(self) -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        assert self._model is not None
        return {key: (param, param) for key, param in state_of(compiled_from(self._model)).items()}

    @cached_property
    def _of_optimizers(
        self,
    ) -> tuple[dict[str, tuple[torch.Tensor, SavedTensor]], dict[str, dict[str, object]]]:
        found: dict[str, tuple[torch.Tensor, SavedTensor]] = {}
        numbers: dict[str, dict[str, object]] = {}
        for optimizer in self._optimizers:
            params = {name: param for param, name in names_of(optimizer, self._model).items()}
            tensors, others = tensors_and_numbers(optimizer, self._model)
            for key, tensor in tensors.items():
                found[key] = params[key.rpartition(".")[0]], tensor
            numbers |= others
        return found, numbers
