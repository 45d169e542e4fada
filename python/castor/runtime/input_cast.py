"""Casts the inputs of a boosted model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from castor.runtime.boosted_model import name_before_compile
from castor.runtime.packed import is_packed
from castor.runtime.spec import ModelSpec
from castor.runtime.tensor_types import TensorTypes


class InputCast:
    """A pre-hook that moves a model's inputs to its device, and casts floats to its precision.

    In fp32 types stay as they are, so that a model may be called with any type. They also stay if
    the module that takes the inputs is float32 (`input_type`). Copies of the model keep this hook,
    as their weights have that precision.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the inputs of a forward, moved and cast."""
        return self._cast(args), {key: self._cast(value) for key, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            keep = self._dtype == torch.float32 or not value.is_floating_point()
            moved = value.to(device=self._device, dtype=value.dtype if keep else self._dtype)
            if keep and moved is not value and not (value.is_inference() or moved.is_inference()):
                moved._castor_given = (value, value._version, moved._version)  # type: ignore[attr-defined]
            return moved
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._cast, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        if isinstance(value, dict) and type(value) is dict:
            return {key: self._cast(item) for key, item in value.items()}
        return value


def as_given(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that InputCast moved to the device, if neither has been written since.

    Its values are those of `value`, and to read them the host need not wait for the device.
    """
    kept = getattr(value, "_castor_given", None)
    if kept is None:
        return value
    given, its_version, version = kept
    unwritten = given._version == its_version and value._version == version
    return given if unwritten else value


def input_type(spec: ModelSpec, types: TensorTypes) -> torch.dtype:
    """Returns the type of the module that takes the inputs: the first that is no embedding."""
    for owner in spec.modules:
        if owner.params and not isinstance(owner.module, nn.Embedding):
            first = owner.params[0]
            kept = types.of_param(spec.names[first]) == torch.float32
            return torch.float32 if kept and not is_packed(spec.params[first]) else types.working
    return types.working


def convert_buffers(
    model: nn.Module,
    types: TensorTypes,
    device: torch.device,
    views: Sequence[torch.Tensor] = (),
) -> None:
    """Moves buffers to the device, and casts them to their chosen types.

    Args:
        model: Model with the buffers.
        types: Chosen types of its tensors.
        device: Device that the model computes on.
        views: Buffers over the memory of parameters, which are left alone.
    """
    known = set(map(id, views))
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in known:
                full = name_before_compile(f"{prefix}.{name}" if prefix else name)
                dtype = types.of_buffer(full, buffer)
                module._buffers[name] = buffer.to(device=device, dtype=dtype)
