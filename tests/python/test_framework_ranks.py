"""Frameworks on two ranks: what plain ones compute on torch's DDP, of buffers and files as well."""

from pathlib import Path
from typing import Any

import pytest
import torch

from framework_rank_cases import accelerators, as_for_ddp, token_means, trainers
from rank_processes import run, succeeded

SIZE = 2
OF_TIME = ("runtime", "per_second", "total_flos", "preparation_time")


def found(directory: Path, *name: object) -> Any:
    return torch.load(directory / f"{'.'.join(map(str, name))}.pt", weights_only=False)


def assert_states_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (mine[name].double() - value.double()).norm()
        assert difference <= 1e-5 * value.double().norm(), name


def test_a_trainer_computes_what_it_does_on_ddp_and_goes_on(tmp_path: Path) -> None:
    succeeded(run(trainers, SIZE, tmp_path))
    for rank in range(SIZE):
        plain, own = (found(tmp_path, "trainers", name, rank) for name in ("plain", "castor"))
        for kind in ("whole", "resumed"):
            mine, theirs = own[kind], plain[kind]
            assert mine["around"] == "castor.integrations.data_parallel"
            assert (mine["steps"], mine["read"]) == (theirs["steps"], theirs["read"])
            assert_states_close(mine["state"], theirs["state"])
            for entry, expected in zip(mine["log"], theirs["log"], strict=True):
                assert entry.keys() == expected.keys()
                for name, value in expected.items():
                    if not any(part in name for part in OF_TIME):
                        assert entry[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        whole, resumed = own["whole"]["state"], own["resumed"]["state"]
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_trainer_takes_means_of_tokens_as_on_ddp(tmp_path: Path) -> None:
    succeeded(run(token_means, SIZE, tmp_path))
    for rank in range(SIZE):
        plain, own = (found(tmp_path, "token_means", name, rank) for name in ("plain", "castor"))
        for averaged, theirs in plain.items():
            mine = own[averaged]
            assert_states_close(mine["state"], theirs["state"])
            for name in ("loss", "grad_norm"):
                logged, expected = (
                    [entry[name] for entry in one["log"] if name in entry] for one in (mine, theirs)
                )
                assert logged == pytest.approx(expected, rel=1e-4)
        weights = [one["state"]["lm_head.weight"] for one in plain.values()]
        assert not torch.equal(*weights)  # they are different means


def test_a_loop_over_accelerate_computes_what_it_does_on_ddp_and_goes_on(tmp_path: Path) -> None:
    succeeded(run(accelerators, SIZE, tmp_path))
    for rank in range(SIZE):
        plain, own = (found(tmp_path, "accelerators", name, rank) for name in ("plain", "castor"))
        for kind in ("whole", "resumed"):
            mine, theirs = own[kind], plain[kind]
            assert (mine["read"], mine["rates"]) == (theirs["read"], theirs["rates"])
            for name in ("losses", "norms"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
            for (rows, value), expected in zip(mine["evaluated"], theirs["evaluated"], strict=True):
                assert rows == expected[0] == 13
                assert value == pytest.approx(expected[1], rel=1e-4, abs=1e-4)
            assert_states_close(mine["state"], theirs["state"])
        assert own["resumed"]["losses"] == own["whole"]["losses"][2:]  # to the bit
        whole, resumed = own["whole"]["state"], own["resumed"]["state"]
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_what_scripts_do_with_ddp_works_on_castors(tmp_path: Path) -> None:
    succeeded(run(as_for_ddp, SIZE, tmp_path))
    for rank in range(SIZE):
        all_found = found(tmp_path, "as_for_ddp", rank)
        mine, theirs = all_found["castor"], all_found["plain"]
        for name in ("inner", "names", "saved"):
            assert mine[name] == theirs[name]
        for name in ("own", "mean"):
            assert (mine[name] - theirs[name]).norm() <= 1e-5 * theirs[name].norm()
        assert (mine["own"] - mine["mean"]).norm() > 0.1 * mine["own"].norm()
        assert "calls DistributedDataParallel.register_comm_hook" in all_found["refused"]
        enabled, disabled = all_found["stepped alone"]
        assert "leave LocalSGD out, or give it enabled=False" in enabled
        assert disabled == "nothing"
