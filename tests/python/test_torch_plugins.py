"""torch's own classes under castor's loop: TorchDDPPlugin and TorchFSDPPlugin, also on GPUs."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import castor
import simulated_gpu
import torch_plugin_cases
from rank_cases import _uneven
from rank_processes import found_by_each, run, run_python, succeeded
from torch_plugin_cases import (
    CASE,
    CASES,
    GOING_ON,
    MAX_NORM,
    PLUGINS,
    STEPS,
    TORCHS,
    boost,
    narrow,
    trained,
)
from zoo import Tower, tower, tower_batch

CPU = "cpu"
SIMULATED = [f"simgpu:{seed}" for seed in simulated_gpu.SEEDS]
"""Devices, by what CASTOR_TEST_DEVICE says."""


@pytest.fixture(
    scope="module",
    params=[CPU, *(pytest.param(device, marks=pytest.mark.slow) for device in SIMULATED)],
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param != CPU:
        simulated_gpu.require()
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where two ranks on a device have left what they found."""

    @cache
    def found(device: str) -> Path:
        path = tmp_path_factory.mktemp("torch")
        with pytest.MonkeyPatch.context() as patch:
            _on(device, patch)
            succeeded(run(torch_plugin_cases.each, 2, path, timeout=900))
        return path

    return found


@pytest.fixture(scope="module")
def ranks(device: str, ranks_on: Callable[[str], Path]) -> Path:
    return ranks_on(device)


def _on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on compute there."""
    monkeypatch.delenv("CASTOR_TEST_DEVICE", raising=False)
    if device != CPU:
        monkeypatch.setenv("CASTOR_TEST_DEVICE", device)


@cache
def in_one_process(name: str = "gpt2", micro_batches: int = 2) -> Any:
    """Losses and weights."""
    return trained("gemini", range(micro_batches), CASES[name])


def test_ddp_is_torchs_to_the_bit(ranks: Path) -> None:
    for rank in range(2):
        found = torch.load(ranks / f"ddp.{rank}.pt")
        assert found.keys() == {*CASES, "bf16"}
        for name, ((losses, weights), (expected, of_torch)) in found.items():
            assert losses == expected, name
            assert all(map(torch.equal, weights, of_torch)), name


def test_one_script_gives_the_same_losses_under_each_plugin(ranks: Path) -> None:
    expected, weights = in_one_process()
    for rank in range(2):
        for name, (losses, norm, steps, place) in torch.load(ranks / f"losses.{rank}.pt").items():
            assert losses == pytest.approx(expected[rank::2], rel=1e-5), name
            assert norm > MAX_NORM
            assert (steps, place) == (STEPS, (rank, 2))
    reference = CASE.build()
    for name in PLUGINS:
        castor.Booster(castor.TorchDDPPlugin(device="cpu")).load_model(
            reference, ranks / f"{name}-trained"
        )
        found = torch.cat([param.detach().flatten() for param in reference.parameters()])
        wanted = torch.cat([weight.flatten() for weight in weights])
        # Biases of keys have gradients of rounding alone, of which Adam makes steps.
        assert (found - wanted).norm() < 1e-4 * wanted.norm(), name


def test_fsdp_computes_what_one_process_does(ranks: Path) -> None:
    alone = {name: in_one_process(name)[0] for name in CASES}
    for rank in range(2):
        for name, losses in torch.load(ranks / f"fsdp.{rank}.pt").items():
            expected = alone.get(name, alone["gpt2"])[rank::2]
            assert losses == pytest.approx(expected, rel=1e-2 if name == "bf16" else 1e-5), name


def test_a_run_goes_on_under_each_other_plugin(ranks: Path) -> None:
    """Files have the same bytes after a load under another plugin: weights, states and options."""
    for saved_by, name in GOING_ON:
        expected = files_of(ranks / saved_by)
        assert len(expected) == 7  # of the model 4, of the optimizer 3
        for again in (f"{saved_by}-{name}", f"{saved_by}-{name}-parts"):
            assert files_of(ranks / again) == expected, again


def test_a_run_goes_on_on_another_device(
    device: str, ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have the same bytes after a load by ranks on the CPU of what GPUs have saved."""
    simulated_gpu.require()
    _on(SIMULATED[0] if device == CPU else CPU, monkeypatch)
    for name in TORCHS:
        shutil.copytree(ranks / name, tmp_path / name)
    succeeded(run(torch_plugin_cases.goes_on, 2, tmp_path))
    for name in TORCHS:
        assert files_of(tmp_path / f"{name}-elsewhere") == files_of(tmp_path / name), name


def test_micro_batches_under_no_sync_add_up(ranks: Path) -> None:
    expected, _ = in_one_process(micro_batches=4)
    for rank in range(2):
        for name, losses in torch.load(ranks / f"accumulated.{rank}.pt").items():
            wanted = [expected[4 * step + 2 * rank + k] for step in range(STEPS) for k in range(2)]
            assert losses == pytest.approx(wanted, rel=1e-5), name


def test_gradients_that_no_sync_left_apart_come_together_or_the_step_is_refused(
    ranks: Path,
) -> None:
    reference = _uneven()
    for micro in range(2):
        for rank in range(2):
            skip = 2 if rank == 1 else None
            (reference(**tower_batch(10 * micro + rank), skip=skip) / 2).backward()
    for rank in range(2):
        said = torch.load(ranks / f"apart.{rank}.pt")
        for name, param in reference.named_parameters():
            found = said["ddp"][name]
            assert (found is None) == (param.grad is None) == name.startswith("unused"), name
            if found is not None:
                torch.testing.assert_close(found, param.grad)
        assert said["fsdp"].startswith("the last backward before this step was under booster.no_s")


def test_passes_that_are_half_under_no_sync_are_not_left_apart(ranks: Path) -> None:
    reference = tower()
    for rank in range(2):
        (reference(**tower_batch(rank)) / 2).backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()]).item()
    for found in _by_rank(ranks, "astride"):
        assert found.pop("fsdp backward") == "refused"
        assert found == pytest.approx(dict.fromkeys(found, norm), rel=1e-5)


@pytest.mark.smoke
def test_uneven_and_empty_shards_are_saved_and_read(tmp_path: Path) -> None:
    found = found_by_each(torch_plugin_cases.on_three, 3, tmp_path)
    assert [rows for _, rows, _ in found] == [[2, 2, 1, 1], [2, 2, 0, 0], [1, 1, 0, 0]]
    for (first, again), _, steps in found:
        assert first == again
        assert steps == 3
    assert files_of(tmp_path / "first") == files_of(tmp_path / "again")
    booster, model, optimizer = boost(PLUGINS["gemini"](), narrow())
    assert booster.load(tmp_path / "first", model, optimizer).step == 1
    booster.save(tmp_path / "alone", model, optimizer)
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "first")


def test_rank_0s_buffers_are_every_ranks_where_that_is_asked_for(ranks: Path) -> None:
    first, second = (torch.load(ranks / f"buffers.{rank}.pt") for rank in range(2))
    own = [0.9 * 0.1 * tower_batch(rank)["x"].mean(0) for rank in range(2)]
    last = [0.1 * tower_batch(1000 + rank)["x"].mean(0) for rank in range(2)]
    torch.testing.assert_close(first[True], own[0] + last[0])
    torch.testing.assert_close(second[True], first[True])  # after each step
    torch.testing.assert_close(second[False], own[1] + last[1])


def test_all_ranks_leave_out_a_step_that_is_not_finite_on_one(ranks: Path) -> None:
    for found in _by_rank(ranks, "not_finite"):
        for name, figures in found.items():
            assert figures == [1, True, True, [2, 1, True], True, 1], name


def test_ranks_that_were_given_different_things_are_told(ranks: Path) -> None:
    for settings, model in _by_rank(ranks, "others"):
        assert "rank 0 and rank 1 differ in its settings: " in settings
        assert "max_norm=1.0" in settings
        assert "max_norm=2.0" in settings
        assert "rank 0 and rank 1 differ in names, shapes, dtypes or requires_grad" in model


def test_a_model_that_is_only_evaluated_is_rank_0s(ranks: Path) -> None:
    torch.manual_seed(0)
    loss = Tower()(**tower_batch(0)).item()
    assert _by_rank(ranks, "untrained") == [[loss, loss]] * 2


def test_a_copy_of_a_model_is_an_ordinary_one(ranks: Path) -> None:
    for found in _by_rank(ranks, "copies"):
        assert found == {
            "equal": True,
            "boosted": [True, False, False],
            "steps": False,
            "signature": True,
            "tokens": 26,
        }


def test_a_model_and_its_optimizer_go_with_their_last_reference(ranks: Path) -> None:
    assert _by_rank(ranks, "lifetimes") == [[[True] * 3] * len(TORCHS)] * 2


@pytest.mark.parametrize("name", TORCHS)
def test_a_killed_rank_ends_the_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTOR_TEST_PLUGIN", name)
    first, second = run(torch_plugin_cases.killed, 2, tmp_path, timeout=60)
    assert second.code == -9
    assert first.code not in (0, -9)
    assert "Error" in first.errors


def test_one_process_needs_no_launcher(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(device, monkeypatch)
    done = run_python(torch_plugin_cases.__file__, "alone", tmp_path)
    assert done.returncode == 0, done.stderr
    expected, _ = in_one_process()
    of_model = sum(param.nbytes for param in CASE.build().parameters())
    found = json.loads((tmp_path / "alone.json").read_text())
    for name, (losses, ranks, parameters, states, norm) in found.items():
        assert norm > 0
        assert losses == pytest.approx(expected[:8], rel=1e-5), name
        counts = 4 * len(list(CASE.build().parameters()))
        assert (ranks, parameters, states) == (1, of_model, 2 * of_model + counts), name
    assert files_of(tmp_path / "ddp") == files_of(tmp_path / "fsdp")


def test_a_model_and_all_of_it_is_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_gpu.require()
    _on(SIMULATED[0], monkeypatch)
    done = run_python(torch_plugin_cases.__file__, "moved", tmp_path)
    assert done.returncode == 0, done.stderr
    places, pinned = json.loads((tmp_path / "moved.json").read_text())
    on_host = {"step", "shard"}
    assert places == {name: "cpu" if name in on_host else simulated_gpu.NAME for name in places}
    assert pinned


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {simulated_gpu.ID: "GPU-1"},
            "ranks 0 and 1 compute on one GPU (GPU-1), which torch's process groups of GPUs "
            "refuse: start as many ranks as there are GPUs",
        ),
        ({"CASTOR_DEVICE_LINK": "host"}, 'which CASTOR_DEVICE_LINK="host" forbids: unset it'),
    ],
)
def test_ranks_that_cannot_send_memory_of_gpus_are_told(
    environment: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_gpu.require()
    _on(SIMULATED[0], monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for said in found_by_each(torch_plugin_cases.refused, 2, tmp_path):
        assert [message in one for one in said] == [True, True], said


@pytest.mark.slow
@pytest.mark.parametrize("device", SIMULATED)
def test_gpus_train_the_weights_that_the_cpu_does(
    device: str, ranks_on: Callable[[str], Path]
) -> None:
    simulated_gpu.require()
    on_cpu, on_gpus = CASE.build(), CASE.build()
    for name in TORCHS:
        for model, where in ((on_cpu, CPU), (on_gpus, device)):
            booster = castor.Booster(castor.TorchDDPPlugin(device="cpu"))
            booster.load_model(model, ranks_on(where) / f"{name}-trained")
        for param, of_cpu in zip(on_gpus.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(param, of_cpu, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.usefixtures("cuda")
def test_one_process_trains_on_a_real_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernels are others than the CPU's."""
    _on("cuda", monkeypatch)
    done = run_python(torch_plugin_cases.__file__, "alone", tmp_path)
    assert done.returncode == 0, done.stderr
    expected, _ = in_one_process()
    for name, (losses, *_) in json.loads((tmp_path / "alone.json").read_text()).items():
        assert losses == pytest.approx(expected[:8], rel=1e-3), name


def files_of(run_directory: Path) -> dict[str, bytes]:
    """Of its checkpoint, but for the random states and the checksum of their file."""
    return {
        str(path.relative_to(run_directory)): path.read_bytes()
        for path in run_directory.rglob("*")
        if path.is_file() and path.name not in ("trainer.json", "manifest.json")
    }


def _by_rank(directory: Path, name: str) -> list[Any]:
    return [json.loads((directory / f"{name}{rank}.json").read_text()) for rank in range(2)]
