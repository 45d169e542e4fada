"""HybridAdam's state formats: trajectories, states in every direction, refusals."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from castor import HybridAdam
from helpers import assert_close, copies, equal
from test_optimizer import fill_grads, ordinary_parameters

FORMATS = ("fp32", "split", "split_bf16", "split_int8")
SPLIT_FORMATS = FORMATS[1:]


def run(
    state_format: str, steps: int, *, seed: int = 0, lr: float = 1e-2
) -> tuple[list[nn.Parameter], HybridAdam]:
    params = ordinary_parameters(torch.bfloat16)
    optimizer = HybridAdam(params, lr=lr, optim_state_format=state_format, seed=seed)
    go_on(params, optimizer, 0, steps)
    return params, optimizer


def go_on(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, begin: int, end: int
) -> None:
    for step in range(begin, end):
        fill_grads(params, step)
        optimizer.step()


def resumed(
    params: list[nn.Parameter], state: dict[str, Any], state_format: str, seed: int = 0
) -> tuple[list[nn.Parameter], HybridAdam]:
    again = [nn.Parameter(value) for value in copies(params)]
    optimizer = HybridAdam(again, lr=99.0, optim_state_format=state_format, seed=seed)
    optimizer.load_state_dict(state)
    return again, optimizer


def assert_equal(one: list[nn.Parameter], two: list[nn.Parameter]) -> None:
    for a, b in zip(one, two, strict=True):
        assert equal(a, b)


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_it_continues_bitwise_from_its_state(state_format: str) -> None:
    params, optimizer = run(state_format, 5, seed=3)
    again, other = resumed(params, copy.deepcopy(optimizer.state_dict()), state_format, seed=3)
    go_on(params, optimizer, 5, 10)
    go_on(again, other, 5, 10)
    assert_equal(params, again)
    for a, b in zip(params, again, strict=True):
        for key, value in optimizer.state[a].items():
            assert equal(value, other.state[b][key]), key


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_its_raw_state_loads_too(state_format: str) -> None:
    params, optimizer = run(state_format, 5)
    raw = {i: dict(optimizer.state[param]) for i, param in enumerate(params)}
    state = {"state": raw, "param_groups": optimizer.state_dict()["param_groups"]}
    again, other = resumed(params, copy.deepcopy(state), state_format)
    go_on(params, optimizer, 5, 8)
    go_on(again, other, 5, 8)
    assert_equal(params, again)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_loads_every_other(source: str, target: str) -> None:
    params, optimizer = run(source, 5)
    state = copy.deepcopy(optimizer.state_dict())
    _, other = resumed(params, state, target)
    loaded = other.state_dict()["state"]
    for i, entry in state["state"].items():
        assert equal(loaded[i]["master"], entry["master"])
        assert loaded[i]["step"] == entry["step"] == 5
        tolerance = {"split_bf16": 2**-8, "split_int8": 2**-4}.get(target, 0.0)
        if source == target:
            tolerance = 0.0
        for key in ("exp_avg", "exp_avg_sq"):
            largest = entry[key].abs().max().item()
            assert_close(loaded[i][key], entry[key], rtol=tolerance, atol=tolerance * largest / 64)


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_states_go_to_and_from_torch(state_format: str) -> None:
    params, optimizer = run(state_format, 5)
    state = optimizer.state_dict()
    theirs = [nn.Parameter(entry["master"].clone()) for entry in state["state"].values()]
    reference = AdamW(theirs, lr=1e-2, weight_decay=0.0)
    reference.load_state_dict(copy.deepcopy(state))
    go_on(theirs, reference, 5, 8)
    go_on(params, optimizer, 5, 8)
    for mine, other in zip(params, theirs, strict=True):
        assert_close(mine.float(), other.detach(), rtol=1e-2, atol=5e-3)

    back, again = resumed(params, copy.deepcopy(reference.state_dict()), state_format)
    go_on(back, again, 8, 9)
    assert int(again.state[back[0]]["step"]) == 9
    assert again.state[back[2]]["exp_avg"].dtype == optimizer.state[params[2]]["exp_avg"].dtype


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_a_16_bit_state_of_torch_loads(state_format: str) -> None:
    theirs = ordinary_parameters(torch.bfloat16)
    reference = AdamW(theirs, lr=1e-2)
    go_on(theirs, reference, 0, 3)
    mine, optimizer = resumed(theirs, copy.deepcopy(reference.state_dict()), state_format)
    assert not optimizer.state[mine[2]]["remainder"].any()
    go_on(mine, optimizer, 3, 4)


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_copies_of_the_optimizer_keep_format_and_seed(state_format: str) -> None:
    params, optimizer = run(state_format, 2, seed=7)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert (twin.optim_state_format, twin.seed) == (state_format, 7)
    again = twin.param_groups[0]["params"]
    go_on(params, optimizer, 2, 4)
    go_on(again, twin, 2, 4)
    assert_equal(params, again)


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_any_layout_of_parameter_will_do(state_format: str) -> None:
    base = torch.randn(40, 30).bfloat16()
    mine, plain = nn.Parameter(base.t().clone().t()), nn.Parameter(base.t().clone())
    pair = [HybridAdam([p], lr=0.1, optim_state_format=state_format) for p in (mine, plain)]
    for _ in range(3):
        grad = torch.randn(40, 30).bfloat16()
        mine.grad, plain.grad = grad.clone(), grad.t().contiguous()
        for optimizer in pair:
            optimizer.step()
        pair[0].load_state_dict(copy.deepcopy(pair[0].state_dict()))
    assert equal(mine, plain.t())


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_float16_is_refused(state_format: str) -> None:
    params = [nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(4).half())]
    optimizer = HybridAdam(params, optim_state_format=state_format)
    fill_grads(params, 0)
    with pytest.raises(ValueError, match=r"parameter 1, of shape \(4,\), is torch.float16.*'fp32'"):
        optimizer.step()
    assert equal(params[0], torch.ones(3).bfloat16())


def test_bad_settings_are_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=r"split_int4.*one of fp32, split"):
        HybridAdam(params, optim_state_format="split_int4")
    with pytest.raises(ValueError, match="seed is -1"):
        HybridAdam(params, seed=-1)
