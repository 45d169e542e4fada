"""Copied and pickled: a boosted optimizer becomes an ordinary one, as plain PyTorch's would be."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import castor
from helpers import (
    LR,
    Boosted,
    assert_close,
    assert_equal,
    assert_same_weights,
    boost,
    copies,
    equal,
    go_on,
)
from zoo import tower, tower_loss


def saved_and_loaded(written: Any) -> Any:
    file = io.BytesIO()
    torch.save(written, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda written: pickle.loads(pickle.dumps(written)),
    "torch.save": saved_and_loaded,
}


def adamw(model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2 * LR}], lr=LR
    )


def hybrid(model: nn.Module) -> Optimizer:
    return castor.HybridAdam(model.parameters(), lr=LR)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR, momentum=0.9)


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step_alike(optimizers: list[Optimizer]) -> None:
    """One step of each with the same gradients."""
    for optimizer in optimizers:
        generator = torch.Generator().manual_seed(5)
        for param in params_of(optimizer):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [adamw, hybrid, momentum], ids=["AdamW", "HybridAdam", "SGD"])
def test_a_copy_is_an_ordinary_optimizer_that_takes_the_same_steps(
    make: Callable[[nn.Module], Optimizer], way: str
) -> None:
    model = tower()
    boosted = boost(model, optimizer=make(model))
    go_on(boosted)
    twin = WAYS[way](boosted.optimizer)
    assert type(twin) is type(make(tower()))
    assert_equal(params_of(twin), copies(params_of(boosted.optimizer)))
    before = copies(params_of(boosted.optimizer))
    step_alike([twin])
    assert_equal(copies(params_of(boosted.optimizer)), before)  # nothing is shared
    step_alike([boosted.optimizer])
    for mine, theirs in zip(params_of(twin), params_of(boosted.optimizer), strict=True):
        assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    if make is hybrid:
        assert_equal(copies(params_of(twin)), copies(params_of(boosted.optimizer)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state_format", ["fp32", "split", "split_bf16", "split_int8"])
def test_copies_of_hybrid_adam_keep_masters_moments_and_rounding(
    state_format: str, way: str
) -> None:
    model = tower()
    optimizer = castor.HybridAdam(model.parameters(), lr=LR, seed=7)
    boosted = boost(model, optimizer=optimizer, precision="bf16", optim_state_format=state_format)
    go_on(boosted)
    twin = WAYS[way](boosted.optimizer)
    for _ in range(3):
        step_alike([twin, boosted.optimizer])
    assert_equal(copies(params_of(twin)), copies(params_of(boosted.optimizer)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_torchs_adam_cannot_hold_masters_and_the_copy_says_so(precision: str, way: str) -> None:
    boosted = boost(tower(), precision=precision, initial_scale=8.0)
    go_on(boosted)
    with pytest.raises(castor.UsageError, match=rf"masters of its {precision}.*HybridAdam"):
        WAYS[way](boosted.optimizer)
    go_on(boosted, first=4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_model_and_optimizer_copied_together_belong_together(order: str, way: str) -> None:
    boosted, other = boost(tower()), boost(tower())
    for each in (boosted, other):
        go_on(each)
    if order == "model first":
        model, optimizer = WAYS[way]((boosted.model, boosted.optimizer))
    else:
        optimizer, model = WAYS[way]((boosted.optimizer, boosted.model))
    assert all(a is b for a, b in zip(params_of(optimizer), model.parameters(), strict=True))
    for seed in range(4, 8):
        tower_loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    go_on(other, first=4)
    for mine, theirs in zip(model.parameters(), other.model.parameters(), strict=True):
        assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    again = boost(model, optimizer=optimizer)  # copies may be boosted
    go_on(again, first=8)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_shallow_copy_steps_the_same_parameters(overlap: str) -> None:
    boosted, other = boost(tower(), overlap=overlap), boost(tower(), overlap=overlap)
    go_on(boosted)
    twin = copy.copy(boosted.optimizer)
    assert twin.param_groups is boosted.optimizer.param_groups
    assert twin.state is boosted.optimizer.state
    expected = go_on(other, steps=8)
    assert go_on(Boosted(boosted.booster, boosted.model, twin), first=4) == expected[4:]
    assert_same_weights(boosted.model, copies(other.model.parameters()))


def test_a_scheduler_takes_its_optimizer_along() -> None:
    model = tower()
    optimizer = AdamW(model.parameters(), lr=LR)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    boosted = boost(model, optimizer=optimizer)
    go_on(boosted, steps=1)
    twin = copy.deepcopy(scheduler)
    assert type(twin.optimizer) is AdamW
    step_alike([twin.optimizer])
    with pytest.warns(UserWarning, match="has been overridden"):  # as in plain torch
        twin.step()
    assert twin.optimizer.param_groups[0]["lr"] == LR / 2
    assert optimizer.param_groups[0]["lr"] == LR


def test_states_on_nvme_come_into_memory(tmp_path: Path) -> None:
    model = tower()
    optimizer = castor.HybridAdam(
        model.parameters(), lr=LR, nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path)
    )
    boosted = boost(model, optimizer=optimizer)
    go_on(boosted)
    assert boosted.report().nvme_bytes > 0
    twin = copy.deepcopy(boosted.optimizer)
    step_alike([twin, boosted.optimizer])
    assert_equal(copies(params_of(twin)), copies(params_of(boosted.optimizer)))


def test_a_pickled_boosted_model_in_fp32_names_nothing_of_castors() -> None:
    boosted = boost(tower())
    go_on(boosted)
    assert b"castor" not in pickle.dumps(boosted.model)


def test_a_pickled_boosted_model_is_an_ordinary_one() -> None:
    boosted = boost(tower(), precision="bf16")
    go_on(boosted)
    saved = io.BytesIO()
    torch.save(boosted.model, saved)
    saved.seek(0)
    for twin in (
        pickle.loads(pickle.dumps(boosted.model)),
        pickle.loads(pickle.dumps(copy.deepcopy(boosted.model))),
        torch.load(saved, weights_only=False),
    ):
        assert_same_weights(twin, copies(boosted.model.parameters()))
        assert equal(tower_loss(twin, 3), tower_loss(boosted.model, 3))
        twin.layers[0] = torch.nn.Linear(32, 32)  # not guarded
        twin.load_state_dict(twin.state_dict())
