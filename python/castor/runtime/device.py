"""Where a model computes: the CPU device, or a GPU through castor._cuda."""

from __future__ import annotations

from typing import Any

import torch

from castor._loader import load_cuda
from castor.config import available_memory_bytes
from castor.errors import UsageError

_USABLE_SHARE = 0.95
"""Of the free memory of a GPU: what its allocator cannot use for fragmentation is in the rest."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that GeminiPlugin(device=...) means.

    Args:
        device: "cpu", "cuda" or "cuda:1"; None: the GPU if there is one, else the CPU.

    Returns:
        One with an index if it is a GPU.

    Raises:
        UsageError: There is no such GPU, or this torch has no CUDA.
        ImportError: castor was built without its GPU parts, or for another CUDA than torch.
        NotImplementedError: A device of another kind.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise NotImplementedError(
            f"device={str(device)!r} is not supported; castor computes on 'cuda' and 'cpu'"
        )
    check_cuda(chosen)
    load_cuda()
    return torch.device("cuda", _index(chosen, torch.cuda.current_device()))


def check_cuda(device: torch.device) -> None:
    """Raises UsageError unless torch has this GPU."""
    instead = "; pass device='cpu' to train inside a budgeted host arena"
    if torch.version.cuda is None:
        raise UsageError(
            f"device='{device}' needs a torch with CUDA, and torch {torch.__version__} has none: "
            f"install a CUDA build of torch {torch.__version__.split('+')[0]}{instead}"
        )
    if not torch.cuda.is_available():
        raise UsageError(
            f"device='{device}' needs a GPU, and torch {torch.__version__} finds none: check that "
            f"nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it{instead}"
        )
    count = torch.cuda.device_count()
    if _index(device, 0) >= count:
        raise UsageError(
            f"device='{device}' is not there: torch finds {count} GPUs, 'cuda:0' to "
            f"'cuda:{count - 1}'"
        )


def _index(device: torch.device, default: int) -> int:
    return device.index if ":" in str(device) else default


def free_device_bytes(device: torch.device) -> int:
    """What a budget may be by default: of a GPU 95% of what is free or cached by torch."""
    if device.type == "cpu":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_USABLE_SHARE * (free + cached))


def make_backend(device: torch.device) -> Any:
    """What castor._C.Session takes as its backend: None for the CPU device."""
    return None if device.type == "cpu" else load_cuda().make_backend(device.index)
