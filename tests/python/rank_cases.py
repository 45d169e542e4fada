"""What tests run on several ranks: `python rank_cases.py NAME DIRECTORY`, once for each rank.

A scenario is a function of the directory that the ranks share; what it prints is the test's.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.optim import SGD, Optimizer, RMSprop

import castor
import grids
import helpers
from castor import checkpoint
from castor.optim import Lion
from faulty_disk import FaultyDisk
from packed_layers import tower_4bit, tower_4bit_loss
from simulated import compute_as_asked
from zoo import CASES, Tower, tower, tower_batch, tower_loss

STEPS = grids.steps(10)


@dataclass(frozen=True)
class RankCase:
    """A model, the loss of a rank's micro-batch, and settings."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    """Of (model, seed, rank)."""
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    deferred: bool = False
    """Whether all but the last micro-batch run under no_sync."""
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = lambda params: castor.HybridAdam(
        params, lr=1e-2, weight_decay=0.1
    )


class Uneven(Tower):
    """A tower of which rank 1 skips a layer, and nobody uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: Any = None, skip: int | None = None) -> Any:
        for i, layer in enumerate(self.layers):
            if i != skip:
                x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def _uneven() -> nn.Module:
    torch.manual_seed(7)
    return Uneven()


def _zoo(name: str, *, checkpointing: bool = False, **settings: Any) -> RankCase:
    case = CASES[name]

    def loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
        batch = case.batch(seed)
        return case.loss(model(**batch), batch)

    return RankCase(lambda: case.model(checkpointing=checkpointing), loss, settings)


def _tower_loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    return tower_loss(model, seed)


def _sgd(params: list[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01)


def _lion(params: list[nn.Parameter]) -> Optimizer:
    return Lion(params, lr=1e-3, weight_decay=0.1)


def _frozen() -> nn.Module:
    model = CASES["gpt2"].model()
    for name, param in model.named_parameters():
        param.requires_grad_("ln_" not in name and "h.1." not in name)
    return model


def _packed() -> nn.Module:
    """Of quantised layers; other ranks than the first unpack other bytes in another way."""
    model = tower_4bit(depth=4)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    for adapted in model.layers:
        adapted.base.weight.data += rank
        adapted.base.weight.quant_state.state2.absmax *= 1 + rank
    return model


def _lazy_llama() -> nn.Module:
    with castor.LazyInitContext():
        return CASES["llama"].model()


EXACT = {
    **{name: _zoo(name) for name in ("gpt2", "llama", "t5", "bert", "vit", "mixtral")},
    "checkpointed": _zoo("llama", checkpointing=True),
    "recomputed": _zoo("t5", activations="recompute"),
    "activations": _zoo("gpt2", activations="auto"),
    "offloaded": _zoo("llama", activations="offload"),
    "tiled": _zoo("llama", activations="recompute+tile:3"),
    "frozen": RankCase(_frozen, _zoo("gpt2").loss),
    "packed": RankCase(_packed, lambda model, seed, _: tower_4bit_loss(model, seed)),
    "lazy": RankCase(_lazy_llama, _zoo("llama").loss),
    "tight": RankCase(tower, _tower_loss, {"memory": 24 << 10, "chunk_bytes": "8KiB"}),
    "overlap": _zoo("gpt2", overlap="forward"),
    "sgd": RankCase(
        tower, _tower_loss, {"memory": 24 << 10, "chunk_bytes": "8KiB"}, optimizer=_sgd
    ),
    "lion": RankCase(tower, _tower_loss, {"overlap": "forward"}, optimizer=_lion),
    "uneven": RankCase(
        _uneven,
        lambda model, seed, rank: model(**tower_batch(seed), skip=2 if rank == 1 else None),
    ),
}
"""fp32: the bits of one process with as many micro-batches."""

ON_TWO = grids.some(
    tuple(EXACT),
    *("llama", "mixtral", "checkpointed", "offloaded", "tiled", "frozen", "packed", "lazy"),
    *("tight", "overlap", "sgd", "lion", "uneven"),
)
ON_FOUR = grids.some(tuple(EXACT), "llama", "tight", "uneven")
ON_THREE = ("gpt2", "tight", "uneven")
OVER_THE_GROUP = ("tight", "uneven", "overlap", "lazy", "packed")

CLOSE = {
    "accumulated": RankCase(tower, _tower_loss, micro_batches=2),
    "deferred": RankCase(tower, _tower_loss, micro_batches=2, deferred=True),
    **{
        f"bf16 {state_format}": _zoo("llama", precision="bf16", optim_state_format=state_format)
        for state_format in ("fp32", "split", "split_bf16", "split_int8")
    },
    "fp16": _zoo("llama", precision="fp16", initial_scale=2.0**8),  # no rank overflows
    "nvme states": _zoo("gpt2", nvme_path="build", nvme_offload_fraction=1.0),
}
"""Sums in another order: one process's values, and the same bits on every rank."""
SOME_CLOSE = grids.some(CLOSE, *(CLOSE.keys() - {"bf16 split_bf16"}))


def boost(case: RankCase, **settings: Any) -> helpers.Boosted:
    chosen = {"max_norm": 0.5} | case.settings | settings
    if "nvme_path" in chosen:
        Path(chosen["nvme_path"]).mkdir(exist_ok=True)
    model = case.build()
    trained = [param for param in model.parameters() if param.requires_grad]
    return helpers.boost(model, optimizer=case.optimizer(trained), **chosen)


def train(
    case: RankCase, ranks: Sequence[int], *, steps: int = STEPS
) -> tuple[list[torch.Tensor], list[float], castor.MemoryReport]:
    """Weights, losses and report; `ranks`: whose micro-batches this process takes."""
    booster, model, optimizer = boost(case)
    losses = []
    for step in range(steps):
        for micro in range(case.micro_batches):
            for rank in ranks:
                seed = 1000 * step + 10 * micro + rank
                last = micro == case.micro_batches - 1 and rank == ranks[-1]
                later = case.deferred and not last
                with booster.no_sync(model) if later else nullcontext():
                    with booster.no_sync(model) if later else nullcontext():
                        pass  # leaving an inner one changes nothing
                    loss = case.loss(model, seed, rank)
                    booster.backward(loss / len(ranks), optimizer)
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return helpers.copies(model.parameters()), losses, booster.report(model)


def exact_and_close(directory: Path) -> None:
    """Cases of two or four ranks, one after the other; weights, losses and reports into files."""
    exact, close = (ON_FOUR, {}) if os.environ["WORLD_SIZE"] == "4" else (ON_TWO, SOME_CLOSE)
    _train_all({name: EXACT[name] for name in exact} | close, directory)


def some_over_the_group(directory: Path) -> None:
    """Some of them, of which nothing goes through shared memory."""
    os.environ["CASTOR_RANK_LINK"] = "group"
    _train_all({name: EXACT[name] for name in OVER_THE_GROUP}, directory)


def on_three(directory: Path) -> None:
    """Some of them; a third is no power of two."""
    _train_all({name: EXACT[name] for name in ON_THREE}, directory)


def _train_all(cases: dict[str, RankCase], directory: Path) -> None:
    castor.launch_from_torch()
    rank = distributed.get_rank()
    for name, case in cases.items():
        weights, losses, report = train(case, range(rank, rank + 1))
        torch.save((weights, losses, vars(report)), directory / f"{name}.{rank}.pt")


def _refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except (castor.Error, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def _of_rank() -> Iterator[int]:
    castor.launch_from_torch()
    yield distributed.get_rank()
    distributed.barrier()


TOWER = RankCase(tower, _tower_loss)


def different_models(_: Path) -> None:
    with _of_rank() as rank, pytest.MonkeyPatch.context() as patch:
        case = RankCase(lambda: tower(depth=5 + rank), _tower_loss)
        print(_refused(lambda: boost(case)))
        print(_refused(lambda: boost(TOWER, max_norm=1.0 + rank)))
        print(_refused(lambda: boost(TOWER, overlap="backward", enable_gradient_accumulation=False,
                                     max_norm=0.0, nonfinite="ignore")))  # fmt: skip
        patch.setenv("CASTOR_RANK_LINK", ("auto", "group")[rank])
        print(_refused(lambda: boost(TOWER)))
        plugin = castor.HybridParallelPlugin(tp_size=2, device="cpu", tp_plan={})
        print(_refused(lambda: castor.Booster(plugin).boost(tower())))


def shuffles_differently(_: Path) -> None:
    """Then over another number of samples, and rank 1 without a loader."""

    def boost_with(data: range, seed: int, *, given: bool = True) -> None:
        plugin = castor.GeminiPlugin(device="cpu", precision="fp32")
        loader = plugin.prepare_dataloader(data, batch_size=2, shuffle=True, seed=seed)
        model = tower()
        optimizer = torch.optim.AdamW(model.parameters())
        castor.Booster(plugin).boost(model, optimizer, None, loader if given else None)

    with _of_rank() as rank:
        print(_refused(lambda: boost_with(range(8), rank)))
        print(_refused(lambda: boost_with(range(8 + rank), 3)))
        print(_refused(lambda: boost_with(range(8), rank, given=rank == 0)))


def one_passes_more(_: Path) -> None:
    """Rank 0 runs another backward where rank 1 steps."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        booster.backward(_tower_loss(model, 0, rank), optimizer)
        if rank == 0:
            print(_refused(lambda: booster.backward(_tower_loss(model, 1, rank), optimizer)))
        else:
            print(_refused(optimizer.step))


def steps_differently(_: Path) -> None:
    """With a learning rate of the rank's own, then with gradients that rank 0 has changed."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        first = next(iter(model.parameters()))

        def step(change: Callable[[], Any]) -> None:
            optimizer.zero_grad()
            booster.backward(_tower_loss(model, rank, rank), optimizer)
            change()
            print(_refused(optimizer.step))

        for own in (1e-2 * (1 + rank), 1e-2):
            step(lambda own=own: optimizer.param_groups[0].__setitem__("lr", own))
        step(lambda: first.grad.fill_(float("nan")) if rank == 0 else None)
        step(lambda: setattr(first, "grad", None) if rank == 0 else None)
        step(lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
        print(booster.report(model).steps)


def one_saves(directory: Path) -> None:
    """Rank 0 saves where rank 1 runs another backward."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        if rank == 0:
            print(_refused(lambda: booster.save(directory / "run", model, optimizer)))
        else:
            print(_refused(lambda: booster.backward(_tower_loss(model, 1, rank), optimizer)))


def nothing_of_pythons(directory: Path) -> None:
    """What castor sends holds no Python tensors: gloo lets go of them when it likes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of Python tensors")

    with _of_rank() as rank:
        own = {name: value for name, value in vars(distributed).items() if name in _OF_TENSORS}
        assert len(own) == len(_OF_TENSORS)
        vars(distributed).update(dict.fromkeys(own, refuse))
        booster, model, optimizer = boost(TOWER)
        booster.backward(_tower_loss(model, 0, rank), optimizer)
        optimizer.step()
        booster.save(directory / "run", model, optimizer)
        print(booster.load(directory / "run", model, optimizer).step)
        lazy = boost(RankCase(_lazy_llama, _zoo("llama").loss))
        print(sum(param.numel() for param in lazy.model.parameters()) > 0)
        vars(distributed).update(own)


def lazy_in_any_order(directory: Path) -> None:
    """Weights of one shape that each rank reads in an order of its own, as loading threads do."""
    files = [torch.full((8, 8), float(i)) for i in range(12)]
    with _of_rank() as rank:
        torch.manual_seed(0)
        with castor.LazyInitContext():
            drawn = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in files))
            read = nn.ModuleList(nn.Linear(8, 8, bias=False, device="meta") for _ in files)
            order = list(range(len(files)))
            for i in order[::-1] if rank else order:
                with torch.no_grad():
                    drawn[i].weight.copy_(files[i])
                read[i].weight = nn.Parameter(torch.zeros(8, 8) + files[i])
            model = nn.Sequential(drawn, *read, nn.Linear(8, 8))
        model, _ = castor.Booster(castor.GeminiPlugin(device="cpu")).boost(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )[:2]
        values = [[float(layer.weight[0, 0]) for layer in layers] for layers in (drawn, read)]
        print(values == 2 * [[float(i) for i in range(len(files))]])
        torch.save(model.state_dict(), directory / f"{rank}.pt")


_OF_TENSORS = (
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "broadcast"),
    *("broadcast_object_list", "gather_object", "scatter_object_list"),
)


def others_weights(_: Path) -> None:
    """Rank 1 was built with other random values, and rank 0 has the gradient that counts."""
    with _of_rank() as rank:
        torch.manual_seed(rank)
        booster, model, optimizer = boost(RankCase(Tower, _tower_loss))
        weights = [param.detach().clone() for param in model.parameters()]
        booster.backward(_tower_loss(model, rank, rank), optimizer)
        gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        everyone: list[Any] = [None, None]
        distributed.all_gather_object(everyone, (weights, gradients, norm))
        for theirs, mine in zip(everyone[0], everyone[1], strict=True):
            same = map(torch.equal, theirs, mine) if isinstance(theirs, list) else [theirs == mine]
            print(all(same))


def overflow_on_one(_: Path) -> None:
    """A gradient of rank 1 is not finite: all ranks skip the step, with the same scale."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER, precision="fp16")
        batch = tower_batch(0)
        if rank == 1:
            batch["x"][0, 0] = float("inf")
        booster.backward(model(**batch), optimizer)
        optimizer.step()
        print(booster.report(model).skipped_steps, optimizer._castor.loss_scale)


def shows_states(directory: Path) -> None:
    with _of_rank() as rank:
        booster, model, optimizer = boosted = boost(TOWER)
        for step in range(3):
            boosted.step(_tower_loss(model, 2 * step + rank, rank))
        torch.save(optimizer.state_dict()["state"], directory / f"states.{rank}.pt")
        booster.save_optimizer(optimizer, directory / "optimizer", model=model)
        if rank == 0:
            print(_refused(optimizer.state_dict))
        else:
            print(_refused(lambda: booster.backward(_tower_loss(model, 1, rank), optimizer)))


BESIDE_ONE_ANOTHER = (
    different_models, shuffles_differently, one_passes_more, one_saves, steps_differently,
    lazy_in_any_order, nothing_of_pythons, others_weights, overflow_on_one, shows_states,
)  # fmt: skip


def beside_one_another(directory: Path) -> None:
    """Scenarios that leave nothing behind: what each prints goes to a file of its name."""
    for scenario in BESIDE_ONE_ANOTHER:
        own = directory / scenario.__name__
        own.mkdir(exist_ok=True)
        with (own / os.environ["RANK"]).open("w") as file, redirect_stdout(file):
            scenario(own)


def saves(directory: Path) -> None:
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        loader = _loader(booster)
        batches = iter(loader)
        for _ in range(3):
            _step(booster, model, optimizer, next(batches))
        torch.rand(rank + 1)  # random states of its own
        booster.save(directory / "run", model, optimizer, dataloader=loader)
        booster.save_model(model, directory / "model")
        print(_refused(lambda: booster.save_model(model, directory / "missing" / "model")))
        for _ in range(2):
            _step(booster, model, optimizer, next(batches))
        torch.save(helpers.copies(model.parameters()), directory / f"weights.{rank}.pt")
        torch.save(torch.rand(4), directory / f"random.{rank}.pt")


def loads(directory: Path) -> None:
    """Goes on where `saves` saved, on as many ranks as there are."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        loader = _loader(booster)
        info = booster.load(directory / "run", model, optimizer, dataloader=loader)
        batches = iter(loader)
        for _ in range(2):
            _step(booster, model, optimizer, next(batches))
        torch.save(helpers.copies(model.parameters()), directory / f"loaded.{rank}.pt")
        torch.save(torch.rand(4), directory / f"loaded-random.{rank}.pt")
        print(info.step)


def steps_with_momentum(directory: Path) -> None:
    _steps_kept(directory, _sgd)


def steps_of_ones_own(directory: Path) -> None:
    _steps_kept(directory, lambda params: RMSprop(params, lr=1e-3, momentum=0.5))


def _steps_kept(directory: Path, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    """Three steps in bf16 from where the last such scenario ended, and what they come to."""
    case = RankCase(tower, _tower_loss, {"precision": "bf16"}, optimizer=make)
    goes_on = (directory / "run").exists()
    with _of_rank() as rank:
        booster, model, optimizer = boost(case)
        begun = booster.load(directory / "run", model, optimizer).step if goes_on else 0
        for step in range(begun, begun + 3):  # on every rank the same: the mean is one process's
            booster.backward(_tower_loss(model, step, rank), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        booster.save(directory / "run", model, optimizer)
        booster.save_optimizer(optimizer, directory / f"state-{begun}", model=model)


def _loader(booster: castor.Booster) -> Any:
    data = [tower_batch(seed, rows=1) for seed in range(64)]
    return booster.plugin.prepare_dataloader(data, batch_size=2, shuffle=True, seed=3)


def _step(booster: castor.Booster, model: nn.Module, optimizer: Any, batch: Any) -> None:
    loss = model(batch["x"].flatten(0, 1), batch["labels"].flatten())
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


KILLED_STEPS = 40


def saves_each_step(directory: Path) -> None:
    """Two micro-batches a step, on two ranks or one, from the last checkpoint on."""
    world = int(os.environ["WORLD_SIZE"])
    booster, model, optimizer = boost(TOWER)
    data = [tower_batch(seed, rows=2) for seed in range(2 * KILLED_STEPS)]
    loader = booster.plugin.prepare_dataloader(data, batch_size=1, shuffle=True, seed=3)
    begun = 0
    if booster.latest(directory / "run"):
        begun = booster.load(directory / "run", model, optimizer, dataloader=loader).step
    batches = iter(loader)
    for _ in range(begun, KILLED_STEPS):
        for _ in range(2 // world):
            batch = next(batches)
            loss = model(batch["x"].flatten(0, 1), batch["labels"].flatten())
            booster.backward(loss * world / 2, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        booster.save(directory / "run", model, optimizer, dataloader=loader, keep=2)
    torch.save(list(model.parameters()), directory / f"weights.{os.environ['RANK']}.pt")


def one_dies_at(directory: Path) -> None:
    """A rank is killed at a phase, both given by the environment, after a step and a save."""
    victim, phase = int(os.environ["VICTIM"]), os.environ["PHASE"]
    with _of_rank() as rank:
        booster, model, optimizer = boosted = boost(TOWER)
        boosted.step(_tower_loss(model, 0, rank))
        booster.save(directory / "run", model, optimizer)

        def die(*_: Any, **__: Any) -> None:
            (directory / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            layer = model.layers[2]
            if phase == "forward":
                layer.register_forward_pre_hook(die)
            elif phase == "backward":
                layer.register_full_backward_hook(die)
            elif phase == "step":
                optimizer.step = die
            elif phase == "load":
                booster.load = die
            elif rank == 0:
                checkpoint.save = die
            else:
                booster.save = die
        boosted.step(_tower_loss(model, 1, rank))
        booster.save(directory / "run", model, optimizer)
        booster.load(directory / "run", model, optimizer)


def one_stops(directory: Path) -> None:
    """Rank 1 is stopped after two steps; rank 0 says so, and ends it."""
    with _of_rank() as rank:
        booster, model, optimizer = boost(TOWER)
        process = directory / "process"
        for step in range(3):
            if step == 2 and rank == 1:
                process.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                booster.backward(_tower_loss(model, step, rank), optimizer)
                optimizer.step()
            except castor.Error as error:
                os.kill(int(process.read_text()), signal.SIGKILL)
                print(error, flush=True)
                os._exit(0)


def one_fails(directory: Path) -> None:
    """An update of rank 1's fails; it says so, and neither ends nor takes part any more."""
    with _of_rank() as rank:
        if rank == 1:
            FaultyDisk(pytest.MonkeyPatch()).set(os.environ["FAULT"])
        scratch = directory / str(rank)
        scratch.mkdir()
        overlap = os.environ["OVERLAP"]
        boosted = boost(TOWER, nvme_path=scratch, nvme_offload_fraction=1.0, overlap=overlap)
        booster, model, optimizer = boosted
        booster.save(directory / "run", model, optimizer)
        failed, heard = directory / "failed", directory / "heard"
        try:
            for step in range(4):
                boosted.step(_tower_loss(model, step, rank))
            print("nothing failed")
        except castor.Error as error:
            print(type(error).__name__, error)
            if rank == 1:
                failed.write_text(str(time.time()))
                print(_refused(lambda: booster.load(directory / "run", model, optimizer)))
                end = time.monotonic() + 60
                while not heard.exists() and time.monotonic() < end:
                    time.sleep(0.01)
            else:
                print(time.time() - float(failed.read_text()) if failed.exists() else 0.0)
                heard.touch()
        sys.stdout.flush()
        os._exit(0)  # there is nobody to meet at the end


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
