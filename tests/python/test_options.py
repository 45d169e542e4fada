"""A step with an option that no step can have changes nothing: counters move with the update."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import castor
from castor.runtime.engine import engine_of
from helpers import LR, assert_equal, boost, copies, exact_state
from zoo import tower, tower_loss

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "forward": {"overlap": "forward"},
    "backward": {
        "overlap": "backward",
        "nonfinite": "ignore",
        "enable_gradient_accumulation": False,
    },
    "fp16": {"precision": "fp16", "initial_scale": 8.0, "growth_interval": 3},
}

BAD = [
    ("betas", (2, 0.999), "beta1"),
    ("betas", (0.9, float("nan")), "beta2"),
    ("lr", -1.0, "lr"),
    ("eps", float("inf"), "eps"),
    ("weight_decay", -0.1, "weight_decay"),
]


def in_groups(model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW([{"params": weights}, {"params": others}], lr=LR)


def two_alike(mode: str) -> list[Any]:
    found = []
    for _ in range(2):
        model = tower()
        found.append(boost(model, optimizer=in_groups(model), **SETTINGS[mode]))
    for each in found:
        for seed in range(2):
            each.step(tower_loss(each.model, seed))
    return found


@pytest.mark.parametrize(("key", "value", "named"), BAD)
@pytest.mark.parametrize("mode", ["none", "forward", "fp16"])
def test_a_bad_option_of_the_second_group_stops_the_step_before_anything_moves(
    mode: str, key: str, value: Any, named: str
) -> None:
    boosted, reference = two_alike(mode)
    group = boosted.optimizer.param_groups[1]
    good = group[key]
    loss = tower_loss(boosted.model, 2)
    boosted.booster.backward(loss, boosted.optimizer)
    before = exact_state(boosted)
    group[key] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"param_groups\[1\]: Adam: {named}"):
            boosted.optimizer.step()
    assert_equal(exact_state(boosted), before)
    assert boosted.report().steps == 2
    group[key] = good
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    reference.step(tower_loss(reference.model, 2))
    for seed in range(3, 6):
        losses = [each.step(tower_loss(each.model, seed)) for each in (boosted, reference)]
        assert losses[0] == losses[1]
    assert_equal(exact_state(boosted), exact_state(reference))
    steps = [entry["step"].item() for entry in boosted.optimizer.state.values()]
    assert steps == [6.0] * len(steps)
    assert boosted.report().steps == reference.report().steps


def test_beside_backward_the_forward_says_so() -> None:
    boosted, reference = two_alike("backward")
    group = boosted.optimizer.param_groups[1]
    before = copies(boosted.model.parameters())
    group["betas"] = (2, 0.999)
    with pytest.raises(ValueError, match=r"param_groups\[1\]: Adam: beta1"):
        tower_loss(boosted.model, 2)
    assert_equal(copies(boosted.model.parameters()), before)
    group["betas"] = (0.9, 0.999)
    for each in (boosted, reference):
        for seed in range(2, 5):
            each.step(tower_loss(each.model, seed))
    assert_equal(exact_state(boosted), exact_state(reference))


@pytest.mark.parametrize("value", [(2, 0.999), (0.8, 0.999)], ids=["bad", "other"])
def test_what_backward_has_updated_is_not_updated_again_by_a_step_that_was_refused(
    value: Any,
) -> None:
    boosted, reference = two_alike("backward")
    group = boosted.optimizer.param_groups[1]
    boosted.booster.backward(tower_loss(boosted.model, 2), boosted.optimizer)
    good, group["betas"] = group["betas"], value
    with pytest.raises((ValueError, castor.UsageError), match=r"betas|beta1|option"):
        boosted.optimizer.step()
    with pytest.raises(castor.UsageError, match="was not called"):
        tower_loss(boosted.model, 3)
    group["betas"] = good
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    reference.step(tower_loss(reference.model, 2))
    for each in (boosted, reference):
        each.step(tower_loss(each.model, 3))
    assert_equal(exact_state(boosted), exact_state(reference))
    assert boosted.report().steps == reference.report().steps


def test_a_missing_option_stops_the_step_before_anything_moves() -> None:
    boosted, reference = two_alike("none")
    boosted.booster.backward(tower_loss(boosted.model, 2), boosted.optimizer)
    good = boosted.optimizer.param_groups[1].pop("lr")
    with pytest.raises(KeyError, match="lr"):
        boosted.optimizer.step()
    boosted.optimizer.param_groups[1]["lr"] = good
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    reference.step(tower_loss(reference.model, 2))
    assert_equal(exact_state(boosted), exact_state(reference))


@pytest.mark.parametrize("state_format", ["fp32", "split_int8"])
def test_hybrid_adam_alone_changes_nothing_either(state_format: str) -> None:
    def make() -> tuple[list[nn.Parameter], castor.HybridAdam]:
        dtype = torch.float32 if state_format == "fp32" else torch.bfloat16
        params = [nn.Parameter(torch.linspace(-1, 1, 300).to(dtype)) for _ in range(2)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        return params, castor.HybridAdam(groups, lr=LR, optim_state_format=state_format)

    (params, optimizer), (expected, reference) = make(), make()
    for seed in range(4):
        for mine, theirs in zip(params, expected, strict=True):
            mine.grad = torch.full_like(mine, 0.1 * (seed + 1))
            theirs.grad = mine.grad.clone()
        if seed == 2:
            optimizer.param_groups[1]["betas"] = (2, 0.999)
            with pytest.raises(ValueError, match=r"param_groups\[1\]: Adam: beta1"):
                optimizer.step()
            optimizer.param_groups[1]["betas"] = (0.9, 0.999)
            params[1].grad = torch.ones(300, dtype=torch.float64).to(params[1].dtype).to_sparse()
            with pytest.raises(TypeError, match="sparse"):
                optimizer.step()
            params[1].grad = expected[1].grad.clone()
        optimizer.step()
        reference.step()
    assert_equal(params, expected)
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_a_step_that_the_session_refuses_moves_no_counter() -> None:
    boosted, _ = two_alike("none")
    engine = engine_of(boosted.model)
    steps = engine.session.steps.clone()
    boosted.booster.backward(tower_loss(boosted.model, 2), boosted.optimizer)
    with pytest.raises(ValueError, match="group_of names group 7"):
        engine.session.update(
            [{"lr": LR, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0,
              "decoupled": True, "maximize": False}],
            [7] * len(engine.params), 1.0,
        )  # fmt: skip
    assert torch.equal(engine.session.steps, steps)
    assert engine.session.consistent
