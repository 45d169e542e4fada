"""castor estimate of machines with NVMe: what lies where, to the byte, and what a step moves."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from castor import OutOfMemoryError
from castor.estimate import Estimator, Machine, Workload, machine
from castor.estimate.estimator import StateFormat
from castor.estimate.render import render
from estimating import GPT_18B, OPTIONS, SMALL, small_machine, train, write
from helpers import FORMATS

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "estimate.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("nvme"), SMALL)


@pytest.fixture(scope="module")
def small(config: Path) -> Estimator:
    return Estimator(config, Workload(sequence=64))


# --- what lies where ------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_sizes_are_those_of_a_session(
    config: Path, tmp_path: Path, precision: Any, state_format: Any
) -> None:
    workload = Workload(sequence=64, precision=precision, state_format=state_format)
    simulator = Estimator(config, workload)._simulator
    ample = simulator.places(OPTIONS)["host_bytes"]
    stored = []
    for share in (1.0, 0.9, 0.7, 0.55, 0.45, 0.4, 0.35, 0.3, 0.25):
        budget = int(share * ample)
        sizes = simulator.places(OPTIONS | {"host_bytes": budget, "nvme_bytes_per_second": 1.0})
        folder = tmp_path / str(share)
        folder.mkdir()
        report = train(
            "64MiB",
            steps=0,
            precision=precision,
            optim_state_format=state_format,
            host_memory=budget,
            nvme_path=folder,
        ).report()
        assert sizes == {name: report[name] for name in sizes}, share
        assert sizes["host_bytes"] <= budget
        stored.append((sizes["nvme_bytes"] > 0, sizes["nvme_weight_bytes"] > 0))
    assert stored[0] == (False, False)
    assert stored[1] == (True, False)
    assert stored[-1] == (True, True)


def test_what_a_session_refuses_does_not_fit(config: Path, tmp_path: Path) -> None:
    small = Estimator(config, Workload(sequence=64, precision="fp32", state_format="fp32"))
    tiny = small_machine(host_memory="300KiB", nvme="1GB/s")
    found = small.estimate(tiny)
    assert not found.fits
    assert found.max_batch == 0
    assert found.host_bytes > tiny.host_bytes
    assert "the windows through which NVMe is worked on take" in found.remedies[0]
    with pytest.raises(OutOfMemoryError, match="the window through which"):
        train("64MiB", steps=0, host_memory=tiny.host_bytes, nvme_path=tmp_path)
    enough = dataclasses.replace(tiny, host_bytes=found.host_bytes)
    assert small.estimate(enough).fits
    train("64MiB", steps=0, host_memory=enough.host_bytes, nvme_path=tmp_path)


def test_what_the_host_has_no_room_for_goes_to_nvme(small: Estimator) -> None:
    ample = small.estimate(small_machine())
    short = small_machine(host_memory=ample.host_bytes * 7 // 8)
    assert not small.estimate(short).fits
    spilled = small.estimate(dataclasses.replace(short, nvme=1e9))
    assert spilled.fits
    assert spilled.nvme_bytes > ample.host_bytes // 8
    assert spilled.nvme_weight_bytes == 0
    assert spilled.host_bytes <= short.host_bytes
    assert spilled.busy_s["nvme"] == pytest.approx(2 * spilled.nvme_bytes / 1e9, rel=0.01)
    slow = small.estimate(dataclasses.replace(short, nvme=1e5))
    assert slow.bound == "nvme"
    assert slow.step_time_s > spilled.step_time_s  # type: ignore[operator]
    full = small.estimate(dataclasses.replace(short, nvme=1e9, nvme_bytes=1000))
    assert not full.fits
    assert full.max_batch == 0
    assert "of NVMe" in full.remedies[0]
    with pytest.raises(ValueError, match="nvme_memory needs nvme"):
        small_machine(nvme_memory="1GiB")


def test_a_host_below_parameters_and_gradients_fits_with_nvme(small: Estimator) -> None:
    weights = 4 * small.num_parameters
    short = small_machine(host_memory=weights * 3 // 4)
    assert not small.estimate(short).fits
    found = small.estimate(dataclasses.replace(short, nvme=1e9))
    assert found.fits
    assert found.max_batch == small.estimate(small_machine()).max_batch
    assert found.host_bytes <= short.host_bytes < weights
    assert 0 < found.nvme_weight_bytes < found.nvme_bytes
    slow = small.estimate(dataclasses.replace(short, nvme=1e6))
    assert slow.bound == "nvme"
    assert slow.step_time_s > found.step_time_s  # type: ignore[operator]
    assert slow.step_time_s >= slow.busy_s["nvme"]  # type: ignore[operator]


def test_table_tells_parameters_and_gradients_from_states(small: Estimator) -> None:
    def table(on: Machine) -> str:
        console = Console(record=True, width=200, file=io.StringIO())
        render(small.estimate(on), small.workload, on, console)
        return console.export_text()

    ample = small.estimate(small_machine()).host_bytes
    states = table(small_machine(host_memory=ample * 7 // 8, nvme="1GB/s"))
    assert "parameters and gradients" not in states
    both = table(small_machine(host_memory=ample // 4, nvme="1MB/s"))
    assert "of it parameters and gradients" in both
    assert "NVMe (what the host has no room for)" in both


# --- what moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, 4 * 10**9])
def test_steps_that_read_weights_from_nvme_move_what_is_predicted(
    tmp_path: Path, link: int | None
) -> None:
    model = SMALL | {"n_layer": 24}
    workload = Workload(sequence=64, precision="fp32", state_format="fp32")
    simulator = Estimator(write(tmp_path, model), workload)._simulator
    reference = train("64MiB", model=model)
    moments = reference.timeline()["events"]
    chunks = reference.chunks()
    device_bytes = (
        reference.report()["peak_nonmodel_bytes"]
        + sum(chunk["used_bytes"] for chunk in chunks) // 4
        + 2 * max(chunk["capacity_bytes"] for chunk in chunks)
    )
    host_bytes = simulator.places(OPTIONS)["host_bytes"] // 4
    copies = "overlapped" if link else "synchronous"
    step = simulator.run(
        events=[(m[0], m[1], m[4], m[2]) for m in moments],
        compute_seconds=[0.0] * len(moments),
        options=OPTIONS
        | {
            "device_bytes": device_bytes,
            "host_bytes": host_bytes,
            "nvme_bytes_per_second": 1.0,
            "parameter_copies": copies,
            "gradient_copies": copies,
            "margin_ratio": 1.0,
            "num_ranks": 1,
            "with_norm": True,
        },
    )

    def traffic(steps: int) -> tuple[int, Any]:
        folder = tmp_path / str(steps)
        folder.mkdir()
        session = train(
            device_bytes,
            steps,
            model=model,
            host_memory=host_bytes,
            nvme_path=folder,
            overlap="none",
            link_bandwidth=link,
            max_norm=1.0,
        )
        report = session.report()
        return report["nvme_read_bytes"] + report["nvme_written_bytes"], session

    before, _ = traffic(3)
    after, session = traffic(5)
    timeline = session.timeline()
    assert step["nvme_weight_bytes"] == session.report()["nvme_weight_bytes"] > 0
    assert step["h2d_bytes"] == sum(t[7] for t in timeline["transfers"] if t[0] == "fetch")
    assert step["peak_device_bytes"] == timeline["peak_device_bytes"]
    # What is still in the window when it is needed again is not read, and payloads are padded.
    assert step["busy_seconds"]["nvme"] == pytest.approx((after - before) / 2, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "state_format",
    [
        pytest.param(name, marks=() if name in ("fp32", "split_int8") else pytest.mark.whole)
        for name in get_args(StateFormat)
    ],
)
def test_the_table_of_the_guide_holds(tmp_path: Path, state_format: Any) -> None:
    row = re.search(rf"^\| `{state_format}` \|(( \S+ (GiB|s) \|){{4}})$", GUIDE, re.MULTILINE)
    assert row is not None
    figures = [float(cell.split()[0]) for cell in row[1].split("|")[:-1]]
    estimator = Estimator(write(tmp_path, GPT_18B), Workload(state_format=state_format))
    found = [
        estimator.estimate(machine("rtx3090", host_memory=memory, nvme="3GB/s"))
        for memory in ("28GiB", "60GiB")
    ]
    for (gib, seconds), one in zip(zip(*[iter(figures)] * 2, strict=True), found, strict=True):
        assert one.fits
        assert one.bound == "nvme"
        assert gib == round(one.nvme_bytes / 2**30, 1)
        assert seconds == round(one.step_time_s or 0.0, 1)
