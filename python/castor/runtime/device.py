"""Where a model computes: the CPU device, or a GPU through castor._cuda."""

from __future__ import annotations

from typing import Any

import torch

from castor._loader import load_cuda


def make_backend(device: torch.device) -> Any:
    """What castor._C.Session takes as its backend: None for the CPU device."""
    return None if device.type == "cpu" else load_cuda().make_backend(device.index)
