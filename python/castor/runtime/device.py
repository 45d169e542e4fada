"""The device that a model computes on: the CPU device, or a GPU through castor._cuda."""

from __future__ import annotations

from typing import Any

import torch

from castor import _C
from castor._loader import load_cuda


def make_backend(device: torch.device, link_bytes_per_second: int) -> Any:
    """Makes the backend of castor._C.Session; only the CPU device emulates a link."""
    if device.type == "cpu":
        return _C.make_cpu_backend(link_bytes_per_second=link_bytes_per_second)
    return load_cuda().make_backend(device.index)
