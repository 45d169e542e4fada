"""Data loaders' workers, and other forks of a process that trains: what they get of a model."""

import gc
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from castor.runtime.engine import engine_of
from helpers import Boosted, boost, without_collections
from zoo import tower, tower_batch

MIB = 2**20
STAYED = "this process was forked from the one that boosted the model"


def in_child(body: Callable[[], Any]) -> str:
    """What `body` returns, or what it raises, in a forked child that may take a minute."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that threads do not come along is what is tested
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text
    return text


def trained(**settings: Any) -> Boosted:
    boosted = boost(tower(), **settings)
    boosted.step(boosted.model(**tower_batch(0)))
    return boosted


def kib(figure: str, smaps: str) -> int:
    found = re.search(rf"^{figure}:\s+(\d+) kB", smaps, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_worker_holds_no_copy_of_what_the_parent_rewrites() -> None:
    """A child that shared chunk memory would keep the old pages of what a step writes."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(16)]
    boosted = boost(nn.Sequential(*layers), chunk_bytes="4MiB")
    state_bytes = 16 * 16 * MIB  # weights, gradients and moments

    def step() -> None:
        boosted.step(boosted.model(torch.ones(1, 1024)).square().mean())

    step()
    reading, writing = os.pipe()
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.read(told, 1)
        os.write(writing, Path("/proc/self/smaps_rollup").read_bytes())
        os._exit(0)
    for _ in range(2):
        step()
    os.write(tell, b"!")
    # Pages that the parent has rewritten are the child's own from then on.
    held = kib("Private_Dirty", os.read(reading, 10_000).decode()) * 1024
    os.waitpid(child, 0)
    for descriptor in (reading, writing, told, tell):
        os.close(descriptor)
    assert held < state_bytes // 4


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": "forward"}, {"precision": "bf16"}, {"link_bandwidth": "1GB/s"}],
    ids=["plain", "overlap", "bf16", "link"],
)
def test_a_child_that_touches_a_parameter_is_told(settings: dict[str, Any]) -> None:
    boosted = trained(**settings)
    model, optimizer = boosted.model, boosted.optimizer
    weight = next(model.parameters())
    state = optimizer.state[weight]["exp_avg"]
    touches: list[Callable[[], Any]] = [
        lambda: weight.sum(),
        lambda: weight.data.clone(),
        lambda: weight.detach().view(torch.uint8).numpy().sum(),
        lambda: state.sum(),
        lambda: model(**tower_batch(0)),
        lambda: model.eval()(**tower_batch(0)),
        lambda: model.state_dict(),
        lambda: optimizer.step(),
    ]
    for i, touch in enumerate(touches):
        assert STAYED in in_child(touch), i
    boosted.step(model(**tower_batch(1)))  # nothing of it concerns the parent


def test_a_child_reads_a_clone() -> None:
    copied = next(trained().model.parameters()).detach().clone()
    assert in_child(lambda: copied.sum().item()) == str(copied.sum().item())


def test_what_outlives_its_session_is_ordinary_memory() -> None:
    boosted = trained()
    kept = boosted.model.state_dict()
    total = sum(float(value.sum()) for value in kept.values())
    del boosted
    gc.collect()
    assert in_child(lambda: sum(float(value.sum()) for value in kept.values())) == str(total)


class Tokens(Dataset[Any]):
    """Holds the model, as datasets do that need its configuration."""

    def __init__(self, model: nn.Module, read: bool) -> None:
        self.model, self.read = model, read

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.read:
            return next(self.model.parameters()).detach()
        return torch.tensor([index, len(list(self.model.modules()))])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_workers_with_a_dataset_that_holds_the_model() -> None:
    boosted = trained()
    loader = DataLoader(Tokens(boosted.model, read=False), num_workers=2, batch_size=2)
    assert [row[0].item() for batch in loader for row in batch] == list(range(8))
    reading = DataLoader(Tokens(boosted.model, read=True), num_workers=1)
    with pytest.raises(RuntimeError, match=STAYED):
        list(reading)
    boosted.step(boosted.model(**tower_batch(1)))


def test_a_child_may_collect_an_optimizer_whose_model_is_gone(tmp_path: Path) -> None:
    with without_collections():
        boosted = trained(nvme_path=tmp_path, nvme_offload_fraction=1.0)
        session = weakref.ref(engine_of(boosted.model).session)
        schedule: dict[str, Any] = {"optimizer": boosted.optimizer}
        schedule["schedule"] = schedule  # as those of torch, which refer to themselves
        del boosted, schedule
        assert session() is not None  # it waits for the garbage collector
        assert in_child(lambda: gc.collect() > 0) == "True"
    gc.collect()
    assert session() is None
    assert list(tmp_path.iterdir()) == []
