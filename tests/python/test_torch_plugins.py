"""torch's own classes under castor's loop: TorchDDPPlugin."""

from pathlib import Path

import pytest
import torch

import castor
import torch_plugin_cases
from rank_processes import run, succeeded
from torch_plugin_cases import CASE, CASES, MAX_NORM, PLUGINS, STEPS, trained


def test_ddp_is_torchs_to_the_bit(tmp_path: Path) -> None:
    succeeded(run(torch_plugin_cases.ddp_and_torch, 2, tmp_path))
    for rank in range(2):
        found = torch.load(tmp_path / f"ddp.{rank}.pt")
        assert found.keys() == CASES.keys()
        for name, ((losses, weights), (expected, of_torch)) in found.items():
            assert losses == expected, name
            assert all(map(torch.equal, weights, of_torch)), name


def test_one_script_gives_the_same_losses_under_each_plugin(tmp_path: Path) -> None:
    succeeded(run(torch_plugin_cases.same_script, 2, tmp_path))
    expected, weights = trained("gemini", range(2))
    for rank in range(2):
        for name, (losses, norm, steps, place) in torch.load(
            tmp_path / f"losses.{rank}.pt"
        ).items():
            assert losses == pytest.approx(expected[rank::2], rel=1e-5), name
            assert norm > MAX_NORM
            assert (steps, place) == (STEPS, (rank, 2))
    reference = CASE.build()
    for name in PLUGINS:
        castor.checkpoint.load_model(reference, tmp_path / name, strict=True)
        found = torch.cat([param.detach().flatten() for param in reference.parameters()])
        wanted = torch.cat([weight.flatten() for weight in weights])
        # Biases of keys have gradients of rounding alone, of which Adam makes steps.
        assert (found - wanted).norm() < 1e-4 * wanted.norm(), name


def test_fsdp_computes_what_one_process_does(tmp_path: Path) -> None:
    succeeded(run(torch_plugin_cases.all_cases_divided, 2, tmp_path))
    alone = {name: trained("gemini", range(2), case)[0] for name, case in CASES.items()}
    for rank in range(2):
        for name, losses in torch.load(tmp_path / f"fsdp.{rank}.pt").items():
            expected = alone.get(name, alone["gpt2"])[rank::2]
            assert losses == pytest.approx(expected, rel=1e-2 if name == "bf16" else 1e-5), name


def test_a_run_goes_on_under_each_other_plugin(tmp_path: Path) -> None:
    """Files have the same bytes after a load under another plugin: weights, states and options."""
    succeeded(run(torch_plugin_cases.saved_by_each, 2, tmp_path))
    for saved_by in PLUGINS:
        expected = files_of(tmp_path / saved_by)
        assert len(expected) == 7  # of the model 4, of the optimizer 3
        for name in PLUGINS:
            for again in (f"{saved_by}-{name}", f"{saved_by}-{name}-parts"):
                assert files_of(tmp_path / again) == expected, again


def files_of(run_directory: Path) -> dict[str, bytes]:
    """Of its checkpoint, but for the random states and the checksum of their file."""
    return {
        str(path.relative_to(run_directory)): path.read_bytes()
        for path in run_directory.rglob("*")
        if path.is_file() and path.name not in ("trainer.json", "manifest.json")
    }
