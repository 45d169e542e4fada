"""What tests of layouts run on several ranks: `python layout_cases.py NAME DIRECTORY`.

The directory has folders, each with a plan.json and the config.json of the model that it is for.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

import castor
from castor.config.files import read_plan
from castor.runtime.engine import engine_of
from helpers import GIB
from simulated import compute_as_asked
from tensor_cases import LR, MAX_NORM, write, write_own

PLACES = ("host_bytes", "nvme_bytes", "nvme_weight_bytes")
"""Of a report, and of a layout's cost."""


@dataclass
class Planned:
    """A model that is divided by a plan."""

    model: Any
    optimizer: torch.optim.Optimizer
    booster: castor.Booster
    plan: dict[str, Any]
    data: dict[str, torch.Tensor]
    """A batch."""
    expected: float
    """Its loss in one process."""


def boosted_by(file: Path) -> Planned:
    """The model beside a plan."""
    plan = read_plan(file)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(file.with_name("config.json"))
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(config.vocab_size, (plan["batch_size"], plan["workload"]["sequence"]))
    data = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        expected = model(**data).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    # A plan that counts on NVMe says what the host has.
    host = {} if "nvme_path" in plan["layout"] else {"host_memory": GIB}
    plugin = castor.HybridParallelPlugin(
        file, device="cpu", device_memory=GIB, precision="fp32", max_norm=MAX_NORM, **host
    )
    booster = castor.Booster(plugin=plugin)
    booster.boost(model, optimizer)
    return Planned(model, optimizer, booster, plan, data, expected)


def trained(planned: Planned) -> list[float]:
    """Losses of two steps."""
    model, optimizer, booster = planned.model, planned.optimizer, planned.booster
    losses = []
    for _ in range(2):
        if "num_microbatches" in planned.plan["layout"]:
            done = booster.execute_pipeline(iter([planned.data]), model, None, optimizer)
            losses.append(done["loss"].item())
        else:
            loss = model(**planned.data).loss
            booster.backward(loss, optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_by_plan(directory: Path) -> None:
    """The loss of a step by each plan, and that of the same samples without ranks."""
    found = {}
    for file in sorted(directory.glob("*/plan.json")):
        planned = boosted_by(file)
        found[file.parent.name] = [*trained(planned), planned.expected]
    write(directory, "train_by_plan", found)


def places_by_plan(directory: Path) -> None:
    """Where each rank has its bytes by each plan, before a step."""
    found = {}
    for file in sorted(directory.glob("*/plan.json")):
        planned = boosted_by(file)
        report = planned.booster.report(planned.model)
        found[file.parent.name] = {name: getattr(report, name) for name in PLACES}
    write_own(directory, "places_by_plan", found)


def remember_by_plan(directory: Path) -> None:
    """As train_by_plan; where each rank has its bytes, and what it moves on NVMe in a step."""
    found = {}
    for file in sorted(directory.glob("*/plan.json")):
        planned = boosted_by(file)
        report = planned.booster.report(planned.model)
        rank = {name: getattr(report, name) for name in PLACES}
        losses, moved = [], []
        for _ in range(2):
            losses += trained(planned)
            report = planned.booster.report(planned.model)
            moved.append(report.nvme_read_bytes + report.nvme_written_bytes)
        rank |= {"losses": [*losses, planned.expected], "moved": (moved[1] - moved[0]) / 2}
        found[file.parent.name] = rank
    write_own(directory, "remember_by_plan", found)


class Noted:
    """What a rank sends others, as castor.estimate.metatrace.Sent has it."""

    def __init__(self, tensors: Any) -> None:
        """`tensors`: A rank's _C.RankTensors."""
        self._tensors = tensors
        self.sent: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors, name)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sent.append(("all_reduce", tensor.nbytes))
        self._tensors.all_reduce(tensor)

    def all_gather(self, own: torch.Tensor, parts: torch.Tensor) -> None:
        self.sent.append(("all_gather", own.nbytes))
        self._tensors.all_gather(own, parts)

    def all_to_all(self, parts: torch.Tensor, received: torch.Tensor) -> None:
        self.sent.append(("all_to_all", parts.nbytes))
        self._tensors.all_to_all(parts, received)


def exchange_by_plan(directory: Path) -> None:
    """What ranks that share layers exchange in a pass by each plan, and keep between its halves."""
    found = {}
    for file in sorted(directory.glob("*/plan.json")):
        planned = boosted_by(file)
        ranks = engine_of(planned.model).model_shards.ranks
        noted = Noted(ranks.tensors)
        object.__setattr__(ranks, "tensors", noted)
        for _ in range(2):  # in the first step blocks that run again are compared
            noted.sent.clear()
            loss = planned.model(**planned.data).loss
            kept = planned.booster.memory(planned.model).nonmodel_bytes
            planned.booster.backward(loss, planned.optimizer)
            found[file.parent.name] = {"sent": [*noted.sent], "kept": kept}
            planned.optimizer.step()
            planned.optimizer.zero_grad()
    write(directory, "exchange_by_plan", found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
