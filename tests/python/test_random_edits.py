"""Random edits of optimizers, gradients and parameters between random steps, against plain PyTorch.

A seed draws settings and a script of some forty actions, which a plain model and a boosted one go
through. What both show on the way (losses, norms, gradients that somebody keeps) and where they end
(parameters, optimizer states) has to be the same.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import castor
import grids
from accelerator import ACCELERATORS, Accelerator
from test_given_memory import EDITORS as PARAMETER_EDITS
from test_given_memory import by_alias, by_vector, loss_of, network
from test_optimizer_edits import STATE_EDITS, ordinary_dict, params_of, viewed

OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    partial(AdamW, lr=1e-2, eps=1e-3),
    partial(Adam, lr=1e-2, eps=1e-3, weight_decay=0.01),
    partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    partial(SGD, lr=0.1),
    partial(RMSprop, lr=1e-3, eps=1e-3),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"device_memory": "12KiB"},
    {"device_memory": "12KiB", "overlap": "forward"},
    {"device_memory": "12KiB", "chunk_bytes": "1KiB"},
    {"nvme_offload_fraction": 1.0},
    {"nvme_offload_fraction": 0.5, "device_memory": "12KiB"},
]
ON_A_GPU = [
    {key: "48KiB" if key == "device_memory" else value for key, value in one.items()}
    for one in SETTINGS
]
"""Gradients and the states of steps that are not castor's own lie in device memory there."""


@dataclass
class Run:
    """One of the two that go through the script."""

    model: Any
    optimizer: Optimizer
    seen: list[float] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    taken: dict[Any, Any] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)
    aliases_follow: bool = True
    """Whether a tensor that was assigned to a parameter goes on sharing memory with it."""

    @property
    def grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


Action = Callable[[Run], None]
Draw = Callable[[random.Random], Action]
"""Chooses once, for both runs."""


# --- steps ----------------------------------------------------------------------------------------


def forward_and_backward(draw: random.Random) -> Action:
    seed = draw.randrange(1000)

    def act(run: Run) -> None:
        loss = loss_of(run.model, seed)
        loss.backward()
        run.seen.append(loss.item())

    return act


def step(draw: random.Random) -> Action:
    to_none = draw.random() < 0.7

    def act(run: Run) -> None:
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=to_none)

    return act


def zero_grad(draw: random.Random) -> Action:
    to_none, of = draw.random() < 0.5, draw.choice(["model", "optimizer"])
    return lambda run: getattr(run, of).zero_grad(set_to_none=to_none)


def evaluation(draw: random.Random) -> Action:
    seed = draw.randrange(1000)

    @torch.no_grad()
    def act(run: Run) -> None:
        run.seen.append(loss_of(run.model, seed).item())

    return act


def part_of_the_model(draw: random.Random) -> Action:
    place = draw.choice([0, 2, 4, 6])

    @torch.no_grad()
    def act(run: Run) -> None:
        layer = run.model[place]
        run.seen.append(layer(layer.weight.new_ones(2, layer.in_features)).sum().item())

    return act


# --- gradients ------------------------------------------------------------------------------------


def clipped(draw: random.Random) -> Action:
    bound = draw.choice([1e-3, 1.0])

    def act(run: Run) -> None:
        run.seen.append(nn.utils.clip_grad_norm_(run.model.parameters(), bound).item())

    return act


def clipped_by_value(_: random.Random) -> Action:
    def act(run: Run) -> None:
        if run.grads:  # torch's raises without any
            nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)

    return act


def scaled(draw: random.Random) -> Action:
    factor = draw.choice([0.5, -1.0, 0.0])
    return lambda run: torch._foreach_mul_(run.grads, factor) if run.grads else None


def one_gradient(draw: random.Random) -> Action:
    place, way = draw.randrange(8), draw.choice(["none", "other", "data", "set", "noise", "view"])

    @torch.no_grad()
    def act(run: Run) -> None:
        param = list(run.model.parameters())[place]
        if param.grad is None:
            return
        if way == "none":
            param.grad = None
        elif way == "other":
            param.grad = param.grad * 2
        elif way == "data":
            param.grad.data = param.grad.data * 3
        elif way == "set":
            param.grad.set_(param.grad * 0.5)  # type: ignore[call-overload]
        elif way == "noise":
            param.grad.add_(torch.linspace(-0.1, 0.1, param.numel()).view_as(param).to(param))
        else:
            param.grad[..., ::2] = 0.01

    return act


def kept(draw: random.Random) -> Action:
    """Somebody keeps a gradient, whatever becomes of its parameter's."""
    place = draw.randrange(8)

    def act(run: Run) -> None:
        grad = list(run.model.parameters())[place].grad
        if grad is not None:
            run.kept.append(grad)

    return act


def looked_at(_: random.Random) -> Action:
    return lambda run: run.seen.extend(grad.norm().item() for grad in run.grads)


# --- parameters -----------------------------------------------------------------------------------


def parameters(draw: random.Random) -> Action:
    # Not what views parameters as one dimension, which torch does not do behind a transposition.
    edit = draw.choice([one for one in PARAMETER_EDITS if one is not by_vector])

    def act(run: Run) -> None:
        if edit is not by_alias or run.aliases_follow:
            edit(run.model)

    return act


def loaded_weights(_: random.Random) -> Action:
    """Goes back to weights of before, or keeps these for a later time."""

    def act(run: Run) -> None:
        if run.weights:
            run.model.load_state_dict(run.weights.pop())
        else:
            run.weights.append(copy.deepcopy(run.model.state_dict()))

    return act


# --- optimizers -----------------------------------------------------------------------------------


def state(draw: random.Random) -> Action:
    edit = draw.choice([one for one in STATE_EDITS if one not in (ordinary_dict, viewed)])

    def act(run: Run) -> None:
        if len(params_of(run.optimizer)) > 1:
            edit(run.optimizer)

    return act


def option(draw: random.Random) -> Action:
    place = draw.randrange(4)
    name, value = draw.choice(
        [("lr", 3e-3), ("lr", 0.0), ("weight_decay", 0.1), ("maximize", True), ("maximize", False),
         ("betas", (0.8, 0.9)), ("momentum", 0.5)]
    )  # fmt: skip

    def act(run: Run) -> None:
        groups = run.optimizer.param_groups
        group = groups[place % len(groups)]
        if name in ("lr", "weight_decay", "maximize") or group.get(name):  # momentum if there is
            group[name] = value

    return act


def moved(draw: random.Random) -> Action:
    """A parameter goes to another group."""
    source, target, place = draw.randrange(4), draw.randrange(4), draw.randrange(8)

    def act(run: Run) -> None:
        groups = run.optimizer.param_groups
        taken = groups[source % len(groups)]["params"]
        if taken:
            groups[target % len(groups)]["params"].append(taken.pop(place % len(taken)))

    return act


def left_out(draw: random.Random) -> Action:
    """A parameter is the optimizer's no more; or those that are not come back, in a new group."""
    place = draw.randrange(8)

    def act(run: Run) -> None:
        held = {id(param) for param in params_of(run.optimizer)}
        out = [param for param in run.model.parameters() if id(param) not in held]
        if out:
            run.optimizer.add_param_group({"params": out, "lr": 5e-3})
        else:
            groups = run.optimizer.param_groups
            group = max(groups, key=lambda group: len(group["params"]))
            group["params"].pop(place % len(group["params"]))

    return act


def loaded_states(_: random.Random) -> Action:
    """Goes back to states of before, or keeps these for a later time."""

    def places(run: Run) -> Any:
        order = {param: place for place, param in enumerate(run.model.parameters())}
        return [[order[param] for param in group["params"]] for group in run.optimizer.param_groups]

    def act(run: Run) -> None:
        if not run.optimizer.state.keys() <= {*params_of(run.optimizer)}:
            return  # torch's state_dict raises for states of parameters that are in no group
        if not run.states:
            run.states.append((places(run), copy.deepcopy(run.optimizer.state_dict())))
            return
        before, saved = run.states.pop()
        if before == places(run):
            run.optimizer.load_state_dict(saved)

    return act


def taken_out(_: random.Random) -> Action:
    """Takes all states out, or puts those back that were."""

    def act(run: Run) -> None:
        if run.taken:
            run.optimizer.state.update(run.taken)
            run.taken = {}
        else:
            params = [param for param in params_of(run.optimizer) if run.optimizer.state.get(param)]
            run.taken = {param: run.optimizer.state.pop(param) for param in params}

    return act


def peeked(draw: random.Random) -> Action:
    """Asks for a parameter's entry, which makes an empty one where there is none."""
    place = draw.randrange(8)
    return lambda run: run.seen.append(len(run.optimizer.state[[*run.model.parameters()][place]]))


def rebuilt_groups(_: random.Random) -> Action:
    def act(run: Run) -> None:
        run.optimizer.param_groups = [dict(group) for group in run.optimizer.param_groups]

    return act


def looked_into(_: random.Random) -> Action:
    """Reads the states that are there; an entry that is not stays away."""

    def act(run: Run) -> None:
        for param in params_of(run.optimizer):
            run.seen.extend(
                float(torch.as_tensor(value).float().sum())
                for value in run.optimizer.state.get(param, {}).values()
                if value is not None
            )

    return act


ACTIONS: list[tuple[Draw, int]] = [
    (forward_and_backward, 12), (step, 12), (zero_grad, 2), (evaluation, 3), (part_of_the_model, 2),
    (clipped, 2), (clipped_by_value, 1), (scaled, 2), (one_gradient, 5), (kept, 2), (looked_at, 2),
    (parameters, 5), (loaded_weights, 2),
    (state, 4), (option, 3), (moved, 2), (left_out, 2), (loaded_states, 2), (looked_into, 2),
    (taken_out, 3), (peeked, 1), (rebuilt_groups, 1),
]  # fmt: skip


def start(make: Callable[[Any], Optimizer]) -> Run:
    model = network()
    params = list(model.parameters())
    return Run(model, make([{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]))


def boost(run: Run, **settings: Any) -> None:
    given = {
        "device": "cpu", "precision": "fp32", "device_memory": "1MiB", "host_memory": "1MiB",
    } | settings  # fmt: skip
    castor.Booster(castor.GeminiPlugin(**given)).boost(run.model, run.optimizer)


Draws = tuple[Callable[[Any], Optimizer], dict[str, Any], list[tuple[str, Action]]]


def drawn(seed: int, settings: list[dict[str, Any]], tmp_path: Path, *, fused: Any) -> Draws:
    """An optimizer, settings that go with it, and a script of named actions.

    Args:
        settings: Those to choose from; NVMe and overlap="forward" want a fused step.
        fused: The classes of optimizers that have one.
    """
    draw = random.Random(seed)
    make = draw.choice(OPTIMIZERS)
    own_step = make.func not in fused  # type: ignore[attr-defined]
    if own_step:
        settings = [one for one in settings if not {*one} & {"nvme_offload_fraction", "overlap"}]
    chosen = draw.choice(settings)
    if "nvme_offload_fraction" in chosen:
        chosen = {"nvme_path": tmp_path, **chosen}
    kinds, weights = zip(*ACTIONS, strict=True)
    script = [(kind.__name__, kind(draw)) for kind in draw.choices(kinds, weights, k=40)]
    return make, chosen, script


def compare(mine: Run, theirs: Run, script: list[tuple[str, Action]], where: str) -> None:
    """Both go through the script; what they show and where they end has to be the same."""
    names = [name for name, _ in script]
    for place, (name, action) in enumerate(script):
        at = f"{where}, action {place} of {names}: {name}"
        for run in (theirs, mine):
            try:
                action(run)
            except Exception as error:
                error.add_note(at)
                raise
        assert mine.seen == pytest.approx(theirs.seen, rel=1e-3, abs=1e-5), at
        for own, other in zip(mine.kept, theirs.kept, strict=True):
            agree(own, other, at)
    for own, other in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        agree(own, other, where)
        assert (own.grad is None) == (other.grad is None), where
        if own.grad is not None:
            agree(own.grad, other.grad, where)
        entry, expected = mine.optimizer.state.get(own), theirs.optimizer.state.get(other)
        assert {*(entry or ())} == {*(expected or ())}, where
        for key, value in (expected or {}).items():
            agree(torch.as_tensor(entry[key]), torch.as_tensor(value), where)


def agree(mine: Any, theirs: Any, where: str) -> None:
    torch.testing.assert_close(
        mine, theirs, rtol=1e-3, atol=1e-5, check_device=False, msg=lambda said: f"{said}\n{where}"
    )


pytestmark = pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract"
)


@pytest.mark.parametrize("seed", range(500 if grids.WHOLE else 60))
def test_random_edits_are_as_in_plain_pytorch(seed: int, tmp_path: Path) -> None:
    make, settings, script = drawn(seed, SETTINGS, tmp_path, fused={AdamW, Adam, SGD})
    plain, boosted = start(make), start(make)
    boost(boosted, **settings)
    compare(boosted, plain, script, f"seed {seed}, {settings}")


@pytest.mark.parametrize("gpu", ACCELERATORS[1:], indirect=True)
@pytest.mark.parametrize("seed", range(500 if grids.WHOLE else 10))
def test_random_edits_on_a_gpu_are_as_in_plain_pytorch(
    gpu: Accelerator, seed: int, tmp_path: Path
) -> None:
    make, settings, script = drawn(seed, ON_A_GPU, tmp_path, fused={AdamW, Adam})
    plain, boosted = start(make), start(make)
    plain.aliases_follow = boosted.aliases_follow = False
    boost(boosted, **settings)
    compare(boosted, plain, script, f"seed {seed}, {settings}")


@pytest.mark.parametrize("seed", range(500 if grids.WHOLE else 12))
def test_random_edits_of_sixteen_bits_are_the_same_wherever_chunks_lie(
    seed: int, tmp_path: Path
) -> None:
    """Plain PyTorch keeps no float32 masters: what all has room on the device is the reference."""
    make, settings, script = drawn(seed, SETTINGS[1:], tmp_path, fused={AdamW, Adam, SGD})
    ample, boosted = start(make), start(make)
    boost(ample, precision="bf16")
    boost(boosted, precision="bf16", **settings)
    compare(boosted, ample, script, f"seed {seed}, {settings}")
