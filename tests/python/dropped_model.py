"""A process that drops a model while copies over a slow link wait for updates: exits with 0."""

import contextlib
import ctypes
import gc
from typing import Any

import torch
from torch import nn

from helpers import boost

WIDTH = 1024
M_PERTURB = -6
"""Of glibc's mallopt: what is freed is overwritten."""


def interrupt(*_: Any) -> None:
    raise ZeroDivisionError


def main() -> None:
    assert ctypes.CDLL(None).mallopt(M_PERTURB, 165) == 1
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    weights = list(model.parameters())
    boosted = boost(
        model,
        overlap="forward",
        link_bandwidth="80MB/s",
        chunk_bytes=4 * WIDTH**2,
        max_prefetch=6,
        gpu_margin_mem_ratio=0.0,
    )
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        boosted.step(boosted.model(x).square().mean())
    boosted.booster.backward(boosted.model(x).square().mean(), boosted.optimizer)
    handle = model[0].register_forward_hook(interrupt)
    boosted.optimizer.step()
    with contextlib.suppress(ZeroDivisionError):
        boosted.model(x)
    handle.remove()
    del model, boosted, handle  # six copies are under way or wait for their update
    gc.collect()
    assert all(bool(torch.isfinite(weight).all()) for weight in weights)


if __name__ == "__main__":
    main()
