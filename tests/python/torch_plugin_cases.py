"""What tests of torch's own classes under castor's loop run on ranks; see rank_cases.py."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import castor
from castor.plugins import Plugin
from helpers import GIB
from rank_cases import EXACT, STEPS, RankCase
from zoo import Tower

CASE = EXACT["gpt2"]
MAX_NORM = 0.5
BUDGETS = {"device_memory": GIB, "host_memory": GIB}
PLUGINS: dict[str, Callable[..., Plugin]] = {
    "gemini": lambda **s: castor.GeminiPlugin(device="cpu", **BUDGETS, **s),
    "zero": lambda **s: castor.LowLevelZeroPlugin(device="cpu", cpu_offload=True, **BUDGETS, **s),
    "ddp": lambda **s: castor.TorchDDPPlugin(device="cpu", **s),
    "fsdp": lambda **s: castor.TorchFSDPPlugin(device="cpu", **s),
}
CASES = {name: EXACT[name] for name in ("gpt2", "llama", "t5", "mixtral", "frozen", "lazy")}
"""That the ranks pass through alike."""

FSDP_SETTINGS: dict[str, dict[str, Any]] = {
    "kept after forward": {"reshard_after_forward": False},
    "divided after forward": {"reshard_after_forward": True},
    "offloaded": {"cpu_offload": True},
    "bf16": {"precision": "bf16"},
}


class Normed(Tower):
    """With statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return super().forward(self.norm(x), labels)


def normed() -> Normed:
    torch.manual_seed(7)
    return Normed()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def boost(
    plugin: Plugin, model: nn.Module
) -> tuple[castor.Booster, nn.Module, torch.optim.Optimizer]:
    booster = castor.Booster(plugin)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    return booster, model, optimizer


def script(
    booster: castor.Booster,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Sequence[int],
    *,
    case: RankCase = CASE,
    first: int = 0,
    steps: int = STEPS,
) -> list[float]:
    """A loop written for castor, whatever the plugin; `ranks`: whose batches this process takes."""
    losses = []
    for step in range(first, first + steps):
        for rank in ranks:
            with booster.no_sync(model) if rank != ranks[-1] else nullcontext():
                loss = case.loss(model, 1000 * step + rank, rank)
                booster.backward(loss / len(ranks), optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def trained(
    name: str, ranks: Sequence[int], case: RankCase = CASE, **settings: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights under a plugin."""
    booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM, **settings), case.build())
    losses = script(booster, model, optimizer, ranks, case=case)
    return losses, weights_of(model)


def trained_by_torch(
    case: RankCase, rank: int, **options: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """A loop over DistributedDataParallel that knows nothing of castor."""
    model = case.build()
    castor.lazy.materialise.materialise(model)
    optimizer = optimizer_of(model)
    ddp = DistributedDataParallel(model, **options)
    losses = []
    for step in range(STEPS):
        loss = case.loss(ddp, 1000 * step + rank, rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(model)


def ddp_and_torch(directory: Path) -> None:
    """Both, for all cases."""
    rank = distributed.get_rank()
    unused = {"find_unused_parameters": True}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        options = unused if name == "mixtral" else {}
        found[name] = (
            trained("ddp", range(rank, rank + 1), case, **options),
            trained_by_torch(case, rank, **options),
        )
    torch.save(found, directory / f"ddp.{rank}.pt")


def same_script(directory: Path) -> None:
    """Under each plugin; whether all ranks have the same weights is seen from the files."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for name in PLUGINS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        losses = script(booster, model, optimizer, range(rank, rank + 1))
        booster.save_model(model, directory / name)
        report = booster.report(model)
        found[name] = losses, report.gradient_norm, report.steps, (report.rank, report.ranks)
    torch.save(found, directory / f"losses.{rank}.pt")


def all_cases_divided(directory: Path) -> None:
    """Losses of TorchFSDPPlugin, with its options."""
    rank = distributed.get_rank()
    own = range(rank, rank + 1)
    found: dict[str, Any] = {name: trained("fsdp", own, case)[0] for name, case in CASES.items()}
    for name, settings in FSDP_SETTINGS.items():
        found[name] = trained("fsdp", own, **settings)[0]
    torch.save(found, directory / f"fsdp.{rank}.pt")


def saved_by_each(directory: Path) -> None:
    """A run under each plugin goes on under each other."""
    rank = distributed.get_rank()
    own = range(rank, rank + 1)
    followed = {}
    for name in PLUGINS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        script(booster, model, optimizer, own, steps=3)
        booster.save(directory / name, model, optimizer)
        booster.save_model(model, directory / f"{name}-model")
        booster.save_optimizer(optimizer, directory / f"{name}-optimizer")
        (followed[name],) = script(booster, model, optimizer, own, first=3, steps=1)
    for saved_by in PLUGINS:
        for name in PLUGINS:
            other = CASE.build()
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), other)
            assert booster.latest(directory / saved_by) == directory / saved_by / "step-00000003"
            info = booster.load(directory / saved_by, model, optimizer)
            assert info.step == 3
            booster.save(directory / f"{saved_by}-{name}", model, optimizer)
            (loss,) = script(booster, model, optimizer, own, first=3, steps=1)
            assert loss == followed[saved_by], (saved_by, name, loss, followed)
            booster.load_model(model, directory / f"{saved_by}-model")
            booster.load_optimizer(optimizer, directory / f"{saved_by}-optimizer")
            booster.save(directory / f"{saved_by}-{name}-parts", model, optimizer, step=3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    distributed.barrier()
