"""Records torch.nn.init.trunc_normal_ as one operation.

From torch 2.12 on the function draws until every value is accepted, and so reads values that random
numbers decide. A recording cannot put off its single operations, only the function as a whole.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import init

_LIBRARY = torch.library.Library("castor_lazy", "DEF")
_LIBRARY.define(
    "trunc_normal_(Tensor(a!) tensor, float mean, float std, float a, float b, *,"
    " Generator? generator=None) -> Tensor(a!)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_eager = init._no_grad_trunc_normal_


torch.library.impl(_LIBRARY, "trunc_normal_", "CPU")(_eager)


@torch.library.impl(_LIBRARY, "trunc_normal_", "Meta")
def _draw_nothing(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


@functools.cache
def record_truncated_normals(lazy: type[torch.Tensor]) -> None:
    """Has torch.nn.init.trunc_normal_ call one operation for tensors of the class `lazy`.

    Other tensors are initialised by torch's function as before. Lasts as long as the process: a
    lazy tensor may be initialised after its context has ended.
    """

    @functools.wraps(_eager)
    def trunc_normal(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, lazy):
            return _eager(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            torch.ops.castor_lazy.trunc_normal_(tensor, mean, std, a, b, generator=generator)
        return tensor

    init._no_grad_trunc_normal_ = trunc_normal
