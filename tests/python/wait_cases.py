"""Ranks that wait for one another: `python wait_cases.py NAME DIRECTORY`, once for each rank.

Patience is made short. What a scenario prints are the warnings of its rank.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import castor
import pipeline_cases
import tensor_cases
from castor.runtime import waits
from rank_cases import TOWER, _refused, _tower_loss, boost
from simulated import compute_as_asked

PATIENCE = 0.5
LATE = 8 * PATIENCE
TIMEOUT = 8


@contextmanager
def _saying(patience: float = PATIENCE) -> Iterator[None]:
    """Prints the warnings of what runs in it, each on a line."""
    waits.PATIENCE_SECONDS = patience
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    for one in said:
        print(f"{Path(one.filename).name}: {one.category.__name__}: {one.message}")


def _late() -> bool:
    """Whether this is the rank that comes late, and so it does."""
    last: bool = distributed.get_rank() == distributed.get_world_size() - 1
    time.sleep(LATE if last else 0)
    return last


def _comes_late(directory: Path, *, also_elsewhere: bool) -> None:
    castor.launch_from_torch()
    rank = distributed.get_rank()
    with _saying():
        if also_elsewhere:
            _late()
        booster, model, optimizer = boosted = boost(TOWER)
        boosted.step(_tower_loss(model, rank, rank))
        elsewhere: tuple[Callable[[], Any], ...] = (
            lambda: booster.save(directory / "run", model, optimizer),
            optimizer.state_dict,
        )
        for call in (
            *(elsewhere if also_elsewhere else ()),
            lambda: booster.backward(_tower_loss(model, rank, rank), optimizer),
            optimizer.step,
        ):
            distributed.barrier()
            _late()
            call()


def comes_late(directory: Path) -> None:
    """The last rank, to each call of all."""
    _comes_late(directory, also_elsewhere=True)


def comes_late_to_a_step(directory: Path) -> None:
    """As comes_late(), to a backward pass and the step after it alone."""
    _comes_late(directory, also_elsewhere=False)


def reads_gradients_in_backward(_: Path) -> None:
    """Where another rank is not in a backward pass: it waits before its own is over."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    booster, model, optimizer = boost(TOWER)

    model.layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: print(model.head.weight.grad.isfinite().all().item())
    )
    loss = _tower_loss(model, rank, rank)
    with _saying():
        _late()
        booster.backward(loss, optimizer)


def saves_slowly(directory: Path) -> None:
    """Rank 0 takes long to write what all have come to save."""
    castor.launch_from_torch()
    rank = distributed.get_rank()
    booster, model, optimizer = boosted = boost(TOWER, zero_stage=1)
    boosted.step(_tower_loss(model, rank, rank))
    if rank == 0:
        written = os.fsync

        def slow(descriptor: int) -> None:
            if not hasattr(slow, "waited"):
                slow.waited = time.sleep(LATE)  # type: ignore[attr-defined]
            written(descriptor)

        os.fsync = slow
    distributed.barrier()
    with _saying(LATE / 2):  # a busy machine makes ranks half a second late
        booster.save_model(model, directory / "model")
        booster.save_optimizer(optimizer, directory / "optimizer")


def never_comes(_: Path) -> None:
    """Rank 0 runs another backward where rank 1 stands in a barrier of the script's own."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank = distributed.get_rank()
    booster, model, optimizer = boosted = boost(TOWER)
    boosted.step(_tower_loss(model, rank, rank))
    with _saying():
        if rank == 0:
            print(_refused(lambda: booster.backward(_tower_loss(model, 1, 0), optimizer)))
        else:
            time.sleep(TIMEOUT + 1)
            try:
                distributed.barrier()
            except RuntimeError:
                print("the barrier has ended as well")


def divided(_: Path) -> None:
    """The last of two ranks comes late to a pass of divided layers, and to half of one."""
    castor.launch_from_torch()
    case = tensor_cases.FAMILIES["llama"]
    boosted = tensor_cases.boost(case, 2)
    batch = case.batch(0)
    with _saying():
        _late()
        loss = case.loss(boosted.model(**batch), batch)
        _late()
        boosted.booster.backward(loss, boosted.optimizer)
        _late()
        boosted.optimizer.step()


def stages(_: Path) -> None:
    """The last of two ranks comes late to a pass of stages, is slow in one, and in a call."""
    castor.launch_from_torch()
    case = pipeline_cases.DEEP["llama"]
    boosted = pipeline_cases.boost(case)

    def run(criterion: Any) -> None:
        data = pipeline_cases.batches(case, 0, 1)
        boosted.booster.execute_pipeline(data, boosted.model, criterion, boosted.optimizer)

    def slow(outputs: Any, _part: Any) -> torch.Tensor:
        time.sleep(LATE)
        loss: torch.Tensor = outputs.loss
        return loss

    run(None)
    distributed.barrier()
    with _saying():
        _late()
        run(None)
    print("slow:")
    with _saying():
        run(slow)
    if distributed.get_rank() == 1:
        layers = (m for m in boosted.model.modules() if "DecoderLayer" in type(m).__name__)
        next(layers).register_forward_pre_hook(lambda *_: time.sleep(LATE))
    print("called:")
    with _saying(), torch.no_grad():
        boosted.model(**pipeline_cases.batch(case, 0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    if sys.argv[1] != never_comes.__name__:
        distributed.barrier()
