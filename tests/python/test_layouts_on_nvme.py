"""Simulated layouts whose hosts are too small: what is on NVMe, what it costs, and the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from castor import HybridParallelPlugin
from castor.config.files import read_plan
from castor.errors import UsageError
from castor.planner.cluster import Cluster
from castor.planner.layout_cost import LayoutCost
from castor.planner.layout_search import LayoutSearch
from castor.planner.layouts import Layout
from castor.runtime.parallel_dims import ParallelDims
from test_layouts import cluster, config_file, fastest, run_plan, search

NVME: dict[str, Any] = {"nvme": "4GB/s", "nvme_path": "/mnt/nvme"}
LAYERS, STAGES, COPIES = (
    Layout(dims=ParallelDims(tp=2), rows=8),
    Layout(dims=ParallelDims(pp=2), microbatches=4, rows=2),
    Layout(dims=ParallelDims(dp=2), rows=4),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_file(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def found(config: Path) -> LayoutSearch:
    return search(config)


def two_ranks(**changes: Any) -> Cluster:
    return cluster(**({"ranks_per_node": 2} | changes))


def with_host(share: float, of: LayoutCost, **changes: Any) -> Cluster:
    """Two ranks, each with that share of what a rank of a layout needs of the host."""
    return two_ranks(host_memory=2 * int(share * of.host_bytes), **changes)


# Clusters.


def test_ranks_of_a_node_share_its_nvme() -> None:
    on = cluster(**NVME, nvme_memory="1TiB")
    assert on.machine.nvme == 1e9
    assert on.machine.nvme_bytes == 2**38
    assert on.nvme_paths == ("/mnt/nvme",)
    several = cluster(**NVME | {"nvme_path": ["/a", "/b"]})
    assert several.nvme_paths == ("/a", "/b")
    assert several.machine.nvme_bytes is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nvme": "3GB/s"}, "nvme_path is missing"),
        ({"nvme_path": "/mnt"}, "nvme is missing: the bandwidth of a node's NVMe"),
        ({"nvme_memory": "1TB"}, "nvme_memory needs nvme"),
        (NVME | {"nvme": "fast"}, "nvme is 'fast'"),
        (NVME | {"nvme_memory": 0}, "nvme_memory is 0"),
        (NVME | {"nvme_path": 3}, "nvme_path is 3"),
    ],
)
def test_nvme_that_makes_no_sense_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((UsageError, ValueError, TypeError), match=says):
        cluster(**changes)


# What lies where, and what it costs.


@pytest.mark.parametrize("layout", [LAYERS, STAGES, COPIES])
def test_what_the_host_has_no_room_for_goes_to_nvme(found: LayoutSearch, layout: Layout) -> None:
    """As plan_storage has it, of chunks that are made for as many ranks."""
    whole = found.cost(layout, two_ranks())
    assert (whole.nvme_bytes, whole.nvme_weight_bytes, whole.busy["nvme"]) == (0, 0, 0.0)
    short = with_host(0.85, whole)
    assert not found.cost(layout, short).fits(short.machine)
    on = with_host(0.85, whole, **NVME)
    cost = found.cost(layout, on)
    assert cost.fits(on.machine)
    assert cost.nvme_bytes > 0.15 * whole.host_bytes
    assert cost.nvme_weight_bytes == 0
    assert cost.host_bytes <= on.machine.host_bytes
    assert cost.seconds > whole.seconds
    assert sum(cost.busy.values()) == pytest.approx(cost.seconds)
    # States are read and written once.
    assert cost.busy["nvme"] <= 2 * cost.nvme_bytes / 2e9 * 1.05
    slow = found.cost(layout, with_host(0.85, whole, **NVME | {"nvme": "4MB/s"}))
    assert slow.bound == "nvme"
    assert slow.seconds >= 2 * cost.nvme_bytes / 2e6 * 0.95
    assert slow.nvme_bytes == cost.nvme_bytes


@pytest.mark.parametrize("layout", [LAYERS, STAGES])
def test_parameters_of_ranks_with_parts_of_their_own_go_there_too(
    found: LayoutSearch, layout: Layout
) -> None:
    whole = found.cost(layout, two_ranks())
    on = with_host(0.4, whole, **NVME)
    cost = found.cost(layout, on)
    assert cost.fits(on.machine)
    assert 0 < cost.nvme_weight_bytes < cost.nvme_bytes
    # For each micro-batch once more, forward and backward, where the device keeps little.
    tight = with_host(0.4, whole, **NVME, device_memory="700KiB")
    few, many = (
        found.cost(replace(STAGES, microbatches=count, rows=8 // count), tight) for count in (2, 8)
    )
    assert many.busy["nvme"] > few.busy["nvme"]


def test_parameters_of_several_ranks_do_not(found: LayoutSearch) -> None:
    """A session refuses that where each rank has its own; what is lacking is all without NVMe."""
    apart = {"nodes": 2, "ranks_per_node": 1, "network": "10GB/s"}
    whole = found.cost(COPIES, two_ranks(**apart))
    on = two_ranks(host_memory=int(0.3 * whole.host_bytes), **apart, **NVME)
    cost = found.cost(COPIES, on)
    assert not cost.fits(on.machine)
    assert cost.nvme_bytes == 0
    assert cost.lacking(on.machine) == whole.host_bytes - on.machine.host_bytes


def test_parameters_that_ranks_share_do_not(found: LayoutSearch) -> None:
    """All states may go there; what is lacking is the ranks' shares, and the windows."""
    whole = found.cost(COPIES, two_ranks())
    on = with_host(0.3, whole, **NVME)
    cost = found.cost(COPIES, on)
    assert not cost.fits(on.machine)
    assert cost.nvme_weight_bytes == 0
    assert cost.nvme_bytes == pytest.approx(whole.host_bytes / 2, rel=0.1)
    assert cost.host_bytes < whole.host_bytes


def test_nvme_may_be_too_small(found: LayoutSearch) -> None:
    whole = found.cost(LAYERS, two_ranks())
    on = with_host(0.85, whole, **NVME)
    needs = found.cost(LAYERS, on).nvme_bytes
    for room, fits in ((needs, True), (needs - 1, False)):
        cost = found.cost(LAYERS, with_host(0.85, whole, **NVME, nvme_memory=2 * room))
        machine = replace(on.machine, nvme_bytes=room)
        assert cost.fits(machine) is fits
        assert cost.lacking(machine) == (0 if fits else 1)


def test_a_host_that_has_not_even_the_windows_lacks_these(found: LayoutSearch) -> None:
    on = two_ranks(host_memory="100KiB", **NVME)
    cost = found.cost(LAYERS, on)
    assert not cost.fits(on.machine)
    assert cost.host_bytes < found.cost(LAYERS, two_ranks()).host_bytes
    enough = two_ranks(host_memory=2 * cost.host_bytes, **NVME)
    assert found.cost(LAYERS, enough).fits(enough.machine)


def test_updates_hold_up_first_forwards_once(found: LayoutSearch) -> None:
    """However many micro-batches follow: states are read and written once a step."""
    whole = found.cost(LAYERS, two_ranks())
    on = with_host(0.85, whole, **NVME | {"nvme": "40MB/s"})
    for count in (1, 8):
        cost = found.cost(replace(LAYERS, microbatches=count, rows=8 // count), on)
        assert cost.busy["nvme"] == pytest.approx(2 * cost.nvme_bytes / 20e6, rel=0.1)


def test_ranks_that_compute_on_the_host_have_states_there(found: LayoutSearch) -> None:
    on_host = {"device": "cpu", "link": "5GB/s"}
    for layout in (COPIES, LAYERS):
        whole = found.cost(layout, two_ranks(**on_host))
        on = with_host(0.85, whole, **on_host, **NVME)
        cost = found.cost(layout, on)
        assert cost.fits(on.machine)
        assert cost.nvme_bytes > 0 == cost.nvme_weight_bytes


# The search.


def test_a_cluster_with_nvme_and_ample_hosts_is_one_without(tmp_path: Path) -> None:
    few = search(config_file(tmp_path, num_hidden_layers=2), batch=2)
    plain, with_nvme = (few.search(two_ranks(**more)).fitting for more in ({}, NVME))
    assert plain == with_nvme


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["forward", pytest.param("none", marks=pytest.mark.whole)])
def test_the_search_finds_what_comparing_all_does(config: Path, overlap: Any) -> None:
    found = search(config, batch=2)
    found.workload = replace(found.workload, overlap=overlap)
    whole = found.cost(replace(LAYERS, rows=2), two_ranks())
    on = with_host(0.6, whole, **NVME | {"nvme": "1GB/s"}, device_memory="1MiB")
    every = [found.cost(layout, on) for layout in found.layouts(on)]
    fitting = [cost for cost in every if cost.fits(on.machine)]
    for cost in fitting:
        bounds = [*found._own_bound(cost.layout, on)]
        assert all(0 < bound <= cost.seconds for bound in bounds), cost.layout
        assert cost.nvme_bytes
    assert fitting
    simulated: list[int] = []
    shown = found.search(on, shown=2, told=lambda done, _: simulated.append(done))
    assert [cost.seconds for cost in shown.fitting] == fastest(fitting)[:2]
    assert len(simulated) < len(every)


# Plans.


def test_a_plan_puts_there_what_it_counts_on(tmp_path: Path) -> None:
    file, config = tmp_path / "plan.json", config_file(tmp_path, num_hidden_layers=2)
    short = {"host_memory": "1600KiB", "ranks_per_node": 2}
    asked = {**short, **NVME, "nvme_memory": "8MiB"}
    assert run_plan(config, tmp_path, **short).exit_code == 1
    done = run_plan(config, tmp_path, "--output", str(file), **asked)
    assert done.exit_code == 0, done.output
    assert "NVMe" in done.output
    plan = read_plan(file)
    assert plan["predicted"]["nvme_bytes"] > 0
    layout = plan["layout"]
    assert layout["host_memory"] == 800 * 1024
    assert layout["nvme_path"] == ["/mnt/nvme"]
    assert layout["nvme_memory"] == 4 * 2**20
    plugin = HybridParallelPlugin(file, device="cpu", device_memory="64MiB")
    assert plugin.config.host_bytes == 800 * 1024
    assert plugin.config.nvme_paths == (Path("/mnt/nvme"),)
    assert plugin.config.nvme_bytes == 4 * 2**20
    for name, value in {"host_memory": "1GiB", "nvme_path": "/mnt/other"}.items():
        with pytest.raises(ValueError, match=f"{name} is given beside a plan"):
            HybridParallelPlugin(file, device="cpu", **{name: value})
    figures = json.loads(run_plan(config, tmp_path, "--json", **asked).output)["fitting"][0]
    assert figures["arguments"] == layout
    assert figures["nvme_bytes"] == plan["predicted"]["nvme_bytes"]
    assert figures["busy_s"]["nvme"] > 0


def test_a_plan_without_nvme_leaves_budgets_to_the_script(tmp_path: Path) -> None:
    file, config = tmp_path / "plan.json", config_file(tmp_path, num_hidden_layers=2)
    done = run_plan(config, tmp_path, "--output", str(file), ranks_per_node=2, **NVME)
    assert done.exit_code == 0, done.output
    assert not {"host_memory", "nvme_path", "nvme_memory"} & read_plan(file)["layout"].keys()


def test_nvme_without_its_directory_is_told_of_the_file(config: Path, tmp_path: Path) -> None:
    done = run_plan(config, tmp_path, nvme="3GB/s")
    assert done.exit_code != 0
    assert "nvme_path is missing" in str(done.exception)
    assert "cluster.json" in str(done.exception)
