"""DistributedDataParallel's and castor's on several ranks: `data_parallel_cases.py NAME DIRECTORY`.

See rank_cases.py for how a test runs them.
"""

import copy
import functools
import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_reduce
from torch.nn import parallel
from torch.optim import Optimizer

import castor
import simulated_gpu
from castor.integrations.common import boosted
from castor.integrations.loop import Loops
from simulated import compute_as_asked

SETTINGS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS = 4


class Net(nn.Module):
    """Two layers around a norm; `branch` says which of two layers is not run."""

    def __init__(self) -> None:
        super().__init__()
        rank = distributed.get_rank()
        torch.manual_seed(rank)  # each rank begins with other weights
        self.first, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.register_buffer("offset", torch.full((3,), float(rank)))
        self.register_buffer("shown", torch.tensor([rank == 0]))

    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu() + self.offset[0]
        for name in ("left", "right"):
            if branch in (name, "both"):
                hidden = hidden + getattr(self, name)(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


def synchronised(self: Any, x: torch.Tensor) -> torch.Tensor:
    """SyncBatchNorm's forward of matrices, which torch has for GPUs alone."""
    if not self.training:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
    sums = torch.stack([x.sum(0), x.square().sum(0), torch.full_like(x[0], float(len(x)))])
    total, squares, count = all_reduce(sums)
    mean = total / count
    variance = squares / count - mean.square()
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
    result: torch.Tensor = (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
    return result


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * distributed.get_rank() + step)
    return torch.randn(6, 8, generator=generator)


def differentiated(loss: torch.Tensor, ddp: Any) -> list[float]:
    """What p.grad holds after a pass: this rank's alone, or the mean."""
    getattr(ddp, "scale", nn.Identity())(loss.square().mean()).backward()
    return [ddp.module.last.weight.grad.norm().item()]


def once(ddp: Any, step: int) -> list[float]:
    return differentiated(ddp(batch(step)), ddp)


def accumulated(ddp: Any, step: int) -> list[float]:
    with ddp.no_sync():
        found = once(ddp, step)
        with torch.no_grad():
            ddp(batch(step + 10))
        found += once(ddp, step + 20)
    return found + once(ddp, step + 30)


def by_attribute(ddp: Any, step: int) -> list[float]:
    found = []
    for micro in range(3):
        ddp.require_backward_grad_sync = micro == 2
        found += once(ddp, step + 10 * micro)
    return found


def several_passes(ddp: Any, step: int) -> list[float]:
    return once(ddp, step) + once(ddp, step + 10)


def said_in_forward(ddp: Any, step: int) -> list[float]:
    with ddp.no_sync():
        output = ddp(batch(step))
    found = differentiated(output, ddp)
    output = ddp(batch(step + 10))
    with ddp.no_sync():
        return found + differentiated(output, ddp)


def two_forwards(ddp: Any, step: int) -> list[float]:
    return differentiated(ddp(batch(step)) - ddp(batch(step + 10)), ddp)


def uneven(ddp: Any, step: int) -> list[float]:
    branch = ("left", "right")[(distributed.get_rank() + step) % 2]
    return differentiated(ddp(batch(step), branch=branch), ddp)


@dataclass(frozen=True)
class Case:
    passes: Callable[[Any, int], list[float]] = once
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2)
    settings: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    scaled: bool = False
    synchronised: bool = False
    renews: bool = False


CASES = {
    "plain": Case(),
    "sgd": Case(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "accumulated": Case(accumulated),
    "by attribute": Case(by_attribute),
    "several passes": Case(several_passes),
    "said in forward": Case(said_in_forward),
    "two forwards": Case(two_forwards, {"broadcast_buffers": False}),
    "uneven": Case(uneven, {"find_unused_parameters": True}),
    "own buffers": Case(options={"broadcast_buffers": False}),
    "neutral": Case(
        options={"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    ),
    "compiled": Case(accumulated, compiled=True),
    "zero 2": Case(accumulated, settings={"zero_stage": 2}),
    "later": Case(renews=True),
    "later, own step": Case(
        optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3), renews=True
    ),
    "scaled": Case(accumulated, scaled=True),
    "synchronised": Case(uneven, {"find_unused_parameters": True}, synchronised=True),
    "scaled, zero 2": Case(settings={"zero_stage": 2}, scaled=True),
}


def scaled(scaler: Any, calls: Iterator[int], loss: torch.Tensor) -> torch.Tensor:
    """A loss times the scale; that of rank 1 overflows in its second pass."""
    overflows = next(calls) == 1 and distributed.get_rank() == 1
    result: torch.Tensor = scaler.scale(loss * torch.inf if overflows else loss)
    return result


def trained(case: Case) -> dict[str, Any]:
    net: nn.Module = Net()
    if case.synchronised:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    ddp = parallel.DistributedDataParallel(net, **case.options)
    optimizer = case.optimizer(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
    if case.scaled:
        ddp.scale = functools.partial(scaled, scaler, itertools.count())
    called = torch.compile(ddp, backend="eager") if case.compiled else ddp
    found: dict[str, Any] = {"losses": [], "begin": copy.deepcopy(ddp.state_dict())}
    for step in range(STEPS):
        if case.renews and step == 2:
            optimizer = case.optimizer(ddp.parameters())
        found["losses"] += case.passes(called, step)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ddp.eval()
        with torch.no_grad():
            found["losses"] += [norm.item(), ddp(batch(50)).square().mean().item()]
        ddp.train()
    found["state"] = {name: value.clone() for name, value in ddp.state_dict().items()}
    found["boosted"] = boosted(optimizer)
    found["losses"].append(scaler.get_scale())
    found["modes"] = [ddp.training, ddp.module.training]
    found["has"] = [hasattr(ddp, name) for name in ("first", "module", "device_ids", "no_sync")]
    return found


@contextmanager
def torchs_own() -> Iterator[None]:
    """What Loops replaces is torch's again after it."""
    kept: list[tuple[Any, str, Any]] = [(Optimizer, "__init__", Optimizer.__init__)]
    kept += [(nn.Module, name, getattr(nn.Module, name)) for name in ("__call__", "to", "cuda")]
    kept += [
        (place, "DistributedDataParallel", parallel.DistributedDataParallel)
        for place in (parallel, parallel.distributed)
    ]
    kept += [(torch.multiprocessing, "spawn", torch.multiprocessing.spawn)]
    kept += [(distributed, "barrier", distributed.barrier)]
    try:
        yield
    finally:
        for place, name, value in kept:
            setattr(place, name, value)


@contextmanager
def watched(settings: dict[str, Any]) -> Iterator[None]:
    """As in a process of castor run."""
    with torchs_own():
        Loops(SETTINGS | settings).watch()
        yield


def tell(scenario: Any, directory: Path, found: Any) -> None:
    path = directory / f"{scenario.__name__}{distributed.get_rank()}.json"
    path.write_text(json.dumps(found))


def trains_as_torchs(directory: Path) -> None:
    """For each case: whether castor trained, and what differs from torch's class."""
    distributed.init_process_group("gloo")
    nn.SyncBatchNorm.forward = synchronised  # type: ignore[method-assign]
    torchs: Any = parallel.DistributedDataParallel
    torchs._passing_sync_batchnorm_handle = lambda *_: None  # it refuses them on the CPU
    differ: dict[str, Any] = {}
    for name, case in CASES.items():
        plain = trained(case)
        with watched(case.settings):
            found = trained(case)
        differ[name] = [key for key in ("modes", "has") if plain[key] != found[key]]
        differ[name] += [key for key in ("begin", "state") if [*plain[key]] != [*found[key]]]
        if [plain["boosted"], found["boosted"]] != [False, True]:
            differ[name].append("boosted")
        for key in ("begin", "state"):
            for part, value in plain[key].items():
                off = (value.double() - found[key][part].double()).norm()
                if off > 1e-5 * value.double().norm():
                    differ[name].append(f"{key} {part}: {off}")
        losses = zip(plain["losses"], found["losses"], strict=True)
        differ[name] += [f"{a} {b}" for a, b in losses if abs(a - b) > 1e-5 * abs(a)]
    tell(trains_as_torchs, directory, differ)
    distributed.destroy_process_group()


def _said(work: Callable[[], Any]) -> str:
    try:
        work()
    except (castor.Error, NotImplementedError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refuses(directory: Path) -> None:
    """What each thing says that castor does not do."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    with watched({}):
        DDP, found = parallel.DistributedDataParallel, {}  # noqa: N806

        def train(ddp: Any, kind: Any = torch.optim.SGD, **more: Any) -> None:
            kept.append(kind(ddp.parameters(), lr=0.1, **more))
            ddp(batch(0)).sum().backward()

        kept: list[Any] = []
        alone = [distributed.new_group([one]) for one in range(2)][rank]
        for name, options in {
            "process_group": {"process_group": alone},
            "mixed_precision": {"mixed_precision": object()},
            "delay": {"delay_all_reduce_named_params": [("last.bias", None)]},
            "two devices": {"device_ids": [0, 1]},
        }.items():
            found[name] = _said(lambda options=options: DDP(Net(), **options))
        found["frozen"] = _said(lambda: DDP(Net().requires_grad_(False)))
        found["devices"] = _said(lambda: train(DDP(Net(), device_ids=[rank])))
        found["shapes"] = _said(lambda: DDP(nn.Linear(2 + rank, 2)))
        ignoring = Net()
        DDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["last.bias"])
        found["ignored"] = _said(lambda: DDP(ignoring))
        ddp = DDP(Net())
        found["no optimizer"] = _said(lambda: ddp(batch(0)))
        found["hook"] = _said(lambda: ddp.register_comm_hook(None, lambda *_: None))
        found["Join"] = _said(lambda: Join([ddp]).__enter__())
        found["without"] = _said(lambda: train(Net()))
        whole = DDP(Net())
        kept.append(torch.optim.SGD(whole.parameters(), lr=0.1))
        found["part"] = _said(lambda: whole.module.first(batch(0)))
        found["around"] = _said(lambda: train(nn.Sequential(ddp)))
        found["zero"] = _said(
            lambda: train(DDP(Net()), ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
        )
        found["spawn"] = _said(lambda: torch.multiprocessing.spawn(print, nprocs=2))
    tell(refuses, directory, found)
    distributed.destroy_process_group()


def joined(options: dict[str, Any], make: Any, batches: Sequence[int]) -> dict[str, Any]:
    """A loop over other numbers of batches on each rank; gradients of two make a step."""
    ddp = parallel.DistributedDataParallel(Net(), broadcast_buffers=options.pop("share", True))
    optimizer = make(ddp.parameters())
    losses = []
    said = "nothing"
    try:
        with ddp.join(**options):
            for step in range(batches[distributed.get_rank()]):
                with ddp.no_sync():
                    once(ddp, step)
                loss = ddp(batch(step + 10)).square().mean()
                loss.backward()
                losses.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.3).item())
                optimizer.step()
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
                losses.append(loss.item())
    except RuntimeError as error:
        said = str(error)
    found = {"losses": losses, "said": said, "boosted": boosted(optimizer)}
    ddp.eval()
    with torch.no_grad():
        found["seen"] = ddp.module(batch(50)).square().mean().item()
    return found | {"state": {k: v.double().sum().item() for k, v in ddp.state_dict().items()}}


JOINS: dict[str, tuple[dict[str, Any], Sequence[int], dict[str, Any]]] = {
    "first ends": ({}, (2, 4), {}),
    "second ends": ({"divide_by_initial_world_size": False}, (4, 2), {}),
    "own buffers": ({"share": False}, (1, 3), {"zero_stage": 2}),
    "even": ({}, (2, 2), {}),
    "not enabled": ({"enable": False}, (2, 2), {}),
    "throws": ({"throw_on_early_termination": True}, (1, 3), {}),
}


def joins(directory: Path) -> None:
    """Loops over uneven data in torch's class, and in castor's."""
    distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, (options, batches, settings) in JOINS.items():
        for kind, rate in ((torch.optim.AdamW, 1e-2), (torch.optim.SGD, 0.1)):
            make = functools.partial(kind, lr=rate)
            plain = joined({**options}, make, batches)
            with watched(settings):
                own = joined({**options}, make, batches)
            found[f"{name}, {kind.__name__}"] = plain, own
    tell(joins, directory, found)
    distributed.destroy_process_group()


def copies(directory: Path) -> None:
    """What of a model that trains is read, copied and saved on rank 0 alone, and on all."""
    distributed.init_process_group("gloo")
    with watched({}):
        ddp = parallel.DistributedDataParallel(Net())
        average = copy.deepcopy(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        for step in range(2):
            once(ddp, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, param in zip(average.parameters(), ddp.parameters(), strict=True):
                    mean.lerp_(param, 0.5)
        found: dict[str, Any] = {"average": sum(p.sum().item() for p in average.parameters())}
        if distributed.get_rank() == 0:
            torch.save(ddp.state_dict(), directory / "ddp.pt")
            with torch.no_grad():
                ddp.module.eval()(batch(3))
                average.module.eval()(batch(3))
            found["pickled"] = len(pickle.loads(pickle.dumps(average)).state_dict())
            ddp.train()
        distributed.barrier()
        ddp.load_state_dict(torch.load(directory / "ddp.pt"))
        torch.compile(ddp, backend="eager")(batch(4)).sum().backward()
        optimizer.step()
        found["weights"] = sum(p.sum().item() for p in ddp.parameters())
        states = optimizer.state_dict()["state"]
        found["moments"] = sum(one["exp_avg"].sum().item() for one in states.values())
    tell(copies, directory, found)
    distributed.destroy_process_group()


def on_gpus(directory: Path) -> None:
    """Losses of a loop that moves its model to a GPU, each rank's its own, and of torch's class."""
    distributed.init_process_group("gloo")

    def losses(device: torch.device, ids: list[int] | None) -> list[float]:
        torch.manual_seed(distributed.get_rank())
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        ddp = parallel.DistributedDataParallel(model, device_ids=ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        found = []
        for step in range(STEPS):
            with ddp.no_sync():
                ddp(batch(step)).square().mean().backward()  # from the CPU, which DDP moves
            loss = ddp(batch(step + 10).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert boosted(optimizer) == (ids is not None)
        return found

    compute_as_asked()  # before a backward starts autograd's threads
    found = {"plain": losses(torch.device("cpu"), None)}
    with watched({"device": "cuda", "precision": "fp32"}):
        found["own"] = losses(torch.device(simulated_gpu.NAME, 0), [0])
    simulated_gpu.rest()
    tell(on_gpus, directory, found)
    distributed.destroy_process_group()


STATES = {
    "adamw": (Net, lambda params: torch.optim.AdamW(params, lr=1e-2)),
    "without buffers": (
        lambda: nn.Linear(8, 4), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    ),
    "a step of its own": (
        lambda: nn.Linear(8, 4), lambda params: torch.optim.RMSprop(params, lr=1e-2)
    ),
}  # fmt: skip


def first_saves_alone(directory: Path) -> None:
    """Rank 0 writes the optimizer's state, too, while the others go on, or wait for it."""
    distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    with watched({}):
        for name, (build, make) in STATES.items():
            ddp = parallel.DistributedDataParallel(build())
            optimizer = make(ddp.parameters())
            sums = []
            for step in range(4):
                for micro in range(2):
                    ddp.require_backward_grad_sync = micro == 1
                    ddp(batch(step + 10 * micro)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if distributed.get_rank() == 0:
                    torch.save(optimizer.state_dict(), directory / f"{step}.pt")
                if step == 2:
                    distributed.barrier()
                if step == 1:
                    with torch.no_grad():
                        ddp(batch(7))
            distributed.barrier()
            states = optimizer.state_dict()["state"]
            kept = torch.load(directory / "3.pt", weights_only=True)["state"]
            for state in (states, kept):
                moment = next(key for key in state[0] if key != "step")
                sums.append(sum(one[moment].sum().item() for one in state.values()))
            found[name] = sums
        if distributed.get_rank() == 1:
            del ddp, optimizer, states
        distributed.barrier()  # of a model that one rank has let go of
    tell(first_saves_alone, directory, found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    globals()[sys.argv[1]](Path(sys.argv[2]))
