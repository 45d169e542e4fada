"""Recognises torch's DTensor without importing it, which takes longer than all of castor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor; False if nothing has imported DTensor's module."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # not there yet while the module is imported
    return kind is not None and isinstance(value, kind)
