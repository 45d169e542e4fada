"""Damaged checkpoints: whatever byte is wrong, CheckpointError and nothing in memory changes."""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import castor
import grids
from castor.checkpoint.container import memory_of
from helpers import boost, equal, plugin

BOOSTER = castor.Booster(plugin=plugin())
STRIDE = 1 if grids.WHOLE else 3
"""Of the bytes that are flipped; no multiple of two, so that all of a byte's bits are."""


class Trial:
    """A tiny run with all its parts, and a fingerprint of everything that a load may change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(optimizer, 2)
        self.boosted = boost(self.model, optimizer=optimizer, precision="bf16")
        self.optimizer = optimizer
        self.step()

    def step(self) -> None:
        self.boosted.step(self.model(torch.randn(4, 3)).float().square().sum())
        self.scheduler.step()

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler

    def tensors(self) -> list[torch.Tensor]:
        session = self.optimizer._castor.engine.session  # type: ignore[attr-defined]
        params = list(self.model.parameters())
        found = [p.detach() for p in params] + [session.steps, torch.get_rng_state()]
        for i in range(len(params)):
            found += [*session.states(i), session.master(i)]
        return found

    def fingerprint(self) -> str:
        digest = hashlib.blake2b()
        for tensor in self.tensors():
            digest.update(memory_of(tensor.contiguous()))
        state: Any = (
            self.scheduler.state_dict(), self.optimizer.param_groups[0]["lr"],
            random.getstate(), self.boosted.report().skipped_steps,
        )  # fmt: skip
        digest.update(repr(state).encode())
        return digest.hexdigest()


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def assert_every_flip_is_found(
    directory: Path, load: Callable[[], object], fingerprint: Callable[[], str]
) -> int:
    """Flips one bit of each byte of each file in turn, or of each STRIDE-th; returns how many."""
    before, flips = fingerprint(), 0
    for path in files_of(directory):
        intact = path.read_bytes()
        with open(path, "r+b", buffering=0) as file:
            for i in range(0, len(intact), STRIDE):
                byte = intact[i]
                file.seek(i)
                file.write(bytes([byte ^ (1 << (i % 8))]))
                with pytest.raises(castor.CheckpointError) as raised:
                    load()
                named = path.name in str(raised.value)
                assert named, (path, i, str(raised.value))
                file.seek(i)
                file.write(bytes([byte]))
                flips += 1
        assert fingerprint() == before, path
    load()
    assert fingerprint() != before
    return flips


@pytest.mark.slow
def test_every_flipped_byte_of_a_run_is_found(tmp_path: Path) -> None:
    trial = Trial()
    directory = BOOSTER.save(tmp_path / "run", *trial.parts(), extra={"best": 0.5})
    trial.step()

    def load() -> None:
        BOOSTER.load(tmp_path / "run" / "step-00000001", *trial.parts())

    sizes = [path.stat().st_size for path in files_of(directory)]
    assert sum(sizes) > 10_000
    flips = sum(len(range(0, size, STRIDE)) for size in sizes)
    assert assert_every_flip_is_found(directory, load, trial.fingerprint) == flips


def test_every_flipped_byte_of_a_model_is_found(tmp_path: Path) -> None:
    config = hf.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, n_positions=4)
    model: Any = hf.GPT2LMHeadModel(config)
    BOOSTER.save_model(model, tmp_path / "m", size_per_shard="1KB")
    model.lm_head.weight.data.add_(1.0)

    def fingerprint() -> str:
        return repr([p.tolist() for p in model.parameters()])

    flips = assert_every_flip_is_found(
        tmp_path / "m", lambda: BOOSTER.load_model(model, tmp_path / "m"), fingerprint
    )
    assert flips > 5000 // STRIDE


def test_every_flipped_byte_of_an_optimizer_and_a_scheduler_is_found(tmp_path: Path) -> None:
    trial = Trial()
    BOOSTER.save_optimizer(trial.optimizer, tmp_path / "o")
    (tmp_path / "s").mkdir()
    BOOSTER.save_lr_scheduler(trial.scheduler, tmp_path / "s" / "lr.json")
    trial.step()
    for name, load in (
        ("o", lambda: BOOSTER.load_optimizer(trial.optimizer, tmp_path / "o")),
        ("s", lambda: BOOSTER.load_lr_scheduler(trial.scheduler, tmp_path / "s" / "lr.json")),
    ):
        assert assert_every_flip_is_found(tmp_path / name, load, trial.fingerprint) > 100 // STRIDE


def test_the_same_values_in_other_bytes_are_damage(tmp_path: Path) -> None:
    """One flipped bit makes 1E-05 of 1e-05, which JSON reads as the same number."""
    trial = Trial()
    trial.optimizer.param_groups[0]["initial_lr"] = trial.scheduler.base_lrs[0] = 1e-5
    BOOSTER.save_lr_scheduler(trial.scheduler, tmp_path / "lr.json")
    text = (tmp_path / "lr.json").read_text()
    assert "1e-05" in text
    for other in (text.replace("1e-05", "1E-05"), text + "\n"):
        (tmp_path / "lr.json").write_text(other)
        with pytest.raises(castor.CheckpointError, match=r"lr\.json is damaged"):
            BOOSTER.load_lr_scheduler(trial.scheduler, tmp_path / "lr.json")


def test_damage_names_file_and_tensor(tmp_path: Path) -> None:
    trial = Trial()
    BOOSTER.save_optimizer(trial.optimizer, tmp_path / "o")
    file = tmp_path / "o" / "optimizer.safetensors"
    intact = file.read_bytes()
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(castor.CheckpointError, match=r"optimizer\.safetensors.*tensor 'bias\.m"):
        BOOSTER.load_optimizer(trial.optimizer, tmp_path / "o")
    file.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    with pytest.raises(castor.CheckpointError, match=r"optimizer\.safetensors.*header"):
        BOOSTER.load_optimizer(trial.optimizer, tmp_path / "o")


def test_truncation_of_every_file_is_found(tmp_path: Path) -> None:
    trial = Trial()
    directory = BOOSTER.save(tmp_path / "run", *trial.parts())
    trial.step()
    before = trial.fingerprint()
    for path in files_of(directory):
        intact = path.read_bytes()
        for length in (0, 1, len(intact) // 2, len(intact) - 1):
            path.write_bytes(intact[:length])
            with pytest.raises(castor.CheckpointError, match=path.name):
                BOOSTER.load(directory, *trial.parts())
            assert BOOSTER.latest(tmp_path / "run") is None
        path.write_bytes(intact + b" ")
        with pytest.raises(castor.CheckpointError, match=path.name):
            BOOSTER.load(directory, *trial.parts())
        path.unlink()
        with pytest.raises(castor.CheckpointError, match=path.name):
            BOOSTER.load(directory, *trial.parts())
        path.write_bytes(intact)
    assert trial.fingerprint() == before
    BOOSTER.load(directory, *trial.parts())


def test_foreign_checkpoint_is_checked_by_structure(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    BOOSTER.save_model(model, tmp_path / "m")
    (tmp_path / "m" / "castor-manifest.json").unlink()
    file = tmp_path / "m" / "model.safetensors"
    intact = file.read_bytes()
    length = int.from_bytes(intact[:8], "little")
    header = intact[8 : 8 + length]
    before = [param.clone() for param in model.parameters()]
    broken = {
        "cut short": [intact[:n] for n in (0, 7, 8, 50, 8 + length, len(intact) - 1)],
        "no JSON": [intact[:8] + b"?" * length + intact[8 + length :]],
        "longer": [intact + b"\0"],
        "length": [(2**62).to_bytes(8, "little") + intact[8:]],
        "shape": [intact.replace(b'"shape":[2,3]', b'"shape":[3,3]')],
        "offsets": [intact.replace(b'"data_offsets":[0,', b'"data_offsets":[4,')],
        "type": [intact.replace(b'"F32"', b'"X32"'), intact.replace(b'"F32"', b'"F16"')],
        "entry": [intact[:8] + header.replace(b'"shape":[2,3]', b'"shape":[{},{}]'[:12] + b" ")],
    }
    for kind, contents in broken.items():
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(castor.CheckpointError, match=r"model\.safetensors"):
                BOOSTER.load_model(model, tmp_path / "m")
            for param, value in zip(model.parameters(), before, strict=True):
                assert equal(param, value), kind
    file.write_bytes(intact)
    BOOSTER.load_model(model, tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    for text in ("", "[]", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(castor.CheckpointError, match=r"index\.json is damaged"):
            BOOSTER.load_model(model, tmp_path / "m")
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(castor.CheckpointError, match="model-00001-of-00001"):
        BOOSTER.load_model(model, tmp_path / "m")


def test_part_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    trial = Trial()
    first = BOOSTER.save(tmp_path / "run", *trial.parts(), step=1)
    trial.step()
    second = BOOSTER.save(tmp_path / "run", *trial.parts(), step=2)
    shutil.rmtree(first / "model")
    shutil.copytree(second / "model", first / "model")  # whole, but not of this moment
    with pytest.raises(castor.CheckpointError, match=r"model/castor-manifest\.json"):
        BOOSTER.load(first, *trial.parts())


def test_checks_come_before_any_change(tmp_path: Path) -> None:
    """Each part of a sound checkpoint that does not fit the objects leaves all of them alone."""
    trial = Trial()
    saved = BOOSTER.save(tmp_path / "run", *trial.parts())
    trial.step()
    sgd = SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    misfits: list[tuple[Any, ...]] = [
        (nn.Linear(4, 2), trial.optimizer, trial.scheduler),
        (trial.model, sgd, trial.scheduler),
        (trial.model, trial.optimizer, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)),
    ]
    before = trial.fingerprint()
    for parts in misfits:
        with pytest.raises((castor.CheckpointError, castor.UsageError)):
            BOOSTER.load(saved, *parts)
        assert trial.fingerprint() == before
