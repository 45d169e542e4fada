"""Packed parameters: quantised weights whose bytes only their layer can read.

Chunks hold and move them byte for byte; nothing converts, rounds or trains them. bitsandbytes puts
a `quant_state` of small tensors on such a parameter, which the layer needs to unpack it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castor.errors import UsageError
from castor.runtime.boosted_model import name_before_compile

if TYPE_CHECKING:
    from castor.runtime.hooks import Replaced
    from castor.runtime.rank_group import DataParallelGroup

_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of a bitsandbytes layer: whether its forward, in eval mode and without gradients,
replaces its weights by another layout, which backward cannot use."""


def is_packed(param: torch.Tensor) -> bool:
    """Whether a parameter is packed: its bytes are not numbers of its dtype."""
    return param.dtype == torch.uint8 or quant_state_of(param) is not None


def quant_state_of(param: torch.Tensor) -> Any:
    """Returns the quantisation state beside a packed parameter; None: there is none here."""
    return getattr(param, "quant_state", None)


def check_packed(name: str, param: nn.Parameter) -> None:
    """Refuses quantised parameters that chunks cannot hold.

    Raises:
        UsageError: The parameter is not quantised yet, is repacked for inference, requires a
            gradient, or is of a kind that cannot be moved.
    """
    kind = type(param).__name__
    if getattr(param, "bnb_quantized", True) is False:
        raise UsageError(
            f"parameter '{name}' is a {kind} that is not quantised yet, which its layer does when "
            "it is moved: call model.to('cpu') before booster.boost"
        )
    if getattr(param, "has_fp16_weights", True) is False:
        raise UsageError(
            f"parameter '{name}' is a {kind}: layers of 8 bits keep a second tensor over its "
            "memory, which would stay behind when castor moves it; quantise to 4 bits "
            "(load_in_4bit), or leave the layer as it is"
        )
    if not is_packed(param):
        return
    if param.requires_grad:
        raise UsageError(
            f"parameter '{name}' is quantised, and has requires_grad=True: its bytes are not "
            "numbers that an optimizer can step; call requires_grad_(False), and train adapters "
            "(booster.enable_lora)"
        )
    if getattr(quant_state_of(param), "packing_format_for_cpu", False):
        raise UsageError(
            f"parameter '{name}' is packed for inference, by a forward in eval mode, and no "
            "backward can unpack it: call model.state_dict() once, which brings the layout back "
            "that trains, before booster.boost"
        )


def check_packed_layers(model: nn.Module, type_of: Callable[[str], torch.dtype]) -> None:
    """Refuses layers that would replace a parameter in their forward.

    Args:
        model: The model.
        type_of: Returns the type that a parameter with a given name will have.

    Raises:
        UsageError: A layer computes in another type than its bias will have.
    """
    for name, module in model.named_modules():
        bias, computes = module._parameters.get("bias"), getattr(module, "compute_dtype", None)
        dtype = type_of(name_before_compile(f"{name}.bias" if name else "bias"))
        if bias is not None and computes not in (None, dtype) and _packed_in(module):
            raise UsageError(
                f"layer '{name}' ({type(module).__name__}) computes in {computes}, and its bias "
                f"would be {dtype}, the precision of the plugin: it would convert it in each "
                "forward, in memory that castor does not move; quantise with "
                f"bnb_4bit_compute_dtype={dtype}, or give the plugin the precision of {computes}"
            )


def settle_layers(
    model: nn.Module, device: torch.device, ranks: DataParallelGroup | None, replaced: Replaced
) -> None:
    """Moves the quantisation states of packed parameters to the device, and stops repacking.

    Args:
        model: The model, whose packed parameters are in chunks.
        device: Device that it computes on.
        ranks: Ranks that share the model: they get rank 0's states, as they do its weights.
        replaced: Records replaced attributes of modules.
    """
    for module in model.modules():
        for param in _packed_in(module):
            state = quant_state_of(param)
            if state is not None and device.type != "cpu":
                state.to(device)
            for tensor in _tensors_of(state) if ranks else ():
                assert ranks
                ranks.broadcast(tensor)
            if getattr(module, _REPACKS, False):
                replaced.put(module, _REPACKS, False)


def _packed_in(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None and is_packed(p)]


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    for value in vars(state).values() if hasattr(state, "__dict__") else ():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, type(state)):
            yield from _tensors_of(value)
