"""Loops in DistributedDataParallel, under castor: as torch's class trains them, or a refusal."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import parallel

import castor
import data_parallel_cases as cases
import simulated_gpu
from castor.integrations.common import boosted
from castor.integrations.data_parallel import _shares_buffers
from rank_processes import found_by_each
from script_ranks import UNDER_CASTOR, run_ranks
from simulated import compute_on_gpu

SCRIPT = Path(__file__).parent / "data_parallel_script.py"
TORCHS_ABORT = "terminate called without an active exception"
"""What torch 2.11's gloo ends a rank of plain DDP with now and then, when it has done its work."""


def test_loops_train_as_in_torchs_class(tmp_path: Path) -> None:
    for differ in found_by_each(cases.trains_as_torchs, 2, tmp_path):
        assert differ == {name: [] for name in cases.CASES}


@pytest.mark.parametrize(
    ("asked", "begins", "forwards"),
    [
        ({"broadcast_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        # From torch 2.13 on.
        ({"broadcast_buffers": None, "forward_sync_buffers": None}, True, True),
        ({"broadcast_buffers": None, "forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": None}, False, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
    ],
)
def test_buffers_are_shared_where_torchs_class_shares_them(
    asked: dict[str, Any], begins: bool, forwards: bool
) -> None:
    assert _shares_buffers(asked) == (begins, forwards)


def test_ranks_whose_data_has_ended_go_along(tmp_path: Path) -> None:
    for found in found_by_each(cases.joins, 2, tmp_path):
        assert len(found) == 2 * len(cases.JOINS)
        for name, (plain, own) in found.items():
            assert (plain.pop("boosted"), own.pop("boosted")) == (False, True)
            assert own["said"] == plain["said"]
            assert ("xhausted" in own.pop("said")) == name.startswith("throws")
            plain.pop("said")
            if not name.startswith("throws"):  # what a rank does until it is told differs
                for part in ("losses", "seen", "state"):
                    assert own[part] == pytest.approx(plain[part], rel=1e-4, abs=1e-5), name


def run(directory: Path, *command: str, tries: int = 1) -> tuple[str, list[Any]]:
    directory.mkdir()
    for _ in range(tries):
        outcomes = run_ranks(directory, 2, *command, str(SCRIPT), str(directory))
        if not any(TORCHS_ABORT in outcome.errors for outcome in outcomes):
            break
    assert not any(outcome.code for outcome in outcomes), outcomes
    return outcomes[0].output, [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


def test_a_script_as_it_is_trains_on_several_ranks(tmp_path: Path) -> None:
    settings = {"device": "cpu", "device_memory": "200KiB", "host_memory": "64MiB"}
    said, expected = run(tmp_path / "plain", tries=3)
    assert said == "trained DistributedDataParallel True\n"
    told, found = run(tmp_path / "own", *UNDER_CASTOR, json.dumps(settings))
    assert told == said
    for theirs, ours in zip(expected, found, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert [*ours["state"]] == [*theirs["state"]]
        torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=1e-5, atol=1e-6)


def test_what_is_copied_and_saved_on_one_rank_alone(tmp_path: Path) -> None:
    first, second = found_by_each(cases.copies, 2, tmp_path)
    assert first.pop("pickled") == 14
    assert first == second


def test_rank_0_saves_optimizer_states_alone(tmp_path: Path) -> None:
    first, second = found_by_each(cases.first_saves_alone, 2, tmp_path)
    assert first == second
    assert first.keys() == cases.STATES.keys()
    assert all(kept == state != 0 for state, kept in first.values())


REFUSED = {
    "process_group": "NotImplementedError: .* process_group of 1 of the 2 ranks",
    "mixed_precision": "NotImplementedError: .* mixed_precision=.*--set precision=bf16",
    "delay": "NotImplementedError: .* has delay_all_reduce_named_params=.*leave it out",
    "two devices": r"ValueError: .*device_ids=\[0, 1\]: a rank computes on one",
    "frozen": "RuntimeError: no parameter of this Net requires a gradient",
    "devices": r"UsageError: .* device_ids=\[[01]\] .* castor computes on cpu",
    "shapes": "UsageError: rank 0 and rank 1 differ in names, shapes",
    "ignored": "NotImplementedError: .* told to ignore parameter 'last.bias'",
    "no optimizer": "UsageError: .* around a Net with gradients, and no optimizer",
    "hook": "NotImplementedError: .* calls DistributedDataParallel.register_comm_hook",
    "Join": "NotImplementedError: .* calls DistributedDataParallel.join_",
    "without": "NotImplementedError: .* a Net on 2 ranks without DistributedDataParallel",
    "part": "UsageError: the loop calls a Linear which has 1 of the 9 parameters of its SGD",
    "around": "^nothing$",  # as Fabric's module: what it is around is boosted
    "zero": "NotImplementedError: .* ZeroRedundancyOptimizer shards optimizer states",
    "spawn": "NotImplementedError: .*torch.multiprocessing.spawn.* castor run --nproc N",
}


def test_what_castor_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    for found in found_by_each(cases.refuses, 2, tmp_path):
        assert found.keys() == REFUSED.keys()
        for name, said in found.items():
            assert re.search(REFUSED[name], said), (name, said)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_model_is_on_the_gpu_that_it_was_told(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    compute_on_gpu(monkeypatch)
    with cases.watched({"device": "cuda"}):
        device = torch.device(simulated_gpu.NAME, 0)
        model, other = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
        ddp = parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.AdamW([*ddp.parameters()])
        ddp.to(device)
        ddp(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
        assert boosted(optimizer)
        elsewhere = parallel.DistributedDataParallel(other, device_ids=[1])
        optimizer = torch.optim.AdamW([*elsewhere.parameters()])
        with pytest.raises(castor.UsageError, match=r"has device_ids=\[1\]"):
            elsewhere(torch.ones(2, 4, device=device))
        simulated_gpu.rest()


def test_ranks_train_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", "simgpu:1")
    for found in found_by_each(cases.on_gpus, 2, tmp_path):
        assert found["own"] == pytest.approx(found["plain"], rel=1e-5)


def test_torchs_class_that_somebody_kept_is_refused(alone: None) -> None:
    kept = parallel.DistributedDataParallel
    with cases.watched({}):
        ddp = kept(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(ddp.parameters())
        with pytest.raises(NotImplementedError, match=r"calls a torch.*DistributedDataParallel"):
            ddp(torch.ones(2, 4))
        assert not boosted(optimizer)
