"""Models that PEFT has put adapters into."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is a peft.PeftModel."""
    peft: Any = sys.modules.get("peft")  # whoever has one has imported it
    return peft is not None and isinstance(model, peft.PeftModel)
