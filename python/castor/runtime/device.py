"""Where a model computes: the CPU device, or a GPU through castor._cuda."""

from __future__ import annotations

from typing import Any

import torch

from castor import _C
from castor._loader import load_cuda


def make_backend(device: torch.device, link_bytes_per_second: int) -> Any:
    """What castor._C.Session takes as its backend; a link is emulated for the CPU device alone."""
    if device.type == "cpu":
        return _C.make_cpu_backend(link_bytes_per_second=link_bytes_per_second)
    return load_cuda().make_backend(device.index)
