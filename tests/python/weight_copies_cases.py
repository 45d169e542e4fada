"""What tests of copies of weights in parts run: `python weight_copies_cases.py NAME DIRECTORY`."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from grids import some
from helpers import copies
from rank_cases import TOWER, RankCase, _of_rank, _tower_loss, boost, train
from zero_stage_cases import SAVED as SAVED_IN_PARTS
from zero_stage_cases import TIGHT, _over_the_group, chunk_bytes, lose_rank_1, steps_of

SIZE = 4
FP32 = {
    "tight": TIGHT,
    "overlap": replace(TIGHT, settings=TIGHT.settings | {"overlap": "forward"}),
}
"""The bits of one process; all formats are in tests/cpp/store/stores_model_test.cc."""
NUM_COPIES = {"tight": (1, 2, 4), "overlap": (2, 4)}
"""By case."""
SAVED = some(SAVED_IN_PARTS, "fp32")


def copied(case: RankCase, num_copies: int) -> RankCase:
    return replace(case, settings=case.settings | {"zero_stage": 3, "extra_dp_size": num_copies})


def trained(directory: Path) -> None:
    with _over_the_group() as rank:
        for name, case in FP32.items():
            for num_copies in NUM_COPIES[name]:
                boosted = train(copied(case, num_copies), (rank,), steps=steps_of(name))
                distributed.barrier()  # they were read of each other
                weights, losses, report = boosted
                found = (weights, losses, vars(report))
                torch.save(found, directory / f"{name}.{num_copies}.{rank}.pt")


def seams(_: Path) -> None:
    """What a step of a model that streams reads of others, and sends them."""
    with _over_the_group() as rank:
        for num_copies in (1, 2, 4):
            boosted = boost(copied(TIGHT, num_copies), placement_policy="cpu")
            before = boosted.booster.report(boosted.model)
            distributed.barrier()
            for step in range(3):
                boosted.step(_tower_loss(boosted.model, step, rank))
                # Reads of what the update has made: all has been exchanged when it is over.
                whole = copies(boosted.model.parameters())
                distributed.barrier()
                report = boosted.booster.report(boosted.model)
                distributed.barrier()
                print(num_copies, report.rank_read_bytes - before.rank_read_bytes,
                      report.rank_sent_bytes - before.rank_sent_bytes,
                      sum(chunk_bytes(boosted.model)), report.num_chunks, len(whole))  # fmt: skip
                before = report


def saves(directory: Path) -> None:
    """After two steps, with one copy and with two; then, from there, two steps more."""
    with _over_the_group() as rank:
        for name, case in SAVED.items():
            for num_copies in (1, 2):
                boosted = boost(copied(case, num_copies))
                booster, model, optimizer = boosted
                for step in range(2):
                    boosted.step(case.loss(model, step, 0))
                path = directory / f"{name} {num_copies}"
                booster.save(path, model, optimizer, use_async=num_copies == 2)
                for step in range(2, 4):
                    boosted.step(case.loss(model, step, 0))
                torch.save(copies(model.parameters()), f"{path}.{rank}.pt")
                booster.load(path, model, optimizer)
                for step in range(2, 4):
                    boosted.step(case.loss(model, step, 0))
                torch.save(copies(model.parameters()), f"{path} again.{rank}.pt")
                distributed.barrier()


def goes_on(directory: Path) -> None:
    """From each of those, with one copy and with two; or alone."""
    size = int(os.environ["WORLD_SIZE"])
    with _over_the_group() as rank:
        for name, case in SAVED.items():
            for saved in (1, 2):
                for num_copies in (1, 2) if size > 1 else (1,):
                    boosted = boost(copied(case, num_copies))
                    booster, model, optimizer = boosted
                    booster.load(directory / f"{name} {saved}", model, optimizer)
                    for step in range(2, 4):
                        boosted.step(case.loss(model, step, 0))
                    found = copies(model.parameters())
                    torch.save(
                        found, directory / f"{name} {saved} on {size}, {num_copies}.{rank}.pt"
                    )
                    distributed.barrier()


def one_dies(directory: Path) -> None:
    """Rank 1 is killed in backward; the others go on to read."""
    lose_rank_1(directory, copied(TIGHT, 2))


def _said(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "nothing was raised"


def refused(_: Path) -> None:
    """Over the group, where weights are whole unless zero_stage=3 is given."""
    with _over_the_group() as rank:
        for stage in ("auto", 1, 2):
            print(_said(lambda stage=stage: boost(TOWER, zero_stage=stage, extra_dp_size=2)))  # type: ignore[misc]
        print(_said(lambda: boost(TOWER, zero_stage=3, extra_dp_size=3)))
        print(_said(lambda: boost(TOWER, zero_stage=3, extra_dp_size=1 + rank % 2)))
        torchs = replace(TOWER, optimizer=lambda params: torch.optim.Adagrad(params))
        print(_said(lambda: boost(torchs, zero_stage=3, extra_dp_size=2)))


def in_common(_: Path) -> None:
    """Ranks that share memory keep a copy on each machine."""
    with _of_rank():
        for stage in ("auto", 3):
            print(_said(lambda stage=stage: boost(TOWER, zero_stage=stage, extra_dp_size=2)))  # type: ignore[misc]


def on_machines(directory: Path) -> None:
    """Of two with two ranks each: copies in common memory, and in parts."""
    with _of_rank() as rank:
        for stage in ("auto", 1, 3):
            boosted = boost(TIGHT, zero_stage=stage, extra_dp_size=2, placement_policy="cpu")
            for step in range(2):
                boosted.step(_tower_loss(boosted.model, 10 * step + rank, rank))
            report = boosted.booster.report(boosted.model)
            torch.save(copies(boosted.model.parameters()), directory / f"{stage}.{rank}.pt")
            distributed.barrier()
            used = sum(chunk_bytes(boosted.model))
            print(report.zero_stage, report.rank_shared_bytes > 0, report.rank_shard_bytes / used)
        for stage, num_copies in (("auto", 4), (2, 2)):
            print(_said(lambda: boost(TOWER, zero_stage=stage, extra_dp_size=num_copies)))  # noqa: B023


def one_process(directory: Path) -> None:
    """on_machines(), of one."""
    boosted = boost(TIGHT)
    for step in range(2):
        for rank in range(SIZE):
            loss = _tower_loss(boosted.model, 10 * step + rank, rank) / SIZE
            boosted.booster.backward(loss, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    torch.save(copies(boosted.model.parameters()), directory / "one.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
