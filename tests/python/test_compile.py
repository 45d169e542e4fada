"""torch.compile gives a boosted model plain PyTorch's result, before boost and after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
from helpers import Boosted, assert_close_losses, boost, losses_of_plain
from zoo import Tower, tower, tower_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def model_before(model: Tower) -> tuple[Boosted, Any]:
    boosted = boost(compiled(model), memory="48KiB")
    return boosted, boosted.model


def model_after(model: Tower) -> tuple[Boosted, Any]:
    boosted = boost(model, memory="48KiB")
    return boosted, compiled(boosted.model)


def part_before(model: Tower) -> tuple[Boosted, Any]:
    model.layers[1] = compiled(model.layers[1])
    boosted = boost(model, memory="48KiB")
    return boosted, boosted.model


def part_in_place_before(model: Tower) -> tuple[Boosted, Any]:
    model.layers[1].compile(backend="aot_eager")
    boosted = boost(model, memory="48KiB")
    return boosted, boosted.model


def part_in_place_after(model: Tower) -> tuple[Boosted, Any]:
    boosted = boost(model, memory="48KiB")
    boosted.model.layers[1].compile(backend="aot_eager")
    return boosted, boosted.model


def model_in_place_after(model: Tower) -> tuple[Boosted, Any]:
    boosted = boost(model, memory="48KiB")
    boosted.model.compile(backend="aot_eager")
    return boosted, boosted.model


WAYS = [
    model_before,
    model_after,
    part_before,
    part_in_place_before,
    part_in_place_after,
    model_in_place_after,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_trains_as_plain_pytorch(way: Callable[[Any], tuple[Any, Any]]) -> None:
    plain = tower()
    expected = losses_of_plain(plain, tower_loss)
    boosted, called = way(tower())
    losses = [boosted.step(tower_loss(called, seed)) for seed in range(6)]
    assert_close_losses(losses, expected)
    inner = getattr(boosted.model, "_orig_mod", boosted.model)
    for mine, theirs in zip(inner.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    assert boosted.report().peak_device_bytes <= boosted.report().device_budget_bytes
    with torch.no_grad():
        assert tower_loss(called, 9).item() == pytest.approx(tower_loss(plain, 9).item(), rel=1e-4)


@pytest.mark.parametrize("way", [model_before, model_after, part_before])
def test_files_have_the_names_of_the_model_that_was_compiled(
    way: Callable[[Any], tuple[Any, Any]], tmp_path: Path
) -> None:
    boosted, called = way(tower())
    boosted.step(tower_loss(called, 0))
    boosted.booster.save_model(called, tmp_path / "model")
    torch.manual_seed(5)
    plain = Tower()
    castor.Booster(boosted.booster.plugin).load_model(plain, tmp_path / "model")
    assert_close_weights_by_order(boosted.model, plain)
    again, recalled = way(Tower())
    again.booster.load_model(recalled, tmp_path / "model")
    assert_close_weights_by_order(again.model, plain)
    assert boosted.booster.report(called).steps == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["what_is_called", "what_was_boosted"])
def test_a_compiled_model_is_released_and_boosted_anew(
    way: Callable[[Any], tuple[Any, Any]], by: str
) -> None:
    expected = losses_of_plain(tower(), tower_loss)
    boosted, called = way(tower())
    model = called if by == "what_is_called" else boosted.model
    losses = [boosted.step(tower_loss(called, seed)) for seed in range(2)]
    boosted.booster.reboost(model)
    losses += [boosted.step(tower_loss(called, seed)) for seed in range(2, 4)]
    boosted.booster.release(model)
    for seed in range(4, 6):
        loss = tower_loss(called, seed)
        loss.backward()
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        losses.append(loss.item())
    assert_close_losses(losses, expected)
    with pytest.raises(castor.UsageError, match="not boosted"):
        boosted.booster.release(model)


def assert_close_weights_by_order(model: Any, plain: Any) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
