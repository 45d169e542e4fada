"""torch's DTensor, whose import takes longer than castor's: left to whoever makes one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is one; False where nothing has imported the module that makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # not there yet while the module is imported
    return kind is not None and isinstance(value, kind)
