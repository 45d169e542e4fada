"""What tests of ZeRO's stages run on ranks: `python zero_stage_cases.py NAME DIRECTORY`."""

import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from castor.runtime.engine import engine_of
from grids import some, steps
from helpers import Boosted, copies
from rank_cases import (
    CLOSE,
    EXACT,
    TOWER,
    RankCase,
    _of_rank,
    _refused,
    _tower_loss,
    boost,
    train,
)
from simulated import compute_as_asked
from zoo import tower, tower_batch

TIGHT = EXACT["tight"]
STREAMED = some({
    **{name: EXACT[name] for name in ("tight", "uneven", "frozen", "packed", "lazy", "lion")},
    "gpt2": EXACT["gpt2"],  # its output embedding is tied
    "overlap": replace(TIGHT, settings=TIGHT.settings | {"overlap": "forward"}),
    "link": replace(TIGHT, settings=TIGHT.settings | {"link_bandwidth": "1GB/s"}),
    "gathered": replace(EXACT["gpt2"], settings={"gather_embeddings": True}),
}, "tight", "uneven", "frozen", "packed", "lazy", "overlap", "gathered")  # fmt: skip
"""fp32: the bits of one process."""
ROUNDED = some({
    name: CLOSE[name]
    for name in (
        *("bf16 fp32", "bf16 split", "bf16 split_int8", "fp16"),
        *("accumulated", "deferred", "nvme states"),
    )
}, "bf16 split", "bf16 split_int8", "accumulated", "nvme states")  # fmt: skip
"""The bits of ranks that have whole weights and gradients each."""
ON_THREE = ("tight", "uneven")
ON_FOUR = ("tight",)
AT_STAGE_TWO = ("tight", "uneven", "overlap", "bf16 split", "accumulated")
ON_GPUS = {
    name: replace(case, settings=case.settings | {"memory": memory})
    for memory, names in (
        (48 << 10, ("tight", "uneven")),
        (4 << 20, ("overlap", "frozen", "accumulated", "bf16 split", "nvme states")),
    )
    for name, case in (STREAMED | ROUNDED).items()
    if name in names
}
"""As on the CPU device, with room for gradients on their way to the host."""
DEEP = replace(TIGHT, build=lambda: tower(depth=24), settings=TIGHT.settings | {"memory": 64 << 10})
"""Of more chunks than a rank has copies of at once."""


def staged(case: RankCase, stage: object) -> RankCase:
    return replace(case, settings=case.settings | {"zero_stage": stage})


def steps_of(name: str) -> int:
    return steps(10 if name in ON_THREE else 6)


@contextmanager
def _over_the_group() -> Iterator[int]:
    """_of_rank, of ranks that share no memory."""
    os.environ["CASTOR_RANK_LINK"] = "group"
    with _of_rank() as rank:
        yield rank


def chunk_bytes(model: nn.Module) -> list[int]:
    return [chunk["used_bytes"] for chunk in engine_of(model).session.chunks()]


def _train_all(cases: dict[str, RankCase], directory: Path) -> None:
    with _over_the_group() as rank:
        for name, case in cases.items():
            for stage in (1, 2, 3) if name in AT_STAGE_TWO else (1, 3):
                weights, losses, report = train(staged(case, stage), (rank,), steps=steps_of(name))
                distributed.barrier()  # they were read of each other
                found = (weights, losses, vars(report))
                torch.save(found, directory / f"{name}.{stage}.{rank}.pt")


def on_two(directory: Path) -> None:
    _train_all(STREAMED | ROUNDED, directory)


def on_three(directory: Path) -> None:
    _train_all({name: STREAMED[name] for name in ON_THREE}, directory)


def on_four(directory: Path) -> None:
    _train_all({name: STREAMED[name] for name in ON_FOUR}, directory)


def on_gpus(directory: Path) -> None:
    _train_all(ON_GPUS, directory)


COPIES_AT_A_TIME = 5
"""Full copies of chunks' gradients that a rank has: four that wait, and one that is reduced."""


def registrations(_: Path) -> None:
    """How often each of five later steps page-locks memory, by stage: 1 in memory that ranks share.

    How many copies wait at a time is a matter of the ranks' speed.
    """
    with _of_rank() as rank:
        for stage, link in ((1, "auto"), (2, "group"), (3, "group")):
            os.environ["CASTOR_RANK_LINK"] = link
            boosted = boost(staged(ON_GPUS["tight"], stage))
            counts = []
            for step in range(6):
                boosted.step(_tower_loss(boosted.model, 2 * step + rank, rank))
                counts.append(torch.simgpu.gpu.counts()["registrations"])  # type: ignore[attr-defined]
            report = boosted.report()
            print(report.zero_stage if link == "group" else 1, report.rank_shared_bytes > 0)
            print(*(after - before for before, after in itertools.pairwise(counts)))
            distributed.barrier()


def fails_in_backward(_: Path) -> None:
    """A pass fails on all ranks, then on rank 1 alone, and is run again."""
    with _over_the_group() as rank:
        for link in ("group", "auto"):
            os.environ["CASTOR_RANK_LINK"] = link
            found = []
            for failing in ((), (0, 1), (1,)):
                boosted = boost(staged(TIGHT, 2), placement_policy="cpu")
                _, model, optimizer = boosted
                boosted.step(_tower_loss(model, rank, rank))
                if rank in failing:
                    hook = model.layers[0].weight.register_hook(lambda _: 1 / 0)
                    with suppress(ZeroDivisionError):
                        _tower_loss(model, 2 + rank, rank).backward()
                    hook.remove()
                    optimizer.zero_grad()
                again = partial(_step_on, boosted, 2 + rank, rank)
                if failing == (1,):
                    print(_refused(again))
                else:
                    again()
                    found.append(copies(model.parameters()))
                distributed.barrier()
            print(all(map(torch.equal, *found)))


def _step_on(boosted: Boosted, seed: int, rank: int) -> None:
    boosted.step(_tower_loss(boosted.model, seed, rank))


def memory(_: Path) -> None:
    """What the host holds at each stage, before a step and behind it."""
    with _over_the_group() as rank:
        for stage in (1, 2, 3):
            boosted = boost(staged(DEEP, stage), placement_policy="cpu")
            report, sizes = boosted.booster.report(boosted.model), chunk_bytes(boosted.model)
            boosted.step(_tower_loss(boosted.model, 0, rank))
            after = boosted.booster.report(boosted.model)
            distributed.barrier()
            print(report.zero_stage, report.host_bytes, after.host_bytes, report.rank_shard_bytes,
                  report.rank_window_bytes, report.rank_gradient_shard_bytes,
                  after.rank_gradient_copy_bytes, after.rank_gradient_copy_peak_bytes,
                  sum(sizes), max(sizes))  # fmt: skip


def seams(_: Path) -> None:
    """What one step of a model that streams reads of others, and sends them."""
    with _over_the_group() as rank:
        for stage in (2, 3):
            boosted = boost(staged(TIGHT, stage), placement_policy="cpu")
            before = boosted.booster.report(boosted.model)
            distributed.barrier()  # as below, before its first
            for step in range(3):
                boosted.step(_tower_loss(boosted.model, step, rank))
                distributed.barrier()
                report = boosted.booster.report(boosted.model)
                distributed.barrier()  # before the other rank's next step reads of this one
                print(stage, report.rank_read_bytes - before.rank_read_bytes,
                      report.rank_sent_bytes - before.rank_sent_bytes,
                      sum(chunk_bytes(boosted.model)), report.num_chunks,
                      len(list(boosted.model.parameters())))  # fmt: skip
                before = report


def gradients(directory: Path) -> None:
    """p.grad, which is whole, in parts, and in parts beside weights in parts."""
    with _over_the_group() as rank:
        for stage in (1, 2, 3):
            boosted = boost(staged(TIGHT, stage), max_norm=0.0)
            booster, model, optimizer = boosted
            params = list(model.parameters())
            with booster.no_sync(model):
                booster.backward(_tower_loss(model, rank, rank), optimizer)
                whole = booster.report(model).rank_gradient_copy_bytes
            booster.backward(_tower_loss(model, 2 + rank, rank), optimizer)
            left = booster.report(model).rank_gradient_copy_bytes
            alone = [param.grad.clone() for param in params] if rank == 0 else []  # type: ignore[union-attr]
            address = _said(params[0].grad.numpy)  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(params, 0.1)
            clipped = [param.grad.clone() for param in params]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            boosted.step(_tower_loss(model, 4 + rank, rank))
            booster.backward(_tower_loss(model, 6 + rank, rank), optimizer)
            params[0].grad = params[0].grad * 0.5  # type: ignore[operator]
            params[3].grad = None
            optimizer.step()
            optimizer.zero_grad()
            found = (alone, norm, clipped, copies(params))
            torch.save(found, directory / f"gradients.{stage}.{rank}.pt")
            print(whole, left, sum(chunk_bytes(model)), address)
            distributed.barrier()
        print(_overflow_on_one(rank))
        print(_no_sync_without_room(rank))


def read_beside_backward(_: Path) -> None:
    """At each stage another thread reads gradients of two chunks at a time during the passes."""
    with _over_the_group() as rank:
        weights = []
        for stage in (1, 2, 3):
            boosted = boost(staged(DEEP, stage))
            with _reading_gradients(boosted.model) as read:
                for step in range(2):
                    boosted.step(_tower_loss(boosted.model, step, rank))
            weights.append(copies(boosted.model.parameters()))
            distributed.barrier()
            print(all(map(torch.equal, weights[0], weights[-1])), sum(read) > 0)


@contextmanager
def _reading_gradients(model: nn.Module) -> Iterator[list[int]]:
    over, read = threading.Event(), [0]

    def work() -> None:
        while not over.is_set():
            held = [grad for param in model.parameters() if (grad := param.grad) is not None]
            for first, second in itertools.pairwise(held):
                read[0] += torch.cat([first.flatten(), second.flatten()]).numel()

    with ThreadPoolExecutor(1) as reader:
        done = reader.submit(work)
        try:
            yield read
        finally:
            over.set()
            done.result()


def _overflow_on_one(rank: int) -> str:
    boosted = boost(staged(TIGHT, 3), precision="fp16")
    batch = tower_batch(0)
    if rank == 1:
        batch["x"][0, 0] = float("inf")
    boosted.booster.backward(boosted.model(**batch), boosted.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the skip, which names the parameter
        boosted.optimizer.step()
    skipped = boosted.booster.report(boosted.model).skipped_steps
    distributed.barrier()
    return f"{skipped} {boosted.optimizer._castor.loss_scale}"


def _no_sync_without_room(rank: int) -> str:
    boosted = boost(staged(DEEP, 2), placement_policy="cpu", host_memory="300KiB")
    boosted.step(_tower_loss(boosted.model, 0, rank))
    with boosted.booster.no_sync(boosted.model):
        loss = _tower_loss(boosted.model, 1, rank)
        return _refused(lambda: boosted.booster.backward(loss, boosted.optimizer))


def refused(_: Path) -> None:
    """What weights in parts do not do, by name; and what goes on all the same."""
    with _over_the_group():
        print(_refused(lambda: boost(TOWER, zero_stage=3, placement_policy="cuda")))
        torchs = replace(TOWER, optimizer=lambda params: torch.optim.Adagrad(params))
        print(_refused(lambda: boost(torchs, zero_stage=2)))
        print(_refused(lambda: boost(torchs, zero_stage=3)))
        boosted = boost(staged(TIGHT, 3))
        weight = boosted.model.head.weight
        with torch.no_grad():
            print(_refused(lambda: weight.mul_(2)))
        print(_said(lambda: boosted.model.load_state_dict(tower().state_dict())))
        print(_said(weight.detach().numpy))
        before = copies(boosted.model.parameters())
        print(boosted.step(_tower_loss(boosted.model, 0, 0)) > 0)
        after = copies(boosted.model.parameters())
        print(any(map(torch.equal, before, after)))


def _said(work: Callable[[], Any]) -> str:
    """What torch raises, on one line."""
    try:
        work()
    except RuntimeError as error:
        return str(error).replace("\n", " ")
    return "nothing was raised"


SAVED = {"fp32": TIGHT, "split": CLOSE["bf16 split"]}


def saves(directory: Path) -> None:
    """After two steps, at once and beside the training; then two steps more."""
    with _over_the_group() as rank:
        for name, case in SAVED.items():
            boosted = boost(staged(case, 3))
            booster, model, optimizer = boosted
            for step in range(2):
                boosted.step(case.loss(model, step, 0))
            booster.save(directory / name, model, optimizer)
            torch.save(copies(model.parameters()), directory / f"{name} as saved.{rank}.pt")
            booster.save(directory / f"{name} beside", model, optimizer, use_async=True)
            for step in range(2, 4):
                boosted.step(case.loss(model, step, 0))
            torch.save(copies(model.parameters()), directory / f"{name}.{rank}.pt")
            booster.load(directory / f"{name} beside", model, optimizer)
            for step in range(2, 4):
                boosted.step(case.loss(model, step, 0))
            torch.save(copies(model.parameters()), directory / f"{name} again.{rank}.pt")
            distributed.barrier()


def goes_on(directory: Path) -> None:
    """From there, on any number of ranks."""
    with _over_the_group() as rank:
        _go_on(directory, rank)


def _go_on(directory: Path, rank: int) -> None:
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    for name, case in SAVED.items():
        boosted = boost(staged(case, 3))
        booster, model, optimizer = boosted
        booster.load(directory / name, model, optimizer)
        weights = copies(model.parameters())
        for step in range(2, 4):
            boosted.step(case.loss(model, step, 0))
        after = copies(model.parameters())
        torch.save((weights, after), directory / f"{name} on {size}.{rank}.pt")
        if size > 1:
            distributed.barrier()


def one_dies(directory: Path) -> None:
    """Rank 1 is killed in backward; the others go on to read its part."""
    lose_rank_1(directory, staged(TIGHT, 3))


def lose_rank_1(directory: Path, case: RankCase) -> None:
    """Rank 1 is killed in backward; the others say what they hear, and go on to read."""
    with _over_the_group() as rank:
        boosted = boost(case)
        boosted.step(_tower_loss(boosted.model, 0, rank))
        distributed.barrier()

        def die(*_: Any) -> None:
            (directory / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:
            boosted.model.layers[3].register_full_backward_hook(die)
        print(_refused(lambda: boosted.step(_tower_loss(boosted.model, 1, rank))))
        boosted.model(**tower_batch(1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
