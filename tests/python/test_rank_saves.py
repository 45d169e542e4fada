"""Checkpoints that ranks write together: one process's bytes, at once and beside the training."""

from pathlib import Path

import pytest

import rank_save_cases
from rank_processes import run, succeeded
from rank_save_cases import OVERLAPS, SAVED, SIZES
from test_async_saves import contents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SIZES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(rank_save_cases.beside, request.param, path, timeout=400))
    return path


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", SAVED)
def test_all_write_what_one_wrote_alone(name: str, overlap: str, saved: Path) -> None:
    directory = saved / f"{name}, {overlap}"
    alone, together, beside = (contents(directory / how) for how in ("alone", "together", "beside"))
    assert together == alone
    assert beside == alone
    for part in ("model", "optimizer"):
        assert contents(directory / part) == contents(directory / f"{part} alone")


@pytest.mark.smoke
def test_what_one_rank_cannot_write_all_say(tmp_path: Path) -> None:
    for output in succeeded(run(rank_save_cases.fails, 2, tmp_path)):
        first, second, under_way, step = output.splitlines()
        for line, number in ((first, 2), (second, 3)):
            path = tmp_path / "run" / f"step-0000000{number}"
            assert line.startswith(f"IoError: [Errno 28] cannot write {path}: No space left")
        assert (under_way, step) == ("False", "1")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "run"]
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["step-00000001"]


def test_ranks_that_save_or_load_different_things_say_so_and_change_nothing(
    tmp_path: Path,
) -> None:
    outputs = succeeded(run(rank_save_cases.differ, 2, tmp_path))
    differing = (
        f"the directory of a run that is saved: {tmp_path}/run0 and {tmp_path}/run1",
        "step: 0 and 1",
        "size_per_shard: 20000 and 21000",
        "the optimizers that are saved: ['HybridAdam'] and []",
        "use_async: False and True",
        "the checkpoint that is loaded: step-00000006 of contents ",
        "the number of optimizers that are loaded: 1 and 0",
        "the model that is loaded: model of contents ",
    )
    for rank, output in enumerate(outputs):
        *lines, step = output.splitlines()
        for line, what in zip(lines[: len(differing)], differing, strict=True):
            assert line.startswith(f"True UsageError: rank 0 and rank 1 differ in {what}")
        cut = f"{tmp_path}/run1/step-00000007"
        for line, part in zip(
            lines[len(differing) :], ("model", "model", "optimizer"), strict=True
        ):
            what = f"{cut}/{part}/{part}.safetensors was cut short"
            of_other = "rank 1 cannot load this checkpoint, and no rank has changed anything: "
            told = f"{of_other}CheckpointError: " if rank == 0 else ""
            assert line.startswith(f"True CheckpointError: {told}{what}")
        assert step == "6"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run0", "run1"]
