"""Checkpoints of models of which ranks have parts: one process's bytes, whoever writes when."""

import json
import math
from pathlib import Path

import pytest
import torch

import castor
import sharded_save_cases
from castor.distributed.shard_spec import ShardSpec
from rank_processes import found_by_each, run, succeeded
from sharded_save_cases import BESIDE, CASES, DIVIDED
from test_async_saves import contents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(sharded_save_cases.beside, request.param, path, timeout=500))
    return path


def _check(size: int, name: str, path: Path, again: Path) -> None:
    """What ranks have written is what one process writes, which reads it."""
    assert contents(path / "beside") == contents(path / "together")
    for part in ("model", "optimizer"):
        assert contents(path / f"{part} later") == contents(path / f"{part} at once")
    assert (path / "scheduler.json").is_file()
    alone = CASES[size][name].boost_unsharded()
    assert alone.booster.load(path / "together", alone.model, alone.optimizer).step == 2
    alone.booster.save(again, alone.model, alone.optimizer, size_per_shard="40KB")
    for part in ("model", "optimizer"):
        one, several = (where / "step-00000002" / part for where in (again, path / "together"))
        assert contents(one) == contents(several)


@pytest.mark.parametrize("saved", [2], indirect=True)
@pytest.mark.parametrize("name", BESIDE[2])
def test_two_ranks_write_what_one_process_writes(name: str, saved: Path, tmp_path: Path) -> None:
    _check(2, name, saved / name, tmp_path)


@pytest.mark.parametrize("saved", [4], indirect=True)
@pytest.mark.parametrize("name", BESIDE[4])
def test_four_ranks_write_what_one_process_writes(name: str, saved: Path, tmp_path: Path) -> None:
    _check(4, name, saved / name, tmp_path)


def test_so_do_ranks_that_share_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", "group")
    succeeded(run(sharded_save_cases.over_gloo, 4, tmp_path))
    _check(4, "layers and stages", tmp_path / "layers and stages", tmp_path / "again")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("shape", "dim", "pieces"),
    [((7, 3), 0, 1), ((3, 7), 1, 1), ((2, 7, 3), 1, 1), ((2, 12), 1, 3), ((12, 2), 0, 3),
     ((7,), 0, 1)],
)  # fmt: skip
def test_runs_are_where_a_part_lies(
    shape: tuple[int, ...], dim: int, pieces: int, size: int
) -> None:
    cut = ShardSpec(dim=dim, shape=shape, pieces=pieces)
    whole = torch.arange(math.prod(shape)).view(shape)
    extents = torch.arange(cut.length_of_piece).tensor_split(size)
    for rank, own in enumerate(extents):
        runs = cut.runs(range(int(own[0]), int(own[-1]) + 1))
        part = cut.local_shard(whole, rank, size).flatten().tolist()
        for begin, end in ((0, len(part)), (1, len(part) - 1), (0, 0)):
            found = [i for at, count in runs.of(begin, end) for i in range(at, at + count)]
            assert found == part[begin:end]


def test_what_one_rank_cannot_write_all_say(tmp_path: Path) -> None:
    for found in found_by_each(sharded_save_cases.fails, 2, tmp_path):
        for name in DIVIDED:
            first, second, step = found[name]
            run = tmp_path / name / "run"
            for line, number in ((first, 2), (second, 3)):
                path = run / f"step-0000000{number}"
                assert line.startswith(f"IoError: [Errno 28] cannot write {path}: No space left")
            assert step == 1
            assert [one.name for one in run.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("division", "size", "dies"),
    [("layers", 2, 1), ("stages", 2, 1), ("stages", 2, 0), ("experts", 2, 1),
     ("layers and stages", 4, 3)],
)  # fmt: skip
def test_a_rank_that_dies_meanwhile_is_named(
    division: str, size: int, dies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIVISION", division)
    monkeypatch.setenv("DIES", str(dies))
    outcomes = run(sharded_save_cases.one_dies, size, tmp_path, timeout=100)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == (-9 if rank == dies else 0), outcome.errors
        if rank != dies:
            message = json.loads((tmp_path / f"one_dies{rank}.json").read_text())
            assert f"rank {dies} (process" in message
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu"))
    assert booster.latest(tmp_path / "run") == tmp_path / "run" / "step-00000001"


def test_what_is_not_saved_is_named_on_every_rank(tmp_path: Path) -> None:
    for found in found_by_each(sharded_save_cases.refused, 2, tmp_path):
        for name in DIVIDED:
            assert found[name].startswith("UsageError: this AdamW is not boosted")
        assert found["own step"].startswith("UsageError: use_async=True of a RMSprop whose states")
