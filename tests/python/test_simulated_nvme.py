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
from helpers import FORMATS, assert_equal, boost, copies, go_on, train_on
from simulated import Simulation
from stored_tower import CHUNK, DEPTH, WIDTH, on_nvme
from zoo import CASES, tower

TIGHT = 2**21
"""Of device memory: a few chunks of the models here, beside their activations."""


def short_of_host(chunk_bytes: int, path: Path, **settings: Any) -> dict[str, Any]:
    return {"chunk_bytes": CHUNK, **settings, **on_nvme(path, chunk_bytes, **settings)}


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
    largest = max(int(chunk["used_bytes"]) for chunk in engine_of(reference.model).session.chunks())
    gc.collect()
    boosted = simulated.boost(case.model(), memory, **short_of_host(largest, path, **settings))
    assert boosted.report().nvme_weight_bytes > 0
    assert train_on(boosted, case, micro_batches=micro_batches) == expected
    assert_equal(simulated.state(boosted), simulated.state(reference))
    assert boosted.report().host_bytes <= boosted.report().host_budget_bytes


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
        boosted = boost_on(tower(width=WIDTH, depth=DEPTH), 2**26, chunk_bytes=CHUNK, **settings)
        for step in range(3):
            go_on(boosted, step, 1, width=WIDTH)
            with torch.no_grad():
                for param in boosted.model.parameters():
                    param.data.clamp_(-0.2, 0.2)
                    param.view(-1)[1:4].mul_(0.5)
            norms = torch._foreach_norm(list(boosted.model.parameters()))
            assert all(torch.isfinite(norm) for norm in norms)
            nn.utils.clip_grad_norm_(boosted.model.parameters(), 0.1)
        return copies(boosted.model.parameters())

    assert_equal(run(simulated.boost, **on_nvme(tmp_path)), run(boost))


def test_an_operator_is_awaited_before_its_memory_is_given_back(
    simulated: Simulation, tmp_path: Path
) -> None:
    settings = short_of_host(WIDTH * (WIDTH + 8) * 4, tmp_path)
    boosted = simulated.boost(tower(width=WIDTH, depth=DEPTH), 2**26, **settings)
    session = engine_of(boosted.model).session
    for i, param in enumerate(engine_of(boosted.model).params):
        before = simulated.counts()["fences"]
        param.detach().sum()
        assert (simulated.counts()["fences"] > before) == session.weight_stored(i)


def test_checkpoints_go_on_with_the_same_bits(simulated: Simulation, tmp_path: Path) -> None:
    def wide(path: Path) -> Any:
        path.mkdir()
        settings = short_of_host(WIDTH * (WIDTH + 8) * 4, path)
        return simulated.boost(tower(width=WIDTH, depth=DEPTH), 2**26, **settings)

    first = wide(tmp_path / "first")
    go_on(first, 0, 2, width=WIDTH)
    with simulated.beside():
        first.booster.save_model(first.model, tmp_path / "model")
        first.booster.save_optimizer(first.optimizer, tmp_path / "optimizer")
    expected = go_on(first, 2, 2, width=WIDTH)
    second = wide(tmp_path / "second")
    with simulated.beside():
        second.booster.load_model(second.model, tmp_path / "model")
        second.booster.load_optimizer(second.optimizer, tmp_path / "optimizer")
    assert go_on(second, 2, 2, width=WIDTH) == expected
    assert_equal(simulated.state(second), simulated.state(first))


def test_lazy_models_are_built_there(simulated: Simulation, tmp_path: Path) -> None:
    def run(boost_on: Any, **settings: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with castor.LazyInitContext():
            model = tower(width=WIDTH, depth=DEPTH)
        boosted = boost_on(model, 2**26, chunk_bytes=CHUNK, **settings)
        go_on(boosted, 0, 2, width=WIDTH)
        return copies(boosted.model.parameters())

    assert_equal(run(simulated.boost, **on_nvme(tmp_path)), run(boost))
