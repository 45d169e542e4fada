"""Parameters and gradients on NVMe beside a device that computes by itself.

The simulated device reads and writes host memory where it is, and its copies go on after the calls
that started them: a part that is given back too early is read into while it is write-protected.
"""

import gc
from pathlib import Path
from typing import Any

import pytest

from castor.runtime.engine import engine_of
from helpers import FORMATS, Boosted, assert_equal, boost, train_on
from simulated import Simulation
from stored_tower import CHUNK, DEPTH, WIDTH, largest_chunk, on_nvme
from zoo import CASES, tower

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


def test_an_operator_is_awaited_before_its_memory_is_given_back(
    simulated: Simulation, tmp_path: Path
) -> None:
    boosted = boost_wide(simulated.boost, **on_nvme(tmp_path))
    session = engine_of(boosted.model).session
    for i, param in enumerate(engine_of(boosted.model).params):
        before = simulated.counts()["fences"]
        param.detach().sum()
        assert (simulated.counts()["fences"] > before) == session.weight_stored(i)
