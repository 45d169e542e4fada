"""Several ranks train one model: what they compute, how they disagree, and how they end."""

import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import rank_cases
from castor.runtime import ranks
from helpers import apart, boost, go_on
from rank_cases import CLOSE, EXACT, ON_FOUR, ON_TWO, SOME_CLOSE
from rank_processes import finish, run, start, succeeded
from zoo import tower

SIZES = (2, 4)
Result = tuple[list[torch.Tensor], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ranks of which one waits ten seconds for the other, which others need not wait for."""
    return start(rank_cases.one_stops, 2, tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="module")
def trained(stopped: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(number of ranks, case, rank) -> weights, losses and report."""

    @cache
    def directory(size: int) -> Path:
        path = tmp_path_factory.mktemp(f"ranks{size}")
        for outcome in run(rank_cases.exact_and_close, size, path, timeout=900):
            assert outcome.code == 0, outcome.errors
        return path

    def load(size: int, name: str, rank: int) -> Result:
        result: Result = torch.load(directory(size) / f"{name}.{rank}.pt")
        return result

    return load


def in_one_process(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, path: Path
) -> list[torch.Tensor]:
    monkeypatch.chdir(path)
    weights, _, _ = rank_cases.train((EXACT | CLOSE)[name], range(size))
    return weights


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)]
)
def test_weights_have_the_bits_of_one_process(
    name: str, size: int, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = in_one_process(name, size, monkeypatch, tmp_path)
    for rank in range(size):
        weights, _, report = trained(size, name, rank)
        assert all(map(torch.equal, weights, expected))
        assert report["skipped_steps"] == 0


def test_ranks_that_do_not_share_memory_compute_the_same(
    trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for outcome in run(rank_cases.some_over_the_group, 2, tmp_path):
        assert outcome.code == 0, outcome.errors
    for name in rank_cases.OVER_THE_GROUP:
        expected = in_one_process(name, 2, monkeypatch, tmp_path)
        weights, _, report = torch.load(tmp_path / f"{name}.1.pt")
        assert all(map(torch.equal, weights, expected))
        assert report["rank_link"] == "gloo (as asked for)"
        _, _, shared = trained(2, name, 1)
        assert shared["rank_link"] == "memory that the ranks of this machine share"
        # Neither the weights nor the means of gradients.
        assert shared["rank_sent_bytes"] == report["rank_sent_bytes"] // 3


@pytest.mark.smoke
def test_three_ranks_are_as_close_to_one_process_as_another_order_of_its_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A third is no power of two, and Adam makes much of rounding where gradients are near zero."""
    succeeded(run(rank_cases.on_three, 3, tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in rank_cases.ON_THREE:
        expected, turned = (
            rank_cases.train(EXACT[name], order)[0] for order in ((0, 1, 2), (1, 2, 0))
        )
        for rank in range(3):
            weights, _, _ = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert apart(weights, expected) <= max(1e-6, 4 * apart(turned, expected))


def test_another_link_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", "carrier pigeon")
    with pytest.raises(castor.UsageError, match=r"'carrier pigeon'; \"auto\", \"group\""):
        ranks.may_share_memory()
    monkeypatch.setenv("CASTOR_RANK_LINK", "node")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    with pytest.raises(castor.UsageError, match=r"has not set GROUP_RANK"):
        ranks.memory_mark()


@pytest.mark.parametrize("name", SOME_CLOSE)
def test_weights_are_close_to_those_of_one_process(
    name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = in_one_process(name, 2, monkeypatch, tmp_path)
    first, _, _ = trained(2, name, 0)
    second, _, _ = trained(2, name, 1)
    assert all(map(torch.equal, first, second))
    tolerance = 1e-5 if first[0].dtype == torch.float32 else 0.15  # one process adds in 16 bits
    for weight, reference in zip(first, expected, strict=True):
        error = (weight.float() - reference.float()).norm() / reference.float().norm()
        assert error < tolerance


def test_bytes_sent_are_counted(trained: Any) -> None:
    """(n-1)/n of the gradients once a step; their means and the weights are all ranks' together."""
    for size in SIZES:
        weights, _, report = trained(size, "llama", 0)
        gradients = sum(weight.nbytes for weight in weights)
        sent = report["rank_sent_bytes"] / rank_cases.STEPS
        assert (report["rank"], report["ranks"]) == (0, size)
        assert sent * size / (size - 1) == pytest.approx(gradients, rel=0.05)
        assert report["rank_seconds"] > report["rank_exposed_seconds"] > 0
        assert 0 < report["rank_exposed_share"] < 1


def test_micro_batches_under_no_sync_cost_one_exchange(trained: Any) -> None:
    _, _, each = trained(2, "accumulated", 0)
    _, _, once = trained(2, "deferred", 0)
    assert each["rank_sent_bytes"] / once["rank_sent_bytes"] == 2


@pytest.mark.parametrize("name", ["llama", "bf16 fp32", "bf16 split", "bf16 split_int8"])
def test_every_rank_keeps_its_shard_of_the_states(
    name: str, trained: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many bytes on n ranks together as in one process, and what gradients pass through."""
    monkeypatch.chdir(tmp_path)
    booster, model, _ = rank_cases.boost((EXACT | CLOSE)[name])
    alone = booster.report(model).host_bytes
    for size in SIZES if name in ON_FOUR else (2,):
        _, _, report = trained(size, name, 0)
        gradients_on_their_way = report["host_bytes"] - alone / size
        assert 0 <= gradients_on_their_way <= 8 * 2**20 + 0.05 * alone


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of rank_cases.beside_one_another, with one for each of its scenarios."""
    path = tmp_path_factory.mktemp("beside")
    succeeded(run(rank_cases.beside_one_another, 2, path))
    return path


def printed(directory: Path) -> list[str]:
    return [(directory / str(rank)).read_text() for rank in range(2)]


def test_states_are_those_of_one_process(beside: Path) -> None:
    """What state_dict gives, called on every rank, and what rank 0 alone has saved."""
    directory = beside / "shows_states"
    for output in printed(directory):
        assert (
            "rank 0 reads the optimizer state of parameter 'layers.0.weight' after step 3, while "
            "rank 1 ends backward pass 1 of step 4"
        ) in output
    booster, model, optimizer = rank_cases.boost(rank_cases.TOWER)
    for step in range(3):
        for rank in range(2):
            loss = rank_cases.TOWER.loss(model, 2 * step + rank, rank)
            booster.backward(loss / 2, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    expected = optimizer.state_dict()["state"]
    for rank in range(2):
        states = torch.load(directory / f"states.{rank}.pt")
        assert len(states) == len(expected) > 0
        for i, entry in expected.items():
            assert all(torch.equal(states[i][key], value) for key, value in entry.items())
    other, model, optimizer = rank_cases.boost(rank_cases.TOWER)
    other.load_optimizer(optimizer, directory / "optimizer", model=model)
    for i, entry in expected.items():
        loaded = optimizer.state_dict()["state"][i]
        assert all(torch.equal(loaded[key], value) for key, value in entry.items())


def test_ranks_that_were_given_different_things_say_so(beside: Path) -> None:
    for output in printed(beside / "different_models"):
        model, setting, mode, *links = output.splitlines()
        assert (
            "rank 0 and rank 1 differ in the number of the model's parameters: 12 and 14" in model
        )
        assert "rank 0 and rank 1 differ in max_norm: 1.0 and 2.0" in setting
        assert "overlap='backward'" in mode
        assert len(links) == 2
        for link in links:
            assert "differ in the environment's CASTOR_RANK_LINK: 'auto' and 'group'" in link


def test_ranks_that_would_read_another_order_of_the_samples_say_so(beside: Path) -> None:
    """Without it they took some samples twice an epoch and others never."""
    for output in printed(beside / "shuffles_differently"):
        seed, length, own = output.splitlines()
        assert "rank 0 and rank 1 differ in the seed of the dataloader's sampler: 0 and 1" in seed
        assert "differ in the length of the dataloader's dataset: 8 and 9" in length
        assert own == "nothing was raised"


def test_ranks_that_do_different_things_are_both_named_at_once(beside: Path) -> None:
    for output in printed(beside / "one_passes_more"):
        assert (
            "rank 0 ends backward pass 2 of step 1, while rank 1 calls optimizer.step()" in output
        )


def test_ranks_that_would_update_their_shards_differently_say_so(beside: Path) -> None:
    """Without it each part of a weight took another step, or one rank waited for the others."""
    for output in printed(beside / "steps_differently"):
        rate, same, not_finite, none, clipped, steps = output.splitlines()
        assert (
            "rank 0 and rank 1 differ in param_groups[0]['lr']: 0.01 and 0.02; each updates its"
            in rate
        )
        assert same == clipped == "nothing was raised"
        differ = "the ranks' gradients differ in a step: their norm is"
        assert f"{differ} nan on rank 0 and" in not_finite
        assert differ in none
        assert steps == "2"


def test_a_save_that_one_rank_does_not_take_part_in_is_named(beside: Path) -> None:
    for output in printed(beside / "one_saves"):
        assert (
            "rank 0 ends a save after step 0, while rank 1 ends backward pass 1 of step 1" in output
        )


def test_lazy_weights_are_their_own_in_whatever_order_ranks_read_them(beside: Path) -> None:
    case = beside / "lazy_in_any_order"
    assert printed(case) == ["True\n"] * 2
    first, second = (torch.load(case / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_nothing_that_castor_sends_is_a_tensor_of_pythons(beside: Path) -> None:
    for output in printed(beside / "nothing_of_pythons"):
        assert output.split() == ["1", "True"]


def test_ranks_begin_with_rank_0s_weights_and_see_averaged_gradients(beside: Path) -> None:
    for output in printed(beside / "others_weights"):
        assert output.split() == ["True"] * 3


def test_an_overflow_on_one_rank_skips_the_step_on_all(beside: Path) -> None:
    outputs = printed(beside / "overflow_on_one")
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("1 ")


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        pytest.param("forward", 1, marks=pytest.mark.whole),
        ("backward", 0),
        ("step", 1),
        ("save", 0),
        pytest.param("save", 1, marks=pytest.mark.whole),
        ("load", 1),
    ],
)
def test_a_rank_that_is_killed_anywhere_is_named_and_the_last_checkpoint_loads(
    phase: str, victim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VICTIM", str(victim))
    monkeypatch.setenv("PHASE", phase)
    outcomes = run(rank_cases.one_dies_at, 2, tmp_path)
    assert time.time() - float((tmp_path / "died").read_text()) < 60
    assert outcomes[victim].code == -9
    assert outcomes[1 - victim].code != 0
    assert re.search(rf"rank {victim} \(process \d+\) has ended", outcomes[1 - victim].errors), (
        outcomes[1 - victim].errors
    )
    booster, model, optimizer = rank_cases.boost(rank_cases.TOWER)
    info = booster.load(tmp_path / "run", model, optimizer)
    assert info.step == (2 if phase == "load" else 1)


def test_a_rank_that_is_stopped_is_named_by_the_others(stopped: Any) -> None:
    first, second = finish(stopped)
    assert second.code == -9
    assert re.search(r"lost the others: rank 1 \(process \d+\) is stopped", first.output)


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("link", ["auto", "group"])
def test_ranks_do_not_wait_for_one_whose_update_failed(
    overlap: str, link: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CASTOR_RANK_LINK", link)
    monkeypatch.setenv("OVERLAP", overlap)
    monkeypatch.setenv("FAULT", "any:60:EIO")
    outcomes = run(rank_cases.one_fails, 2, tmp_path)
    first, second = (output.splitlines() for output in succeeded(outcomes))
    assert "input/output error" in second[0].lower()
    assert "rank 1 of 2 has let go of the others" in second[1]
    assert "rank 0 of 2 lost the others" in first[0]
    assert link == "group" or re.search(r"rank 1 \(process \d+\) has let go", first[0])
    assert link == "group" or float(first[1]) < 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have saved, and where they went from there."""
    path = tmp_path_factory.mktemp("saved")
    for output in succeeded(run(rank_cases.saves, 2, path)):
        assert "IoError" in output
        assert "missing" in output
    return path


@pytest.mark.smoke
def test_a_checkpoint_goes_on_bitwise(saved: Path) -> None:
    assert succeeded(run(rank_cases.loads, 2, saved)) == ["3\n", "3\n"]
    for rank in (0, 1):
        for kind in ("weights", "random"):
            names = {"weights": "loaded", "random": "loaded-random"}
            expected = torch.load(saved / f"{kind}.{rank}.pt")
            loaded = torch.load(saved / f"{names[kind]}.{rank}.pt")
            assert all(map(torch.equal, expected, loaded))


@pytest.mark.parametrize("size", [1, 3, pytest.param(4, marks=pytest.mark.whole)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved: Path, size: int) -> None:
    assert succeeded(run(rank_cases.loads, size, saved)) == ["3\n"] * size


def test_the_model_of_a_checkpoint_is_one_for_transformers_and_one_process(saved: Path) -> None:
    booster, model, _ = rank_cases.boost(rank_cases.TOWER)
    missing, unexpected = booster.load_model(model, saved / "model")
    assert not missing
    assert not unexpected


def test_a_world_size_without_a_rank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")  # a user's own
    go_on(boost(tower()), steps=1)


def test_no_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(castor.UsageError, match=r"RANK.*not set; start it with torchrun"):
        castor.launch_from_torch()


def test_a_group_of_one_is_one_process(tmp_path: Path) -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        go_on(boost(tower()), steps=1)
    finally:
        distributed.destroy_process_group()
