"""Several optimizers of one model that several ranks train."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import several_rank_cases
import simulated_gpu
from helpers import apart
from rank_processes import run, succeeded
from several_rank_cases import (
    CLOSE,
    CLOSE_ON_TWO,
    DIVIDED,
    EXACT,
    GOING_ON,
    ON_NODES,
    ON_TWO,
    OVER_THE_GROUP,
    boost_sharded,
    comparable,
)

Result = tuple[list[torch.Tensor], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, rank) -> weights, losses and report, of two ranks that share memory."""

    @cache
    def directory() -> Path:
        path = tmp_path_factory.mktemp("several")
        succeeded(run(several_rank_cases.each, 2, path, timeout=600))
        return path

    def load(name: str, rank: int) -> Result:
        result: Result = torch.load(directory() / f"{name}.{rank}.pt")
        return result

    return load


@cache
def in_one_process(name: str, *order: int) -> tuple[list[torch.Tensor], list[float]]:
    """Weights, and losses of one step's ranks after the other's."""
    weights, losses, _ = several_rank_cases.train((EXACT | CLOSE)[name], order)
    return weights, losses


def assert_same(found: Result, rank: int, size: int, name: str) -> None:
    weights, losses, report = found
    expected, all_losses = in_one_process(name, *range(size))
    assert all(map(torch.equal, weights, expected))
    assert losses == all_losses[rank::size]
    assert report["skipped_steps"] == 0


@pytest.mark.parametrize("name", ON_TWO)
def test_weights_and_losses_have_the_bits_of_one_process(name: str, trained: Any) -> None:
    for rank in range(2):
        assert_same(trained(name, rank), rank, 2, name)


def test_ranks_that_do_not_share_memory_compute_the_same(tmp_path: Path) -> None:
    succeeded(run(several_rank_cases.over_the_group, 2, tmp_path))
    for name in OVER_THE_GROUP:
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert_same(found, rank, 2, name)
            assert found[2]["rank_link"] == "gloo (as asked for)"


def test_machines_of_two_ranks_compute_the_same(tmp_path: Path) -> None:
    succeeded(run(several_rank_cases.on_nodes, 4, tmp_path, nodes=2))
    for name in ON_NODES:
        for rank in range(4):
            assert_same(torch.load(tmp_path / f"{name}.{rank}.pt"), rank, 4, name)


@pytest.mark.parametrize("seed", simulated_gpu.SEEDS)
def test_ranks_on_gpus_have_the_bits_of_one_process(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU device."""
    simulated_gpu.require()
    monkeypatch.setenv("CASTOR_TEST_DEVICE", f"simgpu:{seed}")
    succeeded(run(several_rank_cases.on_gpus, 2, tmp_path))
    for name, case in several_rank_cases.ON_GPUS.items():
        expected, _, _ = several_rank_cases.train(case, (0, 1), steps=5)
        for rank in range(2):
            weights, _, _ = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert all(map(torch.equal, weights, expected)), name


@pytest.mark.parametrize("name", CLOSE_ON_TWO)
def test_ranks_have_the_same_bits_close_to_one_process(name: str, trained: Any) -> None:
    first, second = trained(name, 0)[0], trained(name, 1)[0]
    assert all(map(torch.equal, first, second))
    expected, turned = (in_one_process(name, *order)[0] for order in ((0, 1), (1, 0)))
    # One process adds in 16 bits; in fp32 Muon makes much of its last bits.
    tolerance = 1e-6 if first[0].dtype == torch.float32 else 0.15
    assert apart(first, expected) <= max(tolerance, 4 * apart(turned, expected))


def test_chunks_that_a_rule_updates_are_there_once(trained: Any, tmp_path: Path) -> None:
    """What Muon steps each rank has, and gradients of it."""
    succeeded(run(several_rank_cases.kept, 2, tmp_path))
    report, separate, once = torch.load(tmp_path / "kept.0.pt")
    assert 2 * once <= report["rank_shared_bytes"] <= 2 * once + 16 * 4096
    saved = separate["host_bytes"] - report["host_bytes"]
    assert saved == pytest.approx(once, abs=16 * 4096)  # half of weights and gradients
    assert (report["zero_stage"], separate["rank_shared_bytes"]) == (1, 0)
    assert trained("two adamw, tight", 0)[2]["zero_stage"] == 3


def test_an_overflow_on_one_rank_makes_all_skip_on_all(tmp_path: Path) -> None:
    outputs = succeeded(run(several_rank_cases.overflow_on_one, 2, tmp_path))
    assert outputs[0] == outputs[1]
    lines = [line.split() for line in outputs[0].splitlines()]
    assert [line[:4] for line in lines] == [
        [name, str(step), str(step == 1), str(int(step > 0))]
        for name in ("fp16", "fp32")
        for step in range(3)
    ]
    for name in ("fp16", "fp32"):
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(2))
        assert all(map(torch.equal, first, second))


def test_a_rank_that_was_given_another_list_is_named(tmp_path: Path) -> None:
    for output in succeeded(run(several_rank_cases.different_lists, 2, tmp_path)):
        order, groups, number, held = output.splitlines()
        assert "differ in the optimizer: 'Muon, HybridAdam' and 'HybridAdam, Muon'" in order
        assert "rank 0 and rank 1 differ in the optimizer's param_groups" in groups
        assert "differ in the optimizer: 'AdamW, AdamW' and 'AdamW'" in number
        assert re.search(
            r"differ in which parameters the optimizer's param_groups hold: \[\['2 from "
            r"layers\.0\.bias, .* and \[\['2 from layers\.1\.bias, ",
            held,
        )
        assert all(line.startswith("True ") for line in output.splitlines())


def test_ranks_that_step_different_ones_are_both_named(tmp_path: Path) -> None:
    for output in succeeded(run(several_rank_cases.different_steps, 2, tmp_path)):
        assert (
            "rank 0 calls optimizers[0].step() after 1 backward passes, for step 1, while rank 1 "
            "calls optimizers[1].step() after 1 backward passes, for step 1" in output
        )
    for output in succeeded(run(several_rank_cases.one_steps_more, 2, tmp_path)):
        assert (
            "rank 0 calls optimizers[1].step() after 0 backward passes, for step 2, while rank 1 "
            "ends backward pass 1 of step 2" in output
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    for output in succeeded(run(several_rank_cases.saves, 2, path)):
        for line in output.splitlines():
            assert "use_async=True of a Muon whose states are not castor's to hold" in line
    return path


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.whole), 3])
def test_a_checkpoint_goes_on_bitwise_on_any_number_of_ranks(size: int, saved: Path) -> None:
    succeeded(run(several_rank_cases.loads, size, saved))
    for precision in comparable(size):
        expected = torch.load(saved / f"weights {precision}.0.pt")
        for rank in range(size):
            loaded = torch.load(saved / f"loaded {precision}.{rank}.pt")
            assert all(map(torch.equal, loaded, expected))


@pytest.mark.parametrize("precision", GOING_ON)
def test_states_are_those_of_one_process(precision: str, saved: Path) -> None:
    alone = several_rank_cases.boost(GOING_ON[precision])
    for step in range(3):
        alone.step(step, [step])
    expected = [one.state_dict()["state"] for one in alone.optimizers]
    for rank in range(2):
        found = torch.load(saved / f"states {precision}.{rank}.pt")
        for theirs, ours in zip(found, expected, strict=True):
            assert theirs.keys() == ours.keys()
            for i, entry in ours.items():
                assert all(torch.equal(theirs[i][key], value) for key, value in entry.items())
    for step in range(3, 5):
        alone.step(step, [step])
    weights = torch.load(saved / f"weights {precision}.1.pt")
    assert all(map(torch.equal, weights, alone.weights()))


def test_two_that_run_fused_are_saved_beside_the_training(tmp_path: Path) -> None:
    from test_async_saves import contents

    succeeded(run(several_rank_cases.saves_beside, 2, tmp_path))
    assert contents(tmp_path / "beside") == contents(tmp_path / "at once")


def test_own_steps_that_diverge_are_named_on_every_rank(tmp_path: Path) -> None:
    """Within eight steps, in masters too."""
    outputs = succeeded(run(several_rank_cases.drifts, 2, tmp_path))
    assert outputs[0] == outputs[1]
    found = [line.split(" | ") for line in outputs[0].splitlines()]
    for name, steps, said in found:
        drifted = re.search(
            r"after step \d+ rank 0 and rank 1 have different values of parameter '\w+\.", said
        )
        assert bool(drifted) == (name != "alike"), name
        if name == "alike":
            assert int(steps) == 12
        elif name == "wrong once":
            assert 3 < int(steps) <= 11
        else:
            assert int(steps) <= 2
    assert len(found) == 3 * len(several_rank_cases.DRIFTS)


def test_what_does_not_go_with_them_is_refused_by_name(tmp_path: Path) -> None:
    for output in succeeded(run(several_rank_cases.refused, 2, tmp_path)):
        second, third, beside, low_level = output.splitlines()
        assert "zero_stage=2 leaves each of 2 ranks its shard of the gradients" in second
        assert "zero_stage=3 leaves each of 2 ranks its shard of the weights and grad" in third
        assert "overlap='forward'" in beside
        assert re.search(r"stage=2 keeps gradients once .* Muon runs its own step", low_level)


def test_they_step_a_model_that_ranks_shard(tmp_path: Path) -> None:
    outputs = succeeded(run(several_rank_cases.divided, 2, tmp_path))
    for name, (make, close) in DIVIDED.items():
        alone = boost_sharded(make)
        expected = [alone.step(step, [step])[0] for step in range(6)]
        for rank in range(2):
            losses = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert losses[:6] == pytest.approx(expected, rel=close)
            assert losses[6:] == losses[3:6]
        # What they have saved one process goes on with.
        resumed = boost_sharded(make)
        resumed.booster.load(tmp_path / name, resumed.model, resumed.optimizers)
        assert resumed.step(3, [3]) == pytest.approx(expected[3:4], rel=close)
    for output in outputs:
        muon, mixed, stages = output.splitlines()
        assert "with tp_size=2 a Muon would step shards of matrices" in muon
        assert "with tp_size=2 a SGD would step shards of matrices" in mixed
        assert "elements, and of several one kind" in mixed
        assert (
            "pp_size=2 ranks write the states of one optimizer together, and boost was given 2 "
            "(AdamW, AdamW)" in stages
        )
