"""Learning-rate schedulers on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers

import castor
from helpers import plugin

BOOSTER = castor.Booster(plugin=plugin())


def make_schedulers(optimizer: Any) -> dict[str, Any]:
    linear = schedulers.LinearLR(optimizer, total_iters=4)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=9)
    return {
        "lambda": schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
        "milestones": schedulers.MultiStepLR(optimizer, [2, 2, 5]),
        "one cycle": schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
        "plateau": schedulers.ReduceLROnPlateau(optimizer, patience=1),
        "sequence": schedulers.SequentialLR(optimizer, [linear, cosine], milestones=[3]),
    }


@pytest.mark.parametrize("name", ["lambda", "milestones", "one cycle", "plateau", "sequence"])
def test_schedulers_come_back_exactly(name: str, tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, make_schedulers(optimizer)[name]

    def run(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for i in range(4):
            optimizer.step()
            scheduler.step(*([float(i)] if name == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = build()
    run(optimizer, scheduler)
    BOOSTER.save_lr_scheduler(scheduler, tmp_path / "lr.json")
    own, back = build()
    BOOSTER.load_lr_scheduler(back, tmp_path / "lr.json")
    assert back.state_dict() == scheduler.state_dict()
    assert type(back.state_dict().get("milestones")) is type(
        scheduler.state_dict().get("milestones")
    )
    own.load_state_dict(optimizer.state_dict())
    assert run(own, back) == run(optimizer, scheduler)


def test_scheduler_state_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    class Scale:
        def __init__(self) -> None:
            self.inner = object()

        def __call__(self, step: int) -> float:
            return 1.0

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedulers.LambdaLR(optimizer, Scale())
    with pytest.raises(castor.CheckpointError, match=r"\['lr_lambdas'\]\[0\]\['inner'\]"):
        BOOSTER.save_lr_scheduler(scheduler, tmp_path / "lr.json")
    assert not list(tmp_path.iterdir())


def test_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    all_of_them = make_schedulers(SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    BOOSTER.save_lr_scheduler(all_of_them["lambda"], tmp_path / "lr.json")
    with pytest.raises(castor.CheckpointError, match=r"LambdaLR.*OneCycleLR"):
        BOOSTER.load_lr_scheduler(all_of_them["one cycle"], tmp_path / "lr.json")
