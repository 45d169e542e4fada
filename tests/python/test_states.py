"""Optimizer states: torch AdamW's layout, in both directions, bitwise."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import castor
from helpers import (
    LR,
    assert_close,
    assert_close_losses,
    assert_close_weights,
    assert_same_weights,
    boost,
    copies,
    go_on,
    losses_of_boosted,
    plain_steps,
)
from zoo import tower, tower_batch


def assert_same_layout(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for mine, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert mine == theirs
    assert actual["state"].keys() == expected["state"].keys()
    for i, theirs in expected["state"].items():
        mine = actual["state"][i]
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert (mine[key].shape, mine[key].dtype) == (value.shape, value.dtype)
            assert_close(mine[key], value, rtol=1e-4, atol=1e-8)


def test_state_dict_is_that_of_torch_adamw() -> None:
    plain, boosted = tower(), boost(tower())
    own = AdamW(plain.parameters(), lr=LR)
    assert_same_layout(boosted.optimizer.state_dict(), own.state_dict())
    plain_steps(plain, own, 0)
    go_on(boosted, 0)
    assert_same_layout(boosted.optimizer.state_dict(), own.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_run_continues_bitwise(precision: str, tmp_path: Path) -> None:
    boosted = boost(tower(), precision=precision)
    go_on(boosted, 0)
    if precision == "bf16":
        # Without the masters a checkpoint holds rounded weights: continue from those in both.
        boosted.model.load_state_dict(copy.deepcopy(boosted.model.state_dict()))
    torch.save([boosted.model.state_dict(), boosted.optimizer.state_dict()], tmp_path / "run.pt")
    model_state, optimizer_state = torch.load(tmp_path / "run.pt")
    resumed = boost(tower(), precision=precision)
    resumed.model.load_state_dict(model_state)
    resumed.optimizer.load_state_dict(optimizer_state)
    losses = go_on(resumed, 4)
    if precision == "fp32":
        assert losses == go_on(boosted, 4)
        assert_same_weights(resumed.model, copies(boosted.model.parameters()))
    else:
        assert_close_losses(losses, go_on(boosted, 4), tolerance=4e-3)


def test_loading_in_the_other_order_and_before_boost_continues_bitwise() -> None:
    boosted = boost(tower())
    go_on(boosted, 0)
    states = copy.deepcopy([boosted.model.state_dict(), boosted.optimizer.state_dict()])
    expected = go_on(boosted, 4)

    other_order = boost(tower())
    other_order.optimizer.load_state_dict(states[1])
    other_order.model.load_state_dict(states[0])
    assert go_on(other_order, 4) == expected

    model = tower()
    optimizer = AdamW(model.parameters(), lr=LR)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert go_on(boost(model, optimizer=optimizer), 4) == expected


def test_torch_adamw_continues_from_a_boosted_run() -> None:
    boosted = boost(tower())
    go_on(boosted, 0)
    plain = tower()
    own = AdamW(plain.parameters(), lr=LR)
    plain.load_state_dict(boosted.model.state_dict())
    own.load_state_dict(copy.deepcopy(boosted.optimizer.state_dict()))
    assert_close_losses(go_on(boosted, 4), plain_steps(plain, own, 4))


def test_boosted_run_continues_from_torch_adamw() -> None:
    plain = tower()
    own = AdamW(plain.parameters(), lr=LR)
    plain_steps(plain, own, 0)
    boosted = boost(tower())
    boosted.model.load_state_dict(plain.state_dict())
    boosted.optimizer.load_state_dict(own.state_dict())
    assert_same_layout(boosted.optimizer.state_dict(), own.state_dict())
    assert_close_losses(go_on(boosted, 4), plain_steps(plain, own, 4))
    assert_close_weights(boosted.model, plain)


def test_optimizer_that_has_stepped_before_boost_goes_on() -> None:
    plain, model = tower(), tower()
    own, optimizer = AdamW(plain.parameters(), lr=LR), AdamW(model.parameters(), lr=LR)
    plain_steps(plain, own, 0, steps=8)
    plain_steps(model, optimizer, 0)
    boosted = boost(model, optimizer=optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
    go_on(boosted, 4)
    assert_close_weights(model, plain)
    assert_same_layout(optimizer.state_dict(), own.state_dict())


def test_state_of_unused_parameters_stays_absent() -> None:
    model = tower()
    model.spare = nn.Linear(3, 3)
    boosted = boost(model)
    go_on(boosted, 0)
    assert model.spare.weight not in boosted.optimizer.state
    saved = boosted.optimizer.state_dict()
    assert len(saved["state"]) == len(saved["param_groups"][0]["params"]) - 2
    boosted.optimizer.load_state_dict(copy.deepcopy(saved))
    assert model.spare.weight not in boosted.optimizer.state


def test_loaded_state_replaces_the_old_one() -> None:
    fresh, boosted = boost(tower()), boost(tower())
    empty = copy.deepcopy(boosted.optimizer.state_dict())
    start = copy.deepcopy(boosted.model.state_dict())
    go_on(boosted, 0)
    boosted.model.load_state_dict(start)
    boosted.optimizer.load_state_dict(empty)
    assert not boosted.optimizer.state_dict()["state"]
    assert go_on(boosted, 0) == go_on(fresh, 0)


def test_step_hooks_run_once_after_a_load() -> None:
    boosted = boost(tower())
    boosted.optimizer.load_state_dict(boosted.optimizer.state_dict())
    calls: list[str] = []
    boosted.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    boosted.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    go_on(boosted, 0, steps=1)
    assert calls == ["pre", "post"]


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    boosted, other = boost(tower()), boost(tower(width=16))
    go_on(boosted, 0)
    losses_of_boosted(other, lambda model, i: model(**tower_batch(i, width=16)), steps=1)
    before = copy.deepcopy(boosted.optimizer.state_dict())
    with pytest.raises(castor.UsageError, match=r"layers\.0\.weight.*shape"):
        boosted.optimizer.load_state_dict(other.optimizer.state_dict())
    incomplete = copy.deepcopy(before)
    del incomplete["state"][0]["exp_avg_sq"]
    with pytest.raises(castor.UsageError, match="exp_avg_sq"):
        boosted.optimizer.load_state_dict(incomplete)
    shorter = copy.deepcopy(before)
    shorter["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter"):
        boosted.optimizer.load_state_dict(shorter)
    assert_same_layout(boosted.optimizer.state_dict(), before)


@pytest.mark.cpu_device("a GPU's moments are shown as copies")
def test_state_in_the_dict_is_current_and_edits_of_it_count() -> None:
    boosted = boost(tower())
    go_on(boosted, 0, steps=1)
    state = boosted.optimizer.state_dict()["state"][0]
    assert state["step"].item() == 1.0
    go_on(boosted, 1, steps=2)
    assert boosted.optimizer.state_dict()["state"][0]["step"].item() == 3.0
    for entry in boosted.optimizer.state.values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].fill_(1e10)
    before = copies(boosted.model.parameters())
    boosted.optimizer.param_groups[0]["weight_decay"] = 0.0
    go_on(boosted, 3, steps=1)
    for param, value in zip(boosted.model.parameters(), before, strict=True):
        assert_close(param.detach(), value, rtol=0, atol=1e-7)
