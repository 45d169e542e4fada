"""Serves a rank's shards to the rank that writes the full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from castor.checkpoint.container import SavedTensor
from castor.checkpoint.full_tensors import values_of
from castor.checkpoint.model import state_of
from castor.checkpoint.optimizer import names_of, tensors_and_numbers
from castor.runtime.boosted_model import compiled_from
from castor.runtime.dtensors import is_dtensor


class LocalShards:
    """Lookup of this rank's shards by the keys of full_dtensors.

    Implements castor.runtime.model_shards.ShardFinder.
    """

    def __init__(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        """Stores the arguments; tensors are collected at the first lookup.

        Args:
            model: The model that is saved; None: only optimizers are.
            optimizers: The optimizers that are saved.
        """
        self._model = model
        self._optimizers = optimizers

    def find(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (parameter, this process's shard of the parameter or of a state of it).

        Args:
            key: "model:<state_dict key>" or "optimizer:<parameter>.<entry>".
        """
        kind, _, name = key.partition(":")
        param, tensor = self._of(kind)[name]
        if is_dtensor(tensor):  # the ranks gather it where it is
            return param, tensor
        return param, values_of(tensor)

    def _of(self, kind: str) -> Mapping[str, tuple[torch.Tensor, SavedTensor]]:
        return self._of_model if kind == "model" else self._of_optimizers

    @cached_property
    def _of_model(self) -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        assert self._model is not None
        return {key: (param, param) for key, param in state_of(compiled_from(self._model)).items()}

    @cached_property
    def _of_optimizers(self) -> dict[str, tuple[torch.Tensor, SavedTensor]]:
        found: dict[str, tuple[torch.Tensor, SavedTensor]] = {}
        for optimizer in self._optimizers:
            params = {name: param for param, name in names_of(optimizer, self._model).items()}
            tensors, _ = tensors_and_numbers(optimizer, self._model)
            for key, tensor in tensors.items():
                found[key] = params[key.rpartition(".")[0]], tensor
        return found
