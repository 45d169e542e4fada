"""The modules of a process's pipeline stages, and placeholders for modules of other stages.

The model's own forward runs on every stage, from its inputs to its outputs. The placeholder before
a stage's first block returns the hidden states that were received. The one after its last block
keeps those that are to be sent. What the forward computes from other placeholders is not used.
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
    """The module around it."""
    name: str
    """Its name in the parent."""
    module: nn.Module
    """The module itself."""
    other: nn.Module
    """Placeholder at this place on other stages."""
    stage: int
    """Number of the module's stage."""
    common: nn.Module | None = None
    """Submodule that other stages have as well; None: there is none."""
    common_to: tuple[int, ...] = ()
    """Numbers of these other stages."""

    def params(self) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
        """Yields the module's parameters, each with the stages that have it."""
        common = set(self.common.parameters()) if self.common else set()
        for param in self.module.parameters():
            yield param, (self.stage, *(self.common_to if param in common else ()))

    def put(self, module: nn.Module) -> None:
        """Puts a module here, but not as an attribute, which a boosted model refuses."""
        self.parent._modules[self.name] = module


class StageModules:
    """This process's stages of a model. Holds no module of the model."""

    def __init__(
        self,
        places: Sequence[Place],
        own: Sequence[int],
        cuts: Sequence[int],
        transfer: StageTransfer,
    ) -> None:
        """Puts placeholders where modules of other processes' stages are.

        Args:
            places: Places of all modules that belong to a stage.
            own: Numbers of this process's stages.
            cuts: Number of the first block of each stage of the model, then the number of blocks.
            transfer: Stage inputs and outputs, which the placeholders use.
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
        # If there are several stages, placeholders replace the others while one runs.
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
        """Has the model's forward compute one of this process's stages."""
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
    def running_stages(self, send_hidden: SendHidden) -> Iterator[None]:
        """Has the model's forward compute all of this process's stages."""
        self.transfer.send_hidden = send_hidden
        try:
            with self.transfer.routers.listening():
                yield
        finally:
            self.transfer.send_hidden = None


def places_of(
    model: nn.Module, plan: PipelinePlan, cuts: Sequence[int], transfer: StageTransfer
) -> list[Place]:
    """Returns the places of all modules that belong to a stage; changes nothing.

    Args:
        model: The full model.
        plan: Its pipeline plan.
        cuts: First blocks of the stages; see StageModules.
        transfer: Stage inputs and outputs, which the placeholders use.
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
    """Whether a block's forward is annotated to return a tensor.

    This differs between releases of transformers.
    """
    return inspect.signature(type(block).forward).return_annotation in (
        torch.Tensor,
        "torch.Tensor",
    )
