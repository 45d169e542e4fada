"""Models and optimizers that cannot be boosted: a named exception, and both left usable."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import castor
from castor import Booster
from helpers import (
    LR,
    assert_close_losses,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    losses_of_plain,
    plain_steps,
    plugin,
)
from zoo import Tower, tower, tower_loss


class Odd(nn.Module):
    """A tower with one parameter of a kind that castor cannot manage."""

    def __init__(self, odd: torch.Tensor) -> None:
        super().__init__()
        self.tower = tower()
        self.odd = nn.Parameter(odd, requires_grad=odd.is_floating_point())

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.tower(**batch)


ODD = {
    "float64": torch.zeros(3, dtype=torch.float64),
    "int64": torch.zeros(3, dtype=torch.int64),
    "complex64": torch.zeros(3, dtype=torch.complex64),
    "int32": torch.zeros(3, dtype=torch.int32),
    "meta": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("kind", ODD)
def test_parameter_that_cannot_be_managed_is_named_and_nothing_is_changed(kind: str) -> None:
    model = Odd(ODD[kind])
    before = copies(model.tower.parameters())
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    with pytest.raises(castor.UsageError, match=f"'odd'.*{kind}"):
        Booster(plugin=plugin()).boost(model, optimizer)
    assert_same_weights(model.tower, before)
    losses = losses_of_plain(model.tower, tower_loss)
    assert_close_losses(losses, losses_of_plain(tower(), tower_loss))


def test_sparse_parameter_is_refused() -> None:
    with pytest.raises(castor.UsageError, match=r"'odd'.*layout"):
        Booster(plugin=plugin()).boost(Odd(torch.eye(3).to_sparse()))


def test_model_built_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Tower()
    with pytest.raises(castor.UsageError, match=r"layers\.0\.weight.*meta.*to_empty"):
        Booster(plugin=plugin()).boost(model)


def test_sharded_parameter_is_refused() -> None:
    code = """
import torch, torch.distributed as dist, castor
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(8, 8)
mesh = init_device_mesh("cpu", (1,))
model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
try:
    castor.Booster(plugin=castor.GeminiPlugin(device="cpu", device_memory="1GiB")).boost(model)
except castor.UsageError as error:
    print(error)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "'weight' is a DTensor" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # torch 2.15
@pytest.mark.parametrize("whole", [False, True])
def test_scripted_module_is_refused(whole: bool) -> None:
    model: nn.Module = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 1))
    if whole:
        model = torch.jit.script(model)
    with pytest.raises(castor.UsageError, match="scripted or traced module") as caught:
        boost(model)
    assert ("'0'" in str(caught.value)) != whole
    model(torch.ones(2, 4)).sum().backward()


def test_sparse_gradient_is_refused_where_it_arises() -> None:
    model = nn.Sequential(nn.Embedding(8, 32, sparse=True), nn.Linear(32, 4))
    booster = boost(model, optimizer=AdamW(model.parameters()))
    with pytest.raises(castor.UsageError, match=r"'0\.weight'.*sparse"):
        booster.model(torch.tensor([1, 2])).sum().backward()


def test_optimizer_of_other_parameters_is_refused() -> None:
    model, other = tower(), tower(width=16)
    before = copies(model.parameters())
    with pytest.raises(castor.UsageError, match="the model lacks"):
        Booster(plugin=plugin()).boost(model, AdamW(other.parameters()))
    both = AdamW([*model.parameters(), nn.Parameter(torch.zeros(77))])
    with pytest.raises(castor.UsageError, match=r"1 parameters that the model lacks.*77"):
        Booster(plugin=plugin()).boost(model, both)
    assert_same_weights(model, before)
    losses_of_boosted(boost(model), tower_loss, steps=2)


def test_parameters_in_no_optimizer_are_named_once() -> None:
    model = tower()
    with pytest.warns(UserWarning, match=r"not hold 12 parameters .*'layers\.0\.weight', .*freeze"):
        boosted = boost(model, optimizer=AdamW(model.head.parameters()))
    losses_of_boosted(boosted, tower_loss, steps=2)  # warnings are errors here
    model = tower()
    model.layers.requires_grad_(False)
    losses_of_boosted(boost(model, optimizer=AdamW(model.head.parameters())), tower_loss, steps=2)


def test_boosting_twice_is_refused() -> None:
    boosted = boost(tower())
    with pytest.raises(castor.UsageError, match="boosted already"):
        Booster(plugin=plugin()).boost(boosted.model, AdamW(boosted.model.parameters()))
    with pytest.raises(castor.UsageError, match="boosted already"):
        Booster(plugin=plugin()).boost(boosted.model.layers)
    with pytest.raises(castor.UsageError, match="boosted already"):
        Booster(plugin=plugin()).boost(nn.Sequential(nn.Linear(2, 2), boosted.model))
    with pytest.raises(castor.UsageError, match="boosted already"):
        Booster(plugin=plugin()).boost(tower(), boosted.optimizer)
    losses_of_boosted(boosted, tower_loss, steps=2)


def test_parameter_shared_with_a_boosted_model_is_refused() -> None:
    boosted = boost(tower())
    other = Tower()
    other.head.weight = boosted.model.head.weight
    before = boosted.model.head.weight.data_ptr()
    with pytest.raises(castor.UsageError, match=r"head\.weight|boosted"):
        Booster(plugin=plugin()).boost(other)
    assert boosted.model.head.weight.data_ptr() == before
    losses_of_boosted(boosted, tower_loss, steps=2)


def test_lbfgs_cannot_skip_steps_of_fp16() -> None:
    model = tower()
    with pytest.raises(NotImplementedError, match="LBFGS evaluates its closure inside step"):
        Booster(plugin=plugin(precision="fp16")).boost(model, torch.optim.LBFGS(model.parameters()))


def test_model_without_parameters_is_refused() -> None:
    with pytest.raises(castor.UsageError, match="no parameters"):
        Booster(plugin=plugin()).boost(nn.ReLU())


def test_things_of_another_type_are_type_errors() -> None:
    with pytest.raises(TypeError, match="GeminiPlugin"):
        Booster(plugin="gemini")  # type: ignore[arg-type]
    booster = Booster(plugin=plugin())
    with pytest.raises(TypeError, match=r"Module"):
        booster.boost(torch.zeros(2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="Optimizer"):
        booster.boost(tower(), 1e-3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"was given a float as loss; .* without \.item\(\)"):
        booster.backward(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["criterion", "dataloader"])
def test_an_argument_of_boost_in_anothers_place_is_named_and_nothing_is_boosted(
    place: str,
) -> None:
    model, booster = tower(), Booster(plugin=plugin())
    optimizer = AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=f"{place} is a StepLR; the order is boost"):
        booster.boost(model, optimizer, **{place: schedule})
    booster.boost(model, optimizer, None, None, schedule)


def test_asking_about_a_model_that_is_not_boosted_is_a_usage_error() -> None:
    booster = Booster(plugin=plugin())
    for ask in (booster.report, booster.memory):
        with pytest.raises(castor.UsageError, match="nothing has been boosted"):
            ask()
        with pytest.raises(castor.UsageError, match="not boosted"):
            ask(tower())
    with pytest.raises(castor.UsageError, match="not boosted"), booster.no_sync(tower()):
        pass


def test_every_runtime_error_derives_from_castor_error() -> None:
    for error in (
        castor.UsageError, castor.OutOfMemoryError, castor.IoError, castor.NonFiniteGradientError,
    ):  # fmt: skip
        assert issubclass(error, castor.Error)
    assert issubclass(castor.UsageError, RuntimeError)
    assert issubclass(castor.OutOfMemoryError, torch.OutOfMemoryError)
    assert issubclass(castor.IoError, OSError)
    assert issubclass(castor.NonFiniteGradientError, ArithmeticError)


def test_plugin_serves_several_boosters() -> None:
    shared = plugin()
    expected = losses_of_plain(tower(), tower_loss)
    for _ in range(2):
        model = tower()
        optimizer = AdamW(model.parameters(), lr=LR)
        booster = Booster(plugin=shared)
        booster.boost(model, optimizer)
        assert_close_losses(plain_steps(model, optimizer, steps=6), expected)


class _Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_data_that_ranks_cannot_be_given_parts_of_is_named() -> None:
    gemini = plugin()
    with pytest.raises(TypeError, match="a _Stream has none: let it yield this rank's samples"):
        gemini.prepare_dataloader(_Stream(), batch_size=2)
    samples = torch.utils.data.SequentialSampler(range(4))
    with pytest.raises(TypeError, match="was given sampler=: leave it out"):
        gemini.prepare_dataloader(range(4), batch_size=2, sampler=samples)
