"""Updates of chunks on the host, a share of which a GPU runs (device_update_fraction).

On the simulated device, whose streams are the calling thread, and on the simulated GPU, whose
streams run by themselves and dawdle.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import simulated_gpu
from helpers import FORMATS, Boosted, assert_equal, boost, copies, go_on, train_on
from simulated import GpuSimulation, Simulation
from zoo import CASES, tower, tower_batch

STAY = {"gpu_margin_mem_ratio": 0.0}
BACKWARD = {"overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False}
OVERLAPS: list[dict[str, Any]] = [{"overlap": "none"}, {"overlap": "forward"}, BACKWARD]


@pytest.fixture(params=simulated_gpu.SEEDS, ids="seed {}".format)
def dawdling(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuSimulation]:
    simulation = GpuSimulation(monkeypatch)
    simulation.device.delay(request.param)
    yield simulation
    simulated_gpu.rest()


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0, "auto"])
@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_every_share_gives_the_bits_of_the_cpu_device(
    simulated: Simulation, precision: str, state_format: str, share: float | str
) -> None:
    settings: dict[str, Any] = {
        "precision": precision, "optim_state_format": state_format, "max_norm": 0.1, **STAY,
    }  # fmt: skip
    case = CASES["gpt2"]
    reference = boost(case.model(), **settings)
    expected = train_on(reference, case, micro_batches=2)
    gc.collect()
    boosted = simulated.boost(case.model(), device_update_fraction=share, **settings)
    assert train_on(boosted, case, micro_batches=2) == expected
    assert_equal(simulated.state(boosted), simulated.state(reference))
    report = boosted.report()
    elements = sum(p.numel() for p in boosted.model.parameters()) * report.steps
    if share != "auto":
        assert report.device_updated_elements == pytest.approx(float(share) * elements, rel=0.02)
        assert report.device_update_fraction == share
    assert 0 < report.device_updated_elements <= elements
    assert "its share now" in str(report)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=lambda overlap: overlap["overlap"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_streams_of_a_gpu_give_the_same_bits(
    dawdling: GpuSimulation, overlap: dict[str, Any], share: float
) -> None:
    settings = {"precision": "bf16", "placement_policy": "cpu", **overlap}
    reference = boost(tower(), **settings)
    expected = go_on(reference, steps=6)
    probe = dawdling.boost(tower(), **settings)
    go_on(probe, steps=2)
    most = max(p.numel() for p in probe.model.parameters())
    room = probe.report().peak_nonmodel_bytes + 40 * most  # chunks have to take turns
    boosted = dawdling.boost(
        tower(), room + 3 * 16 * 2**10, device_update_fraction=share, **settings
    )
    assert go_on(boosted, steps=6) == expected
    assert_equal(dawdling.state(boosted), dawdling.state(reference))
    report = boosted.report()
    assert report.device_updated_elements > 0
    assert report.peak_device_bytes <= report.device_budget_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
        lambda params: castor.optim.Lion(params, lr=1e-3, weight_decay=0.1),
    ],
    ids=["sgd", "lion"],
)
def test_sgd_and_lion_share_their_updates(
    simulated: Simulation, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "max_norm": 0.1, **STAY}

    def trained(build: Callable[..., Boosted], **share: Any) -> tuple[Boosted, list[float]]:
        model = tower()
        boosted = build(model, optimizer=make(model.parameters()), **settings, **share)
        return boosted, go_on(boosted, steps=5)

    reference, expected = trained(boost)
    boosted, losses = trained(simulated.boost, device_update_fraction=0.6)
    assert losses == expected
    assert_equal(copies(boosted.model.parameters()), copies(reference.model.parameters()))
    assert boosted.report().device_updated_elements > 0


def test_resident_chunks_are_no_part_of_the_share(simulated: Simulation) -> None:
    boosted = simulated.boost(tower(), placement_policy="cuda", device_update_fraction=1.0)
    go_on(boosted, steps=2)
    assert boosted.report().device_updated_elements == 0
    assert boosted.report().device_update_bytes > 0


def test_states_on_nvme_and_skipped_steps(simulated: Simulation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "nvme_offload_fraction": 1.0, **STAY}

    def train(boosted: Boosted) -> list[float]:
        losses = go_on(boosted, steps=2)
        loss = boosted.model(**tower_batch(7)) * float("inf")
        boosted.booster.backward(loss, boosted.optimizer)
        with pytest.warns(RuntimeWarning, match="not finite"):
            boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        assert boosted.report().skipped_steps == 1
        return losses + go_on(boosted, steps=2)

    for name in ("reference", "shared"):
        (tmp_path / name).mkdir()
    reference = boost(tower(), nvme_path=tmp_path / "reference", **settings)
    expected = train(reference)
    boosted = simulated.boost(
        tower(), nvme_path=tmp_path / "shared", device_update_fraction=0.6, **settings
    )
    assert train(boosted) == expected
    assert_equal(copies(boosted.model.parameters()), copies(reference.model.parameters()))
    assert boosted.report().device_updated_elements > 0


def test_a_checkpoint_goes_on_with_another_share(simulated: Simulation, tmp_path: Path) -> None:
    settings = {"precision": "bf16", "optim_state_format": "split_int8", **STAY}
    reference = boost(tower(), **settings)
    expected = go_on(reference, steps=4)
    first = simulated.boost(tower(), device_update_fraction=0.3, **settings)
    losses = go_on(first, steps=2)
    first.booster.save_model(first.model, tmp_path / "model")
    first.booster.save_optimizer(first.optimizer, tmp_path / "optimizer")
    second = simulated.boost(tower(), device_update_fraction=1.0, **settings)
    second.booster.load_model(second.model, tmp_path / "model")
    second.booster.load_optimizer(second.optimizer, tmp_path / "optimizer")
    assert losses + go_on(second, steps=2, first=2) == expected
    assert_equal(simulated.state(second), simulated.state(reference))


def test_the_ring_is_paid_for(simulated: Simulation) -> None:
    with pytest.raises(castor.OutOfMemoryError, match="leave device_update_fraction out"):
        simulated.boost(tower(), "40KiB", device_update_fraction=0.5, **STAY)


@pytest.mark.parametrize("share", [0.5, "auto"])
def test_the_cpu_device_has_no_share(share: float | str) -> None:
    with pytest.raises(castor.UsageError, match="between the host and a GPU"):
        boost(tower(), device_update_fraction=share)


def test_an_optimizer_with_a_step_of_its_own_has_no_share(simulated: Simulation) -> None:
    model = tower()
    adagrad = torch.optim.Adagrad(model.parameters())
    with pytest.raises(NotImplementedError, match=r"device_update_fraction=0\.5 .* Adagrad"):
        simulated.boost(model, optimizer=adagrad, device_update_fraction=0.5)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.5, ValueError, "device_update_fraction is 1.5"),
        (-0.1, ValueError, "device_update_fraction is -0.1"),
        ("half", TypeError, "choose 'auto' or a fraction"),
        (True, TypeError, "choose 'auto' or a fraction"),
    ],
)
def test_values_out_of_range_are_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        castor.GeminiPlugin(device_update_fraction=value)
