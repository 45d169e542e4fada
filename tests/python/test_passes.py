"""Forwards, backwards and evaluations in any order; generate; autocast."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import (
    assert_close_losses,
    assert_trains_as_plain,
    boost,
    equal,
    losses_of_boosted,
    losses_of_plain,
    tight_memory,
)
from zoo import CASES, tower, tower_loss


def test_several_forwards_before_one_backward() -> None:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return sum(tower_loss(model, 3 * seed + k) for k in range(3))

    assert_trains_as_plain(tower, loss)


def test_backward_of_forwards_in_the_order_they_were_made() -> None:
    def train(model: nn.Module, backward: Callable[[torch.Tensor], Any], step: Any) -> list[float]:
        seen = []
        for i in range(4):
            losses = [tower_loss(model, 2 * i + k) for k in range(2)]
            for loss in losses:
                backward(loss)
                seen.append(loss.item())
            step()
        return seen

    plain = tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = train(
        plain, torch.Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())
    )
    boosted = boost(tower(), tight_memory(tower, lambda m, i: tower_loss(m, i) + tower_loss(m, -i)))
    own = boosted.optimizer
    actual = train(boosted.model, torch.Tensor.backward, lambda: (own.step(), own.zero_grad()))
    assert_close_losses(actual, expected)


def test_norm_over_all_parameters_as_a_loss_term() -> None:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return tower_loss(model, seed) + 0.1 * sum(p.square().sum() for p in model.parameters())

    assert_trains_as_plain(tower, loss)


def test_parameters_read_before_the_forward() -> None:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        decay = torch.stack([p.norm() for p in model.parameters()]).sum()
        return tower_loss(model, seed) + 0.01 * decay

    assert_trains_as_plain(tower, loss)


def test_evaluation_losses_are_bitwise_those_of_the_same_weights() -> None:
    boosted = boost(CASES["gpt2"].model())
    losses_of_boosted(boosted, lambda model, i: model(**CASES["gpt2"].batch(i)).loss)
    plain = CASES["gpt2"].model()
    plain.load_state_dict(boosted.model.state_dict())
    with torch.no_grad():
        for seed in range(3):
            batch = CASES["gpt2"].batch(seed)
            assert equal(boosted.model(**batch).loss, plain(**batch).loss)


def test_memory_stays_bounded_in_inference() -> None:
    forward = lambda model, i: model(**CASES["gpt2"].batch(i)).loss  # noqa: E731
    memory = tight_memory(CASES["gpt2"].model, forward)
    boosted = boost(CASES["gpt2"].model(), memory)
    held = []
    with torch.no_grad():
        for i in range(8):
            forward(boosted.model, i)
            held.append(boosted.booster.memory().nonmodel_bytes)
    assert len(set(held)) == 1
    assert boosted.report().peak_device_bytes <= memory


def test_autocast_trains_as_plain_under_autocast() -> None:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**CASES["gpt2"].batch(seed)).loss

    plain, boosted = CASES["gpt2"].model(), boost(CASES["gpt2"].model())
    expected = losses_of_plain(plain, loss)
    assert_close_losses(losses_of_boosted(boosted, loss), expected, tolerance=4e-3)


def test_a_step_inside_autocast_warns_where_the_next_forward_has_the_weights_before_it() -> None:
    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                loss = model(torch.ones(2, 8)).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    plain = losses(*linear())
    assert len(set(plain)) == 1  # the fault is plain PyTorch's
    model, optimizer = linear()
    boosted = boost(model, optimizer=optimizer)
    with pytest.warns(RuntimeWarning, match="inside torch.autocast") as caught:
        assert losses(boosted.model, boosted.optimizer) == plain
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]  # once, at the step
    model, optimizer = linear()
    boosted = boost(model.bfloat16(), optimizer=optimizer, precision="bf16")
    losses(boosted.model, boosted.optimizer)  # no copies of such weights: no warning
