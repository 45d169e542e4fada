"""A session on a device that computes by itself gives the bits of the CPU device.

What a GPU does is simulated in host memory (tests/simulated_device): its kernels' bodies, copies
beside the compute, host storage that nobody may write while a copy reads them.
"""

import gc
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import castor
from helpers import FORMATS, Boosted, assert_equal, boost, copies, go_on, train_on
from simulated import Simulation
from zoo import CASES, Case, tower, tower_batch

BACKWARD = {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False}
STAY = {"gpu_margin_mem_ratio": 0.0}
SCALE = {"initial_scale": 2.0**8}
"""No overflow on the tower."""


def assert_same_bits(
    simulated: Simulation,
    case: Case,
    *,
    memory: int = 2**30,
    accumulate: int = 1,
    checkpointing: bool = False,
    **settings: Any,
) -> Boosted:
    """Losses, weights, masters and moments; returns the boosted model of the simulated device."""
    reference = boost(case.model(checkpointing=checkpointing), **settings)
    expected = train_on(reference, case, micro_batches=accumulate)
    gc.collect()
    boosted = simulated.boost(case.model(checkpointing=checkpointing), memory, **settings)
    assert train_on(boosted, case, micro_batches=accumulate) == expected
    assert_equal(simulated.state(boosted), simulated.state(reference))
    assert boosted.report().peak_device_bytes <= boosted.report().device_budget_bytes == memory
    return boosted


def tight(simulated: Simulation, case: Case, **settings: Any) -> int:
    """Room for what is no chunk, on a simulated device, and for a third of the parameters."""
    boosted = simulated.boost(case.model(), **STAY, **settings)
    train_on(boosted, case, steps=2)
    report = boosted.report()
    largest = max(p.numel() for p in boosted.model.parameters()) * 4
    gradients = largest  # the window of those on their way
    return report.peak_nonmodel_bytes + gradients + max(3 * largest, report.host_bytes // 16)


# --- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ["tight", "ample"])
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, 0.0), (1, 0.1), (3, 0.1)])
@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_every_format_gives_the_bits_of_the_cpu_device(
    simulated: Simulation,
    precision: str,
    state_format: str,
    accumulate: int,
    max_norm: float,
    room: str,
) -> None:
    settings = {"precision": precision, "optim_state_format": state_format, "max_norm": max_norm}
    case = CASES["gpt2"]
    memory = tight(simulated, case, **settings) if room == "tight" else 2**30
    boosted = assert_same_bits(
        simulated, case, memory=memory, accumulate=accumulate, overlap="forward", **settings
    )
    report = boosted.report()
    if room == "ample":
        assert report.resident_chunks == report.num_chunks
    else:
        assert report.resident_chunks < report.num_chunks
        assert report.evictions > 0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
def test_architectures_give_the_same_bits(
    simulated: Simulation, name: str, checkpointing: bool
) -> None:
    assert_same_bits(simulated, CASES[name], checkpointing=checkpointing, max_norm=1.0)


POLICIES: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu"},
    "cuda": {"placement_policy": "cuda"},
    "half": {"placement_policy": "static", "offload_optim_frac": 0.5},
    "stream": {
        "placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 0.5,
    },
    "no prefetch": {"max_prefetch": 0},
    "far prefetch": {"max_prefetch": 4},
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_same_bits(simulated: Simulation, name: str, precision: str) -> None:
    assert_same_bits(simulated, CASES["gpt2"], precision=precision, **POLICIES[name])


def test_lazy_models_of_a_narrower_type_keep_their_values(simulated: Simulation) -> None:
    def run(boost_it: Any, context: Any) -> Boosted:
        torch.manual_seed(0)
        with context:
            model = nn.Sequential(*[nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)])
        return boost_it(model, precision="fp32")

    reference = run(boost, nullcontext())
    boosted = run(simulated.boost, castor.LazyInitContext())
    assert_equal(simulated.state(boosted), simulated.state(reference))


# --- who updates what ---------------------------------------------------------------------------


def test_the_device_updates_and_measures_what_lies_on_it(simulated: Simulation) -> None:
    boosted = simulated.boost(tower(), placement_policy="cuda", max_norm=1.0)
    go_on(boosted, steps=3)
    numel = sum(p.numel() for p in boosted.model.parameters())
    counts = simulated.counts()
    assert counts["update_numel"] == counts["norm_numel"] == 3 * numel
    assert counts["copies_in"] == counts["copies_out"] == 0


def test_the_host_updates_and_measures_what_lies_there(simulated: Simulation) -> None:
    boosted = simulated.boost(tower(), placement_policy="cpu", max_norm=1.0)
    go_on(boosted, steps=3)
    counts = simulated.counts()
    assert counts["update_numel"] == counts["norm_numel"] == 0
    assert counts["copies_in"] > 0
    gradients = 3 * sum(1 for _ in boosted.model.parameters())
    assert counts["copies_out"] == gradients


def test_both_measure_one_norm(simulated: Simulation) -> None:
    settings = {"placement_policy": "static", "offload_optim_frac": 0.5, "max_norm": 0.05}
    boosted = assert_same_bits(simulated, CASES["gpt2"], **settings)
    numel = sum(p.numel() for p in boosted.model.parameters())
    assert 0 < simulated.counts()["norm_numel"] < 4 * numel
    assert simulated.counts()["norm_numel"] == simulated.counts()["update_numel"]


@pytest.mark.parametrize("simulated", ["gpu, seed 1"], indirect=True)
@pytest.mark.parametrize(("depth", "launches"), [(6, 2), (70, 2), (71, 4)])
def test_two_launches_measure_143_gradients(
    simulated: Simulation, depth: int, launches: int
) -> None:
    """A layer of the tower, and its head, have two parameters each."""
    settings: dict[str, Any] = {"placement_policy": "cuda", "max_norm": 1.0}
    reference = boost(tower(depth=depth), **settings)
    boosted = simulated.boost(tower(depth=depth), **settings)
    assert go_on(boosted, steps=3) == go_on(reference, steps=3)
    assert_equal(simulated.state(boosted), simulated.state(reference))
    assert simulated.counts()["norm_launches"] == 3 * launches


# --- memory -------------------------------------------------------------------------------------


def test_peaks_are_exact_and_repeat(simulated: Simulation) -> None:
    boosted = simulated.boost(tower(), **STAY)
    peaks = []
    for seed in range(5):
        go_on(boosted, first=seed, steps=1)
        peaks.append(boosted.report().peak_nonmodel_bytes)
    assert peaks[2] == peaks[4]


@pytest.mark.parametrize("n", [3, 10, 20])
def test_an_allocation_that_the_device_refuses_evicts_and_succeeds(
    simulated: Simulation, n: int
) -> None:
    reference, boosted = boost(tower()), simulated.boost(tower())
    assert go_on(boosted) == go_on(reference)
    assert boosted.report().resident_chunks > 0
    before = simulated.refuse_allocation(n)
    assert go_on(boosted, first=4) == go_on(reference, first=4)
    assert simulated.refuse_allocation(0) == before + 1
    assert_equal(simulated.state(boosted), simulated.state(reference))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("n", [3, 5, 9])
def test_a_slot_that_the_device_refuses_makes_others_leave(
    simulated: Simulation, n: int, prefetch: int
) -> None:
    settings = {**STAY, "max_prefetch": prefetch}
    reference, boosted = boost(tower(), **settings), simulated.boost(tower(), **settings)
    assert go_on(boosted) == go_on(reference)
    simulated.device.refuse_block(n)
    assert go_on(boosted, first=4) == go_on(reference, first=4)
    assert_equal(simulated.state(boosted), simulated.state(reference))


def test_a_slot_that_is_refused_where_nothing_can_leave_is_an_error(
    simulated: Simulation,
) -> None:
    boosted = simulated.boost(tower(), **STAY, max_prefetch=0)
    go_on(boosted)
    simulated.device.refuse_block(1)
    with pytest.raises(castor.OutOfMemoryError, match="the simulated device refuses"):
        go_on(boosted)


def test_a_budget_that_is_too_small_names_the_place(simulated: Simulation) -> None:
    with pytest.raises(castor.OutOfMemoryError, match=r"of module 'layers\.\d'"):
        go_on(simulated.boost(tower(), 20 * 2**10))


def test_a_model_that_goes_while_copies_run_leaves_its_weights(simulated: Simulation) -> None:
    model = tower()
    boosted = simulated.boost(model)
    go_on(boosted, steps=2)
    assert boosted.report().resident_chunks > 0, "copies in are on their way"
    with simulated.beside():
        expected = copies(model.parameters())
    held = list(model.parameters())
    del model, boosted
    gc.collect()
    for param, value in zip(held, expected, strict=True):
        assert torch.equal(param.cpu(), value)


# --- what users do ------------------------------------------------------------------------------


def test_gradients_are_visible_and_may_be_clipped(simulated: Simulation) -> None:
    results = []
    for make in (boost, simulated.boost):
        boosted = make(tower(), **STAY)
        losses = []
        for seed in range(3):
            loss = boosted.model(**tower_batch(seed))
            loss.backward()
            losses.append(torch.nn.utils.clip_grad_norm_(boosted.model.parameters(), 0.1).item())
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        results.append(losses)
    assert results[0] == results[1]


def test_optimizer_state_is_shown_as_copies(simulated: Simulation) -> None:
    reference, boosted = boost(tower()), simulated.boost(tower())
    go_on(reference)
    go_on(boosted)
    for mine, theirs in zip(
        boosted.optimizer.state.values(), reference.optimizer.state.values(), strict=True
    ):
        assert set(mine) == set(theirs) == {"step", "exp_avg", "exp_avg_sq"}
        for key in theirs:
            assert torch.equal(mine[key], theirs[key])
    entry = next(iter(boosted.optimizer.state.values()))
    entry["exp_avg"].fill_(7.0)
    assert bool((entry["exp_avg"] == 7.0).all())  # what is written into a copy goes back


@pytest.mark.parametrize("wrong", [torch.zeros(1), None], ids=str)
def test_what_is_no_backend_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    from castor.runtime import engine

    monkeypatch.setattr(engine, "make_backend", lambda *_: wrong)
    with pytest.raises(ValueError, match=re.escape(f"the device backend is {wrong}; castor._C")):
        boost(tower())
