"""Parameters that require a gradient and are in no optimizer: as in plain PyTorch."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from helpers import FORMATS, LR, Boosted, assert_close, assert_close_losses, boost, copies, equal
from zoo import tower, tower_loss


def some(model: Any) -> list[nn.Parameter]:
    """What the optimizer holds: in the middle of the model."""
    return [*model.layers[1].parameters(), model.head.weight]


def others(model: Any) -> list[nn.Parameter]:
    held = set(some(model))
    return [param for param in model.parameters() if param not in held]


def boosted_in_part(model: Any, **settings: Any) -> Boosted:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return boost(model, optimizer=AdamW(some(model), lr=LR), **settings)


def train(
    model: Any, optimizer: Optimizer, first: int = 0, *, clear: bool = False, micro_batches: int = 2
) -> list[float]:
    losses = []
    for seed in range(first, first + 4):
        for k in range(micro_batches):
            loss = tower_loss(model, micro_batches * seed + k)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if clear:
            model.zero_grad()
    return losses


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("memory", ["1GiB", "64KiB"])
def test_they_get_no_update_and_keep_their_gradient_until_it_is_cleared(
    memory: str, overlap: str
) -> None:
    plain, model = tower(), tower()
    settings: dict[str, Any] = {}
    if overlap == "backward":
        settings = {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    boosted = boosted_in_part(model, memory=memory, overlap=overlap, **settings)
    own = AdamW(some(plain), lr=LR)
    before = copies(others(model))
    count = 1 if overlap == "backward" else 2
    expected = train(plain, own, micro_batches=count)
    assert_close_losses(train(model, boosted.optimizer, micro_batches=count), expected)
    for param, value, other in zip(others(model), before, others(plain), strict=True):
        assert equal(param.cpu(), value)
        assert_close(param.grad, other.grad)  # of all steps so far
    assert all(param.grad is None for param in some(model))
    model.zero_grad()
    plain.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    expected = train(plain, own, 4, clear=True, micro_batches=count)
    assert_close_losses(
        train(model, boosted.optimizer, 4, clear=True, micro_batches=count), expected, 1e-4
    )
    assert boosted.report().peak_device_bytes <= boosted.report().device_budget_bytes


@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_they_take_no_memory_for_updates(precision: str, state_format: str) -> None:
    model, frozen = tower(), tower()
    settings: dict[str, Any] = {
        "precision": precision, "optim_state_format": state_format, "initial_scale": 2.0**8,
    }  # fmt: skip
    in_part = boosted_in_part(model, **settings)
    for param in others(frozen):
        param.requires_grad_(False)
    reference = boost(frozen, optimizer=AdamW(some(frozen), lr=LR), **settings)
    for each in (in_part, reference):
        for seed in range(3):
            each.step(tower_loss(each.model, seed))
    assert in_part.report().host_bytes == reference.report().host_bytes
    assert len(in_part.optimizer.state) == len(some(model))
    for mine, theirs in zip(some(model), some(frozen), strict=True):
        assert equal(mine.cpu(), theirs.cpu())


def test_another_optimizer_may_step_them() -> None:
    plain, model = tower(), tower()
    boosted = boosted_in_part(model, memory="64KiB")
    pairs = []
    for trained, adam in ((plain, AdamW(some(plain), lr=LR)), (model, boosted.optimizer)):
        sgd = SGD(others(trained), lr=LR, momentum=0.9)
        losses = []
        for seed in range(6):
            loss = tower_loss(trained, seed)
            loss.backward()
            adam.step()
            sgd.step()
            adam.zero_grad()
            sgd.zero_grad()
            losses.append(loss.item())
        pairs.append(losses)
    assert_close_losses(pairs[1], pairs[0])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_clipping_is_over_what_is_updated() -> None:
    plain, model = tower(), tower()
    boosted = boosted_in_part(model, max_norm=0.01)
    own = AdamW(some(plain), lr=LR)
    for seed in range(4):
        loss = tower_loss(plain, seed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(some(plain), 0.01)
        own.step()
        own.zero_grad()
        assert boosted.step(tower_loss(model, seed)) == pytest.approx(loss.item(), rel=1e-5)


def test_a_run_with_them_resumes_bitwise(tmp_path: Path) -> None:
    first = boosted_in_part(tower(), precision="bf16")
    train(first.model, first.optimizer)
    first.booster.save(tmp_path / "run", first.model, first.optimizer)
    torch.manual_seed(9)
    second = boosted_in_part(tower(), precision="bf16")
    second.booster.load(tmp_path / "run", second.model, second.optimizer)
    first.model.zero_grad()
    assert train(second.model, second.optimizer, 4) == train(first.model, first.optimizer, 4)


def test_one_of_them_may_be_frozen_afterwards() -> None:
    plain, model = tower(), tower()
    boosted = boosted_in_part(model)
    own = AdamW(some(plain), lr=LR)
    for trained in (plain, model):
        others(trained)[0].requires_grad_(False)
    assert_close_losses(train(model, boosted.optimizer), train(plain, own))
    assert others(model)[0].grad is None
