"""Weights and gradients on NVMe that others know, read at the same time, or fail to use."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import castor
from helpers import assert_equal, copies
from stored_tower import WIDTH, go_on_wide, wide
from zoo import tower_batch


def test_gradients_that_somebody_else_knows_are_kept(tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path)
        params = list(boosted.model.parameters())
        for step in range(2):
            loss = boosted.model(**tower_batch(step, width=WIDTH))
            boosted.booster.backward(loss, boosted.optimizer)
            for param in params:
                param.grad = param.grad.detach()  # its own memory, in a tensor of the user's
            boosted.optimizer.step()
            kept = [param.grad for param in params]
            boosted.optimizer.zero_grad()
            for layer in params[::2], params[1::2]:  # biases alone, or weights alone
                for param in layer:
                    param.grad = torch.full_like(param, 0.5)
                boosted.optimizer.step()
                boosted.optimizer.zero_grad()
                for param, grad in zip(params, kept, strict=True):
                    param.grad = grad
        return [*(grad.clone() for grad in kept), *copies(params)]

    assert_equal(run(tmp_path), run(None))


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_threads_read_weights_and_gradients_beside_each_other(overlap: str, tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path, overlap=overlap)
        params = list(boosted.model.parameters())

        def read(first: int) -> list[torch.Tensor]:
            order = [*range(first, len(params)), *range(first)]
            pairs = {k: (params[k].detach().clone(), params[k].grad.clone()) for k in order}
            sums = torch.stack([params[k].detach().sum() + params[k].grad.sum() for k in order])
            return [*(tensor for k in sorted(order) for tensor in pairs[k]), sums.sort().values]

        seen = []
        for step in range(2):
            boosted.booster.backward(
                boosted.model(**tower_batch(step, width=WIDTH)), boosted.optimizer
            )
            boosted.optimizer.step()  # an update of each chunk may be under way
            with ThreadPoolExecutor(4) as pool:
                results = list(pool.map(read, range(0, len(params), 7)))
            for result in results:
                assert_equal(result[:-1], results[0][:-1])
            seen += results[0]
            boosted.optimizer.zero_grad()
        return seen

    assert_equal(run(tmp_path), run(None))


def test_an_operator_that_fails_keeps_nothing_in_memory(tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path)
        matrices = [param.detach() for param in boosted.model.parameters() if param.dim() == 2]
        go_on_wide(boosted, steps=1)
        for first, second in itertools.pairwise(matrices):  # more than the window
            with pytest.raises(RuntimeError, match=r"size|shapes"):
                torch.addmm(first[:, :3], first, second)
            with pytest.raises(RuntimeError, match=r"size|shapes"):
                first.add_(second[:, :5])
        layers = [m for m in boosted.model.modules() if isinstance(m, torch.nn.Linear)]
        assert layers
        for module in layers[::4]:
            handle = module.register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                boosted.model(**tower_batch(0, width=WIDTH))
            handle.remove()
        go_on_wide(boosted, first=1, steps=2)
        return copies(boosted.model.parameters())

    assert_equal(run(tmp_path), run(None))


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.cpu_device("gloo has no collectives of other devices' tensors")
def test_a_collective_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    stored = wide(tmp_path / "nvme")
    go_on_wide(stored, steps=1)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        param = next(stored.model.parameters())
        with pytest.raises(castor.UsageError, match=r"on NVMe.*\.clone\(\)"):
            dist.all_reduce(param.detach())
        # What DTensor and torch.compile make of it.
        with pytest.raises(castor.UsageError, match=r"_c10d_functional::all_reduce.*on NVMe"):
            functional.all_reduce(param.detach(), "sum", dist.group.WORLD)
        values = param.detach().clone()
        dist.all_reduce(values)
        with torch.no_grad():
            param.copy_(values)
    finally:
        dist.destroy_process_group()
    go_on_wide(stored, first=1, steps=1)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradients_are_clipped_by_hand(foreach: bool | None, tmp_path: Path) -> None:
    def run(path: Path | None) -> list[torch.Tensor]:
        boosted = wide(path)
        norms = []
        for step in range(2):
            loss = boosted.model(**tower_batch(step, width=WIDTH))
            boosted.booster.backward(loss, boosted.optimizer)
            params = boosted.model.parameters()
            norms.append(torch.nn.utils.clip_grad_norm_(params, 0.01, foreach=foreach))
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        return [*norms, *copies(boosted.model.parameters())]

    assert_equal(run(tmp_path), run(None))
