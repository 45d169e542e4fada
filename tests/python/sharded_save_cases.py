"""What tests of saves of divided models run: `python sharded_save_cases.py NAME DIRECTORY`.

As in tensor_cases.py and pipeline_cases.py, whose families and loops these are.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import as_rank
import pipeline_cases
import tensor_cases
from grids import some
from helpers import Boosted
from pipeline_cases import DEEP, ZERO_BUBBLE
from tensor_cases import EXPERTS, FAMILIES, die, said, write_own
from zoo import Case

NVME = {"nvme_path": "", "nvme_offload_fraction": 1.0}
"""The path is the case's own directory."""


def _momentum(params: Any) -> torch.optim.Optimizer:
    """Whose step is torch's own."""
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.9)


@dataclass(frozen=True)
class SaveCase:
    """A model among ranks."""

    case: Case
    sizes: dict[str, Any]
    """Arguments that divide it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments that one process is given too."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    @property
    def staged(self) -> bool:
        return "pp_size" in self.sizes

    def boost(self, directory: Path) -> Boosted:
        settings = self.sizes | self.settings | {"optimizer": self.optimizer}
        if "nvme_path" in settings:
            directory.mkdir(parents=True, exist_ok=True)
            settings["nvme_path"] = directory
        if self.staged:
            return pipeline_cases.boost(self.case, **settings)
        return tensor_cases.boost(self.case, settings.pop("tp_size", 1), **settings)

    def boost_unsharded(self) -> Boosted:
        """In one process, with the same states."""
        kept = ("precision", "optim_state_format")
        settings = {key: self.settings[key] for key in kept if key in self.settings}
        return tensor_cases.boost(self.case, 1, optimizer=self.optimizer, **settings)

    def train(self, boosted: Boosted, first: int, steps: int) -> None:
        """The same data on all ranks."""
        train = pipeline_cases.train if self.staged else tensor_cases.train
        train(self.case, boosted, first, steps)


def _formats(case: Case, sizes: dict[str, Any], *formats: str) -> dict[str, SaveCase]:
    return {
        f"{name} {state_format}": SaveCase(
            case, sizes, {"precision": "bf16", "optim_state_format": state_format}
        )
        for state_format in formats
        for name in [" ".join(sizes)]
    }


LAYERS, STAGES, EXPERTS_ALONE = {"tp_size": 2}, {"pp_size": 2}, {"ep_size": 2}
GPT2, LLAMA, MIXTRAL = DEEP["gpt2"], FAMILIES["llama"], EXPERTS["mixtral"]
CASES: dict[int, dict[str, SaveCase]] = {
    2: {
        "layers": SaveCase(GPT2, LAYERS),
        "layers, updates beside forward": SaveCase(GPT2, LAYERS, {"overlap": "forward"}),
        "layers, small chunks": SaveCase(LLAMA, LAYERS, {"chunk_bytes": "4KiB"}),
        "layers, nvme": SaveCase(GPT2, LAYERS, NVME),
        "layers and their experts": SaveCase(MIXTRAL, LAYERS | EXPERTS_ALONE),
        "layers of t5": SaveCase(FAMILIES["t5"], LAYERS),
        "tokens between layers": SaveCase(
            LLAMA, LAYERS | {"sequence_parallelism_mode": "split_gather"}
        ),
        **_formats(LLAMA, LAYERS, "fp32", "split", "split_bf16"),
        "stages": SaveCase(GPT2, STAGES),
        "stages, updates beside forward": SaveCase(GPT2, STAGES, {"overlap": "forward"}),
        "stages there and back": SaveCase(GPT2, STAGES | ZERO_BUBBLE),
        "stages of t5": SaveCase(FAMILIES["t5"], STAGES),
        "stages, nvme": SaveCase(GPT2, STAGES, NVME),
        "stages, own step": SaveCase(GPT2, STAGES, {}, _momentum),
        **_formats(LLAMA, STAGES, "fp32", "split", "split_bf16", "split_int8"),
        "experts": SaveCase(MIXTRAL, EXPERTS_ALONE),
        "uneven experts": SaveCase(EXPERTS["qwen3_moe"], EXPERTS_ALONE),
        "experts, nvme": SaveCase(MIXTRAL, EXPERTS_ALONE, NVME),
        **_formats(MIXTRAL, EXPERTS_ALONE, "split"),
    },
    4: {
        "layers, copies": SaveCase(GPT2, LAYERS),
        "layers, copies, nvme": SaveCase(LLAMA, LAYERS, NVME),
        "layers on four ranks": SaveCase(FAMILIES["gpt2"], {"tp_size": 4}),
        "layers and sequences": SaveCase(LLAMA, LAYERS | {"sp_size": 2}),
        "layers and stages": SaveCase(GPT2, LAYERS | STAGES),
        "stages, copies": SaveCase(GPT2, STAGES),
        "stages, copies, own step": SaveCase(GPT2, STAGES, {}, _momentum),
        "four stages": SaveCase(GPT2, {"pp_size": 4}),
        "experts, copies": SaveCase(MIXTRAL, EXPERTS_ALONE),
        "experts and stages": SaveCase(MIXTRAL, EXPERTS_ALONE | STAGES),
        **_formats(LLAMA, LAYERS, "split"),
    },
}
BESIDE = {
    2: some(
        CASES[2],
        *("layers, updates beside forward", "layers, nvme", "layers and their experts"),
        *("layers of t5", "tp_size split", "stages there and back", "stages of t5"),
        *("stages, own step", "pp_size split_int8", "uneven experts"),
    ),
    4: some(CASES[4], "layers, copies, nvme", "stages, copies, own step", "experts and stages"),
}
"""Those that are written at once and beside the training."""
DIVIDED = {"layers": "tp_size", "stages": "pp_size", "experts": "ep_size"}
"""Of those of two ranks, one of each kind."""


@contextmanager
def _slow_disk() -> Iterator[None]:
    """A save that is written beside the training takes a while."""
    real = os.pwrite

    def write(descriptor: int, data: Any, offset: int) -> int:
        if threading.current_thread().name == "castor save":
            time.sleep(0.001)
        return real(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        yield


def beside(directory: Path) -> None:
    """A moment that ranks have written at once, and beside the training."""
    for name, case in BESIDE[distributed.get_world_size()].items():
        path = directory / name
        path.mkdir(exist_ok=True)
        boosted = case.boost(path / "nvme")
        booster, model, optimizer = boosted
        use_async = case.optimizer is None
        case.train(boosted, 0, 2)
        for how, later in (("together", False), ("beside", use_async)):
            with _slow_disk():
                booster.save(path / how, model, optimizer, size_per_shard="40KB", use_async=later)
                if how == "beside":
                    case.train(boosted, 2, 2)
                booster.wait_for_saves()
        for how, later in (("at once", False), ("later", use_async)):
            booster.save_model(model, path / f"model {how}", use_async=later)
            booster.save_optimizer(optimizer, path / f"optimizer {how}", use_async=later)
        case.train(boosted, 4, 1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        booster.save_lr_scheduler(scheduler, path / "scheduler.json")  # waits for the save before


def over_gloo(directory: Path) -> None:
    """As beside, one composition, where ranks share no memory."""
    with pytest.MonkeyPatch.context() as patch:
        chosen = {name: CASES[4][name] for name in ("layers and stages",)}
        patch.setitem(BESIDE, 4, chosen)
        beside(directory)


def fails(directory: Path) -> None:
    """The disk of rank 1 is full, beside the training and at once."""
    rank, found = distributed.get_rank(), {}
    for name in DIVIDED:
        case, path = CASES[2][name], directory / name
        path.mkdir(exist_ok=True)
        boosted = case.boost(path)
        booster, model, optimizer = boosted
        case.train(boosted, 0, 1)
        booster.save(path / "run", model, optimizer)
        case.train(boosted, 1, 1)
        real = os.pwrite

        def full(descriptor: int, data: Any, offset: int, real: Any = real) -> int:
            if rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written: int = real(descriptor, data, offset)
            return written

        os.pwrite = full
        booster.save(path / "run", model, optimizer, use_async=True)
        case.train(boosted, 2, 1)
        found[name] = [
            said(booster.wait_for_saves),
            said(lambda: booster.save(path / "run", model, optimizer)),  # noqa: B023
        ]
        os.pwrite = real
        booster.save_model(model, path / "model", use_async=True)
        booster.wait_for_saves()
        found[name].append(booster.load(path / "run", model, optimizer).step)
    write_own(directory, "fails", found)


def one_dies(directory: Path) -> None:
    """A rank that the environment names is killed while it writes; others say what they hear."""
    name, dies = os.environ["DIVISION"], int(os.environ["DIES"])
    case = CASES[distributed.get_world_size()][name]
    boosted = case.boost(directory)
    booster, model, optimizer = boosted
    case.train(boosted, 0, 1)
    booster.save(directory / "run", model, optimizer)
    case.train(boosted, 1, 1)
    if distributed.get_rank() == dies:
        os.pwrite = die  # type: ignore[assignment]
    booster.save(directory / "run", model, optimizer, use_async=True)
    write_own(directory, "one_dies", said(booster.wait_for_saves))
    sys.stdout.flush()
    os._exit(0)  # there is nobody to meet at the end


def refused(directory: Path) -> None:
    """What is not saved of divided models."""
    found = {}
    for name in DIVIDED:
        case = CASES[2][name]
        booster, model, _ = case.boost(directory)
        other = torch.optim.AdamW(model.parameters())
        found[name] = said(lambda: booster.save_optimizer(other, directory / "o", model=model))  # noqa: B023
    case = CASES[2]["stages, own step"]
    booster, model, optimizer = case.boost(directory)
    found["own step"] = said(
        lambda: booster.save_optimizer(optimizer, directory / "o", use_async=True)
    )
    write_own(directory, "refused", found)


if __name__ == "__main__":
    as_rank.run(globals())
