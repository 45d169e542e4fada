"""What tests of ranks on GPUs run: `python gpu_rank_cases.py NAME DIRECTORY`; see rank_cases.py.

CASTOR_TEST_DEVICE says on which: "simgpu:1", "cuda", or the CPU device without it.
"""

import functools
import gc
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import _get_default_store, _world

import castor
import grids
import helpers
import low_level_zero_cases
import rank_cases
from castor.runtime.engine import engine_of
from fused_optimizers import MAKERS
from helpers import GIB, tight_memory
from rank_cases import RankCase, _frozen, _of_rank, _refused, _tower_loss, _zoo, boost
from simulated import compute_as_asked
from simulated_gpu import BACKEND
from tensor_cases import write_own
from zoo import CASES, tower, tower_batch

STEPS = 5
SMALL = {"chunk_bytes": "8KiB"}
"""Several chunks of a tower."""

SHARED = {"placement_policy": "cpu", "device_update_fraction": 0.6}
"""A share of the updates on the GPU; on the CPU device there is none."""

EXACT = {
    "ample": RankCase(tower, _tower_loss, SMALL),
    "ample, overlap none": RankCase(tower, _tower_loss, SMALL | {"overlap": "none"}),
    "tight": RankCase(tower, _tower_loss, SMALL | {"memory": "tight"}),
    "tight, overlap none": RankCase(
        tower, _tower_loss, SMALL | {"memory": "tight", "overlap": "none"}
    ),
    "one rank tight": RankCase(tower, _tower_loss, SMALL | {"memory": "tight on rank 1"}),
    "one rank tight, overlap none": RankCase(
        tower, _tower_loss, SMALL | {"memory": "tight on rank 1", "overlap": "none"}
    ),
    "all on the device": RankCase(tower, _tower_loss, SMALL | {"placement_policy": "cuda"}),
    "updates shared": RankCase(tower, _tower_loss, SMALL | SHARED),
    "half on the device": RankCase(
        tower,
        _tower_loss,
        SMALL | {"placement_policy": "static", "offload_optim_frac": 0.5, "overlap": "none"},
    ),
    "momentum, half on the device": RankCase(
        tower,
        _tower_loss,
        SMALL | {"placement_policy": "static", "offload_optim_frac": 0.5, "overlap": "none"},
        optimizer=MAKERS["momentum"],
    ),
    "lion, all on the device": RankCase(
        tower, _tower_loss, SMALL | {"placement_policy": "cuda"}, optimizer=MAKERS["lion"]
    ),
    "uneven": RankCase(rank_cases.EXACT["uneven"].build, rank_cases.EXACT["uneven"].loss, SMALL),
    "uneven, tight": RankCase(
        rank_cases.EXACT["uneven"].build,
        rank_cases.EXACT["uneven"].loss,
        SMALL | {"memory": "tight"},
    ),
    # Some chunks resident, others fetched: once, an update waited for a fetch that waited for it.
    "uneven, some resident": RankCase(
        rank_cases.EXACT["uneven"].build, rank_cases.EXACT["uneven"].loss, {"memory": 48 << 10}
    ),
    "frozen": RankCase(_frozen, _zoo("gpt2").loss),
    "llama, tight": _zoo("llama", memory="tight"),
    "checkpointed": _zoo("llama", checkpointing=True),
    "lazy": rank_cases.EXACT["lazy"],
}
"""fp32: the bits of one process with as many micro-batches."""

CLOSE = {
    **{
        f"{how}{where}": RankCase(
            tower, _tower_loss, SMALL | memory, micro_batches=2, deferred=how == "deferred"
        )
        for how in ("accumulated", "deferred")
        for where, memory in (("", {}), (", tight", {"memory": "tight"}))
    },
    **{
        f"bf16 {state_format}{where}": RankCase(
            tower,
            _tower_loss,
            SMALL | memory | {"precision": "bf16", "optim_state_format": state_format},
        )
        for state_format in ("fp32", "split", "split_bf16", "split_int8")
        for where, memory in (("", {}), (", tight", {"memory": "tight"}))
    },
    "bf16 split, updates shared": RankCase(
        tower, _tower_loss, SMALL | SHARED | {"precision": "bf16"}
    ),
    "fp16": _zoo("llama", precision="fp16", initial_scale=2.0**8),
    "nvme states": RankCase(
        tower, _tower_loss, SMALL | {"nvme_path": "build", "nvme_offload_fraction": 1.0}
    ),
}
"""Those of ranks on the CPU device."""

SOME_EXACT = grids.some(tuple(EXACT), *(EXACT.keys() - {"uneven", "checkpointed"}))
SOME_CLOSE = grids.some(
    tuple(CLOSE),
    *("accumulated, tight", "deferred, tight", "bf16 fp32, tight", "bf16 split"),
    *("bf16 split_bf16, tight", "bf16 split_int8, tight", "bf16 split, updates shared"),
    *("fp16", "nvme states"),
)
ON_FOUR = grids.some(
    ("ample", "tight", "one rank tight", "uneven", "all on the device", "bf16 split"),
    "ample", "tight",
)  # fmt: skip


def each(directory: Path) -> None:
    """CASES, on as many ranks as there are."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    _train_all(directory, range(rank, rank + 1), f".{rank}")


def alone(directory: Path) -> None:
    """CASES in one process, with the micro-batches of TAKEN ranks."""
    _train_all(directory, range(int(os.environ["TAKEN"])), "")


def _train_all(directory: Path, ranks: range, suffix: str) -> None:
    for name in os.environ["CASES"].split("|"):
        case = (EXACT | CLOSE)[name]
        weights, losses, report = rank_cases.train(
            _with_memory(case, tight=ranks == range(1, 2)), ranks, steps=STEPS
        )
        torch.save((weights, losses, vars(report)), directory / f"{name}{suffix}.pt")


REDUCED = {
    f"{precision} stage {stage}{where}": RankCase(
        tower, _tower_loss, SMALL | settings | {"zero_stage": stage, "precision": precision}
    )
    for precision in ("fp32", "bf16")
    for stage, where, settings in (
        (1, "", {}),
        (1, ", tight", {"memory": "tight"}),
        (1, ", all on the device", {"placement_policy": "cuda"}),
        (2, "", {"placement_policy": "cpu"}),
        (3, "", {"placement_policy": "cpu"}),
    )
} | {
    "fp32 stage 1, deferred": CLOSE["deferred"],
    "fp16 stage 2": RankCase(
        tower,
        _tower_loss,
        SMALL
        | {"placement_policy": "cpu", "zero_stage": 2}
        | {"precision": "fp16", "initial_scale": 2.0**8},
    ),
}
"""Cases of which gradients are added by castor and by the backend."""
REDUCED_ON = {
    2: REDUCED,
    4: grids.some(REDUCED, "fp32 stage 1, tight", "bf16 stage 1, all on the device",
                  "fp32 stage 1, deferred", "fp32 stage 2", "bf16 stage 3", "fp16 stage 2"),
}  # fmt: skip
"""By the number of ranks."""


BESIDE = (16 << 20) + (48 << 10)
"""Device bytes of two communicators of the simulated GPU, and for small chunks of the window and of
the buffers in which gradients gather."""
REDUCTIONS: dict[str, dict[str, Any]] = {
    "ordered": {"reduce_on": "host"},
    "on the device": {"reduce_on": "device"},
    "backend": {"reduction": "backend"},
}
"""Settings with which gradients are reduced: in order, by the host or the GPUs; by the backend."""


def _reduced(case: RankCase, how: str, *, tight: bool = False) -> RankCase:
    """The case with bytes, for a reduction of REDUCTIONS; `tight`: this is rank 1."""
    asked = _with_memory(case, tight=tight)
    settings = asked.settings | REDUCTIONS[how]
    if how != "ordered" and "memory" in settings:
        settings["memory"] += BESIDE
    return replace(asked, settings=settings)


def reductions(directory: Path) -> None:
    """Losses, reports and weights of REDUCED_ON with each of REDUCTIONS."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    found: dict[str, dict[str, Any]] = {}
    weights: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, case in REDUCED_ON[distributed.get_world_size()].items():
        for how in REDUCTIONS:
            weights.setdefault(name, {})[how], losses, report = rank_cases.train(
                _reduced(case, how), range(rank, rank + 1), steps=STEPS
            )
            assert report.peak_device_bytes <= report.device_budget_bytes
            found.setdefault(name, {})[how] = {"losses": losses, "report": report.as_dict()}
            print(name, how, *(line for line in str(report).splitlines() if "added" in line))
            distributed.barrier()  # the others may still read this rank's shards
    write_own(directory, "reductions", found)
    torch.save(weights, directory / f"reductions{rank}.pt")


ON_MACHINES = ("fp32 stage 1", "bf16 stage 1, all on the device", "bf16 stage 3")
"""Names in REDUCED of cases that several machines train."""


def on_machines(directory: Path) -> None:
    """Weights of ON_MACHINES, in order on the host and on the GPUs."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    found = {}
    for name, how in itertools.product(ON_MACHINES, ("ordered", "on the device")):
        found[name, how], _, report = rank_cases.train(
            _reduced(REDUCED[name], how), range(rank, rank + 1), steps=STEPS
        )
        assert "between machines" in report.rank_link or "gloo" in report.rank_link
        distributed.barrier()  # the others may still read this rank's shards
    torch.save(found, directory / f"machines{rank}.pt")


def chosen(_: Path) -> None:
    """Where "auto" reduces, by the memory of the ranks, and whether there are communicators."""
    with _of_rank() as rank:

        def reduce_on(memory: int, **settings: Any) -> int:
            """Prints where; returns the bytes of the largest chunk."""
            gpu = torch.simgpu  # type: ignore[attr-defined]
            free = gpu.mem_get_info()[0]
            boosted = boost(RankCase(tower, _tower_loss, STREAMED | settings), memory=memory)
            boosted.step(_tower_loss(boosted.model, rank, rank))
            report = boosted.report()
            connected = free - gpu.mem_get_info()[0] >= report.communicator_bytes >= 16 << 20
            print(report.reduced_on, report.device_link, report.communicator_bytes, connected)
            chunks = engine_of(boosted.model).session.chunks()
            distributed.barrier()  # the others may still read this rank's shards
            return max(chunk["used_bytes"] for chunk in chunks)

        largest = reduce_on(GIB, reduce_on="host")
        # 16 MiB of communicators, a window of two chunks, three buffers of one.
        least = 8 * ((16 << 20) + 5 * largest)
        print(least // 8)
        for memory in (least, least - 8, least - 8 if rank == 1 else GIB):
            reduce_on(memory)
        reduce_on(least - 8, reduce_on="device")


STREAMED = SMALL | {"placement_policy": "cpu"}
"""All chunks are streamed."""


def boosts_again(_: Path) -> None:
    """Boosts one model after the other; rank 1 keeps the second until the third is there.

    Prints the groups between GPUs and their memory with each model, and those that this rank has
    ended alone, for whose end NCCL would wait for ever.
    """
    with _of_rank() as rank, pytest.MonkeyPatch.context() as patch:
        alone = []
        end = distributed.destroy_process_group

        def end_together(group: Any = None) -> None:
            if group is not None and distributed.get_backend(group) == BACKEND:
                name = group.group_name
                store = distributed.PrefixStore("ends", _get_default_store())
                store.add(name, 1)
                deadline = time.monotonic() + 30
                while store.add(name, 0) < group.size() and time.monotonic() < deadline:
                    time.sleep(0.01)
                if store.add(name, 0) < group.size():
                    alone.append(name)
            end(group)

        patch.setattr(distributed, "destroy_process_group", end_together)
        gpu = torch.simgpu  # type: ignore[attr-defined]
        free = gpu.mem_get_info()[0]
        kept = []
        for number in range(5):
            boosted = boost(RankCase(tower, _tower_loss, STREAMED))
            boosted.step(_tower_loss(boosted.model, rank, rank))
            taken = (free - gpu.mem_get_info()[0]) >> 20
            groups = sum(distributed.get_backend(one) == BACKEND for one in _world.pg_map)
            print(boosted.report().communicator_bytes >> 20, taken, groups)
            distributed.barrier()  # the others may still read this rank's shards
            if number == 1 and rank == 1:
                kept.append(boosted)
            if number == 2:
                kept.clear()
            del boosted
            gc.collect()
        print(alone)


STORED = {
    "shared host storage": STREAMED,
    "host storage of each rank": STREAMED,
    "stage 2": STREAMED | {"zero_stage": 2},
    "stage 3": STREAMED | {"zero_stage": 3},
}
"""Places of weights and gradients between steps."""


def _stored(place: str, rank: int, **settings: Any) -> helpers.Boosted:
    if place == "host storage of each rank" and rank == 1:
        torch.simgpu.gpu.refuse_pages(1)  # type: ignore[attr-defined]
    return boost(RankCase(tower, _tower_loss, STORED[place]), **settings)


def gathers(directory: Path) -> None:
    """Bytes of gradients that cross the link in backward passes, by place and reduction."""
    with _of_rank() as rank:
        gpu = torch.simgpu.gpu  # type: ignore[attr-defined]
        found: dict[str, Any] = {}
        for place in STORED:
            of_place = found.setdefault(place, {"weights": [], "losses": []})
            for how, settings in REDUCTIONS.items():
                booster, model, optimizer = boosted = _stored(place, rank, **settings)
                chunks = [
                    chunk["used_bytes"]
                    for chunk in engine_of(model).session.chunks()
                    if chunk["trainable"]
                ]
                passes = of_place[how] = []
                losses: list[float] = []
                for step in range(STEPS):
                    loss = _tower_loss(model, 10 * step + rank, rank)
                    before, told = gpu.counts(), booster.report(model)
                    booster.backward(loss, optimizer)
                    after, tells = gpu.counts(), booster.report(model)
                    passes.append({
                        "to_host": after["bytes_out"] - before["bytes_out"],
                        "told": tells.d2h_bytes - told.d2h_bytes,
                        "back": after["bytes_in"] - before["bytes_in"]
                        - (tells.h2d_bytes - told.h2d_bytes),
                    })  # fmt: skip
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                of_place["losses"].append(losses)
                of_place["weights"].append(helpers.copies(model.parameters()))
                of_place["chunks"] = chunks
                del boosted, booster, model, optimizer, loss
                distributed.barrier()  # the others may still read this rank's shards
        torch.save(found, directory / f"gathers{rank}.pt")


def _read_within_backward(boosted: helpers.Boosted) -> Callable[[], None]:
    """Reads gradients of the layers behind while a layer's backward is under way."""
    layers = list(boosted.model.layers)

    def read(number: int) -> None:
        behind = layers[number + 1].weight.grad
        if behind is not None:
            behind.abs().sum().item()

    for number, layer in enumerate(layers[:-1]):
        layer.register_full_backward_pre_hook(lambda *_, number=number: read(number))
    return boosted.optimizer.zero_grad


def _zeros_in_place(boosted: helpers.Boosted) -> Callable[[], None]:
    return lambda: boosted.optimizer.zero_grad(set_to_none=False)


def _keeps_gradients(boosted: helpers.Boosted) -> Callable[[], None]:
    """Holds p.grad of the step before, which keeps its values where it is not sharded."""
    sharded = boosted.report().zero_stage > 1
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep() -> None:
        for held, values in kept:
            assert sharded or torch.equal(held, values)
        kept[:] = [(p.grad, p.grad.clone()) for p in boosted.model.parameters()]
        boosted.optimizer.zero_grad()

    return keep


def _clips(boosted: helpers.Boosted) -> Callable[[], None]:
    return boosted.optimizer.zero_grad


WAYS = {
    "plain": _clips,
    "read within backward": _read_within_backward,
    "zeros in place": _zeros_in_place,
    "kept": _keeps_gradients,
    "clipped by the loop": _clips,
    "two passes": _clips,
    "no_sync": _clips,
}
"""What a loop does with gradients; what is called behind each step."""


def gathers_in_each_way(directory: Path) -> None:
    """Weights and gradients of loops that read, keep and add up gradients; by place, reduction."""
    with _of_rank() as rank:
        found: dict[tuple[str, str, str], list[torch.Tensor]] = {}
        for place, way, how in itertools.product(STORED, WAYS, REDUCTIONS):
            booster, model, optimizer = boosted = _stored(
                place, rank, **REDUCTIONS[how], max_norm=0.0 if "clipped" in way else 0.5
            )
            end_step = WAYS[way](boosted)
            seen = found[place, way, how] = []
            for step in range(3):
                for last in (False, True) if way in ("two passes", "no_sync") else (True,):
                    deferred = way == "no_sync" and not last
                    with booster.no_sync(model) if deferred else nullcontext():
                        loss = _tower_loss(model, 20 * step + 2 * rank + last, rank)
                        booster.backward(loss, optimizer)
                seen += [param.grad.clone() for param in model.parameters()]
                if "clipped" in way:
                    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                end_step()
            seen += helpers.copies(model.parameters())
            del boosted, booster, model, optimizer, loss, end_step
            distributed.barrier()  # the others may still read this rank's shards
        torch.save(found, directory / f"ways{rank}.pt")


def _wide_loss(model: nn.Module, seed: int, _: int) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed, width=1600))
    return loss


WIDE = {
    f"wide, stage {stage}": RankCase(
        lambda: tower(width=1600, depth=2),
        _wide_loss,
        {"placement_policy": "cpu", "zero_stage": stage, "memory": GIB},
    )
    for stage in (1, 2)
}
"""Of chunks that do not fit the backend's window, which has 8 MiB."""
OF_MODELS = ("tight", "one rank tight", "uneven", "frozen", "checkpointed", "uneven, some resident")
"""Names in EXACT of models that not every rank completes, or that have room for some chunks."""


def gathers_in_models(directory: Path) -> None:
    """Weights of OF_MODELS in each of REDUCTIONS."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    found = {}
    cases = {name: EXACT[name] for name in OF_MODELS} | WIDE
    for (name, case), how in itertools.product(cases.items(), REDUCTIONS):
        if name in EXACT:
            asked = _reduced(case, how, tight=rank == 1)
        else:
            asked = replace(case, settings=case.settings | REDUCTIONS[how])
        found[name, "", how], _, _ = rank_cases.train(asked, range(rank, rank + 1), steps=STEPS)
    torch.save(found, directory / f"models{rank}.pt")


def reads_gradients(directory: Path) -> None:
    """Gradients of each step, all read one after the other, in each stage of ZeRO."""
    with _of_rank() as rank:
        found = []
        for stage in (1, 2, 3):
            booster, model, optimizer = boosted = boost(
                RankCase(tower, _tower_loss, STREAMED | {"zero_stage": stage})
            )
            seen: list[torch.Tensor] = []
            for step in range(STEPS):
                booster.backward(_tower_loss(model, 2 * step + rank, rank), optimizer)
                for _ in range(3):
                    seen += [param.grad.clone() for param in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            found.append(seen)
            del boosted, booster, model, optimizer
            distributed.barrier()  # the others may still read this rank's shards
        torch.save(found, directory / f"read{rank}.pt")


def one_ends_beside_sums(_: Path) -> None:
    """Rank 1 is gone, or stops, before its third step, of which rank 0 waits for the gradients."""
    with _of_rank() as rank:
        how = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[os.environ["HOW"]]
        settings = REDUCTIONS[os.environ["HOW_REDUCED"]]
        boosted = boost(EXACT["ample"], placement_policy="cpu", **settings)
        for step in range(3):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), how)
            boosted.step(_tower_loss(boosted.model, 10 * step + rank, rank))


def added_by_nobody(_: Path) -> None:
    """Reductions by GPUs of ranks that have no backend, each refused by all of them; "auto"."""
    with _of_rank():
        for settings in (REDUCTIONS["backend"], REDUCTIONS["on the device"], {}):
            model = tower()
            plugin = castor.GeminiPlugin(device="cpu", device_memory=GIB, **settings)
            optimizer = castor.HybridAdam(model.parameters())
            booster = castor.Booster(plugin)
            print(_refused(partial(booster.boost, model, optimizer)))
        print(booster.report(model).reduced_on)


def _with_memory(case: RankCase, *, tight: bool) -> RankCase:
    """The case with bytes; `tight`: this is rank 1."""
    settings = dict(case.settings)
    if "CASTOR_TEST_DEVICE" not in os.environ:
        settings.pop("device_update_fraction", None)
    asked = settings.pop("memory", None)
    if asked is not None:
        little = _tight(case.build, case.loss)
        settings["memory"] = little if asked == "tight" or tight else GIB
    return replace(case, settings=settings)


@functools.cache
def _tight(build: Callable[[], nn.Module], loss: Callable[[nn.Module, int, int], Any]) -> int:
    return tight_memory(build, lambda model, seed: loss(model, seed, 0))


OVERFLOWING = {
    "ample": EXACT["ample"],
    "tight": EXACT["tight"],
    "stage 2": RankCase(tower, _tower_loss, STORED["stage 2"]),
    "stage 3": RankCase(tower, _tower_loss, STORED["stage 3"]),
}
"""Cases of which gradients are not finite."""


def overflows(directory: Path) -> None:
    """Of rank 1 gradients are not finite at the third step, which all skip; and loss scales.

    The losses of "fp16" overflow by their scale in the first steps, on all ranks.
    """
    with _of_rank() as rank:
        of_weights: dict[tuple[str, str, str], list[torch.Tensor]] = {}
        for precision, (memory, case), how in itertools.product(
            ("fp32", "fp16"), OVERFLOWING.items(), REDUCTIONS
        ):
            asked = _reduced(case, how)
            boosted = boost(asked, precision=precision, initial_scale=2.0**18, hysteresis=1)
            booster, model, optimizer = boosted
            steps = []
            for step in range(6):
                before = helpers.copies(model.parameters())
                batch = tower_batch(step + 10 * rank)
                if step == 4 and rank == 1:
                    batch["x"][0, 0] = float("inf")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    boosted.step(model(**batch))
                after = helpers.copies(model.parameters())
                same = all(map(torch.equal, before, after))
                scale = optimizer._castor.loss_scale  # type: ignore[attr-defined]
                steps.append((same, booster.report(model).skipped_steps, scale))
            print(precision, memory, how, steps, sep="|")
            of_weights[precision, memory, how] = helpers.copies(model.parameters())
            del boosted, booster, model, optimizer
            distributed.barrier()  # the others may still read this rank's shards
        torch.save(of_weights, directory / f"overflows{rank}.pt")


def edits(directory: Path) -> None:
    """Weights that every rank writes itself between steps, and states that are read there."""
    with _of_rank() as rank:
        for precision in ("fp32", "bf16"):
            case = RankCase(tower, _tower_loss, SMALL | {"precision": precision})
            booster, model, optimizer = boosted = boost(case)
            seen = []
            for step in range(4):
                boosted.step(_tower_loss(model, 2 * step + rank, rank))
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(1.0 + 2.0**-6)
                seen += helpers.copies(model.parameters())
                for state in optimizer.state_dict()["state"].values():
                    seen += [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
            resident = booster.report(model).resident_chunks
            torch.save((seen, resident), directory / f"{precision}.{rank}.pt")


def clips(directory: Path) -> None:
    """A loop's own clipping writes gradients where they are."""
    with _of_rank() as rank:
        for memory in ("ample", "tight"):
            case = _with_memory(EXACT[memory], tight=False)
            booster, model, optimizer = boost(case, max_norm=0.0)
            norms = []
            for step in range(4):
                booster.backward(_tower_loss(model, 2 * step + rank, rank), optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
            weights = helpers.copies(model.parameters())
            torch.save((weights, norms), directory / f"{memory}.{rank}.pt")


def edits_and_clips(directory: Path) -> None:
    edits(directory)
    clips(directory)


def shares_a_gpu(_: Path) -> None:
    """Both ranks are on one GPU: in budgets that it has, and in larger ones."""
    with _of_rank():
        gpu = torch.simgpu  # type: ignore[attr-defined]
        own = gpu.get_device_properties()
        for total in (2 * GIB, 2 * GIB - 1):
            shared = replace(own, uuid="GPU-1", total_memory=total)
            gpu.get_device_properties = lambda device, shared=shared: shared
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                print(_refused(lambda: boost(EXACT["ample"])))
            print(*[one.message for one in warned])


def divided_on_a_gpu(_: Path) -> None:
    """As shares_a_gpu, without room for both, of ranks that have different parts of a model."""
    with _of_rank():
        gpu = torch.simgpu  # type: ignore[attr-defined]
        shared = replace(gpu.get_device_properties(), uuid="GPU-1", total_memory=GIB)
        gpu.get_device_properties = lambda device: shared
        for sizes in ({"tp_size": 2}, {"sp_size": 2}, {"pp_size": 2, "num_microbatches": 2}):
            model = CASES["llama"].model()
            plugin = castor.HybridParallelPlugin(
                device="cpu", device_memory=GIB, host_memory=GIB, precision="fp32", **sizes
            )
            optimizer = castor.HybridAdam(model.parameters())
            print(_refused(partial(castor.Booster(plugin).boost, model, optimizer)))


def host_bytes(_: Path) -> None:
    """Prints what this rank has on the host, of that the shared part, and the model's elements.

    Between steps, with gradients, which are the means that all share.
    """
    with _of_rank() as rank:
        case = _with_memory(CLOSE["bf16 split, tight"], tight=False)
        booster, model, optimizer = boosted = boost(case)
        for step in range(2):
            boosted.step(_tower_loss(model, 2 * step + rank, rank))
        booster.backward(_tower_loss(model, rank, rank), optimizer)
        report = booster.report(model)
        elements = sum(param.numel() for param in model.parameters())
        print(report.host_bytes, report.rank_shared_bytes, elements, report.num_chunks)
        print(report.rank_link)


def refused_pages(directory: Path) -> None:
    """Rank 1 may not lock the memory that ranks share, and each has its own."""
    with _of_rank() as rank:
        case = _with_memory(EXACT["tight"], tight=False)
        if rank == 1:
            torch.simgpu.gpu.refuse_pages(1)  # type: ignore[attr-defined]
        booster, model, _ = boosted = boost(case)
        for step in range(STEPS):
            boosted.step(_tower_loss(model, 10 * step + rank, rank))
        report = booster.report(model)
        print(report.rank_shared_bytes, report.rank_link)


def little_to_lock(_: Path) -> None:
    """A process may lock less than the host storage takes, shared or not."""
    with _of_rank():
        case = _with_memory(EXACT["tight"], tight=False)
        torch.simgpu.gpu.limit_registered(16 << 10)  # type: ignore[attr-defined]
        print(_refused(lambda: boost(case)))


LIMITED: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bf16"}}
"""Settings of models that train with LIMIT bytes of page-locked memory."""


def limited(directory: Path) -> None:
    """Trains 8 MiB of parameters in one process that may lock LIMIT bytes of host memory.

    Kernels read and write weights and gradients between passes.
    """
    for name, settings in LIMITED.items():
        torch.simgpu.gpu.limit_registered(int(os.environ["LIMIT"]))  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            boosted = helpers.boost(tower(width=96, depth=230), 2**21, max_norm=0.0, **settings)
        booster, model, optimizer = boosted
        figures = []
        for step in range(3):
            for micro in range(2):
                batch = helpers.on_device_of(boosted, tower_batch(2 * step + micro, width=96))
                loss = model(**batch)
                booster.backward(loss, optimizer)
                figures.append(loss.item())
            figures.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.layers[step].weight.mul_(1.0 + 2.0**-6)
            figures.append(model.layers[step].weight.norm().item())
        report = vars(booster.report(model))
        messages = [str(one.message) for one in warned]
        weights = helpers.copies(model.parameters())
        torch.save((weights, figures, report, messages), directory / f"{name}.pt")
        del boosted, booster, model, optimizer, loss


def outlives(_: Path) -> None:
    """Weights after castor has gone, which a rank writes without the others."""
    with _of_rank() as rank:
        boosted = boost(_with_memory(EXACT["tight"], tight=False))
        boosted.step(_tower_loss(boosted.model, rank, rank))
        weights = helpers.copies(boosted.model.parameters())
        params = list(boosted.model.parameters())
        distributed.barrier()
        del boosted
        print(all(map(torch.equal, helpers.copies(params), weights)))
        distributed.barrier()
        with torch.no_grad():
            params[0].fill_(rank)
        distributed.barrier()
        print(params[0].unique().item() == rank)


def low_level_zero(directory: Path) -> None:
    """LowLevelZeroPlugin's stages; weights and reports into files."""
    with _of_rank():
        low_level_zero_cases.each(directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
