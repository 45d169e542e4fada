"""Runs of a pipeline's ranks: all succeed, or each learns which rank has failed and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from castor.distributed.parallel_groups import BETWEEN_PASSES
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.errors import Error

FOR_THE_LOSS = frozenset(
    {"labels", "shift_labels", "next_sentence_label", "start_positions", "end_positions"}
)
"""Arguments from which a model computes its loss."""
OF_THE_LAST_STAGE = FOR_THE_LOSS | {"num_items_in_batch"}
"""Arguments that only the last stage uses."""

Found = TypeVar("Found")


def run_collectively(
    parallel: PipelineParallel, model: nn.Module, work: Callable[[], Found]
) -> list[Found]:
    """Runs this rank's share of a pass through all stages. Collective.

    Args:
        parallel: The stages, whose ranks make the same call.
        model: The model that `work` calls.
        work: This rank's share of the pass; returns a picklable value.

    Returns:
        The value of each rank's `work`, in rank order.

    Raises:
        Error: A rank with another stage is gone or could not go on, so this one cannot either.
        Exception: `work` raised it on this rank.
    """
    failure: Exception | None = None
    own: Found | None = None
    lost = False
    link = parallel.ranks.device_link
    parallel.running = True
    # Also while ranks tell each other of the outcome: this one's device may still receive.
    with link.expecting() if link else nullcontext():
        try:
            with _own_random_numbers(parallel) if model.training else nullcontext():
                own = work()
            if link:
                link.check()
        except Exception as error:
            failure = _unwrapped(error)
            lost = _lost_a_rank(failure) or bool(link and link.lost)
            parallel.disconnect()  # others wait for sends that will not come
        finally:
            parallel.running = False
        try:
            return _of_all(parallel, own, failure, lost=lost)  # type: ignore[return-value]
        except Exception:
            if link:
                link.fail()  # its device may wait for ranks that have failed
            raise


def _of_all(
    parallel: PipelineParallel, own: Found | None, failure: Exception | None, *, lost: bool
) -> list[Found | None]:
    ranks = parallel.ranks
    said = None if failure is None or lost else f"{type(failure).__name__}: {failure}"
    try:
        # Not all_gather_object, which raises where the device's link has ended: the others say why.
        everyone = [told for _, told in ranks.all_gather_places(BETWEEN_PASSES, (own, said, lost))]
    except Error as error:
        parallel.broken = str(error)
        if failure is not None and not lost:
            raise failure from error
        raise
    causes = [
        f"rank {rank} of {ranks.size} of the pipeline has failed: {said}"
        for rank, (_, said, _) in enumerate(everyone)
        if said is not None
    ]
    if not causes and not any(lost for _, _, lost in everyone):
        return [one for one, _, _ in everyone]
    why = "; ".join(causes) or f"ranks of the pipeline have lost each other: {failure}"
    parallel.broken = why
    if failure is not None and not lost:
        raise failure
    raise Error(f"{why}; mend that, and start all again from the last checkpoint") from failure


@contextmanager
def _own_random_numbers(parallel: PipelineParallel) -> Iterator[None]:
    """Encloses a pass with a per-rank RNG state for dropout; the common state stays equal."""
    seed = int(torch.randint(2**62, ()))
    before = parallel.generators.states()
    parallel.generators.seed(seed + parallel.ranks.rank)
    try:
        yield
    finally:
        parallel.generators.restore(before)


def _unwrapped(error: Exception) -> Exception:
    """Returns the error that torch's stages have wrapped."""
    while isinstance(error.__cause__, Exception) and "failed to run" in str(error).lower():
        error = error.__cause__
    return error


def _lost_a_rank(error: Exception) -> bool:
    """Whether the error is a failed connection of gloo."""
    said = str(error)
    return type(error) is RuntimeError and ("gloo" in said or "pair closure" in said)
