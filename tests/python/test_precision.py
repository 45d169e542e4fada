"""Loss scaling in fp16, gradients that are not finite, and 16-bit weights with exact masters."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import castor
import helpers
from helpers import (
    LR,
    Boosted,
    assert_close,
    assert_close_losses,
    assert_same_weights,
    copies,
    equal,
    losses_of_boosted,
)
from zoo import tower, tower_batch, tower_loss

PRECISIONS = ["fp32", "bf16", "fp16"]


def boost(model: nn.Module, **settings: Any) -> Boosted:
    """With a loss scale that this model's own loss, an fp16 tensor, survives."""
    return helpers.boost(model, **({"initial_scale": 2.0**10} | settings))


def poison(boosted: Boosted, value: float = math.inf) -> None:
    """Backward, with one gradient element that is not finite."""
    loss = tower_loss(boosted.model, 0)
    hook = boosted.model.layers[2].weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([3]), value)
    )
    boosted.booster.backward(loss, boosted.optimizer)
    hook.remove()


def state_of(boosted: Boosted) -> list[torch.Tensor]:
    moments = [v for entry in boosted.optimizer.state.values() for v in entry.values()]
    return copies([*boosted.model.parameters(), *moments])


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(equal(a, b) for a, b in zip(actual, expected, strict=True))


# --- gradients that are not finite --------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_skipped_step_changes_no_bit_and_warns_once(
    value: float, precision: str, max_norm: float
) -> None:
    boosted = boost(tower(), precision=precision, max_norm=max_norm, hysteresis=100)
    losses_of_boosted(boosted, tower_loss, steps=2)
    before = state_of(boosted)
    poison(boosted, value)
    with pytest.warns(RuntimeWarning, match=r"layers\.2\.weight.*not finite") as caught:
        boosted.optimizer.step()
    assert caught[0].filename == __file__
    boosted.optimizer.zero_grad()
    for _ in range(2):
        poison(boosted, value)
        boosted.optimizer.step()  # filterwarnings=error: no second warning
        boosted.optimizer.zero_grad()
    assert same(state_of(boosted), before)
    report = boosted.report()
    assert (report.skipped_steps, report.step_skipped) == (3, True)
    assert report.gradient_norm is not None
    assert not math.isfinite(report.gradient_norm)
    losses = losses_of_boosted(boosted, tower_loss, steps=3)
    assert all(map(math.isfinite, losses))
    assert boosted.report().skipped_steps == 3
    assert not boosted.report().step_skipped


@pytest.mark.filterwarnings("ignore:castor skipped")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_after_a_skipped_step_is_as_if_it_had_not_been(precision: str) -> None:
    boosted, other = boost(tower(), precision=precision), boost(tower(), precision=precision)
    first = losses_of_boosted(boosted, tower_loss, steps=3)
    poison(boosted)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    first += [boosted.step(tower_loss(boosted.model, i)) for i in range(3, 6)]
    assert first == losses_of_boosted(other, tower_loss, steps=6)


def test_raise_names_the_parameter_and_changes_no_bit() -> None:
    boosted = boost(tower(), nonfinite="raise")
    losses_of_boosted(boosted, tower_loss, steps=2)
    before = state_of(boosted)
    poison(boosted)
    with pytest.raises(castor.NonFiniteGradientError, match=r"layers\.2\.weight") as raised:
        boosted.optimizer.step()
    assert isinstance(raised.value, castor.Error | ArithmeticError)
    assert same(state_of(boosted), before)
    boosted.optimizer.zero_grad()
    losses_of_boosted(boosted, tower_loss, steps=2)


def test_ignore_does_what_plain_torch_does() -> None:
    boosted, plain = boost(tower(), nonfinite="ignore"), tower()
    own = torch.optim.AdamW(plain.parameters(), lr=LR)
    poison(boosted, math.nan)
    tower_loss(plain, 0).backward()
    plain.layers[2].weight.grad[3] = math.nan
    boosted.optimizer.step()
    own.step()
    for actual, expected in zip(boosted.model.parameters(), plain.parameters(), strict=True):
        assert equal(actual.isnan(), expected.isnan())
    assert boosted.report().skipped_steps == 0


@pytest.mark.filterwarnings("ignore:castor skipped")
def test_nonfinite_gradient_of_an_accumulated_micro_batch_skips_the_whole_step() -> None:
    boosted = boost(tower())
    before = state_of(boosted)
    tower_loss(boosted.model, 1).backward()
    poison(boosted, math.nan)
    tower_loss(boosted.model, 2).backward()
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    assert same(state_of(boosted), before)
    assert boosted.report().skipped_steps == 1


# --- the loss scaler ----------------------------------------------------------------------------


def scale_of(boosted: Boosted) -> float:
    return float(boosted.optimizer._castor.loss_scale)


def test_scale_cancels_out() -> None:
    """A power of two changes the exponent of a gradient and nothing else."""
    runs = []
    for scale in (1.0, 2.0**6):
        boosted = boost(tower(), precision="fp16", initial_scale=scale, max_norm=0.1)
        runs.append(losses_of_boosted(boosted, tower_loss, steps=4))
    assert_close_losses(runs[1], runs[0], tolerance=4e-3)


@pytest.mark.filterwarnings("ignore:castor skipped")
def test_scale_falls_after_hysteresis_and_grows_after_the_interval() -> None:
    boosted = boost(
        tower(), precision="fp16", initial_scale=1024.0, hysteresis=2, growth_interval=3,
        backoff_factor=0.25, growth_factor=2.0, min_scale=64.0, max_scale=256.0 * 4,
    )  # fmt: skip
    seen = []
    for _ in range(4):
        poison(boosted)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        seen.append(scale_of(boosted))
    assert seen == [1024.0, 256.0, 64.0, 64.0]
    losses_of_boosted(boosted, tower_loss, steps=6)
    assert scale_of(boosted) == 256.0
    for expected in (256.0, 64.0):  # growth restores the tolerance
        poison(boosted)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        assert scale_of(boosted) == expected
    assert boosted.report().skipped_steps == 6


@pytest.mark.filterwarnings("ignore:castor skipped")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_overflow_during_accumulation_does_not_poison_later_steps(set_to_none: bool) -> None:
    """Colossal-AI: one overflow with accumulation, and no step is taken in the next 30."""
    boosted = boost(tower(), precision="fp16", initial_scale=2.0**12, hysteresis=1, max_norm=1.0)

    def step(overflow: bool) -> None:
        for k in range(3):
            if overflow and k == 1:
                poison(boosted)
            else:
                boosted.booster.backward(tower_loss(boosted.model, k) / 3, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad(set_to_none=set_to_none)

    step(overflow=False)
    step(overflow=True)
    assert boosted.report().skipped_steps == 1
    assert scale_of(boosted) == 2.0**11
    before = copies(boosted.model.parameters())
    for _ in range(5):
        step(overflow=False)
    assert boosted.report().skipped_steps == 1
    assert scale_of(boosted) == 2.0**11
    assert not same(copies(boosted.model.parameters()), before)


@pytest.mark.filterwarnings("ignore:castor skipped")
def test_huge_first_scale_settles_by_itself() -> None:
    boosted = boost(tower(), precision="fp16", initial_scale=2.0**30, hysteresis=1)
    losses = losses_of_boosted(boosted, tower_loss, steps=25)
    report = boosted.report()
    assert 5 <= report.skipped_steps < 20
    assert all(map(math.isfinite, losses))
    assert scale_of(boosted) == 2.0 ** (30 - report.skipped_steps)


def test_clipping_scaled_gradients_by_hand_raises_and_names_the_remedy() -> None:
    boosted = boost(tower(), precision="fp16")
    boosted.booster.backward(tower_loss(boosted.model, 0), boosted.optimizer)
    torch.nn.utils.clip_grad_norm_(boosted.model.parameters(), 1.0)
    before = copies(boosted.model.parameters())
    with pytest.raises(castor.UsageError, match="max_norm"):
        boosted.optimizer.step()
    assert_same_weights(boosted.model, before)
    boosted.optimizer.zero_grad()
    losses_of_boosted(boosted, tower_loss, steps=2)


def test_unscaled_backward_beside_scaled_ones_raises() -> None:
    boosted = boost(tower(), precision="fp16")
    boosted.booster.backward(tower_loss(boosted.model, 0), boosted.optimizer)
    with pytest.raises(castor.UsageError, match=r"booster\.backward"):
        tower_loss(boosted.model, 1).backward()
    boosted.optimizer.zero_grad()
    losses_of_boosted(boosted, tower_loss, steps=2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_scaled_gradients_inside_a_graph_are_unscaled_or_refused() -> None:
    """Never taken for unscaled ones. eps is so large that Adam's step scales with the gradient."""

    def one(scale: float) -> list[torch.Tensor]:
        model = tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
        boosted = boost(model, optimizer=optimizer, precision="fp16", initial_scale=scale)
        driver: Any = boosted.optimizer._castor
        boosted.optimizer.zero_grad()
        loss = tower_loss(model, 0)
        driver.engine.session.set_loss_scale(driver.loss_scale)
        (loss * driver.loss_scale).backward(create_graph=True)
        driver.engine.session.set_loss_scale(1.0)
        boosted.optimizer.step()
        return copies(model.parameters())

    for a, b in zip(one(1.0), one(64.0), strict=True):
        assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_fp16_backward_needs_the_optimizer() -> None:
    boosted = boost(tower(), precision="fp16")
    loss = tower_loss(boosted.model, 0)
    with pytest.raises(castor.UsageError, match=r"booster\.backward\(loss, optimizer\)"):
        boosted.booster.backward(loss)
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(castor.UsageError, match="not boosted"):
        boosted.booster.backward(loss, stranger)
    boosted.step(loss)


def test_small_gradients_survive_only_by_the_scale() -> None:
    """What loss scaling is for: most of 2**-20 of a gradient is zero in fp16."""

    def share_of_zeros(scale: float) -> float:
        boosted = boost(tower(), precision="fp16", initial_scale=scale)
        boosted.booster.backward(tower_loss(boosted.model, 0) * 2.0**-20, boosted.optimizer)
        return (boosted.model.layers[0].weight.grad == 0).float().mean().item()

    assert share_of_zeros(2.0**15) < 0.1
    assert share_of_zeros(1.0) > 0.9


# --- 16-bit weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_parameters_and_persistent_buffers_change_type(precision: str, dtype: torch.dtype) -> None:
    """Integers and buffers outside the state_dict (rotary frequencies) do not."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    model.register_buffer("frequencies", torch.ones(3), persistent=False)
    boosted = boost(model, precision=precision, initial_scale=1.0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model[1].running_mean.dtype == model[1].running_var.dtype == dtype
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert model.frequencies.dtype == torch.float32
    output = model(tower_batch(0)["x"])
    assert output.dtype == dtype
    assert model[1].running_mean.any()
    boosted.step(output.float().square().mean())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_updates_below_the_spacing_of_16_bits_add_up(precision: str) -> None:
    """1000 steps of 1e-6 move a weight of 1 by 1e-3; without a master each would round away."""
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
    boosted = boost(model, optimizer=optimizer, precision=precision, initial_scale=1.0)
    for _ in range(400):
        boosted.step(model(torch.ones(1, 8)).float().sum())
    assert model.weight.mean().item() == pytest.approx(0.5 - 400 * 2e-5, abs=2e-3)


def test_half_precision_model_can_be_boosted_to_any_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        boosted = boost(tower().to(dtype), precision="fp32")
        losses = losses_of_boosted(boosted, tower_loss, steps=2)
        assert all(map(math.isfinite, losses))
        assert {p.dtype for p in boosted.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_may_have_the_type_that_the_model_had(dtype: torch.dtype) -> None:
    model = boost(nn.Sequential(nn.Linear(8, 4)).to(dtype), precision="fp32").model
    x = torch.randn(2, 8).to(dtype)
    assert equal(model(x), model(x.float()))
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):  # as before boost
        model(x.to(other))


def test_second_warning_does_not_come_but_another_model_warns_anew() -> None:
    for _ in range(2):
        boosted = boost(tower())
        poison(boosted)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            boosted.optimizer.step()
        assert len(caught) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_that_becomes_another_type_by_default_is_told(dtype: torch.dtype) -> None:
    own = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    with pytest.warns(RuntimeWarning, match=f"in {dtype}, and becomes torch.float32.*'{own}' to"):
        boosted = helpers.boost(tower().to(dtype), precision=None)
    assert {param.dtype for param in boosted.model.parameters()} == {torch.float32}
    for precision in (own, "fp32"):  # no warning, which would be an error here
        boost(tower().to(dtype), precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        helpers.boost(tower(), precision=None)
