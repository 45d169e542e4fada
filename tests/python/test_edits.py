"""What users do to a boosted model: write into it, change it, save it, copy it, drop it."""

import copy
import gc
import pickle
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
from helpers import (
    assert_close_losses,
    assert_close_weights,
    assert_equal,
    assert_same_weights,
    boost,
    copies,
    equal,
    exact_state,
    losses_of_boosted,
    losses_of_plain,
    plugin,
    tight_memory,
)
from zoo import CASES, Tower, gpt2, tower, tower_batch, tower_loss

# --- changes of the structure -------------------------------------------------------------------


def replace_layer(model: Tower) -> None:
    model.layers[2] = nn.Linear(32, 32)


def replace_parameter(model: Tower) -> None:
    model.head.weight = nn.Parameter(torch.zeros(4, 32))


def add_module(model: Tower) -> None:
    model.extra = nn.Linear(2, 2)


def add_parameter(model: Tower) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))


def append_layer(model: Tower) -> None:
    model.layers.append(nn.Linear(32, 32))


def to_bf16(model: Tower) -> None:
    model.to(torch.bfloat16)


def assign_data(model: Tower) -> None:
    model.head.weight.data = torch.zeros(4, 32, dtype=torch.float64)


CHANGES = [
    replace_layer, replace_parameter, add_module, add_parameter, append_layer,
    to_bf16, assign_data,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_the_structure_after_boost_raises(change: Callable[[Tower], None]) -> None:
    boosted = boost(tower())
    losses_of_boosted(boosted, tower_loss, steps=1)

    def use() -> None:
        change(boosted.model)
        tower_loss(boosted.model, 1)

    with pytest.raises(castor.UsageError, match="boost") as raised:
        use()
    assert isinstance(raised.value, RuntimeError)


def freeze_one_after_another(model: Tower, step: int, where: str) -> None:
    if where == "before forward" and step < 4:
        model.layers[step].requires_grad_(False)


def freeze_for_a_step(model: Tower, step: int, where: str) -> None:
    if where == "before forward":
        for i, layer in enumerate(model.layers):
            layer.requires_grad_(i % 2 == step % 2)


def freeze_during_backward(model: Tower, step: int, where: str) -> None:
    model.layers[step % 3].requires_grad_(where != "between")


def thaw_before_backward(model: Tower, step: int, where: str) -> None:
    model.layers[step % 3].requires_grad_(where != "before forward")


def freeze_what_has_a_gradient(model: Tower, step: int, where: str) -> None:
    if where != "between":
        model.layers[1].requires_grad_(where == "before forward")


FREEZES = [
    freeze_one_after_another, freeze_for_a_step, freeze_during_backward, thaw_before_backward,
    freeze_what_has_a_gradient,
]  # fmt: skip


def freezing_steps(
    model: Any, optimizer: torch.optim.Optimizer, freeze: Callable[[Tower, int, str], None]
) -> list[Any]:
    """Gradients of each step, and the states at the end."""
    seen: list[Any] = []
    for step in range(6):
        freeze(model, step, "before forward")
        loss = tower_loss(model, step)
        freeze(model, step, "between")
        loss.backward()
        freeze(model, step, "behind")
        for param in model.parameters():
            seen.append(torch.zeros(0) if param.grad is None else param.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        seen += optimizer.state.get(param, {}).values()
    return [*seen, *(param.detach() for param in model.parameters())]


@pytest.mark.parametrize("settings", [{}, {"overlap": "forward"}, {"activations": "recompute"}])
@pytest.mark.parametrize("freeze", FREEZES)
def test_layers_that_are_frozen_for_some_steps_train_as_plain(
    freeze: Callable[[Tower, int, str], None], settings: dict[str, str]
) -> None:
    def sgd(model: Tower) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def build() -> Tower:
        model = tower()
        model.layers = nn.ModuleList(nn.Sequential(layer) for layer in model.layers)  # blocks
        return model

    plain, model = build(), build()
    expected = freezing_steps(plain, sgd(plain), freeze)
    boosted = boost(model, optimizer=sgd(model), placement_policy="cpu", **settings)
    assert_equal(freezing_steps(boosted.model, boosted.optimizer, freeze), expected)


def states(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value for entry in state_dict["state"].values() for value in entry.values()]


def test_states_of_a_layer_that_is_frozen_are_loaded_and_saved(tmp_path: Path) -> None:
    boosted = boost(tower(), precision="bf16")
    losses_of_boosted(boosted, tower_loss, steps=2)
    state = copy.deepcopy(boosted.optimizer.state_dict())
    boosted.booster.save(tmp_path / "thawed", boosted.model, boosted.optimizer)
    boosted.model.layers[0].requires_grad_(False)
    assert_equal(states(boosted.optimizer.state_dict()), states(state))
    boosted.booster.save(tmp_path / "frozen", boosted.model, boosted.optimizer)
    boosted.model.layers[0].requires_grad_(True)
    expected = [x.clone() for x in exact_state(boosted)]
    for name in ("thawed", "frozen"):
        again = boost(tower(), precision="bf16")
        again.model.layers[0].requires_grad_(False)
        again.booster.load(tmp_path / name, again.model, again.optimizer)
        again.model.layers[0].requires_grad_(True)
        assert_equal(exact_state(again), expected)
    losses_of_boosted(boosted, tower_loss, steps=1)
    boosted.model.layers[0].requires_grad_(False)
    boosted.optimizer.load_state_dict(state)
    boosted.model.layers[0].requires_grad_(True)
    assert_equal(states(boosted.optimizer.state_dict()), states(state))


def test_unfreezing_after_boost_raises() -> None:
    model = tower()
    model.layers[0].requires_grad_(False)
    boosted = boost(model)
    model.layers[0].requires_grad_(True)
    with pytest.raises(castor.UsageError, match=r"layers\.0\.weight.*requires_grad=False"):
        tower_loss(boosted.model, 0)
    model.layers[0].requires_grad_(False)
    losses_of_boosted(boosted, tower_loss, steps=1)


def test_refused_change_leaves_the_model_training() -> None:
    boosted = boost(tower())
    expected = losses_of_plain(tower(), tower_loss)
    losses = losses_of_boosted(boosted, tower_loss, steps=3)
    for change in CHANGES[:5]:
        with pytest.raises(castor.UsageError):
            change(boosted.model)
    losses += [boosted.step(tower_loss(boosted.model, i)) for i in range(3, 6)]
    assert_close_losses(losses, expected)


def test_methods_that_would_change_half_a_model_are_refused() -> None:
    def loss(model: Any, seed: int) -> torch.Tensor:
        result: torch.Tensor = model(**CASES["gpt2"].batch(seed)).loss
        return result

    boosted, size = boost(CASES["gpt2"].model()), 300
    expected = losses_of_plain(CASES["gpt2"].model(), loss)
    with pytest.raises(castor.UsageError, match=r"resize_token_embeddings\(\) would change a GPT2"):
        boosted.model.resize_token_embeddings(size)
    with pytest.raises(castor.UsageError, match=r"resize_token_embeddings\(\) would change a GPT2"):
        boosted.model.transformer.resize_token_embeddings(size)
    assert_close_losses(losses_of_boosted(boosted, loss), expected)
    # Copies are ordinary models, and so is one that was boosted.
    twins = copy.deepcopy(boosted.model), pickle.loads(pickle.dumps(boosted.model))
    boosted.booster.release(boosted.model)
    for model in (*twins, boosted.model):
        assert model.resize_token_embeddings(size).num_embeddings == size


def test_dropping_a_parameter_trains_as_plain() -> None:
    def drop(model: Tower) -> Tower:
        model.layers[2].bias = None
        return model

    expected = losses_of_plain(drop(tower()), tower_loss)
    boosted = boost(tower())
    drop(boosted.model)
    assert_close_losses(losses_of_boosted(boosted, tower_loss), expected)
    assert "layers.2.bias" not in boosted.model.state_dict()


def test_assigning_what_is_there_already_and_moving_to_the_cpu_are_no_changes() -> None:
    boosted = boost(tower())
    boosted.model.head = boosted.model.head
    boosted.model.head.weight = boosted.model.head.weight
    boosted.model.to("cpu").float()
    losses_of_boosted(boosted, tower_loss, steps=2)


class Around(nn.Module):
    """Has a layer in it, as the parts of an attention that may be of several kinds."""

    def __init__(self, layer: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = layer, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)  # type: ignore[no-any-return]


class Switching(Around):
    """Takes another kind of part in a forward, as BigBird for sequences too short for blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner = Around(self.inner.inner, 0.5)
        return super().forward(x)


def switching() -> Tower:
    model = tower()
    for i in (0, 3):
        model.layers[i] = Switching(Around(model.layers[i], 1.0), 1.0)
    return model


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_module_may_take_the_place_of_another_with_its_parameters(activations: str) -> None:
    forward, plain = tower_loss, switching()
    expected = losses_of_plain(plain, forward)
    memory = tight_memory(switching, forward, 0.7)
    boosted = boost(switching(), memory, activations=activations)
    names = [name for name, _ in boosted.model.named_parameters()]
    assert_close_losses(losses_of_boosted(boosted, forward), expected)
    assert_close_weights(boosted.model, plain)
    assert [name for name, _ in boosted.model.named_parameters()] == names
    inner = boosted.model.layers[0].inner
    with pytest.raises(castor.UsageError, match="module 'inner' is set on a Around"):
        inner.inner = nn.Linear(32, 32)
    with pytest.raises(castor.UsageError, match="module 'inner' is set on a Around"):
        inner.inner = nn.Sequential(inner.inner)  # its parameters have other names


# --- saving -------------------------------------------------------------------------------------


def test_a_module_without_parameters_and_buffers_may_be_added() -> None:
    def add(model: Tower) -> Tower:
        model.layers.append(nn.Sequential(nn.GELU()))
        model.loss = nn.CrossEntropyLoss()
        return model

    expected = losses_of_plain(add(tower()), tower_loss)
    boosted = boost(tower(), placement_policy="cpu")
    add(boosted.model)
    assert_close_losses(losses_of_boosted(boosted, tower_loss), expected)
    for late in (nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)):
        with pytest.raises(castor.UsageError, match="module '1' is set on a Sequential"):
            boosted.model.layers[-1].append(late)
    for model in (copy.deepcopy(boosted.model), pickle.loads(pickle.dumps(boosted.model))):
        assert isinstance(model.loss, nn.CrossEntropyLoss)


def test_tied_weights_have_one_place() -> None:
    model = gpt2()
    numel = sum(p.numel() for p in model.parameters())
    boosted = boost(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert boosted.report().host_bytes < 16 * (numel + 16 * len(list(model.parameters())))
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


# --- lifetimes ----------------------------------------------------------------------------------


def test_copy_of_a_boosted_model_is_an_ordinary_model() -> None:
    boosted = boost(tower())
    losses_of_boosted(boosted, tower_loss, steps=2)
    twin = copy.deepcopy(boosted.model)
    assert_same_weights(twin, boosted.model.parameters())
    before, steps = copies(twin.parameters()), boosted.report().steps
    plain = tower()
    plain.load_state_dict(boosted.model.state_dict())
    assert_close_losses(losses_of_plain(twin, tower_loss), losses_of_plain(plain, tower_loss))
    assert_same_weights(boosted.model, before)
    assert boosted.report().steps == steps
    losses_of_boosted(boosted, tower_loss, steps=3)
    assert boosted.report().divergent_steps == 0, "the copy's passes were taken for the model's"


def test_tensors_outlive_the_model_the_booster_and_the_optimizer() -> None:
    boosted = boost(tower())
    losses_of_boosted(boosted, tower_loss, steps=2)
    loss = tower_loss(boosted.model, 5)
    logits = boosted.model(tower_batch(6)["x"])
    loss.backward(retain_graph=True)
    kept = [*boosted.model.state_dict().values(), *(p.grad for p in boosted.model.parameters())]
    kept += [entry["exp_avg"] for entry in boosted.optimizer.state.values()]
    kept += [entry["step"] for entry in boosted.optimizer.state.values()]
    kept += [loss.detach(), logits]
    expected = copies(kept)
    model, optimizer = weakref.ref(boosted.model), weakref.ref(boosted.optimizer)
    del boosted
    gc.collect()
    assert model() is None
    assert optimizer() is None
    filler = [torch.full((64, 64), 7.0) for _ in range(200)]  # would overwrite freed memory
    for value, copied in zip(kept, expected, strict=True):
        assert equal(value.cpu(), copied.cpu())
    logits.sum().backward()  # its graph holds the weights
    del filler


def test_boosting_again_and_again_gives_memory_back() -> None:
    def once() -> None:
        boosted = boost(Tower(width=256, depth=8), "64MiB")
        losses_of_boosted(boosted, lambda model, i: model(**tower_batch(i, width=256)), steps=2)

    for _ in range(3):
        once()
        gc.collect()
    before = resident_bytes()
    for _ in range(20):
        once()
        gc.collect()
    model_bytes = 16 * sum(p.numel() for p in Tower(width=256, depth=8).parameters())
    assert resident_bytes() - before < 2 * model_bytes, "20 models would take 10 times that"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_parts_without_parameters_may_be_those_of_several_models() -> None:
    """OpenAI GPT's activation is one module for all models of the process."""
    relu = nn.ReLU()

    def build(*shared: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), *shared, nn.Linear(8, 8))

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        return model(x).square().mean()

    expected = losses_of_plain(build(nn.ReLU()), loss)
    first, second = boost(build(relu)), boost(build(relu))
    assert_close_losses(losses_of_boosted(first, loss), expected)
    first.booster.release(first.model)
    with pytest.raises(castor.UsageError, match="module 'more' is set on a ReLU"):
        relu.more = nn.Linear(8, 8)
    assert_close_losses(losses_of_boosted(second, loss), expected)
    shared = nn.Linear(8, 8)
    third = boost(build(shared))
    with pytest.raises(castor.UsageError, match="shares modules or parameters"):
        boost(build(shared))
    losses_of_boosted(third, loss, steps=1)


def test_model_boosted_again_after_its_first_booster_is_refused() -> None:
    boosted = boost(tower())
    with pytest.raises(castor.UsageError, match="boosted already"):
        castor.Booster(plugin=plugin()).boost(boosted.model)
