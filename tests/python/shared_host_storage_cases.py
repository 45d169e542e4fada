"""What tests of shared host storage run: `python shared_host_storage_cases.py NAME DIRECTORY`."""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import castor
from castor.runtime.engine import engine_of
from grids import some
from helpers import Boosted, plugin
from rank_cases import EXACT, RankCase, _of_rank, _refused, boost
from zoo import tower, tower_batch

WIDTH = 192
"""A layer takes more than a page, and begins within one."""


def _model() -> nn.Module:
    model = tower(width=WIDTH)
    model.layers[3].requires_grad_(False)
    return model


def _lazy() -> nn.Module:
    with castor.LazyInitContext():
        return _model()


def _loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed, width=WIDTH))
    return loss


LAYER = WIDTH * (WIDTH + 1) * 4
VARIANTS: dict[str, dict[str, Any]] = {
    "tight": {"memory": 3 * LAYER},
    "ample": {},
    "overlap": {"memory": 3 * LAYER, "overlap": "forward"},
    "split": {"memory": 2 * LAYER, "precision": "bf16", "optim_state_format": "split_int8"},
    "lazy": {"memory": 3 * LAYER},
    "unlike": {"memory": 3 * LAYER},
}
"""On "unlike" ranks there is nothing to share: rank 1 stores nothing on the host."""
EVENTFUL = some(tuple(VARIANTS), "tight", "overlap", "split", "unlike")


def _boost(name: str, rank: int) -> Boosted:
    """Where there are several ranks, rank 1 has room for all: its chunks are promoted."""
    settings = {"chunk_bytes": LAYER} | VARIANTS[name]
    if rank == 1:
        settings.pop("memory", None)
    if rank == 1 and name == "unlike":
        settings["placement_policy"] = "cuda"
    return boost(RankCase(_lazy if name == "lazy" else _model, _loss), **settings)


def _of_host_storage(figure: str) -> Iterator[tuple[str, int]]:
    """(line that describes a mapping of shared memory, bytes of it) for each."""
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapping = line if "castor-ranks" in line else ""
        elif mapping and line.startswith(f"{figure}:"):
            yield mapping, int(line.split()[1]) * 1024


def copied_bytes() -> int:
    """Bytes of pages of shared host storage of which this process has a copy of its own."""
    return sum(bytes_ for mapping, bytes_ in _of_host_storage("Anonymous") if "rw-p" in mapping)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, in memory that no budget knows of."""
    return torch.from_numpy(tensor.detach().float().numpy().copy())


def eventful(name: str, ranks: Sequence[int], directory: Path) -> dict[str, Any]:
    """Trains while others than castor write the weights, in all the ways that there are.

    Returns:
        Weights after each event, and what this rank had copies of after the step behind it.
    """
    booster, model, optimizer = _boost(name, ranks[0])
    weights: dict[str, list[torch.Tensor]] = {}
    seen: dict[str, Any] = {"weights": weights, "copies": [copied_bytes()], "losses": []}
    steps = iter(range(1000))

    def train() -> None:
        step = next(steps)
        for rank in ranks:
            loss = _loss(model, 10 * step + rank, rank)
            booster.backward(loss / len(ranks), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def done(event: str) -> None:
        weights[event] = [_kept(param) for param in model.parameters()]
        train()
        weights[f"{event}, trained"] = [_kept(param) for param in model.parameters()]
        seen["copies"].append(copied_bytes())
        seen["losses"].append(_loss(model, 5, 0).item())

    done("begun")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    done("edited")
    model.layers[1].weight.data[3] = 0.5
    done("edited through data")
    kept = {key: _kept(value) for key, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.data.copy_(torch.full_like(param, 0.01))
        seen["losses"].append(_loss(model, 3, 0).item())
        for key, param in model.named_parameters():
            param.data.copy_(kept[key])
    done("averages swapped in and out")

    def edit(module: nn.Module, _: Any) -> None:
        module.bias.data.add_(0.25)  # where the chunk is then

    hook = model.layers[2].register_forward_pre_hook(edit)
    _loss(model, 4, 0)
    hook.remove()
    done("edited in a forward")
    booster.save_model(model, directory / f"model {name} {len(ranks)}")
    train()
    booster.load_model(model, directory / f"model {name} {len(ranks)}")
    seen["copies"].append(copied_bytes())
    done("loaded")
    model.load_state_dict(kept)
    done("loaded by torch")
    seen["report"] = vars(booster.report(model))
    trained = [param for param in model.parameters() if param.requires_grad]
    seen["parameter bytes"] = sum(param.nbytes for param in model.parameters())
    seen["gradient bytes"] = sum(param.nbytes for param in trained)
    return seen


def events(directory: Path) -> None:
    """Every variant, on this link and over the group."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    for link in ("auto", "group"):
        os.environ["CASTOR_RANK_LINK"] = link
        for name in EVENTFUL:
            seen = eventful(name, range(rank, rank + 1), directory)
            torch.save(seen, directory / f"{name}.{link}.{rank}.pt")
            distributed.barrier()


def memory(_: Path) -> None:
    """Prints what all ranks have of host storage, its bytes, and what rank 0 pays of it."""
    with _of_rank() as rank:
        boosted = boost(RankCase(lambda: tower(width=1024), _wide_loss), memory="12MiB")
        booster, model, _ = boosted
        for step in range(2):
            boosted.step(_wide_loss(model, step, rank))
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, _proportional_bytes())
        report = booster.report(model)
        print(sum(everyone), report.rank_shared_bytes, report.host_bytes)


def _wide_loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed, width=1024))
    return loss


def _proportional_bytes() -> int:
    """Bytes of host storage: a page that n processes have counts for one n-th in each."""

    def large(mapping: str) -> bool:  # not what collectives go through
        begin, end = (int(address, 16) for address in mapping.split()[0].split("-"))
        return end - begin > 16 << 20

    return sum(bytes_ for mapping, bytes_ in _of_host_storage("Pss") if large(mapping))


WIDE_LAYER = 1024 * 1025 * 4
DEEP = 12


def _deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(DEEP)))


def _deep_loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    output: torch.Tensor = model(torch.randn(4, 1024, generator=generator))
    return output.square().mean()


def _boost_deep(room: int = 8) -> Boosted:
    return boost(
        RankCase(_deep, _deep_loss),
        chunk_bytes=WIDE_LAYER,
        memory=3 * WIDE_LAYER,
        host_memory=_room_of_deep(room),
    )


def _room_of_deep(room: int) -> int:
    """For the ranks' shares, their window and so many layers' gradients of one rank."""
    states = 2 * DEEP * WIDE_LAYER // 2
    shared = 2 * DEEP * WIDE_LAYER // 2
    return states + shared + (room + 2) * WIDE_LAYER


def staged(_: Path) -> None:
    """Prints the most that this rank had copies of in backward, after it, and of all gradients."""
    with _of_rank() as rank:
        boosted = _boost_deep()
        seen: list[int] = []

        def look(*_: Any) -> None:
            if rank == 1:
                time.sleep(0.03)
            seen.append(copied_bytes())

        for layer in boosted.model:
            layer.register_full_backward_hook(look)
        for step in range(3):
            loss = _deep_loss(boosted.model, 10 * step + rank, rank)
            boosted.booster.backward(loss, boosted.optimizer)
            after = copied_bytes()
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        print(max(seen), after, len(seen), DEEP * WIDE_LAYER)


def clips(_: Path) -> None:
    """Prints what clipping in place costs this rank, its copies, and those of the next pass."""
    with _of_rank() as rank:
        boosted = _boost_deep(room=DEEP + 4)
        booster, model, optimizer = boosted
        booster.backward(_deep_loss(model, rank, rank), optimizer)
        before = booster.report(model).host_bytes
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        paid = booster.report(model).host_bytes - before
        copied = copied_bytes()
        optimizer.step()
        optimizer.zero_grad()
        seen: list[int] = []
        model[-2].register_full_backward_hook(lambda *_: seen.append(copied_bytes()))
        booster.backward(_deep_loss(model, rank, rank), optimizer)
        print(paid, copied, *seen)


def clips_without_room(_: Path) -> None:
    """The host has room for eight layers' gradients of one rank."""
    with _of_rank() as rank:
        booster, model, optimizer = _boost_deep()
        booster.backward(_deep_loss(model, rank, rank), optimizer)
        print(_refused(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))


def states_on_nvme(directory: Path) -> None:
    """Prints what this rank has on NVMe, then whether that changed nothing.

    Beside weights and gradients the host has room for nine layers, and their states take twelve.
    """
    shared = 2 * DEEP * WIDE_LAYER // 2
    little = {"host_memory": shared + 9 * WIDE_LAYER, "nvme_path": directory}
    with _of_rank() as rank:
        weights = []
        for settings in ({}, little):
            torch.manual_seed(3)
            boosted = boost(
                RankCase(_deep, _deep_loss),
                **{"chunk_bytes": WIDE_LAYER, "memory": 3 * WIDE_LAYER} | settings,
            )
            for step in range(2):
                boosted.step(_deep_loss(boosted.model, 10 * step + rank, rank))
            weights.append([_kept(param) for param in boosted.model.parameters()])
        print(boosted.booster.report(boosted.model).nvme_bytes, all(map(torch.equal, *weights)))


def steps_without_room(_: Path) -> None:
    """Clips in a step in which one optimizer reads p.grad; prints what gradients have become."""
    with _of_rank() as rank:
        model = _deep()
        head = list(model[-1].parameters())
        others = [param for layer in model[:-1] for param in layer.parameters()]
        optimizers = [torch.optim.Adafactor(head, lr=1e-2), castor.HybridAdam(others)]
        booster = castor.Booster(
            plugin=plugin(
                3 * WIDE_LAYER, chunk_bytes=WIDE_LAYER, host_memory=_room_of_deep(8), max_norm=1e-12
            )
        )
        booster.boost(model, optimizers)
        booster.backward(_deep_loss(model, rank, rank), optimizers[0])
        paid = booster.report(model).host_bytes
        before = [param.grad.clone() for param in model.parameters()]
        print(_refused(optimizers[0].step))
        same = (torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
        print(all(same), booster.report(model).host_bytes - paid)


def outlives(_: Path) -> None:
    """What a model's parameters say when nothing of castor is left, its threads included."""
    with _of_rank() as rank:
        boosted = _boost("tight", 0)
        boosted.step(_loss(boosted.model, rank, rank))
        weights = [param.detach().clone() for param in boosted.model.parameters()]
        params = list(boosted.model.parameters())
        distributed.barrier()
        del boosted
        print(all(map(torch.equal, params, weights)))
        with torch.no_grad():
            params[0].fill_(rank)
        distributed.barrier()
        print(params[0].unique().item() == rank)
        threads = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            boosted = _boost("tight", 0)
            distributed.barrier()
            del boosted
        print(len(os.listdir("/proc/self/task")) == threads)


def plans_activations(_: Path) -> None:
    """What activations="auto" takes of host memory to be shared, and what it plans there."""
    with _of_rank() as rank:
        case = EXACT["activations"]
        boosted = boost(case)
        boosted.step(case.loss(boosted.model, 0, rank))
        policy: Any = engine_of(boosted.model).blocks._auto  # type: ignore[attr-defined]
        options = policy._options()
        alone = options | {"ranks_sharing": 1}
        taken, as_alone = (policy._simulator.places(of)["host_bytes"] for of in (options, alone))
        shared = boosted.report().rank_shared_bytes
        print(options["ranks_sharing"], shared, as_alone - taken)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
