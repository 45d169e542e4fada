"""Calls of a part of a model that only a call of the whole model makes as ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from castor.distributed.layer_regions import upwards


def parts_around_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules between the model and its rows of blocks: the base model of transformers.

    They compute hidden states as the model does, without what is done where the model is called.
    """
    rows = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in rows if not any(above in rows for above in [*upwards(name)][1:])]
    names = dict.fromkeys(above for name in outermost for above in [*upwards(name)][1:])
    return map(model.get_submodule, names)
