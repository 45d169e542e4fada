"""Runs that stop and go on: bitwise the losses of the run that never stopped."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import castor
from helpers import LR, boost, equal, plugin
from zoo import LENGTH, VOCABULARY, gpt2_with_dropout, tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


class Run:
    """A training script: GPT-2 with dropout, a shuffled loader, a scheduler."""

    def __init__(self, seed: int, *, workers: int = 0, **settings: Any) -> None:
        self.model: Any = gpt2_with_dropout().model()
        self.optimizer = AdamW(self.model.parameters(), lr=LR)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=40)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(3, VOCABULARY, (28, LENGTH), generator=generator)
        self.loader = DataLoader(
            TensorDataset(tokens), batch_size=2, shuffle=True, num_workers=workers
        )
        self.booster = castor.Booster(plugin=plugin(**settings))
        self.booster.boost(
            self.model, self.optimizer, dataloader=self.loader, lr_scheduler=self.scheduler
        )
        self.step = 0
        torch.manual_seed(seed)

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.loader

    def train(self, until: int, save_in: Path | None = None) -> list[float]:
        losses: list[float] = []
        while self.step < until:
            for (tokens,) in self.loader:
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.booster.backward(loss, self.optimizer)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                self.step += 1
                if self.step == until:
                    break
        if save_in is not None:
            self.booster.save(save_in, *self.parts(), extra={"epochs": 1})
        return losses

    def resume(self, directory: Path) -> None:
        info = self.booster.load(directory, *self.parts())
        self.step = info.step
        assert info.extra == {"epochs": 1}


@pytest.mark.parametrize("split", [20, 28, 5])  # 14 batches make an epoch
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_twenty_and_twenty_steps_are_forty(precision: str, split: int, tmp_path: Path) -> None:
    expected = Run(0, precision=precision).train(40)
    first = Run(0, precision=precision)
    losses = first.train(split, save_in=tmp_path / "run")
    second = Run(99, precision=precision, memory="3MiB", placement_policy="cpu")
    random.random()
    second.resume(tmp_path / "run")
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    losses += second.train(40)
    assert losses == expected


@pytest.mark.slow
def test_prefetching_workers_do_not_count(tmp_path: Path) -> None:
    expected = Run(0, workers=2).train(16)
    losses = Run(0, workers=2).train(8, save_in=tmp_path / "run")
    second = Run(99, workers=2)
    second.resume(tmp_path / "run")
    assert losses + second.train(16) == expected


def test_a_run_may_stop_many_times(tmp_path: Path) -> None:
    expected = Run(0).train(18)
    losses = Run(0).train(3, save_in=tmp_path / "run")
    for until in (4, 9, 14, 15, 18):
        run = Run(until)
        run.resume(tmp_path / "run")
        losses += run.train(until, save_in=tmp_path / "run")
    assert losses == expected


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    settings = {"precision": "fp16", "initial_scale": 2.0**8, "growth_interval": 3}
    expected = Run(0, **settings).train(10)
    losses = Run(0, **settings).train(4, save_in=tmp_path / "run")
    second = Run(99, **settings)
    second.resume(tmp_path / "run")
    assert losses + second.train(10) == expected


def test_random_states_of_python_and_numpy_come_back(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]

    draw()  # an odd number of Gaussians: one is kept back
    BOOSTER.save(tmp_path / "run", tower(), step=1)
    expected = draw(), torch.rand(3).tolist()
    BOOSTER.load(tmp_path / "run", tower())
    assert (draw(), torch.rand(3).tolist()) == expected


# --- directories of runs ------------------------------------------------------------------------


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_layout_and_step_count(tmp_path: Path) -> None:
    run = Run(0)
    run.train(2, save_in=tmp_path / "run")
    directory = tmp_path / "run" / "step-00000002"
    assert castor.Booster.latest(BOOSTER, tmp_path / "run") == directory
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert names == {
        "model/model.safetensors", "model/config.json", "model/generation_config.json",
        "model/castor-manifest.json", "optimizer/optimizer.safetensors",
        "optimizer/optimizer.json", "optimizer/castor-manifest.json", "trainer.json",
        "manifest.json",
    }  # fmt: skip
    assert steps_in(tmp_path / "run") == [2]
    again = Run(1)
    again.resume(tmp_path / "run")
    again.train(3, save_in=tmp_path / "run")
    assert steps_in(tmp_path / "run") == [2, 3]
    back = Run(2)
    info = back.booster.load(directory, back.model)
    assert (info.step, info.path) == (2, directory)


def test_keep_prunes_the_oldest_up_to_this_step(tmp_path: Path) -> None:
    model, root = tower(), tmp_path / "run"
    for step in (1, 2, 3, 10, 4):
        BOOSTER.save(root, model, step=step, keep=None if step == 10 else 2)
    assert steps_in(root) == [3, 4, 10]
    BOOSTER.save(root, model, step=11, keep=1)
    assert steps_in(root) == [11]
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="keep"):
            BOOSTER.save(root, model, step=12, keep=keep)  # type: ignore[arg-type]
    assert steps_in(root) == [11]


def test_keep_does_not_count_broken_ones(tmp_path: Path) -> None:
    model, root = tower(), tmp_path / "run"
    for step in (1, 2, 3):
        BOOSTER.save(root, model, step=step)
    (root / "step-00000003" / "trainer.json").write_text("")
    BOOSTER.save(root, model, step=4, keep=2)
    assert steps_in(root) == [2, 3, 4]


def test_latest_passes_over_partial_ones(tmp_path: Path) -> None:
    model, root = tower(), tmp_path / "run"
    assert BOOSTER.latest(root) is None
    with pytest.raises(castor.CheckpointError, match="no whole checkpoint"):
        BOOSTER.load(root, model)
    for step in (1, 2, 3, 4):
        BOOSTER.save(root, model, step=step)
    (root / "step-00000004" / "manifest.json").unlink()
    (root / "step-00000003" / "model" / "model.safetensors").write_bytes(b"")
    assert BOOSTER.latest(root) == root / "step-00000002"
    assert BOOSTER.load(root, model).step == 2
    with pytest.raises(castor.CheckpointError, match=r"manifest\.json"):
        BOOSTER.load(root / "step-00000004", model)


def test_same_step_is_replaced_and_the_users_files_stay(tmp_path: Path) -> None:
    model, root = tower(), tmp_path / "run"
    directory = BOOSTER.save(root, model, step=1)
    (directory / "notes.txt").write_text("good one")
    with torch.no_grad():
        model.head.bias.fill_(5.0)
    BOOSTER.save(root, model, step=1)
    other = tower()
    BOOSTER.load(root, other)
    assert bool((other.head.bias == 5.0).all())
    assert (directory / "notes.txt").read_text() == "good one"
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def test_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    extra = {
        "epoch": 3, "best": float("inf"), "ids": (1, 2), 5: None, "name": "größe",
        "$tensor": b"\x01", "scores": torch.tensor([1.5, float("-inf")], dtype=torch.bfloat16),
    }  # fmt: skip
    BOOSTER.save(tmp_path / "run", tower(), step=1, extra=extra)
    back = BOOSTER.load(tmp_path / "run", tower()).extra
    scores, expected = back.pop("scores"), extra.pop("scores")
    assert equal(scores, expected)
    assert back == extra
    with pytest.raises(castor.CheckpointError, match=r"extra\['a'\]\[1\] is a set"):
        BOOSTER.save(tmp_path / "run", tower(), step=2, extra={"a": [0, {1}]})
    assert steps_in(tmp_path / "run") == [1]


def test_what_was_not_saved_cannot_be_loaded(tmp_path: Path) -> None:
    run = Run(0)
    BOOSTER.save(tmp_path / "run", run.model)
    for i, name in ((1, "optimizer"), (2, "lr_scheduler"), (3, "dataloader")):
        arguments: list[Any] = [None, None, None]
        arguments[i - 1] = run.parts()[i]
        with pytest.raises(castor.CheckpointError, match=f"without an? {name}"):
            run.booster.load(tmp_path / "run", run.model, *arguments)


def test_plain_model_needs_the_step(tmp_path: Path) -> None:
    with pytest.raises(castor.UsageError, match="step="):
        BOOSTER.save(tmp_path / "run", tower())
    model = tower()
    optimizer = AdamW(model.parameters())
    model(**tower_batch(0)).backward()
    optimizer.step()
    BOOSTER.save(tmp_path / "run", model, optimizer, step=1)
    boosted = boost(tower())
    assert boosted.booster.load(tmp_path / "run", boosted.model, boosted.optimizer).step == 1
    boosted.step(boosted.model(**tower_batch(1)))
    assert boosted.booster.save(tmp_path / "run", boosted.model).name == "step-00000002"


def test_skipped_steps_are_counted_over_a_resume(tmp_path: Path) -> None:
    boosted = boost(tower())
    loss = boosted.model(**tower_batch(0))
    with pytest.warns(RuntimeWarning, match="skipped"):
        boosted.step(loss * float("nan"))
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    back = boost(tower())
    back.booster.load(tmp_path / "run", back.model, back.optimizer)
    assert back.report().skipped_steps == 1
