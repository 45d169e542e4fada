"""Checkpoints that ranks write together: one process's bytes, at once and beside the training."""

from pathlib import Path

import pytest

import rank_save_cases
from rank_processes import run, succeeded
from rank_save_cases import CASES
from test_async_saves import contents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    succeeded(run(rank_save_cases.beside, request.param, path, timeout=400))
    return path


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("name", list(CASES))
def test_all_write_what_one_wrote_alone(name: str, overlap: str, saved: Path) -> None:
    directory = saved / f"{name}, {overlap}"
    alone, together, beside = (contents(directory / how) for how in ("alone", "together", "beside"))
    assert together == alone
    assert beside == alone
    for part in ("model", "optimizer"):
        assert contents(directory / part) == contents(directory / f"{part} alone")


def test_what_one_rank_cannot_write_all_say(tmp_path: Path) -> None:
    for output in succeeded(run(rank_save_cases.fails, 2, tmp_path)):
        first, second, under_way, step = output.splitlines()
        for line, number in ((first, 2), (second, 3)):
            path = tmp_path / "run" / f"step-0000000{number}"
            assert line.startswith(f"IoError: [Errno 28] cannot write {path}: No space left")
        assert (under_way, step) == ("False", "1")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "run"]
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["step-00000001"]
