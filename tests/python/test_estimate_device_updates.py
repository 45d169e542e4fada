"""Predicted steps in which the device runs a share of the host's updates."""

from pathlib import Path
from typing import Any

import pytest

from castor.estimate import Estimate, Estimator, Workload
from castor.estimate.estimator import lowest
from estimating import SMALL, small_machine, write


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small"), SMALL)


def estimate(config: Path, share: Any, overlap: Any = "none", **machine: Any) -> Estimate:
    workload = Workload(sequence=64, overlap=overlap, device_update_fraction=share)
    return Estimator(config, workload).estimate(small_machine(**machine))


def seconds(found: Estimate) -> float:
    assert found.step_time_s is not None
    return found.step_time_s


# Speeds of host's updates, of DRAM, and of the link.
MACHINES: dict[str, dict[str, str]] = {
    "slow host": {"updates": "300MB/s", "dram": "100GB/s", "h2d": "1GB/s"},
    "slow link": {"updates": "10GB/s", "dram": "100GB/s", "h2d": "1GB/s"},
    "one-sided link": {"updates": "1GB/s", "dram": "50GB/s", "h2d": "3GB/s", "d2h": "1GB/s"},
    "DRAM": {"dram": "1GB/s", "h2d": "10GB/s"},
}


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "slow host" else pytest.mark.slow)
        for name in MACHINES
    ],
)
def test_the_chosen_share_is_within_two_percent_of_the_best(
    config: Path, name: str, overlap: str
) -> None:
    device = {"device_memory": "2900KiB", **MACHINES[name]}
    every = [seconds(estimate(config, i / 20, overlap, **device)) for i in range(21)]
    chosen = estimate(config, "auto", overlap, **device)
    assert seconds(chosen) <= 1.02 * min(every)
    assert seconds(chosen) <= every[0]
    if name == "slow host" and overlap == "none":
        assert 0.3 < chosen.device_update_fraction < 1.0
        assert seconds(chosen) < 0.8 * every[0]


def test_the_ring_is_a_part_of_the_device_bytes(config: Path) -> None:
    without, shared = (estimate(config, share, device_memory="2900KiB") for share in (0.0, 0.5))
    assert without.device_update_fraction == 0.0
    assert shared.device_update_fraction == 0.5
    assert shared.fits
    least = [estimate(config, share, device_memory="64KiB").device_bytes for share in (0.0, 0.5)]
    assert least[1] > least[0]


def test_the_lowest_point_is_found() -> None:
    for best in (0.0, 0.013, 0.4, 0.987, 1.0):
        assert lowest(lambda x, best=best: abs(x - best)) == pytest.approx(best, abs=0.01)


@pytest.mark.parametrize("value", [-0.1, 1.1, "most", True])
def test_shares_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="device_update_fraction"):
        Workload(device_update_fraction=value)
