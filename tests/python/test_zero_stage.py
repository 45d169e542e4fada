"""ZeRO's stages: weights of which each rank keeps its part, where ranks share no memory."""

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import rank_cases
import zero_stage_cases
from rank_processes import run, succeeded
from zero_stage_cases import ON_THREE, ROUNDED, SAVED, STREAMED

Result = tuple[list[torch.Tensor], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(number of ranks, case, stage, rank) -> weights, losses and report."""

    @cache
    def directory(size: int) -> Path:
        path = tmp_path_factory.mktemp(f"stages{size}")
        scenario = zero_stage_cases.on_two if size == 2 else zero_stage_cases.on_three
        succeeded(run(scenario, size, path, timeout=600))
        return path

    def load(size: int, name: str, stage: int, rank: int) -> Result:
        result: Result = torch.load(directory(size) / f"{name}.{stage}.{rank}.pt")
        return result

    return load


@pytest.mark.parametrize("name", STREAMED)
def test_weights_in_parts_have_the_bits_of_one_process(
    name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, _, _ = rank_cases.train(STREAMED[name], range(2), steps=6)
    for rank in range(2):
        weights, _, report = trained(2, name, 3, rank)
        assert all(map(torch.equal, weights, expected))
        assert (report["zero_stage"], report["skipped_steps"]) == (3, 0)
        assert trained(2, name, 1, rank)[2]["zero_stage"] == 1


@pytest.mark.parametrize(
    ("size", "name"), [(2, name) for name in ROUNDED] + [(3, name) for name in ON_THREE]
)
def test_weights_in_parts_have_the_bits_of_whole_ones(size: int, name: str, trained: Any) -> None:
    for rank in range(size):
        weights, losses, _ = trained(size, name, 3, rank)
        expected, losses_of_whole, _ = trained(size, name, 1, rank)
        assert all(map(torch.equal, weights, expected))
        assert losses == losses_of_whole


@pytest.mark.parametrize("size", [3])
def test_a_rank_has_its_part_of_the_weights_and_a_window(size: int, tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.memory, size, tmp_path)):
        whole, parts = (tuple(map(int, line.split())) for line in output.splitlines())
        stage, host, part, window, weights, largest = parts
        assert (whole[0], stage) == (1, 3)
        assert (part, window) == (weights // size, 4 * largest + 63)
        assert host == whole[1] - weights + part + window
        assert whole[2:4] == (0, 0)


def test_a_chunk_is_read_once_for_forward_and_once_for_backward(tmp_path: Path) -> None:
    """Half of it is here; gradients and their means go each way, as at stage 1."""
    first, second = succeeded(run(zero_stage_cases.seams, 2, tmp_path))
    for mine, theirs in zip(first.splitlines(), second.splitlines(), strict=True):
        read, sent, weights = map(int, mine.split())
        read_of_me = int(theirs.split()[0])
        assert weights / 2 <= read <= 2 * weights / 2
        assert sent == weights + read_of_me


def test_one_rank_alone_reads_weights(tmp_path: Path) -> None:
    first, _ = succeeded(run(zero_stage_cases.alone, 2, tmp_path))
    assert first.split() == ["True"] * 3


def test_what_weights_in_parts_do_not_do_is_named(tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.refused, 2, tmp_path)):
        two, on_device, torchs, edit, load, address, stepped, unchanged = output.splitlines()
        assert "NotImplementedError: zero_stage=2 keeps gradients once for the ranks" in two
        assert "zero_stage=3 cuts weights that have their home on the host" in on_device
        assert "zero_stage=3 leaves each of 2 ranks its part of the weights" in torchs
        for refusal in (edit, load):
            assert "change in optimizer.step() and in loads alone" in refusal
        assert "in parts on several ranks (zero_stage=3" in address
        assert (stepped, unchanged) == ("True", "False")


def test_ranks_that_share_memory_keep_weights_once_at_every_stage(tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.in_common, 2, tmp_path)):
        assert output.splitlines() == ["3 0 True"] * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(zero_stage_cases.saves, 2, path))
    return path


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_parts_loads_on_any_number_of_ranks(size: int, saved: Path) -> None:
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


def test_a_rank_that_dies_is_named_by_who_reads_its_part(tmp_path: Path) -> None:
    first, second = run(zero_stage_cases.one_dies, 2, tmp_path)
    assert time.time() - float((tmp_path / "died").read_text()) < 60
    assert second.code == -9
    assert first.code != 0
    assert re.search(r"rank 0 of 2 lost .* that rank 1 keeps \(zero_stage=3\)", first.errors)


def test_a_rank_that_drops_its_model_answers_while_others_read(tmp_path: Path) -> None:
    for output in succeeded(run(zero_stage_cases.one_ends, 2, tmp_path)):
        assert output.split() == ["True"]


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (4, ValueError), (True, TypeError), ("3", TypeError)]
)
def test_another_stage_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"zero_stage is .*; choose 'auto', 1, 2 or 3"):
        castor.GeminiPlugin(device="cpu", zero_stage=value)


@pytest.mark.parametrize("stage", ["auto", 1, 2, 3])
def test_a_process_that_is_alone_has_all(stage: Any) -> None:
    booster, model, _ = rank_cases.boost(rank_cases.TOWER, zero_stage=stage)
    assert booster.report(model).zero_stage == 0
    assert castor.Config(device="cpu", zero_stage=stage).plugin().config.zero_stage == stage
