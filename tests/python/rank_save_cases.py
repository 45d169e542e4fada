"""What tests of saves that ranks write together run: `python rank_save_cases.py NAME DIRECTORY`."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from castor import booster_checkpoints
from grids import some
from helpers import copies
from rank_cases import RankCase, _frozen, _of_rank, _refused, _tower_loss, _zoo, boost
from zoo import tower


def _channels_last(**settings: Any) -> RankCase:
    """A weight is not in row-major order, and a rank keeps a run of its memory."""
    vit = _zoo("vit", **settings)

    def build() -> Any:
        return vit.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    return RankCase(build, vit.loss, vit.settings)


CASES = {
    "fp32": RankCase(tower, _tower_loss),
    "small chunks": RankCase(tower, _tower_loss, {"chunk_bytes": "2KiB"}),
    "frozen": RankCase(_frozen, _zoo("gpt2").loss),
    **{
        f"bf16 {state_format}": _zoo("llama", precision="bf16", optim_state_format=state_format)
        for state_format in ("fp32", "split", "split_bf16", "split_int8")
    },
    "channels last": _channels_last(),
    "channels last, bf16": _channels_last(precision="bf16", optim_state_format="split_int8"),
    "nvme states": RankCase(
        tower, _tower_loss, {"nvme_path": "build", "nvme_offload_fraction": 1.0}
    ),
}
SAVED = some(
    CASES,
    *("small chunks", "frozen", "bf16 split", "bf16 split_int8", "channels last, bf16"),
    "nvme states",
)
OVERLAPS = some(("none", "forward"), "forward")
SIZES = some((2, 3), 3)
"""Numbers of ranks: of three some have parts that are smaller."""


@contextmanager
def _by_rank_0() -> Iterator[None]:
    """Saves as where the files cannot be divided."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(booster_checkpoints, "_savers", lambda *_: None)
        yield


def beside(directory: Path) -> None:
    """A moment that rank 0 has written alone, all together, and beside the training."""
    with _of_rank() as rank:
        for name, case in SAVED.items():
            for overlap in OVERLAPS:
                scratch = {"nvme_path": overlap} if "nvme_path" in case.settings else {}
                boosted = boost(case, overlap=overlap, **scratch)
                booster, model, optimizer = boosted
                path = directory / f"{name}, {overlap}"
                if rank == 0:
                    path.mkdir()
                for seed in range(2):
                    boosted.step(case.loss(model, 10 * seed + rank, rank))
                with _by_rank_0():
                    booster.save(path / "alone", model, optimizer, size_per_shard="20KB")
                booster.save(path / "together", model, optimizer, size_per_shard="20KB")
                booster.save(
                    path / "beside", model, optimizer, size_per_shard="20KB", use_async=True
                )
                for seed in range(2, 4):
                    boosted.step(case.loss(model, 10 * seed + rank, rank))
                booster.wait_for_saves()
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
                with _by_rank_0():
                    booster.save_model(model, path / "model alone")
                    booster.save_optimizer(optimizer, path / "optimizer alone")
                booster.save_model(model, path / "model", use_async=True)
                booster.save_optimizer(optimizer, path / "optimizer", use_async=True)
                booster.wait_for_saves()


def fails(directory: Path) -> None:
    """The disk of rank 1 is full, beside the training and at once."""
    with _of_rank() as rank:
        boosted = boost(CASES["fp32"])
        booster, model, optimizer = boosted
        boosted.step(_tower_loss(model, rank, rank))
        booster.save(directory / "run", model, optimizer)
        boosted.step(_tower_loss(model, rank, rank))
        real = os.pwrite

        def full(descriptor: int, data: Any, offset: int) -> int:
            if rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data, offset)

        os.pwrite = full
        booster.save(directory / "run", model, optimizer, use_async=True)
        boosted.step(_tower_loss(model, rank, rank))
        print(_refused(booster.wait_for_saves))
        print(_refused(lambda: booster.save(directory / "run", model, optimizer)))
        os.pwrite = real
        booster.save_model(model, directory / "model", use_async=True)
        booster.wait_for_saves()
        print(any(thread.name == "castor save" for thread in threading.enumerate()))
        print(booster.load(directory / "run", model, optimizer).step)


def differ(directory: Path) -> None:
    """Ranks are asked for different saves and loads; between, they train on."""
    with _of_rank() as rank:
        boosted = boost(CASES["fp32"])
        booster, model, optimizer = boosted
        run, own = directory / "run", directory / f"run{rank}"

        def refused(call: Callable[..., Any], path: Path, *args: Any, **options: Any) -> None:
            """And the ranks go on together, from the weights that they had."""
            before = copies(model.parameters())
            said = _refused(lambda: call(path, *args, **options))
            same = all(map(torch.equal, model.parameters(), before))
            boosted.step(_tower_loss(model, rank, rank))
            print(same, said)

        def load_model(path: Path) -> None:
            booster.load_model(model, path)

        def load_optimizer(path: Path) -> None:
            booster.load_optimizer(optimizer, path)

        boosted.step(_tower_loss(model, rank, rank))
        refused(booster.save, own, model, optimizer)
        refused(booster.save, run, model, optimizer, step=rank)
        refused(booster.save, run, model, optimizer, size_per_shard=f"{20 + rank}KB")
        refused(booster.save, run, model, optimizer if rank == 0 else None)
        refused(booster.save, run, model, optimizer, use_async=rank == 1)
        for _ in range(2):
            booster.save(run, model, optimizer)
            boosted.step(_tower_loss(model, rank, rank))
        steps = sorted(run.iterdir())
        refused(booster.load, steps[rank], model, optimizer)
        refused(booster.load, run, model, optimizer if rank == 0 else None)
        refused(load_model, steps[rank] / "model")
        shutil.copytree(run, own)
        if rank == 1:
            os.truncate(own / steps[1].name / "model" / "model.safetensors", 4000)
            os.truncate(own / steps[1].name / "optimizer" / "optimizer.safetensors", 4000)
        refused(booster.load, own / steps[1].name, model, optimizer)
        refused(load_model, own / steps[1].name / "model")
        refused(load_optimizer, own / steps[1].name / "optimizer")
        print(booster.load(own / steps[0].name, model, optimizer).step)  # each its own copy


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
