"""Optimizer state on NVMe: the bits of a run without, budgets, views, checkpoints, bad paths."""

from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW, RMSprop

import castor
from castor import HybridAdam
from castor.runtime.engine import engine_of
from helpers import (
    LR,
    Boosted,
    boost,
    equal,
    go_on,
    plugin,
)
from zoo import tower, tower_batch

FORMATS = ("fp32", "split", "split_bf16", "split_int8")
CHUNK = 2**14
"""Small chunks: even the small models have many."""


def state_bytes(boosted: Boosted) -> int:
    """Bytes of optimizer state, wherever it lies."""
    element = {"fp32": 8, "split": 10, "split_bf16": 6, "split_int8": 4}
    engine = engine_of(boosted.model)
    per_param = element[engine.session.optim_state_format]
    if engine.session.optim_state_format == "fp32" and engine.settings.precision != "fp32":
        per_param = 12
    return sum(p.numel() for p in engine.params if p.requires_grad) * per_param


# --- budgets --------------------------------------------------------------------------------------


def test_a_host_that_is_too_small_for_the_states_spills_them(tmp_path: Path) -> None:
    ample = boost(tower(), chunk_bytes=4096)
    expected = go_on(ample)
    whole = ample.report().host_bytes
    with pytest.raises(castor.OutOfMemoryError, match="raise host_memory"):
        boost(tower(), chunk_bytes=4096, host_memory=int(0.92 * whole))
    spilling = boost(tower(), chunk_bytes=4096, host_memory=int(0.92 * whole), nvme_path=tmp_path)
    assert go_on(spilling) == expected
    report = spilling.report()
    assert 0 < report.nvme_bytes < state_bytes(spilling)
    assert report.host_bytes <= report.host_budget_bytes == int(0.92 * whole)


def test_several_directories_share_the_states(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    expected = go_on(boost(tower(), chunk_bytes=CHUNK))
    boosted = boost(tower(), chunk_bytes=CHUNK, nvme_path=paths, nvme_offload_fraction=1.0)
    assert all(len(list(path.iterdir())) == 1 for path in paths)
    assert go_on(boosted) == expected


# --- what users see -------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_optimizer_state_reads_what_lies_on_nvme(state_format: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "optim_state_format": state_format}
    plain = boost(tower(), **settings)
    stored = boost(tower(), nvme_path=tmp_path, nvme_offload_fraction=1.0, **settings)
    go_on(plain, steps=2)
    go_on(stored, steps=2)
    for mine, theirs in zip(stored.model.parameters(), plain.model.parameters(), strict=True):
        own, other = stored.optimizer.state[mine], plain.optimizer.state[theirs]
        assert own["step"] == other["step"] == 2
        for key in set(other) - {"step"}:
            assert own[key].dtype == other[key].dtype
            assert equal(own[key], other[key])
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            own["max_exp_avg_sq"]
    mine, theirs = stored.optimizer.state_dict(), plain.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for i, entry in theirs["state"].items():
        assert mine["state"][i].keys() == entry.keys()
        assert all(equal(mine["state"][i][key], entry[key]) for key in entry)


def test_states_taken_before_boost_move_to_nvme(tmp_path: Path) -> None:
    def resumed(**settings: Any) -> list[float]:
        model = tower()
        optimizer = AdamW(model.parameters(), lr=LR)
        model(**tower_batch(9)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return go_on(boost(model, optimizer=optimizer, chunk_bytes=CHUNK, **settings))

    assert resumed(nvme_path=tmp_path, nvme_offload_fraction=1.0) == resumed()


# --- bad input ------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_or_is_a_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(castor.IoError, match=str(missing)) as caught:
        boost(tower(), nvme_path=missing, nvme_offload_fraction=1.0)
    assert caught.value.errno == 2
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(castor.IoError, match=str(file)):
        boost(tower(), nvme_path=file, nvme_offload_fraction=1.0)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"nvme_memory": "1GiB"}, ValueError, "need nvme_path"),
        ({"nvme_offload_fraction": 0.5}, ValueError, "need nvme_path"),
        ({"nvme_path": "/tmp", "nvme_offload_fraction": 1.5}, ValueError, r"\[0, 1\]"),
        ({"nvme_path": []}, ValueError, "is empty"),
        ({"nvme_path": 3}, TypeError, "give a directory"),
        ({"nvme_path": "/tmp", "nvme_verify": 1}, TypeError, "give True or False"),
        ({"nvme_path": "/tmp", "nvme_memory": 0}, ValueError, "more than 0"),
        ({"nvme_dir": "/tmp"}, NotImplementedError, "give nvme_path"),
    ],
)
def test_wrong_settings_are_refused(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plugin(**settings)


@pytest.mark.cpu_device("elsewhere they are refused for another reason")
def test_other_optimizers_have_no_states_to_store(tmp_path: Path) -> None:
    model = tower()
    with pytest.raises(NotImplementedError, match="nvme_path"):
        boost(model, optimizer=RMSprop(model.parameters(), lr=0.1), nvme_path=tmp_path)


# --- HybridAdam's own arguments -------------------------------------------------------------------


def test_hybrid_adam_says_where_and_how_much(tmp_path: Path) -> None:
    expected = go_on(boost(tower(), optimizer=None, chunk_bytes=CHUNK))
    model = tower()
    optimizer = HybridAdam(
        model.parameters(),
        lr=LR,
        weight_decay=0.01,
        nvme_offload_fraction=0.5,
        nvme_offload_dir=str(tmp_path),
    )
    boosted = boost(model, optimizer=optimizer, chunk_bytes=CHUNK)
    assert go_on(boosted) == expected
    assert boosted.report().nvme_bytes >= 0.5 * state_bytes(boosted)


def test_hybrid_adam_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    model = tower()
    with pytest.raises(ValueError, match="belong together"):
        HybridAdam(model.parameters(), nvme_offload_fraction=0.5)
    with pytest.raises(ValueError, match="belong together"):
        HybridAdam(model.parameters(), nvme_offload_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        HybridAdam(model.parameters(), nvme_offload_fraction=2.0, nvme_offload_dir=str(tmp_path))
    alone = HybridAdam(
        model.parameters(), nvme_offload_fraction=0.5, nvme_offload_dir=str(tmp_path)
    )
    with pytest.raises(castor.UsageError, match="call booster"):
        alone.step()
    with pytest.raises(ValueError, match="give one"):
        boost(model, optimizer=alone, nvme_path=tmp_path)
