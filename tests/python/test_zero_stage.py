"""ZeRO's stages: gradients and weights of which each rank keeps its part, where ranks share no
memory."""

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import rank_cases
import simulated_gpu
import zero_stage_cases
from helpers import apart
from rank_processes import run, succeeded
from zero_stage_cases import AT_STAGE_TWO, ON_FOUR, ON_THREE, ROUNDED, SAVED, STREAMED, steps_of

Result = tuple[list[torch.Tensor], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(number of ranks, case, stage, rank) -> weights, losses and report."""

    @cache
    def directory(size: int) -> Path:
        path = tmp_path_factory.mktemp(f"stages{size}")
        scenario = getattr(zero_stage_cases, {2: "on_two", 3: "on_three", 4: "on_four"}[size])
        succeeded(run(scenario, size, path, timeout=600))
        return path

    def load(size: int, name: str, stage: int, rank: int) -> Result:
        result: Result = torch.load(directory(size) / f"{name}.{stage}.{rank}.pt")
        return result

    return load


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in STREAMED]
    # In CI 4 ranks with a copy of weights in parts are test_weight_copies.py's.
    + [pytest.param(4, name, marks=pytest.mark.whole) for name in ON_FOUR],
)
def test_shards_have_the_bits_of_one_process(
    size: int, name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, _, _ = rank_cases.train(STREAMED[name], range(size), steps=steps_of(name))
    for rank in range(size):
        for stage in (1, 2, 3) if name in AT_STAGE_TWO else (1, 3):
            weights, _, report = trained(size, name, stage, rank)
            assert all(map(torch.equal, weights, expected))
            assert (report["zero_stage"], report["skipped_steps"]) == (stage, 0)


@pytest.mark.parametrize(
    ("size", "name"), [(2, name) for name in ROUNDED] + [(3, name) for name in ON_THREE]
)
def test_shards_have_the_bits_of_full_weights(
    size: int, name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(size):
        expected, losses_of_whole, _ = trained(size, name, 1, rank)
        for stage in (2, 3) if name in AT_STAGE_TWO else (3,):
            weights, losses, _ = trained(size, name, stage, rank)
            assert all(map(torch.equal, weights, expected))
            assert losses == losses_of_whole
    if size == 3:  # a third is no power of two
        of_one, _, _ = rank_cases.train(STREAMED[name], range(size), steps=steps_of(name))
        assert apart(expected, of_one) <= 1e-6
        for weight, one in zip(expected, of_one, strict=True):  # Adam makes much of rounding
            assert torch.allclose(weight, one, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", simulated_gpu.SEEDS)
def test_gpus_shard_host_storage_with_the_bits_of_the_cpu_device(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated_gpu.require()
    for device in ("", f"simgpu:{seed}"):
        monkeypatch.setenv("CASTOR_TEST_DEVICE", device)
        (tmp_path / device).mkdir(exist_ok=True)
        succeeded(run(zero_stage_cases.on_gpus, 2, tmp_path / device, timeout=600))
    compared = list(tmp_path.glob("*.pt"))
    assert len(compared) >= 2 * 2 * len(zero_stage_cases.ON_GPUS)
    for path in compared:
        expected, losses, _ = torch.load(path)
        weights, its_losses, report = torch.load(tmp_path / f"simgpu:{seed}" / path.name)
        assert all(map(torch.equal, weights, expected)), path.name
        assert its_losses == losses
        stage = int(path.name.split(".")[1])
        assert report["zero_stage"] == stage
        assert (report["rank_gradient_shard_bytes"] > 0) == (stage > 1)
        assert (report["rank_shard_bytes"] > 0) == (stage == 3)


def test_copies_on_gpus_take_memory_that_is_locked_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Later steps page-lock as many copies in all as may wait at a time, not those of each step."""
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", f"simgpu:{simulated_gpu.SEEDS[0]}")
    for output in succeeded(run(zero_stage_cases.registrations, 2, tmp_path, timeout=600)):
        lines = output.splitlines()
        assert lines[::2] == ["1 True", "2 False", "3 False"]
        for line in lines[1::2]:
            assert sum(map(int, line.split())) <= zero_stage_cases.COPIES_AT_A_TIME


@pytest.mark.parametrize("device", ["", "simgpu:1"])
@pytest.mark.parametrize("size", [3])
def test_a_rank_has_its_shards_and_a_few_chunks(
    size: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if device:
        simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", device)
    for output in succeeded(run(zero_stage_cases.memory, size, tmp_path)):
        one, two, three = (tuple(map(int, line.split())) for line in output.splitlines())
        assert (one[0], two[0], three[0]) == (1, 2, 3)
        *_, whole, largest = one
        assert one[3:8] == (0, 0, 0, 0, 0)
        for stage, before, after, part, window, gradients, copies, peak, *_ in (two, three):
            weights = whole if stage == 3 else 0
            assert (part, gradients) == (weights // size, whole // size)
            assert window == (4 * largest + 63 if stage == 3 else 0)
            assert before == after == one[1] - weights - whole + part + window + gradients
            assert copies == 0
            assert largest <= peak <= 6 * largest < whole


def test_gradients_are_sent_once_and_weights_as_they_are_read(tmp_path: Path) -> None:
    """Half of each chunk is here; the other rank gets its half of this one's gradients."""
    first, second = succeeded(run(zero_stage_cases.seams, 2, tmp_path))
    for mine, theirs in zip(first.splitlines(), second.splitlines(), strict=True):
        stage, read, sent, weights, chunks, params = map(int, mine.split())
        read_of_me = int(theirs.split()[1])
        norm = chunks * 17 * 8 + params * 8
        if stage == 2:
            assert read == 0
            assert sent == weights // 2 + weights // 2 + norm
        else:  # once for forward, once for backward
            assert weights / 2 <= read <= 2 * weights / 2
            assert sent == weights // 2 + read_of_me + norm


@pytest.mark.smoke
def test_sharded_gradients_are_read_written_and_accumulated(tmp_path: Path) -> None:
    outputs = succeeded(run(zero_stage_cases.gradients, 2, tmp_path))
    for rank, output in enumerate(outputs):
        *stages, overflow, no_room = output.splitlines()
        for stage, line in enumerate(stages, 1):
            whole, left, of_model, address = line.split(maxsplit=3)
            assert (int(whole), int(left)) == (int(of_model) if stage > 1 else 0, 0)
            said = "sharded over ranks (zero_stage=2 or 3" if stage > 1 else "nothing was"
            assert said in address
            expected = torch.load(tmp_path / f"gradients.1.{rank}.pt")
            found = torch.load(tmp_path / f"gradients.{stage}.{rank}.pt")
            assert torch.equal(found[1], expected[1])
            for part in (0, 2, 3):
                assert all(map(torch.equal, found[part], expected[part]))
        assert stage == 3
        assert overflow == f"1 {2.0**16}"
        assert "OutOfMemoryError" in no_room
        assert "all chunks' under no_sync" in no_room


def test_gradients_are_read_beside_backward(tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.read_beside_backward, 2, tmp_path)):
        assert output.split() == ["True"] * 6


def test_a_pass_that_failed_is_run_again_by_all_ranks_or_none(tmp_path: Path) -> None:
    """What the others have of it on one rank alone would count twice."""
    told = (
        "UsageError: a backward pass has failed on rank 1 and not on rank 0, which had a part of "
        "its gradients by then"
    )
    for output in succeeded(run(zero_stage_cases.fails_in_backward, 2, tmp_path)):
        over_the_group, same, shared, same_shared = output.splitlines()
        assert over_the_group.startswith(told)
        assert shared.startswith(told)
        assert same == same_shared == "True"


def test_what_sharded_weights_do_not_do_is_named(tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.refused, 2, tmp_path)):
        lines = output.splitlines()
        on_device, torchs_of_two, torchs, edit, load, address, stepped, unchanged = lines
        assert "zero_stage=3 shards weights that have host storage" in on_device
        assert "zero_stage=2 leaves each of 2 ranks its shard of the gradients" in torchs_of_two
        assert "zero_stage=3 leaves each of 2 ranks its shard of the weights and gr" in torchs
        for refusal in (edit, load):
            assert "change in optimizer.step() and in loads alone" in refusal
        assert "sharded over ranks (zero_stage=3" in address
        assert (stepped, unchanged) == ("True", "False")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(zero_stage_cases.saves, 2, path))
    return path


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_shards_loads_on_any_number_of_ranks(size: int, saved: Path) -> None:
    succeeded(run(zero_stage_cases.goes_on, size, saved))
    for name in SAVED:
        whole = [torch.load(saved / f"{name}.{rank}.pt") for rank in range(2)]
        again = [torch.load(saved / f"{name} again.{rank}.pt") for rank in range(2)]
        for weights in (*whole, *again):
            assert all(map(torch.equal, weights, whole[0]))
        loaded = [torch.load(saved / f"{name} on {size}.{rank}.pt") for rank in range(size)]
        for weights, after in loaded:
            assert all(map(torch.equal, weights, loaded[0][0]))
            assert all(map(torch.equal, weights, torch.load(saved / f"{name} as saved.0.pt")))
            for weight, expected in zip(after, whole[0], strict=True):
                assert torch.equal(weight, expected) or size == 3  # a third is no power of two
                assert torch.allclose(weight.float(), expected.float(), rtol=1e-2, atol=1e-3)


def test_a_rank_that_dies_is_noticed_by_who_reads_its_shard(tmp_path: Path) -> None:
    first, second, third = run(zero_stage_cases.one_dies, 3, tmp_path)
    assert time.time() - float((tmp_path / "died").read_text()) < 60
    assert second.code == -9
    for rank, outcome in ((0, first), (2, third)):  # neither waits for the other at the end
        assert outcome.code != 0
        assert f"rank {rank} of 3 lost the" in outcome.output
        said = (
            rf"rank {rank} of 3 lost the part .* keeps \(zero_stage=3\): (.*)\. A rank that failed"
        )
        assert re.search(said, outcome.errors), outcome.errors


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (4, ValueError), (True, TypeError), ("3", TypeError)]
)
def test_another_stage_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"zero_stage is .*; choose one of 'auto', 1, 2, 3"):
        castor.GeminiPlugin(device="cpu", zero_stage=value)


@pytest.mark.parametrize("stage", ["auto", 1, 2, 3])
def test_a_process_that_is_alone_has_all(stage: Any) -> None:
    booster, model, _ = rank_cases.boost(rank_cases.TOWER, zero_stage=stage)
    assert booster.report(model).zero_stage == 0
    assert castor.Config(device="cpu", zero_stage=stage).plugin().config.zero_stage == stage
