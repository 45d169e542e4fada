"""Predicts activations in an estimate: recomputed blocks, and logits in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from castor.activations.block_profile import BlockProfile, BlockRun, Decided, Tiles
from castor.activations.block_profile import StepPosition as Now
from castor.activations.output_embedding import output_embedding, rows_per_tile
from castor.activations.recompute import Recomputation
from castor.activations.tiles import tile_mlps
from castor.config import TileLogits
from castor.config.event_names import BACKWARD_ENTER, FORWARD_ENTER
from castor.estimate.metatrace import TraceEvent
from castor.runtime.blocks import find_blocks, has_switch
from castor.runtime.spec import ModelSpec

_FLOAT32 = 4


class RecomputedBlocks:
    """Recomputes every block of a model in backward, and profiles the passes of a recorded step."""

    def __init__(self, model: nn.Module) -> None:
        """Turns the blocks' gradient checkpointing on.

        Raises:
            ValueError: The model has no layers that transformers can checkpoint.
        """
        blocks = {name: block for name, block in find_blocks(model).items() if has_switch(block)}
        if not blocks:
            raise ValueError(
                f"{type(model).__name__} has no layers that transformers can checkpoint; use "
                "--activations keep"
            )
        self.num_blocks = len(blocks)
        self.tiles = Tiles()
        self.tiled = tile_mlps(
            blocks, self.tiles, lambda m, _, forward: setattr(m, "forward", forward)
        )
        """MLPs that run in as many pieces as `tiles` says."""
        self._profile: BlockProfile | None = None
        self._blocks = list(blocks.values())
        for i, (name, block) in enumerate(blocks.items()):
            block._gradient_checkpointing_func = Recomputation(  # type: ignore[assignment]
                block, name, compared=False, auto=self, block=i
            )

        self.switch(on=True)

    def switch(self, *, on: bool) -> None:
        """Turns recomputation on or off for the steps that are recorded from now on."""
        self.on = on
        """Whether blocks are recomputed."""
        for block in self._blocks:
            block.gradient_checkpointing = on  # type: ignore[assignment]

    def begin(self, now: Now) -> None:
        """Begins a profile of the step that is about to be recorded."""
        self._profile = BlockProfile(now)

    def take(self) -> list[BlockRun]:
        """Returns the passes through blocks of the last step."""
        assert self._profile is not None
        return self._profile.take()

    def recomputes(self, block: int) -> bool:
        """Whether the block is recomputed, as in Decisions."""
        return block < self.num_blocks

    def decide(self, _block: int, _inputs: Iterable[Any]) -> Decided:
        """Decides as Decisions does: all blocks are recomputed."""
        return "recompute"

    @property
    def may_run_again(self) -> bool:
        """Whether a kept block may be recomputed after all, as in Decisions; here all are."""
        return True

    def offloading(self) -> AbstractContextManager[None]:
        """Offloads nothing, unlike other Decisions."""
        return nullcontext()

    def fell_short(self, tier: str) -> None:
        """Does nothing: memory does not fall short in a simulated step."""

    def open(self, block: int) -> BlockRun:
        """Opens the profile of a block's pass, as in Decisions."""
        assert self._profile is not None
        return self._profile.open(block)


class TiledLoss(Protocol):
    """A loss that computes logits in tiles of its own, in place of the model's loss."""

    def rows_at_once(self, rows: int) -> Iterator[int]:
        """Yields numbers of rows of a tile, which are tried until a step fits; at least one."""
        ...

    def num_bytes(self, rows: int, at_once: int) -> int:
        """Returns the peak bytes beside hidden states and parameters, gradients included."""
        ...


class Logits:
    """Output embedding of a model, whose logits castor computes in tiles where that pays."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._head = output_embedding(model, "auto")
        owners = [owner.module for owner in spec.modules]
        self._position = owners.index(self._head) if self._head in owners else -1

    @property
    def found(self) -> bool:
        """Whether the model has an output embedding."""
        return self._head is not None and self._position >= 0

    @property
    def head(self) -> nn.Linear | None:
        """The output embedding; None: there is none that castor can compute in tiles."""
        return self._head if self.found else None

    def rows_per_tile(self, rows: int, device_bytes: int, tile_logits: TileLogits = "auto") -> int:
        """Returns the rows of a tile, as GeminiPlugin(tile_logits=...) decides; 0: all rows."""
        if self._head is None or self._position < 0 or tile_logits is False:
            return 0
        return rows_per_tile(rows, self._head, tile_logits, device_bytes)

    def tiled(self, trace: list[TraceEvent], rows: int, rows_of_a_tile: int) -> list[TraceEvent]:
        """Returns the events of a step whose logits are computed in tiles.

        From the head's forward to the end of its backward, the bytes beside the hidden states are
        proportional to the rows of a tile. The gradients of hidden states and head are added in
        full. The head's product runs once more.

        Args:
            trace: Events of the step with all logits at once.
            rows: Rows of the logits.
            rows_of_a_tile: Rows of a tile.
        """
        head = self._head
        assert head is not None
        begin, end = self._span(trace)
        if end < begin:
            return trace
        element = head.weight.element_size()
        gradients = rows * head.in_features * element
        if head.weight.requires_grad:  # a sum in fp32, and the gradient that it is rounded to
            rounded = element if element < _FLOAT32 else 0
            gradients += (_FLOAT32 + rounded) * head.weight.numel()
        base, result = trace[begin].live_bytes, list(trace)
        for i in range(begin, end + 1):
            above = max(0, trace[i].nonmodel_bytes - base)
            tile = above * rows_of_a_tile // rows
            result[i] = replace(trace[i], nonmodel_bytes=base + tile + gradients)
        again = (2 * rows * head.weight.numel(), head.weight.numel() * element)
        result[end] = replace(result[end], work=[*trace[end].work, again])
        return result

    def replaced(self, trace: list[TraceEvent], num_bytes: int) -> list[TraceEvent]:
        """Returns the events of a step whose loss takes other bytes beside the hidden states.

        Args:
            trace: Events of the step with the model's own loss.
            num_bytes: Bytes from the head's forward to the end of its backward.
        """
        begin, end = self._span(trace)
        result = list(trace)
        for i in range(begin, end + 1):
            result[i] = replace(trace[i], nonmodel_bytes=trace[begin].live_bytes + num_bytes)
        return result

    def _span(self, trace: list[TraceEvent]) -> tuple[int, int]:
        """Returns the events that begin the head's forward and backward; (0, -1): it has none."""
        own = [i for i, event in enumerate(trace) if event.position == self._position]
        begin = next((i for i in own if trace[i].kind == FORWARD_ENTER), None)
        end = next((i for i in reversed(own) if trace[i].kind == BACKWARD_ENTER), None)
        return (0, -1) if begin is None or end is None else (begin, end)
