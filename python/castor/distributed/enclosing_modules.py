"""Modules that ranks may not call by themselves, because only the full model's call is sharded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from castor.distributed.layer_regions import upwards


def modules_enclosing_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Returns the modules between the model and its blocks, such as transformers' base model.

    A call of such a module computes hidden states without the hooks of the model's own call.
    """
    rows = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in rows if not any(above in rows for above in [*upwards(name)][1:])]
    names = dict.fromkeys(above for name in outermost for above in [*upwards(name)][1:])
    return map(model.get_submodule, names)
