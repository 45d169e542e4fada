"""What tests of LowLevelZeroPlugin run on two ranks; see rank_cases.py."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import castor
from helpers import GIB, copies
from rank_cases import EXACT, STEPS
from tensor_cases import write_own

CASE = EXACT["gpt2"]
SETTINGS: dict[str, dict[str, Any]] = {
    "on the device": {"stage": 1},
    "stage 1, offloaded": {"stage": 1, "cpu_offload": True},
    "stage 2, offloaded": {"stage": 2, "cpu_offload": True},
}


def plugin(**settings: Any) -> castor.LowLevelZeroPlugin:
    """On the CPU device."""
    budgets = {"device": "cpu", "device_memory": GIB, "host_memory": GIB}
    return castor.LowLevelZeroPlugin(**budgets, max_norm=0.5, precision="fp32", **settings)


def train(
    settings: dict[str, Any], ranks: Sequence[int]
) -> tuple[list[torch.Tensor], castor.MemoryReport]:
    """Weights and report; `ranks`: whose batches this process takes."""
    model: nn.Module = CASE.build()
    optimizer = castor.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    booster = castor.Booster(plugin(**settings))
    booster.boost(model, optimizer)
    for step in range(STEPS):
        for rank in ranks:
            booster.backward(CASE.loss(model, 1000 * step + rank, rank) / len(ranks), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return copies(model.parameters()), booster.report(model)


def each(directory: Path) -> None:
    """All settings, one after the other."""
    rank = distributed.get_rank()
    reports = {}
    for name, settings in SETTINGS.items():
        weights, report = train(settings, range(rank, rank + 1))
        torch.save(weights, directory / f"{name}.{rank}.pt")
        reports[name] = vars(report)
    write_own(directory, "each", reports)


def over_the_group(directory: Path) -> None:
    """What stage 2 says where ranks share no memory."""
    os.environ["CASTOR_RANK_LINK"] = "group"
    model = CASE.build()
    said = "nothing"
    try:
        castor.Booster(plugin(stage=2, cpu_offload=True)).boost(
            model, torch.optim.AdamW(model.parameters())
        )
    except castor.UsageError as error:
        said = str(error)
    write_own(directory, "over_the_group", said)


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
