"""What the runtime knows of a model of which this process has parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")
PartsOf = Callable[[str], tuple[torch.Tensor, torch.Tensor]]
"""key -> (parameter, this process's part of a tensor of it)"""


class ModelParts(Protocol):
    """Of every layer a part: castor.distributed.TensorParallel, which describes these."""

    def norm(self, params: Sequence[torch.Tensor], squares: Sequence[float]) -> float: ...  # noqa: D102
    def whole_shape(self, param: torch.Tensor) -> tuple[int, ...] | None: ...  # noqa: D102
    def own(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def whole(self, key: str, param: torch.Tensor, own: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def on_first(self, work: Callable[[], Result], parts_of: PartsOf) -> Result: ...  # noqa: D102
