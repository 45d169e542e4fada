"""Buffers on several ranks, beside torch's DDP: `python rank_buffer_cases.py NAME DIRECTORY`."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import as_rank
import castor

WIDTH, STEPS, ROWS = 16, 4, 8
OWN = "body.1.running_mean"
PLUGINS = ("castor", "torch")
KINDS = ("plain", "accumulated", "twice", "checkpointed", "own")


class Normed(nn.Module):
    """With a BatchNorm, and a buffer that nobody writes."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh())
        self.head = nn.Linear(32, 5)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = (
            checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        )
        return nn.functional.cross_entropy(self.head(hidden) * self.scale.float(), labels)


@dataclass
class Trained:
    """By whom: what differs in a loop."""

    model: nn.Module
    """What is called."""
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[Any]]
    inner: nn.Module


def made(name: str, kind: str) -> Trained:
    model = Normed(checkpointed=kind == "checkpointed")
    if kind == "own":
        told = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        told(model, [OWN])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "plain":
        wrapped = DistributedDataParallel(model)
        return Trained(wrapped, optimizer, wrapped.no_sync, model)
    settings: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "64MiB"}
    plugin: Any = castor.TorchDDPPlugin(device="cpu", precision="fp32")
    if name == "castor":
        plugin = castor.GeminiPlugin(device="cpu", precision="fp32", **settings)
    booster = castor.Booster(plugin)
    booster.boost(model, optimizer)
    return Trained(model, optimizer, lambda: booster.no_sync(model), model)


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of this rank, one after the other."""
    noise = torch.Generator().manual_seed(100 * seed + int(os.environ["RANK"]))
    while True:
        x = torch.randn((ROWS, WIDTH), generator=noise)
        yield x, torch.randint(0, 5, (ROWS,), generator=noise)


def buffers(directory: Path) -> None:
    """What each rank computes and has, of each kind of loop, in plain DDP and with plugins."""
    for name in ("plain", *PLUGINS):
        found = {kind: _train(made(name, kind), kind) for kind in KINDS}
        torch.save(found, directory / f"{name}.{os.environ['RANK']}.pt")


def _train(given: Trained, kind: str) -> dict[str, Any]:
    data, others = batches(1), batches(2)
    found: dict[str, Any] = {"losses": [], "evaluated": [], "buffers": []}
    for _ in range(STEPS):
        given.model.train()
        for number in range(2 if kind in ("accumulated", "twice") else 1):
            apart = kind == "accumulated" and number == 0
            with given.no_sync() if apart else nullcontext():
                loss = given.model(*next(data))
                loss.backward()
            found["losses"].append(loss.item())
        given.optimizer.step()
        given.optimizer.zero_grad()
        given.model.eval()
        with torch.no_grad():
            found["evaluated"].append(given.model(*next(others)).item())
        found["buffers"].append({n: b.clone() for n, b in given.inner.named_buffers()})
    return found


if __name__ == "__main__":
    as_rank.run(globals())
