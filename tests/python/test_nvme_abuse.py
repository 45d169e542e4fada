"""What users do to optimizer state on NVMe beside training: copies, forks, tight budgets."""

import copy
import gc
import io
import os
import pickle
import select
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import castor
from helpers import LR, Boosted, boost, copies, equal, go_on
from zoo import tower

CHUNK = 4096


def on_nvme(path: Path, **settings: Any) -> Boosted:
    return boost(
        tower(), chunk_bytes=CHUNK, nvme_path=path, **{"nvme_offload_fraction": 1.0} | settings
    )


# --- entries of optimizer.state -------------------------------------------------------------------


@pytest.mark.parametrize("state_format", ["split", "split_int8"])
def test_a_stored_entry_looks_as_one_in_memory(state_format: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "optim_state_format": state_format}
    stored = on_nvme(tmp_path, **settings)
    plain = boost(tower(), chunk_bytes=CHUNK, **settings)
    assert go_on(stored) == go_on(plain)
    entries = zip(stored.optimizer.state.values(), plain.optimizer.state.values(), strict=True)
    for mine, theirs in entries:
        assert list(mine) == list(mine.keys()) == list(theirs)
        assert len(mine) == len(theirs)
        assert "exp_avg" in mine
        assert "max_exp_avg_sq" not in mine
        assert mine.get("max_exp_avg_sq") is None
        assert equal(mine.get("exp_avg"), theirs["exp_avg"])
        for copied in (dict(mine), {**mine}, dict(mine.items())):
            assert copied.keys() == theirs.keys()
            assert all(equal(copied[key], theirs[key]) for key in theirs)


def saved_and_loaded(entry: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(entry, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "way",
    [
        copy.copy,
        copy.deepcopy,
        lambda entry: pickle.loads(pickle.dumps(entry)),
        saved_and_loaded,
    ],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_a_copied_entry_is_a_dict_of_its_own(
    way: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    stored = on_nvme(tmp_path)
    go_on(stored)
    entry = next(iter(stored.optimizer.state.values()))
    copied = way(entry)
    assert type(copied) is OrderedDict
    assert list(copied) == ["step", "exp_avg", "exp_avg_sq"]
    assert all(equal(copied[key], entry[key]) for key in copied)


def test_the_optimizer_may_be_copied(tmp_path: Path) -> None:
    stored = on_nvme(tmp_path)
    go_on(stored)
    copied = copy.deepcopy(stored.optimizer)
    assert len(copied.state) == len(stored.optimizer.state)


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_forked_child_may_drop_the_model(overlap: str, tmp_path: Path) -> None:
    stored = on_nvme(tmp_path, overlap=overlap)
    go_on(stored)
    if torch.accelerator.is_available():  # who would finish in the child what a GPU is about?
        torch.accelerator.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that threads do not come along is what is tested
        child = os.fork()
    if child == 0:
        del stored
        gc.collect()
        os._exit(7)
    descriptor = os.pidfd_open(child)
    over, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    if not over:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert over, "the child hung"
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(list(tmp_path.iterdir())) == 1  # still the parent's
    plain = boost(tower(), chunk_bytes=CHUNK)
    go_on(plain)
    assert go_on(stored, first=4) == go_on(plain, first=4)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"nvme_offload_fraction": 0.5, "precision": "bf16", "optim_state_format": "split_int8"},
        {"nvme_offload_fraction": 1.0},
        {"nvme_offload_fraction": None},
    ],
)
def test_more_host_memory_never_fails_where_less_was_enough(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def boosts(host_memory: int) -> bool:
        model = tower()
        before = copies(model.parameters())
        optimizer = AdamW(model.parameters(), lr=LR)
        try:
            boost(
                model,
                optimizer=optimizer,
                chunk_bytes=CHUNK,
                nvme_path=tmp_path,
                host_memory=host_memory,
                **settings,
            )
        except castor.OutOfMemoryError:
            assert type(optimizer) is AdamW
            assert list(tmp_path.iterdir()) == []
            now = model.parameters()
            assert all(equal(a, b) for a, b in zip(before, now, strict=True))
            return False
        return True

    too_small, smallest = 1, 2**20
    while smallest - too_small > 1:
        middle = (too_small + smallest) // 2
        too_small, smallest = (too_small, middle) if boosts(middle) else (middle, smallest)
    assert all(boosts(size) for size in range(smallest, 2 * smallest, smallest // 16))
    assert not any(boosts(size) for size in range(1024, smallest, smallest // 16))
    exact = on_nvme(tmp_path, host_memory=smallest, **settings)
    go_on(exact)
    assert exact.report().host_bytes <= smallest
