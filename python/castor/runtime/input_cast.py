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

    In fp32 types stay as they are, so that a model may be called with any type, except the 16-bit
    type that the model had before: its inputs have it. They also stay if the module that takes the
    inputs is float32 (`input_type`). Copies of the model keep this hook, as their weights have that
    precision.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, before: torch.dtype = torch.float32
    ) -> None:
        """Takes the type and the device of the weights.

        Args:
            dtype: Type of the module that takes the inputs.
            device: Device of the model.
            before: In fp32, type of that module before castor converted it.
        """
        self._dtype = dtype
        self._device = device
        self._converts = dtype != torch.float32 or before != torch.float32
        self._before = before if dtype == torch.float32 else None
        """The only type that is cast; None: all."""

    @property
    def needed(self) -> bool:
        """Whether it does anything."""
        return self._converts or self._device.type != "cpu"

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the inputs of a forward, moved and cast."""
        return self._cast(args), {key: self._cast(value) for key, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            keep = not (self._converts and value.is_floating_point()) or (
                self._before not in (None, value.dtype)
            )
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
    first = input_param(spec)
    if first is None or is_packed(spec.params[first]):
        return types.working
    kept = types.of_param(spec.names[first]) == torch.float32
    return torch.float32 if kept else types.working


def input_param(spec: ModelSpec) -> int | None:
    """Returns the first parameter of the module that takes the inputs; None: there is none."""
    owners = (o for o in spec.modules if o.params and not isinstance(o.module, nn.Embedding))
    return next((owner.params[0] for owner in owners), None)


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
