"""Adds adapters to a meta model: LoRA (Hu et al. 2021) and QLoRA (Dettmers et al. 2023)."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from castor.activations.output_embedding import output_embedding
from castor.estimate.model import without_values

_BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight: half a byte, an 8-bit scale for 64 weights, and a 32-bit scale for 256 such
scales (Dettmers et al. 2023, section 3)."""


def add_adapters(
    model: nn.Module, rank: int, more: Mapping[str, Any], *, four_bit_base: bool
) -> None:
    """Freezes a model and adds trainable adapters to linear layers.

    Args:
        model: The model, on the meta device.
        rank: Rank of the adapters.
        more: Further arguments of PEFT's LoraConfig.
        four_bit_base: Whether linear layers but the output embedding have weights of 4 bits, as
            bitsandbytes makes them.

    Raises:
        ModuleNotFoundError: peft is not installed.
        ValueError: peft finds no layer for adapters.
    """
    try:
        peft: Any = importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "castor estimate --lora makes adapters with peft, which is not installed: pip install "
            "peft",
            name="peft",
        ) from error
    config = peft.LoraConfig(r=rank, **more)
    with torch.device("meta"), without_values(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's warnings about layers, which need no action
        peft.inject_adapter_in_model(config, model)
    if four_bit_base:
        head = output_embedding(model, "auto")
        adapted: list[Any] = [one for one in model.modules() if hasattr(one, "base_layer")]
        adapters = {part for one in adapted for part in one.modules()} - {
            one.base_layer for one in adapted
        }
        layers: list[Any] = list(model.modules())
        for layer in layers:
            if layer is head or layer in adapters:
                continue
            if isinstance(layer, nn.Linear):
                _pack(layer, layer.weight.shape)
            elif type(layer).__name__ == "Conv1D":  # its weight is (in, out)
                _pack(layer, layer.weight.T.shape)


def _pack(layer: Any, shape: torch.Size) -> None:
    """Replaces a layer's weight by one in 4 bits, which each product unpacks for itself.

    Args:
        layer: A linear layer.
        shape: Shape of the unpacked weight, (out, in).
    """
    dtype = layer.weight.dtype
    count = math.ceil(layer.weight.numel() * _BYTES_OF_4_BITS / dtype.itemsize)
    packed = torch.empty(count, dtype=dtype, device="meta")
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.forward = partial(_product, layer, shape)


def _product(layer: Any, shape: torch.Size, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _FourBitProduct.apply(x, layer.weight, shape)
    return out if layer.bias is None else out + layer.bias


class _FourBitProduct(torch.autograd.Function):
    """Multiplies with a weight that is unpacked during the product only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return functional.linear(x, _unpacked(packed, shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ _unpacked(packed, ctx.shape), None, None


def _unpacked(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return packed.new_empty(shape)
