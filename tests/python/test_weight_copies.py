"""Several copies of weights in parts (HSDP), of ranks that share no memory."""

import itertools
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import rank_cases
import weight_copies_cases as cases
from rank_processes import run, succeeded
from weight_copies_cases import FP32, NUM_COPIES, SAVED, SIZE
from zero_stage_cases import steps_of


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, copies, rank) -> weights, losses and report."""

    @cache
    def directory() -> Path:
        path = tmp_path_factory.mktemp("copies")
        succeeded(run(cases.trained, SIZE, path, timeout=600))
        return path

    return lambda *key: torch.load(directory() / "{}.{}.{}.pt".format(*key))


@pytest.mark.parametrize("name", FP32)
def test_copies_have_the_bits_of_one_process(
    name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, _, _ = rank_cases.train(FP32[name], range(SIZE), steps=steps_of(name))
    for num_copies, rank in itertools.product(NUM_COPIES[name], range(SIZE)):
        weights, _, report = trained(name, num_copies, rank)
        assert same(weights, expected)
        assert (report["zero_stage"], report["skipped_steps"]) == (3, 0)


def test_weights_are_read_of_a_copy_and_updated_shards_exchanged(tmp_path: Path) -> None:
    """To the byte: of W bytes of weights, k copies on n ranks, W/n for each of k - 1 copies."""
    outputs = succeeded(run(cases.seams, SIZE, tmp_path))
    for lines in zip(*(output.splitlines() for output in outputs), strict=True):
        ranks = [tuple(map(int, line.split())) for line in lines]
        num_copies, _, _, weights, chunks, params = ranks[0]
        of_copy = SIZE // num_copies
        norm = (SIZE - 1) * (136 * (SIZE - 1) * chunks + 8 * params)
        gradients = (SIZE - 1) * weights // SIZE
        exchanged = (num_copies - 1) * weights // SIZE
        assert sum(sent for _, _, sent, *_ in ranks) == sum(
            norm + gradients + read for _, read, *_ in ranks
        )
        for _, read, sent, *_ in ranks:
            once = (of_copy - 1) * weights // of_copy
            assert once <= read - exchanged <= 3 * once  # forward, backward and copies()
            assert sent >= norm + gradients + exchanged
            if of_copy == 1:
                assert (read, sent) == (exchanged, norm + gradients + exchanged)
        if of_copy == 2:  # of the neighbour alone
            for first in (0, 2):
                (_, read, sent, *_), (_, theirs, others, *_) = ranks[first : first + 2]
                assert sent == norm + gradients + theirs
                assert others == norm + gradients + read


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(cases.saves, SIZE, path))
    return path


def test_a_load_reaches_all_copies(saved: Path) -> None:
    for name, num_copies, rank in itertools.product(SAVED, (1, 2), range(SIZE)):
        expected = torch.load(saved / f"{name} 1.0.pt")
        assert same(torch.load(saved / f"{name} {num_copies}.{rank}.pt"), expected)
        assert same(torch.load(saved / f"{name} {num_copies} again.{rank}.pt"), expected)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.whole), SIZE])
def test_a_checkpoint_does_not_depend_on_copies(size: int, saved: Path) -> None:
    succeeded(run(cases.goes_on, size, saved))
    for name, before, after in itertools.product(SAVED, (1, 2), (1, 2) if size > 1 else (1,)):
        expected = torch.load(saved / f"{name} 1.0.pt")
        for rank in range(size):
            found = torch.load(saved / f"{name} {before} on {size}, {after}.{rank}.pt")
            assert same(found, expected)


def test_when_a_rank_dies_all_end(tmp_path: Path) -> None:
    outcomes = run(cases.one_dies, SIZE, tmp_path)
    assert time.time() - float((tmp_path / "died").read_text()) < 60
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            assert outcome.code == -9
        else:
            assert outcome.code > 0
            assert f"Error: rank {rank} of 4 lost the" in outcome.output
    of_its_copy = "rank 0 of 4 lost the part of the weights that rank 1 keeps (zero_stage=3)"
    assert of_its_copy in outcomes[0].errors


def test_what_goes_without_copies_is_named(tmp_path: Path) -> None:
    for output in succeeded(run(cases.refused, SIZE, tmp_path)):
        *stages, numbers, different, torchs = output.splitlines()
        for said in stages:
            assert said.startswith("UsageError: extra_dp_size=2 says how many copies of the weight")
            assert said.endswith("give zero_stage=3, or extra_dp_size=1")
        assert numbers.startswith("ValueError: extra_dp_size=3")
        assert "of 4 ranks" in numbers
        assert "differ in extra_dp_size: 1 and 2" in different
        assert "NotImplementedError: zero_stage=3 leaves each of 4 ranks" in torchs


def test_ranks_that_share_memory_have_one_copy(tmp_path: Path) -> None:
    for output in succeeded(run(cases.in_common, 2, tmp_path)):
        for said in output.splitlines():
            assert "UsageError: extra_dp_size=2 asks for as many copies" in said
            assert "these 2 ranks keep 1: one on each machine" in said


def test_each_machine_has_a_copy(tmp_path: Path) -> None:
    """In memory that its ranks share, or with zero_stage=3 in parts."""
    cases.one_process(tmp_path)
    expected = torch.load(tmp_path / "one.pt")
    for rank, output in enumerate(succeeded(run(cases.on_machines, SIZE, tmp_path, nodes=2))):
        auto, one, three, four_copies, of_gradients = output.splitlines()
        assert (auto, one) == ("1 True 0.0", "1 True 0.0")
        assert three == "3 False 0.5"
        assert "these 4 ranks keep 2: one on each machine" in four_copies
        assert "UsageError: extra_dp_size=2 says how many copies" in of_gradients
        for stage in ("auto", 1, 3):
            assert same(torch.load(tmp_path / f"{stage}.{rank}.pt"), expected)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_another_number_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="extra_dp_size"):
        castor.GeminiPlugin(device="cpu", extra_dp_size=value)


def test_a_process_that_is_alone_has_one_copy() -> None:
    with pytest.raises(ValueError, match=r"extra_dp_size=2 .* start a multiple of 2 ranks"):
        rank_cases.boost(rank_cases.TOWER, zero_stage=3, extra_dp_size=2)
    assert castor.Config(device="cpu", extra_dp_size=2).plugin().config.extra_dp_size == 2


def test_a_plugin_with_whole_weights_names_it() -> None:
    castor.LowLevelZeroPlugin(device="cpu", extra_dp_size=1)
    with pytest.raises(NotImplementedError, match=r"extra_dp_size may only be 1 .*zero_stage=3"):
        castor.LowLevelZeroPlugin(device="cpu", extra_dp_size=2)
