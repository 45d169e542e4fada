"""torch.amp.GradScaler over boosted optimizers: losses and skipped steps of plain loops."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import castor
from castor.optim.grad_scaler import UnscaledGradient

BUDGET = {"device": "cpu", "device_memory": "1MiB", "host_memory": "64MiB"}
GROWTH = 3
STEPS = 8


def begin(optimizer: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, Any, GradScaler]:
    """A model, its optimizer and a scaler; boosted where there are settings."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64)),
        *(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)),
    )
    made = optimizer(model.parameters(), lr=1e-2)
    if settings:
        plugin = castor.GeminiPlugin(**(BUDGET | settings))
        castor.Booster(plugin=plugin).boost(model, made)
    return model, made, GradScaler("cpu", init_scale=2.0**14, growth_interval=GROWTH)


def nothing(_: list[nn.Parameter]) -> None: ...


def clip_norm(params: list[nn.Parameter]) -> float:
    return nn.utils.clip_grad_norm_(params, 0.3).item()


def clip_each(params: list[nn.Parameter]) -> float:
    total = nn.utils.get_total_norm([param.grad for param in params], foreach=False)  # type: ignore[misc]
    nn.utils.clip_grads_with_norm_(params, 0.3, total, foreach=False)
    return total.item()


def clip_value(params: list[nn.Parameter]) -> float:
    nn.utils.clip_grad_value_(params, 0.01)
    return max(param.grad.abs().max().item() for param in params)  # type: ignore[union-attr]


def edit(params: list[nn.Parameter]) -> float:
    """By a view, `.data`, an operator that writes, an assigned tensor, and not at all."""
    grads = [param.grad for param in params]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)
    grads[0].view(-1)[3:].mul_(0.5)  # type: ignore[union-attr]
    grads[1].data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
    torch._foreach_add_([grads[2], grads[3]], 0.01)
    params[4].grad = torch.full_like(params[4], 0.02, dtype=torch.float32)
    params[5].grad = None
    return sum(grad.double().square().sum().item() for grad in grads[:4])  # type: ignore[union-attr]


def train(
    model: nn.Module,
    optimizer: Any,
    scaler: GradScaler,
    change: Callable[[list[nn.Parameter]], Any] = nothing,
    *,
    begin_at: int = 0,
    overflows: int = -1,
) -> list[Any]:
    """(loss, what `change` found, scale) of each step; a batch of infinities is one of them."""
    found: list[Any] = []
    for step in range(begin_at, STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
        for half in (slice(4), slice(4, 8)):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(x[half]), y[half])
            loss = loss * (torch.inf if step == overflows else 0.5)
            scaler.scale(loss).backward()
        told = None
        if change is not nothing:
            scaler.unscale_(optimizer)
            told = change(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append((loss.item(), told, scaler.get_scale()))
    return found


def assert_close(found: list[Any], expected: list[Any], *, rel: float) -> None:
    for (loss, told, scale), (its_loss, its_told, its_scale) in zip(found, expected, strict=True):
        assert loss == pytest.approx(its_loss, rel=rel)
        assert told == (None if its_told is None else pytest.approx(its_told, rel=rel, nan_ok=True))
        assert scale == its_scale


@pytest.mark.parametrize("change", [nothing, clip_norm, clip_each, clip_value, edit])
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 3e-4), ("fp16", 1e-2)])
def test_a_loop_trains_as_in_plain_pytorch(change: Any, precision: str, rel: float) -> None:
    expected = train(*begin(), change, overflows=4)
    assert [scale for *_, scale in expected] == [2.0**i for i in (14, 14, 15, 15, 14, 14, 14, 15)]
    model, optimizer, scaler = begin(precision=precision)
    assert_close(train(model, optimizer, scaler, change, overflows=4), expected, rel=rel)
    assert all(
        param.grad is None or param.grad.dtype == param.dtype for param in model.parameters()
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_with_other_steps(optimizer: Any) -> None:
    expected = train(*begin(optimizer), clip_norm)
    assert_close(train(*begin(optimizer, precision="fp16"), clip_norm), expected, rel=5e-3)


def test_small_gradients_keep_what_the_scale_is_for() -> None:
    """float16 has no numbers below 6e-8: divided in it these gradients would be zeros."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    castor.Booster(castor.GeminiPlugin(**BUDGET, precision="fp16")).boost(model, optimizer)  # type: ignore[arg-type]
    before = model.weight.detach().float()
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.full((1, 4), 1e-2)).float().sum() * 1e-7).backward()
    scaler.unscale_(optimizer)
    shown = model.weight.grad
    assert isinstance(shown, UnscaledGradient)
    torch.testing.assert_close(shown.clone(), torch.full((1, 4), 1e-9), rtol=1e-2, atol=0)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(2e-9, rel=1e-2)
    assert "e-09" in repr(shown)
    scaler.step(optimizer)
    scaler.update()
    assert (before - model.weight.detach().float()).min().item() > 0.008


def test_a_scaler_goes_on_from_its_state() -> None:
    model, optimizer, scaler = begin(precision="fp16")
    whole = train(model, optimizer, scaler, clip_norm, overflows=1)
    model, optimizer, scaler = begin(precision="fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "STEPS", 5)
        train(model, optimizer, scaler, clip_norm, overflows=1)
    state = copy.deepcopy(scaler.state_dict())
    again = GradScaler("cpu")
    again.load_state_dict(state)
    assert train(model, optimizer, again, clip_norm, begin_at=5) == whole[5:]


def test_two_optimizers_of_a_model_have_one_scaler() -> None:
    def trained(**settings: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        made = [
            torch.optim.AdamW(model[0].parameters(), lr=1e-2),
            torch.optim.SGD(model[2].parameters(), lr=0.1),
        ]
        clips = settings.pop("clips", False)
        if settings:
            castor.Booster(castor.GeminiPlugin(**(BUDGET | settings))).boost(model, made)
        scaler, losses = GradScaler("cpu"), []
        for step in range(4):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            if clips or settings.get("max_norm"):
                for one in made:
                    scaler.unscale_(one)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for one in made:
                scaler.step(one)
            scaler.update()
            model.zero_grad()
            losses.append(loss.item())
        return losses

    for clips in (False, True):
        expected = trained(clips=clips)
        for precision, rel in (("fp32", 1e-4), ("fp16", 5e-3)):
            assert trained(precision=precision, clips=clips) == pytest.approx(expected, rel=rel)
    assert trained(precision="fp32", max_norm=0.1) == pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_shown_unscaled_is_named() -> None:
    model, optimizer, scaler = begin(precision="fp16")
    scaler.scale(model(torch.ones(2, 16)).float().sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    grad = model[0].weight.grad  # type: ignore[index]
    with pytest.raises(castor.UsageError, match=r"param\.grad\.clone"):
        torch.ops.prims.neg(grad)
    scaler.update()
    assert model[0].weight.grad.dtype == torch.float16  # type: ignore[index]

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    both = nn.Sequential(first, second)
    made = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    plugin = castor.GeminiPlugin(**BUDGET, precision="fp32", max_norm=1.0)  # type: ignore[arg-type]
    castor.Booster(plugin).boost(both, made)
    scaler = GradScaler("cpu")
    scaler.scale(both(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(castor.UsageError, match="carry the scales 1, 65536 of a GradScaler"):
        scaler.step(made[0])
