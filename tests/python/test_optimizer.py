"""Optimizers: HybridAdam alone, boosted Adam and AdamW, other optimizers, states, schedulers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

import castor
from castor import HybridAdam
from helpers import (
    LR,
    Boosted,
    assert_close,
    assert_close_losses,
    assert_close_weights,
    assert_same_weights,
    boost,
    copies,
    equal,
    losses_of_boosted,
    tight_memory,
)
from zoo import Tower, tower, tower_loss

# --- HybridAdam alone ---------------------------------------------------------------------------

SHAPES = [(1,), (7, 3), (1000, 7), (), (33, 65)]


def ordinary_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def fill_grads(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in parameters:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.parametrize("decoupled", [True, False])
def test_alone_in_fp32_it_follows_torch_for_100_steps(decoupled: bool) -> None:
    mine, theirs = ordinary_parameters(torch.float32), ordinary_parameters(torch.float32)
    settings = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.05}
    optimizer = HybridAdam(mine, adamw_mode=decoupled, **settings)
    reference = (AdamW if decoupled else Adam)(theirs, **settings)
    for step in range(100):
        for params, own in ((mine, optimizer), (theirs, reference)):
            fill_grads(params, step)
            own.step()
    for actual, expected in zip(mine, theirs, strict=True):
        assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_close(
                optimizer.state[actual][key], reference.state[expected][key], rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alone_in_16_bits_its_master_follows_torch_for_100_steps(dtype: torch.dtype) -> None:
    mine = ordinary_parameters(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in mine]
    optimizer, reference = HybridAdam(mine, lr=1e-2), AdamW(masters, lr=1e-2, weight_decay=0.0)
    for step in range(100):
        fill_grads(mine, step)
        for master, param in zip(masters, mine, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        reference.step()
    for param, master in zip(mine, masters, strict=True):
        assert_close(optimizer.state[param]["master"], master.detach(), rtol=1e-6, atol=1e-6)
        assert param.dtype == dtype
        spacing = torch.finfo(dtype).eps
        assert_close(param.float(), master.detach(), rtol=spacing, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_it_continues_bitwise_from_a_saved_state(dtype: torch.dtype, tmp_path: Path) -> None:
    one = ordinary_parameters(dtype)
    optimizer = HybridAdam(one, lr=1e-2)
    for step in range(3):
        fill_grads(one, step)
        optimizer.step()
    torch.save([copies(one), optimizer.state_dict()], tmp_path / "state.pt")
    values, state = torch.load(tmp_path / "state.pt")
    two = [nn.Parameter(value) for value in values]
    resumed = HybridAdam(two, lr=99.0)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        for params, own in ((one, optimizer), (two, resumed)):
            fill_grads(params, step)
            own.step()
    for a, b in zip(one, two, strict=True):
        assert equal(a, b)


def test_alone_it_skips_parameters_without_a_gradient_and_runs_a_closure() -> None:
    params = ordinary_parameters(torch.float32)
    optimizer = HybridAdam(params, lr=0.1)
    before = copies(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = params[1].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before[1].square().sum().item())
    moved = [not equal(p, b) for p, b in zip(params, before, strict=True)]
    assert moved == [False, True, False, False, False]


def test_alone_it_takes_any_layout_of_parameter_and_gradient() -> None:
    base = torch.randn(8, 6)
    mine, theirs = nn.Parameter(base.t().clone().t()), nn.Parameter(base.clone())
    optimizer, reference = HybridAdam([mine], lr=0.1), AdamW([theirs], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        grad = torch.randn(8, 6)
        mine.grad, theirs.grad = grad.clone(), grad
        optimizer.step()
        reference.step()
    assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


# --- boosted ------------------------------------------------------------------------------------


def groups_of(model: Tower) -> list[dict[str, Any]]:
    return [
        {"params": model.layers[:3].parameters(), "lr": 3e-3, "weight_decay": 0.2},
        {"params": model.layers[3:].parameters(), "betas": (0.5, 0.9), "eps": 1e-4},
        {"params": model.head.parameters(), "lr": 1e-4},
    ]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 8,
    scheduler: LRScheduler | None = None,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    set_to_none: bool = True,
    micro_batches: int = 1,
) -> list[float]:
    losses = []
    for i in range(steps):
        total = 0.0
        for k in range(micro_batches):
            loss = tower_loss(model, i * micro_batches + k) / micro_batches
            loss.backward()
            total += loss.item()
        before_step(model)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(total)
    return losses


def tight() -> int:
    return tight_memory(tower, tower_loss)


@pytest.mark.parametrize("kind", [Adam, AdamW, HybridAdam])
def test_boosted_groups_keep_their_own_settings(kind: type[Optimizer]) -> None:
    plain, model = tower(), tower()
    reference = AdamW if kind is HybridAdam else kind
    decay = {"weight_decay": 0.03}
    own = reference(groups_of(plain), lr=1e-3, **decay)
    boosted = boost(model, tight(), kind(groups_of(model), lr=1e-3, **decay))
    assert_close_losses(train(model, boosted.optimizer), train(plain, own))
    assert_close_weights(model, plain, atol=2e-6)


SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda i: 1.0 / (1 + i)),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=5e-3, total_steps=10),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
}


@pytest.mark.parametrize("before_boost", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_edits_take_effect(name: str, before_boost: bool) -> None:
    """filterwarnings=error: torch would warn of a scheduler that was not told of the steps."""
    plain, model = tower(), tower()
    own, optimizer = AdamW(plain.parameters(), lr=LR), AdamW(model.parameters(), lr=LR)
    expected = train(plain, own, scheduler=SCHEDULERS[name](own))
    if before_boost:
        scheduler = SCHEDULERS[name](optimizer)
        boosted = boost(model, optimizer=optimizer)
    else:
        boosted = boost(model, optimizer=optimizer)
        scheduler = SCHEDULERS[name](boosted.optimizer)
    actual = train(model, boosted.optimizer, scheduler=scheduler)
    assert_close_losses(actual, expected)
    assert_close_weights(model, plain, atol=2e-6)
    for mine, theirs in zip(optimizer.param_groups, own.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["betas"] == theirs["betas"]


def test_scheduler_handed_to_boost_comes_back_itself() -> None:
    model = tower()
    optimizer = AdamW(model.parameters(), lr=LR)
    scheduler, criterion, loader = LambdaLR(optimizer, lambda i: 0.5), nn.MSELoss(), [1, 2]
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu", device_memory="1GiB"))
    given = (model, optimizer, criterion, loader, scheduler)
    for result, original in zip(booster.boost(*given), given, strict=True):
        assert result is original
    assert booster.boost(tower())[1:] == (None, None, None, None)
    assert isinstance(optimizer, AdamW)


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@pytest.mark.parametrize("by_user", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_clipping_is_that_of_torch(by_user: bool, precision: str, prefetch: int) -> None:
    """With SGD-like sensitivity: eps is so large that Adam's step scales with the gradient."""
    plain, model = tower(), tower()
    settings = {"lr": 30.0, "eps": 1.0, "weight_decay": 0.0}
    expected = train(plain, AdamW(plain.parameters(), **settings), before_step=clip)
    boosted = boost(
        model, optimizer=AdamW(model.parameters(), **settings), precision=precision,
        max_norm=0.0 if by_user else 0.05, max_prefetch=prefetch,
    )  # fmt: skip
    user = clip if by_user else lambda model: None
    actual = train(model, boosted.optimizer, before_step=user)
    if precision == "fp32":
        assert_close_losses(actual, expected)
        assert_close_weights(model, plain, atol=1e-5)
    else:
        for a, b in zip(actual, expected, strict=True):
            assert a == pytest.approx(b, rel=0.05)
    unclipped = train(tower(), AdamW(list(tower().parameters()), **settings))
    assert unclipped[0] == pytest.approx(expected[0])


def test_clipping_by_plugin_and_user_alike_measure_the_same_norm() -> None:
    model = tower()
    boosted = boost(model)
    tower_loss(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    boosted.optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_stays_visible_until_zero_grad(set_to_none: bool) -> None:
    plain, model = tower(), tower()
    boosted = boost(model, tight())
    for trained in (plain, model):
        tower_loss(trained, 0).backward()
    boosted.optimizer.step()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert equal(actual.grad, expected.grad)
    boosted.optimizer.zero_grad(set_to_none=set_to_none)
    for param in model.parameters():
        assert param.grad is None if set_to_none else not param.grad.any()


@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
def test_the_last_steps_norm_is_reported(max_norm: float) -> None:
    boosted = boost(tower(), max_norm=max_norm)
    assert boosted.report().gradient_norm is None
    for seed in range(2):
        boosted.booster.backward(tower_loss(boosted.model, seed), boosted.optimizer)
        gradients = [param.grad.flatten() for param in boosted.model.parameters()]
        expected = torch.cat(gradients).norm().item()
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        assert boosted.report().gradient_norm == pytest.approx(expected, rel=1e-5)
        assert f"{boosted.report().gradient_norm:.6g}" in str(boosted.report())


def test_no_norm_is_reported_where_nothing_asks_for_it() -> None:
    boosted = boost(tower(), max_norm=0.0, nonfinite="ignore")
    losses_of_boosted(boosted, tower_loss, steps=1)
    assert boosted.report().gradient_norm is None


def test_step_without_gradients_changes_nothing() -> None:
    boosted = boost(tower())
    before = copies(boosted.model.parameters())
    boosted.optimizer.step()
    assert_same_weights(boosted.model, before)
    assert boosted.report().skipped_steps == 0
    assert len(boosted.optimizer.state) == 0


def test_step_hooks_and_closures_run() -> None:
    boosted = boost(tower())
    calls: list[str] = []
    boosted.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    boosted.optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> float:
        calls.append("closure")
        boosted.optimizer.zero_grad()
        loss = tower_loss(boosted.model, 0)
        loss.backward()
        return loss.item()

    plain = tower()
    assert boosted.optimizer.step(closure) == tower_loss(plain, 0).item()
    assert calls == ["pre", "closure", "post"]
    assert not equal(boosted.model.head.weight, plain.head.weight)


def test_a_new_group_after_boost_is_refused_in_its_first_step() -> None:
    boosted: Boosted = boost(tower())
    boosted.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(castor.UsageError, match=r"did not have when it was boosted.*reboost"):
        losses_of_boosted(boosted, tower_loss, steps=1)
    del boosted.optimizer.param_groups[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses_of_boosted(boosted, tower_loss, steps=1)


OTHERS: dict[str, Callable[[Any], Optimizer]] = {
    "adagrad": lambda params: Adagrad(params, lr=0.05),
    "amsgrad": lambda params: AdamW(params, lr=LR, amsgrad=True),
    "maximize": lambda params: Adam(params, lr=LR, maximize=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=LR),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=LR),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizer_gives_the_weights_of_plain(name: str) -> None:
    plain, model = tower(), tower()
    expected = train(plain, OTHERS[name](plain.parameters()), before_step=clip)
    boosted = boost(model, tight(), OTHERS[name](model.parameters()), max_norm=0.05)
    assert_close_losses(train(model, boosted.optimizer), expected)
    assert_close_weights(model, plain, atol=1e-5)
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes
