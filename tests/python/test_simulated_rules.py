"""SGD and Lion on a device that computes by itself have the bits of the CPU device.

Chunks that are resident are updated there, by the bodies of the kernels; all others on the host.
test_simulated_device.py tests the same of Adam.
"""

import gc
from pathlib import Path
from typing import Any

import pytest

from castor.runtime.engine import engine_of
from fused_optimizers import MAKERS, boosted_with, states_of
from helpers import (
    FORMATS_AND_OVERLAPS,
    Boosted,
    assert_equal,
    assert_same_weights,
    boost,
    copies,
    go_on,
    on_device_of,
    train_on,
)
from simulated import Simulation
from zoo import CASES, tower, tower_batch

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


@pytest.mark.parametrize("name", MAKERS)
def test_chunks_are_updated_where_they_lie(simulated: Simulation, name: str) -> None:
    boosted = boosted_there(simulated, name, placement_policy="cuda")
    go_on(boosted, steps=3)
    assert simulated.counts()["update_numel"] == 3 * numel_of(boosted)
    boosted = boosted_there(simulated, name, placement_policy="cpu")
    go_on(boosted, steps=3)
    assert simulated.counts()["update_numel"] == 0


@pytest.mark.parametrize("name", ["plain", "momentum", "lion"])
def test_a_step_that_is_skipped_changes_nothing(simulated: Simulation, name: str) -> None:
    boosted = boosted_there(simulated, name)
    go_on(boosted)
    before = simulated.state(boosted)
    loss = boosted.model(**on_device_of(boosted, tower_batch(0))).square().mean() * float("inf")
    with pytest.warns(RuntimeWarning, match="skipped an optimizer step"):
        boosted.step(loss)
    assert_equal(simulated.state(boosted), before)


def test_a_group_may_get_a_momentum_later_and_lose_it_again(simulated: Simulation) -> None:
    reference = boosted_with(MAKERS["dampening"])
    boosted = boosted_there(simulated, "dampening")
    for step, momentum in enumerate([0.0, 0.8, 0.8, 0.0, 0.8]):
        for each in (reference, boosted):
            each.optimizer.param_groups[0]["momentum"] = momentum
        assert go_on(boosted, step, 1) == go_on(reference, step, 1)
    assert_equal(simulated.state(boosted), simulated.state(reference))


@pytest.mark.parametrize("weights", [False, True], ids=["states", "weights"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain", "nesterov", "lion"])
def test_payloads_on_nvme_have_the_same_bits(
    simulated: Simulation, name: str, precision: str, weights: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": precision, "chunk_bytes": "8KiB"}
    reference = boosted_with(MAKERS[name], tower(depth=24), **settings)
    where = {"host_memory": "80KiB"} if weights else {"nvme_offload_fraction": 1.0}
    model = tower(depth=24)
    optimizer = MAKERS[name](model.parameters())
    boosted = simulated.boost(model, optimizer=optimizer, nvme_path=tmp_path, **settings, **where)
    assert go_on(boosted) == go_on(reference)
    assert_equal(simulated.state(boosted), simulated.state(reference))


@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain", "dampening", "lion"])
def test_runs_go_from_device_to_device(
    simulated: Simulation, name: str, precision: str, place: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": precision, **place}
    uninterrupted = boosted_with(MAKERS[name], **settings)
    go_on(uninterrupted, steps=6)
    first = boosted_there(simulated, name, **settings)
    go_on(first, steps=3)
    with simulated.beside():
        first.booster.save(tmp_path / "run", first.model, first.optimizer)
        other = boosted_with(MAKERS[name], **settings)
        other.booster.load(tmp_path / "run", other.model, other.optimizer)
    go_on(other, first=3, steps=3)
    assert_equal(simulated.state(other), simulated.state(uninterrupted))
    back = boosted_there(simulated, name, **settings)
    go_on(back, steps=2)
    back.booster.load(tmp_path / "run", back.model, back.optimizer)
    go_on(back, first=3, steps=3)
    assert_equal(simulated.state(back), simulated.state(uninterrupted))


def test_states_are_shown_as_copies(simulated: Simulation) -> None:
    reference, boosted = boosted_with(MAKERS["momentum"]), boosted_there(simulated, "momentum")
    assert engine_of(boosted.model).session.state_names(0) == ["momentum_buffer"]
    go_on(reference)
    go_on(boosted)
    assert_equal(states_of(boosted.optimizer), states_of(reference.optimizer))
    for each in (reference, boosted):
        for entry in each.optimizer.state.values():
            entry["momentum_buffer"].mul_(0.5)
    assert go_on(boosted, 4) == go_on(reference, 4)
    assert_same_weights(boosted.model, copies(reference.model.parameters()))
