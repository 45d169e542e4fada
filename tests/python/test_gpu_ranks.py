"""Several ranks on GPUs: the bits of ranks on the CPU device, and of one process.

On the simulated GPU each rank has one of its own. Where there is a real one, it is every rank's.
"""

import ast
import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import gpu_rank_cases
import low_level_zero_cases
import rank_cases
import simulated_gpu
from castor.estimate import machine as machine_figures
from castor.estimate import simulator
from castor.plugins import machine
from castor.runtime.spec import ModelSpec
from gpu_rank_cases import EXACT, ON_FOUR, SOME_CLOSE, SOME_EXACT
from grids import some
from rank_processes import finish, run, start, succeeded
from zoo import tower

pytestmark = pytest.mark.slow

SIMULATED = [f"simgpu:{seed}" for seed in simulated_gpu.SEEDS]
CPU = ""
Result = tuple[list[torch.Tensor], list[float], dict[str, Any]]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says where processes that are started from now on compute."""

    def choose(device: str) -> None:
        if device == CPU:
            monkeypatch.delenv("CASTOR_TEST_DEVICE", raising=False)
            return
        if device != "cuda":
            simulated_gpu.require()
        monkeypatch.setenv("CASTOR_TEST_DEVICE", device)

    return choose


@pytest.fixture(params=SIMULATED)
def simgpu(request: pytest.FixtureRequest, on: Callable[[str], None]) -> str:
    on(request.param)
    device: str = request.param
    return device


def run_on_both(
    scenario: Callable[[Path], None], simgpu: str, on: Callable[[str], None], path: Path
) -> None:
    """Runs a scenario of two ranks, on the CPU device in `path` and on GPUs in a folder of it."""
    for device in (CPU, simgpu):
        on(device)
        (path / device).mkdir(exist_ok=True)
        succeeded(run(scenario, 2, path / device))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(device, number of ranks, case, rank) -> weights, losses and report; rank None: alone."""

    @cache
    def directory(device: str, size: int, alone: bool) -> Path:
        path = tmp_path_factory.mktemp("ranks")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CASTOR_TEST_DEVICE", device)
            if device == CPU:
                patch.delenv("CASTOR_TEST_DEVICE")
            patch.setenv("TAKEN", str(size))
            patch.setenv("CASES", "|".join(_cases(device, size, alone)))
            scenario = gpu_rank_cases.alone if alone else gpu_rank_cases.each
            succeeded(run(scenario, 1 if alone else size, path, timeout=900))
        return path

    def load(device: str, size: int, name: str, rank: int | None) -> Result:
        suffix = "" if rank is None else f".{rank}"
        path = directory(device, size, rank is None) / f"{name}{suffix}.pt"
        result: Result = torch.load(path)
        return result

    return load


def _cases(device: str, size: int, alone: bool) -> list[str]:
    """Those that are compared."""
    if device == "cuda":
        return list(ON_A_REAL_ONE)
    cases = [*SOME_EXACT, *SOME_CLOSE] if size == 2 else ON_FOUR
    return [name for name in cases if name in EXACT or not alone]


ON_A_REAL_ONE = ("ample", "tight", "one rank tight", "all on the device")
SIZES = [*((2, name) for name in SOME_EXACT), *((4, name) for name in ON_FOUR if name in EXACT)]


@pytest.mark.parametrize(("size", "name"), SIZES)
def test_weights_have_the_bits_of_one_process(
    size: int, name: str, simgpu: str, trained: Any
) -> None:
    expected, _, _ = trained(CPU, size, name, None)
    for rank in range(size):
        weights, _, _ = trained(simgpu, size, name, rank)
        assert all(map(torch.equal, weights, expected))


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", ON_A_REAL_ONE)
def test_weights_have_the_bits_of_one_process_on_a_real_gpu(
    name: str, on: Callable[[str], None], trained: Any
) -> None:
    on("cuda")
    expected, _, _ = trained("cuda", 2, name, None)
    for rank in range(2):
        weights, _, _ = trained("cuda", 2, name, rank)
        assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(
    ("size", "name"),
    [*((2, name) for name in (*SOME_EXACT, *SOME_CLOSE)), *((4, name) for name in ON_FOUR)],
)
def test_weights_and_losses_have_the_bits_of_ranks_on_the_cpu_device(
    size: int, name: str, simgpu: str, trained: Any
) -> None:
    for rank in range(size):
        weights, losses, report = trained(simgpu, size, name, rank)
        expected, expected_losses, _ = trained(CPU, size, name, rank)
        assert all(map(torch.equal, weights, expected))
        assert losses == expected_losses
        assert report["skipped_steps"] == 0


def test_ranks_have_whole_chunks_on_the_device_where_there_is_room(
    simgpu: str, trained: Any
) -> None:
    """And move them where there is none: what the tests above compare is both."""
    for overlap in ("", ", overlap none"):
        for rank in range(2):
            _, _, ample = trained(simgpu, 2, f"ample{overlap}", rank)
            _, _, tight = trained(simgpu, 2, f"tight{overlap}", rank)
            _, _, mixed = trained(simgpu, 2, f"one rank tight{overlap}", rank)
            assert ample["resident_chunks"] == ample["num_chunks"]
            assert tight["resident_chunks"] < tight["num_chunks"]
            assert tight["h2d_bytes"] > ample["h2d_bytes"]
            assert mixed["resident_chunks"] == (tight if rank == 1 else ample)["resident_chunks"]
        for name in ("tight", "one rank tight"):
            _, _, report = trained(simgpu, 2, f"{name}{overlap}", 1)
            assert report["peak_device_bytes"] <= report["device_budget_bytes"] < 2**20


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_machine_has_host_storage_once(size: int, simgpu: str, tmp_path: Path) -> None:
    """2 + 2 bytes a parameter for all ranks, 10 of states in shards, and a window a rank.

    To the byte what castor estimate and castor plan count.
    """
    del simgpu
    outputs = succeeded(run(gpu_rank_cases.host_bytes, size, tmp_path))
    figures = [[int(figure) for figure in output.splitlines()[0].split()] for output in outputs]
    _, shared, elements, chunks = figures[0]
    padding = chunks * 4096
    assert 4 * elements <= shared <= 4 * elements + 2 * padding
    window = 8 << 10
    total = sum(on_host for on_host, *_ in figures)
    assert 14 * elements <= total <= 14 * elements + 2 * padding + size * (window + padding)
    planned = simulator.lay_out(
        ModelSpec.of(tower().to(torch.bfloat16)),
        "bf16",
        "split",
        "adam",
        num_ranks=size,
        chunk_bytes=8 << 10,
    ).places(simulator.places(machine_figures("h100"), ranks_sharing=size))
    assert {on_host for on_host, *_ in figures} == {planned["host_bytes"]}
    for output in outputs:
        assert output.splitlines()[1] == "memory that the ranks of this machine share"


def test_ranks_that_may_not_lock_shared_memory_have_their_own_and_say_so(
    simgpu: str, tmp_path: Path
) -> None:
    del simgpu
    for output in succeeded(run(gpu_rank_cases.refused_pages, 2, tmp_path)):
        assert output.startswith(
            "0 memory that the ranks of this machine share, but not host storage: each rank has "
            "its own, page-locked, as page-locking "
        )
        assert "failed: cudaErrorMemoryAllocation" in output


def test_ranks_that_may_lock_next_to_nothing_are_told_so(simgpu: str, tmp_path: Path) -> None:
    del simgpu
    for output in succeeded(run(gpu_rank_cases.little_to_lock, 2, tmp_path)):
        assert "out of host memory" in output


def test_weights_that_outlive_castor_are_each_ranks_own(simgpu: str, tmp_path: Path) -> None:
    del simgpu
    for output in succeeded(run(gpu_rank_cases.outlives, 2, tmp_path)):
        assert output.split() == ["True", "True"]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_on_the_gpus_have_the_hosts_bits_and_a_backends_are_near(
    size: int, simgpu: str, tmp_path: Path
) -> None:
    """Both take less memory of the host."""
    del simgpu
    outputs = succeeded(run(gpu_rank_cases.reductions, size, tmp_path, timeout=900))
    for rank, output in enumerate(outputs):
        found = json.loads((tmp_path / f"reductions{rank}.json").read_text())
        weights = torch.load(tmp_path / f"reductions{rank}.pt")
        assert found.keys() == gpu_rank_cases.REDUCED_ON[size].keys()
        for name, by in found.items():
            ordered, on_device, backend = (by[how] for how in gpu_rank_cases.REDUCTIONS)
            near = 1e-5 if name.startswith("fp32") else 2e-2
            assert backend["losses"] == pytest.approx(ordered["losses"], rel=near), name
            assert on_device["losses"] == ordered["losses"], name
            in_order = weights[name]["on the device"], weights[name]["ordered"]
            assert all(map(torch.equal, *in_order)), name
            of_order = ordered["report"]
            assert (of_order["reduction"], of_order["device_link"]) == ("ordered", "")
            assert of_order["reduced_on"] == "host: as asked for"
            for reduction, of_other in (("ordered", on_device), ("backend", backend)):
                report = of_other["report"]
                assert (report["reduction"], report["device_link"]) == (reduction, "simnccl")
                assert (report["reduced_on"], report["communicator_bytes"]) == ("device", 16 << 20)
                assert report["host_bytes"] < of_order["host_bytes"], name
                sent, sent_in_order = report["rank_sent_bytes"], of_order["rank_sent_bytes"]
                if report["resident_chunks"]:  # of these, means and weights go to all GPUs
                    assert sent >= sent_in_order, name
                elif report["zero_stage"] == 3:  # weights that others read are counted too
                    assert sent == pytest.approx(sent_in_order, rel=0.1), name
                else:
                    assert sent == sent_in_order, name
                assert report["zero_stage"] == of_order["zero_stage"]
        said = [line for line in output.splitlines() if "added by simnccl" in line]
        assert len(said) == len(found)


def test_gpus_of_several_machines_add_up_in_the_hosts_order(
    on: Callable[[str], None], tmp_path: Path
) -> None:
    on(SIMULATED[0])
    succeeded(run(gpu_rank_cases.on_machines, 4, tmp_path, nodes=2, timeout=900))
    for rank in range(4):
        found = torch.load(tmp_path / f"machines{rank}.pt")
        for name in gpu_rank_cases.ON_MACHINES:
            in_order = found[name, "on the device"], found[name, "ordered"]
            assert all(map(torch.equal, *in_order)), name


def test_sharded_gradients_stay_where_they_are_while_a_kernel_reads_them(
    simgpu: str, tmp_path: Path
) -> None:
    """The copy that an operator reads is the next one's only when the device has read it."""
    del simgpu
    succeeded(run(gpu_rank_cases.reads_gradients, 2, tmp_path))
    (expected, *sharded), of_other = (torch.load(tmp_path / f"read{rank}.pt") for rank in range(2))
    for values in (*sharded, *of_other):
        assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("size", [2, 4])
def test_gpus_reduce_gradients_before_they_go_to_the_host(
    size: int, simgpu: str, tmp_path: Path
) -> None:
    """1/n of each chunk's, counted at the device's copies; the host's sums take all, twice."""
    del simgpu
    succeeded(run(gpu_rank_cases.gathers, size, tmp_path, timeout=900))
    for rank in range(size):
        found = torch.load(tmp_path / f"gathers{rank}.pt")
        assert found.keys() == gpu_rank_cases.STORED.keys()
        for place, by in found.items():
            shards = sum(chunk // size for chunk in by["chunks"])
            assert len(by["chunks"]) > 3
            # A rank that waits a quarter of a second for a slower one sends a chunk to the host.
            ordered, on_device, backend = (
                min(by[how], key=lambda one: one["to_host"]) for how in gpu_rank_cases.REDUCTIONS
            )
            assert backend == on_device == {"to_host": shards, "told": shards, "back": 0}, place
            assert ordered["to_host"] >= (size - 0.5) * shards, place
            losses, in_order, by_backend = by["losses"]
            assert in_order == losses, place
            assert by_backend == pytest.approx(losses, rel=1e-5), place
            weights, in_order, by_backend = by["weights"]
            assert all(map(torch.equal, weights, in_order)), place
            if size == 2:  # a sum of two has the same bits in each order
                assert all(map(torch.equal, weights, by_backend)), place


def test_gradients_that_gather_are_what_they_are_on_the_host(simgpu: str, tmp_path: Path) -> None:
    """Of two ranks a sum has the same bits in each order."""
    del simgpu
    succeeded(run(gpu_rank_cases.gathers_in_each_way, 2, tmp_path, timeout=900))
    succeeded(run(gpu_rank_cases.gathers_in_models, 2, tmp_path, timeout=900))
    for path in (*tmp_path.glob("ways*.pt"), *tmp_path.glob("models*.pt")):
        found = torch.load(path)
        for (place, way, how), values in found.items():
            expected = found[next(iter(found))[0] if "ways" in path.name else place, way, "ordered"]
            assert len(values) == len(expected)
            assert all(map(torch.equal, values, expected)), (place, way, how)
    assert len(list(tmp_path.glob("*.pt"))) == 4


@pytest.mark.parametrize("where", ["the CPU device", "the host's link"])
def test_sums_on_gpus_need_a_backend(
    where: str, on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on(CPU if where == "the CPU device" else SIMULATED[0])
    monkeypatch.setenv("CASTOR_DEVICE_LINK", "host")
    reason = "device is the CPU" if where == "the CPU device" else "send through host memory"
    for output in succeeded(run(gpu_rank_cases.added_by_nobody, 2, tmp_path)):
        backend, on_device, auto, reduced_on = output.splitlines()
        assert backend.startswith("UsageError: reduction='backend' has the backend between the")
        assert on_device.startswith("UsageError: reduce_on='device' has the ranks' GPUs reduce")
        assert reason in backend
        assert reason in on_device
        assert auto == "nothing was raised"
        assert reduced_on.startswith("host: ")
        assert reason in reduced_on


def test_auto_reduces_on_gpus_where_that_takes_an_eighth_of_their_memory(
    simgpu: str, tmp_path: Path
) -> None:
    """At most, on every rank."""
    del simgpu
    on_device = "device simnccl 16777216 True"
    for output in succeeded(run(gpu_rank_cases.chosen, 2, tmp_path)):
        asked, least, fits, too_large, on_one, required = output.splitlines()
        assert fits == required == on_device
        assert asked == "host: as asked for  0 False"
        assert too_large == on_one
        assert re.fullmatch(
            rf"host: on the devices it takes [\d.]+ MiB \({least} bytes\) of device_memory, and "
            rf"reduce_on='auto' takes no more than [\d.]+ MiB \({int(least) - 1} bytes\)  0 False",
            too_large,
        )


def test_communicators_of_a_model_that_is_gone_end_on_all_ranks_together(
    simgpu: str, tmp_path: Path
) -> None:
    """With a later boost, and not before every rank has collected the model."""
    del simgpu
    alone, with_another = "16 16 2", "16 32 4"
    for output in succeeded(run(gpu_rank_cases.boosts_again, 2, tmp_path)):
        assert output.splitlines() == [alone, alone, with_another, alone, alone, "[]"]


@pytest.mark.parametrize("reduced", ["on the device", "backend"])
@pytest.mark.parametrize(("how", "said"), [("killed", "has ended"), ("stopped", "is stopped")])
def test_a_rank_that_is_lost_beside_sums_on_gpus_is_named(
    how: str,
    said: str,
    reduced: str,
    simgpu: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    del simgpu
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("HOW_REDUCED", reduced)
    ranks = start(gpu_rank_cases.one_ends_beside_sums, 2, tmp_path)
    try:
        assert ranks[0].wait(60) != 0
    finally:
        if not ranks[1].over():
            os.kill(ranks[1].pid, signal.SIGKILL)
        outcomes = finish(ranks)
    assert re.search(rf"rank 1 \(process \d+\) {said}", outcomes[0].errors), outcomes[0].errors


def test_bytes_sent_are_counted(simgpu: str, trained: Any) -> None:
    """(n-1)/n of gradients once, in a step; of weights nothing, where chunks are streamed.

    Of resident chunks, which GPUs reduce, gradients come to all ranks, and weights too.
    """
    for size in (2, 4):
        for name, least, most in (("ample", 1.1, 3.3), ("tight", 0.9, 1.1)):
            weights, _, report = trained(simgpu, size, name, 0)
            assert (report["reduced_on"] == "device") == (name == "ample")
            sent = report["rank_sent_bytes"] / gpu_rank_cases.STEPS
            parameters = sum(weight.nbytes for weight in weights)
            assert least <= sent * size / (size - 1) / parameters <= most, (size, name)


def test_gradients_that_are_not_finite_on_one_rank_skip_the_step_on_all(
    simgpu: str, tmp_path: Path
) -> None:
    del simgpu
    outputs = succeeded(run(gpu_rank_cases.overflows, 2, tmp_path, timeout=900))
    assert outputs[0] == outputs[1]
    cases = [line.split("|") for line in outputs[0].splitlines()]
    assert len(cases) == 2 * len(gpu_rank_cases.OVERFLOWING) * len(gpu_rank_cases.REDUCTIONS)
    for precision, memory, how, said in cases:
        steps = ast.literal_eval(said)
        skips = [same for same, _, _ in steps]
        assert [skipped for _, skipped, _ in steps] == list(itertools.accumulate(skips))
        # 2^18 and 2^17 are no numbers in fp16, in which a loss of 2 times 2^16 is infinite.
        scales = [scale for _, _, scale in steps]
        if precision == "fp32":
            assert (skips, scales) == ([step == 4 for step in range(6)], [1.0] * 6), (memory, how)
        else:
            assert skips[0], (memory, how)
            assert not all(skips[:4]), (memory, how)
            assert skips[4], (memory, how)
            halved = [2.0**18 / 2 ** sum(skips[: i + 1]) for i in range(6)]
            assert scales == halved, (memory, how)
    for rank in range(2):
        weights = torch.load(tmp_path / f"overflows{rank}.pt")
        for (precision, memory, how), found in weights.items():
            expected = weights[precision, memory, "ordered"]
            assert all(map(torch.equal, found, expected)), (precision, memory, how)


def test_what_a_loop_writes_and_reads_itself_is_what_it_is_on_the_cpu_device(
    simgpu: str, on: Callable[[str], None], tmp_path: Path
) -> None:
    run_on_both(gpu_rank_cases.edits_and_clips, simgpu, on, tmp_path)
    for path in tmp_path.glob("*.pt"):
        expected, _ = torch.load(path)
        found, _ = torch.load(tmp_path / simgpu / path.name)
        assert all(map(torch.equal, found, expected))
    assert len(list(tmp_path.glob("*.pt"))) == 8


@pytest.fixture
def saved(simgpu: str, tmp_path: Path) -> Path:
    """What two ranks on GPUs have saved, and where they went from there."""
    del simgpu
    for output in succeeded(run(rank_cases.saves, 2, tmp_path)):
        assert "missing" in output
    return tmp_path


def test_a_checkpoint_of_two_goes_on_on_other_numbers_of_ranks_and_the_cpu_device(
    saved: Path, on: Callable[[str], None]
) -> None:
    assert succeeded(run(rank_cases.loads, 2, saved)) == ["3\n"] * 2
    for rank in range(2):
        expected = torch.load(saved / f"weights.{rank}.pt")
        assert all(map(torch.equal, torch.load(saved / f"loaded.{rank}.pt"), expected))
    went_on = {}
    for device in (os.environ["CASTOR_TEST_DEVICE"], CPU):
        on(device)
        for size in some((1, 3), 3):
            assert succeeded(run(rank_cases.loads, size, saved)) == ["3\n"] * size
            went_on[device, size] = torch.load(saved / f"loaded.{size - 1}.pt")
    for (_, size), weights in went_on.items():
        assert all(map(torch.equal, weights, went_on[CPU, size]))


@pytest.mark.parametrize(
    ("phase", "victim"),
    [("backward", 0), pytest.param("step", 1, marks=pytest.mark.whole), ("save", 1)],
)
def test_a_rank_that_is_killed_is_named(
    phase: str, victim: int, simgpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del simgpu
    monkeypatch.setenv("VICTIM", str(victim))
    monkeypatch.setenv("PHASE", phase)
    outcomes = run(rank_cases.one_dies_at, 2, tmp_path)
    assert outcomes[victim].code == -9
    assert outcomes[1 - victim].code != 0
    assert re.search(
        rf"Error: rank {1 - victim} of 2 lost the others: rank {victim} \(process \d+\) has ended",
        outcomes[1 - victim].errors,
    ), outcomes[1 - victim].errors


def test_ranks_that_do_different_things_are_both_named(simgpu: str, tmp_path: Path) -> None:
    del simgpu
    for output in succeeded(run(rank_cases.one_passes_more, 2, tmp_path)):
        assert (
            "rank 0 ends backward pass 2 of step 1, while rank 1 calls optimizer.step()" in output
        )


def test_ranks_on_one_gpu_are_named(simgpu: str, tmp_path: Path) -> None:
    del simgpu
    both = "ranks 0 and 1 compute on one GPU (GPU-1), and their device_memory comes to 2.00 GiB"
    for output in succeeded(run(gpu_rank_cases.shares_a_gpu, 2, tmp_path)):
        boosted, warned, refused, _ = output.split("\n")[:4]
        assert boosted == "nothing was raised"
        assert warned.startswith(f"{both}; they wait for each other there")
        assert refused.startswith(f"UsageError: {both} of the 2.00 GiB that it has: start as many")


def test_ranks_with_parts_of_a_model_on_one_gpu_are_named(simgpu: str, tmp_path: Path) -> None:
    del simgpu
    both = "UsageError: ranks 0 and 1 compute on one GPU (GPU-1), and their device_memory"
    for output in succeeded(run(gpu_rank_cases.divided_on_a_gpu, 2, tmp_path)):
        assert [line[: len(both)] for line in output.splitlines()] == [both] * 3


def test_stages_of_low_level_zero_have_the_bits_of_the_cpu_device(
    simgpu: str, on: Callable[[str], None], tmp_path: Path
) -> None:
    run_on_both(gpu_rank_cases.low_level_zero, simgpu, on, tmp_path)
    for path in tmp_path.glob("*.pt"):
        expected, found = torch.load(path), torch.load(tmp_path / simgpu / path.name)
        assert all(map(torch.equal, found, expected)), path.name
    weights = sum(param.numel() * 4 for param in low_level_zero_cases.CASE.build().parameters())
    for rank in range(2):
        reports = json.loads((tmp_path / simgpu / f"each{rank}.json").read_text())
        for name in ("stage 1, offloaded", "stage 2, offloaded"):
            assert reports[name]["rank_shared_bytes"] == pytest.approx(2 * weights, rel=0.03)


@pytest.mark.parametrize(
    ("environment", "gpus", "asked", "expected"),
    [
        ({}, 4, "cuda", "cuda:2"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, "cuda", "cuda:3"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, None, "cuda:3"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, "cuda:1", "cuda:1"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 1, "cuda", "cuda:0"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 4, "cuda", "cuda:2"),
    ],
)
def test_a_rank_computes_on_the_gpu_of_its_number(
    environment: dict[str, str],
    gpus: int,
    asked: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone on torch's current one; where each rank is shown one GPU, on that."""
    current = _gpus(gpus, environment, monkeypatch)
    assert machine.choose_device(asked) == torch.device(expected)
    if environment.get("LOCAL_WORLD_SIZE") == "4" and asked != "cuda:1":
        assert current == [int(expected[-1])]


def test_more_ranks_than_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, monkeypatch)
    message = "4 ranks were started on this machine, and torch finds 2 GPUs: start 2"
    with pytest.raises(castor.UsageError, match=message):
        machine.choose_device("cuda")


def _gpus(count: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if torch found so many, the third its current one; returns what becomes that."""
    current: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    size = environment.get("LOCAL_WORLD_SIZE", "1")
    for name, value in {"RANK": "0", "WORLD_SIZE": size, **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "check_cuda", lambda _: None)
    monkeypatch.setattr(machine, "load_cuda", lambda: None)
    for name, function in {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 2,
        "set_device": current.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return current
