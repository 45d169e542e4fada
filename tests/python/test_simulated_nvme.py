"""Parameters and gradients on NVMe beside a device that computes by itself.

The simulated device reads and writes host memory where it is, and its copies go on after the calls
that started them: a part that is given back too early is read into while it is write-protected.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
from castor.runtime.engine import engine_of
from helpers import FORMATS, Boosted, assert_equal, boost, copies, train_on
from simulated import Simulation
from stored_tower import CHUNK, DEPTH, WIDTH, go_on_wide, largest_chunk, on_nvme
from zoo import CASES, tower, tower_batch

TIGHT = 2**21
"""Of device memory: a few chunks of the models here, beside their activations."""


def assert_same_bits(
    simulated: Simulation,
    name: str,
    path: Path,
    *,
    memory: int = 2**26,
    micro_batches: int = 1,
    **settings: Any,
) -> None:
    """Losses, weights, masters and moments are those of the CPU device with all in memory."""
    case = CASES[name]
    reference = boost(case.model(), chunk_bytes=CHUNK, **settings)
    expected = train_on(reference, case, micro_batches=micro_batches)
    settings |= on_nvme(path, largest_chunk(reference), **settings)
    gc.collect()
    boosted = simulated.boost(case.model(), memory, chunk_bytes=CHUNK, **settings)
    assert boosted.report().nvme_weight_bytes > 0
    assert train_on(boosted, case, micro_batches=micro_batches) == expected
    assert_equal(simulated.state(boosted), simulated.state(reference))
    assert boosted.report().host_bytes <= boosted.report().host_budget_bytes


def boost_wide(boost_on: Any, **settings: Any) -> Boosted:
    return boost_on(tower(width=WIDTH, depth=DEPTH), 2**26, chunk_bytes=CHUNK, **settings)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_models_train_to_the_same_bits(
    simulated: Simulation, name: str, overlap: str, tmp_path: Path
) -> None:
    assert_same_bits(simulated, name, tmp_path, overlap=overlap, max_norm=1.0)


@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_every_format_in_a_tight_budget(
    simulated: Simulation, precision: str, state_format: str, tmp_path: Path
) -> None:
    assert_same_bits(
        simulated,
        "gpt2",
        tmp_path,
        memory=TIGHT,
        precision=precision,
        optim_state_format=state_format,
        max_prefetch=4,
        nonfinite="raise" if precision == "fp16" else "ignore",
    )


def test_updates_in_backward_and_accumulation(simulated: Simulation, tmp_path: Path) -> None:
    assert_same_bits(
        simulated,
        "gpt2",
        tmp_path,
        overlap="backward",
        nonfinite="ignore",
        enable_gradient_accumulation=False,
    )
    assert_same_bits(simulated, "gpt2", tmp_path, micro_batches=3, max_norm=0.5)


def test_weights_are_read_and_edited_between_steps(simulated: Simulation, tmp_path: Path) -> None:
    def run(boost_on: Any, **settings: Any) -> list[torch.Tensor]:
        boosted = boost_wide(boost_on, **settings)
        for step in range(3):
            loss = boosted.model(**tower_batch(step, width=WIDTH))
            boosted.booster.backward(loss, boosted.optimizer)
            nn.utils.clip_grad_norm_(boosted.model.parameters(), 0.01)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            with torch.no_grad():
                for param in boosted.model.parameters():
                    param.data.clamp_(-0.2, 0.2)
                    param.view(-1)[1:4].mul_(0.5)
            norms = torch._foreach_norm(list(boosted.model.parameters()))
            assert all(torch.isfinite(norm) for norm in norms)
        return copies(boosted.model.parameters())

    assert_equal(run(simulated.boost, **on_nvme(tmp_path)), run(boost))


def test_an_operator_is_awaited_before_its_memory_is_given_back(
    simulated: Simulation, tmp_path: Path
) -> None:
    boosted = boost_wide(simulated.boost, **on_nvme(tmp_path))
    session = engine_of(boosted.model).session
    for i, param in enumerate(engine_of(boosted.model).params):
        before = simulated.counts()["fences"]
        param.detach().sum()
        assert (simulated.counts()["fences"] > before) == session.weight_stored(i)


def test_checkpoints_go_on_with_the_same_bits(simulated: Simulation, tmp_path: Path) -> None:
    def on(path: Path) -> Boosted:
        path.mkdir()
        return boost_wide(simulated.boost, **on_nvme(path))

    first = on(tmp_path / "first")
    go_on_wide(first, steps=2)
    with simulated.beside():
        first.booster.save_model(first.model, tmp_path / "model")
        first.booster.save_optimizer(first.optimizer, tmp_path / "optimizer")
    expected = go_on_wide(first, first=2, steps=2)
    second = on(tmp_path / "second")
    with simulated.beside():
        second.booster.load_model(second.model, tmp_path / "model")
        second.booster.load_optimizer(second.optimizer, tmp_path / "optimizer")
    assert go_on_wide(second, first=2, steps=2) == expected
    assert_equal(simulated.state(second), simulated.state(first))


def test_lazy_models_are_built_there(simulated: Simulation, tmp_path: Path) -> None:
    def run(boost_on: Any, **settings: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with castor.LazyInitContext():
            model = tower(width=WIDTH, depth=DEPTH)
        boosted = boost_on(model, 2**26, chunk_bytes=CHUNK, **settings)
        go_on_wide(boosted, steps=2)
        return copies(boosted.model.parameters())

    assert_equal(run(simulated.boost, **on_nvme(tmp_path)), run(boost))
