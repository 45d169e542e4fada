"""Whether ranks that compute one batch together were given one."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from castor.runtime.ranks import Peers


def check_inputs(
    ranks: Peers, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Ranks that share layers or sequences compute one batch. Collective; a pre-hook of the model.

    Raises:
        UsageError: They were given different ones; every rank raises it.
    """
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    digest = 0
    for leaf in leaves:
        digest = zlib.crc32(repr(tuple(leaf.shape)).encode(), digest)
        values = leaf.detach().contiguous().view(-1)
        if values.numel():
            digest = zlib.crc32(values.view(torch.uint8).numpy().data, digest)
    what = f"the inputs of {type(model).__name__} (ranks that divide it take one batch)"
    ranks.check_equal({what: f"{digest:08x}"})
