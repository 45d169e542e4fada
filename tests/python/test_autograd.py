"""Backward in every form, user hooks on parameters, and passes that fail half way."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers import (
    LR,
    Boosted,
    assert_close_losses,
    assert_close_weights,
    boost,
    copies,
    equal,
    losses_of_boosted,
    losses_of_plain,
    tight_memory,
)
from zoo import Tower, tower, tower_batch, tower_loss


def tight_tower(**settings: Any) -> Boosted:
    return boost(tower(), tight_memory(tower, tower_loss), **settings)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def assert_bitwise(actual: list[Any], expected: list[Any]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert equal(a, b)


def test_plain_backward_is_the_same_as_booster_backward() -> None:
    one, other = tight_tower(), tight_tower()
    one.booster.backward(tower_loss(one.model, 0), one.optimizer)
    tower_loss(other.model, 0).backward()
    assert_bitwise(grads(one.model), grads(other.model))


def test_gradients_are_bitwise_those_of_plain() -> None:
    plain, boosted = tower(), tight_tower()
    for seed in range(3):  # accumulated
        tower_loss(plain, seed).backward()
        tower_loss(boosted.model, seed).backward()
        assert_bitwise(grads(boosted.model), grads(plain))


def test_retained_graph_can_be_backpropagated_twice() -> None:
    plain, boosted = tower(), tight_tower()
    for model in (plain, boosted.model):
        loss = tower_loss(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_bitwise(grads(boosted.model), grads(plain))


def test_graph_of_the_old_weights_cannot_be_replayed_after_the_step() -> None:
    boosted = tight_tower()
    loss = tower_loss(boosted.model, 0)
    loss.backward(retain_graph=True)
    boosted.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    boosted.optimizer.zero_grad()
    losses_of_boosted(boosted, tower_loss, steps=2)


def test_autograd_grad_leaves_p_grad_alone() -> None:
    plain, boosted = tower(), boost(tower())  # holds all gradients on the device at once
    expected = torch.autograd.grad(tower_loss(plain, 0), list(plain.parameters()))
    actual = torch.autograd.grad(tower_loss(boosted.model, 0), list(boosted.model.parameters()))
    assert_bitwise(list(actual), list(expected))
    assert all(p.grad is None for p in boosted.model.parameters())
    assert_close_losses(
        losses_of_boosted(boosted, tower_loss), losses_of_plain(tower(), tower_loss)
    )


def penalised(model: nn.Module, seed: int) -> torch.Tensor:
    """A gradient penalty: the loss holds a gradient with respect to the parameters."""
    loss = tower_loss(model, seed)
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in first)


def test_gradient_penalty_trains_as_plain() -> None:
    boosted = boost(tower(), tight_memory(tower, penalised))
    assert_close_losses(losses_of_boosted(boosted, penalised), losses_of_plain(tower(), penalised))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_backward_with_create_graph_reaches_the_optimizer() -> None:
    plain = tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    boosted = boost(tower())
    for seed in range(3):
        for model, own in ((plain, optimizer), (boosted.model, boosted.optimizer)):
            tower_loss(model, seed).backward(create_graph=True)
            total = sum(p.grad.square().sum() for p in model.parameters())
            total.backward()
            own.step()
            own.zero_grad()
    assert_close_weights(boosted.model, plain)


def test_backward_with_inputs_touches_only_those() -> None:
    plain, boosted = tower(), tight_tower()
    for model in (plain, boosted.model):
        chosen = list(model.layers[2].parameters())
        tower_loss(model, 0).backward(inputs=chosen)
    for actual, expected in zip(boosted.model.parameters(), plain.parameters(), strict=True):
        assert (actual.grad is None) == (expected.grad is None)
        assert expected.grad is None or equal(actual.grad, expected.grad)


def test_gradient_of_the_input_is_bitwise_that_of_plain() -> None:
    inputs = []
    for model in (tower(), tight_tower().model):
        batch = tower_batch(0)
        batch["x"].requires_grad_()
        model(**batch).backward()
        inputs.append(batch["x"].grad)
    assert equal(*inputs)


# --- user hooks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before_boost", [True, False])
def test_post_accumulate_hooks_see_the_accumulated_gradient(before_boost: bool) -> None:
    def watch(model: nn.Module) -> list[tuple[int, torch.Tensor]]:
        seen: list[tuple[int, torch.Tensor]] = []
        for i, param in enumerate(model.parameters()):
            param.register_post_accumulate_grad_hook(
                lambda p, i=i: seen.append((i, p.grad.clone()))
            )
        return seen

    plain = tower()
    expected = watch(plain)
    model = tower()
    actual = watch(model) if before_boost else []
    boosted = boost(model)
    if not before_boost:
        actual = watch(model)
    for trained in (plain, boosted.model):
        for seed in range(2):
            tower_loss(trained, seed).backward()
    assert [i for i, _ in actual] == [i for i, _ in expected]
    assert_bitwise([g for _, g in actual], [g for _, g in expected])


@pytest.mark.parametrize("before_boost", [True, False])
def test_tensor_hooks_on_parameters_may_change_the_gradient(before_boost: bool) -> None:
    def halve(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 0.5)

    plain, model = tower(), tower()
    halve(plain)
    if before_boost:
        halve(model)
    boosted = boost(model)
    if not before_boost:
        halve(model)
    tower_loss(plain, 0).backward()
    tower_loss(boosted.model, 0).backward()
    assert_bitwise(grads(boosted.model), grads(plain))


def test_module_hooks_of_the_user_read_the_right_weights() -> None:
    def watch(model: Tower) -> list[float]:
        sums: list[float] = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda m, _: sums.append(m.weight.sum().item()))
            layer.register_forward_hook(lambda m, *_: sums.append(m.bias.sum().item()))
            layer.register_full_backward_hook(lambda m, *_: sums.append(m.weight.sum().item()))
        return sums

    plain, boosted = tower(), tight_tower()
    expected, actual = watch(plain), watch(boosted.model)
    for model in (plain, boosted.model):
        batch = tower_batch(0)
        batch["x"].requires_grad_()
        model(**batch).backward()
    assert len(actual) == 3 * 6
    assert actual == expected


# --- passes that fail ---------------------------------------------------------------------------


class Fragile(Tower):
    """Fails in its fourth layer, in forward or in backward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: tuple[str, type[BaseException]] | None = None
        self.layers[3].register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.failure is None:
            return
        where, error = self.failure
        if where == "forward":
            raise error("on purpose")

        def fail(_: torch.Tensor) -> None:
            raise error("on purpose")

        output.register_hook(fail)


def fragile() -> Fragile:
    torch.manual_seed(5)
    return Fragile()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("evaluate", [False, True])
def test_training_goes_on_after_a_pass_that_failed(
    where: str, error: type[BaseException], evaluate: bool
) -> None:
    plain = fragile()
    expected = losses_of_plain(plain, tower_loss, steps=8)
    boosted = boost(fragile(), tight_memory(fragile, tower_loss))
    losses = losses_of_boosted(boosted, tower_loss, steps=3)
    boosted.model.failure = (where, error)
    with pytest.raises(error, match="on purpose"):
        tower_loss(boosted.model, 77).backward()
    boosted.model.failure = None
    boosted.optimizer.zero_grad()
    if evaluate:
        with torch.no_grad():
            tower_loss(boosted.model, 5)
    losses += [boosted.step(tower_loss(boosted.model, i)) for i in range(3, 8)]
    assert_close_losses(losses, expected)
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes
    assert report.steps == 8


def test_forward_whose_graph_is_dropped_does_no_harm() -> None:
    expected = losses_of_plain(tower(), tower_loss)
    boosted = tight_tower()
    losses = []
    for seed in range(6):
        tower_loss(boosted.model, 500 + seed)
        losses.append(boosted.step(tower_loss(boosted.model, seed)))
    assert_close_losses(losses, expected)


def test_failed_pass_leaves_no_memory_behind() -> None:
    boosted = boost(fragile())
    losses_of_boosted(boosted, tower_loss, steps=2)
    settled = boosted.booster.memory()
    for where in ("forward", "backward"):
        boosted.model.failure = (where, ValueError)
        with pytest.raises(ValueError, match="on purpose"):
            tower_loss(boosted.model, 77).backward()
        boosted.model.failure = None
        boosted.optimizer.zero_grad()
        boosted.step(tower_loss(boosted.model, 1))
        assert boosted.booster.memory() == settled


# --- several models -----------------------------------------------------------------------------


def test_student_learns_from_a_boosted_teacher() -> None:
    def loss(student: nn.Module, teacher: nn.Module, seed: int) -> torch.Tensor:
        x = tower_batch(seed)["x"]
        with torch.no_grad():
            target = teacher(x)
        return (student(x) - target).square().mean()

    teacher = tower(depth=4)
    expected = losses_of_plain(tower(), lambda model, i: loss(model, teacher, i))
    boosted_teacher = boost(tower(depth=4), "100KiB").model
    boosted = boost(tower(), "100KiB")
    actual = losses_of_boosted(boosted, lambda model, i: loss(model, boosted_teacher, i))
    assert_close_losses(actual, expected)


def test_two_models_train_side_by_side_and_through_each_other() -> None:
    """A generator and a critic: one backward runs through both."""

    def train(pair: list[nn.Module], steps: list[Callable[[], None]]) -> list[float]:
        losses = []
        for seed in range(6):
            batch = tower_batch(seed)
            hidden = pair[0](batch["x"])
            loss = nn.functional.cross_entropy(pair[1](hidden.repeat(1, 8)), batch["labels"])
            loss.backward()
            for step in steps:
                step()
            losses.append(loss.item())
        return losses

    def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return lambda: (optimizer.step(), optimizer.zero_grad())  # type: ignore[func-returns-value]

    plain = [tower(), tower(depth=3)]
    own = [stepper(torch.optim.AdamW(model.parameters(), lr=LR)) for model in plain]
    expected = train(plain, own)
    pair = [boost(tower(), "100KiB"), boost(tower(depth=3), "100KiB")]
    actual = train([b.model for b in pair], [stepper(b.optimizer) for b in pair])
    assert_close_losses(actual, expected)
    for boosted, model in zip(pair, plain, strict=True):
        assert_close_weights(boosted.model, model)
        report = boosted.report()
        assert report.peak_device_bytes <= report.device_budget_bytes
        assert boosted.booster.memory(boosted.model).nonmodel_bytes == 0


def test_failed_pass_does_not_charge_what_comes_after() -> None:
    boosted = boost(fragile(), "60KiB")
    losses_of_boosted(boosted, tower_loss, steps=1)
    for where in ("forward", "backward"):
        boosted.model.failure = (where, ValueError)
        with pytest.raises(ValueError, match="on purpose"):
            tower_loss(boosted.model, 77).backward()
        torch.zeros(2**20)  # 4 MiB


def test_model_that_dies_between_forward_and_backward_charges_nobody() -> None:
    boosted = boost(tower(), "60KiB")
    loss = tower_loss(boosted.model, 0)
    del boosted, loss
    gc.collect()
    torch.zeros(2**20)  # 4 MiB


def test_unboosted_model_beside_a_boosted_one_is_not_charged() -> None:
    boosted, plain = boost(tower(), "60KiB"), tower(width=256)
    losses_of_boosted(boosted, tower_loss, steps=2)
    plain(**tower_batch(0, rows=512, width=256)).backward()  # takes megabytes
    assert boosted.report().peak_device_bytes <= 60 * 2**10
    assert boosted.booster.memory().nonmodel_bytes == 0


def test_gradients_seen_by_the_user_stay_what_they_were_until_the_next_step() -> None:
    boosted = tight_tower()
    tower_loss(boosted.model, 0).backward()
    before = copies(grads(boosted.model))
    boosted.optimizer.step()
    assert_bitwise(grads(boosted.model), before)
