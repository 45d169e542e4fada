"""Finds the repeated parts of a model, and those that torch.compile makes one call of."""

from __future__ import annotations

from collections import Counter

from torch import nn

from castor import _C
from castor.errors import UsageError
from castor.runtime.boosted_model import compiled_from, name_before_compile

_SWITCH = "GradientCheckpointingLayer"


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, without what torch.compile adds to it, in its order.

    They are the layers that transformers can checkpoint, or else what stands at least twice in an
    nn.ModuleList or nn.Sequential and has parts of its own; of blocks within blocks the outermost.
    """
    found = _outermost(model, {id(m) for m in model.modules() if has_switch(m)})
    return {
        name_before_compile(name): block
        for name, block in (found or _outermost(model, _repeated(model))).items()
    }


def compiled_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that are compiled, before boost, by name, in its order.

    Each is followed as one module, from outside of what torch.compile makes of it. The model itself
    is none, nor is a part with several blocks in it: their parameters would be on the device all at
    once.
    """
    blocks = {id(block) for block in find_blocks(model).values()}
    wanted = {
        id(part)
        for part in model.modules()
        if part is not model
        and is_compiled(part)
        and next(part.parameters(), None) is not None
        and not _encloses(part, blocks)
    }
    return _outermost(model, wanted)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped it, or its own compile() has been called."""
    call = module._compiled_call_impl
    compiled = call is not None and not isinstance(call, _C.ModuleCall)  # that one is castor's own
    return compiled_from(module) is not module or compiled


def check_no_cuda_graphs(name: str, part: nn.Module) -> None:
    """Raises UsageError where a compiled part is replayed with the addresses that it had."""
    compiled = part if part._compiled_call_impl is None else part._compiled_call_impl
    options = getattr(compiled, "get_compiler_config", lambda: None)() or {}
    if options.get("triton.cudagraphs"):
        raise UsageError(
            f"'{name}' ({type(compiled_from(part)).__name__}) is compiled with CUDA graphs, which "
            "keep the addresses of weights, and castor moves weights; compile it with "
            "another mode than 'reduce-overhead' and 'max-autotune'"
        )


def has_switch(module: nn.Module) -> bool:
    """Whether it is one of transformers' layers that recompute themselves when they are told to."""
    return any(kind.__name__ == _SWITCH for kind in type(module).__mro__)


def _encloses(part: nn.Module, blocks: set[int]) -> bool:
    inner = compiled_from(part)
    return any(id(m) in blocks for m in part.modules() if m is not part and m is not inner)


def _outermost(model: nn.Module, wanted: set[int]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) in wanted and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _repeated(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            children = list(container)
            counts = Counter(map(type, children))
            found |= {
                id(child) for child in children if counts[type(child)] > 1 and _is_block(child)
            }
    return found


def _is_block(module: nn.Module) -> bool:
    """Whether it can be called, and has parts and parameters."""
    callable_ = type(module).forward is not nn.Module.forward
    has_parts = next(module.children(), None) is not None
    return callable_ and has_parts and next(module.parameters(), None) is not None
