"""Finds the blocks of a model, and the modules that torch.compile compiles as one call."""

from __future__ import annotations

from collections import Counter

from torch import nn

from castor import _C
from castor.errors import UsageError
from castor.runtime.boosted_model import compiled_from, name_before_compile
from castor.runtime.report import BlockFigures

# --- The policy of a boosted model for its blocks' activations, as an interface to the engine -----


class BlockPolicy:
    """The policy that leaves activations as they are; see castor.activations.Blocks."""

    logit_rows = 0
    """Number of rows of logits that the budget has room for; 0: not known."""

    def explain(self, error: BaseException | None) -> None:
        """Adds advice to the device budget's error, with which a forward or a backward failed.

        Args:
            error: Error of the pass; None: it has not failed.
        """

    def figures(self) -> BlockFigures:
        """Returns the figures so far."""
        return BlockFigures()

    def step_ended(self) -> None:
        """Ends an optimizer step; later passes belong to the next one."""


# --- Finds the blocks of a model, and the modules that torch.compile compiles as one call ---------

_SWITCH = "GradientCheckpointingLayer"


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model by name, in its order; names are without torch.compile's part.

    Blocks are the layers that transformers can checkpoint. In other models they are the modules
    with children whose class occurs at least twice in an nn.ModuleList or nn.Sequential. Of blocks
    within blocks the outermost count.
    """
    found = _outermost(model, {id(m) for m in model.modules() if has_switch(m)})
    return {
        name_before_compile(name): block
        for name, block in (found or _outermost(model, _repeated(model))).items()
    }


def compiled_submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model that were compiled before boost, by name, in its order.

    Each is followed as one module, from outside of the compiled code. The model itself does not
    count, nor does a module with several blocks in it: the parameters of all of them would be on
    the device at once.
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
    """Whether torch.compile has wrapped a module, or its own compile() has been called."""
    call = module._compiled_call_impl
    compiled = call is not None and not isinstance(call, _C.ModuleCall)  # which is castor's own
    return compiled_from(module) is not module or compiled


def check_no_cuda_graphs(name: str, part: nn.Module) -> None:
    """Raises UsageError if a module is compiled with CUDA graphs, which keep weight addresses."""
    compiled = part if part._compiled_call_impl is None else part._compiled_call_impl
    options = getattr(compiled, "get_compiler_config", lambda: None)() or {}
    if options.get("triton.cudagraphs"):
        raise UsageError(
            f"'{name}' ({type(compiled_from(part)).__name__}) is compiled with CUDA graphs, which "
            "keep the addresses of weights, and castor moves weights; compile it with "
            "another mode than 'reduce-overhead' and 'max-autotune'"
        )


def has_switch(module: nn.Module) -> bool:
    """Whether a module is a layer of transformers with its own gradient checkpointing."""
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
    """Whether a module can be called, and has children and parameters."""
    callable_ = type(module).forward is not nn.Module.forward
    has_parts = next(module.children(), None) is not None
    return callable_ and has_parts and next(module.parameters(), None) is not None
