"""A model of which one process has some stages: what stands where the others' modules were.

The model's own forward runs on every stage, from its inputs to its outputs. Of the row of blocks,
the one before a stage's first gives the hidden states that were received, the one behind its last
keeps those that are to be sent; what is computed before and behind of placeholders goes nowhere.
"""

from __future__ import annotations

import bisect
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from castor.distributed.pipeline_plan import PipelinePlan
from castor.distributed.placeholders import (
    BIAS,
    PlaceholderBiasedBlock,
    PlaceholderBlock,
    PlaceholderEnd,
    PlaceholderImages,
)
from castor.distributed.stage_transfer import SendHidden, StageTransfer


@dataclass(frozen=True, eq=False)
class Place:
    """A module's place in the model, and its stage."""

    parent: nn.Module
    name: str
    module: nn.Module
    other: nn.Module
    """Placeholder at this place on other stages."""
    stage: int
    common: nn.Module | None = None
    """The part of it that other stages have as well ..."""
    common_to: tuple[int, ...] = ()
    """... which are these."""

    def params(self) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
        """Its parameters, and the stages that have each."""
        common = set(self.common.parameters()) if self.common else set()
        for param in self.module.parameters():
            yield param, (self.stage, *(self.common_to if param in common else ()))

    def put(self, module: nn.Module) -> None:
        """Not as an attribute: a boosted model refuses those."""
        self.parent._modules[self.name] = module


class StageModules:
    """The stages of a model that this process has. Holds no module of the model."""

    def __init__(
        self,
        places: Sequence[Place],
        own: Sequence[int],
        cuts: Sequence[int],
        transfer: StageTransfer,
    ) -> None:
        """Puts placeholders where modules of other processes' stages are.

        Args:
            places: All that belong to a stage.
            own: Numbers of this process's.
            cuts: The first block of each stage of the model, and the number of blocks.
            transfer: Of the placeholders.
        """
        self.own = tuple(own)
        self.cuts = list(cuts)
        self.transfer = transfer
        for place in places:
            if place.stage not in own:
                if isinstance(place.other, PlaceholderBiasedBlock) and set(own) & set(
                    place.common_to
                ):
                    place.other.keep_bias()
                place.put(place.other)
        # Of several stages those that do not run are out of the way meanwhile.
        self._own = [
            (weakref.ref(place.parent), weakref.ref(place.module), place.name, place.other,
             place.stage)
            for place in places
            if place.stage in own and len(own) > 1
        ]  # fmt: skip

    @property
    def own_blocks(self) -> list[range]:
        """Numbers of the blocks of each of this process's stages."""
        return [range(self.cuts[stage], self.cuts[stage + 1]) for stage in self.own]

    @contextmanager
    def running(self, stage: int) -> Iterator[StageTransfer]:
        """In it the model's forward computes one stage of this process's."""
        transfer = self.transfer
        transfer.begin, transfer.end = self.cuts[stage], self.cuts[stage + 1]
        resting = [
            Place(parent(), name, module(), other, of)  # type: ignore[arg-type]
            for parent, module, name, other, of in self._own
            if of != stage
        ]
        for place in resting:
            place.put(place.other)
        try:
            with transfer.routers.listening():
                yield transfer
        finally:
            for place in resting:
                place.put(place.module)
            transfer.received = transfer.sent = transfer.encoded = None

    @contextmanager
    def together(self, send_hidden: SendHidden) -> Iterator[None]:
        """In it the model's forward computes all of this process's stages."""
        self.transfer.send_hidden = send_hidden
        try:
            with self.transfer.routers.listening():
                yield
        finally:
            self.transfer.send_hidden = None


def places_of(
    model: nn.Module, plan: PipelinePlan, cuts: Sequence[int], transfer: StageTransfer
) -> list[Place]:
    """All modules that belong to a stage; nothing is changed.

    Args:
        model: Whole.
        plan: Of it.
        cuts: As StageModules takes them.
        transfer: For what stands where others' modules were.
    """
    embeddings = None if plan.images else model.get_input_embeddings()  # type: ignore[operator]
    places, first = [], 0
    for row in plan.rows:
        numbers = range(first, first + len(row.blocks_of_row(model)))
        stages = [bisect.bisect_right(cuts, number) - 1 for number in numbers]
        for names, stage in ((row.before, stages[0]), (row.after, stages[-1])):
            for name in names:
                parent, _, short = name.rpartition(".")
                module = model.get_submodule(name)
                other: PlaceholderEnd | PlaceholderImages
                if plan.images and names is row.before:
                    other = PlaceholderImages(transfer)
                else:
                    parts = list(module.modules())
                    embeds = any(isinstance(part, nn.Embedding) for part in parts)
                    tokens = embeddings in parts or plan.encoder is not None
                    width = module.out_features if isinstance(module, nn.Linear) else None
                    other = PlaceholderEnd(transfer, embeds=embeds, tokens=tokens, width=width)
                places.append(Place(model.get_submodule(parent), short, module, other, stage))
        places += _places_of_blocks(model, row, numbers, stages, transfer)
        first = numbers.stop
    return places


def _places_of_blocks(
    model: nn.Module,
    row: PipelinePlan,
    numbers: range,
    stages: Sequence[int],
    transfer: StageTransfer,
) -> Iterator[Place]:
    parent, blocks = model.get_submodule(row.blocks), row.blocks_of_row(model)
    for (short, block), number, stage in zip(blocks.items(), numbers, stages, strict=True):
        if not row.bias:
            in_tuples = row.in_tuples and not _gives_tensor(block)
            other = PlaceholderBlock(number, transfer, in_tuples=in_tuples, first=numbers.start)
            yield Place(parent, short, block, other, stage)
            continue
        first = next(iter(blocks.values()))
        biased = PlaceholderBiasedBlock(
            number, transfer, numbers, block=block, first=first, path=row.bias
        )
        if block is first:
            bias, later = first.get_submodule(f"{row.bias}.{BIAS}"), {*stages} - {stage}
            yield Place(parent, short, block, biased, stage, bias, tuple(later))
        else:
            yield Place(parent, short, block, biased, stage)


def _gives_tensor(block: nn.Module) -> bool:
    """Whether its forward says so, which differs between releases of transformers."""
    return inspect.signature(type(block).forward).return_annotation in (
        torch.Tensor,
        "torch.Tensor",
    )
