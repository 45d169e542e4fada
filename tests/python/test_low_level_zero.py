"""LowLevelZeroPlugin: ZeRO's first two stages by their names."""

from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import low_level_zero_cases
from low_level_zero_cases import CASE, SETTINGS, plugin, train
from rank_processes import found_by_each


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where two ranks have left their weights, and their reports by setting."""
    path = tmp_path_factory.mktemp("zero")
    return path, found_by_each(low_level_zero_cases.each, 2, path)


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_have_the_bits_of_one_process(
    name: str, trained: tuple[Path, list[dict[str, Any]]]
) -> None:
    expected, _ = train(SETTINGS[name], range(2))
    for rank in range(2):
        weights = torch.load(trained[0] / f"{name}.{rank}.pt")
        assert all(map(torch.equal, weights, expected))


def test_what_is_where(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    weights = sum(param.numel() * 4 for param in CASE.build().parameters())
    for reports in trained[1]:
        inside = reports["on the device"]
        # Weights, gradients, and this rank's half of two moments.
        assert _of_chunks(inside) == pytest.approx(3 * weights, rel=0.03)
        assert inside["h2d_bytes"] == inside["d2h_bytes"] == inside["evictions"] == 0
        for name in ("stage 1, offloaded", "stage 2, offloaded"):
            offloaded = reports[name]
            assert _of_chunks(offloaded) == pytest.approx(weights, rel=0.03)
            # This rank's share of weights and gradients, which are there once, and of moments.
            assert offloaded["rank_shared_bytes"] == pytest.approx(2 * weights, rel=0.03)
            assert offloaded["host_bytes"] == pytest.approx(2 * weights, rel=0.1)
            # Each step new weights come, and gradients go.
            for way in ("h2d_bytes", "d2h_bytes"):
                assert offloaded[way] == pytest.approx(offloaded["steps"] * weights, rel=0.03)


def _of_chunks(report: dict[str, Any]) -> int:
    """Device bytes that chunks took."""
    taken: int = report["peak_device_bytes"] - report["peak_nonmodel_bytes"]
    return taken


def test_stage_2_needs_memory_that_ranks_share(tmp_path: Path) -> None:
    for said in found_by_each(low_level_zero_cases.over_the_group, 2, tmp_path):
        assert "stage=2 keeps gradients once" in said
        assert "give stage=1" in said


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"stage": 3}, ValueError, "stage is 3; choose one of 1, 2"),
        ({"stage": True}, TypeError, "stage is True; choose one of 1, 2"),
        ({"stage": 2}, NotImplementedError, "give stage=1 or cpu_offload=True"),
        ({"cpu_offload": 1}, TypeError, "cpu_offload is 1; give True or False"),
        ({"placement_policy": "auto"}, TypeError, "no argument 'placement_policy': cpu_offload"),
        ({"offload_optim_frac": 0.5}, TypeError, "no argument 'offload_optim_frac'"),
        ({"verbose": True}, NotImplementedError, "verbose may only be False .*report"),
        ({"reduce_bucket_size_in_m": 24}, NotImplementedError, "give chunk_bytes"),
        ({"tp_size": 2}, NotImplementedError, "HybridParallelPlugin"),
        ({"stages": 1}, TypeError, "'stages': did you mean 'stage'"),
        ({"zero_stage": 1}, TypeError, "no argument 'zero_stage': give stage"),
        ({"nvme_verify": 1}, TypeError, "nvme_verify is 1; give True or False"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(
    settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plugin(**settings)


def test_colossal_ais_defaults_are_taken() -> None:
    plugin(
        stage=1, reduce_bucket_size_in_m=12, communication_dtype=None, overlap_communication=True,
        cpu_offload=False, verbose=False, norm_type=2.0, master_weights=True,
    )  # fmt: skip


def test_one_process_trains_with_stage_2_as_well() -> None:
    model = CASE.build()
    booster = castor.Booster(plugin(stage=2, cpu_offload=True))
    optimizer = torch.optim.AdamW(model.parameters())
    booster.boost(model, optimizer)
    booster.backward(CASE.loss(model, 0, 0), optimizer)
    optimizer.step()
    assert booster.report(model).steps == 1
