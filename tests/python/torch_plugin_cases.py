"""What tests of torch's own classes under castor's loop run on ranks; see rank_cases.py.

CASTOR_TEST_DEVICE says on which device: "simgpu:1", "cuda", or the CPU without it.
"""

import copy
import gc
import inspect
import io
import json
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import castor
import simulated_gpu
from castor.optim.torch_step import torch_step_of
from castor.plugins import Plugin
from castor.runtime.boosted_model import _models
from castor.runtime.device_groups import backend_of
from castor.runtime.torch_model import here
from grids import WHOLE, some
from helpers import GIB
from rank_cases import EXACT, STEPS, RankCase, _uneven
from simulated import compute_as_asked
from tensor_cases import write_own
from zoo import CASES as ZOO
from zoo import Tower, tower, tower_batch

CASE = EXACT["gpt2"]
MAX_NORM = 0.5
BUDGETS: dict[str, Any] = {"device_memory": GIB, "host_memory": GIB, "precision": "fp32"}
DEVICE = "cuda" if os.environ.get("CASTOR_TEST_DEVICE") == "cuda" else "cpu"
"""The plugins' argument; compute_as_asked puts the simulated GPU in the CPU's place."""
PLUGINS: dict[str, Callable[..., Plugin]] = {
    "gemini": lambda **s: castor.GeminiPlugin(device=DEVICE, **BUDGETS, **s),
    "zero": lambda **s: castor.LowLevelZeroPlugin(device=DEVICE, cpu_offload=True, **BUDGETS, **s),
    "ddp": lambda **s: castor.TorchDDPPlugin(device=DEVICE, **s),
    "fsdp": lambda **s: castor.TorchFSDPPlugin(device=DEVICE, **s),
}
TORCHS = ("ddp", "fsdp")
"""Of these, those that train with torch's own classes."""
CASES = some(
    {name: EXACT[name] for name in ("gpt2", "t5", "mixtral", "checkpointed", "frozen", "lazy")},
    *("gpt2", "mixtral", "lazy"),
)
"""That the ranks pass through alike."""

GOING_ON = [
    (first, then)
    for place, first in enumerate(PLUGINS)
    for then in (PLUGINS if WHOLE else [[*PLUGINS][place - 1]])
]
"""(plugin, plugin): with what the first has saved the second goes on. In CI each has one other."""

FSDP_SETTINGS: dict[str, dict[str, Any]] = some({
    "kept after forward": {"reshard_after_forward": False},
    "divided after forward": {"reshard_after_forward": True},
    "offloaded": {"cpu_offload": True},
    "bf16": {"precision": "bf16"},
}, "kept after forward", "offloaded", "bf16")  # fmt: skip


class Normed(Tower):
    """With statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return super().forward(self.norm(x), labels)


def normed() -> Normed:
    torch.manual_seed(7)
    return Normed()


NORMED = RankCase(normed, lambda model, seed, _: model(**tower_batch(seed)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def boost(
    plugin: Plugin, model: nn.Module
) -> tuple[castor.Booster, nn.Module, torch.optim.Optimizer]:
    booster = castor.Booster(plugin)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    return booster, model, optimizer


def script(
    booster: castor.Booster,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Sequence[int],
    *,
    case: RankCase = CASE,
    first: int = 0,
    steps: int = STEPS,
) -> list[float]:
    """A loop written for castor, whatever the plugin; `ranks`: whose batches this process takes."""
    losses = []
    for step in range(first, first + steps):
        for rank in ranks:
            with booster.no_sync(model) if rank != ranks[-1] else nullcontext():
                loss = case.loss(model, 1000 * step + rank, rank)
                booster.backward(loss / len(ranks), optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu().clone() for param in model.parameters()]


def trained(
    name: str, ranks: Sequence[int], case: RankCase = CASE, **settings: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights under a plugin."""
    booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM, **settings), case.build())
    losses = script(booster, model, optimizer, ranks, case=case)
    return losses, weights_of(model)


def trained_by_torch(
    case: RankCase, rank: int, dtype: torch.dtype | None = None, **options: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """A loop over DistributedDataParallel that knows nothing of castor."""
    model = case.build()
    castor.lazy.materialise.materialise(model)
    model.to(device := device_of_rank())
    optimizer = optimizer_of(model)
    group = None
    if device.type != "cpu":
        group = distributed.new_group(backend=backend_of(device))
    ddp = DistributedDataParallel(model, process_group=group, **options)
    ddp.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map(partial(_moved, device), (args, kwargs)), with_kwargs=True
    )
    losses = []
    for step in range(STEPS):
        with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
            loss = case.loss(ddp, 1000 * step + rank, rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(model)


def device_of_rank() -> torch.device:
    """Device that this rank computes on."""
    return castor.TorchDDPPlugin(device=DEVICE).device


def _moved(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def ddp_and_torch(directory: Path) -> None:
    """Both, for all cases."""
    rank = distributed.get_rank()
    unused = {"find_unused_parameters": True}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        options = unused if name == "mixtral" else {}
        found[name] = (
            trained("ddp", range(rank, rank + 1), case, **options),
            trained_by_torch(case, rank, **options),
        )
    found["bf16"] = (
        trained("ddp", range(rank, rank + 1), precision="bf16"),
        trained_by_torch(CASE, rank, torch.bfloat16),
    )
    torch.save(found, directory / f"ddp.{rank}.pt")


def same_script(directory: Path) -> None:
    """Under each plugin; whether all ranks have the same weights is seen from the files."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for name in PLUGINS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        losses = script(booster, model, optimizer, range(rank, rank + 1))
        booster.save_model(model, directory / f"{name}-trained")
        report = booster.report(model)
        found[name] = losses, report.gradient_norm, report.steps, (report.rank, report.ranks)
    torch.save(found, directory / f"losses.{rank}.pt")


def all_cases_divided(directory: Path) -> None:
    """Losses of TorchFSDPPlugin, with its options."""
    rank = distributed.get_rank()
    own = range(rank, rank + 1)
    found: dict[str, Any] = {name: trained("fsdp", own, case)[0] for name, case in CASES.items()}
    for name, settings in FSDP_SETTINGS.items():
        found[name] = trained("fsdp", own, **settings)[0]
    torch.save(found, directory / f"fsdp.{rank}.pt")


def saved_by_each(directory: Path) -> None:
    """A run under each plugin goes on under each other."""
    rank = distributed.get_rank()
    own = range(rank, rank + 1)
    followed = {}
    for name in PLUGINS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        script(booster, model, optimizer, own, steps=3)
        booster.save(directory / name, model, optimizer)
        booster.save_model(model, directory / f"{name}-model")
        booster.save_optimizer(optimizer, directory / f"{name}-optimizer")
        (followed[name],) = script(booster, model, optimizer, own, first=3, steps=1)
    for saved_by, name in GOING_ON:
        other = CASE.build()
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), other)
        assert booster.latest(directory / saved_by) == directory / saved_by / "step-00000003"
        info = booster.load(directory / saved_by, model, optimizer)
        assert info.step == 3
        booster.save(directory / f"{saved_by}-{name}", model, optimizer)
        (loss,) = script(booster, model, optimizer, own, first=3, steps=1)
        assert loss == followed[saved_by], (saved_by, name, loss, followed)
        booster.load_model(model, directory / f"{saved_by}-model")
        booster.load_optimizer(optimizer, directory / f"{saved_by}-optimizer")
        booster.save(directory / f"{saved_by}-{name}-parts", model, optimizer, step=3)


def apart(directory: Path) -> None:
    """What no_sync leaves apart: a step without a pass outside, and gradients of one rank alone."""
    rank = distributed.get_rank()
    said: dict[str, Any] = {}
    for name in TORCHS:
        booster, model, optimizer = boost(PLUGINS[name](), _uneven())
        for micro in range(2):
            with booster.no_sync(model):
                skip = 2 if rank == 1 else None
                booster.backward(model(**tower_batch(10 * micro + rank), skip=skip), optimizer)
        try:
            optimizer.step()
            grads = {n: p.grad for n, p in model.named_parameters()}
            said[name] = {n: None if grad is None else grad.cpu() for n, grad in grads.items()}
        except castor.UsageError as error:
            said[name] = str(error)
    torch.save(said, directory / f"apart.{rank}.pt")


def astride(directory: Path) -> None:
    """A forward under no_sync with its backward outside, and the other way round."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for name in TORCHS:
        for inside in ("forward", "backward"):
            booster, model, optimizer = boost(PLUGINS[name](), tower())
            with booster.no_sync(model) if inside == "forward" else nullcontext():
                loss = model(**tower_batch(rank))
            with booster.no_sync(model) if inside == "backward" else nullcontext():
                booster.backward(loss, optimizer)
            try:
                optimizer.step()
                first = next(model.parameters())
                norm = booster.report(model).gradient_norm
                found[f"{name} {inside}"] = norm if first.grad is not None else "no gradient"
            except castor.UsageError:
                found[f"{name} {inside}"] = "refused"
    write_own(directory, "astride", found)


def accumulated(directory: Path) -> None:
    """Two micro-batches a step, the first under no_sync."""
    rank = distributed.get_rank()
    own = [2 * rank, 2 * rank + 1]
    found = {name: trained(name, own)[0] for name in TORCHS}
    torch.save(found, directory / f"accumulated.{rank}.pt")


def narrow() -> nn.Module:
    """With parameters of fewer rows than there are ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


def on_three(directory: Path) -> None:
    """Parts that are uneven or empty are saved and read."""
    rank = distributed.get_rank()
    booster, model, optimizer = boost(PLUGINS["fsdp"](max_norm=MAX_NORM), narrow())

    def step(seed: int) -> float:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).sum()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(rank)
    booster.save(directory / "first", model, optimizer)
    losses = [step(10 + rank)]
    booster.load(directory / "first", model, optimizer)
    booster.save(directory / "again", model, optimizer)
    losses.append(step(10 + rank))
    rows = [len(here(param)) for param in model.parameters()]
    write_own(directory, "on_three", [losses, rows, booster.report(model).steps])


def buffers(directory: Path) -> None:
    """Statistics of batches, of a model that keeps them."""
    rank = distributed.get_rank()
    found = {}
    for broadcast in (True, False):
        booster, model, optimizer = boost(PLUGINS["ddp"](broadcast_buffers=broadcast), normed())
        script(booster, model, optimizer, range(rank, rank + 1), case=NORMED, steps=2)
        with torch.no_grad():
            if rank == 0:
                model.eval()(**tower_batch(99))  # alone: nobody waits for it
        found[broadcast] = model.get_buffer("norm.running_mean").cpu().clone()
    torch.save(found, directory / f"buffers.{rank}.pt")


def not_finite(directory: Path) -> None:
    """One rank's gradient is not finite: all leave the step out, and go on."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for name in TORCHS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        own = range(rank, rank + 1)
        script(booster, model, optimizer, own, steps=1)
        before = [values.clone() for values in _here(model)]
        loss = CASE.loss(model, 1, rank) * (float("inf") if rank == 1 else 1.0)
        booster.backward(loss, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            optimizer.step()
        gradients = all(param.grad is not None for param in model.parameters())
        optimizer.zero_grad()
        kept = all(map(torch.equal, before, _here(model)))
        report = booster.report(model)
        figures = (report.steps, report.skipped_steps, report.step_skipped)
        script(booster, model, optimizer, own, steps=1)
        moved = not any(map(torch.equal, before, _here(model)))
        skips = booster.report(model).skipped_steps
        found[name] = [len(caught), gradients, kept, figures, moved, skips]
    write_own(directory, "not_finite", found)


def others(directory: Path) -> None:
    """Ranks are given different settings, and different models."""
    rank = distributed.get_rank()
    said = []
    given = ((PLUGINS["ddp"](max_norm=1.0 + rank), 32), (PLUGINS["fsdp"](), 32 + rank))
    for plugin, width in given:
        try:
            boost(plugin, tower(width=width))
        except castor.UsageError as error:
            said.append(str(error))
    write_own(directory, "others", said)


def copies(directory: Path) -> None:
    """A model under DistributedDataParallel is copied and pickled, and called by its signature."""
    booster, model, optimizer = boost(PLUGINS["ddp"](), CASE.build())
    script(booster, model, optimizer, [distributed.get_rank()], steps=1)
    batch = ZOO["gpt2"].batch(5)
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)
    copied_optimizer = copy.deepcopy(optimizer)
    outputs = [one(**batch).logits for one in (model, copied, read)]
    found = {
        "equal": all(torch.equal(outputs[0], one) for one in outputs),
        "boosted": [one in _models for one in (model, copied, read)],
        "steps": torch_step_of(copied_optimizer) is not None,
        "signature": str(inspect.signature(model.forward)) == str(inspect.signature(read.forward)),
        "tokens": model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape[1],
    }
    write_own(directory, "copies", found)


def lifetimes(directory: Path) -> None:
    """Whether a model and its optimizer go while their Booster lives."""
    own = [distributed.get_rank()]
    gone = []
    for name in TORCHS:
        booster, model, optimizer = boost(PLUGINS[name](), CASE.build())
        script(booster, model, optimizer, own, steps=2)
        held = [weakref.ref(one) for one in (model, optimizer, next(model.parameters()))]
        del model, optimizer
        gc.collect()
        gone.append([ref() is None for ref in held])
    write_own(directory, "lifetimes", gone)


def each(directory: Path) -> None:
    """What takes one start of the processes together."""
    for scenario in (
        *(ddp_and_torch, same_script, all_cases_divided, saved_by_each),
        *(accumulated, apart, astride, buffers, not_finite, others, copies, lifetimes, untrained),
    ):
        scenario(directory)


def goes_on(directory: Path) -> None:
    """Runs that ranks on another device have saved are loaded, and saved again."""
    for name in TORCHS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        assert booster.load(directory / name, model, optimizer).step == 3
        booster.save(directory / f"{name}-elsewhere", model, optimizer)


def refused(directory: Path) -> None:
    """Ranks that share a GPU, or may not send memory of theirs."""
    said = []
    for name in TORCHS:
        model = CASE.build()
        try:
            boost(PLUGINS[name](), model)
        except castor.UsageError as error:
            said.append(str(error))
        assert {param.device.type for param in model.parameters()} == {"cpu"}
    write_own(directory, "refused", said)


def moved(directory: Path) -> None:
    """Where parameters, buffers, gradients, states and shards are after a boost of one process."""
    model = normed()
    loss = model(**tower_batch(0))
    loss.backward()
    optimizer = optimizer_of(model)
    optimizer.step()
    buffer = model.get_buffer("norm.running_mean")
    booster = castor.Booster(PLUGINS["ddp"]())
    booster.boost(model, optimizer)
    first = next(model.parameters())
    assert buffer is model.get_buffer("norm.running_mean")
    assert first.grad is not None
    state = optimizer.state[first]
    places = {
        "parameter": first, "gradient": first.grad, "buffer": buffer, "moment": state["exp_avg"],
        "step": state["step"], "output": model(**tower_batch(1)),
    }  # fmt: skip
    offloaded = castor.Booster(PLUGINS["fsdp"](cpu_offload=True))
    model, *_ = offloaded.boost(tower())
    shard = here(next(model.parameters()).detach())
    places |= {"shard": shard, "offloaded output": model(**tower_batch(1))}
    found = {name: tensor.device.type for name, tensor in places.items()}
    (directory / "moved.json").write_text(json.dumps([found, shard.is_pinned()]))


def untrained(directory: Path) -> None:
    """A model to be evaluated alone, which ranks have made differently."""
    rank = distributed.get_rank()
    found = []
    for name in TORCHS:
        torch.manual_seed(rank)
        booster = castor.Booster(PLUGINS[name]())
        model, *_ = booster.boost(Tower().requires_grad_(False))
        with torch.no_grad():
            found.append(model(**tower_batch(0)).item())
    write_own(directory, "untrained", found)


def killed(_: Path) -> None:
    """Rank 1 goes in a pass; CASTOR_TEST_PLUGIN: under which plugin."""
    rank = distributed.get_rank()
    booster, model, optimizer = boost(PLUGINS[os.environ["CASTOR_TEST_PLUGIN"]](), CASE.build())
    for step in range(1000):
        loss = CASE.loss(model, step, rank)
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def alone(directory: Path) -> None:
    """No launcher, no ranks."""
    found: dict[str, Any] = {}
    for name in TORCHS:
        booster, model, optimizer = boost(PLUGINS[name](max_norm=MAX_NORM), CASE.build())
        losses = script(booster, model, optimizer, range(2), steps=4)
        booster.save(directory / name, model, optimizer)
        report = booster.report(model)
        found[name] = [losses, report.ranks, report.parameter_bytes, report.optimizer_bytes]
        with booster.no_sync(model):
            booster.backward(CASE.loss(model, 0, 0), optimizer)
        optimizer.step()
        found[name].append(booster.report(model).gradient_norm)
    (directory / "alone.json").write_text(json.dumps(found))


def _here(model: nn.Module) -> list[torch.Tensor]:
    return [here(param.detach()) for param in model.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    if device_of_rank().type == simulated_gpu.NAME:
        # fully_shard frees gradients of its own stream while the optimizer reads them.
        simulated_gpu.require().gpu.overwrite_when_reused()
    if "RANK" in os.environ:
        castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    if "RANK" in os.environ:
        distributed.barrier()
