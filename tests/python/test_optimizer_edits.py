"""Edits of a boosted optimizer's `state` and `param_groups` count as in plain PyTorch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import castor
from helpers import boost

WIDTH = 8
EARLY = {"overlap": "backward", "enable_gradient_accumulation": False, "nonfinite": "ignore"}
"""Settings with which backward updates the chunks that it completes."""
MakeOptimizer = Callable[[nn.Module], Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(groups_of(model), lr=1e-2, eps=1e-4)


def adam(model: nn.Module) -> Optimizer:
    return Adam(groups_of(model), lr=1e-2, eps=1e-4, weight_decay=0.01)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(groups_of(model), lr=0.1, momentum=0.9, dampening=0.1)


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(groups_of(model), lr=0.1)


def own(model: nn.Module) -> Optimizer:
    return RMSprop(groups_of(model), lr=1e-3)


OPTIMIZERS = [adamw, adam, momentum, plain_sgd, own]
FUSED = [adamw, adam, momentum]


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, WIDTH, generator=generator)
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def new_dict(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def ordinary_dict(optimizer: Optimizer) -> None:
    optimizer.state = {}
    for param in params_of(optimizer):
        optimizer.state[param] = {}


def one_empty(optimizer: Optimizer) -> None:
    optimizer.state[params_of(optimizer)[1]] = {}


def entry_cleared(optimizer: Optimizer) -> None:
    optimizer.state[params_of(optimizer)[0]].clear()


def popped(optimizer: Optimizer) -> None:
    optimizer.state.pop(params_of(optimizer)[-1], None)


def replaced(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        entry = optimizer.state[param]
        for key in list(entry):
            entry[key] = torch.zeros_like(entry[key])


def other_values(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        entry = optimizer.state[param]
        optimizer.state[param] = {key: value * 2 + 1 for key, value in entry.items()}


def written(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        for value in optimizer.state[param].values():
            value.mul_(2).add_(1)


def viewed(optimizer: Optimizer) -> None:
    """Writes through views of states whose own tensors nobody holds any more."""
    views = [
        value.view(-1)
        for param in params_of(optimizer)
        for value in optimizer.state[param].values()
    ]
    for view in views:
        view[: len(view) // 2 + 1] = 1.0


STATE_EDITS = [
    *(clear, new_dict, ordinary_dict, one_empty, entry_cleared, popped),
    *(replaced, other_values, written, viewed),
]


def run(
    make: MakeOptimizer,
    edit: Callable[[Optimizer], None],
    settings: dict[str, Any] | None = None,
) -> tuple[list[float], dict[int, dict[str, torch.Tensor]]]:
    """Losses of steps, three before an edit, and the states at their end; boosted with settings."""
    net = model()
    optimizer = make(net)
    if settings is not None:
        boost(net, optimizer=optimizer, **{"memory": "64MiB", **settings})
    losses = [step(net, optimizer, i) for i in range(3)]
    edit(optimizer)
    losses += [step(net, optimizer, i) for i in range(3, 6)]
    state = {
        index: {key: torch.as_tensor(value).clone() for key, value in entry.items()}
        for index, param in enumerate(net.parameters())
        if (entry := optimizer.state.get(param))
    }
    return losses, state


def compare(
    make: MakeOptimizer, edit: Callable[[Optimizer], None], *settings: dict[str, Any]
) -> None:
    """A boosted run with each of the settings is the plain one."""
    plain, expected = run(make, edit)
    for each in settings:
        ours, state = run(make, edit, each)
        assert ours == pytest.approx(plain, rel=1e-5)
        assert state.keys() == expected.keys()
        for index, entry in expected.items():
            assert state[index].keys() == entry.keys()
            for key, value in entry.items():
                torch.testing.assert_close(state[index][key], value)


@pytest.mark.parametrize("edit", STATE_EDITS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_states_that_are_edited_count_in_the_next_step(
    make: MakeOptimizer, edit: Callable[[Optimizer], None], tmp_path: Path
) -> None:
    if edit in (replaced, other_values, written, viewed) and make is plain_sgd:
        pytest.skip("SGD without momentum has no state")
    tight = {"memory": 1500, "overlap": "forward" if make is not own else "none"}
    nvme = {"nvme_path": tmp_path, "nvme_memory": "64MiB", "nvme_offload_fraction": 1.0}
    compare(make, edit, {}, tight, *([nvme] if make in FUSED else []))


@pytest.mark.parametrize("state_format", ["fp32", "split", "split_bf16", "split_int8"])
@pytest.mark.parametrize("edit", [clear, one_empty, entry_cleared, replaced])
def test_states_in_every_format_start_anew(state_format: str, edit: Any) -> None:
    """After a reset the step is the first one: of size lr, whatever the gradient."""
    net = model().bfloat16()
    optimizer = AdamW(net.parameters(), lr=0.125, weight_decay=0.0)
    boost(net, "64MiB", optimizer, precision="bf16", optim_state_format=state_format)
    inputs = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        net(inputs).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    edit(optimizer)
    param = params_of(optimizer)[1]
    if edit is entry_cleared:
        param = params_of(optimizer)[0]
    before = param.detach().float().clone()
    net(inputs).float().pow(2).mean().backward()
    moved_by = param.grad.ne(0)
    optimizer.step()
    moved = (param.detach().float() - before).abs()[moved_by]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.125), rtol=0.1, atol=0.01)
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("make", FUSED)
def test_states_that_were_taken_out_before_a_load_can_be_put_back(
    make: MakeOptimizer, tmp_path: Path
) -> None:
    def edit(optimizer: Optimizer) -> None:
        saved = copy.deepcopy(optimizer.state_dict())
        taken = {param: optimizer.state.pop(param) for param in params_of(optimizer)}
        optimizer.load_state_dict(saved)
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state.update(taken)

    nvme = {"nvme_path": tmp_path, "nvme_memory": "64MiB", "nvme_offload_fraction": 1.0}
    compare(make, edit, {}, nvme)


def test_a_state_that_was_looked_at_before_its_first_step_is_shown_and_saved(
    tmp_path: Path,
) -> None:
    net = model()
    optimizer = adamw(net)
    boosted = boost(net, "64MiB", optimizer)
    peeked = [optimizer.state[param] for param in net.parameters()]
    assert peeked == [{}] * len(peeked)
    step(net, optimizer, 0)
    assert all(
        optimizer.state[p] is entry for p, entry in zip(net.parameters(), peeked, strict=True)
    )
    assert [sorted(entry) for entry in optimizer.state_dict()["state"].values()] == [
        ["exp_avg", "exp_avg_sq", "step"]
    ] * len(peeked)
    boosted.booster.save(tmp_path / "run", net, optimizer)
    went_on = [step(net, optimizer, i) for i in range(1, 4)]

    again = model()
    its = adamw(again)
    resumed = boost(again, "64MiB", its)
    _ = [len(its.state[param]) for param in again.parameters()]
    resumed.booster.load(tmp_path / "run", again, its)
    assert [step(again, its, i) for i in range(1, 4)] == went_on


def test_a_save_writes_states_that_were_reset_as_reset(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    boosted = boost(net, "64MiB", optimizer)
    step(net, optimizer, 0)
    optimizer.state.clear()
    boosted.booster.save(tmp_path / "run", net, optimizer)
    went_on = [step(net, optimizer, i) for i in range(1, 4)]
    again = model()
    its = adamw(again)
    boost(again, "64MiB", its).booster.load(tmp_path / "run", again, its)
    assert [step(again, its, i) for i in range(1, 4)] == went_on


def test_a_copy_on_nvme_that_a_step_has_outdated_is_refused(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    boost(net, "64MiB", optimizer, nvme_path=tmp_path, nvme_memory="64MiB",
          nvme_offload_fraction=1.0)  # fmt: skip
    step(net, optimizer, 0)
    kept = optimizer.state[next(net.parameters())]["exp_avg"]
    step(net, optimizer, 1)
    kept.mul_(0.5)
    with pytest.raises(castor.UsageError, match=r"'exp_avg'.*'0.weight'.*read before a step"):
        step(net, optimizer, 2)


def test_an_entry_that_lacks_a_moment_is_refused_by_name() -> None:
    net = model()
    optimizer = adamw(net)
    boost(net, "64MiB", optimizer)
    step(net, optimizer, 0)
    del optimizer.state[net[2].weight]["exp_avg_sq"]
    with pytest.raises(castor.UsageError, match=r"'2.weight' has no 'exp_avg_sq'"):
        step(net, optimizer, 1)


def group_deleted(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]


def groups_replaced(optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups = [{**group, "params": params_of(optimizer), "lr": 0.02}]


def maximized_by_load(optimizer: Optimizer) -> None:
    document = copy.deepcopy(optimizer.state_dict())
    document["param_groups"][1]["maximize"] = True
    optimizer.load_state_dict(document)


GROUP_EDITS = [group_deleted, groups_replaced, maximized_by_load]


@pytest.mark.parametrize("edit", GROUP_EDITS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_groups_that_are_edited_count_in_the_next_step(
    make: MakeOptimizer, edit: Callable[[Optimizer], None]
) -> None:
    compare(make, edit, {}, *([{"overlap": "forward"}, EARLY] if make is not own else []))


def test_a_parameter_can_move_to_another_optimizer_of_the_model() -> None:
    results = []
    for boosted in (False, True):
        net = model()
        params = list(net.parameters())
        one, other = AdamW(params[:4], lr=1e-2), AdamW(params[4:], lr=3e-3)
        if boosted:
            castor.Booster(castor.GeminiPlugin(device="cpu", device_memory="64MiB")).boost(
                net, [one, other]
            )
        losses = []
        for i in range(5):
            losses.append(step_both(net, one, other, i))
            if i == 1:
                other.param_groups[0]["params"].append(one.param_groups[0]["params"].pop())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def step_both(net: nn.Module, one: Optimizer, other: Optimizer, seed: int) -> float:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss = net(inputs).pow(2).mean()
    loss.backward()
    one.step()
    other.step()
    one.zero_grad()
    other.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda o, _: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(3))),
         r"param_groups\[0\] holds a parameter of shape \(3,\) that the model did not have"),
        (lambda o, net: o.param_groups[0]["params"].append(net[4].weight),
         r"'4.weight' twice, in groups 0 and 1"),
        (lambda o, _: o.param_groups[1].update(amsgrad=True), r"\[1\]\['amsgrad'\] was turned on"),
    ],
)  # fmt: skip
def test_an_edit_that_chunks_have_no_place_for_is_refused_by_name(edit: Any, message: str) -> None:
    net = model()
    optimizer = adamw(net)
    boost(net, "64MiB", optimizer)
    step(net, optimizer, 0)
    edit(optimizer, net)
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(castor.UsageError, match=message):
        step(net, optimizer, 1)
    assert all(map(torch.equal, net.parameters(), before))


def test_options_that_are_edited_between_an_early_update_and_its_step_are_refused() -> None:
    net = model()
    optimizer = adamw(net)
    boost(net, "64MiB", optimizer, chunk_bytes=512, **EARLY)
    step(net, optimizer, 0)
    net(torch.ones(1, WIDTH)).sum().backward()
    optimizer.param_groups[1]["params"] = []
    with pytest.raises(castor.UsageError, match="taken out of its group between backward and step"):
        optimizer.step()
