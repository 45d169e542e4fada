"""Chunks that are laid out anew between two steps, after a change of the model or its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

import castor
from castor.runtime.engine import engine_of
from helpers import FORMATS, Boosted, boost

WIDTH = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def step(net: nn.Module, optimizer: Optimizer, seed: int, boosted: Boosted | None = None) -> float:
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    loss = net(inputs).float().pow(2).mean()
    if boosted:
        boosted.booster.backward(loss, optimizer)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


MAKERS: dict[str, Any] = {
    "adamw": lambda params: AdamW(params, lr=1e-2, eps=1e-4),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "own step": lambda params: RMSprop(params, lr=1e-3),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("where", ["ample", "tight", "nvme"])
def test_gradual_unfreezing_trains_as_in_plain_pytorch(
    make: str, where: str, tmp_path: Path
) -> None:
    if (make, where) == ("own step", "nvme"):
        pytest.skip("NVMe holds the states of fused steps")
    results = []
    for boosted in (False, True):
        net = model()
        for param in net[:4].parameters():
            param.requires_grad_(False)
        optimizer = MAKERS[make](net[4].parameters())
        mine = None
        if boosted:
            settings: dict[str, Any] = {
                "nvme_path": tmp_path, "nvme_memory": "1MiB", "nvme_offload_fraction": 1.0
            } if where == "nvme" else {}  # fmt: skip
            mine = boost(net, 1500 if where == "tight" else "64MiB", optimizer, **settings)
        scheduler = StepLR(optimizer, 2)
        losses = []
        for i in range(6):
            losses.append(step(net, optimizer, i))
            scheduler.step()
            if i in (1, 3):
                layer = net[2 if i == 1 else 0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 3e-3})
                if mine:
                    mine.booster.reboost(net, optimizer)
        results.append(losses)
        if mine:
            assert engine_of(net).num_steps == 6
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_what_stays_keeps_its_bits(precision: Any, state_format: Any) -> None:
    """Laying the chunks out anew without a change changes no bit of what follows."""
    losses, weights = [], []
    for again in (False, True):
        net = model()
        optimizer = AdamW(net.parameters(), lr=1e-2)
        mine = boost(net, "64MiB", optimizer, precision=precision, optim_state_format=state_format,
                     initial_scale=256.0)  # fmt: skip
        found = []
        for i in range(6):
            found.append(step(net, optimizer, i, mine))
            if again and i in (1, 2):
                mine.booster.reboost(net)
        losses.append(found)
        weights.append([param.detach().clone() for param in net.parameters()])
        if mine.report().skipped_steps:
            pytest.fail("nothing was to overflow")
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *weights))


def test_layers_may_be_replaced_while_the_model_is_released() -> None:
    results = []
    for boosted in (False, True):
        net = model()
        optimizer = AdamW(net.parameters(), lr=1e-2)
        mine = boost(net, "64MiB", optimizer) if boosted else None
        losses = [step(net, optimizer, i) for i in range(2)]

        def widen(net: nn.Sequential = net, optimizer: Optimizer = optimizer) -> None:
            torch.manual_seed(1)
            old = {id(param) for param in net[4].parameters()}
            net[4] = nn.Linear(WIDTH, 2 * WIDTH)
            group = optimizer.param_groups[0]
            for param in [one for one in group["params"] if id(one) in old]:
                optimizer.state.pop(param, None)
            group["params"] = [one for one in group["params"] if id(one) not in old]
            optimizer.add_param_group({"params": list(net[4].parameters())})

        if mine:
            with mine.booster.released(net, optimizer):
                widen()
        else:
            widen()
        results.append(losses + [step(net, optimizer, i) for i in range(2, 5)])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_gradients_of_a_step_that_was_not_taken_are_named() -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    mine = boost(net, "64MiB", optimizer)
    net(torch.ones(1, WIDTH)).sum().backward()
    with pytest.raises(
        castor.UsageError, match=r"6 parameters have gradients, the first .*0\.weight"
    ):
        mine.booster.reboost(net, optimizer)
    optimizer.step()


def test_a_change_of_requires_grad_says_what_to_call() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = AdamW([param for param in net.parameters() if param.requires_grad])
    boost(net, "64MiB", optimizer)
    net[0].requires_grad_(True)
    with pytest.raises(castor.UsageError, match=r"'0\.weight' had requires_grad=False.*reboost"):
        net(torch.ones(1, WIDTH))
