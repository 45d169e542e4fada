"""A GPU for which the system page-locks less host memory than a model takes."""

from pathlib import Path

import pytest
import torch

import gpu_rank_cases
import simulated_gpu
from rank_processes import run, succeeded

LIMIT = 2**20


@pytest.mark.slow
def test_a_model_of_eight_times_what_may_be_locked_trains_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", f"simgpu:{simulated_gpu.SEEDS[0]}")
    for name, limit in (("all", 2**62), ("limited", LIMIT)):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("LIMIT", str(limit))
        succeeded(run(gpu_rank_cases.limited, 1, tmp_path / name, timeout=600))
    for name in gpu_rank_cases.LIMITED:
        expected, losses, ample, silence = torch.load(tmp_path / "all" / f"{name}.pt")
        weights, its_losses, report, warned = torch.load(tmp_path / "limited" / f"{name}.pt")
        assert all(map(torch.equal, weights, expected))
        assert its_losses == losses
        assert ample["locked_limit_bytes"] == ample["nvme_bytes"] == 0
        assert silence == []
        size = sum(weight.nbytes for weight in weights)
        assert size >= 4 * LIMIT
        assert 15 / 16 * LIMIT <= report["locked_limit_bytes"] <= LIMIT
        assert report["host_bytes"] <= report["host_budget_bytes"] < report["locked_limit_bytes"]
        assert report["host_bytes"] + report["nvme_bytes"] >= ample["host_bytes"]
        assert report["nvme_weight_bytes"] > size
        assert "memory that is not page-locked" in report["nvme_engine"]
        (message,) = warned
        assert message.startswith("the system page-locks ")
