"""SGD and Lion on a device that computes by itself have the bits of the CPU device.

Chunks that are resident are updated there, by the bodies of the kernels; all others on the host.
test_simulated_device.py tests the same of Adam.
"""

import gc
from typing import Any

import pytest

from fused_optimizers import MAKERS, boosted_with
from helpers import (
    FORMATS_AND_OVERLAPS,
    Boosted,
    assert_equal,
    boost,
    go_on,
    train_on,
)
from simulated import Simulation
from zoo import CASES, tower

STAY = {"gpu_margin_mem_ratio": 0.0}
"""All chunks stay on the host."""
BACKWARD = {"nonfinite": "ignore", "enable_gradient_accumulation": False}
SCALE = {"initial_scale": 2.0**8}
"""No overflow on the tower."""


def boosted_there(
    simulated: Simulation, name: str, memory: int = 2**30, **settings: Any
) -> Boosted:
    model = tower()
    return simulated.boost(model, memory, optimizer=MAKERS[name](model.parameters()), **settings)


def numel_of(boosted: Boosted) -> int:
    return sum(p.numel() for p in boosted.model.parameters())


@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    ("precision", "state_format", "overlap"),
    [cell for cell in FORMATS_AND_OVERLAPS if cell[1] in ("fp32", "split")],
)
@pytest.mark.parametrize("name", MAKERS)
def test_every_option_and_format_gives_the_same_bits(
    simulated: Simulation,
    name: str,
    precision: str,
    state_format: str,
    overlap: str,
    place: dict[str, Any],
) -> None:
    settings: dict[str, Any] = {
        "precision": precision,
        "optim_state_format": state_format,
        "overlap": overlap,
        **(BACKWARD if overlap == "backward" else {}),
        **(SCALE if precision == "fp16" else {}),
        **place,
    }
    reference = boosted_with(MAKERS[name], **settings)
    boosted = boosted_there(simulated, name, **settings)
    for first in (0, 3):
        assert go_on(boosted, first, 3) == go_on(reference, first, 3)
        for each in (reference, boosted):
            each.optimizer.param_groups[0]["lr"] *= 0.5
    assert_equal(simulated.state(boosted), simulated.state(reference))
    report = boosted.report()
    assert report.resident_chunks == (0 if place else report.num_chunks)
    assert (simulated.counts()["update_numel"] > 0) == (not place)


@pytest.mark.parametrize("name", ["nesterov", "lion"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tight_budget_clipping_and_accumulation(
    simulated: Simulation, name: str, precision: str
) -> None:
    """Some chunks are resident; one norm is of gradients on both sides."""
    case = CASES["gpt2"]
    settings: dict[str, Any] = {"precision": precision, "max_norm": 0.05, "overlap": "forward"}
    settings |= {"placement_policy": "static", "offload_optim_frac": 0.5}
    results = []
    for boost_on in (boost, simulated.boost):
        model = case.model()
        boosted = boost_on(model, 2**30, optimizer=MAKERS[name](model.parameters()), **settings)
        results.append((train_on(boosted, case, micro_batches=3), simulated.state(boosted)))
        gc.collect()
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])
    counts = simulated.counts()
    assert 0 < counts["update_numel"] == counts["norm_numel"] < 4 * numel_of(boosted)
